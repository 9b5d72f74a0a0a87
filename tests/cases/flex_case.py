"""One entry of the FlexAttention corpus: a mask_mod, a score_mod, how they are called, and what they must become.

The examples of the public attention-gym gallery (masks, mods, examples) are here, written anew, next to the ways of
calling flex_attention that its users depend on. `docs/flex_gallery.md` is generated from the corpus.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from fa4_inductor.errors import DeclineReason

BATCH, HEADS, SEQLEN, HEAD_DIM = 2, 4, 64, 16
CAUSAL = "kv_idx <= q_idx"
Mod = Callable[..., torch.Tensor]
Call = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Mod | None, BlockMask | None], Any]


def call_flex(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, score_mod: Mod | None, block_mask: BlockMask | None
) -> torch.Tensor:
    return flex_attention(q, k, v, score_mod, block_mask, enable_gqa=q.shape[1] != k.shape[1])


@dataclass(frozen=True)
class FlexCase:
    """One example.

    Attributes:
        origin: where the gallery has it ("masks/natten"), or "" for a case of our own.
        mask, score_mod: make the mods; what they capture is drawn from `torch.manual_seed(3)`.
        program: expected text from "scale=" on; None where it is too long to be worth spelling out.
        decline: the reason the call must be left alone for; None when it must fuse.
        call: how flex_attention is called, given the mods.
        block_mask: makes the BlockMask where it is not `create_block_mask(mask, ...)`.
        mask_sizes: batch and heads of the BlockMask.
    """

    name: str
    origin: str = ""
    mask: Callable[[], Mod] | None = None
    score_mod: Callable[[], Mod] | None = None
    program: str | None = None
    aux: str = ""
    decline: DeclineReason | None = None
    call: Call = call_flex
    block_mask: Callable[[], BlockMask] | None = None
    mask_sizes: tuple[int | None, int | None] = (None, None)
    block_size: int | tuple[int, int] = 128
    batch: int = BATCH
    kv_batch: int | None = None
    heads: int = HEADS
    kv_heads: int = HEADS
    seqlen_q: int = SEQLEN
    seqlen_k: int = SEQLEN
    head_dim: int = HEAD_DIM
    sites: int = 1

    @property
    def text(self) -> str:
        return f"fa4/1; aux={self.aux}; sizes=0; {self.program}"

    def inputs(self) -> tuple[Any, ...]:
        """q, k, v (float32), the score_mod and the BlockMask."""
        generator = torch.Generator().manual_seed(5)
        kv = (self.kv_batch or self.batch, self.kv_heads, self.seqlen_k, self.head_dim)
        shapes = ((self.batch, self.heads, self.seqlen_q, self.head_dim), kv, kv)
        q, k, v = (torch.randn(shape, generator=generator) for shape in shapes)
        torch.manual_seed(3)
        return q, k, v, self.score_mod() if self.score_mod else None, self.make_block_mask()

    def make_block_mask(self) -> BlockMask | None:
        if self.block_mask is not None:
            return self.block_mask()
        if self.mask is None:
            return None
        sizes = (*self.mask_sizes, self.seqlen_q, self.seqlen_k)
        return create_block_mask(self.mask(), *sizes, device="cpu", BLOCK_SIZE=self.block_size)


def mask_case(
    name: str, origin: str, mask: Callable[[], Mod], keep: str | None = None, aux: str = "", **more: Any
) -> FlexCase:
    """A mask_mod on plain scores, and the text of its program's `keep`."""
    program = None if keep is None else f"scale=0.25; score=score; keep={keep}; empty_row=zero"
    return FlexCase(name, origin, mask=mask, program=program, aux=aux, **more)
