"""Symbolic element evaluation: the value of one tensor element as a score-program expression.

`Elements.value(node, index)` looks an element up lazily through views, pointwise ops, factories and gathers, so every
spelling of a mask or bias ends in the same formula. Where the way ends (an opaque tensor, or data that does not depend
on both q_idx and kv_idx and so is small), the element becomes a load of that tensor: an aux slot.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import sympy
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from fa4_inductor.capture.fx_view import SymScalar, shape_exprs
from fa4_inductor.capture.shadow import Shadow
from fa4_inductor.errors import DeclineReason, DeclineSite
from fa4_inductor.patterns.booleans import boolean_selection
from fa4_inductor.patterns.finite import is_finite
from fa4_inductor.patterns.indices import Index
from fa4_inductor.patterns.rules_pointwise import POINTWISE_RULES, constant, kind_of, round_to
from fa4_inductor.patterns.rules_tensors import TENSOR_RULES
from fa4_inductor.patterns.rules_views import VIEW_RULES, broadcast
from fa4_inductor.patterns.space import Space
from fa4_inductor.spec import expr as E
from fa4_inductor.spec.ops import Kind

ATOM_BASE = 1 << 20
"""Aux slots from here on stand for values that are no loads (softmax, reductions); they never leave the matcher."""

HALF = (torch.float16, torch.bfloat16)
aten = torch.ops.aten
RANDOM_OPS = {
    aten.native_dropout.default, aten.bernoulli.p, aten.bernoulli.default, aten.rand_like.default, aten.rand.default,
    aten.randn_like.default, aten.randn.default, aten.dropout.default,
}  # fmt: skip
NORMALISING_OPS = {
    aten._softmax.default, aten._log_softmax.default, aten.exp.default, aten.sum.dim_IntList, aten.amax.default,
}  # fmt: skip
CONTRACTION_OPS = {aten.bmm.default, aten.mm.default, aten.baddbmm.default}
MUTATED = "a tensor is written between the place where it is read and the attention"


Source: TypeAlias = int
"""A captured tensor by its position in the slice under analysis, so that equal slices share results."""


@dataclass(frozen=True)
class AuxTensor:
    """A captured tensor and the (name, sympy args) steps to the tensor that the program indexes.

    `finite`: it holds no -inf (see `patterns.finite`).
    """

    source: Source
    view: tuple[tuple[Any, ...], ...]
    dtype: torch.dtype
    ndim: int
    finite: bool = False


@dataclass(frozen=True)
class Atom:
    """A value without expression of its own: `kind` is "softmax", "log_softmax", "max" or "sum".

    `body` is what a maximum or a sum runs over.
    """

    kind: str
    node: fx.Node
    index: Index
    body: E.Expr | None = None


class Elements:
    """Evaluator over one shadow graph in one index space.

    Attributes:
        aux: captured tensors in slot order. atoms: values standing for slots from ATOM_BASE on.
        contract: called for a contraction; returns its expression, or None to treat it as an opaque tensor, as all are
            where there is none.
        chosen: the contraction that is Q @ K^T; what is computed from it is never treated as an opaque tensor.
        setback: why the first tensor computed from a contraction was treated as an opaque one.
        collapsed: loads of tensors that the slice computes from other data by pointwise ops, with the element loaded.
    """

    def __init__(
        self,
        shadow: Shadow,
        space: Space,
        source_of: Callable[[fx.Node], Source | None],
        contract: Callable[[fx.Node, Index], E.Expr | None] | None = None,
        given: dict[fx.Node, E.Expr] | None = None,
        aux: list[AuxTensor] | None = None,
    ) -> None:
        self.shadow, self.space, self.source_of, self.contract = shadow, space, source_of, contract
        self.given = given or {}
        self.aux: list[AuxTensor] = [] if aux is None else aux
        self.atoms: list[Atom] = []
        self.collapsed: dict[E.Expr, tuple[fx.Node, Index]] = {}
        self._memo: dict[tuple[fx.Node, Index], E.Expr] = {}
        self._tensors: dict[AuxTensor, fx.Node] = {}
        self.chosen: fx.Node | None = None
        self.setback: DeclineSite | None = None
        self._contractions = contractions_above(shadow.graph)
        self._normalised = set() if contract is None else normalised(shadow.graph, self._contractions)

    def value(self, node: fx.Node, index: Index) -> E.Expr:
        """Element `index` of `node`.

        Raises:
            DeclineSite: UNSUPPORTED_OP, UNSUPPORTED_SHAPE, UNSUPPORTED_DTYPE or MUTATION.
        """
        key = (node, index)
        if key not in self._memo:
            self._memo[key] = self._evaluate(node, index)
        return self._memo[key]

    def _evaluate(self, node: fx.Node, index: Index) -> E.Expr:
        if node in self.given:
            return self.given[node]
        if node.op == "get_attr" and node.meta["val"].numel() == 1:
            return self._number(node)
        view = VIEW_RULES.get(node.target) if node.op == "call_function" else None
        rule = POINTWISE_RULES.get(node.target) or TENSOR_RULES.get(node.target)
        try:
            if node.target in RANDOM_OPS or _is_random_output(node):
                raise DeclineSite(DeclineReason.DROPOUT, "dropout or noise on the scores or probabilities")
            if node.target is operator.getitem and node.args[0].target is aten.max.dim and node.args[1] == 0:
                return TENSOR_RULES[aten.amax.default](self, node.args[0], index)
            if node.target in CONTRACTION_OPS:
                e = self.contract(node, index) if self.contract is not None else None
                return self.load(node, index) if e is None else e
            if view is not None:
                return self._untangled(node, index, self.value(*view(self.space.ranges, node, index)))
            if rule is not None:
                value = rule(self, node, index)
                value = E.cast(value, kind_of(node.meta["val"].dtype))
                value = boolean_selection(value) if value.kind is Kind.BOOL else value
                value = _as_held(value, node.meta["val"].dtype)
                _check_width(node, value)
                return self._untangled(node, index, self._collapsed(node, index, value))
            if node in self._normalised:
                detail = f"the probabilities pass through {node.target} before they meet V"
                raise DeclineSite(DeclineReason.NOT_ATTENTION, detail)
        except DeclineSite as refusal:
            if self.chosen in self._contractions.get(node, ()) or node in self._normalised:
                raise
            if self.source_of(node) is None or refusal.reason is DeclineReason.DROPOUT:
                raise
            if node in self._contractions:
                self.setback = self.setback or refusal
        return self.load(node, index)

    def _number(self, node: fx.Node) -> E.Expr:
        """A constant that the trace made of a Python number, as in `mask[:, :7] = True`."""
        tensor = node.meta["val"]
        value = tensor.constant if isinstance(tensor, FakeTensor) else tensor
        if value is None:
            raise DeclineSite(DeclineReason.UNSUPPORTED_OP, f"{node.target} in a score or mask")
        with unset_fake_temporarily():
            return constant(value.item(), tensor.dtype)

    def operand(self, arg: Any, index: Index) -> E.Expr:
        """A pointwise operand at `index` of the result: a broadcast tensor or a scalar."""
        if isinstance(arg, fx.Node):
            value = arg.meta["val"]
            if isinstance(value, torch.Tensor):
                return self.value(arg, broadcast(index, shape_exprs(value)))
            arg = value
        if isinstance(arg, SymScalar):
            return self._scalar(arg)
        return E.const(arg)

    def _scalar(self, value: Any) -> E.Expr:
        if isinstance(value, torch.SymInt):
            return self.space.to_expr(value.node.expr)
        # dynamic=True turns a module's `scaling` into a SymFloat: specialise on its value, as Inductor would.
        return E.const(float(value) if isinstance(value, torch.SymFloat) else bool(value))

    def fill(self, value: Any, node: fx.Node) -> E.Expr:
        """A factory's fill value, rounded to the tensor's dtype."""
        e = self.operand(value, ())
        return constant(e.value, node.meta["val"].dtype) if e.is_const else e

    def narrow(self, node: fx.Node, index: Index, value: E.Expr) -> E.Expr:
        """A float cast to a type of smaller range: constants beyond it become infinite, and so would data."""
        dtype = node.meta["val"].dtype
        terms = _terms(value)
        if "score" not in value.free and any(_may_overflow(t, dtype) for t in terms):
            return self.load(node, index)
        if any(t.op == "load" and t.value < ATOM_BASE and not self.aux[t.value].finite for t in terms):
            raise DeclineSite(DeclineReason.EMPTY_ROWS, f"fills of a mask that is data may overflow in {dtype}")
        return _round_terms(value, dtype)

    def atom(self, kind: str, node: fx.Node, index: Index, body: E.Expr | None = None) -> E.Expr:
        """The same (kind, node, index) gives the same expression."""
        entry = Atom(kind, node, index, body)
        if entry not in self.atoms:
            self.atoms.append(entry)
        named = [i for i in index if not i.is_Integer]
        args = tuple(self.space.to_expr(i) for i in named)
        return E.load(ATOM_BASE + self.atoms.index(entry), args, Kind.FLOAT)

    def reads_product(self, node: fx.Node) -> bool:
        """Is a node computed from a contraction that may be Q @ K^T?"""
        return self.contract is not None and node in self._contractions

    def is_computed_from(self, slot: int, contraction: fx.Node | None) -> bool:
        """Is the tensor in an aux slot computed from this contraction?"""
        node = self._tensors[self.aux[slot]]
        return contraction in self._contractions.get(node, ())

    def atom_of(self, e: E.Expr) -> Atom | None:
        return self.atoms[e.value - ATOM_BASE] if e.op == "load" and e.value >= ATOM_BASE else None

    def _collapsed(self, node: fx.Node, index: Index, e: E.Expr) -> E.Expr:
        """Data that varies with q_idx and kv_idx is expanded to its leaves; any other computed data is one load."""
        if "aux" not in e.free or "score" in e.free or {"q_idx", "kv_idx"} <= e.free or _is_bare_load(e):
            return e
        if has_atoms(e) or self.source_of(node) is None:
            return e
        if node in self._contractions or boolean_selection(e) is not e or e.op == "where" and _selects_constants(e):
            return e
        free = {s for i in index for s in i.free_symbols}
        needed = {s for s in free if str(s) in e.free or s not in self.space.ranges.sizes}
        fixed = tuple(i if i.free_symbols <= needed else i.subs(dict.fromkeys(free - needed, 0)) for i in index)
        loaded = self.load(node, fixed, batched="b" in e.free)
        self.collapsed[loaded] = node, fixed
        return loaded

    def _untangled(self, node: fx.Node, index: Index, e: E.Expr) -> E.Expr:
        """A computed bias that a reshape shifts, as Transformer-XL does, is read after the shift.

        Before it, an element has subscripts in which a division mixes q_idx with kv_idx.
        """
        if node not in self._contractions or "score" in e.free or self.source_of(node) is None:
            return e
        divisions = (n for n in E.walk(e) if n.op in ("floordiv", "mod"))
        return self.load(node, index) if any({"q_idx", "kv_idx"} <= n.free for n in divisions) else e

    def load(self, node: fx.Node, index: Index, batched: bool = True) -> E.Expr:
        """Element of a captured tensor, in an aux slot.

        Args:
            batched: the leading dimension may be the batch where both have size 1.

        Raises:
            DeclineSite: UNSUPPORTED_OP (DROPOUT where it is drawn at random) if no captured node holds the tensor,
                MUTATION if it was overwritten.
        """
        source = self.source_of(node)
        if source is None:
            if node.op == "placeholder":
                raise DeclineSite(DeclineReason.MUTATION, MUTATED)
            drawn = "bernoulli" in str(node.target) or "dropout" in str(node.target)
            reason = DeclineReason.DROPOUT if drawn else DeclineReason.UNSUPPORTED_OP
            raise DeclineSite(reason, f"{node.target} in a score or mask")
        tensor = node.meta["val"]
        kind_of(tensor.dtype)
        steps: list[tuple[Any, ...]] = []
        indices: list[E.Expr] = []
        for dim in range(len(index) - 1, -1, -1):
            e = index[dim]
            if dim == 0 and batched and self._is_batch_of_one(tensor):
                indices.insert(0, E.index("b"))
            elif e.is_Integer and e >= 0:
                steps.append(("select", dim, int(e)))
            elif self._is_batch_times_heads(e, shape_exprs(tensor)[dim]):
                steps.append(("unflatten", dim, (self.space.batch, self.space.heads)))
                indices[:0] = [self.space.to_expr(self.space.b), self.space.to_expr(self.space.h)]
            else:
                indices.insert(0, self.space.to_expr(e))
        finite = is_finite(node, self.shadow.parameters)
        entry = AuxTensor(source, tuple(steps), tensor.dtype, len(indices), finite)
        if entry not in self.aux:
            self.aux.append(entry)
        self._tensors.setdefault(entry, node)
        return E.load(self.aux.index(entry), tuple(indices), kind_of(tensor.dtype))

    def _is_batch_of_one(self, tensor: torch.Tensor) -> bool:
        """Index the leading dimension by `b`, which is 0, so that a larger batch has the same program.

        Only for masks and ids, which mostly have a batch dimension: a float tensor with a head dimension is more often
        a parameter that is broadcast over the batch, a single number a length that all rows share.
        """
        if self.space.batch != 1 or tensor.ndim < 2 or shape_exprs(tensor)[0] != 1:
            return False
        return kind_of(tensor.dtype) is not Kind.FLOAT or tensor.ndim == 4 and shape_exprs(tensor)[1] == 1

    def _is_batch_times_heads(self, e: sympy.Expr, size: sympy.Expr) -> bool:
        space = self.space
        if space.b.is_Integer or space.h.is_Integer:
            return False
        return size == space.batch * space.heads and sympy.expand(space.b * space.heads + space.h) == e


def has_atoms(e: E.Expr) -> bool:
    """Is a value of a softmax or of a reduction in `e`?"""
    return any(n.op == "load" and n.value >= ATOM_BASE for n in E.walk(e))


def contractions_above(graph: fx.Graph) -> dict[fx.Node, frozenset[fx.Node]]:
    """The contractions that a node is computed from, for nodes that have any."""
    result: dict[fx.Node, frozenset[fx.Node]] = {}
    for node in graph.nodes:
        above = frozenset().union(*(result.get(n, frozenset()) for n in node.all_input_nodes))
        if node.target in CONTRACTION_OPS:
            above |= {node}
        if above:
            result[node] = above
    return result


def _is_random_output(node: fx.Node) -> bool:
    return node.target is operator.getitem and node.args[0].target in RANDOM_OPS


def normalised(graph: fx.Graph, contractions: dict[fx.Node, frozenset[fx.Node]]) -> set[fx.Node]:
    """Nodes computed from a (possibly hand-written) softmax: parts of P, which must be understood, never data."""
    result: set[fx.Node] = set()
    for node in graph.nodes:
        softmax = node.target in NORMALISING_OPS and (node in contractions or "softmax" in str(node.target))
        if softmax or any(n in result for n in node.all_input_nodes):
            result.add(node)
    return result


def _is_bare_load(e: E.Expr) -> bool:
    return e.op == "load" or e.op in ("to_float", "not_") and _is_bare_load(e.args[0])


def _check_width(node: fx.Node, e: E.Expr) -> None:
    """Arithmetic in small integer types wraps around; an expression does not."""
    if node.meta["val"].dtype in (torch.uint8, torch.int8, torch.int16) and e.op in ("add", "sub", "mul", "neg"):
        raise DeclineSite(DeclineReason.UNSUPPORTED_OP, f"arithmetic in {node.meta['val'].dtype}")


def _selects_constants(e: E.Expr) -> bool:
    """where(m, 0, -inf) is a mask: it must stay visible."""
    return e.args[1].is_const and e.args[2].is_const


def _terms(e: E.Expr) -> list[E.Expr]:
    """What is added up or selected from in a value."""
    if e.op in ("add", "sub"):
        return [t for a in e.args for t in _terms(a)]
    if e.op == "where":
        return [t for a in e.args[1:] for t in _terms(a)]
    return [e]


def _as_held(e: E.Expr, dtype: torch.dtype) -> E.Expr:
    """Constants that the result of an op holds, where its type makes them infinite: (1 - m) * -1e9 is -inf in fp16."""
    if e.kind is not Kind.FLOAT or not any(n.is_const for n in E.walk(e)):
        return e
    if "score" in e.free:
        return _round_terms(e, dtype, overflow_only=True)
    selected = boolean_selection(e)
    held = _round_terms(selected, dtype)
    return held if dtype in HALF or held is not selected and -math.inf in [n.value for n in E.walk(held)] else e


def _may_overflow(e: E.Expr, dtype: torch.dtype) -> bool:
    """Could this term leave the range of `dtype` unseen: data, or something computed with a constant beyond it?"""
    if e.op == "load":
        return e.value < ATOM_BASE
    largest = torch.finfo(dtype).max
    computed = not e.is_const and boolean_selection(e) is e
    return computed and any(E.is_finite_const(n) and abs(n.value) > largest for n in E.walk(e))


def _round_terms(e: E.Expr, dtype: torch.dtype, overflow_only: bool = False) -> E.Expr:
    """Constants as `dtype` holds them: on their own, or chosen by a mask."""
    if "score" not in e.free and e.kind is Kind.FLOAT:
        e = boolean_selection(e)
    if e.op == "const":
        rounded = round_to(e.value, dtype)
        return e if overflow_only and math.isfinite(rounded) else E.const(rounded)
    if e.op in ("add", "sub"):
        return E.call(e.op, *(_round_terms(a, dtype, overflow_only) for a in e.args))
    if e.op == "where":
        return E.call("where", e.args[0], *(_round_terms(a, dtype, overflow_only) for a in e.args[1:]))
    return e
