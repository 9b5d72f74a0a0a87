"""The configurations that autotuning times for one kernel: that of the table, and the few that came near it before.

docs/engineering-log.md has the measurements behind the choice: turns of the warpgroups, Q in registers, narrower key
tiles, a third consumer warpgroup at head dim 64 and a single one where there are few query rows each win somewhere and
lose elsewhere; everything else lost everywhere.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from fa4_inductor.lowering.config import KernelConfig
from fa4_inductor.lowering.config_table import padded_head_dim

_TILE_N = (64, 96, 128)
_MAX_STAGES = 4


def candidates(
    table: KernelConfig, head_dim: int, head_dim_v: int, dense_bytes: int = 0, *, fixed_tiles: bool = False
) -> list[KernelConfig]:
    """`table` first, then what may be faster and fits into shared memory.

    Args:
        head_dim, head_dim_v: of the user's tensors. dense_bytes: as in `KernelConfig.smem`.
        fixed_tiles: the sizes of the tiles are given, by a tile map.
    """
    dims = padded_head_dim(head_dim), padded_head_dim(head_dim_v)
    turns = not table.order_warpgroups
    changes: list[dict[str, Any]] = [{"order_warpgroups": turns}]
    if max(dims) <= 128 and table.num_consumers <= 2:
        changes += [{"q_in_registers": not table.q_in_registers}]
    if not fixed_tiles:
        changes += [{"tile_n": n} for n in _TILE_N if n != table.tile_n]
        changes += [{"num_consumers": 1, "order_warpgroups": False}]
        if max(dims) <= 64:
            other = 2 if table.num_consumers == 3 else 3
            with_q = {"num_consumers": other, "q_in_registers": other == 2}  # three have no registers left for Q
            changes += [{**with_q, "order_warpgroups": order} for order in (False, True)]
    found, aliases = [table], table.smem(*dims, dense_bytes).output_aliases_q
    for change in changes:
        config = _with_stages(dataclasses.replace(table, **change), dims, dense_bytes, aliases)
        if config is not None and config not in found:
            found.append(config)
    return found


def _with_stages(config: KernelConfig, dims: tuple[int, int], dense_bytes: int, may_alias: bool) -> KernelConfig | None:
    """`config` with as many stages as fit, of 2 to _MAX_STAGES. may_alias: O need not have a buffer of its own."""
    for count in range(_MAX_STAGES, 1, -1):
        fitting = dataclasses.replace(config, num_stages=count)
        plan = fitting.smem(*dims, dense_bytes)
        if plan.fits and (may_alias or not plan.output_aliases_q):
            return fitting
    return None
