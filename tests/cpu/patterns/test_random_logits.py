"""Random logits: the text of a program reads back, simplifying keeps its value, and a split into score, keep and
empty_row has the softmax of the logits it came from."""

from __future__ import annotations

import math

import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from fa4_inductor.errors import DeclineSite
from fa4_inductor.patterns import masks
from fa4_inductor.spec import EmptyRow, Kind, parse_expr
from fa4_inductor.spec import expr as E
from fa4_inductor.spec.simplify import simplify
from tests.random_exprs import AUX, B, H, keeps, value

SQ, SK = 3, 4
LOW = torch.finfo(torch.float32).min
FILLS = (-math.inf, LOW, LOW / 2, -1e30, -3e38)
SHAPE = (B, H, SQ, SK)


def logits() -> st.SearchStrategy[E.Expr]:
    """score with fills selected or added by masks, scaled, clamped and summed."""
    keep, fill = keeps(), st.sampled_from(FILLS).map(E.const)
    choice = st.builds(E.call, st.just("where"), keep, st.just(E.const(0.0)), fill)
    product = st.builds(lambda m, f: E.cast(~m, Kind.FLOAT) * f, keep, fill.filter(lambda f: f.value > -math.inf))
    additive = st.one_of(choice, product)

    def extend(inner: st.SearchStrategy[E.Expr]) -> st.SearchStrategy[E.Expr]:
        return st.one_of(
            st.builds(E.call, st.just("where"), keep, inner, fill),
            st.builds(E.call, st.just("where"), keep, fill, inner),
            st.builds(E.call, st.just("add"), inner, additive),
            st.builds(E.call, st.just("add"), additive, inner),
            st.builds(E.call, st.just("mul"), inner, st.sampled_from([0.5, 1.0, 4.0]).map(E.const)),
            st.builds(E.call, st.just("maximum"), inner, st.sampled_from([LOW, -1e30]).map(E.const)),
            st.builds(E.call, st.just("sub"), inner, st.just(E.cast(E.index("kv_idx"), Kind.FLOAT))),
        )

    return st.recursive(st.just(E.score()), extend, max_leaves=4)


def _softmax(e: E.Expr, keep: E.Expr = E.TRUE) -> tuple[torch.Tensor, torch.Tensor]:
    score = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1))
    x = value(e, SQ, SK, 2, SHAPE, score=score).float()
    x = x.masked_fill(~value(keep, SQ, SK, 2, SHAPE), -torch.inf)
    return x.softmax(-1), (x == -torch.inf).all(-1, keepdim=True)


@settings(max_examples=250, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
@given(logits())
def test_split_logits_have_the_same_softmax(e: E.Expr) -> None:
    expected, _ = _softmax(e)
    try:
        parts = masks.split(e, dtypes=(torch.float32,), fills_are_zero=False, has_sink=False)
    except DeclineSite:
        return
    actual, empty = _softmax(parts.score, parts.keep)
    if parts.empty_row is EmptyRow.MEAN:
        actual = torch.where(empty, 1.0 / SK, actual)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5, equal_nan=True)


@settings(max_examples=150, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
@given(logits())
def test_logits_read_back_and_keep_their_value_when_simplified(e: E.Expr) -> None:
    assert parse_expr(str(e), AUX) is e
    expected, actual = _softmax(e)[0], _softmax(simplify(e))[0]
    assume(not expected.isnan().all())
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5, equal_nan=True)
