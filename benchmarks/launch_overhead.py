"""Host time of one launch, without a GPU: the op, its implementation and its parts, around a kernel that does nothing.

    python benchmarks/launch_overhead.py

Microseconds of CPU time per call, minimum and median of interleaved batches. The launch of the kernel itself (tvm-ffi)
is not in it.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
CALLS, ROUNDS = 200, 40


def subjects() -> dict[str, Callable[[], object]]:
    """What is timed: name -> one call."""
    import torch

    from fa4_inductor.runtime import launch, ops
    from fa4_inductor.spec import parse_spec

    torch.cuda.current_device = lambda: None  # type: ignore[assignment]
    program = parse_spec("fa4/1; aux=; sizes=0; scale=0.125; score=score; keep=kv_idx <= q_idx; empty_row=zero").text
    q, k, v = (torch.zeros(1, 64, 8, 64).transpose(1, 2) for _ in range(3))
    out = torch.empty(1, 64, 8, 64)
    plan = launch.Plan(lambda *_: None, parse_spec(program), 0.125, False, False)
    launch._checked[program, q.shape, k.shape, v.shape, q.dtype, q.device, False] = plan
    arguments = (q, k, v, [], program, [], "cute")
    op = torch.ops.fa4_inductor._forward_without_lse.default
    assert ops.NAMESPACE in op.name()
    return {
        "op": lambda: op(*arguments),
        "implementation": lambda: launch.forward_without_lse(*arguments),
        "look-up": lambda: launch._checked.get((program, q.shape, k.shape, v.shape, q.dtype, q.device, False)),
        "alignment": lambda: (launch.aligned(q), launch.aligned(k), launch.aligned(v)),
        "empty tensor": lambda: q.new_empty((0,), dtype=torch.float32),
        "transpose": lambda: out.transpose(1, 2),
    }


def main() -> int:
    import torch

    timed = subjects()
    batches: dict[str, list[float]] = {name: [] for name in timed}
    with torch.no_grad():
        for _ in range(ROUNDS):
            for name, call in timed.items():
                begin = time.thread_time()
                for _ in range(CALLS):
                    call()
                batches[name].append((time.thread_time() - begin) / CALLS * 1e6)
    for name, values in batches.items():
        print(f"{name:16} min {min(values):6.2f} us  median {statistics.median(values):6.2f} us")
    return 0


if __name__ == "__main__":
    sys.exit(main())
