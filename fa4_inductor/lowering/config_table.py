"""The table of tile configurations: which row of `config_rows` a kernel takes.

`config_rows.GPU` and `DATE` say where and when the rows were measured, `docs/engineering-log.md` holds the experiments.
Rows are looked up by padded head dims, so (80, 80) uses the row of (96, 96).
"""

from __future__ import annotations

import dataclasses

from fa4_inductor.lowering.config import KernelConfig
from fa4_inductor.lowering.config_rows import ROWS

HEAD_DIMS = (64, 80, 96, 128, 192, 256)
KINDS = ("loads", "no loads", "lean", "bounded", "dense", "short dense")
"""What a row is for. "loads": every program that no other row is for. "no loads": those without aux tensors, whose
warpgroups need no turns. "lean": programs of at most one aux tensor, and none loaded in tiles, whose rows have many key
tiles: registers are left for a third consumer warpgroup, whose 192-row tiles waste more of a diagonal. "bounded":
those without aux tensors whose scores need no shift. "dense": one half-precision tensor (or less) per score is loaded
in tiles; "short dense": the same with few key tiles, where what happens once per query tile weighs most."""
_SM90 = {key: KernelConfig(**fields) for key, fields in ROWS.items()}  # type: ignore[arg-type]
LONG_SEQLEN_Q = 4096
"""From here on the rows of a causal mask have many key tiles."""
LONG_SEQLEN_Q_DENSE = 768
"""From here on a row of "dense" beats one of "short dense". These two are the only lengths that a choice depends on."""
MAX_BOUND = 55.0  # of scores in nats, below which the kernel does without a shift (its MAX_BOUND_LOG2)
_DENSE_BYTES = 2  # that rows of dense kinds were measured with


def padded_head_dim(head_dim: int) -> int:
    """The head dim the tile has in shared memory (80 is padded to 96 by TMA zero fill)."""
    return 96 if head_dim == 80 else head_dim


def is_long(seqlen_q: int, dense: bool) -> bool:
    """Whether this many query rows take the kernel for many. dense: aux tensors are loaded in tiles."""
    return seqlen_q >= (LONG_SEQLEN_Q_DENSE if dense else LONG_SEQLEN_Q)


def select_config(
    head_dim: int,
    head_dim_v: int,
    num_aux: int = 0,
    *,
    windowed: bool = False,
    long_q: bool = False,
    dense_bytes: int = 0,
    uneven: bool = False,
    bounded: bool = False,
) -> KernelConfig | None:
    """Configuration for these head dims, or None where the kernel does not support them.

    Args:
        head_dim, head_dim_v: of the user's tensors.
        num_aux: tensors that the program loads from.
        windowed: whether the keys that a row keeps need not begin with the first.
        long_q: many query rows (`is_long`); every configuration is right for every length.
        dense_bytes: per score, of aux tiles loaded beside K. None is returned where no tile has room for them.
        uneven: query tiles visit key tiles that a tile map lists.
        bounded: scores have a bound, so that the softmax needs no shift.
    """
    config = _of_table(head_dim, head_dim_v, num_aux, windowed, long_q, dense_bytes, bounded)
    return config and dataclasses.replace(config, claim_tiles=uneven)


def _of_table(
    head_dim: int,
    head_dim_v: int,
    num_aux: int,
    windowed: bool,
    long_q: bool,
    dense_bytes: int,
    bounded: bool,
) -> KernelConfig | None:
    if head_dim not in HEAD_DIMS or head_dim_v not in HEAD_DIMS:
        return None
    dims = padded_head_dim(head_dim), padded_head_dim(head_dim_v)
    if dense_bytes:
        return _dense(dims, long_q, dense_bytes)
    kinds = ["lean"] if long_q and not windowed and num_aux <= 1 else []
    kinds += ["bounded"] if bounded and num_aux == 0 else []
    kinds += ["no loads"] if num_aux == 0 else []
    return _row(kinds, dims) or _for_all(dims)


def _for_all(dims: tuple[int, int]) -> KernelConfig:
    return _row(["loads"], dims) or _SM90["loads", max(dims), max(dims)]


def _row(kinds: list[str], dims: tuple[int, int]) -> KernelConfig | None:
    return next((_SM90[kind, *dims] for kind in kinds if (kind, *dims) in _SM90), None)


def _dense(dims: tuple[int, int], long_q: bool, dense_bytes: int) -> KernelConfig | None:
    kinds = ["dense"] if long_q else ["short dense", "dense"]
    config = _row(kinds, dims) if dense_bytes <= _DENSE_BYTES else None
    if config is None:  # registers are for the elements, not for Q
        config = dataclasses.replace(_for_all(dims), q_in_registers=False)
    return _with_room(config, dims, dense_bytes)


def _with_room(config: KernelConfig, dims: tuple[int, int], dense_bytes: int) -> KernelConfig | None:
    """The configuration with fewer stages, then narrower tiles, until aux tiles fit beside K and V."""
    for tile_n in (config.tile_n, config.tile_n // 2):
        for num_stages in range(config.num_stages, 1, -1):
            smaller = dataclasses.replace(config, tile_n=tile_n, num_stages=num_stages)
            if smaller.smem(*dims, dense_bytes).fits:
                return smaller
    return None
