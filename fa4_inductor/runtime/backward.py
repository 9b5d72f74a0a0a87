"""From the op's gradient to what computes it: the backward kernel, or the reference."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fa4_inductor import log
from fa4_inductor.errors import KernelUnavailable
from fa4_inductor.lowering.backward_config import KEYS_PER_TILE, asked_for_untried, backward_tile_m, padded_head_dim
from fa4_inductor.runtime.launch import spec_of
from fa4_inductor.runtime.operands import aligned, kernel_aux
from fa4_inductor.settings import Settings
from fa4_inductor.spec import AttentionSpec

Gradients = list[Tensor]
_MAX_ACCUMULATED = 2**31 - 1  # elements of dQ's accumulator, whose offsets are int32 in the kernel


@dataclasses.dataclass(frozen=True)
class _Forward:
    """What the forward got and gave."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    aux: Sequence[Tensor]
    program: str
    sizes: Sequence[int]
    learned: tuple[int, ...]


def backward(
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
    learned: Sequence[int] = (),
) -> Gradients:
    """Implementation of `fa4_inductor::_backward`; what the forward got and gave, any strides.

    Args:
        grad_out: (B, Hq, Sq, Dv). grad_lse: (B, Hq, Sq), None where the LSE is not used.

    Returns:
        Gradients of q, k and v, in their shapes and dtypes, BSHD memory, then those of the aux tensors in the slots
        `learned`, which the score reads, contiguous.

    Raises:
        ValueError: for an implementation without a backward.
        KernelUnavailable: in strict mode, when the kernel cannot be built or launched.
    """
    run = _RUN.get(implementation)
    if run is None:
        raise ValueError(f"implementation {implementation!r} has no backward: known are {', '.join(_RUN)}")
    return run(_Forward(q, k, v, out, lse, aux, program, sizes, tuple(learned)), grad_out, grad_lse)


def _by_reference(forward: _Forward, grad_out: Tensor, grad_lse: Tensor | None) -> Gradients:
    from fa4_inductor.kernels.reference import attention_reference
    from fa4_inductor.kernels.reference_backward import backward_reference

    q, k, v, out, lse = forward.q, forward.k, forward.v, forward.out, forward.lse
    spec, aux, sizes = spec_of(forward.program), [t.to(q.device) for t in forward.aux], tuple(forward.sizes)
    dtype = torch.float64 if q.dtype is torch.float64 else torch.float32
    if dtype is torch.float64:  # the op's LSE has too few bits
        lse = attention_reference(q, k, v, aux, spec, sizes, need_lse=True, dtype=dtype)[1]
    rest = (q, k, v, out, lse, aux, spec, sizes)
    grads = backward_reference(grad_out, grad_lse, *rest, learned=forward.learned, dtype=dtype)
    return grads[:3] + [g.to(forward.aux[i].device) for i, g in zip(forward.learned, grads[3:], strict=True)]


def _by_kernel(forward: _Forward, grad_out: Tensor, grad_lse: Tensor | None) -> Gradients:
    q, k, v = forward.q, forward.k, forward.v
    (batch, heads, seqlen_q, head_dim), head_dim_v = q.shape, v.shape[3]
    spec = spec_of(forward.program)
    tile_m = backward_tile_m(head_dim, head_dim_v, spec, q.dtype, bool(forward.learned))
    group = heads // max(k.shape[1], 1)
    if tile_m is None or not (batch and heads and seqlen_q and k.shape[2]):
        return _by_reference(forward, grad_out, grad_lse)
    tiles = batch * heads * -(-seqlen_q // tile_m)
    accumulated = tile_m * padded_head_dim(head_dim)
    if tiles * accumulated > _MAX_ACCUMULATED:
        log.warn_once("the gradient of q is too large for the backward kernel", "It is computed in eager torch: slow")
        return _by_reference(forward, grad_out, grad_lse)
    deterministic = torch.are_deterministic_algorithms_enabled()
    if deterministic and (forward.learned or not asked_for_untried()):  # the site was chosen without this mode
        log.warn_once("deterministic gradients of this attention", "They are computed in eager torch: slow")
        return _by_reference(forward, grad_out, grad_lse)
    options = (q.dtype, head_dim, head_dim_v, group, grad_lse is not None, q.device, deterministic, forward.learned)
    kernel = _kernel(forward.program, *options)
    if kernel is None:
        return _by_reference(forward, grad_out, grad_lse)
    splits = _head_splits(batch * k.shape[1] * -(-k.shape[2] // KEYS_PER_TILE), group, q.device)
    grads = _empty_like(q, batch), _empty_like(k, batch, splits), _empty_like(v, batch, splits)
    stats = q.new_empty((4 * tiles, tile_m), dtype=torch.float32)
    accumulator = q.new_empty((tiles, accumulated), dtype=torch.float32)
    turns = q.new_empty((tiles, 2), dtype=torch.int32) if deterministic else None
    bool_aux = any(a.dtype == "bool" for a in spec.aux)
    aux = kernel_aux(forward.aux, q.device, bool_aux) if forward.aux else None
    operands = (aligned(t) for t in (q, k, v, forward.out, grad_out))
    sizes = tuple(forward.sizes) or None
    learned = [forward.aux[slot] for slot in forward.learned]
    of_aux = tuple(torch.zeros(t.shape or (1,), dtype=torch.float32, device=q.device) for t in learned)
    scratch = (stats, accumulator, turns, of_aux or None)
    with torch.cuda.device(q.device):
        kernel(*operands, forward.lse, grad_lse, *grads, *scratch, spec.softmax_scale, aux, sizes)
    dq, dk, dv = grads[0], _summed(grads[1], k), _summed(grads[2], v)
    as_aux = (g.reshape(t.shape).to(t.device, t.dtype) for g, t in zip(of_aux, learned, strict=True))
    return [dq, dk, _with_mean_rows(spec, dv, grad_out, forward.lse), *as_aux]


def _head_splits(ctas: int, group: int, device: torch.device) -> int:
    """Into how many CTAs the query heads of a key head are split, where there are too few for the GPU."""
    splits, wanted = 1, 2 * torch.cuda.get_device_properties(device).multi_processor_count
    while splits * ctas < wanted and group % (2 * splits) == 0:
        splits *= 2
    return splits


def _empty_like(t: Tensor, batch: int, splits: int = 1) -> Tensor:
    """(batch, H * splits, S, D) with BSHD memory."""
    _, heads, seqlen, head_dim = t.shape
    return t.new_empty((batch, seqlen, heads * splits, head_dim)).transpose(1, 2)


def _summed(gradient: Tensor, operand: Tensor) -> Tensor:
    """The gradient of an operand from those of its splits, and of the batch entries that may share it."""
    batch, heads = operand.shape[:2]
    if gradient.shape[:2] == (batch, heads):
        return gradient
    shares = gradient.transpose(1, 2).unflatten(2, (heads, -1))
    return (
        shares.sum((0, 3) if batch != gradient.shape[0] else 3, dtype=torch.float32)
        .to(operand.dtype)
        .reshape(batch, gradient.shape[2], heads, gradient.shape[3])
        .transpose(1, 2)
    )


def _with_mean_rows(spec: AttentionSpec, dv: Tensor, grad_out: Tensor, lse: Tensor) -> Tensor:
    """dv with what rows without keys give it where they get the mean of V."""
    from fa4_inductor.kernels.reference_backward import of_mean_rows
    from fa4_inductor.runtime.compile import needs_v_mean

    if not needs_v_mean(spec):
        return dv
    return dv.add_(of_mean_rows(grad_out, lse, dv.shape[1]) / dv.shape[2])


@functools.lru_cache(maxsize=1024)
def _kernel(
    program: str,
    dtype: torch.dtype,
    head_dim: int,
    head_dim_v: int,
    group: int,
    grad_lse: bool,
    device: torch.device,
    deterministic: bool,
    learned: tuple[int, ...],
) -> Callable[..., Any] | None:
    """The compiled kernel; None, after one warning, when it cannot be had here. Strict mode raises."""
    from fa4_inductor.runtime import compile as compiler
    from fa4_inductor.runtime.target import target_for

    settings = Settings.from_env()
    try:
        if device.type != "cuda":
            raise KernelUnavailable(f"CuTe-DSL kernels run on NVIDIA GPUs, not on {device.type}")
        target = target_for(device)
        dims = (head_dim, head_dim_v, group)
        options: dict[str, Any] = {"deterministic": deterministic, "learned": learned}
        key = compiler.backward_key(program, dtype, *dims, grad_lse, target, **options)
        return compiler.get_kernel(key, settings)
    except KernelUnavailable as error:
        if settings.strict:
            raise
        log.warn_once(str(error), "Gradients of attention are computed in eager torch instead: right, and slow")
        return None


_RUN: dict[str, Callable[[_Forward, Tensor, Tensor | None], Gradients]] = {
    "cute": _by_kernel,
    "reference": _by_reference,
}
IMPLEMENTATIONS = tuple(_RUN)
"""Those of `fa4_inductor::attention` that have a backward."""
