"""mask_mods over images and videos from the attention-gym gallery, written anew: neighbourhoods, tiles, frames."""

from __future__ import annotations

import torch

from fa4_inductor.errors import DeclineReason
from tests.cases.flex_case import BATCH, HEADS, SEQLEN, mask_case


def square_window(width: int, reach: int):
    """Stand-alone self-attention: tokens near in both directions of an image."""

    def mask(b, h, q_idx, kv_idx):
        rows = (q_idx // width - kv_idx // width).abs() <= reach
        return rows & ((q_idx % width - kv_idx % width).abs() <= reach)

    return mask


def neighborhood(width: int, height: int, kernel: int, position):
    """NATTEN: the window's centre keeps its distance from the border; `position` maps a token to (x, y)."""
    half = kernel // 2

    def mask(b, h, q_idx, kv_idx):
        (q_x, q_y), (kv_x, kv_y) = position(q_idx), position(kv_idx)
        centre_x = q_x.clamp(half, width - 1 - half)
        centre_y = q_y.clamp(half, height - 1 - half)
        return ((centre_x - kv_x).abs() <= half) & ((centre_y - kv_y).abs() <= half)

    return mask


def raster(width: int):
    return lambda i: (i // width, i % width)


def tiled(width: int, tile: int):
    def position(i):
        which, inside = i // (tile * tile), i % (tile * tile)
        return which % (width // tile) * tile + inside % tile, which // (width // tile) * tile + inside // tile

    return position


def _even_bits(code):
    """Bits 0, 2, 4, ... of a Morton code next to each other."""
    code = code & 0x55555555
    for shift, keep in ((1, 0x33333333), (2, 0x0F0F0F0F), (4, 0x00FF00FF), (8, 0x0000FFFF)):
        code = (code | (code >> shift)) & keep
    return code


def morton(i):
    return _even_bits(i), _even_bits(i >> 1)


def sliding_tiles(canvas: tuple[int, ...], kernel: tuple[int, ...], tile: tuple[int, ...], text: int = 0):
    """Sliding tile attention (STA) in any number of dimensions, with text tokens behind the video."""
    tiles = [c // t for c, t in zip(canvas, tile)]
    per_tile = int(torch.tensor(tile).prod())
    vision = int(torch.tensor(canvas).prod())

    def coordinates(i):
        which, result = i // per_tile, []
        for n in reversed(tiles):
            result.append(which % n)
            which = which // n
        return result[::-1]

    def mask(b, h, q_idx, kv_idx):
        near = (q_idx < vision) & (kv_idx < vision)
        for q_tile, kv_tile, n, k, t in zip(coordinates(q_idx), coordinates(kv_idx), tiles, kernel, tile):
            left = k // t // 2
            right = left + (k // t % 2 - 1)
            centre = q_tile.clamp(left, n - 1 - right)
            near = near & (kv_tile >= centre - left) & (kv_tile <= centre + right)
        to_text = (q_idx < vision) & (kv_idx >= vision) & (kv_idx < vision + text)
        return near | to_text | ((q_idx >= vision) & (kv_idx < vision + text))

    return mask


def spatial_head(prompt: int, frame: int, width: int, round_to: int, sink: bool = False):
    """Sparse VideoGen: a band of frames, and the prompt in both directions."""

    def mask(b, h, q_idx, kv_idx):
        columns = kv_idx < prompt + (frame if sink else 0)
        return columns | (q_idx < prompt) | (torch.abs(q_idx - kv_idx) < width * frame // round_to * round_to)

    return mask


def temporal_head(prompt: int, frame: int, width: int):
    def mask(b, h, q_idx, kv_idx):
        near = torch.abs((q_idx - prompt) % frame - (kv_idx - prompt) % frame) < width
        return (kv_idx < prompt) | (q_idx < prompt) | near

    return mask


TILE = 16


def _sizes_of_tiles() -> torch.Tensor:
    return torch.tensor([16, 16, 16, 9])


def selected_tiles(count: int = 2):
    """Video sparse attention: the tiles that a coarse pass selected, as a list per tile of queries."""
    chosen = torch.rand(BATCH, HEADS, SEQLEN // TILE, SEQLEN // TILE).topk(count).indices
    sizes = _sizes_of_tiles()

    def mask(b, h, q_idx, kv_idx):
        kv_tile = kv_idx // TILE
        selected = (chosen[b, h, q_idx // TILE] == kv_tile.unsqueeze(-1)).any(dim=-1)
        return selected & (kv_idx % TILE < sizes[kv_tile])

    return mask


def many_keys():
    """Near-miss: membership in a list too long to be written out."""
    keys = torch.randperm(SEQLEN)[:40]
    return lambda b, h, q_idx, kv_idx: (keys == kv_idx.unsqueeze(-1)).any(dim=-1)


def tile_map():
    """The same selection as a table of tiles."""
    chosen = torch.rand(BATCH, HEADS, SEQLEN // TILE, SEQLEN // TILE) > 0.5
    sizes = _sizes_of_tiles()

    def mask(b, h, q_idx, kv_idx):
        kv_tile = kv_idx // TILE
        return chosen[b, h, q_idx // TILE, kv_tile] & (kv_idx % TILE < sizes[kv_tile])

    return mask


NATTEN = (8, 8, 5)
CASES = (
    mask_case("square_window", "examples/flex_attn", lambda: square_window(8, 2)),
    mask_case("natten", "masks/natten", lambda: neighborhood(*NATTEN, raster(8))),
    mask_case("natten_tiled", "masks/natten", lambda: neighborhood(*NATTEN, tiled(8, 4))),
    mask_case("natten_morton", "masks/natten", lambda: neighborhood(*NATTEN, morton)),
    mask_case("sliding_tiles_2d", "masks/sta", lambda: sliding_tiles((8, 6), (6, 6), (2, 2), text=16)),
    mask_case("sliding_tiles_3d", "masks/sta", lambda: sliding_tiles((4, 4, 4), (3, 2, 4), (1, 2, 2))),
    mask_case("spatial_head", "masks/svg", lambda: spatial_head(6, 10, 2, 4)),
    mask_case("spatial_head_with_sink", "masks/svg", lambda: spatial_head(6, 10, 2, 4, sink=True)),
    mask_case("temporal_head", "masks/svg", lambda: temporal_head(4, 12, 3)),
    mask_case("selected_tiles", "masks/vsa", selected_tiles, mask_sizes=(BATCH, HEADS)),
    mask_case("tile_map", "masks/vsa", tile_map, mask_sizes=(BATCH, HEADS)),
    mask_case("list_of_many", "", many_keys, decline=DeclineReason.UNSUPPORTED_OP),
)
