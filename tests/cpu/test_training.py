"""Training through the backend: gradients equal eager's, or the site is left as it was with the reason."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from fa4_inductor import backend, log

IMPLEMENTATIONS = ("reference", "auto")


def attention(q, k, v, dropout=0.0):
    scores = torch.matmul(q, k.transpose(2, 3)) * 0.25
    causal = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
    p = torch.softmax(scores.masked_fill(~causal, torch.finfo(scores.dtype).min), dim=-1)
    return torch.matmul(F.dropout(p, dropout), v)


def qkv(length=6, **kwargs):
    return [torch.randn(2, 3, length, 8, **kwargs).requires_grad_() for _ in range(3)]


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    log.reset_warnings()
    log.counters().clear()
    yield
    torch._dynamo.reset()


@pytest.fixture
def uncompiled(monkeypatch):
    """Graphs run as they are after the rewrite; returns them."""
    seen = []
    monkeypatch.setattr(backend, "_compile", lambda gm, inputs, patches: seen.append(gm) or gm.forward)
    return seen


def compiled(f, implementation="reference", **options):
    return torch.compile(f, backend="fa4", options={"fa4.implementation": implementation}, **options)


def check(f, args, implementation="reference", **tolerance):
    got, want = compiled(f, implementation)(*args), f(*args)
    torch.testing.assert_close(got, want, **tolerance)
    wanted = [t for t in args if t.requires_grad]
    got, want = (torch.autograd.grad(out.square().sum(), wanted, materialize_grads=True) for out in (got, want))
    torch.testing.assert_close(got, want, **tolerance)


def fused():
    return log.counters()["fused"]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_gradients_equal_those_of_eager(implementation):
    check(attention, qkv(), implementation, rtol=1e-4, atol=1e-5)
    assert fused() == 1


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_some_operands_need_no_gradient(uncompiled, implementation):
    q, k, v = qkv()
    check(attention, [q, k.detach(), v], implementation)
    assert fused() == 1


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_checkpointed_bodies(implementation):
    def f(q, k, v):
        return checkpoint(attention, q, k, v, use_reentrant=False) + 1

    check(f, qkv(), implementation, rtol=1e-4, atol=1e-5)
    assert fused() == 1


@pytest.mark.parametrize("policy", [CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE])
def test_selective_checkpoint_policies_see_the_op(policy):
    forward = torch.ops.fa4_inductor._forward.default
    seen = []

    def choose(ctx, op, *args, **kwargs):
        seen.append(op)
        return policy if op is forward else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, choose)

    def f(q, k, v):
        return checkpoint(attention, q, k, v, use_reentrant=False, context_fn=contexts) + 1

    check(f, qkv(), rtol=1e-4, atol=1e-5)
    assert fused() == 1 and forward in seen


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_autocast(implementation):
    def f(x, w):
        with torch.autocast("cpu", torch.bfloat16):
            q = (x @ w).unflatten(-1, (3, 8)).transpose(1, 2)
            return attention(q, q.float() * 0.5, q).float()

    args = [torch.randn(2, 6, 24).requires_grad_(), torch.randn(24, 24).mul_(0.2).requires_grad_()]
    check(f, args, implementation, rtol=0.05, atol=0.1)
    assert fused() == 1


def test_a_sum_of_attentions_with_learned_factors(uncompiled):
    def f(q, k, v, factor):
        first = torch.softmax(q @ k.transpose(2, 3), -1)
        second = torch.softmax(k @ q.transpose(2, 3), -1)
        return (first - factor * second) @ v

    check(f, [*qkv(), torch.tensor(0.7).requires_grad_()], rtol=1e-4, atol=1e-5)
    assert fused() == 2


def test_the_detached_maximum_of_a_softmax_is_no_stop(uncompiled):
    def f(q, k, v):
        scores = torch.matmul(q, k.transpose(2, 3))
        e = torch.exp(scores - scores.amax(-1, keepdim=True).detach())
        return torch.matmul(e / e.sum(-1, keepdim=True), v)

    check(f, qkv())
    assert fused() == 1


def test_dynamic_lengths_train_with_one_graph(uncompiled):
    f = compiled(attention, dynamic=True)
    for length in (6, 11):
        args = qkv(length)
        got, want = (torch.autograd.grad(g(*args).square().sum(), args) for g in (f, attention))
        torch.testing.assert_close(got, want)
    assert len(uncompiled) == 1 and fused() == 1


def test_what_inductor_keeps_for_the_backward_is_linear_in_the_length():
    args = qkv(64)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        compiled(attention)(*args)
    assert kept and max(t.numel() for t in kept) <= args[0].numel()


def drops_a_row(q, k, v, keep):
    scores = (q @ k.transpose(2, 3)).masked_fill(~keep, -torch.inf)
    return torch.softmax(scores, -1) @ v


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_row_that_is_nan_in_eager_gives_no_gradient(uncompiled, implementation):
    q, k, v = qkv()
    keep = torch.ones(6, 6, dtype=torch.bool)
    keep[2] = False
    rows = torch.arange(6) != 2
    got = compiled(drops_a_row, implementation)(q, k, v, keep)[:, :, rows]
    want = drops_a_row(q[:, :, rows], k, v, keep[rows])
    got, want = (torch.autograd.grad(out.square().sum(), (q, k, v)) for out in (got, want))
    torch.testing.assert_close(got, want)
    assert fused() == 1


# -- left as it was ---------------------------------------------------------------------------------------------------


def left(reason):
    return log.counters()[f"declined.{reason}"] == 1 and fused() == 0


def detached_scores(q, k, v):
    return torch.softmax((q @ k.transpose(2, 3)).detach(), -1) @ v


def detached_key(q, k, v):
    return torch.softmax(q @ k.detach().transpose(2, 3), -1) @ v


def detached_probabilities(q, k, v):
    return torch.softmax(q @ k.transpose(2, 3), -1).detach() @ v


def scores_without_grad(q, k, v):
    with torch.no_grad():
        p = torch.softmax(q @ k.transpose(2, 3), -1)
    return p @ v


@pytest.mark.parametrize("f", [detached_scores, detached_key, detached_probabilities, scores_without_grad])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_gradients_stopped_inside_a_site(uncompiled, f, implementation):
    check(f, qkv(), implementation)
    assert left("needs_grad")


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_operands_whose_gradient_is_stopped_before_the_site(uncompiled, implementation):
    def f(q, k, v):
        q, k, v = (t.detach() for t in (q, k, v))
        return torch.softmax(q @ k.transpose(2, 3), -1) @ v

    assert not compiled(f, implementation)(*qkv()).requires_grad
    assert fused() == 1


def learned_bias(q, k, v, bias):
    return torch.softmax(q @ k.transpose(2, 3) + bias, -1) @ v


def test_captured_tensors_that_learn():
    check(learned_bias, [*qkv(), torch.randn(3, 6, 6).requires_grad_()], rtol=1e-4, atol=1e-5)
    assert fused() == 1


def test_sdpa_is_not_used_for_captured_tensors_that_learn(uncompiled):
    check(learned_bias, [*qkv(), torch.randn(3, 6, 6).requires_grad_()], "auto")
    assert left("needs_grad")


def relative_table(q, k, v, table):
    distance = torch.arange(k.shape[2]) - torch.arange(q.shape[2])[:, None]
    bias = table[distance.abs().clamp(max=3)].permute(2, 0, 1)
    return torch.softmax(q @ k.transpose(2, 3) + bias, -1) @ v


def test_a_table_of_distances_that_learns():
    check(relative_table, [*qkv(), torch.randn(4, 3).requires_grad_()], rtol=1e-4, atol=1e-5)
    assert fused() == 1


def temperature(q, k, v, slopes, factor):
    distance = (torch.arange(k.shape[2]) - torch.arange(q.shape[2])[:, None]).float()
    return torch.softmax(q @ k.transpose(2, 3) * factor + slopes[:, None, None] * distance, -1) @ v


def test_slopes_and_a_temperature_that_learn():
    check(
        temperature, [*qkv(), torch.rand(3).requires_grad_(), torch.tensor(0.5).requires_grad_()], rtol=1e-4, atol=1e-4
    )
    assert fused() == 1


def test_a_bias_by_row_that_the_output_does_not_depend_on(uncompiled):
    def f(q, k, v, row):
        return torch.softmax(q @ k.transpose(2, 3) + row[:, None], -1) @ v

    check(f, [*qkv(), torch.randn(6).requires_grad_()], rtol=1e-4, atol=1e-5)
    assert fused() == 1


def test_a_parameter_that_cancels_out_keeps_its_gradient_of_zero(uncompiled):
    def f(q, k, v, bias):
        scores = q @ k.transpose(2, 3)
        return torch.softmax(torch.where(torch.tensor(True), scores, scores + bias), -1) @ v

    check(f, [*qkv(), torch.randn(6, 6).requires_grad_()], rtol=1e-4, atol=1e-5)
    assert left("needs_grad")


def test_a_captured_tensor_that_does_not_learn(uncompiled):
    check(learned_bias, [*qkv(), torch.randn(3, 6, 6)])
    assert fused() == 1


def test_dropout(uncompiled):
    out = compiled(functools.partial(attention, dropout=0.5))(*qkv())
    out.sum().backward()
    assert left("dropout")


def test_a_second_derivative_is_refused(uncompiled):
    q, k, v = qkv()
    (grad,) = torch.autograd.grad(compiled(attention)(q, k, v).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="second derivative"):
        grad.square().sum().backward()


def test_torch_func_grad_gives_what_eager_gives():
    q, k, v = (t.detach() for t in qkv())
    grad = torch.func.grad(lambda q: attention(q, k, v).square().sum())
    torch.testing.assert_close(compiled(grad)(q), grad(q))
