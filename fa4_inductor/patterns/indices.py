"""Index algebra: tensor subscripts as sympy expressions over index variables of known range.

Views become arithmetic (a merge is a sum of multiples, a split is a floor division and a remainder), and the rules here
undo one with the other where the ranges prove it: (b*H + h) // H = b because 0 <= h < H. Sizes may be symbolic; they
are positive integers (a dynamic dimension is never 0 or 1 in Dynamo's graphs).
"""

from __future__ import annotations

from collections.abc import Sequence

import sympy

Index = tuple[sympy.Expr, ...]


class FloorDiv(sympy.Function):
    """x // n for x >= 0, n > 0."""

    is_integer = True
    is_nonnegative = True


class Rem(sympy.Function):
    """x % n for x >= 0, n > 0."""

    is_integer = True
    is_nonnegative = True


def variable(name: str) -> sympy.Symbol:
    return sympy.Symbol(name, integer=True, nonnegative=True)


class Ranges:
    """Index variables with their exclusive upper bounds, and arithmetic under them."""

    def __init__(self, sizes: dict[sympy.Symbol, sympy.Expr] | None = None) -> None:
        self.sizes: dict[sympy.Symbol, sympy.Expr] = dict(sizes or {})

    def declare(self, name: str, size: sympy.Expr) -> sympy.Symbol:
        symbol = variable(name)
        self.sizes[symbol] = sympy.sympify(size)
        return symbol

    def in_range(self, e: sympy.Expr, size: sympy.Expr) -> bool:
        """Is 0 <= e < size proven?"""
        if e.is_Integer and size.is_Integer:
            return 0 <= int(e) < int(size)
        low, high = self.bounds(e)
        return _nonnegative(low) and _nonnegative(sympy.expand(size - 1 - high))

    def below(self, e: sympy.Expr, limit: sympy.Expr) -> bool | None:
        """e < limit: proven True, proven False, or None."""
        low, high = self.bounds(e)
        if _nonnegative(sympy.expand(limit - 1 - high)):
            return True
        if _nonnegative(sympy.expand(low - limit)):
            return False
        return None

    def bounds(self, e: sympy.Expr) -> tuple[sympy.Expr, sympy.Expr]:
        """Inclusive bounds of an expression; -oo or oo where nothing is known."""
        if e.is_Integer:
            return e, e
        if e in self.sizes:
            return sympy.Integer(0), self.sizes[e] - 1
        low, high = sympy.Integer(0), sympy.Integer(0)
        for term in sympy.Add.make_args(sympy.expand(e)):
            below, above = self._term_bounds(term)
            low, high = low + below, high + above
        return sympy.expand(low), sympy.expand(high)

    def _term_bounds(self, term: sympy.Expr) -> tuple[sympy.Expr, sympy.Expr]:
        atoms = [f for f in sympy.Mul.make_args(term) if f in self.sizes or isinstance(f, FloorDiv | Rem)]
        coefficient = sympy.Mul(*(f for f in sympy.Mul.make_args(term) if f not in atoms))
        if not atoms:
            return (term, term) if not _unknown(term, self.sizes) else (-sympy.oo, sympy.oo)
        if len(atoms) > 1 or _unknown(coefficient, self.sizes):
            return -sympy.oo, sympy.oo
        high = self._atom_high(atoms[0])
        if high is sympy.oo:
            return (sympy.Integer(0), high) if _nonnegative(coefficient) else (-sympy.oo, sympy.Integer(0))
        if _nonnegative(coefficient):
            return sympy.Integer(0), coefficient * high
        if _nonnegative(-coefficient):
            return coefficient * high, sympy.Integer(0)
        return -sympy.oo, sympy.oo

    def _atom_high(self, atom: sympy.Expr) -> sympy.Expr:
        if atom in self.sizes:
            return self.sizes[atom] - 1
        x, n = atom.args
        if isinstance(atom, Rem):
            return n - 1
        high = self.bounds(x)[1]
        if high.is_Integer and n.is_Integer:
            return sympy.Integer(int(high) // int(n))
        quotient = exact_quotient(sympy.expand(high + 1), n)
        return quotient - 1 if quotient is not None else sympy.oo

    def div(self, e: sympy.Expr, n: sympy.Expr) -> sympy.Expr:
        """e // n."""
        if n == 1:
            return e
        if e.is_Integer and n.is_Integer:
            return sympy.Integer(int(e) // int(n))
        whole, rest = self._split(e, n)
        if rest == 0 or self.in_range(rest, n):
            return whole
        if isinstance(rest, FloorDiv):
            return whole + self.div(rest.args[0], rest.args[1] * n)
        factored = self._factored(rest, n)
        if factored is not None:
            x, m, _, _ = factored
            return whole + self.div(x, m)
        return whole + FloorDiv(rest, n)

    def rem(self, e: sympy.Expr, n: sympy.Expr) -> sympy.Expr:
        """e % n."""
        if n == 1:
            return sympy.Integer(0)
        if e.is_Integer and n.is_Integer:
            return sympy.Integer(int(e) % int(n))
        rest = self._split(e, n)[1]
        if rest == 0 or self.in_range(rest, n):
            return rest
        if isinstance(rest, Rem) and exact_quotient(rest.args[1], n) is not None:
            return self.rem(rest.args[0], n)
        factored = self._factored(rest, n)
        if factored is not None:
            x, m, g, low = factored
            return sympy.expand(g * self.rem(x, m) + low)
        return Rem(rest, n)

    def _factored(self, e: sympy.Expr, n: sympy.Expr) -> tuple[sympy.Expr, sympy.Expr, sympy.Expr, sympy.Expr] | None:
        """(x, m, g, r) with e = g*x + r, n = g*m and 0 <= r < g: then e // n = x // m and e % n = g*(x % m) + r."""
        terms = sympy.Add.make_args(e)
        if len(terms) < 2:
            return None
        for term in terms:
            g = sympy.Mul(*(f for f in sympy.Mul.make_args(term) if f not in self.sizes))
            m = None if g == 1 else exact_quotient(n, g)
            if m is None:
                continue
            x, low = self._split(e, g)
            if x != 0 and self.in_range(low, g):
                return x, m, g, low
        return None

    def _split(self, e: sympy.Expr, n: sympy.Expr) -> tuple[sympy.Expr, sympy.Expr]:
        """e = n * whole + rest, moving to `whole` the terms that n divides."""
        whole, rest = sympy.Integer(0), sympy.Integer(0)
        for term in sympy.Add.make_args(sympy.expand(e)):
            quotient = exact_quotient(term, n)
            if quotient is None:
                rest += term
            else:
                whole += quotient
        return whole, rest

    def merge(self, index: Sequence[sympy.Expr], sizes: Sequence[sympy.Expr]) -> sympy.Expr:
        """Row-major offset of `index` in a box of `sizes`."""
        offset = sympy.Integer(0)
        for i, n in zip(index, sizes):
            offset = offset * n + i
        return recombine(sympy.expand(offset))

    def unmerge(self, offset: sympy.Expr, sizes: Sequence[sympy.Expr]) -> Index:
        """The index whose row-major offset in a box of `sizes` is `offset`."""
        result: list[sympy.Expr] = []
        for position in range(len(sizes) - 1, -1, -1):
            if position == 0:
                result.append(offset)
            else:
                result.append(self.rem(offset, sizes[position]))
                offset = self.div(offset, sizes[position])
        return tuple(reversed(result))

    def reshape(self, index: Index, new: Sequence[sympy.Expr], old: Sequence[sympy.Expr]) -> Index:
        """Index into shape `old` of the element at `index` in its reshape to `new`."""
        result: list[sympy.Expr] = []
        i = j = 0
        while i < len(new) or j < len(old):
            a, b = [i], [j]
            left = new[i] if i < len(new) else sympy.Integer(1)
            right = old[j] if j < len(old) else sympy.Integer(1)
            i, j = i + 1, j + 1
            while left != right:
                if j < len(old) and (i >= len(new) or _smaller(right, left)):
                    right, j = right * old[j], j + 1
                    b.append(j - 1)
                elif i < len(new):
                    left, i = left * new[i], i + 1
                    a.append(i - 1)
                else:  # sizes that multiply to the same number without common prefixes
                    return self.unmerge(self.merge(index, new), old)
            inner = [k for k in a if k < len(new)]
            outer = [k for k in b if k < len(old)]
            offset = self.merge([index[k] for k in inner], [new[k] for k in inner])
            result.extend(self.unmerge(offset, [old[k] for k in outer]))
        return tuple(result)


def _smaller(a: sympy.Expr, b: sympy.Expr) -> bool:
    """A preference, not a proof: is `a` the size to grow so that it reaches `b`?"""
    quotient = exact_quotient(b, a)
    if quotient is not None:
        return True
    if exact_quotient(a, b) is not None:
        return False
    return bool(a.is_Integer and b.is_Integer and int(a) < int(b))


def _unknown(e: sympy.Expr, sizes: dict[sympy.Symbol, sympy.Expr]) -> bool:
    """Does a coefficient hold anything but numbers and size symbols?"""
    return any(s in sizes or s.name.startswith("value") for s in e.free_symbols)


def _nonnegative(e: sympy.Expr) -> bool:
    """Proven e >= 0 for positive integer sizes."""
    if e.is_Integer:
        return int(e) >= 0
    if not e.free_symbols or e.has(sympy.oo, -sympy.oo, sympy.nan):
        return e is sympy.oo
    # Every size is at least 1: with s = t + 1, t >= 0, a polynomial without negative coefficients is not negative.
    shifted = sympy.expand(e.subs({s: s + 1 for s in e.free_symbols}, simultaneous=True))
    return all(_sign_known(term) for term in sympy.Add.make_args(shifted))


def _sign_known(term: sympy.Expr) -> bool:
    coefficient, rest = term.as_coeff_Mul()
    return coefficient >= 0 and all(f.is_Symbol or f.is_Pow or f.is_Integer for f in sympy.Mul.make_args(rest))


def exact_quotient(e: sympy.Expr, n: sympy.Expr) -> sympy.Expr | None:
    """e / n when it is a polynomial with integer coefficients, else None."""
    if e == 0:
        return sympy.Integer(0)
    if n.is_Integer and e.is_Integer:
        return sympy.Integer(int(e) // int(n)) if int(e) % int(n) == 0 else None
    quotient = e / n
    if quotient.is_Add:
        quotient = sympy.expand(quotient)
    for term in sympy.Add.make_args(quotient):
        for factor in sympy.Mul.make_args(term):
            if factor.is_Rational and not factor.is_Integer:
                return None
            if factor.is_Pow and not (factor.exp.is_Integer and factor.exp > 0):
                return None
    return quotient


def recombine(e: sympy.Expr) -> sympy.Expr:
    """c*n*(x // n) + c*(x % n) = c*x."""
    if not e.has(FloorDiv):
        return e
    for quotient in e.atoms(FloorDiv):
        x, n = quotient.args
        remainder = Rem(x, n)
        c = e.coeff(remainder)
        if c != 0 and sympy.expand(e.coeff(quotient) - c * n) == 0:
            return recombine(sympy.expand(e - c * n * quotient - c * remainder + c * x))
    return e
