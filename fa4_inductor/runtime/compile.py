"""CompileKey -> kernel: emit the program, compile it with CuTe-DSL, keep it in the caches. Imports cutlass lazily.

Nothing here needs a GPU: the architecture comes from the key. Whatever goes wrong in the toolchain, from a missing
package to an error inside its compiler, becomes `KernelUnavailable`, which names the versions found and needed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import json
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from fa4_inductor import log
from fa4_inductor.analysis import facts
from fa4_inductor.errors import KernelUnavailable
from fa4_inductor.lowering.aux_layout import column_loads, dense_bytes, dense_loads, streamed_slots, table_loads
from fa4_inductor.lowering.backward_config import backward_tile_m
from fa4_inductor.lowering.config import KernelConfig
from fa4_inductor.lowering.config_table import MAX_BOUND, select_config
from fa4_inductor.lowering.emit_program import emit_program, emit_tile_test, write_program
from fa4_inductor.lowering.split_config import SPLIT_VARIANTS, SplitConfig, Variant, select_split_config
from fa4_inductor.runtime.cache import KernelCache
from fa4_inductor.runtime.key import CompileKey, toolchain_versions
from fa4_inductor.runtime.target import Target
from fa4_inductor.settings import Settings
from fa4_inductor.spec import AttentionSpec, EmptyRow, parse_spec
from fa4_inductor.spec.expr import Expr, const, score

Kernel = Callable[..., Any]
NEEDS = "nvidia-cutlass-dsl 4.8 and apache-tvm-ffi"
_SYMBOL = "fa4_forward"
_SPLIT, _TILE_MAP, _BACKWARD = "split", "tile_map", "backward"
_CLAIM_COUNTER = ("int32", 1)  # the query tiles dealt out so far, behind the aux tensors
_DTYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16"}
# CuTe-DSL keeps the module under construction in process-wide state: two threads compiling at once crash the process.
_compile_lock = threading.Lock()
_failures: dict[str, str] = {}
_log = log.get_logger(__name__)


def forward_key(
    program: str,
    dtype: torch.dtype,
    head_dim: int,
    head_dim_v: int,
    group: int,
    need_lse: bool,
    target: Target,
    *,
    variant: Variant,
    regular: bool,
) -> CompileKey:
    """The key of a forward kernel. group is Hq // Hkv.

    Args:
        variant: which of a program's kernels, by the launches' shapes (lowering.split_config).
        regular: whether the launches' aux tensors are regular (lowering.aux_layout); dense loads then come by TMA if
            their tiles fit, and if the kernel has tiles.

    Raises:
        KernelUnavailable: for a dtype, head_dim or architecture that the kernel does not cover.
    """
    if not target.is_hopper:
        raise KernelUnavailable(f"the CuTe-DSL kernel is written for sm_90a, this is {target.arch} ({target.name})")
    if dtype not in _DTYPES:
        raise KernelUnavailable(f"the CuTe-DSL kernel computes in bfloat16 and float16, not in {dtype}")
    spec = parse_spec(program)
    if spec.softmax_scale <= 0:
        raise KernelUnavailable(f"the CuTe-DSL kernel needs a positive softmax scale, this is {spec.softmax_scale}")
    loads: tuple[Expr, ...] = ()
    config: KernelConfig | SplitConfig | None
    if variant in SPLIT_VARIANTS:
        simple = spec.score is score() and facts(spec).is_full
        config = select_split_config(head_dim, head_dim_v, variant is Variant.SPLIT, simple)
    else:
        long_q = variant is Variant.LONG
        config, loads = forward_config(spec, head_dim, head_dim_v, long_q=long_q, regular=regular)
        if variant is Variant.NARROW and config is not None:
            config = dataclasses.replace(config, num_consumers=1)
    if config is None:
        raise KernelUnavailable(f"the CuTe-DSL kernel has no configuration for head dims {head_dim}, {head_dim_v}")
    sizes = (head_dim, head_dim_v, group)
    return CompileKey(
        program, _DTYPES[dtype], *sizes, need_lse, target.arch, target.sm_count, config.text,
        regular and bool(streamed_slots(spec)), bool(loads), _SPLIT if variant in SPLIT_VARIANTS else "forward",
    )  # fmt: skip


def forward_config(
    spec: AttentionSpec, head_dim: int, head_dim_v: int, *, long_q: bool, regular: bool
) -> tuple[KernelConfig | None, tuple[Expr, ...]]:
    """The configuration of a forward kernel, None where there is none, and the dense loads that come by TMA."""
    loads = dense_loads(spec) if regular else ()
    config = _config(spec, head_dim, head_dim_v, long_q, loads)
    if config is None and loads:
        return _config(spec, head_dim, head_dim_v, long_q, ()), ()
    return config, loads


def _config(
    spec: AttentionSpec, head_dim: int, head_dim_v: int, long_q: bool, loads: tuple[Expr, ...]
) -> KernelConfig | None:
    known = facts(spec)
    return select_config(
        head_dim, head_dim_v, len(spec.aux),
        windowed=known.kv_range[0] is not const(0), long_q=long_q, dense_bytes=dense_bytes(spec, loads),
        uneven=spec.tile_map is not None,
        bounded=known.score_bound is not None and known.score_bound <= MAX_BOUND,
    )  # fmt: skip


def tile_map_key(program: str, tile_m: int, tile_n: int, target: Target, *, regular: bool) -> CompileKey:
    """The key of the kernel that makes the tile map of a mask.

    Args:
        program: text of the mask (`lowering.tile_map.MapSource`). tile_m, tile_n: query rows and keys of a tile.
        regular: whether the launches' aux tensors are regular (lowering.aux_layout).

    Raises:
        KernelUnavailable: for an architecture that the kernel is not written for.
    """
    if not target.is_hopper:
        raise KernelUnavailable(f"the CuTe-DSL kernel is written for sm_90a, this is {target.arch} ({target.name})")
    config = json.dumps({"tile_m": tile_m, "tile_n": tile_n})
    spec = parse_spec(program)
    layout = regular and bool(streamed_slots(spec)), regular and bool(dense_loads(spec))
    return CompileKey(
        program, "int32", 0, 0, 0, False, target.arch, target.sm_count, config, *layout, direction=_TILE_MAP
    )


def backward_key(
    program: str,
    dtype: torch.dtype,
    head_dim: int,
    head_dim_v: int,
    group: int,
    grad_lse: bool,
    target: Target,
    *,
    deterministic: bool,
    learned: tuple[int, ...] = (),
) -> CompileKey:
    """The key of a backward kernel. grad_lse: the LSE has a gradient, too. deterministic: as in `build_backward`.
    learned: slots of the aux tensors whose gradients it computes.

    Raises:
        KernelUnavailable: for a dtype, head_dim or architecture that the kernel does not cover.
    """
    if not target.is_hopper:
        raise KernelUnavailable(f"the CuTe-DSL kernel is written for sm_90a, this is {target.arch} ({target.name})")
    tile_m = backward_tile_m(head_dim, head_dim_v, parse_spec(program), dtype, bool(learned))
    if dtype not in _DTYPES or tile_m is None:
        raise KernelUnavailable(f"the backward kernel has no configuration for {dtype}, {head_dim}, {head_dim_v}")
    sizes = (head_dim, head_dim_v, group)
    config = json.dumps({"tile_m": tile_m, "deterministic": deterministic, "learned": learned})
    arch = (target.arch, target.sm_count)
    return CompileKey(program, _DTYPES[dtype], *sizes, grad_lse, *arch, config, direction=_BACKWARD)


def needs_v_mean(spec: AttentionSpec) -> bool:
    """Whether launches of this program carry the mean of V for rows that keep no key."""
    return spec.sink is None and spec.empty_row is EmptyRow.MEAN and facts(spec).may_be_empty


def get_kernel(key: CompileKey, settings: Settings) -> Kernel:
    """The compiled kernel of `key`: from memory, disk, or the compiler.

    Raises:
        KernelUnavailable: the toolchain is missing, broken or failed on this program; asked again, it fails at once.
    """
    digest = key.digest()
    if digest in _failures:
        raise KernelUnavailable(_failures[digest])
    try:
        kernel = kernel_cache(settings).get(digest, key.describe(), lambda: build(key))
    except KernelUnavailable as error:
        _failures[digest] = str(error)
        raise
    return launchable(key, kernel)


def launchable(key: CompileKey, kernel: Kernel) -> Kernel:
    """A compiled forward kernel with the arguments that all of them have: one that deals its query tiles out gets its
    counter here, anew at each launch, since launches may overlap."""
    return functools.partial(_launch_claiming, kernel) if _claims_tiles(key) else kernel


def _launch_claiming(kernel: Kernel, *arguments: Any) -> None:
    *operands, aux, sizes = arguments
    counter = operands[0].new_zeros((1,), dtype=torch.int32)
    kernel(*operands, (*(aux or ()), counter), sizes)


def _claims_tiles(key: CompileKey) -> bool:
    return key.direction == "forward" and KernelConfig.parse(key.config).claim_tiles


def has_failed(key: CompileKey) -> bool:
    """Whether this process already failed to build the kernel."""
    return key.digest() in _failures


def kernel_cache(settings: Settings) -> KernelCache[Kernel]:
    """The process's cache for these settings."""
    return _kernel_cache(settings.cache_dir if settings.disk_cache else None)


@functools.cache
def _kernel_cache(root: Path | None) -> KernelCache[Kernel]:
    return KernelCache(root, load_artefact, save_artefact)


def build(key: CompileKey) -> Kernel:
    """Compile, without caches. Raises `KernelUnavailable` for whatever fails."""
    with _compile_lock:
        try:
            return _build(key)
        except Exception as error:
            _log.debug("kernel build failed", exc_info=True)
            message = (str(error).strip().splitlines() or ["no message"])[0]
            cause = f"the attention kernel cannot be built ({type(error).__name__}: {message})"
            raise KernelUnavailable(f"{cause}; found {_found()}, needed {NEEDS}") from error


def _build(key: CompileKey) -> Kernel:
    with _architecture(key.arch):
        from fa4_inductor.kernels.cute.build import build_forward, build_split
        from fa4_inductor.kernels.cute.bwd_build import build_backward
        from fa4_inductor.kernels.cute.tile_map import build_tile_map

        spec = parse_spec(key.program)
        module = load_program(spec, key)
        aux = tuple((a.dtype, a.ndim) for a in spec.aux)
        _log.debug("compiling %s", key)
        if _claims_tiles(key):
            aux = (*aux, _CLAIM_COUNTER)
        if key.direction == _TILE_MAP:
            return build_tile_map(module, **json.loads(key.config), aux=aux, num_sizes=spec.num_sizes)
        operands = (module, key.dtype, key.head_dim, key.head_dim_v, key.qhead_per_kvhead)
        options: dict[str, Any] = {"aux": aux, "num_sizes": spec.num_sizes}
        if key.direction == _BACKWARD:
            options |= {"grad_lse": key.need_lse, **json.loads(key.config)}
            del options["learned"]  # the program says it
            return build_backward(*operands, **options)
        options["need_lse"] = key.need_lse
        if key.direction == _SPLIT:
            return build_split(*operands, **options, config=SplitConfig.parse(key.config))
        return build_forward(*operands, **options, config=KernelConfig.parse(key.config), num_sms=key.num_sms)


def load_program(spec: AttentionSpec, key: CompileKey) -> ModuleType:
    """The program of `spec`, imported from a file private to this process, because CuTe-DSL reads source."""
    digest = key.digest()
    path = write_program(_program_text(spec, key), digest, Path(_program_directory()))
    module_spec = importlib.util.spec_from_file_location(path.stem, path)
    assert module_spec is not None and module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[path.stem] = module
    module_spec.loader.exec_module(module)
    return module


def _program_text(spec: AttentionSpec, key: CompileKey) -> str:
    unit_stride = streamed_slots(spec) if key.regular_aux else ()
    loads = dense_loads(spec) if key.dense_aux else ()
    if key.direction == _TILE_MAP:
        return emit_tile_test(spec, facts(spec), dense=loads, unit_stride=unit_stride)
    if key.direction == _BACKWARD:
        learned = tuple(json.loads(key.config)["learned"])
        return emit_program(spec, facts(spec), need_lse=True, gradient=True, learned=learned)
    tiles, of_kernel = spec.tile_map, None
    if key.direction != _SPLIT:
        config = KernelConfig.parse(key.config)
        of_kernel = config.tile_m, config.tile_n
    return emit_program(
        spec,
        facts(spec),
        need_lse=key.need_lse,
        dense=loads,
        tables=table_loads(spec) if key.regular_aux and key.direction != _SPLIT else (),
        columns=column_loads(spec) if key.regular_aux and key.direction != _SPLIT else (),
        unit_stride=unit_stride,
        use_tile_map=tiles is not None and (tiles.tile_m, tiles.tile_n) == of_kernel,
        accumulate=key.dense_aux and key.dtype == "bfloat16",
    )


@functools.cache
def _program_directory() -> str:
    """Kept to the end of the process: tracebacks and the DSL read the sources again."""
    directory = tempfile.TemporaryDirectory(prefix="fa4_programs_")
    _keep_alive.append(directory)
    return directory.name


_keep_alive: list[Any] = []


@contextlib.contextmanager
def _architecture(arch: str) -> Iterator[None]:
    """Without a GPU the DSL cannot detect the architecture, and takes it from this variable."""
    name = "CUTE_DSL_ARCH"
    if torch.cuda.is_available() or name in os.environ:
        yield
        return
    os.environ[name] = arch
    try:
        yield
    finally:
        del os.environ[name]


def save_artefact(kernel: Any, path: Path) -> None:
    """Write the object file of a compiled kernel: host entry and device code, no linker needed."""
    kernel.export_to_c(str(path), function_name=_SYMBOL)


def load_artefact(path: Path) -> Kernel:
    """Load an object file written by `save_artefact`, in any process with the same toolchain."""
    import cutlass.cute as cute

    return getattr(cute.runtime.load_module(str(path), enable_tvm_ffi=True), _SYMBOL)


def _found() -> str:
    names = ("nvidia-cutlass-dsl", "apache-tvm-ffi", "python")
    versions = dict(toolchain_versions())
    return ", ".join(f"{name} {versions.get(name, 'missing')}" for name in names)


def clear_failures() -> None:
    """Try failed kernels again (tests, or after the toolchain was repaired in this process)."""
    _failures.clear()
