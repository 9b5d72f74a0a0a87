"""The index space of one site: its index variables, their sizes, and conversion of subscripts to expressions."""

from __future__ import annotations

from dataclasses import dataclass, field

import sympy

from fa4_inductor.errors import DeclineReason, DeclineSite
from fa4_inductor.patterns.indices import FloorDiv, Ranges, Rem, variable
from fa4_inductor.spec import expr as E
from fa4_inductor.spec.linear import Range
from fa4_inductor.spec.ops import Kind
from fa4_inductor.spec.simplify import simplify

ZERO = sympy.Integer(0)


@dataclass
class Space:
    """Sizes are sympy expressions; an index of size 1 is the number 0, so that broadcasting is no special case."""

    batch: sympy.Expr
    heads: sympy.Expr
    seqlen_q: sympy.Expr
    seqlen_k: sympy.Expr
    ranges: Ranges = field(default_factory=Ranges)
    symbols: list[sympy.Symbol] = field(default_factory=list)
    """Run-time integers in the order of `size0, size1, ...`."""

    def __post_init__(self) -> None:
        for size in (self.batch, self.heads, self.seqlen_q, self.seqlen_k):
            if any(s.name.startswith("u") for s in size.free_symbols):
                raise DeclineSite(DeclineReason.UNSUPPORTED_SHAPE, f"size {size} depends on data: it may be 0")
        self._values: dict[sympy.Symbol, E.Expr] = {}
        self._symbol_of: dict[E.Expr, sympy.Symbol] = {}
        self.b = self._index("b", self.batch)
        self.h = self._index("h", self.heads)
        self.q = self._index("q_idx", self.seqlen_q)
        self.kv = self._index("kv_idx", self.seqlen_k)

    def _index(self, name: str, size: sympy.Expr) -> sympy.Expr:
        return ZERO if size == 1 else self.ranges.declare(name, size)

    def feature(self, size: sympy.Expr) -> sympy.Expr:
        """The index of the contracted (or last) dimension of q, k or v."""
        return self.ranges.declare("d", size)

    def bounds(self) -> dict[str, Range]:
        """Inclusive bounds by name for the simplifier, where they are numbers."""
        names = {"b": self.batch, "h": self.heads, "q_idx": self.seqlen_q, "kv_idx": self.seqlen_k}
        result: dict[str, Range] = {n: (0, int(s) - 1) for n, s in names.items() if s.is_Integer}
        for name, size in (("seqlen_q", self.seqlen_q), ("seqlen_k", self.seqlen_k)):
            if size.is_Integer:
                result[name] = (int(size), int(size))
        return result

    def simplify(self, e: E.Expr) -> E.Expr:
        return simplify(e, self.bounds())

    def to_expr(self, e: sympy.Expr) -> E.Expr:
        """A subscript as an INT expression.

        Raises:
            DeclineSite: UNSUPPORTED_SHAPE when it depends on a feature index or on a size unknown before run time.
        """
        if e.is_Integer:
            return E.const(int(e))
        if e.is_Symbol:
            return self._symbol_expr(e)
        if e.is_Add or e.is_Mul:
            parts = [self.to_expr(a) for a in sorted(e.args, key=str)]
            result = parts[0]
            for part in parts[1:]:
                result = result + part if e.is_Add else result * part
            return result
        if e.is_Pow and e.exp.is_Integer and e.exp > 0:
            base = self.to_expr(e.base)
            result = base
            for _ in range(int(e.exp) - 1):
                result = result * base
            return result
        if isinstance(e, FloorDiv):
            return self.to_expr(e.args[0]) // self.to_expr(e.args[1])
        if isinstance(e, Rem):
            return self.to_expr(e.args[0]) % self.to_expr(e.args[1])
        name = type(e).__name__
        if name in ("FloorDiv", "CleanDiv"):
            return self.to_expr(e.args[0]) // self.to_expr(e.args[1])
        if name in ("Mod", "PythonMod"):
            return self.to_expr(e.args[0]) % self.to_expr(e.args[1])
        if name in ("Max", "Min"):
            first, *rest = (self.to_expr(a) for a in e.args)
            for other in rest:
                first = E.call("maximum" if name == "Max" else "minimum", first, other)
            return first
        raise DeclineSite(DeclineReason.UNSUPPORTED_SHAPE, f"index arithmetic {e} is not understood")

    def _symbol_expr(self, symbol: sympy.Symbol) -> E.Expr:
        if symbol in self._values:
            return self._values[symbol]
        if symbol in (self.b, self.h, self.q, self.kv):
            return E.index(symbol.name)
        if symbol in self.ranges.sizes:
            raise DeclineSite(DeclineReason.UNSUPPORTED_SHAPE, "a score or mask depends on the feature dimension")
        for name, size in (("seqlen_q", self.seqlen_q), ("seqlen_k", self.seqlen_k)):
            if symbol == size:
                return E.size(name)
        past = self._past_length(symbol)
        if past is not None:
            return past
        if symbol not in self.symbols:
            self.symbols.append(symbol)
        return E.size(f"size{self.symbols.index(symbol)}")

    def _past_length(self, symbol: sympy.Symbol) -> E.Expr | None:
        """The length of a cache to which this call's keys are appended, in terms of the lengths that programs know.

        Saying it that way takes no run-time integer and shows that the last query sees every key.
        """
        rest = sympy.expand(self.seqlen_k - symbol)
        if rest.is_Integer:
            return E.size("seqlen_k") - int(rest)
        rest = sympy.expand(rest - self.seqlen_q)
        return E.size("seqlen_k") - E.size("seqlen_q") - int(rest) if rest.is_Integer else None

    def to_index(self, e: E.Expr) -> sympy.Expr:
        """An INT expression as a subscript; what is not linear in the indices becomes a value symbol."""
        e = self.simplify(e)
        if e.op == "const":
            return sympy.Integer(int(e.value))
        if e.op == "index":
            return {"b": self.b, "h": self.h, "q_idx": self.q, "kv_idx": self.kv}[e.value]
        if e.op == "size":
            named = {"seqlen_q": self.seqlen_q, "seqlen_k": self.seqlen_k}
            return named[e.value] if e.value in named else self.symbols[int(e.value[4:])]
        if e.op in ("add", "sub", "mul") and e.kind is Kind.INT:
            left, right = (self.to_index(a) for a in e.args)
            return sympy.expand(left + right if e.op == "add" else left - right if e.op == "sub" else left * right)
        if e.op == "neg" and e.kind is Kind.INT:
            return -self.to_index(e.args[0])
        if e not in self._symbol_of:
            symbol = variable(f"value{len(self._values)}")
            self._symbol_of[e] = symbol
            self._values[symbol] = e
        return self._symbol_of[e]

    def depends(self, e: sympy.Expr, symbol: sympy.Expr) -> bool:
        """Does a subscript depend on an index, also through values?"""
        if symbol in e.free_symbols:
            return True
        name = str(symbol)
        return any(name in self._values[s].free for s in e.free_symbols if s in self._values)
