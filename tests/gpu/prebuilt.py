"""Kernels built ahead on a machine without a GPU: a folder of object files, named by what they were built from.

FA4_PREBUILT names the folder. `forward` loads from it if the kernel is there and builds otherwise; `python
tests/gpu/prebuilt.py FOLDER` fills it for the sweep.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, os.path.dirname(__file__))

import fwd_cases as cases
from programs import dense_bytes

_SOURCES = Path(__file__).parents[2] / "fa4_inductor" / "kernels" / "cute"


def _fingerprint(parts: Any) -> str:
    digest = hashlib.sha256(repr(parts).encode())
    for folder in (_SOURCES, Path(__file__).parents[1] / "compile" / "programs"):
        for path in sorted(folder.glob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:24]


def resolve_config(name: str, d: int, dv: int, overrides: Any, long_q: bool = False) -> Any:
    from fa4_inductor.lowering.config_table import MAX_BOUND, select_config
    from fa4_inductor.lowering.split_config import select_split_config

    program = cases.load_program(name)
    overrides = dict(overrides)
    if "split" in overrides:
        split = select_split_config(d, dv, overrides["split"])
        assert split is not None
        return dataclasses.replace(split, **overrides)
    config = select_config(
        d, dv, len(getattr(program, "AUX", ())),
        windowed="window" in name, long_q=long_q, dense_bytes=dense_bytes(program),
        bounded=program.BOUND_LOG2 is not None and program.BOUND_LOG2 <= MAX_BOUND * 1.4427,
    )  # fmt: skip
    assert config is not None
    return dataclasses.replace(config, **overrides)


def build(name: str, dtype: str, d: int, dv: int, group: int, need_lse: bool, config: Any) -> Any:
    from fa4_inductor.kernels.cute.build import build_forward, build_split
    from fa4_inductor.lowering.split_config import SplitConfig

    program = cases.load_program(name)
    compile_ = build_split if isinstance(config, SplitConfig) else build_forward
    return compile_(
        program, dtype, d, dv, group, aux=getattr(program, "AUX", ()), num_sizes=getattr(program, "NUM_SIZES", 0),
        need_lse=need_lse, config=config,
    )  # fmt: skip


def forward(name: str, dtype: str, d: int, dv: int, group: int, need_lse: bool, config: Any) -> Any:
    """The compiled kernel, from the prebuilt folder where possible."""
    folder = os.environ.get("FA4_PREBUILT", "")
    path = Path(folder) / f"{_fingerprint((name, dtype, d, dv, group, need_lse, config))}.o"
    if folder and path.exists():
        from cutlass.cute.runtime import load_module

        return load_module(str(path), enable_tvm_ffi=True).forward
    return build(name, dtype, d, dv, group, need_lse, config)


def export(folder: str, name: str, dtype: str, d: int, dv: int, group: int, need_lse: bool, config: Any) -> Path:
    """Build one kernel into the folder unless it is there."""
    path = Path(folder) / f"{_fingerprint((name, dtype, d, dv, group, need_lse, config))}.o"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        compiled = build(name, dtype, d, dv, group, need_lse, config)
        partial = path.with_suffix(".partial.o")
        compiled.export_to_c(str(partial), function_name="forward")
        partial.rename(path)
    return path


def _export_job(args: tuple[str, Any]) -> str:
    folder, (name, dtype, d, dv, group, need_lse, overrides, *long_q) = args
    config = resolve_config(name, d, dv, overrides, *long_q)
    return str(export(folder, name, dtype, d, dv, group, need_lse, config))


def export_all(folder: str, jobs: list[Any], workers: int = 2) -> list[str]:
    """Build all jobs in parallel processes, for sm_90a whatever machine this is."""
    os.environ["CUTE_DSL_ARCH"] = "sm_90a"
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        return list(pool.map(_export_job, [(folder, job) for job in jobs]))


if __name__ == "__main__":
    import fwd_sweep

    jobs = fwd_sweep.jobs() + fwd_sweep.split_jobs()
    print(len(export_all(sys.argv[1], jobs)), "kernels in", sys.argv[1])
