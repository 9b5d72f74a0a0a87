"""Gradients of attention as its spec reads, in eager torch: the oracle of every backward kernel. Any device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fa4_inductor.kernels.contract import bshd, widened
from fa4_inductor.kernels.reference import chunks, dropout_factor, full, names_of
from fa4_inductor.lowering.derive import derivative_by, learned_loads, score_derivative
from fa4_inductor.spec import AttentionSpec, EmptyRow, Expr
from fa4_inductor.spec.interpret import Env, evaluate

LOWEST_LSE = -(2.0**20)
"""An LSE below this is taken for a sum of fills (finfo.min and its like)."""
Gradients = list[torch.Tensor]


def backward_reference(
    grad_out: torch.Tensor,
    grad_lse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    aux: Sequence[torch.Tensor],
    spec: AttentionSpec,
    sizes: Sequence[int] = (),
    *,
    learned: Sequence[int] = (),
    dtype: torch.dtype = torch.float32,
) -> Gradients:
    """[dq, dk, dv, ...] in the shapes and dtypes of q, k and v with BSHD memory, computed in `dtype` throughout; then
    the gradients of the aux tensors in the slots `learned`, as far as the score reads them.

    Rows without keys give no gradient, except that of the mean of V where this is what they get.

    Args:
        grad_out: (B, Hq, Sq, Dv), any strides. grad_lse: (B, Hq, Sq), None where the LSE is not used.
        q, k, v, aux, sizes: what the forward got. out, lse: what it gave (natural log).
    """
    (batch, heads, seqlen_q, _), seqlen_k = q.shape, k.shape[2]
    group = heads // max(k.shape[1], 1)
    dq = torch.zeros(q.shape, dtype=dtype, device=q.device)
    dk = torch.zeros((batch, *k.shape[1:]), dtype=dtype, device=q.device)
    dv = torch.zeros((batch, *v.shape[1:]), dtype=dtype, device=q.device)
    mean_rows = spec.sink is None and spec.empty_row is EmptyRow.MEAN and seqlen_k > 0
    delta = (out.to(dtype) * grad_out.to(dtype)).sum(-1)
    if grad_lse is not None:
        delta = delta - grad_lse.to(dtype)
    dtypes = [aux[slot].dtype for slot in learned]
    aux = [widened(t, spec.aux[i].kind, dtype) for i, t in enumerate(aux)]
    totals = {slot: torch.zeros(aux[slot].shape, dtype=dtype, device=q.device) for slot in learned}
    loads = learned_loads(spec.score, totals)
    for h, rows in chunks(batch, heads, seqlen_q, seqlen_k):
        kv_heads = torch.arange(h.start, h.stop, device=q.device) // group
        keys, values = k[:, kv_heads].to(dtype), v[:, kv_heads].to(dtype)
        queries, grads = q[:, h, rows].to(dtype), grad_out[:, h, rows].to(dtype)
        names = names_of(q, seqlen_k, sizes, h, rows)
        names["score"] = queries @ keys.transpose(-1, -2) * spec.softmax_scale
        env, shape = Env(names, aux), tuple(names["score"].shape)
        p, kept = _probabilities(spec, env, shape, lse[:, h, rows, None].to(dtype))
        dp, weights = grads @ values.transpose(-1, -2), p
        factor = dropout_factor(spec, names, aux, heads, dtype)
        if factor is not None:
            dp, weights = dp * factor, p * factor
            if mean_rows:
                weights = torch.where(lse[:, h, rows, None] == -torch.inf, factor / seqlen_k, weights)
        ds = p * (dp - delta[:, h, rows, None])
        for load in loads:
            values = ds * full(derivative_by(spec.score, load), env, shape, dtype)
            add_to_elements(totals[load.value], load, values.masked_fill(~kept, 0.0), env)
        ds = ds * full(score_derivative(spec.score), env, shape, dtype) * spec.softmax_scale
        ds = ds.masked_fill(~kept, 0.0)
        dq[:, h, rows] = ds @ keys
        for i, kv_head in enumerate(kv_heads.tolist()):
            dk[:, kv_head] += ds[:, i].transpose(-1, -2) @ queries[:, i]
            dv[:, kv_head] += weights[:, i].transpose(-1, -2) @ grads[:, i]
    if mean_rows and spec.dropout is None:
        dv += of_mean_rows(grad_out.to(dtype), lse, k.shape[1]) / seqlen_k
    dk, dv = (t if t.shape[0] == like.shape[0] else t.sum(0, keepdim=True) for t, like in ((dk, k), (dv, v)))
    of_aux = (totals[slot].to(dtype_of) for slot, dtype_of in zip(learned, dtypes, strict=True))
    return [bshd(dq, q.dtype), bshd(dk, k.dtype), bshd(dv, v.dtype), *of_aux]


def add_to_elements(total: torch.Tensor, load: Expr, values: torch.Tensor, env: Env) -> None:
    """Add the gradients `values` (B, H, Sq, Sk or 1) of what `load` gave to the gradient of its tensor."""
    for axis, name in enumerate(("b", "h", "q_idx", "kv_idx")):
        if not any(name in index.free for index in load.args):
            values = values.sum(axis, keepdim=True)
    if not load.args:
        total += values.reshape(())
        return
    indices = [torch.as_tensor(evaluate(i, env), device=total.device) for i in load.args]
    clamped = [i.clamp(0, n - 1).expand(values.shape) for i, n in zip(indices, total.shape, strict=True)]
    total.index_put_(clamped, values, accumulate=True)


def _probabilities(
    spec: AttentionSpec, env: Env, shape: tuple[int, ...], lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """P (B, H, Sq, Sk), and where it is not 0, from the LSE (B, H, Sq, 1)."""
    p = torch.exp(full(spec.score, env, shape, lse.dtype) - lse)
    kept = full(spec.keep, env, shape, torch.bool) & (p != 0) & (lse != -torch.inf)
    p = p.masked_fill(~kept, 0.0)
    if spec.sink is None:  # an LSE of nothing but fills has no bits left for the number of keys
        p = torch.where((lse < LOWEST_LSE) & (lse != -torch.inf), p / p.sum(-1, keepdim=True), p)
    return p, kept


def of_mean_rows(grad_out: torch.Tensor, lse: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """(B, Hkv, 1, Dv): sum of `grad_out` (B, Hq, Sq, Dv) over the rows that keep no key, whose LSE (B, Hq, Sq) is -inf.

    Each key gets this over Sk where such a row gets the mean of V.
    """
    without_keys = (lse == -torch.inf).to(grad_out.dtype)
    rows = without_keys[:, :, None] @ grad_out
    return rows.unflatten(1, (kv_heads, -1)).sum(2)
