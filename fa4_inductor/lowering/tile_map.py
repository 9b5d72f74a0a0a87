"""Which masks get a tile map (spec.attention.TileMap), and what the map is computed from."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

from fa4_inductor.analysis.facts import facts
from fa4_inductor.analysis.tile_test import is_closed_form, tile_test
from fa4_inductor.lowering.support import Operands
from fa4_inductor.spec.attention import AttentionSpec, AuxSpec, TileMap
from fa4_inductor.spec.expr import score
from fa4_inductor.spec.simplify import drop_unused_aux, drop_unused_sizes

MAP_AUX = AuxSpec("int32", 4)
# A map takes the GPU 2.4-5.8 us and the host a call, the counter of its kernel about 2 us (H200, 2026-11-30,
# docs/engineering-log.md): with less work than this, about 40 us of attention over all keys, that may be more than the
# one call that it is certain to serve can gain. At four times this work 23 % were gained.
_MIN_FLOPS = 1 << 34
# Fewer tiles of 128 query rows than a GPU has multiprocessors go to kernels with other tiles (lowering.split_config).
_MIN_QUERY_TILES = 132
# A mask with an element per score has to be read through, which takes as long as attention of half a head.
_MIN_HEADS_PER_MASK = 8


@dataclass(frozen=True)
class MapSource:
    """What a tile map is computed from.

    Attributes:
        program: text of a spec whose keep is the mask; everything else in it is plain.
        slots, sizes: for each of its aux tensors and run-time integers, the number of the attention's.
        by_batch, by_head: whether the mask differs between batch entries, and between heads.
    """

    program: str
    slots: tuple[int, ...]
    sizes: tuple[int, ...]
    by_batch: bool
    by_head: bool


@functools.lru_cache(maxsize=1024)
def map_source(spec: AttentionSpec) -> MapSource:
    """The mask of `spec` by itself. Equal masks of different attentions have equal programs."""
    mask = AttentionSpec(1.0, score(), spec.keep, aux=spec.aux, num_sizes=spec.num_sizes)
    mask, slots = drop_unused_aux(mask)
    mask, sizes = drop_unused_sizes(mask)
    return MapSource(mask.text, slots, sizes, "b" in spec.keep.free, "h" in spec.keep.free)


def wants_tile_map(spec: AttentionSpec, operands: Operands) -> bool:
    """Whether a map pays: the mask depends on data in a way that no closed form bounds, and there is enough to skip.

    Sizes that are only known at run time count with the value they have while compiling.
    """
    keep = facts(spec).keep
    if is_closed_form(keep) or "aux" not in keep.free:
        return False
    sizes = (operands.batch, operands.num_heads_q, operands.seqlen_q, operands.seqlen_k, operands.head_dim)
    batch, heads, seqlen_q, seqlen_k, head_dim = (size_hint(n) or 0 for n in sizes)
    if tile_test(keep).elements and ("h" in keep.free or heads < _MIN_HEADS_PER_MASK):
        return False
    if batch * heads * -(-seqlen_q // 128) < _MIN_QUERY_TILES:
        return False
    return 4 * batch * heads * seqlen_q * seqlen_k * head_dim >= _MIN_FLOPS


def size_hint(size: Any) -> int | None:
    """The value that a size or stride has while compiling; None where it depends on data."""
    if isinstance(size, int):
        return size
    return size.node.hint


def with_tile_map(spec: AttentionSpec, tile_m: int, tile_n: int) -> AttentionSpec:
    """`spec` with one more aux tensor, the map of its mask for tiles of this size."""
    return dataclasses.replace(spec, aux=(*spec.aux, MAP_AUX), tile_map=TileMap(len(spec.aux), tile_m, tile_n))
