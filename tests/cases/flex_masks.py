"""mask_mods of the attention-gym gallery, written anew: windows, documents, grids, videos, trees, pages."""

from __future__ import annotations

import torch
from torch.nn.attention.flex_attention import and_masks, noop_mask, or_masks

from fa4_inductor.errors import DeclineReason
from tests.cases.flex_case import BATCH, CAUSAL, HEADS, SEQLEN, FlexCase, Mod


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def causal_with_offset(offset):
    """Queries that start `offset` positions into the keys; a 0-dim tensor or a number."""
    return lambda b, h, q_idx, kv_idx: q_idx + offset >= kv_idx


def prefix_lm(length: int):
    return or_masks(lambda b, h, q_idx, kv_idx: kv_idx < length, causal)


def prefix_by_batch(length: torch.Tensor):
    return lambda b, h, q_idx, kv_idx: (kv_idx < length[b]) | (q_idx >= kv_idx)


def sliding_window(size: int):
    return and_masks(lambda b, h, q_idx, kv_idx: q_idx - kv_idx <= size, causal)


def window_by_head(sizes: torch.Tensor):
    return lambda b, h, q_idx, kv_idx: (q_idx - kv_idx).abs() <= sizes[h]


def dilated_window(size: int, dilation: int):
    def mask(b, h, q_idx, kv_idx):
        distance = torch.abs(q_idx - kv_idx)
        return (distance <= size) & (distance % dilation == 0)

    return mask


def global_window(size: int, is_global: torch.Tensor):
    def near(b, h, q_idx, kv_idx):
        return (q_idx - kv_idx).abs() <= size

    return or_masks(near, lambda b, h, q_idx, kv_idx: is_global[q_idx] | is_global[kv_idx])


def window_in_place(size: int):
    def mask(b, h, q_idx, kv_idx):
        keep = q_idx >= kv_idx
        keep &= q_idx - kv_idx < size
        return keep

    return mask


def grouped(inner: Mod, size: int):
    """Fixed groups of tokens that do not see each other; positions count from the start of the group."""

    def mask(b, h, q_idx, kv_idx):
        return (q_idx // size == kv_idx // size) & inner(b, h, q_idx % size, kv_idx % size)

    return mask


LENGTHS = (20, 7, 24, 13)


def offsets() -> torch.Tensor:
    return torch.tensor([0, *LENGTHS], dtype=torch.int32).cumsum(0)


def document_ids() -> torch.Tensor:
    return torch.arange(len(LENGTHS), dtype=torch.int32).repeat_interleave(torch.tensor(LENGTHS))


def documents(inner: Mod):
    """Packed documents; `inner` sees positions inside the document."""
    start, document = offsets(), document_ids()

    def mask(b, h, q_idx, kv_idx):
        q_inside = q_idx - start[document[q_idx]]
        kv_inside = kv_idx - start[document[kv_idx]]
        return (document[q_idx] == document[kv_idx]) & inner(b, h, q_inside, kv_inside)

    return mask


def documents_by_start():
    """Causal documents as one interval of keys per query."""
    start, document = offsets(), document_ids()
    return lambda b, h, q_idx, kv_idx: (kv_idx >= start[document[q_idx]]) & causal(b, h, q_idx, kv_idx)


def jagged(inner: Mod):
    """A nested tensor's offsets, found by searchsorted, around a dense mask_mod."""
    start = offsets()
    sequence = torch.searchsorted(start, torch.arange(SEQLEN, dtype=torch.int32), right=True) - 1

    def mask(b, h, q_idx, kv_idx):
        same = sequence[q_idx] == sequence[kv_idx]
        return inner(b, h, q_idx - start[sequence[q_idx]], kv_idx - start[sequence[kv_idx]]) & same

    return mask


def documents_by_batch():
    document = torch.stack([document_ids(), document_ids().flip(0)])
    return lambda b, h, q_idx, kv_idx: (document[b, q_idx] == document[b, kv_idx]) & (q_idx >= kv_idx)


def lengths_of_both():
    """Padding on the right of queries and keys: lengths by batch."""
    q_length, kv_length = torch.tensor([40, 64]), torch.tensor([50, 31])
    return lambda b, h, q_idx, kv_idx: (q_idx < q_length[b]) & (kv_idx < kv_length[b])


def shared_prefix():
    """Responses that share one prompt: causal inside a document, and the whole of its prompt."""
    start, document, prompt_of = offsets(), document_ids(), torch.tensor([0, 0, 2, 2])

    def mask(b, h, q_idx, kv_idx):
        own = document[q_idx]
        prompt = prompt_of[own]
        inside = (kv_idx >= start[own]) & (q_idx >= kv_idx)
        of_prompt = (own != prompt) & (kv_idx >= start[prompt]) & (kv_idx < start[prompt + 1])
        return inside | of_prompt

    return mask


def images_of_text(tokens_per_image: int = 16):
    """Flamingo: text in an interval sees the tokens of that interval's image."""
    intervals = torch.tensor([[0, 20], [20, 30], [30, 64]])
    image = torch.arange(3).repeat_interleave(tokens_per_image)

    def mask(b, h, q_idx, kv_idx):
        interval = intervals[image[kv_idx]]
        return (q_idx >= interval[0]) & (q_idx < interval[1])

    return mask


def transfusion():
    """Causal text with image spans inside which all tokens see each other; (start, end) by batch."""
    spans = torch.tensor([[[4, 14], [30, 40]], [[0, 10], [50, 60]]])

    def mask(b, h, q_idx, kv_idx):
        keep = q_idx >= kv_idx
        for i in range(2):
            start, end = spans[b, i, 0], spans[b, i, 1]
            keep = keep | ((q_idx >= start) & (q_idx < end) & (kv_idx >= start) & (kv_idx < end))
        return keep

    return mask


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


def block_diffusion(length: int, block: int):
    """BD3-LM: noised tokens in the first half of the sequence, clean ones in the second."""

    def mask(b, h, q_idx, kv_idx):
        q_noised, kv_noised = q_idx < length, kv_idx < length
        q_block, kv_block = q_idx % length // block, kv_idx % length // block
        same = (q_block == kv_block) & (q_noised == kv_noised)
        earlier = (q_block > kv_block) & q_noised & ~kv_noised
        return same | earlier | ((q_block >= kv_block) & ~q_noised & ~kv_noised)

    return mask


def tree(prefix: int, nodes: int = 16):
    """Speculative decoding: a prefix, then a tree of drafts in which a node sees its ancestors."""
    ancestors = torch.eye(nodes, dtype=torch.bool)
    for node in range(1, nodes):
        ancestors[node] |= ancestors[(node - 1) // 2]

    def mask(b, h, q_idx, kv_idx):
        node = (kv_idx - prefix).clamp(min=0, max=nodes - 1)
        in_tree = (kv_idx >= prefix) & (kv_idx < prefix + nodes)
        return (kv_idx < prefix) | (in_tree & ancestors[q_idx, node])

    return mask


def draft_blocks(prefix: int, block: int):
    def mask(b, h, q_idx, kv_idx):
        after = kv_idx - prefix
        own = (kv_idx >= prefix) & (q_idx // block == after // block) & (after % block <= q_idx % block)
        return (kv_idx < prefix) | own

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


def tile_map():
    """The same selection as a table of tiles."""
    chosen = torch.rand(BATCH, HEADS, SEQLEN // TILE, SEQLEN // TILE) > 0.5
    sizes = _sizes_of_tiles()

    def mask(b, h, q_idx, kv_idx):
        kv_tile = kv_idx // TILE
        return chosen[b, h, q_idx // TILE, kv_tile] & (kv_idx % TILE < sizes[kv_tile])

    return mask


PAGE, PAGES = 16, 6


def page_owner() -> torch.Tensor:
    """(batch, pages): the logical block that a physical page holds, -1 for another batch's page."""
    owner = torch.full((BATCH, PAGES), -1)
    owner[0, torch.tensor([4, 1, 3])] = torch.arange(3)
    owner[1, torch.tensor([0, 5])] = torch.arange(2)
    return owner


def paged(inner: Mod):
    """Keys live in physical pages; the page table says which logical position of which batch that is."""
    owner = page_owner()

    def mask(b, h, q_idx, kv_idx):
        block = owner[b, kv_idx // PAGE]
        logical = block * PAGE + kv_idx % PAGE
        return torch.where(block >= 0, inner(b, h, q_idx, logical), False)

    return mask


def decode_at(position: torch.Tensor):
    return lambda b, h, q_idx, kv_idx: q_idx + position[b] >= kv_idx


def _case(name, origin, mask, keep=None, aux="", **more):
    program = None if keep is None else f"scale=0.25; score=score; keep={keep}; empty_row=zero"
    return FlexCase(name, origin, mask=mask, program=program, aux=aux, **more)


NATTEN = (8, 8, 5)
CASES = (
    _case("causal", "masks/causal", lambda: causal, CAUSAL),
    _case("no_op", "masks/batchify", lambda: noop_mask, decline=DeclineReason.UNSUPPORTED_PROGRAM),
    _case("prefix_lm", "masks/prefix_lm", lambda: prefix_lm(24)),
    _case("sliding_window", "masks/sliding_window", lambda: sliding_window(10)),
    _case("dilated_window", "masks/dilated_sliding_window", lambda: dilated_window(12, 3)),
    _case("global_window", "masks/global_sliding_window", lambda: global_window(5, torch.arange(SEQLEN) % 17 == 0)),
    _case("batchify", "masks/batchify", lambda: grouped(noop_mask, 16)),
    _case("batchify_causal", "masks/batchify", lambda: grouped(causal, 16)),
    _case("documents", "masks/document_mask", lambda: documents(causal)),
    _case("documents_in_both_directions", "masks/document_mask", lambda: documents(noop_mask)),
    _case("documents_of_windows", "masks/document_mask", lambda: documents(sliding_window(5))),
    _case("documents_by_start", "masks/document_mask", documents_by_start),
    _case("jagged", "examples/flex_attn", lambda: jagged(causal)),
    _case("shared_prefix", "masks/shared_prefix", shared_prefix),
    _case("flamingo", "masks/flamingo", images_of_text, seqlen_k=48),
    _case("square_window", "examples/flex_attn", lambda: square_window(8, 2)),
    _case("natten", "masks/natten", lambda: neighborhood(*NATTEN, raster(8))),
    _case("natten_tiled", "masks/natten", lambda: neighborhood(*NATTEN, tiled(8, 4))),
    _case("natten_morton", "masks/natten", lambda: neighborhood(*NATTEN, morton)),
    _case("sliding_tiles_2d", "masks/sta", lambda: sliding_tiles((8, 6), (6, 6), (2, 2), text=16)),
    _case("sliding_tiles_3d", "masks/sta", lambda: sliding_tiles((4, 4, 4), (3, 2, 4), (1, 2, 2))),
    _case("spatial_head", "masks/svg", lambda: spatial_head(6, 10, 2, 4)),
    _case("spatial_head_with_sink", "masks/svg", lambda: spatial_head(6, 10, 2, 4, sink=True)),
    _case("temporal_head", "masks/svg", lambda: temporal_head(4, 12, 3)),
    _case("block_diffusion", "masks/block_diffusion", lambda: block_diffusion(32, 8)),
    _case("draft_tree", "masks/jetspec", lambda: tree(48), seqlen_q=16),
    _case("draft_blocks", "masks/jetspec", lambda: draft_blocks(16, 12), seqlen_q=48),
    _case("selected_tiles", "masks/vsa", selected_tiles, mask_sizes=(BATCH, HEADS)),
    _case("tile_map", "masks/vsa", tile_map, mask_sizes=(BATCH, HEADS)),
    _case("paged", "examples/paged_attention", lambda: paged(noop_mask), mask_sizes=(BATCH, None), kv_batch=1,
          seqlen_k=PAGE * PAGES),
    _case("paged_causal", "examples/paged_attention", lambda: paged(causal), mask_sizes=(BATCH, None), kv_batch=1,
          seqlen_k=PAGE * PAGES),
    _case("paged_decode", "examples/paged_attention", lambda: paged(decode_at(torch.tensor([40, 17]))),
          mask_sizes=(BATCH, None), kv_batch=1, seqlen_q=1, seqlen_k=PAGE * PAGES),
    _case("decode", "examples/paged_attention", lambda: decode_at(torch.tensor([40, 17])), mask_sizes=(BATCH, None),
          seqlen_q=1),
    _case("transfusion", "", transfusion, mask_sizes=(BATCH, None)),
    _case("prefix_by_batch", "", lambda: prefix_by_batch(torch.tensor([5, 40])), mask_sizes=(BATCH, None)),
    _case("documents_by_batch", "", documents_by_batch, mask_sizes=(BATCH, None)),
    _case("lengths_of_both", "", lengths_of_both, mask_sizes=(BATCH, None)),
    _case("window_by_head", "", lambda: window_by_head(torch.tensor([3, 9, 20, 64])), mask_sizes=(None, HEADS)),
    _case("window_in_place", "", lambda: window_in_place(7), f"({CAUSAL}) & (kv_idx >= q_idx - 6)"),
    _case("offset_number", "examples/ring_attention", lambda: causal_with_offset(32), seqlen_q=32),
    _case("offset_tensor", "", lambda: causal_with_offset(torch.tensor(32)), seqlen_q=32),
)  # fmt: skip
