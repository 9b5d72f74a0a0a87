"""The op's gradient: autograd, fakes, what is kept for it, and what it refuses."""

import dataclasses

import pytest
import torch

from fa4_inductor.kernels.graph_aux import eager_aux
from fa4_inductor.lowering.prepare import prepare
from fa4_inductor.runtime.ops import ATTENTION, ATTENTION_WITH_LSE
from fa4_inductor.spec import AttentionSpec, AuxSpec, parse_expr

_AUX = (AuxSpec("float32", 1),)
PROGRAM = AttentionSpec(
    0.3,
    score=parse_expr("4.0 * tanh(score * 0.25) + aux0[h] * float(kv_idx)", _AUX),
    keep=parse_expr("kv_idx < size0"),
    aux=_AUX,
    num_sizes=1,
).text


def operands(dtype=torch.float64, sq=5, sk=6):
    g = torch.Generator().manual_seed(2)
    shapes = ((2, 4, sq, 8), (2, 2, sk, 8), (2, 2, sk, 6))
    q, k, v = (torch.randn(s, generator=g, dtype=dtype).requires_grad_() for s in shapes)
    return q, k, v, [torch.randn(4, generator=g)]


def attention(q, k, v, aux, size=4):
    return ATTENTION(q, k, v, aux, PROGRAM, [size], "reference")


def eager(q, k, v, aux, size=4):
    k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    score = 4 * torch.tanh(q @ k.transpose(2, 3) * 0.3 * 0.25) + aux[0].view(4, 1, 1) * torch.arange(k.shape[2])
    return score.masked_fill(torch.arange(k.shape[2]) >= size, -torch.inf).softmax(-1) @ v


def test_gradcheck():
    q, k, v, aux = operands()
    assert torch.autograd.gradcheck(lambda *qkv: attention(*qkv, aux), (q, k, v))


def test_gradients_of_the_log_sum_exp():
    q, k, v, aux = operands(torch.float32)
    out, lse = ATTENTION_WITH_LSE(q, k, v, aux, PROGRAM, [4], "reference")
    keys = k.repeat_interleave(2, 1)[:, :, :4]
    score = 4 * torch.tanh(q @ keys.transpose(2, 3) * 0.3 * 0.25) + aux[0].view(4, 1, 1) * torch.arange(4)
    for loss, want in (
        (lse.square().sum(), score.logsumexp(-1).square().sum()),
        (lse.sum() + out.sum(), score.logsumexp(-1).sum() + eager(q, k, v, aux).sum()),
    ):
        got = torch.autograd.grad(loss, (q, k, v), retain_graph=True)
        grads = torch.autograd.grad(want, (q, k, v), retain_graph=True, materialize_grads=True)
        torch.testing.assert_close(got, grads)


def test_opcheck_of_the_backward():
    q, k, v, aux = (t.detach() if isinstance(t, torch.Tensor) else t for t in operands(torch.float32))
    out, lse = torch.ops.fa4_inductor._forward(q, k, v, aux, PROGRAM, [4], "reference", True)
    for grad_lse in (None, torch.randn_like(lse)):
        for learned in ([], [0]):
            args = (torch.randn_like(out), grad_lse, q, k, v, out, lse, aux, PROGRAM, [4], "reference", learned)
            torch.library.opcheck(torch.ops.fa4_inductor._backward.default, args)


@pytest.mark.parametrize("needed", [(0,), (1,), (0, 2)])
def test_some_operands_need_no_gradient(needed):
    operands_ = operands()
    qkv = [t.detach().requires_grad_(i in needed) for i, t in enumerate(operands_[:3])]
    aux = operands_[3]
    wanted = [qkv[i] for i in needed]
    got = torch.autograd.grad(attention(*qkv, aux).square().sum(), wanted)
    torch.testing.assert_close(got, torch.autograd.grad(eager(*qkv, aux).square().sum(), wanted))


def test_expanded_grad_out_and_operands_of_any_strides():
    q, k, v, aux = operands()
    strange = [t.detach().transpose(2, 3).contiguous().transpose(2, 3).requires_grad_() for t in (q, k, v)]
    got = torch.autograd.grad(attention(*strange, aux).sum(), strange)  # sum: grad_out is one number, expanded
    torch.testing.assert_close(got, torch.autograd.grad(eager(q, k, v, aux).sum(), (q, k, v)))


def test_nothing_as_large_as_the_scores_is_kept():
    q, k, v, aux = operands(torch.float32, sq=64, sk=64)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        out = attention(q, k, v, aux)
    own = {t.data_ptr() for t in (q, k, v, out, *aux)}
    assert sorted(t.numel() for t in kept if t.data_ptr() not in own) == [2 * 4 * 64]  # the LSE


def test_a_second_derivative_is_refused():
    q, k, v, aux = operands()
    (grad,) = torch.autograd.grad(attention(q, k, v, aux).sum(), q, create_graph=True)
    torch.testing.assert_close(grad, torch.autograd.grad(eager(q, k, v, aux).sum(), q)[0])
    with pytest.raises(RuntimeError, match="no second derivative"):
        grad.square().sum().backward()


_SINK_AUX = (AuxSpec("float32", 1), AuxSpec("bfloat16", 2))
SINK = AttentionSpec(0.3, keep=parse_expr("kv_idx <= q_idx"), aux=_SINK_AUX)


@pytest.mark.parametrize(
    ("sink", "value"),
    [
        ("aux0[h]", lambda a, b: a.view(4, 1, 1)),
        ("2.0 * tanh(aux0[h]) - aux1[b, q_idx]", lambda a, b: 2 * torch.tanh(a).view(4, 1, 1) - b[:, None, :, None]),
        ("aux0[h // 2] * aux0[0]", lambda a, b: (a[torch.arange(4) // 2] * a[0]).view(4, 1, 1)),
    ],
)
def test_gradients_of_sinks(sink, value):
    q, k, v, _ = operands(torch.float32, 5, 5)
    text = dataclasses.replace(SINK, sink=parse_expr(sink, _SINK_AUX)).text
    aux = [torch.randn(4), torch.randn(2, 5, dtype=torch.bfloat16)]
    learned = [a.requires_grad_() for i, a in enumerate(aux) if f"aux{i}" in sink]

    def theirs():
        scores = q @ k.repeat_interleave(2, 1).transpose(2, 3) * 0.3
        scores = scores.masked_fill(torch.ones(5, 5, dtype=torch.bool).triu(1), -torch.inf)
        column = value(aux[0], aux[1].float()).expand(2, 4, 5, 1)
        p = torch.softmax(torch.cat([scores, column], -1), -1)[..., :-1]
        return p @ v.repeat_interleave(2, 1), torch.cat([scores, column], -1).logsumexp(-1)

    ours = ATTENTION_WITH_LSE(q, k, v, aux, text, [], "reference")
    wanted = [q, k, v, *learned]
    losses = [(out * out).sum() + (lse * lse).sum() for out, lse in (ours, theirs())]
    got, want = (torch.autograd.grad(loss, wanted) for loss in losses)
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)


def test_a_second_derivative_of_a_sink_is_refused():
    q, k, v, _ = operands(torch.float32, 5, 5)
    text = dataclasses.replace(SINK, sink=parse_expr("aux0[h]", _SINK_AUX)).text
    aux = [torch.randn(4).requires_grad_(), torch.randn(2, 5, dtype=torch.bfloat16)]
    out = ATTENTION(q, k, v, aux, text, [], "reference")
    (grad,) = torch.autograd.grad(out.sum(), aux[0], create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        grad.square().sum().backward()


_LEARNED_AUX = (AuxSpec("float64", 3), AuxSpec("float64", 1), AuxSpec("float64", 2), AuxSpec("int64", 1))


@pytest.mark.parametrize(
    ("score", "keep"),
    [
        ("score + aux0[h, q_idx, kv_idx]", "kv_idx <= q_idx"),
        ("3.0 * tanh((score + aux0[0, q_idx, kv_idx]) * 0.5)", "True"),
        ("score * aux1[h] + aux2[h, kv_idx - q_idx + seqlen_q]", "kv_idx < size0"),
        ("score + aux2[aux3[kv_idx], h] * aux1[0] - aux1[b] * float(kv_idx - q_idx)", "kv_idx <= q_idx + 2"),
        ("where(score > 0.0, score * aux1[h], aux1[h + 1] * score) + aux2[h, kv_idx]", "True"),
    ],
)
def test_gradients_of_captured_tensors(score, keep):
    program = AttentionSpec(
        0.3, score=parse_expr(score, _LEARNED_AUX), keep=parse_expr(keep, _LEARNED_AUX), aux=_LEARNED_AUX, num_sizes=1
    )
    q, k, v, _ = operands()
    shapes = ((4, 5, 6), (5,), (6, 12))
    aux = [torch.randn(s, dtype=torch.float64).requires_grad_() for s in shapes] + [torch.arange(6) % 3]
    read = [aux[slot] for slot in sorted(program.score_slots) if slot < 3]

    def run(q, k, v, *learned):
        values = dict(zip(sorted(program.score_slots), learned))
        tensors = [values.get(i, t.detach()) for i, t in enumerate(aux)]
        return ATTENTION(q, k, v, tensors, program.text, [4], "reference")

    assert torch.autograd.gradcheck(run, (q, k, v, *read))


def test_a_tensor_that_score_and_sink_read_gets_both_gradients():
    aux_spec = (AuxSpec("float32", 1),)
    score, sink = (parse_expr(text, aux_spec) for text in ("score * aux0[h]", "aux0[h] - 1.0"))
    text = AttentionSpec(0.3, score=score, sink=sink, aux=aux_spec).text
    q, k, v, _ = operands(torch.float32)
    a = torch.randn(4).requires_grad_()
    scores = q @ k.repeat_interleave(2, 1).transpose(2, 3) * 0.3 * a.view(4, 1, 1)
    column = (a.view(1, 4, 1, 1) - 1).expand(2, 4, 5, 1)
    want = torch.softmax(torch.cat([scores, column], -1), -1)[..., :-1] @ v.repeat_interleave(2, 1)
    got = ATTENTION(q, k, v, [a], text, [], "reference")
    got, want = (torch.autograd.grad(out.square().sum(), (q, k, v, a)) for out in (got, want))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_an_implementation_without_backward_is_refused():
    q, k, v, aux = operands()
    with pytest.raises(RuntimeError, match="'sdpa' has no backward"):
        ATTENTION(q, k, v, aux, PROGRAM, [4], "sdpa")


def test_under_inductor_with_dynamic_lengths():
    def f(q, k, v, slopes):
        return attention(q * 2, k, v, [slopes], k.shape[2] - 1).transpose(1, 2).flatten(2)

    compiled = torch.compile(f, dynamic=True, fullgraph=True)
    for length in (6, 9):
        q, k, v, aux = operands(torch.float32, length, length + 2)
        wanted = (q, k, v, aux[0].requires_grad_())
        got = torch.autograd.grad(compiled(q, k, v, aux[0]).square().sum(), wanted)
        want = eager(q * 2, k, v, aux, length + 1).square().sum()
        torch.testing.assert_close(got, torch.autograd.grad(want, wanted), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "score", ["score + aux0[minimum(abs(kv_idx - q_idx), 3), h]", "score * aux0[kv_idx - q_idx + 5, h]"]
)
def test_gradients_reach_what_a_table_was_made_of(score):
    """The kernel gets the table of distances that the graph computes, and autograd takes its gradient from there."""
    aux_spec = (AuxSpec("float32", 2),)
    program = AttentionSpec(0.3, score=parse_expr(score, aux_spec), aux=aux_spec)
    prepared = prepare(program)
    assert prepared.tables
    q, k, v, _ = operands(torch.float32)
    weight = torch.randn(12, 4).requires_grad_()
    tables = eager_aux(prepared, q, k, [weight])
    got = ATTENTION(q, k, v, tables, prepared.spec.text, [], "reference")
    want = ATTENTION(q, k, v, [weight], program.text, [], "reference")
    got, want = (torch.autograd.grad(out.square().sum(), (q, k, v, weight)) for out in (got, want))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
