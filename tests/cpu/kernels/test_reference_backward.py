"""Gradients of the reference against autograd through its forward, in float64."""

import pytest
import torch

from fa4_inductor.kernels import reference
from fa4_inductor.kernels.reference import attention_reference
from fa4_inductor.kernels.reference_backward import backward_reference
from fa4_inductor.spec import AttentionSpec, AuxSpec, EmptyRow, parse_expr

_AUX = (AuxSpec("bool", 2), AuxSpec("float32", 1))


def spec(score="score", keep="True", sink=None, **rest):
    programs = {"score": parse_expr(score, _AUX), "keep": parse_expr(keep, _AUX)}
    return AttentionSpec(0.7, **programs, sink=sink and parse_expr(sink, _AUX), aux=_AUX, num_sizes=1, **rest)


SPECS = {
    "plain": spec(),
    "causal": spec(keep="kv_idx <= q_idx + seqlen_k - seqlen_q"),
    "softcap_padded": spec("3.0 * tanh(score * 0.3333)", "aux0[b, kv_idx]"),
    "alibi_window": spec("score + aux1[h] * float(kv_idx - q_idx)", "(kv_idx <= q_idx) & (kv_idx > q_idx - size0)"),
    "bent": spec("where(score > 0.2, score * score, 0.3 * score) + aux1[h]"),
    "sink": spec(keep="kv_idx < q_idx", sink="aux1[h]"),
    "empty_zero": spec(keep="kv_idx < q_idx"),
    "empty_mean": spec(keep="kv_idx < q_idx", empty_row=EmptyRow.MEAN),
}


def operands(q_heads=4, kv_heads=2, kv_batch=2):
    g = torch.Generator().manual_seed(1)

    def make(*shape):
        return torch.randn(shape, generator=g, dtype=torch.float64).requires_grad_()

    q, k, v = make(2, q_heads, 5, 8), make(kv_batch, kv_heads, 7, 8), make(kv_batch, kv_heads, 7, 6)
    keep = torch.rand(2, 7, generator=g) < 0.7
    keep[:, 3] = True
    return q, k, v, [keep, torch.randn(q_heads, generator=g)]


def check(program, **shape):
    q, k, v, aux = operands(**shape)
    out, lse = attention_reference(q, k, v, aux, program, (3,), need_lse=True, dtype=torch.float64)
    grad_out = torch.randn_like(out.transpose(2, 3)).transpose(2, 3)
    grad_lse = torch.randn_like(lse).masked_fill(lse == -torch.inf, 0.0)
    finite = lse.masked_fill(lse == -torch.inf, 0.0)
    for loss, g_lse in (((out * grad_out).sum(), None), ((out * grad_out).sum() + (finite * grad_lse).sum(), grad_lse)):
        want = torch.autograd.grad(loss, (q, k, v), retain_graph=True)
        got = backward_reference(
            grad_out, g_lse, q.detach(), k.detach(), v.detach(), out.detach(), lse.detach(), aux, program, (3,),
            dtype=torch.float64,
        )  # fmt: skip
        torch.testing.assert_close(got, want)
        assert all(t.transpose(1, 2).is_contiguous() for t in got)


@pytest.mark.parametrize("name", SPECS)
def test_programs(name):
    check(SPECS[name])


@pytest.mark.parametrize(
    "shape", [{"kv_batch": 1}, {"q_heads": 3, "kv_heads": 3}, {"q_heads": 6, "kv_heads": 1, "kv_batch": 1}]
)
def test_groups_and_shared_keys(shape):
    check(SPECS["causal"], **shape)


def test_chunks_of_heads_and_rows(monkeypatch):
    monkeypatch.setattr(reference, "_MAX_SCORES", 30)
    check(SPECS["empty_mean"])


def test_rows_of_nothing_but_fills_are_uniform():
    q, k, v, aux = operands()
    fill = torch.finfo(torch.float32).min
    aux_spec = (AuxSpec("float32", 1),)
    program = AttentionSpec(0.7, score=parse_expr("score + aux0[kv_idx]", aux_spec), aux=aux_spec)
    grad_out = torch.randn(2, 4, 5, 6)
    fills = [torch.full((7,), fill)]
    q, k, v = (t.detach().float() for t in (q, k, v))
    out, lse = attention_reference(q, k, v, fills, program, need_lse=True)
    _, _, dv = backward_reference(grad_out, None, q, k, v, out, lse, fills, program)
    torch.testing.assert_close(dv, grad_out.sum(2, keepdim=True).unflatten(1, (2, 2)).sum(2).expand_as(v) / 7)


def test_garbage_behind_a_mask_does_not_reach_q():
    q, k, v, _ = (t.detach() if isinstance(t, torch.Tensor) else t for t in operands())
    aux = [torch.arange(7).expand(2, 7) < 4, torch.zeros(4)]
    program = spec(keep="aux0[b, kv_idx]")
    v[:, :, 5] = torch.nan
    out, lse = attention_reference(q, k, v, aux, program, (0,), need_lse=True, dtype=torch.float64)
    grads = backward_reference(torch.ones_like(out), None, q, k, v, out, lse, aux, program, (0,), dtype=torch.float64)
    assert all(bool(g.isfinite().all()) for g in grads)


@pytest.mark.parametrize("shape", [(0, 5, 7), (2, 0, 7), (2, 5, 0)])
def test_nothing_to_attend(shape):
    batch, seqlen_q, seqlen_k = shape
    q = torch.randn(batch, 2, seqlen_q, 8)
    k, v = torch.randn(batch, 2, seqlen_k, 8), torch.randn(batch, 2, seqlen_k, 8)
    out, lse = attention_reference(q, k, v, [], AttentionSpec(1.0), need_lse=True)
    grads = backward_reference(torch.ones_like(out), None, q, k, v, out, lse, [], AttentionSpec(1.0))
    assert [g.shape for g in grads] == [q.shape, k.shape, v.shape] and not any(g.count_nonzero() for g in grads)
