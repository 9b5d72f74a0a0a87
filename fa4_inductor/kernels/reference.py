"""Attention as its spec reads, in eager torch: the oracle of every test. Slow and plain on purpose, any device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from fa4_inductor.kernels import philox
from fa4_inductor.kernels.contract import bshd, no_lse, widened
from fa4_inductor.spec import AttentionSpec, EmptyRow, Expr
from fa4_inductor.spec.interpret import Env, evaluate

# Scores held at once: 2^25 fp32 values are 128 MiB, and about six tensors of that size are alive.
_MAX_SCORES = 1 << 25


def attention_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    aux: Sequence[torch.Tensor],
    spec: AttentionSpec,
    sizes: Sequence[int] = (),
    *,
    need_lse: bool = False,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention by definition, computed in `dtype` (float32 or float64) throughout.

    Args:
        q, k, v: (B, Hq, Sq, D), (B or 1, Hkv, Sk, D), (B or 1, Hkv, Sk, Dv).
        aux, sizes: captured tensors and run-time integers of `spec`.
        dtype: of all arithmetic; fp64 inputs with fp64 give the ground truth that errors are measured against.

    Returns:
        out (B, Hq, Sq, Dv) in q's dtype with BSHD memory; lse (B, Hq, Sq) in `dtype`, natural log, or shape (0,).
        A value of V that is not finite reaches only rows that give its key a positive weight.
    """
    batch, heads, seqlen_q, _ = q.shape
    seqlen_k, head_dim_v = k.shape[2], v.shape[3]
    out = q.new_empty((batch, heads, seqlen_q, head_dim_v), dtype=dtype)
    lse = q.new_empty((batch, heads, seqlen_q), dtype=dtype)
    group = heads // max(k.shape[1], 1)
    aux = [widened(t, spec.aux[i].kind, dtype) for i, t in enumerate(aux)]
    for h, rows in chunks(batch, heads, seqlen_q, seqlen_k):
        kv_heads = torch.arange(h.start, h.stop, device=q.device) // group
        keys, values = k[:, kv_heads].to(dtype), v[:, kv_heads].to(dtype)
        names = names_of(q, seqlen_k, sizes, h, rows)
        names["score"] = q[:, h, rows].to(dtype) @ keys.transpose(-1, -2) * spec.softmax_scale
        shape = tuple(names["score"].shape)
        score = full(spec.score, Env(names, aux), shape, dtype)
        keep = full(spec.keep, Env(names, aux), shape, torch.bool)
        sink = None if spec.sink is None else full(spec.sink, Env(names, aux), (*shape[:3], 1), dtype)
        out[:, h, rows], lse[:, h, rows] = _softmax_times_v(
            score, keep, sink, values, spec.empty_row, dropout_factor(spec, names, aux, heads, dtype)
        )
    return bshd(out, q.dtype), lse if need_lse else no_lse(q)


def chunks(batch: int, heads: int, seqlen_q: int, seqlen_k: int) -> Iterator[tuple[slice, slice]]:
    """Slices of heads and query rows that keep at most `_MAX_SCORES` scores alive; rows are independent."""
    if 0 in (batch, heads, seqlen_q):
        return
    per_head = max(batch * seqlen_q * seqlen_k, 1)
    head_step = max(1, _MAX_SCORES // per_head)
    row_step = max(1, min(seqlen_q, _MAX_SCORES // max(batch * seqlen_k, 1)))
    for h in range(0, heads, head_step):
        for row in range(0, seqlen_q, row_step):
            yield slice(h, min(h + head_step, heads)), slice(row, min(row + row_step, seqlen_q))


def names_of(q: torch.Tensor, seqlen_k: int, sizes: Sequence[int], h: slice, rows: slice) -> dict[str, Any]:
    """Values of all names but `score` for these heads and query rows of q (B, Hq, Sq, D)."""
    device = q.device
    return {
        "b": torch.arange(q.shape[0], device=device).view(-1, 1, 1, 1),
        "h": torch.arange(h.start, h.stop, device=device).view(1, -1, 1, 1),
        "q_idx": torch.arange(rows.start, rows.stop, device=device).view(1, 1, -1, 1),
        "kv_idx": torch.arange(seqlen_k, device=device).view(1, 1, 1, -1),
        "seqlen_q": q.shape[2],
        "seqlen_k": seqlen_k,
        **{f"size{i}": value for i, value in enumerate(sizes)},
    }


def full(expr: Expr, env: Env, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Value of `expr` in this dtype, expanded to (B, H, Sq, Sk or 1)."""
    value = torch.as_tensor(evaluate(expr, env), dtype=dtype, device=env.names["kv_idx"].device)
    return value.expand(shape)


def dropout_factor(
    spec: AttentionSpec, names: dict[str, Any], aux: Sequence[torch.Tensor], heads: int, dtype: torch.dtype
) -> torch.Tensor | None:
    """What dropout multiplies the probabilities (B, H, Sq, Sk) with: 0 or 1 / (1 - p). heads: all query heads."""
    if spec.dropout is None:
        return None
    p, indices = spec.dropout.p, [names[name] for name in ("b", "h", "q_idx", "kv_idx")]
    if p == 1.0:
        return torch.zeros((), dtype=dtype, device=indices[0].device)
    return philox.kept(aux[spec.dropout.slot], p, heads, *indices).to(dtype) / (1.0 - p)


def _softmax_times_v(
    score: torch.Tensor, keep: torch.Tensor, sink: torch.Tensor | None, v: torch.Tensor, empty_row: EmptyRow,
    factor: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """out (B, H, Sq, Dv) and lse (B, H, Sq); score, keep, factor (B, H, Sq, Sk), sink (B, H, Sq, 1), v (B or 1, H, Sk,
    Dv)."""
    seqlen_k = score.shape[-1]
    score = score.masked_fill(~keep, -torch.inf)
    logits = score if sink is None else torch.cat([score, sink], dim=-1)
    if logits.shape[-1] == 0:  # eager gives zeros here whatever its masks look like
        return score.new_zeros((*score.shape[:3], v.shape[-1])), score.new_full(score.shape[:3], -torch.inf)
    row_max = logits.amax(dim=-1, keepdim=True)
    empty = row_max.squeeze(-1) == -torch.inf
    row_max = row_max.masked_fill(empty[..., None], 0.0)
    p = torch.exp(logits - row_max)
    row_sum = p.sum(dim=-1, keepdim=True)
    lse = (row_max + torch.log(row_sum)).squeeze(-1)
    p = p[..., :seqlen_k] / row_sum.masked_fill(empty[..., None], 1.0)
    out = _weigh(p if factor is None else p * factor, v)
    if seqlen_k and sink is None and empty_row is not EmptyRow.ZERO:
        fill = v.new_tensor(torch.nan) if empty_row is EmptyRow.NAN else v.mean(dim=-2, keepdim=True)
        if factor is not None and empty_row is EmptyRow.MEAN:  # each key has 1 / Sk, and dropout drops some
            fill = _weigh((factor / seqlen_k).expand_as(score), v)
        out = torch.where(empty[..., None], fill, out)
    return out, lse


def _weigh(p: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """p @ v where 0 * nan and 0 * inf count as 0, so that garbage behind a mask stays there."""
    if v.isfinite().all():
        return p @ v
    out = p @ v.nan_to_num(0.0, 0.0, 0.0)
    reached = (p > 0).to(v.dtype)
    above, below, nan = (reached @ m.to(v.dtype) > 0 for m in (v == torch.inf, v == -torch.inf, v.isnan()))
    out = out.masked_fill(above, torch.inf).masked_fill(below, -torch.inf)
    return out.masked_fill(nan | (above & below), torch.nan)
