"""Tile configuration of the CuTe-DSL kernels: what is compiled in, apart from dtypes, head dims and the program."""

from __future__ import annotations

from dataclasses import dataclass

_MMA_M = 64  # rows of one wgmma instruction: one consumer warpgroup owns one such slab of the query tile


@dataclass(frozen=True)
class KernelConfig:
    """Static shape of the sm_90a forward kernel.

    Attributes:
        num_consumers: consumer warpgroups (1-3), each owning 64 query rows.
        tile_n: keys per tile; a multiple of 16, at most 256.
        num_stages: K tiles (and V tiles) held in shared memory.
        order_warpgroups: let the consumer warpgroups take turns issuing wgmma, so that one runs its softmax while
            another feeds the tensor cores (ping-pong).
        optimistic_max: fix the softmax shift after the masked tiles and verify at the end; bf16 only.

    Raises:
        ValueError: for a combination the kernel cannot be built with.
    """

    num_consumers: int = 2
    tile_n: int = 128
    num_stages: int = 2
    order_warpgroups: bool = True
    optimistic_max: bool = True

    def __post_init__(self) -> None:
        if self.num_consumers not in (1, 2, 3):
            raise ValueError(f"num_consumers must be 1, 2 or 3, not {self.num_consumers}")
        if self.tile_n % 16 or not 16 <= self.tile_n <= 256:
            raise ValueError(f"tile_n must be a multiple of 16 in [16, 256], not {self.tile_n}")
        if self.num_stages < 1:
            raise ValueError(f"num_stages must be positive, not {self.num_stages}")

    @property
    def tile_m(self) -> int:
        """Query rows per tile."""
        return _MMA_M * self.num_consumers
