"""Tile maps in eager torch: the oracle of `kernels/cute/tile_map.py`, and what runs where that kernel cannot."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fa4_inductor.kernels.contract import widened
from fa4_inductor.spec.attention import AttentionSpec
from fa4_inductor.spec.interpret import Env, evaluate, grid

MAP_HEADER = 2
"""Entries of a row before the first tile."""
EMPTY, MASKED, FULL = 0, 1, 2


def map_shape(batch: int, heads: int, seqlen_q: int, seqlen_k: int, tile_m: int, tile_n: int) -> tuple[int, ...]:
    """Shape of the map of a mask (batch, heads, Sq, Sk)."""
    return batch, heads, (seqlen_q + tile_m - 1) // tile_m, MAP_HEADER + (seqlen_k + tile_n - 1) // tile_n


def classify(
    aux: Sequence[torch.Tensor],
    spec: AttentionSpec,
    sizes: Sequence[int],
    batch: int,
    heads: int,
    seqlen_q: int,
    seqlen_k: int,
    tile_m: int,
    tile_n: int,
    device: torch.device,
) -> torch.Tensor:
    """EMPTY, MASKED or FULL for each tile of `spec.keep`: int32 (batch, heads, query tiles, key tiles).

    A tile that ends behind the last key is never full.
    """
    _, _, num_m, width = map_shape(batch, heads, seqlen_q, seqlen_k, tile_m, tile_n)
    num_n = width - MAP_HEADER
    aux = [widened(t.to(device), a.kind) for t, a in zip(aux, spec.aux, strict=True)]
    names = grid(batch, heads, seqlen_q, seqlen_k, device) | {f"size{i}": n for i, n in enumerate(sizes)}
    found = torch.empty((batch, heads, num_m, num_n), dtype=torch.int32, device=device)
    for m in range(num_m):
        rows = torch.arange(m * tile_m, min((m + 1) * tile_m, seqlen_q), device=device).view(1, 1, -1, 1)
        keep = torch.as_tensor(evaluate(spec.keep, Env({**names, "q_idx": rows}, aux)), device=device)
        keep = keep.expand(batch, heads, rows.shape[2], seqlen_k)
        keep = torch.nn.functional.pad(keep, (0, num_n * tile_n - seqlen_k)).unflatten(3, (num_n, tile_n))
        kept = keep.any(4).any(2), keep.all(4).all(2)
        found[:, :, m] = kept[0].int() + kept[1].int()
    return found


def list_tiles(classes: torch.Tensor) -> torch.Tensor:
    """The map with these classes of tiles (spec.attention.TileMap); entries that stand for nothing are 0."""
    num_n = classes.shape[3]
    out = classes.new_zeros((*classes.shape[:3], MAP_HEADER + num_n))
    masked, full = classes == MASKED, classes == FULL
    out[..., 0], out[..., 1] = (masked | full).sum(3), masked.sum(3)
    number = torch.arange(num_n, device=classes.device, dtype=classes.dtype).expand_as(classes)
    after = lambda chosen: chosen.int().flip(3).cumsum(3).flip(3) - 1  # noqa: E731
    for chosen, position in ((masked, MAP_HEADER + after(masked)), (full, MAP_HEADER + num_n - 1 - after(full))):
        b, h, m, _ = torch.nonzero(chosen, as_tuple=True)
        out[b, h, m, position[chosen].long()] = number[chosen]
    return out


def listed_classes(tile_map: torch.Tensor) -> torch.Tensor:
    """The classes that a map lists, int32 (batch, heads, query tiles, key tiles).

    Raises:
        ValueError: for a map that lists a tile twice, or one that is none.
    """
    num_n = tile_map.shape[3] - MAP_HEADER
    classes = torch.zeros((*tile_map.shape[:3], num_n), dtype=torch.int32)
    for at in torch.cartesian_prod(*(torch.arange(n) for n in tile_map.shape[:3])).tolist():
        row = tile_map[tuple(at)].tolist()
        count, masked, tiles = row[0], row[1], row[MAP_HEADER:]
        full = tiles[num_n - (count - masked) :] if count > masked else []
        listed = tiles[:masked] + full
        if len(set(listed)) != count or not all(0 <= n < num_n for n in listed):
            raise ValueError(f"row {at} of the map lists {listed} of {num_n} tiles")
        for n in tiles[:masked]:
            classes[(*at, n)] = MASKED
        for n in full:
            classes[(*at, n)] = FULL
    return classes


def tile_map_eager(
    aux: Sequence[torch.Tensor],
    spec: AttentionSpec,
    sizes: Sequence[int],
    batch: int,
    heads: int,
    seqlen_q: int,
    seqlen_k: int,
    tile_m: int,
    tile_n: int,
    device: torch.device,
) -> torch.Tensor:
    """The exact tile map of `spec.keep`, int32 of `map_shape`."""
    return list_tiles(classify(aux, spec, sizes, batch, heads, seqlen_q, seqlen_k, tile_m, tile_n, device))
