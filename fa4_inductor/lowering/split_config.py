"""Configuration of the split-KV kernel, and when and with how many splits it runs."""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
from dataclasses import dataclass
from typing import ClassVar

from fa4_inductor.lowering.config_table import HEAD_DIMS, is_long, padded_head_dim
from fa4_inductor.runtime.target import Target

TILE_M = 64
"""Packed query rows per tile: rows of all heads that share a key head."""
_SM_SMEM_BYTES = 228 << 10
_CTA_SMEM_BYTES = 227 << 10
_RESERVED_BYTES = 1024  # of each CTA, for the driver
_BARRIER_BYTES = 1024
_MAX_STAGES = 6
_FORWARD_TILE_M = 128
MAX_SPLITS = 256
_CACHED_KEYS = 4096  # a decode step's kernel is the one for a cache of this length
_SHORT_KEYS = 32768  # elements of K and V of a head; below, a forward kernel's CTA takes longer to get under way
_CTA_COST, _MERGE_COST, _SHARED = 2.0, 2.0, 0.5
_MERGED_ROWS = 512  # for so many rows more, the merge costs one unit more
_PARTIAL_ROWS = 4096  # so many rows of partial results take one unit to write and read
_MAX_PARTIAL_ROWS = 1 << 20  # a workspace of 1 GiB at head_dim_v 256; the kernel counts its elements in int32


class Variant(enum.Enum):
    """Which of a program's kernels a launch takes, by its shapes. Each is right for every shape."""

    FORWARD = "forward"
    LONG = "long"  # the forward kernel as configured for many query rows
    NARROW = "narrow"  # the forward kernel with tiles of 64 query rows, for a GPU that larger ones do not fill
    DIRECT = "direct"  # few query rows; the split-KV kernel with one split
    SPLIT = "split"


SPLIT_VARIANTS = (Variant.DIRECT, Variant.SPLIT)


@dataclass(frozen=True)
class SplitConfig:
    """Static shape of the split-KV kernel.

    Attributes:
        split: results go through a workspace and are merged; False: there is one split, which writes the output.
        tile_n: keys per tile. num_stages: K tiles (and V tiles) held in shared memory.
        ctas_per_sm: CTAs that share an SM, so that one computes while another waits for memory.
    """

    split: bool
    tile_n: int = 64
    num_stages: int = 3
    ctas_per_sm: int = 2

    # One consumer warpgroup, which therefore takes no turns with others.
    num_consumers: ClassVar[int] = 1
    order_warpgroups: ClassVar[bool] = False
    q_in_registers: ClassVar[bool] = False

    def fits(self, tile_d: int, tile_dv: int) -> bool:
        """Whether an SM has the shared memory, at padded head dims in a half type."""
        size = 2
        rows = TILE_M * tile_d + self.num_stages * self.tile_n * (tile_d + tile_dv)
        cta = rows * size + _BARRIER_BYTES
        return cta <= _CTA_SMEM_BYTES and self.ctas_per_sm * (cta + _RESERVED_BYTES) <= _SM_SMEM_BYTES

    @property
    def text(self) -> str:
        """The fields as JSON, for keys."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True)

    @classmethod
    def parse(cls, text: str) -> SplitConfig:
        """The configuration that wrote `text`."""
        return cls(**json.loads(text))


@functools.lru_cache
def select_split_config(head_dim: int, head_dim_v: int, split: bool, simple: bool = False) -> SplitConfig | None:
    """Configuration for these head dims, or None where the kernel does not support them.

    As many stages as fit, because bytes in flight are what hides the latency of memory: 100 KiB of K and V per SM and
    more. Measured on an NVIDIA H200 on 2026-11-30 (docs/engineering-log.md).

    Args:
        simple: plain scores and no mask, which leave registers for wider tiles.
    """
    if head_dim not in HEAD_DIMS or head_dim_v not in HEAD_DIMS:
        return None
    dims = padded_head_dim(head_dim), padded_head_dim(head_dim_v)
    for tile_n, ctas_per_sm in _shapes(dims, split, simple):
        for num_stages in range(_MAX_STAGES, 1, -1):
            config = SplitConfig(split, tile_n, num_stages, ctas_per_sm)
            if config.fits(*dims):
                return config
    return None


def _shapes(dims: tuple[int, int], split: bool, simple: bool) -> tuple[tuple[int, int], ...]:
    """(tile_n, ctas_per_sm) in order of preference.

    Two CTAs per SM overlap the softmax of one with the matrix products of the other; behind head_dim_v 128 the
    accumulator leaves no registers for a second. Splits fill the SMs once, so at large head dims one CTA does better
    with all of the shared memory.
    """
    if dims[1] > 128 or (split and sum(dims) > 192):
        return ((64, 1),)
    if simple and not split and dims == (64, 64):
        return (128, 2), (64, 2)
    return (64, 2), (64, 1)


def choose_variant(
    batch: int,
    heads: int,
    kv_heads: int,
    seqlen_q: int,
    seqlen_k: int,
    head_dims: tuple[int, int],
    target: Target,
    dense: bool = False,
) -> tuple[Variant, int]:
    """The kernel for these shapes, and its splits (1 unless it is SPLIT).

    The forward kernel's tiles have 128 query rows of one head: it is left alone where half of them would not find an SM
    each. Where they would, smaller tiles run on more SMs, and with very few rows each row's keys do.

    A single query row is a decode step, whose cache grows: its kernel depends on the number of sequences and heads
    alone, so that one kernel serves all steps.

    Args:
        dense: there are aux tiles that the forward kernel loads by TMA and the split kernel by element.
    """
    forward = Variant.LONG if is_long(seqlen_q, dense) else Variant.FORWARD
    config = select_split_config(*head_dims, True)
    if config is None or not target.is_hopper or not (batch and heads and kv_heads):
        return forward, 1
    rows = seqlen_q * (heads // kv_heads)
    if rows > TILE_M and 2 * batch * heads * -(-seqlen_q // _FORWARD_TILE_M) > target.sm_count:
        return forward, 1
    blocks, merged = batch * kv_heads * -(-rows // TILE_M), batch * heads * seqlen_q
    splits = plan_splits(blocks, merged, seqlen_k, target.sm_count, config)
    if seqlen_q == 1 and rows <= TILE_M:
        cached = plan_splits(blocks, merged, _CACHED_KEYS, target.sm_count, config)
        return (Variant.SPLIT, splits) if cached > 1 else (Variant.DIRECT, 1)
    if rows > TILE_M and (dense or splits == 1 and seqlen_k * sum(head_dims) >= _SHORT_KEYS):
        return Variant.NARROW, 1
    return (Variant.SPLIT, splits) if splits > 1 else (Variant.DIRECT, 1)


@functools.lru_cache(maxsize=4096)
def plan_splits(blocks: int, rows: int, seqlen_k: int, num_sms: int, config: SplitConfig) -> int:
    """Splits per block of query rows: those of the shortest estimated time, the fewest of them where several are.

    In units of the time an SM takes for one key tile while all others stream too: a CTA costs `_CTA_COST` besides its
    tiles, a merge `_MERGE_COST` and its rows. CTAs that share an SM share its time, and hide a little of each other's.
    All of K counts: the host does not know what a mask leaves of it.

    Args:
        blocks: batch * kv heads * tiles of packed rows. rows: batch * query heads * seqlen_q.
    """
    tiles = max(1, -(-seqlen_k // config.tile_n))

    def cost(splits: int) -> float:
        per_sm = -(-blocks * splits // num_sms)
        rounds = -(-per_sm // config.ctas_per_sm)
        shared = _SHARED if per_sm > 1 and config.ctas_per_sm > 1 else 0.0
        merge = _MERGE_COST + rows / _MERGED_ROWS + rows * splits / _PARTIAL_ROWS if splits > 1 else 0.0
        return per_sm * -(-tiles // splits) + rounds * _CTA_COST + merge - shared

    most = max(1, min(tiles, MAX_SPLITS, _MAX_PARTIAL_ROWS // max(rows, 1)))
    return min(range(1, most + 1), key=lambda splits: (cost(splits), splits))


def workspace_size(num_splits: int, rows: int, head_dim_v: int) -> int:
    """float32 elements of the workspace for `rows` = batch * query heads * seqlen_q rows in all."""
    return num_splits * rows * (head_dim_v + 1)
