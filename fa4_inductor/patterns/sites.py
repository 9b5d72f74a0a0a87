"""`find_sites`: every attention-like site of a captured graph, matched or declined.

An anchor is a contraction with a softmax over its contracted dimension above it, an SDPA call or a flex_attention call.
Sites with the same structure (the layers of a model) are analysed once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace

from torch import fx

from fa4_inductor.capture import ops
from fa4_inductor.capture.fx_view import example, location, shape_exprs, target_name, tensors_of
from fa4_inductor.capture.shadow import Shadow, trace
from fa4_inductor.capture.slice import Slice, backward_slice, has_softmax_above
from fa4_inductor.errors import Declined, DeclineReason, DeclineSite
from fa4_inductor.normalize import normalize
from fa4_inductor.patterns.binding import GraphFacts, bind_match, check_escape
from fa4_inductor.patterns.flex import FlexCall, FlexSite, check_lists, one_block_lists, outputs_of
from fa4_inductor.patterns.match import AttentionMatch, Site
from fa4_inductor.patterns.product import Core, Found, ProductSite, SourceOf, core_of, gated_core_of, head_counts
from fa4_inductor.patterns.sdpa import SdpaSite, read_call

log = logging.getLogger(__name__)


@dataclass
class _Search:
    """One graph under search, with the shadows and results of the structures seen so far."""

    module: fx.GraphModule
    facts: GraphFacts
    shadows: dict[Hashable, Shadow] = field(default_factory=dict)
    results: dict[Hashable, Found | DeclineSite | None] = field(default_factory=dict)

    def shadow(self, piece: Slice, key: Hashable) -> Shadow:
        if key not in self.shadows:
            self.shadows[key] = normalize(trace(piece))
        return self.shadows[key]

    def once(self, key: Hashable, analyse: Callable[[], Found | None]) -> Found | None:
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
        site = _site_at(search, node)
        if site is not None:
            sites.append(site)
    return sites


def _site_at(search: _Search, node: fx.Node) -> Site | None:
    matcher = _matcher_for(node)
    if matcher is None:
        return None
    try:
        return matcher(search, node)
    except DeclineSite as refusal:
        return refusal.at(location(node))
    except Exception as error:
        if type(error).__name__ == "TensorifyScalarRestartAnalysis":
            raise
        log.warning("matching %s failed; it is left as it is", node.name, exc_info=True)
        return Declined(DeclineReason.INTERNAL_ERROR, f"{type(error).__name__}: {error}", location(node))


def _matcher_for(node: fx.Node) -> Callable[[_Search, fx.Node], AttentionMatch | None] | None:
    if node.op not in ("call_function", "call_method"):
        return None
    name = target_name(node)
    if name in ops.CONTRACTIONS:
        return _match_product if has_softmax_above(node) else None
    if name in ops.FLEX:
        return _match_flex
    return _match_sdpa if name in ops.SDPA else None


def _match_flex(search: _Search, node: fx.Node) -> AttentionMatch | None:
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

    def read() -> Found:
        shadow = search.shadow(piece, key)
        return FlexSite(call, piece, shadow, source_of(shadow, -1), lists).match()

    found = search.once(key, read)
    assert found is not None
    match = bind_match(found, search.facts, output, (*piece.nodes, *call.buffers))
    return match if lse is None else replace(match, lse=lse, lse_scale=call.lse_scale)


def _match_sdpa(search: _Search, node: fx.Node) -> AttentionMatch:
    call = read_call(node)
    _check_not_empty(node, call.query, call.key, call.value)
    piece = backward_slice(call.tensors, node, search.facts.index)
    position = {n: i for i, n in enumerate(piece.nodes)}
    settings = (call.is_causal, call.scale, call.enable_gqa, call.dtype, call.attn_mask is None, call.output_shape)
    key = ("sdpa", settings, piece.key())

    def read() -> Found:
        shadow = search.shadow(piece, key)
        nodes = {n: _value(shadow, position[n]) for n in call.tensors}
        return SdpaSite(call, shadow, nodes, source_of(shadow, -1)).match()

    found = search.once(key, read)
    assert found is not None
    return bind_match(found, search.facts, node, piece.nodes)


def _match_product(search: _Search, node: fx.Node) -> AttentionMatch | None:
    _check_not_empty(node, *node.all_input_nodes)
    piece = backward_slice([node], node, search.facts.index)
    key = piece.key()
    found = search.once(key, lambda: _read_product(search.shadow(piece, key), len(piece.nodes) - 1))
    if found is None:
        return None
    assert found.scores is not None
    shadow = search.shadow(piece, key)
    try:
        check_escape(piece, shadow, found.scores, node, search.facts)
    except DeclineSite:
        gated = _match_gated(search, node)
        if gated is None:
            raise
        return gated
    return bind_match(found, search.facts, node, piece.nodes)


def _match_gated(search: _Search, product: fx.Node) -> AttentionMatch | None:
    """P @ V times a gate that is computed from the same scores (the log-sum-exp of their rows)."""
    users = [u for u in product.users if u in search.facts.live]
    if len(users) != 1 or target_name(users[0]) != "mul":
        return None
    node = users[0]
    piece = backward_slice([node], node, search.facts.index)
    key = ("gated", piece.key())
    try:
        found = search.once(key, lambda: _read_gated(search.shadow(piece, key), len(piece.nodes) - 1))
        if found is None:
            return None
        assert found.scores is not None
        check_escape(piece, search.shadow(piece, key), found.scores, node, search.facts)
    except DeclineSite:
        return None
    return bind_match(found, search.facts, node, piece.nodes)


def _read_gated(shadow: Shadow, position: int) -> Found | None:
    gated = gated_core_of(_value(shadow, position))
    return None if gated is None else _read_core(shadow, position, *gated)


def _read_product(shadow: Shadow, position: int) -> Found | None:
    core = core_of(_value(shadow, position))
    return None if core is None else _read_core(shadow, position, core)


def _read_core(shadow: Shadow, position: int, core: Core, gate: fx.Node | None = None) -> Found | None:
    refusal: DeclineSite | None = None
    for heads in head_counts(core):
        try:
            found = ProductSite(shadow, core, heads, source_of(shadow, position), gate).match()
            if found is not None or refusal is None:
                return found
        except DeclineSite as error:
            refusal = refusal or error
    raise refusal or DeclineSite(DeclineReason.NOT_ATTENTION, "no head count fits")


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
