"""Aux tensors that a prepared spec wants computed in the graph: distance tables, bounds of masks, narrowed integers,
tile maps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from fa4_inductor.kernels.contract import widened
from fa4_inductor.kernels.graph_values import GraphValues, Memo
from fa4_inductor.lowering.hoist import materialise
from fa4_inductor.lowering.kept_bounds import kept_bounds
from fa4_inductor.lowering.prepare import Prepared
from fa4_inductor.lowering.tile_map import map_source
from fa4_inductor.spec import AttentionSpec

Make = Callable[..., Any]
_INT32 = torch.iinfo(torch.int32)


def build_aux(
    graph: fx.Graph,
    prepared: Prepared,
    q: fx.Node,
    k: fx.Node,
    aux: Sequence[fx.Node],
    like: fx.Node,
    memo: Memo | None = None,
) -> list[fx.Node]:
    """The aux nodes of `prepared.spec`, added at the graph's insert point.

    Args:
        q, k: (B, Hq, Sq, D), (B or 1, Hkv, Sk, D). aux: of the original spec. All carry `example_value`.
        like, memo: as in `kernels.sdpa.build_sdpa`.
    """
    values, memo = GraphValues(graph, like), {} if memo is None else memo
    batch, heads, seqlen_q, seqlen_k = (values.length(node, dim) for node, dim in ((q, 0), (q, 1), (q, 2), (k, 2)))
    sizes = (batch, heads, seqlen_q, seqlen_k)
    known = tuple(n if isinstance(n, int) else str(values.value_of(n)) for n in sizes)
    wide = [widened(t, a.kind) for t, a in zip(map(values.wrap, aux), prepared.source.aux, strict=True)]
    device = values.wrap(q).device

    def shared(key: tuple, build: Callable[..., Any], *args: Any) -> fx.Node:
        with values.real_constants():
            return values.shared(memo, key, lambda: build(*args))

    sources = list(aux)
    for table in prepared.tables:
        key = ("table", str(table.value), known, tuple(aux))
        sources.append(shared(key, materialise, table, wide, *sizes, device, values.make))
    for bounds in prepared.bounds:
        mask = aux[bounds.slot]
        sources.append(shared(("bounds", mask), kept_bounds, values.make, values.wrap(mask)))
    return [
        shared(("narrow", sources[s]), narrow, values.make, values.wrap(sources[s]))
        if i in prepared.narrowed
        else sources[s]
        for i, s in enumerate(prepared.slots)
    ]


def build_tile_map(
    graph: fx.Graph,
    spec: AttentionSpec,
    q: fx.Node,
    k: fx.Node,
    aux: Sequence[fx.Node],
    sizes: Sequence[fx.Node | int],
    like: fx.Node,
    memo: Memo | None = None,
) -> fx.Node:
    """The node of the tile map that `spec` names, one for all layers with this mask and tile.

    Args:
        aux, sizes: of the spec, without the map itself. q, k, like, memo: as in `build_aux`.
    """
    values, memo = GraphValues(graph, like), {} if memo is None else memo
    lengths = [values.length(node, dim) for node, dim in ((q, 0), (q, 1), (q, 2), (k, 2))]
    arguments = _map_arguments(spec, aux, sizes, lengths)
    tensors, program, numbers, *rest = arguments
    known = tuple(n if isinstance(n, int) else str(values.value_of(n)) for n in rest)
    key = ("tile_map", program, known, tuple(tensors), tuple(numbers))
    wrapped = ([values.wrap(t) for t in tensors], program, [values.number(n) for n in numbers], *rest)
    return values.shared(memo, key, lambda: values.make(torch.ops.fa4_inductor.tile_map.default, *wrapped))


def eager_tile_map(
    spec: AttentionSpec, q: torch.Tensor, k: torch.Tensor, aux: Sequence[torch.Tensor], sizes: Sequence[int] = ()
) -> torch.Tensor:
    """The tile map that `spec` names, computed now. aux: without the map itself."""
    arguments = _map_arguments(spec, aux, sizes, [*q.shape[:3], k.shape[2]])
    return torch.ops.fa4_inductor.tile_map(*arguments)


def _map_arguments(spec: AttentionSpec, aux: Sequence[Any], sizes: Sequence[Any], lengths: Sequence[Any]) -> tuple:
    """Arguments of `fa4_inductor::tile_map`. lengths: batch, query heads, seqlen_q, seqlen_k of the attention."""
    source, tiles = map_source(spec), spec.tile_map
    assert tiles is not None
    batch, heads, seqlen_q, seqlen_k = lengths
    shape = (batch if source.by_batch else 1, heads if source.by_head else 1, seqlen_q, seqlen_k)
    tensors, numbers = [aux[slot] for slot in source.slots], [sizes[i] for i in source.sizes]
    return tensors, source.program, numbers, *shape, tiles.tile_m, tiles.tile_n


def eager_aux(prepared: Prepared, q: torch.Tensor, k: torch.Tensor, aux: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The aux tensors of `prepared.spec`, computed now."""
    wide = [widened(t, a.kind) for t, a in zip(aux, prepared.source.aux, strict=True)]
    (batch, heads, seqlen_q, _), seqlen_k = q.shape, k.shape[2]
    tables = [materialise(t, wide, batch, heads, seqlen_q, seqlen_k, q.device) for t in prepared.tables]
    sources = [*aux, *tables, *(kept_bounds(_call, aux[bounds.slot]) for bounds in prepared.bounds)]
    return [narrow(_call, sources[s]) if i in prepared.narrowed else sources[s] for i, s in enumerate(prepared.slots)]


def _call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def narrow(make: Make, tensor: Any) -> Any:
    """int64 as int32; values beyond it saturate, so that order is kept."""
    return make(torch.clamp, tensor, _INT32.min, _INT32.max).to(torch.int32)
