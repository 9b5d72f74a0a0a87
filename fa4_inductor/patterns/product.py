"""softmax(QK^T)V written with matmul, bmm or einsum: from the product P @ V inward."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace

import sympy
import torch
from torch import fx

from fa4_inductor.capture.shadow import Shadow
from fa4_inductor.errors import DeclineReason, DeclineSite
from fa4_inductor.patterns import masks
from fa4_inductor.patterns.elements import CONTRACTION_OPS, AuxTensor, Elements, Source
from fa4_inductor.patterns.indices import FloorDiv, Index, Ranges, variable
from fa4_inductor.patterns.operands import BoundOperand, Steps, bind
from fa4_inductor.patterns.probabilities import Distribution, distribution, sink_of_gate
from fa4_inductor.patterns.rules_views import VIEW_RULES, broadcast, shape
from fa4_inductor.patterns.space import ZERO, Space
from fa4_inductor.patterns.terms import RESULT, Term, Zeroing, terms_of
from fa4_inductor.spec import AttentionSpec, AuxSpec, EmptyRow
from fa4_inductor.spec import expr as E
from fa4_inductor.spec.ops import Kind
from fa4_inductor.spec.simplify import simplify

aten = torch.ops.aten
SourceOf = Callable[[fx.Node], Source | None]
CHANGED = "the probabilities are changed before they meet V"


@dataclass(frozen=True)
class Found:
    """A match in terms of a shadow graph: sources instead of nodes, sympy sizes."""

    spec: AttentionSpec
    q: BoundOperand
    k: BoundOperand
    v: BoundOperand
    aux: tuple[AuxTensor, ...]
    symbols: tuple[sympy.Symbol, ...]
    output_view: Steps
    scores: fx.Node | None
    """The shadow node of Q @ K^T; values computed from it must not be used elsewhere."""
    epilogue: E.Expr = RESULT


@dataclass(frozen=True)
class Core:
    """The contraction of P with V below an output, and where an output element lies in it.

    It is `p[n, q, k] * v[n, k, d]`, or, if `transposed`, `v[n, d, k] * p[n, k, q]`. The lead n is missing in 2-D.
    """

    node: fx.Node
    p: fx.Node
    v: fx.Node
    transposed: bool
    batch: sympy.Expr
    index: Index  # (n, q, d) as functions of the output's index variables
    variables: tuple[sympy.Expr, ...]
    output_shape: tuple[sympy.Expr, ...]

    def at(self, lead: Index, row: sympy.Expr, column: sympy.Expr) -> Index:
        """Index into `p` or `v` as they stand."""
        return (*lead, column, row) if self.transposed else (*lead, row, column)

    def sizes(self, node: fx.Node) -> tuple[sympy.Expr, sympy.Expr]:
        """Rows and columns of `p` or `v`."""
        rows, columns = shape(node)[-2:]
        return (columns, rows) if self.transposed else (rows, columns)


def operands_of(node: fx.Node) -> tuple[fx.Node, fx.Node]:
    first = 1 if node.target is aten.baddbmm.default else 0
    return node.args[first], node.args[first + 1]


def cores_of(output: fx.Node) -> list[Core]:
    """The contraction that an output is a view of, if any, with either operand as P."""
    output_shape = shape(output)
    ranges = Ranges()
    variables = tuple(ZERO if n == 1 else ranges.declare(f"o{i}", n) for i, n in enumerate(output_shape))
    node, index = output, variables
    while node.target not in (aten.bmm.default, aten.mm.default):
        if node.op != "call_function":
            return []
        if node.target in VIEW_RULES:
            try:
                node, index = VIEW_RULES[node.target](ranges, node, index)
            except DeclineSite:
                return []
        elif node.target is aten._to_copy.default:
            node = node.args[0]
        else:
            return []
    lhs, rhs = operands_of(node)
    n, m, p = (ZERO, *index) if node.target is aten.mm.default else index
    batch = sympy.Integer(1) if node.target is aten.mm.default else shape(node)[0]
    return [
        Core(node, lhs, rhs, False, batch, (n, m, p), variables, output_shape),
        Core(node, rhs, lhs, True, batch, (n, p, m), variables, output_shape),
    ]


def gated_cores_of(output: fx.Node) -> tuple[list[Core], fx.Node] | None:
    """The contraction below a product of tensors, as `cores_of`, and the other factor."""
    factors = output.args[:2]
    if output.target is aten.mul.Tensor and all(map(_is_tensor, factors)):
        for value, gate in (factors, factors[::-1]):
            cores = cores_of(value) if shape(value) == shape(output) else []
            if cores:
                return cores, gate
    return None


def _is_tensor(x: object) -> bool:
    return isinstance(x, fx.Node) and isinstance(x.meta["val"], torch.Tensor)


def head_counts(core: Core) -> list[sympy.Expr]:
    """How the contraction's batch may be split into batch x heads, likeliest first; 1 (no heads) is always possible."""
    if core.batch == 1:
        return [sympy.Integer(1)]
    counts: dict[sympy.Expr, None] = {}
    for term in sympy.Add.make_args(sympy.expand(core.index[0])):
        coefficient = sympy.Mul(*(f for f in sympy.Mul.make_args(term) if f not in core.variables))
        if coefficient != 1 and term != 0:
            counts[coefficient] = None
    n = variable("n")
    for operand in (core.v, core.p):
        ranges = Ranges({n: core.batch})
        node, index = operand, (n, *(variable(f"x{i}") for i in range(2)))
        ranges.sizes.update(zip(index[1:], shape(operand)[1:]))
        while node.op == "call_function" and node.target in VIEW_RULES or node.target is aten._to_copy.default:
            if node.target is aten._to_copy.default:
                node = node.args[0]
                continue
            try:
                node, index = VIEW_RULES[node.target](ranges, node, index)
            except DeclineSite:
                break
            for e in index:
                counts.update(dict.fromkeys(a.args[1] for a in e.atoms(FloorDiv) if a.args[0] == n))
    if len(core.output_shape) == 4 and core.output_shape[0] == 1:
        # Batch 1: all of it are heads. Groups of k and v alone would suggest to take their heads for the batch.
        counts[core.batch] = None
    ordered = sorted(counts, key=lambda c: (not c.is_Integer, -int(c) if c.is_Integer else 0))
    usable = [c for c in ordered if sympy.cancel(core.batch / c).as_numer_denom()[1] == 1]
    return [*usable, sympy.Integer(1)]


def read_product(
    shadow: Shadow, core: Core, heads: sympy.Expr, source_of: SourceOf, gate: fx.Node | None = None
) -> tuple[Found, ...] | None:
    """One attention for each softmax in P, to be added up; None if the contraction has no softmax over its keys.

    Raises:
        DeclineSite: it has one, and something else stands in the way.
    """
    first = ProductSite(shadow, core, heads, source_of, gate)
    count = len(first.terms)
    if count == 1:
        found = first.match(0)
        return None if found is None else (found,)
    sites = [first, *(ProductSite(shadow, core, heads, source_of, gate) for _ in range(count - 1))]
    matches = [site.match(i) for i, site in enumerate(sites)]
    if None in matches:
        raise DeclineSite(DeclineReason.NOT_ATTENTION, CHANGED)
    return tuple(m for m in matches if m is not None)


class ProductSite:
    """One attempt to read a contraction, or its product with a gate, as P @ V with a given number of heads.

    Attributes:
        terms: what P is a sum of.
    """

    def __init__(
        self, shadow: Shadow, core: Core, heads: sympy.Expr, source_of: SourceOf, gate: fx.Node | None
    ) -> None:
        self.core, self.gate = core, gate
        batch = sympy.cancel(core.batch / heads)
        self.space = Space(batch, heads, *core.sizes(core.p))
        self.ev = Elements(shadow, self.space, source_of, self._contract)
        self.n = sympy.expand(self.space.b * heads + self.space.h)
        self.q: BoundOperand | None = None
        self.k: BoundOperand | None = None
        self.scores: fx.Node | None = None
        self.scores_at: Index = ()
        self.refusal: DeclineSite | None = None
        self.candidates = _contractions_in_value(core.p)
        self.terms = terms_of(self.ev.value(core.p, core.at(self._lead(core.p), self.space.q, self.space.kv)))

    def _lead(self, node: fx.Node) -> Index:
        return (self.n,) if len(shape(node)) == 3 else ()

    def match(self, which: int) -> Found | None:
        """The attention of one term; None if the term is no softmax over the contracted index.

        Raises:
            DeclineSite: it is one, and something else stands in the way.
        """
        core, space, term = self.core, self.space, self.terms[which]
        found = distribution(self.ev, term.p)
        if found is None:
            return None
        if self.q is None or self.k is None or "score" not in found.logits.free:
            refusal = self.refusal or self.ev.setback
            if refusal is None:
                return None  # weights that are no product of two tensors: a router, a pooling
            raise refusal
        feature = space.ranges.declare("dv", core.sizes(core.v)[1])
        if self.gate is not None:
            found = self._gated(found, self.gate, feature)
        index = core.at(self._lead(core.v), space.kv, feature)
        v = bind(self.ev, core.v, index, space.kv, feature, key=True, scaled=False)
        spec = self._spec(found, term)
        epilogue = space.simplify(term.epilogue)
        self._check_loads(found.logits, found.sink, epilogue)
        view = output_view(core, space)
        aux, symbols = tuple(self.ev.aux), tuple(space.symbols)
        return Found(spec, self.q, self.k, v, aux, symbols, view, self.scores, epilogue)

    def _check_loads(self, *programs: E.Expr | None) -> None:
        """No tensor that is computed from the scores may be read: they would have to be there as a whole."""
        for node in E.walk(*(e for e in programs if e is not None)):
            if node.op == "load" and self.ev.is_computed_from(node.value, self.scores):
                raise DeclineSite(DeclineReason.UNSUPPORTED_OP, "a value computed from whole rows of scores")

    def _spec(self, found: Distribution, term: Term) -> AttentionSpec:
        assert self.scores is not None
        dtypes = (self.scores.meta["val"].dtype, found.dtype)
        parts = masks.split(
            found.logits, dtypes=dtypes, fills_are_zero=False, has_sink=found.sink is not None, form=found.form
        )
        if self.gate is not None:
            self._check_rows(found, dtypes)
        empty_row = parts.empty_row
        if term.cleaned and empty_row is EmptyRow.NAN:
            empty_row = EmptyRow.ZERO
        for zeroing in term.zeroed:
            empty_row = self._zeroed(empty_row, zeroing, parts)
        aux = tuple(AuxSpec(str(a.dtype).removeprefix("torch."), a.ndim) for a in self.ev.aux)
        return AttentionSpec(
            softmax_scale=1.0,
            score=parts.score,
            keep=parts.keep,
            sink=found.sink,
            empty_row=empty_row,
            aux=aux,
            num_sizes=len(self.space.symbols),
        )

    def _gated(self, found: Distribution, gate: fx.Node, feature: sympy.Expr) -> Distribution:
        """A gate that lets through what a sink column leaves to the keys: the same as that column.

        Raises:
            DeclineSite: NOT_ATTENTION for any other gate.
        """
        space = self.space
        at = broadcast((space.b, space.h, space.q, feature), shape(gate))
        sink = None if output_view(self.core, space) else sink_of_gate(self.ev, self.ev.value(gate, at), found.logits)
        if sink is None or found.sink is not None or self.terms != [Term(self.terms[0].p)]:
            raise DeclineSite(DeclineReason.NOT_ATTENTION, "a gate on the output that is no sink")
        return replace(found, sink=sink)

    def _check_rows(self, found: Distribution, dtypes: tuple[torch.dtype, ...]) -> None:
        """A row of -inf is NaN, and a gate of 0 leaves it so; with a sink column it would be 0."""
        parts = masks.split(found.logits, dtypes=dtypes, fills_are_zero=False, has_sink=False)
        if parts.keep is not E.TRUE and parts.empty_row is not EmptyRow.MEAN:
            raise DeclineSite(DeclineReason.EMPTY_ROWS, "a gated row without keys is NaN")
        self._check_finite(parts)

    def _zeroed(self, empty_row: EmptyRow, zeroing: Zeroing, parts: masks.Logits) -> EmptyRow:
        """What rows without keys get after probabilities of dropped keys were set to 0; that changes no other row.

        Raises:
            DeclineSite: NOT_ATTENTION when keys that are kept may be zeroed, or some of a row without keys.
        """
        kept = {simplify(term) for term in E.conjuncts(simplify(~zeroing.condition))} - {E.TRUE}
        dropped = {simplify(term) for term in E.conjuncts(simplify(parts.keep))}
        if kept <= dropped:
            if empty_row is EmptyRow.ZERO or empty_row is EmptyRow.NAN and zeroing.by_factor:
                return empty_row
            if kept == dropped:
                self._check_finite(parts)
                return EmptyRow.ZERO
        raise DeclineSite(DeclineReason.NOT_ATTENTION, CHANGED)

    def _check_finite(self, parts: masks.Logits) -> None:
        """A tensor added to the scores could hold -inf for all kept keys of a row: that row is NaN, and stays so.

        Raises:
            DeclineSite: EMPTY_ROWS.
        """
        loads = (n for n in E.walk(parts.score) if n.op == "load" and n.kind is Kind.FLOAT)
        if not all(self.ev.aux[n.value].finite for n in loads):
            raise DeclineSite(DeclineReason.EMPTY_ROWS, "a bias that may hold -inf for all keys of a row")

    def _contract(self, node: fx.Node, index: Index) -> E.Expr | None:
        """Q @ K^T becomes `score` times the factors of q and k; any other contraction is an opaque tensor."""
        if self.scores not in (None, node) or node not in self.candidates:
            return None
        if self.scores is node and index != self.scores_at:
            raise DeclineSite(DeclineReason.UNSUPPORTED_OP, "a score takes part in the logits of other positions")
        product = self._product(node, index)
        if product is None or node.target is not aten.baddbmm.default:
            return product
        scaled = E.call("mul", product, self.ev.operand(node.kwargs.get("alpha", 1), ()))
        beta = node.kwargs.get("beta", 1)
        if beta == 0:
            return scaled
        bias = self.ev.operand(node.args[0], index)
        return E.call("mul", self.ev.operand(beta, ()), bias) + scaled if beta != 1 else bias + scaled

    def _product(self, node: fx.Node, index: Index) -> E.Expr | None:
        lhs, rhs = operands_of(node)
        lead, (m, p) = index[:-2], index[-2:]
        space = self.space
        depth = shape(lhs)[-1]
        if depth == 0:
            raise DeclineSite(DeclineReason.UNSUPPORTED_SHAPE, "q and k have no features")
        left, right = ((lhs, (*lead, m), False), (rhs, (*lead, p), True))
        rows_are_keys = space.depends(m, space.kv) if space.kv != 0 else False
        q_side, k_side = (right, left) if rows_are_keys else (left, right)
        d = space.ranges.declare("d", depth)
        try:
            q, k = (
                bind(self.ev, operand, (*at[:-1], d, at[-1]) if swap else (*at, d), position, d, key=key, scaled=True)
                for (operand, at, swap), position, key in ((q_side, space.q, False), (k_side, space.kv, True))
            )
        except DeclineSite as refusal:
            self.refusal = refusal
            return None
        self.q, self.k, self.scores, self.ev.chosen = q, k, node, node
        self.scores_at = index
        result = E.score()
        for factor in (*q.factors, *k.factors):
            result = E.call("mul", result, factor)
        return result


def _contractions_in_value(node: fx.Node) -> set[fx.Node]:
    """Contractions that a tensor is computed from as a value, not by way of a comparison: candidates for Q @ K^T."""
    found, seen, stack = set(), {node}, [node]
    while stack:
        for source in stack.pop().all_input_nodes:
            value = source.meta.get("val")
            if source in seen or isinstance(value, torch.Tensor) and not value.is_floating_point():
                continue
            seen.add(source)
            if source.target in CONTRACTION_OPS:
                found.add(source)
            else:
                stack.append(source)
    return found


def output_view(core: Core, space: Space) -> Steps:
    """Steps from (B, H, Sq, Dv) to the output.

    Raises:
        DeclineSite: UNSUPPORTED_LAYOUT when the output is no permutation and reshape of it.
    """
    sizes = (space.batch, space.heads, space.seqlen_q, core.sizes(core.v)[1])
    ranges = Ranges({v: n for v, n in zip(core.variables, core.output_shape) if not v.is_Integer})
    n, m, p = core.index
    at = (ranges.div(n, space.heads), ranges.rem(n, space.heads), m, p)
    offset = ranges.merge(core.variables, core.output_shape)
    for order in itertools.permutations(range(4)):
        arranged = Ranges().merge([at[i] for i in order], [sizes[i] for i in order])
        if sympy.expand(arranged - offset) == 0:
            steps: list[tuple] = [] if order == (0, 1, 2, 3) else [("permute", order)]
            if tuple(sizes[i] for i in order) != core.output_shape:
                steps.append(("reshape", core.output_shape))
            return tuple(steps)
    raise DeclineSite(DeclineReason.UNSUPPORTED_LAYOUT, "the output is not a permutation of (B, H, Sq, Dv)")
