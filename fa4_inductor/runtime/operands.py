"""Operands as the kernels read them: TMA wants 16-byte addresses and strides, and an innermost stride of 1."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fa4_inductor.lowering.aux_layout import TMA_ALIGNMENT, RegularSlots, has_unit_stride, suits_pairs, suits_tma
from fa4_inductor.lowering.hoist import table_length


def check(q: Tensor, k: Tensor, v: Tensor, aux: Sequence[Tensor]) -> None:
    """Raises ValueError for operands that do not fit together."""
    (batch, heads, _, head_dim), (kv_batch, kv_heads, seqlen_k, k_dim), v_shape = q.shape, k.shape, v.shape
    fits = (
        k_dim == head_dim
        and v_shape[1:3] == (kv_heads, seqlen_k)
        and kv_batch in (1, batch)
        and v_shape[0] in (1, batch)
        and (heads % kv_heads == 0 if kv_heads else heads == 0)
        and q.dtype == k.dtype == v.dtype
    )
    if not fits:
        got = ", ".join(f"{n} {t.dtype} {tuple(t.shape)}" for n, t in (("q", q), ("k", k), ("v", v)))
        raise ValueError(f"operands do not fit (B, Hq, Sq, D), (B, Hkv, Sk, D), (B, Hkv, Sk, Dv): {got}")
    for t in (k, v, *aux):
        if t.device != q.device and (t.dim() or t.device.type != "cpu"):
            raise ValueError(f"operands are on {q.device} and {t.device}: move them to one device")


def aligned(t: Tensor) -> Tensor:
    """`t` (B, H, S, D) itself when TMA can read it, else the same values where it can."""
    if has_readable_strides(t) and not t.data_ptr() % TMA_ALIGNMENT:
        return t
    view = _readable(t)
    return t.clone(memory_format=torch.contiguous_format) if view is None else view


def has_readable_strides(t: Tensor) -> bool:
    """Whether TMA can read `t` (B, H, S, D) as it is, wherever it begins."""
    s0, s1, s2, s3 = t.stride()
    return s3 == 1 and not (s0 | s1 | s2) * t.itemsize % TMA_ALIGNMENT


def _readable(t: Tensor) -> Tensor | None:
    """`t` for TMA: itself, a view when only strides of dimensions of size 1 are in the way, or None."""
    if t.data_ptr() % TMA_ALIGNMENT or not suits_tma(t.stride(), t.shape, t.itemsize):
        return None
    strides = (*(s if n > 1 else TMA_ALIGNMENT for s, n in zip(t.stride()[:-1], t.shape)), 1)
    return t if strides == t.stride() else t.as_strided(t.shape, strides, t.storage_offset())


def kernel_aux(aux: Sequence[Tensor], device: torch.device, any_bool: bool) -> tuple[Tensor, ...]:
    """`aux` on the device, bool tensors as uint8 views."""
    moved = [t if t.device == device else t.to(device) for t in aux]
    return tuple([t.view(torch.uint8) if t.dtype is torch.bool else t for t in moved] if any_bool else moved)


def regular_aux(slots: RegularSlots, aux: Sequence[Tensor]) -> tuple[Tensor, ...] | None:
    """`aux` laid out as a kernel for regular tensors wants it; None where some tensor is not."""
    views = list(aux)
    for slot in slots.streamed:
        t = views[slot]
        if (slot in slots.tables or slot in slots.columns) and t.data_ptr() % (2 * t.itemsize):
            return None
        if slot in slots.tables:
            view = t if t.is_contiguous() else None
        elif slot in slots.columns and not suits_pairs(t.stride(), t.shape):
            return None
        else:
            view = _readable(t) if slot in slots.dense else t if t.stride(-1) == 1 else _with_unit_stride(t)
        if view is None:
            return None
        views[slot] = view
    return tuple(views)


def check_tables(slots: tuple[int, ...], seqlen_q: int, seqlen_k: int, aux: Sequence[Tensor]) -> None:
    """The kernel reads distance tables (lowering.hoist) without looking at their length: ValueError for another one."""
    for slot in slots:
        expected, found = (table_length(seqlen_q, seqlen_k), 2), tuple(aux[slot].shape[2:])
        if found != expected:
            raise ValueError(f"aux {slot} is a table over the distance and must end in {expected}, not in {found}")


def _with_unit_stride(t: Tensor) -> Tensor | None:
    if not has_unit_stride(t.stride(), t.shape):
        return None
    return t.as_strided(t.shape, (*t.stride()[:-1], 1), t.storage_offset())
