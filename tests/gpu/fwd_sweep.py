"""Random sweep of the kernels against fp32, several processes at once because each program compiles for seconds.

Run as a script: python tests/gpu/fwd_sweep.py --workers 8 --per-job 10
"""

from __future__ import annotations

import argparse
import random
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

Job = tuple[str, str, int, int, int, bool, tuple[tuple[str, object], ...]]

_NAMES = (
    "plain", "causal", "window", "softcap_causal", "alibi_causal", "padding", "dense_mask", "dense_bias", "t5_table",
    "sink_window", "document_causal", "padding_causal", "distance_table",
)  # fmt: skip


def jobs() -> list[Job]:
    """(program, dtype, head_dim, head_dim_v, group, need_lse, config overrides) of every kernel to build."""
    table: list[Job] = []
    for d in (64, 80, 96, 128, 192, 256):
        table.append(("plain", "bfloat16", d, d, 1, True, ()))
        table.append(("causal", "float16", d, d, 2, True, ()))
    for i, name in enumerate(_NAMES[2:]):
        table.append((name, "bfloat16", 128, 128, 4, True, ()))
        table.append((name, "float16" if i % 2 else "bfloat16", 64, 64, 1, i % 3 == 0, ()))
    table.append(("plain", "bfloat16", 192, 128, 1, True, ()))
    table.append(("causal", "bfloat16", 64, 128, 1, True, ()))
    table.append(("causal", "bfloat16", 128, 64, 3, False, ()))
    table.append(("padding", "bfloat16", 80, 80, 1, True, ()))
    for name in ("tma_bias", "tma_mask", "tma_bias_mask_causal", "tma_bias_wide_causal"):
        for i, d in enumerate((64, 128, 256)):
            table.append((name, "float16" if i == 1 else "bfloat16", d, d, 1 + i, True, ()))
    table.append(("tma_bias", "bfloat16", 80, 80, 1, True, ()))
    table.append(("tma_bias", "bfloat16", 192, 128, 1, True, ()))
    table.append(("sink_window", "bfloat16", 256, 256, 8, True, ()))
    table.append(("causal", "bfloat16", 128, 128, 1, True, (("optimistic_max", False),)))
    table.append(("causal", "bfloat16", 64, 64, 2, True, (("num_consumers", 3), ("num_stages", 2))))
    table.append(("causal", "bfloat16", 128, 128, 1, True, (("num_consumers", 1), ("tile_n", 64))))
    return table


def split_jobs() -> list[Job]:
    """The same of the split-KV kernel, which has no dense tiles."""
    table: list[Job] = []
    for i, name in enumerate((*_NAMES, "offset_causal", "cache_positions")):
        kind, other = ("float16", "bfloat16") if i % 2 else ("bfloat16", "float16")
        table.append((name, kind, 128, 128, 4, i % 3 != 0, (("split", True),)))
        table.append((name, other, 64, 64, 1 + i % 3, i % 3 == 0, (("split", i % 4 < 2),)))
    for i, d in enumerate((64, 80, 96, 128, 192, 256)):
        table.append(("plain", "bfloat16", d, d, 8, True, (("split", True),)))
        table.append(("offset_causal", "bfloat16", d, d, 1 + i, True, (("split", False),)))
    for dims in ((192, 128), (64, 128), (128, 256), (80, 64)):
        table.append(("window", "bfloat16", *dims, 2, True, (("split", True),)))
    table.append(("causal", "bfloat16", 128, 128, 48, True, (("split", True),)))
    return table


def run_job(job: Job, count: int, seed: int) -> tuple[Job, int, list[str], float]:
    """Build one kernel and check it on `count` random shapes; returns the failures."""
    import fwd_cases as cases
    import prebuilt
    import torch

    name, dtype, d, dv, group, need_lse, overrides = job
    torch.backends.cuda.matmul.allow_tf32 = False
    rng = random.Random(f"{seed} {job}")
    torch.manual_seed(rng.randrange(1 << 30))
    failures: list[str] = []
    started = time.time()
    try:
        config = prebuilt.resolve_config(name, d, dv, overrides)
        compiled = prebuilt.forward(name, dtype, d, dv, group, need_lse, config)
        built = time.time() - started
        for _ in range(count):
            x, wrong = cases.random_problem(compiled, config, name, rng, dtype, (d, dv), group, need_lse)
            if wrong:
                shapes = f"q{tuple(x.q.shape)} k{tuple(x.k.shape)} sizes{x.sizes} strides{x.q.stride()} {x.k.stride()}"
                failures.append(f"{wrong} at {shapes}")
    except Exception:
        return job, count, [traceback.format_exc()[-1500:]], time.time() - started
    return job, count, failures, built


def sweep(
    table: list[Any], workers: int, per_job: int, seed: int, run: Callable[..., Any] = run_job
) -> tuple[int, list[str]]:
    """Run these jobs; returns (combinations checked, failures). run: as `run_job`."""
    checked, failures = 0, []
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        for job, count, wrong, built in pool.map(run, table, [per_job] * len(table), [seed] * len(table)):
            checked += count
            failures += [f"{job}: {text}" for text in wrong]
            print(f"{'FAIL' if wrong else 'ok':4s} {job} build {built:.1f}s {wrong[:1]}", flush=True)
    return checked, failures


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--per-job", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kernel", choices=("forward", "split"), default="forward")
    args = parser.parse_args()
    checked, failures = sweep(split_jobs() if args.kernel == "split" else jobs(), args.workers, args.per_job, args.seed)
    print(f"{checked} combinations, {len(failures)} failures")
    raise SystemExit(bool(failures))
