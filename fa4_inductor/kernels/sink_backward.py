"""Gradients of what a sink reads: from the rows alone, without any work over the scores."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fa4_inductor.kernels.contract import widened
from fa4_inductor.kernels.reference_backward import add_to_elements
from fa4_inductor.lowering.derive import derivative_by, learned_loads
from fa4_inductor.spec import AttentionSpec
from fa4_inductor.spec.interpret import Env, evaluate, grid


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
    totals = {slot: torch.zeros(aux[slot].shape, dtype=torch.float32, device=lse.device) for slot in slots}
    for load in learned_loads(spec.sink, slots):
        values = d_sink * evaluate(derivative_by(spec.sink, load), env)
        add_to_elements(totals[load.value], load, values, env)
    return [totals[slot].to(aux[slot].device, aux[slot].dtype) for slot in slots]
