"""The measured table of tile configurations.

Measured on an NVIDIA H200 on 2026-11-30; `docs/engineering-log.md` holds the experiments. Rows are looked up
by padded head dims, so (80, 80) uses the row of (96, 96).
"""

from __future__ import annotations

import dataclasses

from fa4_inductor.lowering.config import KernelConfig

HEAD_DIMS = (64, 80, 96, 128, 192, 256)

# (head_dim, head_dim_v) -> config, padded dims
_SM90: dict[tuple[int, int], KernelConfig] = {
    (64, 64): KernelConfig(num_consumers=2, tile_n=128, num_stages=4),
    (96, 96): KernelConfig(num_consumers=2, tile_n=128, num_stages=2, order_warpgroups=False),
    (128, 128): KernelConfig(num_consumers=2, tile_n=128, num_stages=2),
    (192, 128): KernelConfig(num_consumers=2, tile_n=128, num_stages=2, order_warpgroups=False),
    (192, 192): KernelConfig(num_consumers=2, tile_n=64, num_stages=2, order_warpgroups=False),
    (256, 256): KernelConfig(num_consumers=2, tile_n=64, num_stages=2, order_warpgroups=False),
}

# programs that load nothing: their warpgroups need no turns
_SM90_NO_AUX: dict[tuple[int, int], KernelConfig] = {
    (64, 64): KernelConfig(num_consumers=2, tile_n=128, num_stages=4, order_warpgroups=False),
    (128, 128): KernelConfig(num_consumers=2, tile_n=128, num_stages=2, order_warpgroups=False),
}

# of these, plain scores whose rows have many key tiles: registers are left for a third consumer warpgroup, whose
# 192-row tiles waste more of a diagonal
_SM90_LEAN: dict[tuple[int, int], KernelConfig] = {
    (64, 64): KernelConfig(num_consumers=3, tile_n=128, num_stages=2),
}
LONG_SEQLEN_Q = 4096
"""From here on the rows of a causal mask have many key tiles. The only length that a choice depends on."""


def padded_head_dim(head_dim: int) -> int:
    """The head dim the tile has in shared memory (80 is padded to 96 by TMA zero fill)."""
    return 96 if head_dim == 80 else head_dim


def select_config(
    head_dim: int,
    head_dim_v: int,
    masked: bool,
    plain: bool = True,
    num_aux: int = 0,
    *,
    windowed: bool = False,
    long_q: bool = False,
    dense_bytes: int = 0,
) -> KernelConfig | None:
    """Configuration for these head dims, or None where the kernel does not support them.

    Args:
        head_dim, head_dim_v: of the user's tensors.
        masked: whether the program has a keep expression that is not constant True.
        plain: whether its score is exactly `score`. num_aux: tensors it loads from.
        windowed: whether the keys that a row keeps need not begin with the first.
        long_q: at least LONG_SEQLEN_Q query rows; every configuration is right for every length.
        dense_bytes: per score, of aux tiles loaded beside K. None is returned where no tile has room for them.
    """
    if head_dim not in HEAD_DIMS or head_dim_v not in HEAD_DIMS:
        return None
    dims = padded_head_dim(head_dim), padded_head_dim(head_dim_v)
    if num_aux == 0:
        many_tiles = not masked or (long_q and not windowed)
        if plain and many_tiles and dims in _SM90_LEAN:
            return _SM90_LEAN[dims]
        if dims in _SM90_NO_AUX:
            return _SM90_NO_AUX[dims]
    config = _SM90[dims] if dims in _SM90 else _SM90[(max(dims), max(dims))]
    return _with_room(config, dims, dense_bytes) if dense_bytes else config


def _with_room(config: KernelConfig, dims: tuple[int, int], dense_bytes: int) -> KernelConfig | None:
    """The configuration with fewer stages, then narrower tiles, until aux tiles fit beside K and V."""
    for tile_n in (config.tile_n, config.tile_n // 2):
        for num_stages in range(config.num_stages, 1, -1):
            smaller = dataclasses.replace(config, tile_n=tile_n, num_stages=num_stages)
            if smaller.smem(*dims, dense_bytes).fits:
                return smaller
    return None
