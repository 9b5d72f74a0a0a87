"""`find_sites`: every attention-like site of a captured graph, matched or declined.

An anchor is a contraction with a softmax over its contracted dimension above it, an SDPA call or a flex_attention call.
Sites with the same structure (the layers of a model) are analysed once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace

from torch import fx

from fa4_inductor.capture import ops
from fa4_inductor.capture.fx_view import example, location, shape_exprs, target_name, tensors_of
from fa4_inductor.capture.shadow import Shadow, trace
from fa4_inductor.capture.slice import Slice, backward_slice, has_softmax_above
from fa4_inductor.errors import Declined, DeclineReason, DeclineSite
from fa4_inductor.normalize import normalize
from fa4_inductor.patterns.binding import GraphFacts, bind_match, check_escape
from fa4_inductor.patterns.elements import contractions_above, normalised
from fa4_inductor.patterns.flex import FlexCall, FlexSite, check_lists, one_block_lists, outputs_of
from fa4_inductor.patterns.match import AttentionMatch, Site
from fa4_inductor.patterns.product import (
    Core,
    Found,
    SourceOf,
    cores_of,
    gated_cores_of,
    head_counts,
    read_product,
)
from fa4_inductor.patterns.sdpa import SdpaSite, read_call

log = logging.getLogger(__name__)


@dataclass
class _Search:
    """One graph under search, with the shadows and results of the structures seen so far."""

    module: fx.GraphModule
    facts: GraphFacts
    shadows: dict[Hashable, Shadow] = field(default_factory=dict)
    results: dict[Hashable, tuple[Found, ...] | DeclineSite | None] = field(default_factory=dict)

    def shadow(self, piece: Slice, key: Hashable) -> Shadow:
        if key not in self.shadows:
            self.shadows[key] = normalize(trace(piece))
        return self.shadows[key]

    def once(self, key: Hashable, analyse: Callable[[], tuple[Found, ...] | None]) -> tuple[Found, ...] | None:
        """The result of `analyse` for this structure; refusals are remembered too."""
        if key not in self.results:
            try:
                self.results[key] = analyse()
            except DeclineSite as refusal:
                self.results[key] = refusal
        result = self.results[key]
        if isinstance(result, DeclineSite):
            raise result
        return result


def find_sites(gm: fx.GraphModule) -> list[Site]:
    """Attention sites of one graph (not of its submodules) in graph order. Never raises for a graph it cannot read."""
    try:
        search = _Search(gm, GraphFacts(gm.graph))
    except Exception as error:
        log.warning("a graph could not be read; it is left as it is", exc_info=True)
        return [Declined(DeclineReason.INTERNAL_ERROR, f"{type(error).__name__}: {error}")]
    sites: list[Site] = []
    for node in gm.graph.nodes:
        sites += _sites_at(search, node)
    return sites


def _sites_at(search: _Search, node: fx.Node) -> Sequence[Site]:
    matcher = _matcher_for(node)
    if matcher is None:
        return ()
    try:
        return matcher(search, node) or ()
    except DeclineSite as refusal:
        return [refusal.at(location(node))]
    except Exception as error:
        if type(error).__name__ == "TensorifyScalarRestartAnalysis":
            raise
        log.warning("matching %s failed; it is left as it is", node.name, exc_info=True)
        return [Declined(DeclineReason.INTERNAL_ERROR, f"{type(error).__name__}: {error}", location(node))]


def _matcher_for(node: fx.Node) -> Callable[[_Search, fx.Node], list[AttentionMatch] | None] | None:
    if node.op not in ("call_function", "call_method"):
        return None
    name = target_name(node)
    if name in ops.CONTRACTIONS:
        return _match_product if has_softmax_above(node) else None
    if name in ops.FLEX:
        return _match_flex
    return _match_sdpa if name in ops.SDPA else None


def _match_flex(search: _Search, node: fx.Node) -> list[AttentionMatch] | None:
    output, lse = outputs_of(node, search.facts.live)
    if output is None:
        return None
    call = FlexCall(search.module, node)
    _check_not_empty(output, call.query, call.key, call.value)
    index = search.facts.index
    piece, lists = backward_slice([call.query, call.key, call.value], node, index), one_block_lists(call, index)
    if lists is None:
        search.once(("block lists", *call.lists, *call.mask_buffers), lambda: check_lists(call, index))
    key = ("flex", piece.key(), call.structure(), lists.key() if lists is not None else None)

    def read() -> tuple[Found, ...]:
        shadow = search.shadow(piece, key)
        return (FlexSite(call, piece, shadow, source_of(shadow, -1), lists).match(),)

    found = search.once(key, read)
    assert found is not None
    match = bind_match(found[0], search.facts, output, (*piece.nodes, *call.buffers))
    return [match if lse is None else replace(match, lse=lse, lse_scale=call.lse_scale)]


def _match_sdpa(search: _Search, node: fx.Node) -> list[AttentionMatch]:
    call = read_call(node)
    _check_not_empty(node, call.query, call.key, call.value)
    piece = backward_slice(call.tensors, node, search.facts.index)
    position = {n: i for i, n in enumerate(piece.nodes)}
    settings = (call.is_causal, call.scale, call.enable_gqa, call.dtype, call.attn_mask is None, call.output_shape)
    key = ("sdpa", settings, piece.key())

    def read() -> tuple[Found, ...]:
        shadow = search.shadow(piece, key)
        nodes = {n: _value(shadow, position[n]) for n in call.tensors}
        return (SdpaSite(call, shadow, nodes, source_of(shadow, -1)).match(),)

    found = search.once(key, read)
    assert found is not None
    return [bind_match(found[0], search.facts, node, piece.nodes)]


def _match_product(search: _Search, node: fx.Node) -> list[AttentionMatch] | None:
    _check_not_empty(node, *node.all_input_nodes)
    piece = backward_slice([node], node, search.facts.index)
    key = piece.key()
    terms = search.once(key, lambda: _read_product(search.shadow(piece, key), len(piece.nodes) - 1))
    if terms is None:
        return None
    shadow = search.shadow(piece, key)
    try:
        _check_escapes(search, piece, shadow, terms, node)
    except DeclineSite:
        gated = _match_gated(search, node)
        if gated is None:
            raise
        return gated
    return [bind_match(found, search.facts, node, piece.nodes, len(terms)) for found in terms]


def _check_escapes(search: _Search, piece: Slice, shadow: Shadow, terms: tuple[Found, ...], node: fx.Node) -> None:
    for found in terms:
        assert found.scores is not None
        check_escape(piece, shadow, found.scores, node, search.facts)


def _match_gated(search: _Search, product: fx.Node) -> list[AttentionMatch] | None:
    """P @ V times a gate that is computed from the same scores (the log-sum-exp of their rows)."""
    users = [u for u in product.users if u in search.facts.live]
    if len(users) != 1 or target_name(users[0]) != "mul":
        return None
    node = users[0]
    piece = backward_slice([node], node, search.facts.index)
    key = ("gated", piece.key())
    try:
        terms = search.once(key, lambda: _read_gated(search.shadow(piece, key), len(piece.nodes) - 1))
        if terms is None:
            return None
        _check_escapes(search, piece, search.shadow(piece, key), terms, node)
    except DeclineSite:
        return None
    return [bind_match(found, search.facts, node, piece.nodes, len(terms)) for found in terms]


def _read_gated(shadow: Shadow, position: int) -> tuple[Found, ...] | None:
    gated = gated_cores_of(_value(shadow, position))
    return None if gated is None else _read_cores(shadow, position, *gated)


def _read_product(shadow: Shadow, position: int) -> tuple[Found, ...] | None:
    return _read_cores(shadow, position, cores_of(_value(shadow, position)))


def _read_cores(
    shadow: Shadow, position: int, cores: list[Core], gate: fx.Node | None = None
) -> tuple[Found, ...] | None:
    softmaxes = normalised(shadow.graph, contractions_above(shadow.graph))
    refusal: DeclineSite | None = None
    for core in cores:
        for heads in head_counts(core) if core.p in softmaxes else ():
            try:
                found = read_product(shadow, core, heads, source_of(shadow, position), gate)
                if found is not None or refusal is None:
                    return found
            except DeclineSite as error:
                refusal = refusal or error
    if refusal is not None:
        raise refusal
    return None


def _check_not_empty(*nodes: fx.Node) -> None:
    """Index algebra divides by sizes, and an empty product costs nothing. Raises `DeclineSite`: UNSUPPORTED_SHAPE."""
    if any(size == 0 for n in nodes for t in tensors_of(example(n)) for size in shape_exprs(t)):
        raise DeclineSite(DeclineReason.UNSUPPORTED_SHAPE, "a tensor without elements")


def _value(shadow: Shadow, position: int) -> fx.Node:
    if position not in shadow.value:
        raise DeclineSite(DeclineReason.UNSUPPORTED_OP, "attention on the batched tensors of torch.func.vmap")
    return shadow.value[position]


def source_of(shadow: Shadow, site: int) -> SourceOf:
    """Position of the first captured node that holds a shadow node's value and comes before the site."""

    def lookup(node: fx.Node) -> int | None:
        positions = [p for p in shadow.positions.get(node, ()) if p != site]
        return positions[0] if positions else None

    return lookup
