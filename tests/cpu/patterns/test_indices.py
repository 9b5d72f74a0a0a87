"""Index algebra against brute force: every identity is checked on all index values."""

from __future__ import annotations

import itertools
import math

import hypothesis
import hypothesis.strategies as st
import pytest
import sympy

from fa4_inductor.patterns.indices import FloorDiv, Ranges, Rem, exact_quotient

SHAPES = [
    ((2, 3, 4), (6, 4)), ((6, 4), (2, 3, 4)), ((2, 3, 4), (24,)), ((24,), (2, 12)), ((4, 6), (6, 4)),
    ((2, 1, 3), (2, 3)), ((3, 4, 5), (12, 5)), ((2, 3, 4), (2, 4, 3)), ((1, 6), (2, 3, 1)), ((8, 3), (2, 4, 3)),
]  # fmt: skip


def _numeric(e: sympy.Expr, values: dict[sympy.Symbol, int]) -> int:
    if isinstance(e, FloorDiv | Rem):
        x, n = (_numeric(a, values) for a in e.args)
        return x // n if isinstance(e, FloorDiv) else x % n
    if e.args:
        parts = [_numeric(a, values) for a in e.args]
        return sum(parts) if e.is_Add else math.prod(parts) if e.is_Mul else parts[0] ** parts[1]
    return int(values.get(e, e))


def _offset(index: list[int], shape: tuple[int, ...]) -> int:
    total = 0
    for i, n in zip(index, shape):
        total = total * n + i
    return total


@pytest.mark.parametrize(("new", "old"), SHAPES)
def test_reshape_keeps_the_row_major_offset(new: tuple[int, ...], old: tuple[int, ...]) -> None:
    ranges = Ranges()
    index = tuple(ranges.declare(f"i{k}", sympy.Integer(n)) for k, n in enumerate(new))
    source = ranges.reshape(index, [sympy.Integer(n) for n in new], [sympy.Integer(n) for n in old])
    for values in itertools.product(*(range(n) for n in new)):
        at = [_numeric(e, dict(zip(index, values))) for e in source]
        assert all(0 <= i < n for i, n in zip(at, old))
        assert _offset(at, old) == _offset(list(values), new)


def test_split_and_merge_undo_each_other() -> None:
    ranges = Ranges()
    length = sympy.Symbol("s0", integer=True, positive=True)
    b, h, q = (ranges.declare(n, s) for n, s in (("b", sympy.Integer(2)), ("h", sympy.Integer(8)), ("q", length)))
    merged = ranges.reshape((b, h, q), (sympy.Integer(2), sympy.Integer(8), length), (sympy.Integer(16), length))
    assert merged == (8 * b + h, q)
    assert ranges.reshape(merged, (sympy.Integer(16), length), (sympy.Integer(2), sympy.Integer(8), length)) == (
        b,
        h,
        q,
    )
    grouped = (b, ranges.div(h, sympy.Integer(4)), ranges.rem(h, sympy.Integer(4)), q)
    shape = (sympy.Integer(2), sympy.Integer(2), sympy.Integer(4), length)
    assert ranges.reshape(grouped, shape, (sympy.Integer(2), sympy.Integer(8), length)) == (b, h, q)


@hypothesis.given(
    st.lists(st.tuples(st.integers(-6, 6), st.integers(1, 5)), min_size=1, max_size=3), st.integers(0, 9),
    st.integers(1, 7),
)  # fmt: skip
@hypothesis.settings(max_examples=60, deadline=None)
def test_division_and_bounds_by_brute_force(terms: list[tuple[int, int]], constant: int, n: int) -> None:
    ranges = Ranges()
    symbols = [ranges.declare(f"x{i}", sympy.Integer(size)) for i, (_, size) in enumerate(terms)]
    e = sympy.Integer(constant) + sum(c * x for (c, _), x in zip(terms, symbols))
    low, high = ranges.bounds(e)
    points = list(itertools.product(*(range(size) for _, size in terms)))
    values = [_numeric(e, dict(zip(symbols, p))) for p in points]
    assert low <= min(values) and max(values) <= high
    if min(values) >= 0:
        quotient, remainder = ranges.div(e, sympy.Integer(n)), ranges.rem(e, sympy.Integer(n))
        for p, value in zip(points, values):
            at = dict(zip(symbols, p))
            assert (_numeric(quotient, at), _numeric(remainder, at)) == (value // n, value % n)


def test_unproven_bounds_stay_open() -> None:
    ranges = Ranges()
    s, t = (sympy.Symbol(n, integer=True, positive=True) for n in "st")
    x = ranges.declare("x", s)
    assert not ranges.in_range(x, t)
    assert ranges.below(x, t) is None
    assert ranges.below(x, s) is True
    assert ranges.below(x + s, s) is False
    assert exact_quotient(s + 1, s) is None
    assert exact_quotient(s * t, s) == t
