"""Ways of calling flex_attention: how the mask is made, GQA, lengths, block sizes, options, statistics of the rows."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, create_mask, flex_attention

from fa4_inductor.errors import DeclineReason
from tests.cases.flex_case import CAUSAL, HEADS, SEQLEN, FlexCase
from tests.cases.flex_grids import TILE
from tests.cases.flex_masks import causal, document_ids, documents, noop_mask, sliding_window
from tests.cases.flex_scores import alibi_slopes, softcap

_DOCUMENT = document_ids()


def document_mask(b, h, q_idx, kv_idx):
    return (_DOCUMENT[q_idx] == _DOCUMENT[kv_idx]) & (q_idx >= kv_idx)


def with_options(**options: Any):
    return lambda q, k, v, score_mod, block_mask: flex_attention(q, k, v, score_mod, block_mask, **options)


def mask_made_inside(q, k, v, score_mod, _):
    block_mask = create_block_mask(document_mask, None, None, q.shape[2], k.shape[2], device=q.device, BLOCK_SIZE=32)
    return flex_attention(q, k, v, score_mod, block_mask)


def mask_compiled_inside(q, k, v, score_mod, _):
    block_mask = create_block_mask(causal, None, None, q.shape[2], k.shape[2], device=q.device, _compile=True)
    return flex_attention(q, k, v, score_mod, block_mask)


def two_layers(q, k, v, score_mod, block_mask):
    out = flex_attention(q, k, v, score_mod, block_mask)
    return flex_attention(out, k.sin(), v.cos(), score_mod, block_mask)


def written_between(q, k, v, _, block_mask):
    """Two equal calls read a captured tensor before and after it is written."""
    bias = k.mean(-1)

    def score_mod(score, b, h, q_idx, kv_idx):
        return score + bias[b, h, kv_idx]

    out = flex_attention(q, k, v, score_mod, block_mask)
    bias.add_(torch.arange(SEQLEN) * 0.1)
    return out + flex_attention(q, k, v, score_mod, block_mask)


def transposed_inputs(q, k, v, score_mod, block_mask):
    q, k, v = (t.transpose(1, 2).contiguous().sin().transpose(1, 2) for t in (q, k, v))
    return flex_attention(q, k, v, score_mod, block_mask)


def nested_mods(q, k, v, _, block_mask):
    scale, cap = 0.5, torch.tensor(12.0)

    def outer(strength: float):
        return lambda score, b, h, q_idx, kv_idx: inner(score * strength)

    def inner(score):
        return cap * torch.tanh(score / cap) * scale

    return flex_attention(q, k, v, outer(1.5), block_mask)


def mods_of_inputs(q, k, v, _, block_mask):
    """The captured tensor is computed in the compiled function."""
    bias = q.mean(-1)
    return flex_attention(q, k, v, lambda s, b, h, q_idx, kv_idx: s + bias[b, h, kv_idx], block_mask)


def for_sdpa(q, k, v, _, __):
    """A mask_mod as the dense mask of SDPA."""
    mask = create_mask(sliding_window(9), None, None, q.shape[2], k.shape[2], device=q.device)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def with_lse(q, k, v, score_mod, block_mask):
    out, aux = flex_attention(q, k, v, score_mod, block_mask, return_aux=AuxRequest(lse=True))
    return out, aux.lse


def with_old_lse(q, k, v, score_mod, block_mask):
    return flex_attention(q, k, v, score_mod, block_mask, return_lse=True)


def with_unused_lse(q, k, v, score_mod, block_mask):
    return flex_attention(q, k, v, score_mod, block_mask, return_lse=True)[0]


def activation_without_softmax(q, k, v, _, __):
    """sigmoid(S) @ V: the softmax is undone by its log-sum-exp."""
    out, aux = flex_attention(
        q, k, v, lambda s, b, h, i, j: torch.log(torch.sigmoid(s) + 1.0), return_aux=AuxRequest(lse=True)
    )
    return out * aux.lse.exp().unsqueeze(-1) - v.sum(-2, keepdim=True)


def merged_halves(q, k, v, _, __):
    """Two attentions over halves of the keys, merged by their log-sum-exps (ring attention, shared prefixes)."""
    parts = []
    for half in (slice(None, 32), slice(32, None)):
        out, aux = flex_attention(q, k[:, :, half], v[:, :, half], return_aux=AuxRequest(lse=True))
        parts.append((out, aux.lse))
    lse = torch.logaddexp(parts[0][1], parts[1][1])
    return sum(out * torch.exp(part - lse).unsqueeze(-1) for out, part in parts)


def causal_lists(separate_full_blocks: bool) -> BlockMask:
    """The causal BlockMask written down without evaluating the mask."""
    size, n = TILE, SEQLEN // TILE
    row = torch.arange(n, dtype=torch.int32)
    columns = torch.arange(n, dtype=torch.int32).expand(1, 1, n, n)
    if not separate_full_blocks:
        return BlockMask.from_kv_blocks((row + 1)[None, None], columns.contiguous(), None, None, size, causal)
    partial = torch.zeros(1, 1, n, n, dtype=torch.int32)
    partial[0, 0, :, 0] = row
    ones = torch.ones(1, 1, n, dtype=torch.int32)
    return BlockMask.from_kv_blocks(ones, partial, row[None, None], columns.contiguous(), size, causal)


def lists_of_tiles(count: int = 2, mask_mod=noop_mask) -> BlockMask:
    """Video sparse attention with the selection in the block lists alone."""
    n = SEQLEN // TILE
    order = torch.rand(1, HEADS, n, n).argsort().to(torch.int32)
    counts = torch.full((1, HEADS, n), count, dtype=torch.int32)
    return BlockMask.from_kv_blocks(counts, order, BLOCK_SIZE=TILE, mask_mod=mask_mod)


def padding_of_tiles(b, h, q_idx, kv_idx):
    return kv_idx % TILE < 12


def lists_made_inside(q, k, v, _, __):
    """The tiles are selected in the compiled function, from coarse scores."""
    coarse = q.unflatten(2, (-1, TILE)).mean(3) @ k.unflatten(2, (-1, TILE)).mean(3).mT
    chosen = coarse.topk(2).indices.to(torch.int32)
    count = torch.full(chosen.shape[:3], 2, dtype=torch.int32, device=q.device)
    empty = torch.zeros_like(count), torch.zeros_like(coarse, dtype=torch.int32)
    width = coarse.shape[-1] - chosen.shape[-1]
    lists = F.pad(chosen, (0, width))
    block_mask = BlockMask.from_kv_blocks(count, lists, *empty, TILE, padding_of_tiles)
    return flex_attention(q, k, v, block_mask=block_mask)


def _case(name, call, keep=None, score="scale=0.25; score=score", aux="", **more):
    program = None if keep is None else f"{score}; keep={keep}; empty_row=zero"
    return FlexCase(name, call=call, program=program, aux=aux, **more)


LISTS = DeclineReason.UNSUPPORTED_PROGRAM
CASES = (
    _case("no_mask", with_options(), "True"),
    _case("scale", with_options(scale=0.7), CAUSAL, "scale=0.7; score=score", mask=lambda: causal),
    _case("kernel_options", with_options(kernel_options={"BLOCK_M": 32}), CAUSAL, mask=lambda: causal),
    _case("gqa", with_options(enable_gqa=True), CAUSAL, mask=lambda: causal, kv_heads=2),
    _case("mqa", with_options(enable_gqa=True), None, mask=lambda: causal, score_mod=alibi_slopes, kv_heads=1),
    _case("small_blocks", with_options(), CAUSAL, mask=lambda: causal, block_size=16),
    _case("rectangular_blocks", with_options(), CAUSAL, mask=lambda: causal, block_size=(16, 32)),
    _case("fewer_queries", with_options(), CAUSAL, mask=lambda: causal, seqlen_q=24, block_size=16),
    _case("more_queries", with_options(), CAUSAL, mask=lambda: causal, seqlen_k=40, block_size=16),
    _case("odd_lengths", with_options(), CAUSAL, mask=lambda: causal, seqlen_q=37, seqlen_k=51, block_size=16),
    _case("one_sequence", with_options(), CAUSAL, mask=lambda: causal, batch=1),
    _case("shared_keys", with_options(), CAUSAL, mask=lambda: causal, kv_batch=1, mask_sizes=(2, None)),
    _case("mask_made_inside", mask_made_inside, f"({CAUSAL}) & (aux0[q_idx] == aux0[kv_idx])", aux="int32[1]"),
    _case("mask_compiled_inside", mask_compiled_inside, CAUSAL),
    _case("two_layers", two_layers, mask=lambda: documents(causal), score_mod=lambda: softcap(20), sites=2),
    _case("transposed_inputs", transposed_inputs, CAUSAL, mask=lambda: causal),
    _case("written_between", written_between, CAUSAL, "scale=0.25; score=score + aux0[b, h, kv_idx]", "float32[3]",
          mask=lambda: causal, sites=2),
    _case("nested_mods", nested_mods, mask=lambda: causal),
    _case("mods_of_inputs", mods_of_inputs, CAUSAL, "scale=0.25; score=score + aux0[b, h, kv_idx]", "float32[3]",
          mask=lambda: causal),
    _case("create_mask_for_sdpa", for_sdpa, f"({CAUSAL}) & (kv_idx >= q_idx - 9)"),
    _case("unused_lse", with_unused_lse, CAUSAL, mask=lambda: causal),
    _case("lse", with_lse, CAUSAL, mask=lambda: causal),
    _case("old_lse", with_old_lse, CAUSAL, mask=lambda: causal),
    _case("activation_without_softmax", activation_without_softmax, origin="mods/activation"),
    _case("merged_halves", merged_halves, origin="examples/ring_attention", sites=2),
    _case("causal_lists", with_options(), CAUSAL, origin="masks/causal", block_mask=lambda: causal_lists(True)),
    _case("causal_partial_lists", with_options(), origin="masks/causal", block_mask=lambda: causal_lists(False),
          decline=LISTS),
    _case("lists_of_tiles", with_options(), origin="masks/vsa", block_mask=lists_of_tiles, decline=LISTS),
    _case("lists_of_padded_tiles", with_options(), origin="masks/vsa", decline=LISTS,
          block_mask=lambda: lists_of_tiles(mask_mod=padding_of_tiles)),
    _case("lists_made_inside", lists_made_inside, origin="masks/vsa", decline=LISTS),
)  # fmt: skip
