"""The op in the graph: schemas, fakes, dispatch. Needs torch only; kernels are imported when the op runs.

    fa4_inductor::attention(q, k, v, aux, program, sizes, implementation) -> out
    fa4_inductor::_forward(q, k, v, aux, program, sizes, implementation, need_lse) -> (out, lse)
    fa4_inductor::_forward_without_lse(q, k, v, aux, program, sizes, implementation) -> out
    fa4_inductor::tile_map(aux, program, sizes, batch, heads, seqlen_q, seqlen_k, tile_m, tile_n) -> map

`attention` is composite: while AOTAutograd traces it becomes `_forward_without_lse`, which like `_forward` has device
implementations and a fake and knows nothing of autograd. Shapes, layouts and the program text are described in
docs/architecture.md.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fa4_inductor.kernels.tile_map import map_shape
from fa4_inductor.runtime import launch, tile_map

NAMESPACE = "fa4_inductor"
NAMESPACE_PATH = f"torch.ops.{NAMESPACE}"
_OPERANDS = "Tensor q, Tensor k, Tensor v, Tensor[] aux, str program, SymInt[] sizes, str implementation"
# Stride order, not exact strides: Inductor may then skip copies, and the launch copes with every stride.
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)

_library = torch.library.Library(NAMESPACE, "DEF")
_library.define(f"attention({_OPERANDS}) -> Tensor", tags=_TAGS)
_library.define(f"_forward({_OPERANDS}, bool need_lse) -> (Tensor, Tensor)", tags=_TAGS)
_library.define(f"_forward_without_lse({_OPERANDS}) -> Tensor", tags=_TAGS)
_library.define(
    "tile_map(Tensor[] aux, str program, SymInt[] sizes, SymInt batch, SymInt heads, SymInt seqlen_q, "
    "SymInt seqlen_k, int tile_m, int tile_n) -> Tensor",
    tags=_TAGS,
)


def _attention(
    q: Tensor, k: Tensor, v: Tensor, aux: Sequence[Tensor], program: str, sizes: Sequence[int], implementation: str
) -> Tensor:
    if torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v, *aux)):
        raise RuntimeError("fa4_inductor::attention has no backward: call it under torch.no_grad()")
    return torch.ops.fa4_inductor._forward_without_lse(q, k, v, aux, program, sizes, implementation)


def _out_fake(
    q: Tensor, k: Tensor, v: Tensor, aux: Sequence[Tensor], program: str, sizes: Sequence[int], implementation: str
) -> Tensor:
    batch, heads, seqlen_q, _ = q.shape
    return q.new_empty((batch, seqlen_q, heads, v.shape[-1])).transpose(1, 2)


def _forward_fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    aux: Sequence[Tensor],
    program: str,
    sizes: Sequence[int],
    implementation: str,
    need_lse: bool,
) -> tuple[Tensor, Tensor]:
    out = _out_fake(q, k, v, aux, program, sizes, implementation)
    return out, q.new_empty(q.shape[:3] if need_lse else (0,), dtype=torch.float32)


def _tile_map_fake(
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
    shape = map_shape(batch, heads, seqlen_q, seqlen_k, tile_m, tile_n)
    return torch.empty(shape, dtype=torch.int32, device=tile_map.device_of(aux))


_library.impl("attention", _attention, "CompositeImplicitAutograd")
for _key in ("CPU", "CUDA"):
    _library.impl("_forward", launch.forward, _key)
    _library.impl("_forward_without_lse", launch.forward_without_lse, _key)
    _library.impl("tile_map", tile_map.tile_map, _key)
torch.library.register_fake(f"{NAMESPACE}::_forward", _forward_fake, lib=_library)
torch.library.register_fake(f"{NAMESPACE}::_forward_without_lse", _out_fake, lib=_library)
torch.library.register_fake(f"{NAMESPACE}::tile_map", _tile_map_fake, lib=_library)

ATTENTION = torch.ops.fa4_inductor.attention.default
FORWARD = torch.ops.fa4_inductor._forward.default
FORWARD_WITHOUT_LSE = torch.ops.fa4_inductor._forward_without_lse.default
TILE_MAP = torch.ops.fa4_inductor.tile_map.default
# What generated code calls instead of an op (`runtime.direct`): attributes of the namespace, which it finds with torch.
IMPLEMENTATIONS = {FORWARD: "launch_forward", FORWARD_WITHOUT_LSE: "launch_forward_without_lse"}
torch.ops.fa4_inductor.launch_forward = launch.forward
torch.ops.fa4_inductor.launch_forward_without_lse = launch.forward_without_lse
