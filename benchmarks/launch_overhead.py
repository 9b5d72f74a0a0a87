"""Host time of one attention call: in a compiled graph, as an op, and its parts.

    python benchmarks/launch_overhead.py

On a Hopper GPU: wall time per enqueued call (B1 H8 S128 D64, causal), which the GPU keeps up with, with scaled dot
product attention and flash-attn-4 beside it. Elsewhere: CPU time per call around a kernel that does nothing. A call in
a compiled graph is what a graph of 17 takes more than a graph of one. Minimum and median of interleaved batches.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch._functorch.config
import torch._inductor.config
from torch.nn.functional import scaled_dot_product_attention

from fa4_inductor.lowering.split_config import Variant
from fa4_inductor.runtime import launch
from fa4_inductor.runtime.ops import FORWARD_WITHOUT_LSE
from fa4_inductor.spec import parse_spec

CALLS, ROUNDS, LONG = 20, 60, 17
Call = Callable[[], object]
PROGRAM = parse_spec("fa4/1; aux=; sizes=0; scale=0.125; score=score; keep=kv_idx <= q_idx; empty_row=zero").text


def operands() -> tuple[torch.Tensor, ...]:
    on_gpu = torch.cuda.is_available()
    options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16} if on_gpu else {}
    return tuple(torch.zeros(1, 128, 8, 64, **options).transpose(1, 2) for _ in range(3))


def without_a_gpu(q: torch.Tensor) -> None:
    """Let launches end at a kernel that does nothing."""
    launch.current_device = lambda: None
    key = launch.PlanKey(PROGRAM, q.dtype, 64, 64, 1, q.device, False, Variant.FORWARD, True)
    launch.prepare(lambda *_: None, key)


def chain(attend: Callable[..., torch.Tensor], count: int) -> Callable[..., torch.Tensor]:
    def chained(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        for _ in range(count):
            q = attend(q, k, v)
        return q

    return torch.compile(chained, backend="inductor", dynamic=False)


def subjects(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[dict[str, Call], dict[str, tuple[str, str]]]:
    """What is timed: name -> one call; and differences: name -> (graph of many, graph of one)."""
    from fa4_inductor.runtime.direct import call_directly

    # the same graph is lowered in two ways
    torch._inductor.config.fx_graph_cache = torch._functorch.config.enable_autograd_cache = False
    arguments = ([], PROGRAM, [], "cute")

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return FORWARD_WITHOUT_LSE(q, k, v, *arguments)

    def again(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return FORWARD_WITHOUT_LSE(q, k, v, *arguments)  # not `attend`, whose graphs Dynamo would find

    def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return scaled_dot_product_attention(q, k, v, is_causal=True)

    graphs: dict[str, Callable[..., torch.Tensor]] = {}
    timed: dict[str, Call] = {
        "op": lambda: attend(q, k, v),
        "implementation": lambda: launch.forward_without_lse(q, k, v, *arguments),
    }
    functions = {"ours through the dispatcher": attend, "ours": again}
    if torch.cuda.is_available():
        functions["sdpa"] = sdpa
    for name, function in functions.items():
        if name == "ours":
            call_directly()
        for count in (1, LONG):
            graphs[f"{name} x {count}"] = graph = chain(function, count)
            graph(q, k, v)
    timed |= {name: lambda g=graph: g(q, k, v) for name, graph in graphs.items()}
    if torch.cuda.is_available():
        timed |= {"sdpa": lambda: sdpa(q, k, v), **only_on_gpu(q, k, v)}
    kinds = dict.fromkeys(name.rsplit(" x ", 1)[0] for name in graphs)
    return timed, {f"{kind}, in a compiled graph": (f"{kind} x {LONG}", f"{kind} x 1") for kind in kinds}


def only_on_gpu(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> dict[str, Call]:
    launch.forward_without_lse(q, k, v, [], PROGRAM, [], "cute")
    plan = next(plan for plan in launch._plans.values() if plan is not None)
    out = torch.empty_like(q)
    timed: dict[str, Call] = {"the kernel itself": lambda: plan.kernel(q, k, v, out, None, None, 0.125, None, None)}
    try:
        from flash_attn.cute import flash_attn_func
    except ImportError:
        return timed
    shown = [t.transpose(1, 2) for t in (q, k, v)]
    return timed | {"flash-attn-4": lambda: flash_attn_func(*shown, causal=True)}


def microseconds(timed: dict[str, Call]) -> dict[str, list[float]]:
    """Per call of each subject, one figure per round."""
    on_gpu = torch.cuda.is_available()
    clock = time.perf_counter if on_gpu else time.thread_time
    figures: dict[str, list[float]] = {name: [] for name in timed}
    for _ in range(ROUNDS):
        for name, call in timed.items():
            call()
            if on_gpu:
                torch.cuda.synchronize()
            begin = clock()
            for _ in range(CALLS):
                call()
            figures[name].append((clock() - begin) / CALLS * 1e6)
    return figures


@torch.no_grad()
def main() -> int:
    q, k, v = operands()
    if not torch.cuda.is_available():
        without_a_gpu(q)
    timed, differences = subjects(q, k, v)
    figures = microseconds(timed)
    for name, (many, one) in differences.items():
        figures[name] = [(a - b) / (LONG - 1) for a, b in zip(figures.pop(many), figures.pop(one))]
    for name, values in figures.items():
        print(f"{name:50} min {min(values):6.2f} us  median {statistics.median(values):6.2f} us")
    return 0


if __name__ == "__main__":
    sys.exit(main())
