"""mask_mods of the attention-gym gallery, written anew: windows, documents, trees, pages."""

from __future__ import annotations

import torch
from torch.nn.attention.flex_attention import and_masks, noop_mask, or_masks

from fa4_inductor.errors import DeclineReason
from tests.cases.flex_case import BATCH, CAUSAL, HEADS, SEQLEN, Mod, mask_case


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


def window_by_shift(bits: torch.Tensor):
    """Near-miss: a shift by data has no expression."""
    return lambda b, h, q_idx, kv_idx: (q_idx >> bits[h]) == (kv_idx >> bits[h])


def rounded_causal(b, h, q_idx, kv_idx):
    """Near-miss: positions beyond 256 that bfloat16 rounds before they are compared."""
    return (q_idx + 240).to(torch.bfloat16) >= (kv_idx + 240).to(torch.bfloat16)


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


CASES = (
    mask_case("causal", "masks/causal", lambda: causal, CAUSAL),
    mask_case("no_op", "masks/batchify", lambda: noop_mask, decline=DeclineReason.UNSUPPORTED_PROGRAM),
    mask_case("prefix_lm", "masks/prefix_lm", lambda: prefix_lm(24)),
    mask_case("sliding_window", "masks/sliding_window", lambda: sliding_window(10)),
    mask_case("dilated_window", "masks/dilated_sliding_window", lambda: dilated_window(12, 3)),
    mask_case("global_window", "masks/global_sliding_window", lambda: global_window(5, torch.arange(SEQLEN) % 17 == 0)),
    mask_case("batchify", "masks/batchify", lambda: grouped(noop_mask, 16)),
    mask_case("batchify_causal", "masks/batchify", lambda: grouped(causal, 16)),
    mask_case("documents", "masks/document_mask", lambda: documents(causal)),
    mask_case("documents_in_both_directions", "masks/document_mask", lambda: documents(noop_mask)),
    mask_case("documents_of_windows", "masks/document_mask", lambda: documents(sliding_window(5))),
    mask_case("documents_by_start", "masks/document_mask", documents_by_start),
    mask_case("jagged", "examples/flex_attn", lambda: jagged(causal)),
    mask_case("shared_prefix", "masks/shared_prefix", shared_prefix),
    mask_case("flamingo", "masks/flamingo", images_of_text, seqlen_k=48),
    mask_case("block_diffusion", "masks/block_diffusion", lambda: block_diffusion(32, 8)),
    mask_case("draft_tree", "masks/jetspec", lambda: tree(48), seqlen_q=16),
    mask_case("draft_blocks", "masks/jetspec", lambda: draft_blocks(16, 12), seqlen_q=48),
    mask_case("paged", "examples/paged_attention", lambda: paged(noop_mask), mask_sizes=(BATCH, None), kv_batch=1,
          seqlen_k=PAGE * PAGES),
    mask_case("paged_causal", "examples/paged_attention", lambda: paged(causal), mask_sizes=(BATCH, None), kv_batch=1,
          seqlen_k=PAGE * PAGES),
    mask_case("paged_decode", "examples/paged_attention", lambda: paged(decode_at(torch.tensor([40, 17]))),
          mask_sizes=(BATCH, None), kv_batch=1, seqlen_q=1, seqlen_k=PAGE * PAGES),
    mask_case("decode", "examples/paged_attention", lambda: decode_at(torch.tensor([40, 17])), mask_sizes=(BATCH, None),
          seqlen_q=1),
    mask_case("transfusion", "", transfusion, mask_sizes=(BATCH, None)),
    mask_case("prefix_by_batch", "", lambda: prefix_by_batch(torch.tensor([5, 40])), mask_sizes=(BATCH, None)),
    mask_case("documents_by_batch", "", documents_by_batch, mask_sizes=(BATCH, None)),
    mask_case("lengths_of_both", "", lengths_of_both, mask_sizes=(BATCH, None)),
    mask_case("window_by_head", "", lambda: window_by_head(torch.tensor([3, 9, 20, 64])), mask_sizes=(None, HEADS)),
    mask_case("window_in_place", "", lambda: window_in_place(7), f"({CAUSAL}) & (kv_idx >= q_idx - 6)"),
    mask_case("window_by_shift", "", lambda: window_by_shift(torch.tensor([1, 2, 3, 4])), mask_sizes=(None, HEADS),
          decline=DeclineReason.UNSUPPORTED_OP),
    mask_case("rounded_causal", "", lambda: rounded_causal, decline=DeclineReason.UNSUPPORTED_OP),
    mask_case("offset_number", "examples/ring_attention", lambda: causal_with_offset(32), seqlen_q=32),
    mask_case("offset_tensor", "", lambda: causal_with_offset(torch.tensor(32)), seqlen_q=32),
)  # fmt: skip
