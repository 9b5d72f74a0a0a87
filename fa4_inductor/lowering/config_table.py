"""The measured table of tile configurations.

Measured on an NVIDIA H200 on 2026-11-30; `docs/engineering-log.md` holds the experiments. Rows are looked up
by padded head dims, so (80, 80) uses the row of (96, 96).
"""

from __future__ import annotations

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

# plain scores without aux loads: at D64 registers are left for a third consumer warpgroup (masked programs gain from
# its 192-row tiles only where there are many key tiles), at D128 the warpgroups need no turns
_SM90_LEAN: dict[tuple[int, int], KernelConfig] = {
    (64, 64): KernelConfig(num_consumers=3, tile_n=128, num_stages=2),
    (128, 128): KernelConfig(num_consumers=2, tile_n=128, num_stages=2, order_warpgroups=False),
}
_LEAN_MASKED_SEQLEN_Q = 12288


def padded_head_dim(head_dim: int) -> int:
    """The head dim the tile has in shared memory (80 is padded to 96 by TMA zero fill)."""
    return 96 if head_dim == 80 else head_dim


def select_config(
    head_dim: int, head_dim_v: int, masked: bool, plain: bool = True, num_aux: int = 0, seqlen_q: int | None = None
) -> KernelConfig | None:
    """Configuration for these head dims, or None where the kernel does not support them.

    Args:
        head_dim, head_dim_v: of the user's tensors.
        masked: whether the program has a keep expression that is not constant True.
        plain: whether its score is exactly `score`. num_aux: tensors it loads from.
        seqlen_q: query rows, where a kernel may be chosen by them; every configuration is right for every length.
    """
    if head_dim not in HEAD_DIMS or head_dim_v not in HEAD_DIMS:
        return None
    dims = padded_head_dim(head_dim), padded_head_dim(head_dim_v)
    lean = not masked or (seqlen_q is not None and seqlen_q >= _LEAN_MASKED_SEQLEN_Q)
    if plain and num_aux == 0 and lean and dims in _SM90_LEAN:
        return _SM90_LEAN[dims]
    if dims in _SM90:
        return _SM90[dims]
    return _SM90[(max(dims), max(dims))]
