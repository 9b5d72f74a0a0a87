"""Which of a program's kernels a launch takes, and what a kernel of few query rows is told."""

from __future__ import annotations

from torch import Tensor

from fa4_inductor.lowering.split_config import SPLIT_VARIANTS, Variant, choose_variant, workspace_size
from fa4_inductor.runtime import target as targets


def choice(q: Tensor, k: Tensor, v: Tensor, dense: bool) -> tuple[Variant, int]:
    """The kernel that these operands take, and its splits. dense: the program has aux tiles that TMA can load."""
    (batch, heads, seqlen_q, head_dim), (_, kv_heads, seqlen_k, head_dim_v) = q.shape, v.shape
    target = targets.target_for(q.device)
    return choose_variant(batch, heads, kv_heads, seqlen_q, seqlen_k, (head_dim, head_dim_v), target, dense)


def splits_of(variant: Variant, q: Tensor, k: Tensor, v: Tensor) -> tuple[int | None, int]:
    """Splits for a kernel of this variant, None where it takes none, and float32 elements of its workspace."""
    if variant not in SPLIT_VARIANTS:
        return None, 0
    splits = choice(q, k, v, dense=False)[1]
    if variant is Variant.DIRECT:
        return splits, 0
    return splits, workspace_size(splits, q.shape[0] * q.shape[1] * q.shape[2], v.shape[3])
