"""The op that makes tile maps: from its arguments to a kernel, or to eager torch where there is none.

fa4_inductor::tile_map(aux, program, sizes, batch, heads, seqlen_q, seqlen_k, tile_m, tile_n) -> Tensor
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fa4_inductor import log
from fa4_inductor.errors import KernelUnavailable
from fa4_inductor.kernels.tile_map import map_shape, tile_map_eager
from fa4_inductor.lowering.aux_layout import RegularSlots, regular_slots
from fa4_inductor.runtime.operands import kernel_aux, regular_aux
from fa4_inductor.settings import Settings
from fa4_inductor.spec import parse_spec


class MapPlanKey(NamedTuple):
    """What the kernel depends on. `regular`: as in `compile.tile_map_key`."""

    program: str
    tile_m: int
    tile_n: int
    device: torch.device
    regular: bool


Kernel = Callable[..., None]
_plans: dict[MapPlanKey, Kernel | None] = {}


def tile_map(
    aux: Sequence[Tensor],
    program: str,
    sizes: Sequence[int],
    batch: int,
    heads: int,
    seqlen_q: int,
    seqlen_k: int,
    tile_m: int,
    tile_n: int,
) -> Tensor:
    """Implementation of `fa4_inductor::tile_map`.

    Args:
        aux: at least one tensor, which decides the device. program, sizes: the mask, `keep` of a spec.
        batch, heads: of the map; 1 where the mask does not depend on them.

    Returns:
        int32 (batch, heads, ceil(seqlen_q / tile_m), 2 + ceil(seqlen_k / tile_n)) as in `spec.attention.TileMap`.

    Raises:
        KernelUnavailable: in strict mode, when the kernel cannot be built.
    """
    device = device_of(aux)
    shape = map_shape(batch, heads, seqlen_q, seqlen_k, tile_m, tile_n)
    if 0 in (batch, heads, seqlen_q, seqlen_k):
        return torch.zeros(shape, dtype=torch.int32, device=device)
    kernel, arguments = None, None
    if device.type == "cuda":
        arguments = kernel_aux(aux, device, any_bool=True)
        views = regular_aux(_layout(program), arguments)
        kernel = _kernel(MapPlanKey(program, tile_m, tile_n, device, views is not None))
        arguments = arguments if views is None else views
    if kernel is None:
        return tile_map_eager(aux, parse_spec(program), sizes, batch, heads, seqlen_q, seqlen_k, tile_m, tile_n, device)
    out = torch.empty(shape, dtype=torch.int32, device=device)
    with torch.cuda.device(device):
        kernel(out, seqlen_q, seqlen_k, arguments, tuple(sizes) or None)
    return out


@functools.lru_cache(maxsize=1024)
def _layout(program: str) -> RegularSlots:
    return regular_slots(parse_spec(program))


def device_of(aux: Sequence[Tensor]) -> torch.device:
    """That of the tensors; numbers (0-dim tensors) may be on the CPU."""
    return next((t.device for t in aux if t.device.type != "cpu"), aux[0].device)


def _kernel(key: MapPlanKey) -> Kernel | None:
    """The kernel; None, after one warning, where it cannot be had. Strict mode raises."""
    try:
        return _plans[key]
    except KeyError:
        kernel = _plans[key] = _make_kernel(key)
        return kernel


def _make_kernel(key: MapPlanKey) -> Kernel | None:
    from fa4_inductor.runtime import compile as compiler
    from fa4_inductor.runtime.target import target_for

    settings = Settings.from_env()
    try:
        target = target_for(key.device)
        compile_key = compiler.tile_map_key(key.program, key.tile_m, key.tile_n, target, regular=key.regular)
        return compiler.get_kernel(compile_key, settings)
    except KernelUnavailable as error:
        if settings.strict:
            raise
        log.warn_once(str(error), "Tile maps are made by eager torch instead, which is right and slow")
        return None


def prepare(kernel: Kernel, key: MapPlanKey) -> None:
    """Keep a kernel built ahead, so that the op's first call, maybe inside a capture, builds nothing."""
    _plans[key] = kernel


def clear_plans() -> None:
    """Forget kernels (tests, and after settings changed)."""
    _plans.clear()
