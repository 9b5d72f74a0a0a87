"""`python -m fa4_inductor doctor` and `python -m fa4_inductor explain --model llama` (installed: `fa4 doctor`)."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from . import __version__, collect_env

DTYPES = ("float32", "bfloat16", "float16")


def doctor(as_json: bool) -> int:
    """Prints the findings of `collect_env`; 0 when nothing needed is missing, else 1."""
    checks = collect_env.collect()
    if as_json:
        print(collect_env.as_json(checks))
        return int(not collect_env.is_fine(checks))
    signs = {collect_env.OK: "ok", collect_env.NOTE: "note", collect_env.MISSING: "MISSING"}
    width = max(len(check.name) for check in checks)
    print(f"fa4_inductor {__version__}")
    for check in checks:
        print(f"  {signs[check.status]:8} {check.name:{width}}  {check.value}")
        if check.remedy:
            print(f"  {'':8} {'':{width}}  -> {check.remedy}")
    if collect_env.is_fine(checks):
        print("Nothing that is needed on this machine is missing.")
        return 0
    print("Something needed is missing: see the lines marked MISSING. Models run all the same, without our kernel.")
    return 1


def explain(args: argparse.Namespace) -> int:
    """Builds the model with random weights and prints what the backend makes of each attention in it."""
    try:
        import torch
        import transformers  # noqa: F401 - asked for here, for a message that says what to do
    except ImportError as error:
        print(f"explain needs {error.name}: pip install {error.name}", file=sys.stderr)
        return 1
    import fa4_inductor

    from . import model_zoo

    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    dtype = getattr(torch, args.dtype or ("bfloat16" if device == "cuda" else "float32"))
    size = "bench" if args.full_size else "tiny"
    try:
        case = model_zoo.build(args.model, args.attn, size=size, dtype=dtype, device=device)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    with torch.no_grad():
        report = fa4_inductor.explain(case.model, **case.inputs)
    if args.json:
        head = {"model": args.model, "attn": args.attn, "sites_expected": case.sites}
        print(json.dumps(head | report.to_dict(), indent=2))
    else:
        from rich.console import Console

        Console(width=None if sys.stdout.isatty() else 140).print(report.table())
    return 0


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="fa4_inductor", description="Attention in torch.compile as one kernel.")
    top.add_argument("--version", action="version", version=__version__)
    commands = top.add_subparsers(dest="command", required=True)
    check = commands.add_parser("doctor", help="what is installed, what is missing, and what to do about it")
    check.add_argument("--json", action="store_true")
    show = commands.add_parser("explain", help="what becomes of each attention of a Hugging Face model")
    show.add_argument("--model", default="llama", help="a config name; its weights are random")
    show.add_argument("--attn", default="eager", choices=("eager", "sdpa"), help="the model's attn_implementation")
    show.add_argument("--full-size", action="store_true", help="the benchmark's size instead of a tiny one")
    show.add_argument("--device", help="default: cuda where there is one")
    show.add_argument("--dtype", choices=DTYPES, help="default: bfloat16 on a GPU, float32 on a CPU")
    show.add_argument("--json", action="store_true")
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes: 0 fine, 1 something needed is missing, 2 wrong usage."""
    args = parser().parse_args(argv)
    return doctor(args.json) if args.command == "doctor" else explain(args)


if __name__ == "__main__":
    sys.exit(main())
