"""Bounds on the queries of a range of keys against brute force."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_exprs import B, H, keeps, value

from fa4_inductor.analysis.solve import solve
from fa4_inductor.analysis.transposed import query_ranges
from fa4_inductor.spec import expr as E
from fa4_inductor.spec import parse_expr


def check(keep: E.Expr, sq: int, sk: int, size0: int) -> None:
    kept = value(keep, sq, sk, size0, (B, H, sq, sk))
    pairs = torch.tensor([(lo, hi) for lo in range(sk) for hi in range(lo, sk)])
    keys, queries = torch.arange(sk), torch.arange(sq)
    inside = ((keys >= pairs[:, :1]) & (keys <= pairs[:, 1:]))[:, None]  # pair, 1, key
    any_kept = (kept[:, :, None] & inside).any(4)  # B, H, pair, query
    all_kept = (kept[:, :, None] | ~inside).all(4)
    names = {"kv_lo": pairs[:, 0].view(1, 1, -1, 1), "kv_hi": pairs[:, 1].view(1, 1, -1, 1)}
    visited, full = query_ranges(keep)
    lo, hi = (value(e, sq, sk, size0, (B, H, len(pairs), 1), **names) for e in visited)
    assert not (any_kept & ~((queries >= lo) & (queries < hi))).any(), f"a kept query is outside {visited}"
    lo, hi = (value(e, sq, sk, size0, (B, H, len(pairs), 1), **names) for e in full)
    assert not (((queries >= lo) & (queries < hi)) & ~all_kept).any(), f"a dropped query is inside {full}"


@settings(max_examples=150, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(keeps(), st.integers(1, 6), st.integers(1, 7), st.integers(-2, 3))
def test_random_masks(keep, sq, sk, size0):
    check(solve(keep), sq, sk, size0)
    check(keep, sq, sk, size0)


@pytest.mark.parametrize(
    ("keep", "visited", "full"),
    [
        ("kv_idx <= q_idx", "maximum(0, kv_lo)", "maximum(0, kv_hi)"),
        ("kv_idx <= q_idx + (seqlen_k - seqlen_q)", None, None),
        ("(kv_idx <= q_idx) & (kv_idx > q_idx - 3)", "maximum(0, kv_lo)", "maximum(0, kv_hi)"),
        ("kv_idx < size0", None, None),
    ],
)
def test_what_masks_give(keep, visited, full):
    expr = parse_expr(keep)
    check(expr, 6, 7, 3)
    check(expr, 7, 5, 2)
    got = [str(bounds[0]) for bounds in query_ranges(expr)]
    assert visited is None or got == [visited, full]


def test_a_window_bounds_the_queries_on_both_sides():
    (_, hi), _ = query_ranges(parse_expr("(kv_idx <= q_idx) & (kv_idx > q_idx - 3)"))
    assert "kv_hi" in hi.free
