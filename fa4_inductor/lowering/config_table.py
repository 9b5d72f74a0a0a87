"""The table of tile configurations: which row of `config_rows` a kernel takes.

`config_rows.GPU` and `DATE` say where and when the rows were measured, `docs/engineering-log.md` holds the experiments.
Rows are looked up by padded head dims, so (80, 80) uses the row of (96, 96).
"""

from __future__ import annotations

import dataclasses

from fa4_inductor.lowering.config import KernelConfig
from fa4_inductor.lowering.config_rows import ROWS

HEAD_DIMS = (64, 80, 96, 128, 192, 256)
KINDS = ("loads", "no loads", "lean")
"""What a row is for. "loads": every program. "no loads": those without aux tensors, whose warpgroups need no turns,
where there is such a row. "lean": programs of at most one aux tensor, and none loaded in tiles, whose rows have many
key tiles: registers are left for a third consumer warpgroup, whose 192-row tiles waste more of a diagonal."""
_SM90 = {key: KernelConfig(**fields) for key, fields in ROWS.items()}  # type: ignore[arg-type]
LONG_SEQLEN_Q = 4096
"""From here on the rows of a causal mask have many key tiles. The only length that a choice depends on."""


def padded_head_dim(head_dim: int) -> int:
    """The head dim the tile has in shared memory (80 is padded to 96 by TMA zero fill)."""
    return 96 if head_dim == 80 else head_dim


def select_config(
    head_dim: int,
    head_dim_v: int,
    num_aux: int = 0,
    *,
    windowed: bool = False,
    long_q: bool = False,
    dense_bytes: int = 0,
    uneven: bool = False,
) -> KernelConfig | None:
    """Configuration for these head dims, or None where the kernel does not support them.

    Args:
        head_dim, head_dim_v: of the user's tensors.
        num_aux: tensors that the program loads from.
        windowed: whether the keys that a row keeps need not begin with the first.
        long_q: at least LONG_SEQLEN_Q query rows; every configuration is right for every length.
        dense_bytes: per score, of aux tiles loaded beside K. None is returned where no tile has room for them.
        uneven: query tiles visit key tiles that a tile map lists.
    """
    config = _of_table(head_dim, head_dim_v, num_aux, windowed, long_q, dense_bytes)
    return config and dataclasses.replace(config, claim_tiles=uneven)


def _of_table(
    head_dim: int,
    head_dim_v: int,
    num_aux: int,
    windowed: bool,
    long_q: bool,
    dense_bytes: int,
) -> KernelConfig | None:
    if head_dim not in HEAD_DIMS or head_dim_v not in HEAD_DIMS:
        return None
    dims = padded_head_dim(head_dim), padded_head_dim(head_dim_v)
    if long_q and not windowed and num_aux <= 1 and not dense_bytes and ("lean", *dims) in _SM90:
        return _SM90["lean", *dims]
    if num_aux == 0 and ("no loads", *dims) in _SM90:
        return _SM90["no loads", *dims]
    config = _SM90.get(("loads", *dims)) or _SM90["loads", max(dims), max(dims)]
    return _with_room(config, dims, dense_bytes) if dense_bytes else config


def _with_room(config: KernelConfig, dims: tuple[int, int], dense_bytes: int) -> KernelConfig | None:
    """The configuration with fewer stages, then narrower tiles, until aux tiles fit beside K and V; registers are for
    their elements, not for Q."""
    config = dataclasses.replace(config, q_in_registers=False)
    for tile_n in (config.tile_n, config.tile_n // 2):
        for num_stages in range(config.num_stages, 1, -1):
            smaller = dataclasses.replace(config, tile_n=tile_n, num_stages=num_stages)
            if smaller.smem(*dims, dense_bytes).fits:
                return smaller
    return None
