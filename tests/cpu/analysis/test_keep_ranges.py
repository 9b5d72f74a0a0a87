"""Analyses of `keep` against brute force: the interpreter on small grids is the truth, expressions are random."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_exprs import AUX, B, H, keeps, value

from fa4_inductor.analysis import SAME_LENGTHS, Lengths, facts, may_be_empty
from fa4_inductor.analysis.solve import solve
from fa4_inductor.spec import AttentionSpec, parse_expr, parse_spec
from fa4_inductor.spec import expr as E


def spec_of(keep: E.Expr) -> AttentionSpec:
    return AttentionSpec(1.0, keep=keep, aux=AUX, num_sizes=1)


def check_ranges(spec: AttentionSpec, sq: int, sk: int, size0: int) -> None:
    f = facts(spec)
    kept = value(spec.keep, sq, sk, size0, (B, H, sq, sk))
    pairs = torch.tensor([(lo, hi) for lo in range(sq) for hi in range(lo, sq)])
    q_lo, q_hi = pairs[:, 0].view(1, 1, -1, 1), pairs[:, 1].view(1, 1, -1, 1)
    rows, keys = torch.arange(sq), torch.arange(sk)
    inside = ((rows >= pairs[:, :1]) & (rows <= pairs[:, 1:]))[..., None]  # pair, row, 1
    any_kept = (kept[:, :, None] & inside).any(3)  # B, H, pair, Sk
    all_kept = (kept[:, :, None] | ~inside).all(3)
    shape = (B, H, len(pairs), 1)
    lo, hi = (value(e, sq, sk, size0, shape, q_lo=q_lo, q_hi=q_hi) for e in f.kv_range)
    assert not (any_kept & ~((keys >= lo) & (keys < hi))).any(), f"a kept key is outside {f.kv_range}"
    assert ((lo >= 0) & (hi <= sk)).all()
    lo, hi = (value(e, sq, sk, size0, shape, q_lo=q_lo, q_hi=q_hi) for e in f.kv_full)
    assert not (((keys >= lo) & (keys < hi)) & ~all_kept).any(), f"a dropped key is inside {f.kv_full}"
    lo, hi = (value(e, sq, sk, size0, shape, q_lo=q_lo, q_hi=q_hi) for e in f.kv_full_rest)
    column = value(f.column, sq, sk, size0, (B, H, 1, sk))
    assert not ((keys >= lo) & (keys < hi) & column & ~all_kept).any(), f"dropped inside {f.kv_full_rest} of {f.column}"
    rows_of_one = {"q_lo": rows.view(1, 1, -1, 1), "q_hi": rows.view(1, 1, -1, 1)}
    lo, hi = (value(e, sq, sk, size0, (B, H, sq, 1), **rows_of_one) for e in f.row_range or f.kv_range)
    assert not (kept & ~((keys >= lo) & (keys < hi))).any(), f"a kept key is outside {f.row_range}"
    assert ((lo >= 0) & (hi <= sk)).all()
    lo, hi = (value(e, sq, sk, size0, (B, H, sq, 1), **rows_of_one) for e in f.row_full or f.kv_full_rest)
    assert not ((keys >= lo) & (keys < hi) & column & ~kept).any(), f"a dropped key is inside {f.row_full}"
    if f.exact:
        lo, hi = (value(e, sq, sk, size0, (B, H, sq, 1)) for e in f.row.clipped())
        assert torch.equal(kept, (keys >= lo) & (keys < hi))


def check_emptiness(spec: AttentionSpec, sq: int, sk: int, size0: int) -> None:
    empty = not value(spec.keep, sq, sk, size0, (B, H, sq, sk)).any(-1).all()
    known = [Lengths(), Lengths((("seqlen_q", sq), ("seqlen_k", sk), ("size0", size0)))]
    known += [SAME_LENGTHS] if sq == sk else []
    known += [Lengths(nonnegative=(E.size("seqlen_k") - E.size("seqlen_q"),))] if sq <= sk else []
    for lengths in known:
        assert may_be_empty(spec, lengths) or not empty, f"an empty row under {lengths}"


@settings(max_examples=250, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(keeps(), st.integers(1, 6), st.integers(1, 7), st.integers(-2, 3))
def test_random_keeps_against_brute_force(keep, sq, sk, size0):
    shape = (B, H, sq, sk)
    assert torch.equal(value(solve(keep), sq, sk, size0, shape), value(keep, sq, sk, size0, shape))
    check_ranges(spec_of(keep), sq, sk, size0)
    check_emptiness(spec_of(keep), sq, sk, size0)


NAMED = {
    "causal": ("kv_idx <= q_idx", True),
    "causal, other spelling": ("~(kv_idx - q_idx > 0)", True),
    "bottom right": ("kv_idx <= q_idx + (seqlen_k - seqlen_q)", False),
    "window": ("(kv_idx <= q_idx) & (q_idx - kv_idx < 3)", False),
    "both ways": ("abs(q_idx - kv_idx) <= 2", False),
    "window or global": ("(kv_idx <= q_idx) & ((q_idx - kv_idx < 3) | (kv_idx < 2))", False),
    "chunks": ("(kv_idx // 3 == q_idx // 3) & (kv_idx <= q_idx)", False),
    "prefix": ("(kv_idx <= q_idx) | (kv_idx < aux1[b])", False),
    "lengths": ("kv_idx < aux1[b]", False),
    "padding": ("aux0[b, kv_idx] & (kv_idx <= q_idx)", False),
    "documents": ("(aux2[b, kv_idx] == aux2[b, q_idx]) & (kv_idx <= q_idx)", False),
}


def test_a_bound_loaded_by_row_is_known_for_a_single_row():
    """A static cache: queries at positions that only the device knows."""
    spec = parse_spec("fa4/1; aux=int64[1]; sizes=0; scale=1.0; score=score; keep=kv_idx <= aux0[q_idx]; empty_row=nan")
    f = facts(spec)
    assert f.kv_range == (E.const(0), E.size("seqlen_k"))
    assert f.row_range is not None and f.row_range[1] is E.call(
        "minimum", E.size("seqlen_k"), parse_expr("aux0[q_idx] + 1", spec.aux)
    )
    assert f.row_full == f.row_range
    causal = facts(spec_of(parse_expr("kv_idx <= q_idx")))
    assert causal.row_range is None and causal.row_full is None


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("sq,sk", [(6, 6), (3, 7), (7, 3)])
def test_named_masks(name, sq, sk):
    text, causal = NAMED[name]
    spec = spec_of(parse_expr(text, AUX))
    check_ranges(spec, sq, sk, 1)
    check_emptiness(spec, sq, sk, 1)
    assert facts(spec).is_causal is causal


@pytest.mark.parametrize(
    "name,exact",
    [
        ("causal", True),
        ("window", True),
        ("chunks", True),
        ("prefix", True),
        ("window or global", False),
        ("padding", False),
    ],
)
def test_exactness(name, exact):
    assert facts(spec_of(parse_expr(NAMED[name][0], AUX))).exact is exact


@pytest.mark.parametrize(
    "text,column,full",
    [
        ("aux0[b, kv_idx] & (kv_idx <= q_idx)", "aux0[b, kv_idx]", "q_lo + 1"),
        ("aux0[b, kv_idx] | (kv_idx <= q_idx)", "True", "q_lo + 1"),
        (
            "(kv_idx <= q_idx) & (kv_idx % 2 == 0) & ~aux0[b, kv_idx]",
            "(kv_idx % 2 == 0) & ~aux0[b, kv_idx]",
            "q_lo + 1",
        ),
        ("(aux2[b, kv_idx] == aux2[b, q_idx]) & aux0[b, kv_idx]", "aux0[b, kv_idx]", "0"),
    ],
)
def test_factor_of_the_key_alone(text, column, full):
    f = facts(spec_of(parse_expr(text, AUX)))
    assert (str(f.column), full in str(f.kv_full_rest[1])) == (column, True)


@pytest.mark.parametrize(
    "text,unknown,same",
    [
        ("kv_idx <= q_idx", False, False),
        ("(kv_idx <= q_idx) & (q_idx - kv_idx < 3)", True, False),  # with Sq > Sk late rows see nothing
        ("(kv_idx <= q_idx) & (q_idx - kv_idx < 0)", True, True),
        ("kv_idx <= q_idx + (seqlen_k - seqlen_q)", True, False),
        ("kv_idx < q_idx", True, True),
        ("(kv_idx // 64 == q_idx // 64) & (kv_idx <= q_idx)", True, False),
        ("aux0[b, kv_idx] | (kv_idx == q_idx)", True, False),
        ("aux0[b, kv_idx]", True, True),
        ("kv_idx < aux1[b]", True, True),
    ],
)
def test_empty_rows(text, unknown, same):
    spec = spec_of(parse_expr(text, AUX))
    assert (may_be_empty(spec), may_be_empty(spec, SAME_LENGTHS)) == (unknown, same)


def test_a_sink_saves_every_row():
    text = "fa4/1; aux=float32[1]; sizes=0; scale=1.0; score=score; keep=kv_idx < q_idx; sink=aux0[h]; empty_row=zero"
    assert not may_be_empty(parse_spec(text))


@pytest.mark.parametrize("width", [1, 2, 64])
def test_window_counts_the_diagonal(width):
    """Key q - W + 1 is visible, key q - W is not (a window of W keys includes the row's own)."""
    f = facts(spec_of(parse_expr(f"(kv_idx <= q_idx) & (kv_idx > q_idx - {width})", AUX)))
    assert str(f.window_left) == str(width - 1) and str(f.row.hi) == "q_idx + 1"


@pytest.mark.parametrize(
    "text", ["kv_idx <= q_idx + 1", "kv_idx < q_idx", "kv_idx <= q_idx + size0", "(kv_idx <= q_idx) & aux0[b, kv_idx]"]
)
def test_almost_causal_is_not_causal(text):
    assert not facts(spec_of(parse_expr(text, AUX))).is_causal
