"""The contract every implementation of attention keeps: its call signature, its tensor layout, its LSE.

An implementation is a function `(q, k, v, aux, spec, sizes, *, need_lse) -> (out, lse)`:

    q    (B, Hq, Sq, D)                          any strides, fp16, bf16, fp32 or fp64
    k, v (B or 1, Hkv, Sk, D), (B or 1, Hkv, Sk, Dv)   query head h reads key head h // (Hq // Hkv)
    aux  captured tensors in slot order, of the dtypes and ranks in `spec.aux`
    out  (B, Hq, Sq, Dv) in q's dtype, BSHD memory (a transposed view of a contiguous (B, Sq, Hq, Dv))
    lse  (B, Hq, Sq) natural log, -inf for rows that keep no key and have no sink; shape (0,) when not asked for
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from fa4_inductor.spec import AttentionSpec, Kind


class AttentionFunction(Protocol):
    """An eager implementation of attention; see the module docstring for shapes."""

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        aux: Sequence[torch.Tensor],
        spec: AttentionSpec,
        sizes: Sequence[int],
        *,
        need_lse: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]: ...


def bshd(out: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`out` (B, H, S, D) in `dtype` with BSHD memory."""
    return out.to(dtype).transpose(1, 2).contiguous().transpose(1, 2)


def no_lse(q: torch.Tensor) -> torch.Tensor:
    """What stands for the LSE when it was not asked for: fp32, shape (0,)."""
    return q.new_empty((0,), dtype=torch.float32)


def widened(tensor: Any, kind: Kind, float_dtype: torch.dtype = torch.float32) -> Any:
    """An aux tensor (or graph value) as programs compute with it: bool, int64, or `float_dtype` and wider."""
    if kind is Kind.BOOL:
        return tensor
    wide = torch.int64 if kind is Kind.INT else torch.promote_types(tensor.dtype, float_dtype)
    return tensor if tensor.dtype == wide else tensor.to(wide)
