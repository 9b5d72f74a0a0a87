"""Facts about scores: stages, affine parts, proven bounds, row constants."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fa4_inductor.analysis.bounds import may_be_minus_inf, score_bound, value_range
from fa4_inductor.analysis.parts import Stage, affine_in_score, drop_row_constants, stage
from fa4_inductor.spec import AuxSpec, parse_expr
from fa4_inductor.spec import expr as E
from fa4_inductor.spec.interpret import Env, evaluate, grid

AUX = (AuxSpec("float32", 1), AuxSpec("float32", 2), AuxSpec("bool", 2))
B, H, SQ, SK = 2, 3, 4, 5


def parse(text: str) -> E.Expr:
    return parse_expr(text, AUX)


def env() -> Env:
    g = torch.Generator().manual_seed(0)
    names = {**grid(B, H, SQ, SK), "score": torch.randn(B, H, SQ, SK, generator=g, dtype=torch.float64) * 30}
    return Env(
        names, [torch.randn(H, generator=g), torch.randn(SQ, SK, generator=g), torch.rand(B, SK, generator=g) < 0.5]
    )


@pytest.mark.parametrize(
    "text,want",
    [
        ("aux0[h] * 2.0", Stage.UNIFORM),
        ("float(seqlen_k)", Stage.UNIFORM),
        ("aux0[h] * float(q_idx)", Stage.ROW),
        ("float(aux2[b, kv_idx])", Stage.COLUMN),
        ("aux1[q_idx, kv_idx]", Stage.ELEMENT),
        ("tanh(score)", Stage.ELEMENT),
    ],
)
def test_stage(text, want):
    assert stage(parse(text)) is want


AFFINE = [
    "score", "score + aux0[h] * float(kv_idx - q_idx)", "(score - aux1[q_idx, kv_idx]) * 3.0 + 1.0",
    "-(score / 2.0)", "2.0 - score",
    "score * aux0[h] + score", "aux1[q_idx, kv_idx] + score", "(score + 1.0) / aux0[h]",
]  # fmt: skip


@pytest.mark.parametrize("text", AFFINE)
def test_affine_parts_rebuild_the_score(text):
    e = parse(text)
    slope, bias = affine_in_score(e)
    assert "score" not in slope.free | bias.free
    want = evaluate(e, env())
    got = evaluate(slope, env()) * env().names["score"] + evaluate(bias, env())
    torch.testing.assert_close(got, want.double(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "text", ["tanh(score)", "score * score", "where(aux2[b, kv_idx], score, 0.0)", "1.0 / score", "abs(score)"]
)
def test_not_affine(text):
    assert affine_in_score(parse(text)) is None


@pytest.mark.parametrize(
    "text,bound",
    [
        ("50.0 * tanh(score / 50.0)", 50.0),
        ("30.0 * sigmoid(score) - 10.0", 20.0),
        ("minimum(maximum(score, -8.0), 4.0)", 8.0),
        ("where(aux2[b, kv_idx], sin(score), 2.0)", 2.0),
        ("score", None),
        ("50.0 * tanh(score) + aux0[h]", None),
        ("tanh(score) * float(q_idx)", None),
        ("abs(score)", None),
        ("tanh(score) / aux0[h]", None),
    ],
)
def test_score_bound(text, bound):
    assert score_bound(parse(text)) == bound


@pytest.mark.parametrize(
    "text",
    [
        "score",
        "tanh(score) * 50.0",
        "score + float(kv_idx) * 0.5",
        "score + aux0[h] * float(kv_idx - q_idx)",
        "score + float(aux2[b, kv_idx])",
        "score + maximum(aux1[q_idx, kv_idx], -100.0)",
        "score + exp(aux0[h])",
    ],
)
def test_logits_above_minus_infinity(text):
    assert not may_be_minus_inf(parse(text))


@pytest.mark.parametrize(
    "text",
    [
        "score + aux1[q_idx, kv_idx]",
        "score - aux0[h]",
        "where(aux2[b, kv_idx], score, -inf)",
        "score + log(float(kv_idx))",
        "score + aux0[h] * aux1[q_idx, kv_idx]",
        "score * 2.0 + aux1[q_idx, kv_idx] / 3.0",
        "minimum(score, aux0[h])",
    ],
)
def test_logits_that_may_be_minus_infinity(text):
    assert may_be_minus_inf(parse(text))


def _floats() -> st.SearchStrategy[E.Expr]:
    leaf = st.one_of(
        st.sampled_from([E.score(), parse("float(q_idx)"), parse("float(kv_idx)"), parse("float(aux2[b, kv_idx])")]),
        st.floats(-4, 4).map(E.const),
    )

    def extend(inner: st.SearchStrategy[E.Expr]) -> st.SearchStrategy[E.Expr]:
        unary = ["neg", "abs", "tanh", "sigmoid", "sin", "exp", "sqrt", "floor", "round", "erf", "rsqrt", "log"]
        binary = ["add", "sub", "mul", "div", "minimum", "maximum", "pow"]
        return st.one_of(
            st.builds(E.call, st.sampled_from(unary), inner), st.builds(E.call, st.sampled_from(binary), inner, inner),
            st.builds(E.call, st.just("where"), st.just(parse("aux2[b, kv_idx]")), inner, inner),
        )  # fmt: skip

    return st.recursive(leaf, extend, max_leaves=6)


@settings(max_examples=200, derandomize=True, deadline=None)
@given(_floats())
def test_value_range_contains_every_value(e):
    low, high = value_range(e)
    values = torch.as_tensor(evaluate(e, env()), dtype=torch.float64)
    values = values[~values.isnan()].float().double()  # programs compute in fp32
    slack = 1e-5 * max((abs(x) for x in (low, high) if math.isfinite(x)), default=0.0) + 1e-6
    assert ((values >= low - slack) & (values <= high + slack)).all(), (e, low, high)


def test_row_constants_drop_only_when_harmless():
    assert (
        str(drop_row_constants(parse("score + 0.5 * float(q_idx) + aux1[q_idx, kv_idx]")))
        == "score + aux1[q_idx, kv_idx]"
    )
    assert str(drop_row_constants(parse("score - 3.0"))) == "score"
    for untouched in [
        "score + aux0[h]",
        "tanh(score + float(q_idx))",
        "score + aux0[h] * float(kv_idx - q_idx)",
        "score + log(float(q_idx))",
    ]:
        assert drop_row_constants(parse(untouched)) is parse(untouched)
