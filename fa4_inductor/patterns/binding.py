"""From a match on a shadow graph to nodes of the captured graph: operands, sizes, the check that nothing escapes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import sympy
import torch
from torch import fx

from fa4_inductor.capture.fx_view import example, is_mutation, location, size_expr
from fa4_inductor.capture.shadow import Shadow
from fa4_inductor.capture.slice import GraphIndex, Slice
from fa4_inductor.errors import DeclineReason, DeclineSite
from fa4_inductor.patterns.elements import AuxTensor
from fa4_inductor.patterns.match import AttentionMatch, Epilogue, Operand, ViewStep
from fa4_inductor.patterns.operands import BoundOperand, Steps
from fa4_inductor.patterns.product import Found
from fa4_inductor.patterns.terms import RESULT
from fa4_inductor.spec import AttentionSpec, verify
from fa4_inductor.spec import expr as E
from fa4_inductor.spec.expr import walk
from fa4_inductor.spec.simplify import drop_unused_aux, drop_unused_sizes, simplify_spec


@dataclass
class GraphFacts:
    """What binding needs to know about a whole graph; computed once per graph."""

    graph: fx.Graph
    index: GraphIndex = field(init=False)
    sizes: dict[sympy.Expr, fx.Node] = field(default_factory=dict)
    live: set[fx.Node] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.index = GraphIndex(self.graph)
        for node in self.graph.nodes:
            value = example(node)
            if isinstance(value, torch.SymInt):
                self.sizes.setdefault(size_expr(value), node)
        for node in reversed(self.graph.nodes):
            if node.op == "output" or is_mutation(node) or any(u in self.live for u in node.users):
                self.live.add(node)

    def size(self, e: Any, site: fx.Node) -> int | fx.Node | None:
        """A size as an int or a node computed before `site`; None if there is no such node."""
        if isinstance(e, int) or e.is_Integer:
            return int(e)
        node = self.sizes.get(e)
        return node if node is not None and self.index.order[node] < self.index.order[site] else None


def bind_match(
    found: Found, facts: GraphFacts, site: fx.Node, nodes: Sequence[fx.Node], terms: int = 1
) -> AttentionMatch:
    """The match with its nodes: `nodes[source]` is a captured tensor of `found`. `terms` as in `AttentionMatch`.

    Raises:
        DeclineSite: UNSUPPORTED_SHAPE when a run-time size has no node, UNSUPPORTED_DTYPE for operands without a
            common floating dtype or constants beyond float32.
    """
    spec, kept = drop_unused_aux(simplify_spec(found.spec))
    spec, used = drop_unused_sizes(spec)
    verify(spec)
    _check_constants(spec)
    out_dtype = example(site).dtype
    dtype = _common_dtype(found)
    operands = (found.q, *_same_heads(found.k, found.v))
    q, k, v = (_operand(o, dtype, facts, site, nodes) for o in operands)
    sizes = _sizes((found.symbols[i] for i in used), facts, site)
    aux = tuple(_aux(found.aux[slot], facts, site, nodes) for slot in kept)
    view = _steps(found.output_view, facts, site)
    epilogue = _epilogue(found, facts, site, nodes)
    match = AttentionMatch(spec, q, k, v, aux, sizes, site, view, out_dtype, location(site))
    return replace(match, epilogue=epilogue, terms=terms)


def _sizes(symbols: Iterable[sympy.Symbol], facts: GraphFacts, site: fx.Node) -> tuple[fx.Node | int, ...]:
    sizes = []
    for symbol in symbols:
        size = facts.size(symbol, site)
        if size is None:
            raise DeclineSite(DeclineReason.UNSUPPORTED_SHAPE, f"no node holds the run-time size {symbol}")
        sizes.append(size)
    return tuple(sizes)


def _epilogue(found: Found, facts: GraphFacts, site: fx.Node, nodes: Sequence[fx.Node]) -> Epilogue | None:
    if found.epilogue is RESULT:
        return None
    holder, kept = drop_unused_aux(replace(found.spec, score=found.epilogue, keep=E.TRUE, sink=None))
    holder, used = drop_unused_sizes(holder)
    aux = tuple(_aux(found.aux[slot], facts, site, nodes) for slot in kept)
    return Epilogue(holder.score, aux, holder.aux, _sizes((found.symbols[i] for i in used), facts, site))


def _check_constants(spec: AttentionSpec) -> None:
    """Programs are evaluated in float32 and in units of log 2: a larger constant would become infinite there."""
    largest = torch.finfo(torch.float32).max / math.log2(math.e)
    for node in walk(spec.score, spec.keep, *([spec.sink] if spec.sink is not None else [])):
        if node.is_const and math.isfinite(node.value) and abs(node.value) > largest:
            raise DeclineSite(DeclineReason.UNSUPPORTED_DTYPE, f"the constant {node.value} is beyond float32")


def _common_dtype(found: Found) -> torch.dtype:
    dtypes = [o.dtype for o in (found.q, found.k, found.v)]
    if not all(d.is_floating_point for d in dtypes):
        raise DeclineSite(DeclineReason.UNSUPPORTED_DTYPE, f"operands of {', '.join(map(str, dtypes))}")
    common = dtypes[0]
    for dtype in dtypes[1:]:
        common = torch.promote_types(common, dtype)
    return common


def _same_heads(k: BoundOperand, v: BoundOperand) -> list[BoundOperand]:
    """k and v with the same number of heads, the least that both can be repeated to."""
    if k.heads == v.heads:
        return [k, v]
    if k.heads != 1 != v.heads and not (k.heads.is_Integer and v.heads.is_Integer):
        raise DeclineSite(DeclineReason.UNSUPPORTED_SHAPE, f"{k.heads} heads of k, {v.heads} of v")
    heads = sympy.lcm(k.heads, v.heads)
    return [_repeated(o, heads) for o in (k, v)]


def _repeated(o: BoundOperand, heads: sympy.Expr) -> BoundOperand:
    if o.heads == heads:
        return o
    expand = o.heads == 1
    step = ("expand", (-1, heads, -1, -1)) if expand else ("repeat_interleave", int(heads / o.heads), 1)
    return replace(o, view=(*o.view, step), heads=heads)


def _operand(
    o: BoundOperand, dtype: torch.dtype, facts: GraphFacts, site: fx.Node, nodes: Sequence[fx.Node]
) -> Operand:
    steps = _steps(o.view, facts, site)
    return Operand(nodes[o.source], steps if o.dtype == dtype else (*steps, ("to", dtype)))


def _aux(a: AuxTensor, facts: GraphFacts, site: fx.Node, nodes: Sequence[fx.Node]) -> Operand:
    return Operand(nodes[a.source], _steps(a.view, facts, site))


def _steps(steps: Steps, facts: GraphFacts, site: fx.Node) -> tuple[ViewStep, ...]:
    return tuple(_step(s, facts, site) for s in steps)


def _step(step: tuple[Any, ...], facts: GraphFacts, site: fx.Node) -> ViewStep:
    name, *args = step
    if name in ("unflatten", "reshape"):
        sizes = [facts.size(e, site) for e in args[-1]]
        if sizes.count(None) > 1:
            raise DeclineSite(DeclineReason.UNSUPPORTED_SHAPE, f"no nodes hold the sizes {args[-1]}")
        return (name, *args[:-1], tuple(-1 if s is None else s for s in sizes))
    if name in ("narrow", "expand"):
        flat = args if name == "narrow" else list(args[0])
        sizes = [facts.size(e, site) for e in flat]
        if None in sizes:
            raise DeclineSite(DeclineReason.UNSUPPORTED_SHAPE, f"no nodes hold the sizes {flat}")
        return (name, *sizes) if name == "narrow" else (name, tuple(sizes))
    return step


def check_escape(piece: Slice, shadow: Shadow, scores: fx.Node, site: fx.Node, facts: GraphFacts) -> None:
    """Every value between Q @ K^T and the site must be used on the way to the site only.

    Raises:
        DeclineSite: PROBS_ESCAPE.
    """
    above = {scores}
    for node in shadow.graph.nodes:
        if any(n in above for n in node.all_input_nodes):
            above.add(node)
    interior = {piece.nodes[p] for p, value in shadow.value.items() if value in above and piece.nodes[p] is not site}
    interior |= _multi_output(piece, interior)
    # expand_as, zeros_like: in the slice, but nothing of the scores is in their value.
    shape_only = {piece.nodes[p] for p, value in shadow.value.items() if value not in above} - piece.leaves
    for node in interior:
        for user in node.users:
            if user is site or user in interior or user in shape_only or user not in facts.live:
                continue
            if isinstance(example(user), int | float | bool | torch.SymInt | torch.Size) or _is_metadata(user):
                continue
            what = "the output" if user.op == "output" else user.name
            raise DeclineSite(DeclineReason.PROBS_ESCAPE, f"{node.name} is also used by {what}")


def _multi_output(piece: Slice, interior: set[fx.Node]) -> set[fx.Node]:
    """Nodes with tuple values (max, split) between interior nodes. An opaque one (topk) uses the scores for itself."""
    return {
        n
        for n in piece.nodes
        if n not in piece.leaves
        and isinstance(example(n), tuple | list) and n.users and any(i in interior for i in n.all_input_nodes)
    }


def _is_metadata(node: fx.Node) -> bool:
    value = example(node)
    return isinstance(value, tuple) and all(isinstance(v, int | torch.SymInt) for v in value)
