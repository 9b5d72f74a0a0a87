"""Our side of benchmarks/kernels.py: the kernel calls of one op, and kernels built ahead on a machine without a GPU."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from kernel_cases import NATIVE, PROGRAMS, Case, make_operands
from torch import Tensor

from fa4_inductor.kernels.graph_aux import eager_aux, eager_tile_map
from fa4_inductor.lowering.prepare import prepare
from fa4_inductor.rewrite import launched_spec
from fa4_inductor.runtime import compile as compiler
from fa4_inductor.runtime import launch
from fa4_inductor.runtime import target as targets
from fa4_inductor.runtime.cache import KernelCache
from fa4_inductor.runtime.key import CompileKey

Overrides = dict[str, Any]
KernelCall = tuple[Callable[..., Any], tuple[Any, ...]]
GetKernel = Callable[[CompileKey, Any], Callable[..., Any]]
_runtime_kernel = compiler.get_kernel  # which `ours` replaces while it records


def ours(case: Case, operands: tuple[Tensor, ...], aux: tuple[Tensor, ...], overrides: Overrides) -> Callable[[], Any]:
    """The kernel calls that the op makes for these tensors, in a function that repeats them and returns the output.

    Tables and tile maps, which the graph computes once for all layers, are computed here and not timed.
    """
    calls: list[KernelCall] = []
    out = _run_op(case, operands, aux, overrides, prebuilt_kernel, calls)

    def run() -> Tensor:
        for kernel, arguments in calls:
            kernel(*arguments)
        return out

    return run


def compiled_by_us(case: Case, inputs: tuple[Tensor, ...]) -> Callable[[], Any]:
    """A native program under torch.compile with our backend; a site that is left alone is an error."""
    with mock.patch.object(compiler, "get_kernel", prebuilt_kernel):
        options = {"fa4.strict": True, "fa4.implementation": "cute"}
        function = torch.compile(NATIVE[case.program].function, backend="fa4", dynamic=False, options=options)
        function(*inputs)
    return lambda: function(*inputs)


def _run_op(
    case: Case,
    operands: tuple[Tensor, ...],
    aux: tuple[Tensor, ...],
    overrides: Overrides,
    get_kernel: GetKernel,
    calls: list[KernelCall],
) -> Tensor:
    sizes = PROGRAMS[case.program].sizes
    kernel_aux = eager_aux(prepare(case.spec), operands[0], operands[1], aux)
    with overridden(overrides):
        spec = launched_spec(case.spec, *operands)
    if spec.tile_map is not None:
        kernel_aux.append(eager_tile_map(spec, *operands[:2], kernel_aux, sizes))

    def recorded(key: CompileKey, settings: Any) -> Callable[..., Any]:
        kernel = get_kernel(key, settings)
        return lambda *arguments: (calls.append((kernel, arguments)), kernel(*arguments))

    strict = mock.patch.dict(os.environ, {"FA4_INDUCTOR_STRICT": "1"})
    with overridden(overrides), strict, mock.patch.object(compiler, "get_kernel", recorded):
        launch.clear_plans()
        out = launch.forward_without_lse(*operands, kernel_aux, spec.text, sizes, "cute")
        launch.clear_plans()
    return out


@contextlib.contextmanager
def overridden(overrides: Overrides) -> Iterator[None]:
    """The table of configurations with some fields replaced."""
    select = compiler.select_config

    def changed(*args: Any, **kwargs: Any) -> Any:
        config = select(*args, **kwargs)
        return None if config is None else dataclasses.replace(config, **overrides)

    with mock.patch.object(compiler, "select_config", changed):
        yield


def prebuilt_kernel(key: CompileKey, settings: Any) -> Callable[..., Any]:
    """The kernel from the folder that FA4_PREBUILT names, built into it if need be; without one, the runtime's."""
    folder = os.environ.get("FA4_PREBUILT", "")
    return compiler.launchable(key, _built(Path(folder), key)) if folder else _runtime_kernel(key, settings)


@functools.cache
def _built(folder: Path, key: CompileKey) -> Callable[..., Any]:
    """The object files do not depend on the Python that wrote them, so the toolchain is left out of their names."""
    portable = dataclasses.replace(key, toolchain=())
    cache = KernelCache[Any](folder.absolute(), compiler.load_artefact, compiler.save_artefact)
    return cache.get(portable.digest(), portable.describe(), lambda: compiler.build(key))


def keys_of(case: Case, overrides: Overrides) -> list[CompileKey]:
    """The kernels that the case launches on sm_90a, found without a GPU and without building any."""
    keys: list[CompileKey] = []

    def get_kernel(key: CompileKey, settings: Any) -> Callable[..., Any]:
        keys.append(key)
        return lambda *arguments: None

    hopper = targets.target_for("cuda", "sm_90a")
    with (
        mock.patch.object(targets, "target_for", lambda device: hopper),
        mock.patch.object(launch, "_DEVICES", ("meta",)),
        mock.patch.object(launch, "current_device", lambda: None),
    ):
        aux = PROGRAMS[case.program].make_aux(case, "meta")
        _run_op(case, make_operands(case, "meta"), aux, overrides, get_kernel, [])
    return keys


def _export_job(job: tuple[str, CompileKey]) -> None:
    _built(Path(job[0]), job[1])


def export(folder: str, cases: list[Case], variants: list[Overrides], workers: int) -> int:
    """Build the kernels of the cases into `folder`, in several processes; returns how many there are."""
    os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    keys: dict[CompileKey, None] = {}
    for case in cases:
        if case.program not in NATIVE:
            for measured in filter(None, (case, case.baseline())):
                for overrides in variants if measured is case else [{}]:
                    keys.update(dict.fromkeys(keys_of(measured, overrides)))
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        list(pool.map(_export_job, [(folder, key) for key in keys]))
    return len(keys)
