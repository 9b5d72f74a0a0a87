"""Gradients of what a sink reads: from the rows alone, without any work over the scores."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fa4_inductor.kernels.contract import widened
from fa4_inductor.lowering.derive import score_derivative
from fa4_inductor.spec import AttentionSpec, Expr
from fa4_inductor.spec.expr import score, substitute, walk
from fa4_inductor.spec.interpret import Env, evaluate, grid

_AXES = ("b", "h", "q_idx")


def sink_gradients(
    slots: Sequence[int],
    grad_out: torch.Tensor,
    grad_lse: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    aux: Sequence[torch.Tensor],
    spec: AttentionSpec,
    seqlen_k: int,
    sizes: Sequence[int] = (),
) -> list[torch.Tensor]:
    """Gradients of the aux tensors in these slots (of `spec.sink_slots`), in their dtypes.

    The extra column has no V, so d sink = -exp(sink - LSE) * delta, delta as in `reference_backward`.

    Args:
        grad_out, out: (B, Hq, Sq, Dv). grad_lse, lse: (B, Hq, Sq), natural log.
    """
    assert spec.sink is not None
    batch, heads, seqlen_q = lse.shape
    names = grid(batch, heads, seqlen_q, seqlen_k, lse.device) | {f"size{i}": n for i, n in enumerate(sizes)}
    env = Env(names, [widened(t.to(lse.device), s.kind) for t, s in zip(aux, spec.aux, strict=True)])
    delta = (out.float() * grad_out.float()).sum(-1)
    if grad_lse is not None:
        delta = delta - grad_lse
    d_sink = -torch.exp(torch.as_tensor(evaluate(spec.sink, env)) - lse[..., None]) * delta[..., None]
    gradients = []
    for slot in slots:
        total = torch.zeros(aux[slot].shape, dtype=torch.float32, device=lse.device)
        for load in (n for n in walk(spec.sink) if n.op == "load" and n.value == slot):
            total = total + _of_load(load, spec.sink, d_sink, total, env)
        gradients.append(total.to(aux[slot].device, aux[slot].dtype))
    return gradients


def _of_load(load: Expr, sink: Expr, d_sink: torch.Tensor, like: torch.Tensor, env: Env) -> torch.Tensor:
    """What one load of the sink adds to the gradient of its tensor."""
    derivative = substitute(score_derivative(substitute(sink, {load: score()})), {score(): load})
    values = d_sink * evaluate(derivative, env)
    for axis, name in enumerate(_AXES):
        if not any(name in index.free for index in load.args):
            values = values.sum(axis, keepdim=True)
    if not load.args:
        return values.reshape(())
    indices = [torch.as_tensor(evaluate(i, env), device=like.device) for i in load.args]
    clamped = [i.clamp(0, n - 1).expand(values.shape) for i, n in zip(indices, like.shape, strict=True)]
    return torch.zeros_like(like).index_put(clamped, values, accumulate=True)
