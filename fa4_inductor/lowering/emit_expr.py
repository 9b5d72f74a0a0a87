"""Expressions as Python text that builds CuTe-DSL scalars: BOOL is Boolean, INT is Int32, FLOAT is Float32.

Values used once are written where they are used, shared ones get a name, so the text is a function of the expression
alone (it is fingerprinted). Logits use the fast forms of the special function unit; what a comparison, a truncation
or an index depends on uses exact forms, since there the last bit decides.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from fa4_inductor.analysis.parts import Stage, stage
from fa4_inductor.errors import ProgramError
from fa4_inductor.spec.attention import AuxSpec
from fa4_inductor.spec.expr import Expr, walk
from fa4_inductor.spec.linear import Linear, linear, to_expr
from fa4_inductor.spec.ops import OPS, Kind

INT_LIMIT = 1 << 30
"""Constants must be smaller in magnitude, so that adding two lengths or indices cannot leave int32."""
LOG2_E = math.log2(math.e)

_COMPARE = frozenset({"lt", "le", "gt", "ge", "eq", "ne"})
_EXACT_BELOW = _COMPARE | {"to_int", "to_bool", "floor", "ceil", "trunc", "round", "load", "mod"}

_CALLS = {
    ("minimum", Kind.INT): "ops.imin", ("maximum", Kind.INT): "ops.imax", ("abs", Kind.INT): "pops.iabs",
    ("minimum", Kind.FLOAT): "pops.minimum", ("maximum", Kind.FLOAT): "pops.maximum", ("abs", Kind.FLOAT): "ops.fabs",
    ("floordiv", Kind.INT): "pops.floordiv", ("mod", Kind.INT): "pops.mod", ("mod", Kind.FLOAT): "pops.float_mod",
    ("not_", Kind.BOOL): "pops.logical_not", ("where", Kind.INT): "ops.select", ("where", Kind.FLOAT): "ops.select",
    ("to_int", Kind.INT): "pops.truncate", ("to_float", Kind.FLOAT): "Float32",
    ("floor", Kind.FLOAT): "pops.floor", ("ceil", Kind.FLOAT): "pops.ceil", ("trunc", Kind.FLOAT): "pops.trunc",
    ("round", Kind.FLOAT): "pops.round_even", ("sqrt", Kind.FLOAT): "pops.sqrt", ("rsqrt", Kind.FLOAT): "pops.rsqrt",
    ("sin", Kind.FLOAT): "cute.math.sin", ("cos", Kind.FLOAT): "cute.math.cos", ("erf", Kind.FLOAT): "cute.math.erf",
    ("clamp_index", Kind.INT): "ops.clamp_index", ("pow", Kind.FLOAT): "cute.math.pow", ("fma", Kind.FLOAT): "ops.fma",
    ("fma_rz", Kind.FLOAT): "pops.fma_rz", ("mul_rz", Kind.FLOAT): "pops.mul_rz",
}  # fmt: skip
_FAST = {
    "div": "pops.fast_divide", "exp": "pops.exp", "exp2": "ops.exp2", "log": "pops.log", "log2": "ops.log2",
    "tanh": "ops.tanh_approx", "sigmoid": "pops.sigmoid",
}  # fmt: skip
_EXACT = {
    "div": "pops.divide", "exp": "cute.math.exp", "exp2": "cute.math.exp2", "log": "cute.math.log",
    "log2": "cute.math.log2", "tanh": "cute.math.tanh", "sigmoid": "pops.exact_sigmoid",
}  # fmt: skip
_INFIX = {
    "add": "+", "sub": "-", "mul": "*", "and_": "&", "or_": "|", "xor": "^",
    "bit_and": "&", "bit_or": "|", "bit_xor": "^",
} | {o: OPS[o].symbol for o in _COMPARE}  # fmt: skip


def aux_length(slot: int, dim: int) -> Expr:
    """Length of one dimension of an aux tensor, a value that only kernel programs know."""
    return Expr("size", Kind.INT, (), f"ctx.aux[{slot}].shape[{dim}]")


def clamp_loads(root: Expr, tiles: tuple[Expr, ...] = ()) -> Expr:
    """`root` with every load index forced into its dimension: elements that will be dropped may point anywhere.

    The clamp is part of the expression, so one on an index that only depends on the row or the key happens once there.
    The kernel fetches the loads in `tiles`, where nothing is out of range.
    """
    done: dict[Expr, Expr] = {}
    for node in walk(root):
        args = node.args if node in tiles else tuple(done[a] for a in node.args)
        if node.op == "load" and node not in tiles:
            args = tuple(_clamped(i, aux_length(node.value, dim)) for dim, i in enumerate(args))
        done[node] = node if args == node.args else Expr(node.op, node.kind, args, node.value)
    return done[root]


def group_by_stage(root: Expr, tiles: tuple[Expr, ...] = ()) -> Expr:
    """`root` with integer sums over q_idx and kv_idx as (key part) + (row part), so that one addition is left; loads in
    `tiles` stay as they are."""
    done: dict[Expr, Expr] = {}
    for node in walk(root):
        args = node.args if node in tiles else tuple(done[a] for a in node.args)
        changed = node if args == node.args else Expr(node.op, node.kind, args, node.value)
        if node.kind is Kind.INT and node.op in ("add", "sub", "neg") and stage(node) is Stage.ELEMENT:
            changed = _grouped(changed)
        done[node] = changed
    return done[root]


def _grouped(e: Expr) -> Expr:
    form = linear(e)
    parts = {s: Linear(tuple(t for t in form.terms if stage(t[0]) is s), 0) for s in Stage}
    row = (parts[Stage.UNIFORM] + parts[Stage.ROW]).shifted(form.constant)
    sums = [to_expr(p) for p in (parts[Stage.ELEMENT], parts[Stage.COLUMN], row) if p.terms or p.constant]
    result = sums[0]
    for part in sums[1:]:
        # "a + -(b - c)" would cost a negation: subtract instead.
        result = result + part if part.op != "neg" else result - part.args[0]
    return result


def _clamped(index: Expr, length: Expr) -> Expr:
    if index.is_const and index.value == 0:
        return index
    return Expr("clamp_index", Kind.INT, (index, length - 1))


def exact_nodes(score_roots: Iterable[Expr], exact_roots: Iterable[Expr]) -> frozenset[Expr]:
    """Nodes that something discrete depends on: all below `exact_roots`, and below comparisons and indices
    elsewhere."""
    exact: set[Expr] = set()
    for root in exact_roots:
        exact.update(walk(root))
    for root in score_roots:
        for node in walk(root):
            if node.op in _EXACT_BELOW:
                for arg in node.args:
                    exact.update(walk(arg))
    return frozenset(exact)


class Writer:
    """Writes the body of one function.

    Args:
        aux: dtypes of the aux tensors. exact: nodes that need exact forms.
        given: text of values computed at an earlier stage, such as `u[0]`.
        tiles: loads whose elements are handed over, such as `d[0]`, with their text.
        unit_stride: slots of tensors with an innermost stride of 1.
    """

    def __init__(
        self,
        aux: tuple[AuxSpec, ...],
        exact: frozenset[Expr],
        given: dict[Expr, str],
        tiles: dict[Expr, str] | None = None,
        unit_stride: tuple[int, ...] = (),
    ) -> None:
        self.aux = aux
        self.exact = exact
        self.tiles = tiles or {}
        self.unit_stride = unit_stride
        self.text: dict[Expr, str] = dict(given)
        self.lines: list[str] = []

    def body(self, roots: list[Expr]) -> list[str]:
        """Texts of `roots`; `self.lines` then holds the statements before them."""
        uses: dict[Expr, int] = {}
        order = self._reachable(roots)
        for node in order:
            for arg in node.args:
                uses[arg] = uses.get(arg, 0) + 1
        for node in order:
            if node in self.text:
                continue
            text = self._node(node, uses)
            if uses.get(node, 0) > 1 and node.args:
                name = f"t{len(self.lines)}"
                self.lines.append(f"{name} = {bare(text)}")
                text = name
            self.text[node] = text
        return [self.text[r] for r in roots]

    def _reachable(self, roots: list[Expr]) -> list[Expr]:
        """Nodes to write, operands first; values that are given end the descent."""
        order: dict[Expr, None] = {}

        def visit(node: Expr) -> None:
            if node in order:
                return
            if node not in self.text and node not in self.tiles:
                for arg in node.args:
                    visit(arg)
            order[node] = None

        for root in roots:
            visit(root)
        return list(order)

    def _node(self, node: Expr, uses: dict[Expr, int]) -> str:
        if node.op == "const":
            return write_const(node)
        if node.op in ("index", "size", "score"):
            return _name(node)
        if node.op == "load":
            return self._load(node)
        args = [self.text[a] for a in node.args]
        if node.op in ("add", "sub") and node.kind is Kind.FLOAT and node not in self.exact:
            fused = self._fma(node, uses)
            if fused is not None:
                return fused
        if node.op == "neg":
            return f"(-{args[0]})"
        if node.op == "to_bool":
            return f"({self._loaded(node.args[0]) or args[0]} != 0)"
        if node.op in ("to_int", "to_float") and node.args[0].kind is Kind.BOOL:
            one, zero = ("1", "0") if node.kind is Kind.INT else ("1.0", "0.0")
            return f"ops.select({bare(args[0])}, {one}, {zero})"
        function = (_EXACT if node in self.exact else _FAST).get(node.op) or _CALLS.get((node.op, node.kind))
        if function is not None:
            return f"{function}({', '.join(map(bare, args))})"
        if node.op == "where":
            return f"(({args[0]} & {args[1]}) | (pops.logical_not({args[0]}) & {args[2]}))"
        return f"({args[0]} {_INFIX[node.op]} {args[1]})"

    def _fma(self, node: Expr, uses: dict[Expr, int]) -> str | None:
        """a*b + c in one instruction, if the product is used nowhere else."""
        for product, other in ((0, 1), (1, 0)):
            factor = node.args[product]
            if (
                factor.op != "mul"
                or uses[factor] > 1
                or factor not in self.text
                or not self.text[factor].startswith("(")
            ):
                continue
            a, b = (self.text[x] for x in factor.args)
            c = self.text[node.args[other]]
            if node.op == "sub":
                a, c = (a, f"-{c}") if product == 0 else (f"-{a}", c)
            return f"ops.fma({bare(a)}, {bare(b)}, {bare(c)})"
        return None

    def _load(self, node: Expr) -> str:
        element = self._element(node)
        dtype = self.aux[node.value].dtype
        if dtype == "bool":
            return f"({element} != 0)"
        if dtype == "int64":
            return f"pops.saturate({element})"
        return f"Int32({element})" if node.kind is Kind.INT else f"Float32({element})"

    def _element(self, node: Expr) -> str:
        if node in self.tiles:
            return self.tiles[node]
        indices = [bare(self.text[a]) for a in node.args]
        if node.value in self.unit_stride:
            row = ", ".join([*indices[:-1], "None"])
            return f"ops.entry(ctx.aux[{node.value}][{row}], {indices[-1]})"
        return f"ctx.aux[{node.value}][{', '.join(indices) or '0'}]"

    def _loaded(self, node: Expr) -> str | None:
        """The element itself, for a load that is written here: a test against zero needs no conversion."""
        return self._element(node) if node.op == "load" and self.text[node].endswith(")") else None


def bare(text: str) -> str:
    """`text` without parentheses around the whole of it."""
    if not text.startswith("("):
        return text
    depth = 0
    for position, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return text[1:-1] if position == len(text) - 1 else text
    return text


def write_const(node: Expr) -> str:
    """A Python literal. Raises ProgramError for an integer that int32 arithmetic cannot hold safely."""
    value = node.value
    if node.kind is Kind.BOOL:
        return f"Boolean({value})"
    if node.kind is Kind.INT:
        if abs(value) >= INT_LIMIT:
            raise ProgramError(f"integer {value} does not fit into the int32 arithmetic of kernel programs")
        return repr(value) if value >= 0 else f"({value})"
    if math.isnan(value):
        return "NAN"
    if math.isinf(value):
        return "INF" if value > 0 else "(-INF)"
    return repr(value) if value >= 0 else f"({value!r})"


def _name(node: Expr) -> str:
    if node.op == "score":
        return "s"
    if node.op == "size" and node.value in ("seqlen_q", "seqlen_k"):
        return f"ctx.{node.value}"
    if node.op == "size" and node.value.startswith("size"):
        return f"ctx.sizes[{node.value[4:]}]"
    return str(node.value)
