"""Derivatives of score programs against autograd through the interpreter."""

import math

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from fa4_inductor.lowering.derive import score_derivative
from fa4_inductor.spec import AuxSpec, Kind, parse_expr
from fa4_inductor.spec import expr as E
from fa4_inductor.spec.interpret import Env, evaluate, grid

_AUX = (AuxSpec("float64", 2),)
_Q, _KV = E.index("q_idx"), E.index("kv_idx")
_UNARY = ["neg", "abs", "exp", "tanh", "sigmoid", "erf", "sin", "cos", "floor", "round", "ceil", "trunc"]
_POSITIVE = ["log", "log2", "sqrt", "rsqrt"]


def logits() -> st.SearchStrategy[E.Expr]:
    leaves = [E.score(), E.score(), E.score() * 0.3, E.load(0, (_Q, _KV), Kind.FLOAT), E.cast(_KV - _Q, Kind.FLOAT)]
    leaf = st.one_of(st.sampled_from(leaves), st.floats(-2, 2).map(lambda x: E.const(round(x, 2))))

    def extend(inner: st.SearchStrategy[E.Expr]) -> st.SearchStrategy[E.Expr]:
        binary = st.builds(E.call, st.sampled_from(["add", "sub", "mul", "minimum", "maximum"]), inner, inner)
        divided = st.builds(lambda a, b: a / (b * b + 1.0), inner, inner)
        rest = st.builds(lambda a, b: a % (b * b + 1.0), inner, inner)
        power = st.builds(lambda a, b: E.call("pow", a * a + 1.0, b), inner, inner)
        unary = st.builds(E.call, st.sampled_from(_UNARY), inner)
        positive = st.builds(lambda name, a: E.call(name, a * a + 0.5), st.sampled_from(_POSITIVE), inner)
        chosen = st.builds(lambda a, b, c: E.call("where", a > b, b, c), inner, inner, inner)
        return st.one_of(binary, binary, divided, rest, power, unary, positive, chosen)

    return st.recursive(leaf, extend, max_leaves=6)


def by_autograd(program: E.Expr, env: Env) -> torch.Tensor:
    s = env.names["score"].clone().requires_grad_()
    value = evaluate(program, Env({**env.names, "score": s}, env.aux))
    if not isinstance(value, torch.Tensor) or not value.requires_grad:
        return torch.zeros_like(s)
    return torch.autograd.grad(value.sum(), s, materialize_grads=True)[0]


def environment() -> Env:
    g = torch.Generator().manual_seed(3)
    aux = torch.randn(3, 5, generator=g, dtype=torch.float64)
    return Env({**grid(1, 1, 3, 5), "score": torch.randn(1, 1, 3, 5, generator=g, dtype=torch.float64)}, [aux])


@given(logits())
def test_random_programs(program):
    env = environment()
    want = by_autograd(program, env)
    assume(bool(want.isfinite().all()))
    got = torch.as_tensor(evaluate(score_derivative(program), env), dtype=torch.float64).expand_as(want)
    # the interpreter rounds some constants to float32
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("program", "derivative"),
    [
        ("score + aux0[q_idx, kv_idx]", "1.0"),
        ("score * 0.5 - 0.1 * float(kv_idx - q_idx)", "0.5"),
        ("aux0[q_idx, kv_idx]", "0.0"),
        ("maximum(score, 0.0)", "where(score > 0.0, 1.0, 0.0)"),
        ("exp2(score)", f"exp2(score) * {math.log(2.0)!r}"),
    ],
)
def test_what_programs_look_like(program, derivative):
    assert repr(score_derivative(parse_expr(program, _AUX))) == derivative


def test_terms_without_the_score_may_be_infinite():
    program = parse_expr("score + where(kv_idx < 2, -inf, 0.0)")
    assert score_derivative(program) is E.const(1.0)
