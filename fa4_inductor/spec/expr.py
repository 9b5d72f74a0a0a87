"""Score-program expressions: hash-consed, typed DAGs.

Two structurally equal expressions are the same object, so identity is equality and a dict keyed by `Expr` is a
common-subexpression table.
Build them with the constructors and Python operators of this module; every constructor checks kinds, promotes
operands and folds constants.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from typing import Any
from weakref import WeakValueDictionary

from fa4_inductor.errors import ProgramError
from fa4_inductor.spec.ops import OPS, Kind

INDEX_NAMES = ("b", "h", "q_idx", "kv_idx")
LENGTH_NAMES = ("seqlen_q", "seqlen_k")

_interned: WeakValueDictionary[tuple, Expr] = WeakValueDictionary()
_lock = threading.Lock()


class Expr:
    """A node. `op` is "const", "score", "index", "size", "load" or a name in `OPS`.

    `value` is the constant (bool, int, float), the index or size name, or the aux slot of a load; None for pointwise
    ops.
    `args` are the operands, or the indices of a load.
    """

    __slots__ = ("__weakref__", "args", "free", "kind", "op", "value")
    op: str
    kind: Kind
    args: tuple[Expr, ...]
    value: Any
    free: frozenset[str]
    """Names this depends on: index names, "score", "aux" when any load is inside, size names."""

    def __new__(cls, op: str, kind: Kind, args: tuple[Expr, ...] = (), value: Any = None) -> Expr:
        key = (op, kind, tuple(map(id, args)), type(value), repr(value))
        with _lock:
            node = _interned.get(key)
            if node is None:
                node = object.__new__(cls)
                node.op, node.kind, node.args, node.value = op, kind, args, value
                node.free = _free(op, args, value)
                _interned[key] = node
        return node

    def __repr__(self) -> str:
        from fa4_inductor.spec.printer import print_expr

        return print_expr(self)

    def __reduce__(self) -> tuple:
        return (Expr, (self.op, self.kind, self.args, self.value))

    @property
    def is_const(self) -> bool:
        return self.op == "const"

    def __add__(self, other: Operand) -> Expr:
        return call("add", self, other)

    def __radd__(self, other: Operand) -> Expr:
        return call("add", other, self)

    def __sub__(self, other: Operand) -> Expr:
        return call("sub", self, other)

    def __rsub__(self, other: Operand) -> Expr:
        return call("sub", other, self)

    def __mul__(self, other: Operand) -> Expr:
        return call("mul", self, other)

    def __rmul__(self, other: Operand) -> Expr:
        return call("mul", other, self)

    def __truediv__(self, other: Operand) -> Expr:
        return call("div", self, other)

    def __floordiv__(self, other: Operand) -> Expr:
        return call("floordiv", self, other)

    def __mod__(self, other: Operand) -> Expr:
        return call("mod", self, other)

    def __neg__(self) -> Expr:
        return call("neg", self)

    def __and__(self, other: Operand) -> Expr:
        return call("and_", self, other)

    def __or__(self, other: Operand) -> Expr:
        return call("or_", self, other)

    def __invert__(self) -> Expr:
        return call("not_", self)

    def __lt__(self, other: Operand) -> Expr:
        return call("lt", self, other)

    def __le__(self, other: Operand) -> Expr:
        return call("le", self, other)

    def __gt__(self, other: Operand) -> Expr:
        return call("gt", self, other)

    def __ge__(self, other: Operand) -> Expr:
        return call("ge", self, other)


Operand = Expr | bool | int | float


def _free(op: str, args: tuple[Expr, ...], value: Any) -> frozenset[str]:
    own = {"score": {"score"}, "index": {value}, "size": {value}, "load": {"aux"}}.get(op, set())
    return frozenset(own).union(*(a.free for a in args))


def const(value: bool | int | float) -> Expr:
    """A constant; its Python type gives the kind."""
    if isinstance(value, bool):
        return Expr("const", Kind.BOOL, (), value)
    if isinstance(value, int):
        return Expr("const", Kind.INT, (), value)
    return Expr("const", Kind.FLOAT, (), float(value))


def score() -> Expr:
    """The scaled score `softmax_scale * q . k`, FLOAT."""
    return Expr("score", Kind.FLOAT)


def index(name: str) -> Expr:
    """An index variable: one of `b`, `h` (query head), `q_idx`, `kv_idx`."""
    if name not in INDEX_NAMES:
        raise ProgramError(f"unknown index variable {name!r}; known: {', '.join(INDEX_NAMES)}")
    return Expr("index", Kind.INT, (), name)


def size(name: str) -> Expr:
    """A run-time integer: `seqlen_q`, `seqlen_k` or `sizeN`."""
    if name not in LENGTH_NAMES and not (name.startswith("size") and name[4:].isdigit()):
        raise ProgramError(f"unknown size {name!r}; known: seqlen_q, seqlen_k, sizeN")
    return Expr("size", Kind.INT, (), name)


def load(slot: int, indices: tuple[Operand, ...], kind: Kind) -> Expr:
    """Element of aux tensor `slot`. Indices are INT; an index outside the tensor reads the nearest element."""
    idx = tuple(cast(as_expr(i), Kind.INT) for i in indices)
    if any("score" in i.free for i in idx):
        raise ProgramError("an aux index may not depend on the score")
    return Expr("load", kind, idx, int(slot))


def as_expr(x: Operand) -> Expr:
    return x if isinstance(x, Expr) else const(x)


def cast(x: Expr, kind: Kind) -> Expr:
    """`x` converted to `kind` (to_bool is `!= 0`, to_int truncates toward zero); `x` itself if it has that kind."""
    if x.kind is kind:
        return x
    return call({Kind.BOOL: "to_bool", Kind.INT: "to_int", Kind.FLOAT: "to_float"}[kind], x)


def _promote(rule: str, args: tuple[Expr, ...]) -> tuple[Expr, ...]:
    if rule == "float":
        return tuple(cast(a, Kind.FLOAT) for a in args)
    if rule == "bool":
        if any(a.kind is not Kind.BOOL for a in args):
            raise ProgramError("logical ops take bool operands")
        return args
    if rule == "int":
        if any(a.kind is Kind.FLOAT for a in args):
            raise ProgramError("bitwise ops take int operands")
        return tuple(cast(a, Kind.INT) for a in args)
    if rule == "select":
        if args[0].kind is not Kind.BOOL:
            raise ProgramError("where takes a bool condition")
        common = Kind(max(args[1].kind, args[2].kind))
        return (args[0], cast(args[1], common), cast(args[2], common))
    common = Kind(max(a.kind for a in args))
    if rule == "numeric":
        common = Kind(max(common, Kind.INT))
    return tuple(cast(a, common) for a in args)


def call(name: str, *operands: Operand) -> Expr:
    """Apply a pointwise op. Operands are promoted; constants are folded.

    Raises:
        ProgramError: unknown op, wrong arity or kinds.
    """
    op = OPS.get(name)
    if op is None:
        raise ProgramError(f"unknown op {name!r}")
    if len(operands) != op.arity:
        raise ProgramError(f"{name} takes {op.arity} operands, got {len(operands)}")
    args = tuple(as_expr(x) for x in operands)
    if not name.startswith("to_"):
        args = _promote(op.operands, args)
    elif args[0].kind is {"to_bool": Kind.BOOL, "to_int": Kind.INT, "to_float": Kind.FLOAT}[name]:
        return args[0]
    kind = op.result if op.result is not None else args[-1].kind
    if name == "floordiv" and args[0].kind is not Kind.INT:
        raise ProgramError("floordiv takes int operands")
    if all(a.is_const for a in args):
        folded = _fold(name, kind, tuple(a.value for a in args))
        if folded is not None:
            return folded
    return Expr(name, kind, args)


def _fold(name: str, kind: Kind, values: tuple[Any, ...]) -> Expr | None:
    try:
        value = OPS[name].fold(*values)
    except (ValueError, ZeroDivisionError, OverflowError):
        return None  # leave it to run time, which gives inf or nan as torch does
    return const({Kind.BOOL: bool, Kind.INT: int, Kind.FLOAT: float}[kind](value))


TRUE = const(True)
FALSE = const(False)


def conjunction(terms: list[Expr]) -> Expr:
    """The and of `terms`; True when there are none."""
    result = TRUE
    for term in terms:
        result = term if result is TRUE else result if term is TRUE else call("and_", result, term)
    return result


def conjuncts(e: Expr) -> list[Expr]:
    """The terms of a nested and, left to right."""
    return [*conjuncts(e.args[0]), *conjuncts(e.args[1])] if e.op == "and_" else [e]


def walk(*roots: Expr) -> Iterator[Expr]:
    """Every distinct node below `roots`, operands before users."""
    seen: set[Expr] = set()
    stack: list[tuple[Expr, bool]] = [(r, False) for r in reversed(roots)]
    while stack:
        node, ready = stack.pop()
        if node in seen:
            continue
        if ready:
            seen.add(node)
            yield node
        else:
            stack.append((node, True))
            stack.extend((a, False) for a in reversed(node.args))


def rebuild(node: Expr, args: tuple[Expr, ...]) -> Expr:
    """`node` with other operands, promoted and folded anew."""
    if args == node.args:
        return node
    if node.op == "load":
        return load(node.value, args, node.kind)
    return call(node.op, *args)


def substitute(root: Expr, mapping: dict[Expr, Expr]) -> Expr:
    """`root` with every node in `mapping` replaced (outermost match first)."""
    done: dict[Expr, Expr] = dict(mapping)

    def visit(node: Expr) -> Expr:
        if node not in done:
            done[node] = rebuild(node, tuple(visit(a) for a in node.args))
        return done[node]

    return visit(root)


def is_finite_const(e: Expr) -> bool:
    return e.is_const and math.isfinite(e.value)
