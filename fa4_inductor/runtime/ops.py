"""The op in the graph: schemas, fakes, dispatch. Needs torch only; kernels are imported when the op runs.

    fa4_inductor::attention(q, k, v, aux, program, sizes, implementation) -> out
    fa4_inductor::_forward(q, k, v, aux, program, sizes, implementation, need_lse) -> (out, lse)
    fa4_inductor::_forward_into(q, k, v, aux, program, sizes, implementation, out!) -> ()

`attention` is composite: while AOTAutograd traces it becomes one of the others, which have device implementations and
a fake and know nothing of autograd. Our kernels write into memory they are given, so that Inductor plans it with all
other buffers: an op that allocates its result itself can never reuse one. Shapes, layouts and the program text are
described in docs/architecture.md.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fa4_inductor.runtime import launch

NAMESPACE = "fa4_inductor"
_OPERANDS = "Tensor q, Tensor k, Tensor v, Tensor[] aux, str program, SymInt[] sizes, str implementation"
# Stride order, not exact strides: Inductor may then skip copies, and the launch copes with every stride.
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)

_library = torch.library.Library(NAMESPACE, "DEF")
_library.define(f"attention({_OPERANDS}) -> Tensor", tags=_TAGS)
_library.define(f"_forward({_OPERANDS}, bool need_lse) -> (Tensor, Tensor)", tags=_TAGS)
_library.define(f"_forward_into({_OPERANDS}, Tensor(a!) out) -> ()", tags=_TAGS)


def _attention(
    q: Tensor, k: Tensor, v: Tensor, aux: Sequence[Tensor], program: str, sizes: Sequence[int], implementation: str
) -> Tensor:
    if torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v, *aux)):
        raise RuntimeError("fa4_inductor::attention has no backward: call it under torch.no_grad()")
    if implementation != "cute":  # written in torch, these have a tensor of their own to give
        return torch.ops.fa4_inductor._forward(q, k, v, aux, program, sizes, implementation, False)[0]
    out = q.new_empty((q.shape[0], q.shape[2], q.shape[1], v.shape[3]))
    torch.ops.fa4_inductor._forward_into(q, k, v, aux, program, sizes, implementation, out)
    return out.transpose(1, 2)


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
    batch, heads, seqlen_q, _ = q.shape
    out = q.new_empty((batch, seqlen_q, heads, v.shape[-1])).transpose(1, 2)
    return out, q.new_empty((batch, heads, seqlen_q) if need_lse else (0,), dtype=torch.float32)


_library.impl("attention", _attention, "CompositeImplicitAutograd")


def _forward_into_fake(*_: object) -> None:
    """Nothing is returned; `out` keeps its shape."""


for _key in ("CPU", "CUDA"):
    _library.impl("_forward", launch.forward, _key)
    _library.impl("_forward_into", launch.forward_into, _key)
torch.library.register_fake(f"{NAMESPACE}::_forward", _forward_fake, lib=_library)
torch.library.register_fake(f"{NAMESPACE}::_forward_into", _forward_into_fake, lib=_library)

ATTENTION = torch.ops.fa4_inductor.attention.default
FORWARD = torch.ops.fa4_inductor._forward.default
