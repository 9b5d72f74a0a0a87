"""The op in the graph: schemas, fakes, autograd, dispatch. Needs torch only; kernels are imported when the op runs.

    fa4_inductor::attention(q, k, v, aux, program, sizes, implementation) -> out
    fa4_inductor::attention_with_lse(q, k, v, aux, program, sizes, implementation) -> (out, lse)
    fa4_inductor::_forward(q, k, v, aux, program, sizes, implementation, need_lse) -> (out, lse)
    fa4_inductor::_forward_without_lse(q, k, v, aux, program, sizes, implementation) -> out
    fa4_inductor::_backward(grad_out, grad_lse, q, k, v, out, lse, aux, program, sizes, implementation, learned)
        -> [dq, dk, dv, gradients of the aux tensors in the slots `learned`]
    fa4_inductor::tile_map(aux, program, sizes, batch, heads, seqlen_q, seqlen_k, tile_m, tile_n) -> map

The first two are composite: while AOTAutograd traces, they become the others, which have device implementations and a
fake and know nothing of autograd. Shapes, layouts and the program text are described in docs/architecture.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fa4_inductor.kernels.sink_backward import sink_gradients
from fa4_inductor.kernels.tile_map import map_shape
from fa4_inductor.runtime import backward, launch, tile_map

NAMESPACE = "fa4_inductor"
NAMESPACE_PATH = f"torch.ops.{NAMESPACE}"
_OPERANDS = "Tensor q, Tensor k, Tensor v, Tensor[] aux, str program, SymInt[] sizes, str implementation"
# Stride order, not exact strides: Inductor may then skip copies, and the launch copes with every stride.
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)

_library = torch.library.Library(NAMESPACE, "DEF")
_library.define(f"attention({_OPERANDS}) -> Tensor", tags=_TAGS)
_library.define(f"attention_with_lse({_OPERANDS}) -> (Tensor, Tensor)", tags=_TAGS)
_library.define(f"_forward({_OPERANDS}, bool need_lse) -> (Tensor, Tensor)", tags=_TAGS)
_library.define(f"_forward_without_lse({_OPERANDS}) -> Tensor", tags=_TAGS)
_library.define(
    "tile_map(Tensor[] aux, str program, SymInt[] sizes, SymInt batch, SymInt heads, SymInt seqlen_q, "
    "SymInt seqlen_k, int tile_m, int tile_n) -> Tensor",
    tags=_TAGS,
)
_library.define(
    "_backward(Tensor grad_out, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    "Tensor[] aux, str program, SymInt[] sizes, str implementation, int[] learned) -> Tensor[]",
    tags=_TAGS,
)


class _Attention(torch.autograd.Function):
    """Attention with gradients for q, k, v and captured tensors. Keeps q, k, v, aux, out and the LSE, nothing as large
    as the scores."""

    @staticmethod
    def forward(
        q: Tensor, k: Tensor, v: Tensor, program: str, sizes: Sequence[int], implementation: str, *aux: Tensor
    ) -> tuple[Tensor, Tensor]:
        return torch.ops.fa4_inductor._forward(q, k, v, aux, program, sizes, implementation, True)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        q, k, v, *ctx.program, aux = *inputs[:6], inputs[6:]
        ctx.save_for_backward(q, k, v, *output, *aux)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:
        q, k, v, out, lse, *aux = ctx.saved_tensors
        grad_out = torch.zeros_like(out) if grad_out is None else grad_out
        learned = [slot for slot, needed in enumerate(ctx.needs_input_grad[6:]) if needed]
        program, sizes, _ = ctx.program
        spec = launch.spec_of(program)
        in_score, in_sink = ([i for i in learned if i in slots] for slots in (spec.score_slots, spec.sink_reads))
        with torch.no_grad():
            operands = (grad_out, grad_lse, q, k, v, out, lse, aux, *ctx.program)
            grads = torch.ops.fa4_inductor._backward(*operands, in_score)
            of_aux = dict(zip(in_score, grads[3:], strict=True))
            if in_sink:
                of_sink = sink_gradients(in_sink, grad_out, grad_lse, out, lse, aux, spec, k.shape[2], sizes)
                for slot, gradient in zip(in_sink, of_sink, strict=True):
                    of_aux[slot] = of_aux[slot] + gradient if slot in of_aux else gradient
        slots, grads = list(of_aux), (*grads[:3], *of_aux.values())
        if torch.is_grad_enabled():
            grads = _OnlyOnce.apply(len(grads), *grads, grad_out, q, k, v, *aux)
        of_aux = dict(zip(slots, grads[3:], strict=True))
        return *grads[:3], None, None, None, *(of_aux.get(slot) for slot in range(len(aux)))


class _OnlyOnce(torch.autograd.Function):
    """The first `count` tensors as they are, which refuse to be differentiated with respect to the others.

    `torch.autograd.function.once_differentiable` returns constants where grad_out needs no gradient: a penalty on
    gradients would silently be none.
    """

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(t.view_as(t) for t in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise RuntimeError("fa4_inductor::attention has no second derivative")


def _needs_grad(q: Tensor, k: Tensor, v: Tensor, aux: Sequence[Tensor], implementation: str) -> bool:
    if not torch.is_grad_enabled():
        return False
    needed = any(t.requires_grad for t in (q, k, v, *aux))
    if needed and implementation not in backward.IMPLEMENTATIONS:
        known = ", ".join(backward.IMPLEMENTATIONS)
        raise RuntimeError(f"fa4_inductor::attention by {implementation!r} has no backward: known are {known}")
    return needed


def _attention(
    q: Tensor, k: Tensor, v: Tensor, aux: Sequence[Tensor], program: str, sizes: Sequence[int], implementation: str
) -> Tensor:
    if _needs_grad(q, k, v, aux, implementation):
        return _Attention.apply(q, k, v, program, sizes, implementation, *aux)[0]
    return torch.ops.fa4_inductor._forward_without_lse(q, k, v, aux, program, sizes, implementation)


def _attention_with_lse(
    q: Tensor, k: Tensor, v: Tensor, aux: Sequence[Tensor], program: str, sizes: Sequence[int], implementation: str
) -> tuple[Tensor, Tensor]:
    if _needs_grad(q, k, v, aux, implementation):
        return _Attention.apply(q, k, v, program, sizes, implementation, *aux)
    return torch.ops.fa4_inductor._forward(q, k, v, aux, program, sizes, implementation, True)


def _out_fake(
    q: Tensor, k: Tensor, v: Tensor, aux: Sequence[Tensor], program: str, sizes: Sequence[int], implementation: str
) -> Tensor:
    batch, heads, seqlen_q, _ = q.shape
    return _bshd(q, (batch, heads, seqlen_q, v.shape[-1]))


def _bshd(like: Tensor, shape: Sequence[int]) -> Tensor:
    batch, heads, seqlen, head_dim = shape
    return like.new_empty((batch, seqlen, heads, head_dim)).transpose(1, 2)


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


def _backward_fake(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    aux: Sequence[Tensor],
    program: str,
    sizes: Sequence[int],
    implementation: str,
    learned: Sequence[int],
) -> list[Tensor]:
    of_aux = (aux[slot].new_empty(aux[slot].shape) for slot in learned)
    return [_bshd(q, q.shape), _bshd(k, k.shape), _bshd(v, v.shape), *of_aux]


_library.impl("attention", _attention, "CompositeImplicitAutograd")
_library.impl("attention_with_lse", _attention_with_lse, "CompositeImplicitAutograd")
for _key in ("CPU", "CUDA"):
    _library.impl("_forward", launch.forward, _key)
    _library.impl("_forward_without_lse", launch.forward_without_lse, _key)
    _library.impl("tile_map", tile_map.tile_map, _key)
    _library.impl("_backward", backward.backward, _key)
torch.library.register_fake(f"{NAMESPACE}::_forward", _forward_fake, lib=_library)
torch.library.register_fake(f"{NAMESPACE}::_forward_without_lse", _out_fake, lib=_library)
torch.library.register_fake(f"{NAMESPACE}::tile_map", _tile_map_fake, lib=_library)
torch.library.register_fake(f"{NAMESPACE}::_backward", _backward_fake, lib=_library)

ATTENTION = torch.ops.fa4_inductor.attention.default
ATTENTION_WITH_LSE = torch.ops.fa4_inductor.attention_with_lse.default
FORWARD = torch.ops.fa4_inductor._forward.default
FORWARD_WITHOUT_LSE = torch.ops.fa4_inductor._forward_without_lse.default
TILE_MAP = torch.ops.fa4_inductor.tile_map.default
# What generated code calls instead of an op (`runtime.direct`): attributes of the namespace, which it finds with torch.
IMPLEMENTATIONS = {FORWARD: "launch_forward", FORWARD_WITHOUT_LSE: "launch_forward_without_lse"}
torch.ops.fa4_inductor.launch_forward = launch.forward
torch.ops.fa4_inductor.launch_forward_without_lse = launch.forward_without_lse
