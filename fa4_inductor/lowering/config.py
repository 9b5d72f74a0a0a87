"""Tile configuration of the CuTe-DSL kernels: what is compiled in, apart from dtypes, head dims and the program."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass

_MMA_M = 64  # rows of one wgmma instruction: one consumer warpgroup owns one such slab of the query tile
_SMEM_BYTES = 227 << 10
_BARRIER_BYTES = 2048  # mbarriers, lists of tiles (to redo, claimed), alignment of the buffers


@dataclass(frozen=True)
class SmemPlan:
    """Shared memory of one CTA in bytes: `stage` is one slot of the K and V rings, with the dense tiles that travel
    with K. `output_aliases_q`: O has no buffer of its own and is written over Q. `fits`: an SM has that much."""

    stage: int
    output_aliases_q: bool
    fits: bool


@dataclass(frozen=True)
class KernelConfig:
    """Static shape of the sm_90a forward kernel.

    Attributes:
        num_consumers: consumer warpgroups (1-3), each owning 64 query rows.
        tile_n: keys per tile; a multiple of 16, at most 256.
        num_stages: K tiles (and V tiles) held in shared memory.
        order_warpgroups: let the consumer warpgroups take turns issuing wgmma, so that one runs its softmax while
            another feeds the tensor cores (ping-pong).
        min_heads: heads (over all batches) whose query tiles are dealt out together, longest first, at least: more of
            them balance the CTAs better, fewer keep K and V in L2.
        claim_tiles: deal query tiles out while the kernel runs (kernels/cute/claims.py).
        q_in_registers: keep Q in registers while a query tile runs, so that its place in shared memory is free for the
            next one.
        optimistic_max: fix the softmax shift after the first tile and verify at the end; bf16 only.
        polynomial_exp2: of every 8 exponentials, how many take multiply-adds instead of the special function unit, for
            programs that need the unit for more and have bounded scores.

    Raises:
        ValueError: for a combination the kernel cannot be built with.
    """

    num_consumers: int = 2
    tile_n: int = 128
    num_stages: int = 2
    order_warpgroups: bool = True
    min_heads: int = 16
    q_in_registers: bool = False
    optimistic_max: bool = True
    polynomial_exp2: int = 4
    claim_tiles: bool = False

    def __post_init__(self) -> None:
        if self.num_consumers not in (1, 2, 3):
            raise ValueError(f"num_consumers must be 1, 2 or 3, not {self.num_consumers}")
        if self.tile_n % 16 or not 16 <= self.tile_n <= 256:
            raise ValueError(f"tile_n must be a multiple of 16 in [16, 256], not {self.tile_n}")
        if not 0 <= self.polynomial_exp2 <= 8:
            raise ValueError(f"polynomial_exp2 must be in [0, 8], not {self.polynomial_exp2}")
        if self.num_stages < 1:
            raise ValueError(f"num_stages must be positive, not {self.num_stages}")

    @property
    def tile_m(self) -> int:
        """Query rows per tile."""
        return _MMA_M * self.num_consumers

    def smem(self, tile_d: int, tile_dv: int, dense_bytes: int = 0) -> SmemPlan:
        """What the kernel needs at padded head dims, in a half type.

        Args:
            dense_bytes: per score, of the aux tiles [tile_m, tile_n] that are loaded beside K (lowering.aux_layout).
        """
        size = 2
        stage = self.tile_n * (size * (tile_d + tile_dv) + self.tile_m * dense_bytes)
        room = _SMEM_BYTES - _BARRIER_BYTES - self.tile_m * tile_d * size - self.num_stages * stage
        aliases = room < self.tile_m * tile_dv * size
        return SmemPlan(stage, aliases, room >= 0 and not (aliases and tile_dv > tile_d))

    @property
    def text(self) -> str:
        """The fields as JSON, for keys."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True)

    @classmethod
    def parse(cls, text: str) -> KernelConfig:
        """The configuration that wrote `text`."""
        return cls(**json.loads(text))
