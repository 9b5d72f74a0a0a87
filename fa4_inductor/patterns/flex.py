"""torch.nn.attention.flex_attention: the higher-order op with its score_mod and mask_mod subgraphs.

A BlockMask is read by its mask_mod; its block lists are an acceleration structure that create_block_mask derives from
it. Lists that show that they were made otherwise may hold sparsity of their own, and the call is left alone
(docs/decisions/0008).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import sympy
import torch
from torch import fx

from fa4_inductor.capture.fx_view import example, shape_exprs, storage_keys
from fa4_inductor.capture.shadow import Shadow, trace
from fa4_inductor.capture.slice import GraphIndex, Slice, arg_key, backward_slice, value_key
from fa4_inductor.errors import DeclineReason, DeclineSite
from fa4_inductor.normalize import normalize
from fa4_inductor.patterns import masks
from fa4_inductor.patterns.elements import AuxTensor, Elements
from fa4_inductor.patterns.operands import BoundOperand, bind
from fa4_inductor.patterns.product import Found, SourceOf
from fa4_inductor.patterns.space import Space
from fa4_inductor.spec import AttentionSpec, AuxSpec
from fa4_inductor.spec import expr as E

OUT, LSE = 0, 1
"""Positions in the result of the op; the third are the maxima of the rows."""
UNBOUNDED_BLOCK = 1 << 30
"""Block size of the mask that flex_attention makes up when it is given none."""


class FlexCall:
    """Arguments of a flex_attention node."""

    def __init__(self, module: fx.GraphModule, node: fx.Node) -> None:
        names = ("query", "key", "value", "score_mod", "block_mask", "scale", "kernel_options", "score_buffers")
        values = dict(zip((*names, "mask_buffers"), node.args)) | dict(node.kwargs)
        self.query, self.key, self.value = values["query"], values["key"], values["value"]
        self.dtype = example(node)[OUT].dtype
        self.score_mod = _subgraph(module, values["score_mod"])
        *self.lists, self.block_q, self.block_kv, mask_mod = values["block_mask"]
        self.mask_mod = _subgraph(module, mask_mod)
        scale = values["scale"]
        self.scale = float(example(scale) if isinstance(scale, fx.Node) else scale)
        self.score_buffers = tuple(values.get("score_buffers", ()))
        self.mask_buffers = tuple(values.get("mask_buffers", ()))
        self.buffers = tuple(n for n in (*self.score_buffers, *self.mask_buffers) if isinstance(n, fx.Node))
        # The statistics are in log 2 except from the FLASH backend: torch.nn.attention.flex_attention converts them.
        options = dict(values["kernel_options"])
        self.lse_scale = 1.0 if options.get("BACKEND") == "FLASH" else math.log2(math.e)

    def structure(self) -> tuple:
        """Equal for calls that differ in q, k, v and the block lists only; buffers are compared by their values' kind
        and by which of them are the same tensor."""
        buffers = (*self.score_buffers, *self.mask_buffers)
        number = {node: i for i, node in reversed(list(enumerate(self.buffers)))}
        values = tuple(value_key(example(n)) for n in self.buffers)
        mods = (mod_slice(self.score_mod).key(), mod_slice(self.mask_mod).key())
        blocks = (self.block_q, self.block_kv)
        given = (self.scale, len(self.score_buffers), arg_key(buffers, number), arg_key(blocks, number), values)
        return (*given, example(self.query).dtype, self.dtype, *mods)


def mod_slice(mod: fx.GraphModule) -> Slice:
    """A whole mod graph as a slice; its leaves are its arguments and captured tensors."""
    nodes = tuple(n for n in mod.graph.nodes if n.op != "output")
    (root,) = [r for r in _flat(mod.graph.output_node().args[0]) if isinstance(r, fx.Node)]
    return Slice(nodes, frozenset(n for n in nodes if n.op in ("placeholder", "get_attr")), (root,))


def _subgraph(module: fx.GraphModule, node: fx.Node) -> fx.GraphModule:
    sub = module.get_submodule(str(node.target))
    assert isinstance(sub, fx.GraphModule)
    return sub


def outputs_of(node: fx.Node, live: set[fx.Node]) -> tuple[fx.Node | None, fx.Node | None]:
    """The nodes of the attention output and of the log-sum-exp of its rows; None for what is unused.

    Raises:
        DeclineSite: PROBS_ESCAPE when the maxima of the rows are used too, or the log-sum-exp alone;
            UNSUPPORTED_DTYPE for a log-sum-exp in float64.
    """
    users = [u for u in node.users if u in live]
    outputs = {int(u.args[1]): u for u in users if len(u.args) == 2 and isinstance(u.args[1], int)}
    out, lse = outputs.get(OUT), outputs.get(LSE)
    if len(users) > sum(n is not None for n in (out, lse)) or out is None and lse is not None:
        raise DeclineSite(DeclineReason.PROBS_ESCAPE, "statistics of the rows are used that the kernel does not give")
    if lse is not None and example(out).dtype is torch.float64:
        raise DeclineSite(DeclineReason.UNSUPPORTED_DTYPE, "the log-sum-exp of float64 rows")
    return out, lse


def check_lists(call: FlexCall, graph: GraphIndex) -> None:
    """Decline block lists that can say more than the mask_mod (UNSUPPORTED_PROGRAM): create_block_mask always lists
    full blocks apart, and lists computed here from tensors that the mask_mod does not know are not its work."""
    lists = call.lists[2:6]
    if None in lists:
        raise DeclineSite(DeclineReason.UNSUPPORTED_PROGRAM, "block lists that create_block_mask did not make")
    computed = [n for n in lists if n.op not in ("placeholder", "get_attr")]
    foreign = _inputs(computed, graph) - _inputs(call.mask_buffers, graph) if computed else set()
    if foreign:
        name = min(foreign, key=graph.order.__getitem__).name
        detail = f"block lists computed from {name}, which the mask_mod does not know"
        raise DeclineSite(DeclineReason.UNSUPPORTED_PROGRAM, detail)


def _inputs(nodes: Iterable[Any], graph: GraphIndex) -> set[fx.Node]:
    """Tensors that enter the graph and that the values of `nodes` are computed from, through writes as well."""
    seen: set[fx.Node] = set()
    stack = [n for n in nodes if isinstance(n, fx.Node)]
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            stack.extend(node.all_input_nodes)
            stack.extend(m for m, written in graph.mutations if written & storage_keys(node))
    return {n for n in seen if n.op in ("placeholder", "get_attr") and isinstance(example(n), torch.Tensor)}


class FlexSite:
    """One flex_attention call on the shadow of its operands. `lists` is `one_block_lists` of it.

    Sources are positions in `piece.nodes`, followed by `call.buffers`.
    """

    def __init__(self, call: FlexCall, piece: Slice, shadow: Shadow, source_of: SourceOf, lists: Slice | None) -> None:
        self.call, self.piece, self.shadow, self.lists = call, piece, shadow, lists
        q, k = (shape_exprs(example(n)) for n in (call.query, call.key))
        if len(q) != 4:
            raise DeclineSite(DeclineReason.UNSUPPORTED_SHAPE, f"query of rank {len(q)}")
        self.space = Space(q[0], q[1], q[2], k[2])
        self.aux: list[AuxTensor] = []
        self.ev = Elements(shadow, self.space, source_of, aux=self.aux)
        self.indices = [self.space.to_expr(i) for i in (self.space.b, self.space.h, self.space.q, self.space.kv)]

    def match(self) -> Found:
        call, space = self.call, self.space
        q = self._operand(call.query, space, space.q, "d", key=False)
        k = self._operand(call.key, space, space.kv, "d", key=True)
        space_of_v = self._space_of_value()
        v = self._operand(call.value, space_of_v, space_of_v.kv, "dv", key=True)
        product: E.Expr = E.score()
        for factor in (*q.factors, *k.factors, E.const(call.scale)):
            product = E.call("mul", product, factor)
        logits = self._evaluate(call.score_mod, [product, *self.indices], call.score_buffers)
        keep = space.simplify(self._evaluate(call.mask_mod, self.indices, call.mask_buffers))
        if keep is E.TRUE:
            self._check_lists()
        else:
            logits = E.call("where", keep, logits, -float("inf"))
        precision = torch.promote_types(example(call.query).dtype, torch.float32)  # of scores, whatever q and k are
        parts = masks.split(logits, dtypes=(precision,), fills_are_zero=True, has_sink=False)
        aux = tuple(AuxSpec(str(a.dtype).removeprefix("torch."), a.ndim) for a in self.aux)
        spec = AttentionSpec(
            softmax_scale=1.0,
            score=parts.score,
            keep=parts.keep,
            empty_row=parts.empty_row,
            aux=aux,
            num_sizes=len(space.symbols),
        )
        return Found(spec, q, k, v, tuple(self.aux), tuple(space.symbols), (), None)

    def _space_of_value(self) -> Space:
        """The space with the sizes of v. Dynamic ones have symbols of their own: nothing compares them with those of k
        before run time, where all implementations refuse unequal ones."""
        space = self.space
        batch, _, length, _ = shape_exprs(example(self.call.value))
        batch = space.batch if batch == 1 else batch
        for mine, other in ((batch, space.batch), (length, space.seqlen_k)):
            if mine != other and mine.is_Integer and other.is_Integer:
                raise DeclineSite(DeclineReason.UNSUPPORTED_SHAPE, f"v has {mine} where q and k have {other}")
        same = (batch, length) == (space.batch, space.seqlen_k)
        return space if same else Space(batch, space.heads, space.seqlen_q, length)

    def _operand(self, node: fx.Node, space: Space, position: sympy.Expr, feature: str, *, key: bool) -> BoundOperand:
        shadowed = self.shadow.value[self.piece.nodes.index(node)]
        batch, heads, _, depth = shape_exprs(shadowed.meta["val"])
        d = space.ranges.declare(feature, depth)
        head = space.ranges.div(space.h, sympy.cancel(space.heads / heads)) if heads != 1 else sympy.Integer(0)
        index = (space.b if batch != 1 else sympy.Integer(0), head, position, d)
        ev = self.ev if space is self.space else Elements(self.shadow, space, self.ev.source_of)
        bound = bind(ev, shadowed, index, position, d, key=key, scaled=feature == "d")
        if bound.dtype == self.call.dtype:
            return bound
        return replace(bound, view=(*bound.view, ("to", self.call.dtype)), dtype=self.call.dtype)  # autocast

    def _evaluate(self, mod: fx.GraphModule, values: list[E.Expr], buffers: tuple[Any, ...]) -> E.Expr:
        """Value of a mod graph for symbolic arguments; its captured tensors are aux loads."""
        piece = mod_slice(mod)
        placeholders = [n for n in piece.nodes if n.op == "placeholder"]
        shadow = normalize(trace(piece))
        position = {n: i for i, n in enumerate(piece.nodes)}
        inputs = dict(zip(placeholders[len(values) :], buffers))
        given = {shadow.value[position[p]]: e for p, e in zip(placeholders, values)}
        source = {b: len(self.piece.nodes) + i for i, b in enumerate(self.call.buffers)}
        captured = {shadow.value[position[p]]: source.get(b) for p, b in inputs.items() if position[p] in shadow.value}
        ev = Elements(shadow, self.space, captured.get, given=given, aux=self.aux)
        return ev.value(shadow.value[position[piece.roots[0]]], ())

    def _check_lists(self) -> None:
        """The block lists of a mask that keeps everything must name the one block there is."""
        if self.lists is None or not _is_one_block(self.lists):
            raise DeclineSite(DeclineReason.UNSUPPORTED_PROGRAM, "sparsity that only the block lists of the mask hold")


def one_block_lists(call: FlexCall, graph: GraphIndex) -> Slice | None:
    """The slice of kv_num_blocks and kv_indices; None where the block size says that there may be several blocks."""
    sizes = [b if isinstance(b, int) else 0 for b in (call.block_q, call.block_kv)]
    if min(sizes) < UNBOUNDED_BLOCK:
        return None
    counts, blocks = call.lists[2:4]
    return backward_slice([counts, blocks], max(counts, blocks, key=graph.order.__getitem__), graph)


def _is_one_block(piece: Slice) -> bool:
    """kv_num_blocks = [[[1]]] and kv_indices = [[[[0]]]], as graph constants."""
    shadow = normalize(trace(piece))
    one = sympy.Integer(1)
    ev = Elements(shadow, Space(one, one, one, one), lambda node: None)
    values = []
    for node in piece.roots:
        shadowed = shadow.value[piece.nodes.index(node)]
        shape = shape_exprs(shadowed.meta["val"])
        if any(n != 1 for n in shape):
            return False
        values.append(ev.value(shadowed, (sympy.Integer(0),) * len(shape)))
    return values == [E.const(1), E.const(0)]


def _flat(value: Any) -> list[Any]:
    return [x for v in value for x in _flat(v)] if isinstance(value, tuple | list) else [value]
