"""Attention nobody has a name for, written in plain PyTorch and as a flex_attention score_mod: both become one kernel.

    python examples/custom_score_mod.py

The score is 8 * tanh(s / 8) with a per-head distance penalty; a query sees its own block of 64 positions and the first
4 keys. No pattern for this exists in fa4_inductor: the graph is read as a program over (score, b, h, q_idx, kv_idx).
"""

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import fa4_inductor


def plain(q: Tensor, k: Tensor, v: Tensor, slope: Tensor) -> Tensor:
    """The definition, (B, H, S, D): scores, penalty, mask, softmax, weighted sum."""
    seqlen, head_dim = q.shape[-2:]
    position = torch.arange(seqlen, device=q.device)
    distance = position[:, None] - position[None, :]
    score = q @ k.transpose(-1, -2) / head_dim**0.5
    score = 8 * torch.tanh(score / 8) - slope[:, None, None] * distance.abs()
    same_block = position[:, None] // 64 == position[None, :] // 64
    keep = (distance >= 0) & (same_block | (position[None, :] < 4))
    return torch.softmax(score.masked_fill(~keep, float("-inf")), dim=-1) @ v


def with_flex_attention(q: Tensor, k: Tensor, v: Tensor, slope: Tensor) -> Tensor:
    """The same through flex_attention."""

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return 8 * torch.tanh(score / 8) - slope[h] * (q_idx - kv_idx).abs()

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (kv_idx <= q_idx) & ((q_idx // 64 == kv_idx // 64) | (kv_idx < 4))

    seqlen = q.shape[-2]
    block_mask = create_block_mask(mask_mod, None, None, seqlen, seqlen, device=q.device)
    return flex_attention(q, k, v, score_mod=score_mod, block_mask=block_mask)


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, 256, 64, device=device, dtype=dtype) for _ in range(3))
    slope = torch.tensor([0.5, 0.25, 0.125, 0.0625], device=device)
    exact = plain(*(t.double() for t in (q, k, v, slope)))
    for function in (plain, with_flex_attention):
        print(f"== {function.__name__}")
        with torch.no_grad():
            print(fa4_inductor.explain(function, q, k, v, slope))
            torch._dynamo.reset()
            out = torch.compile(function, backend="fa4")(q, k, v, slope)
        print(f"largest error against float64: {(out.double() - exact).abs().max().item():.2e}")


if __name__ == "__main__":
    main()
