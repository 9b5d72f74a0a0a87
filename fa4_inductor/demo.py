"""The main job on one small unmodified Hugging Face model with random weights: `make demo`.

    python -m fa4_inductor.demo [--model llama] [--attn eager] [--device cuda] [--seqlen 4096]

Prints each attention site with its program and the implementation chosen, the error against eager and float64, and the
speed against eager and Inductor. On a Hopper GPU the sites run through the CuTe-DSL kernel, in bf16.
Exit code 1 when a site was not understood or the error is beyond its limit.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import fa4_inductor

from . import measure, model_zoo

GPU_SEQLEN = 4096  # long enough for attention to dominate, short enough for the float64 reference


def build(args: argparse.Namespace) -> model_zoo.Case:
    """The model at a size that the device can time and check in seconds."""
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    on_gpu = device.startswith("cuda")
    dtype = getattr(torch, args.dtype or ("bfloat16" if on_gpu else "float32"))
    size, seqlen = ("bench", args.seqlen or GPU_SEQLEN) if on_gpu else ("demo", args.seqlen)
    return model_zoo.build(args.model, args.attn, size, dtype, device, args.batch, seqlen)


def describe(case: model_zoo.Case) -> str:
    """One line about what is about to run."""
    weights = sum(p.numel() for p in case.model.parameters())
    first = next(iter(case.inputs.values()))
    parameter = next(case.model.parameters())
    cpu = f"CPU, {torch.get_num_threads()} threads"
    device = torch.cuda.get_device_name(parameter.device) if parameter.is_cuda else cpu
    size = " x ".join(str(n) for n in first.shape)
    dtype = str(parameter.dtype).removeprefix("torch.")
    name = f"{type(case.model).__name__}, {weights / 1e6:.0f} M weights, {case.attn_implementation} attention"
    return f"{name}, inputs {size}, {dtype} on {device}"


def errors(case: model_zoo.Case, outputs: dict[str, torch.Tensor], eager: torch.Tensor) -> tuple[Table, bool]:
    """Deviations of each backend from eager and from float64, and whether fa4 is within its limit."""
    reference = case.in_double().run()
    table = Table(title="Largest absolute error of the output", title_justify="left")
    for column in ("backend", "against eager", "against float64", "limit"):
        table.add_column(column, justify="left" if column == "backend" else "right")
    table.add_row("eager", "", f"{(eager.double() - reference).abs().max():.2e}", "")
    fine = True
    for name, output in outputs.items():
        error = measure.compare(output, eager, reference)
        against_eager = (output.double() - eager.double()).abs().max()
        limit = f"{error.bound:.2e} {'ok' if error.ok else 'EXCEEDED'}"
        table.add_row(name, f"{against_eager:.2e}", f"{error.candidate:.2e}", limit)
        fine = fine and (error.ok or name != "fa4")
    return table, fine


def speeds(case: model_zoo.Case, models: dict[str, Any], first: dict[str, float], rounds: int) -> Table:
    """Interleaved medians and first-call seconds."""
    device = next(case.model.parameters()).device
    runs = {name: functools.partial(case.run, model) for name, model in models.items()}
    times = measure.medians_ms(runs, device, rounds=rounds)
    table = Table(title=f"One forward, median of up to {rounds} interleaved calls", title_justify="left")
    table.caption = "first calls in the order shown: the first one also warms up Inductor itself"
    table.caption_justify = "left"
    for column in ("backend", "ms", "fa4 is faster by", "first call, s"):
        table.add_column(column, justify="left" if column == "backend" else "right")
    for name, ms in times.items():
        speedup = "" if name == "fa4" else f"{ms / times['fa4']:.2f} x"
        table.add_row(name, f"{ms:.2f}", speedup, f"{first[name]:.1f}" if name in first else "")
    return table


def run(args: argparse.Namespace, console: Console) -> int:
    """Explains, compiles, compares and times; the exit code."""
    case = build(args)
    console.print(describe(case))
    with torch.no_grad():
        report = fa4_inductor.explain(case.model, **case.inputs)
    console.print(report.table())
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    device = next(case.model.parameters()).device
    models = {name: torch.compile(case.model, backend=name) for name in ("inductor", "fa4")}
    first, outputs = {}, {}
    for name, model in models.items():
        console.print(f"compiling with backend={name!r} ...")
        first[name] = measure.first_call_seconds(functools.partial(case.run, model), device)
        outputs[name] = case.run(model)
    counters = torch._dynamo.utils.counters["fa4"]
    console.print("counters: " + ", ".join(f"{name} {n}" for name, n in sorted(counters.items())))
    table, fine = errors(case, outputs, case.run())
    console.print(table)
    console.print(speeds(case, {"eager": case.model, **models}, first, args.rounds))
    understood = counters["matched"] == case.sites
    if not understood:
        console.print(f"[bold red]{counters['matched']} of {case.sites} attention sites were understood")
    return int(not (fine and understood))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama", choices=model_zoo.names())
    parser.add_argument("--attn", default="eager", choices=("eager", "sdpa"))
    parser.add_argument("--device", help="default: cuda where there is one")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--batch", type=int)
    parser.add_argument("--seqlen", type=int)
    parser.add_argument("--rounds", type=int, default=9)
    console = Console(width=None if sys.stdout.isatty() else 140)
    return run(parser.parse_args(argv), console)


if __name__ == "__main__":
    sys.exit(main())
