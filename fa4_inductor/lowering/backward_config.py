"""Tile configuration of the backward kernel."""

from __future__ import annotations

_TILE_M = {(64, 64): 64, (128, 128): 64}


def backward_tile_m(head_dim: int, head_dim_v: int) -> int | None:
    """Query rows per tile for these head dims; None where the kernel does not have them."""
    return _TILE_M.get((head_dim, head_dim_v))
