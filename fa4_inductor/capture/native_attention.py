"""The fast paths of `nn.MultiheadAttention` and `nn.TransformerEncoderLayer`, in plain torch calls.

Semantics: aten/src/ATen/native/transformers (attention.cpp, transformer.cpp) of torch 2.11 to 2.13. A mask of any dtype
drops keys where it is not zero, and a row without any key is NaN. GELU is the exact one, as the modules define it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

_SRC_MASK, _KEY_PADDING, _FULL = 0, 1, 2


def multi_head_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    embed_dim: int,
    num_head: int,
    qkv_weight: torch.Tensor,
    qkv_bias: torch.Tensor,
    proj_weight: torch.Tensor,
    proj_bias: torch.Tensor,
    mask: torch.Tensor | None = None,
    need_weights: bool = True,
    average_attn_weights: bool = True,
    mask_type: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`torch._native_multi_head_attention`: query `(B, Sq, E)`, key and value `(B, Sk, E)`.

    Returns:
        (B, Sq, E), and the weights `(B, Sq, Sk)` or, not averaged, `(B, H, Sq, Sk)`; None unless needed.
    """
    weights = qkv_weight.chunk(3)
    biases = qkv_bias.chunk(3)
    if query is key and key is value:
        projected = F.linear(query, qkv_weight, qkv_bias).chunk(3, dim=-1)
    else:
        projected = tuple(F.linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases))
    head_dim = embed_dim // num_head
    q, k, v = (x.unflatten(-1, (num_head, head_dim)).transpose(1, 2) for x in projected)
    scores = torch.matmul(q * head_dim**-0.5, k.transpose(-2, -1))
    if mask is not None:
        scores = scores.masked_fill(_dropped(mask, mask_type), -float("inf"))
    p = F.softmax(scores, dim=-1)
    out = F.linear(torch.matmul(p, v).transpose(1, 2).flatten(2), proj_weight, proj_bias)
    if not need_weights:
        return out, None
    return out, p.mean(dim=1) if average_attn_weights else p


def _dropped(mask: torch.Tensor, mask_type: int | None) -> torch.Tensor:
    """True where a key is dropped; broadcasts to `(B, H, Sq, Sk)`."""
    dropped = mask if mask.dtype is torch.bool else mask.to(torch.bool)
    if mask_type not in (_SRC_MASK, _KEY_PADDING, _FULL) or mask.dim() != (4 if mask_type == _FULL else 2):
        raise ValueError(f"mask_type {mask_type} with a mask of rank {mask.dim()}")
    return dropped[:, None, None, :] if mask_type == _KEY_PADDING else dropped


def encoder_layer(
    src: torch.Tensor,
    embed_dim: int,
    num_heads: int,
    qkv_weight: torch.Tensor,
    qkv_bias: torch.Tensor,
    proj_weight: torch.Tensor,
    proj_bias: torch.Tensor,
    use_gelu: bool,
    norm_first: bool,
    eps: float,
    norm_weight_1: torch.Tensor,
    norm_bias_1: torch.Tensor,
    norm_weight_2: torch.Tensor,
    norm_bias_2: torch.Tensor,
    ffn_weight_1: torch.Tensor,
    ffn_bias_1: torch.Tensor,
    ffn_weight_2: torch.Tensor,
    ffn_bias_2: torch.Tensor,
    mask: torch.Tensor | None = None,
    mask_type: int | None = None,
) -> torch.Tensor:
    """`torch._transformer_encoder_layer_fwd`: src and result `(B, S, E)`."""
    attention = (embed_dim, num_heads, qkv_weight, qkv_bias, proj_weight, proj_bias, mask, False, True, mask_type)

    def normed(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, (embed_dim,), weight, bias, eps)

    x = normed(src, norm_weight_1, norm_bias_1) if norm_first else src
    x = multi_head_attention(x, x, x, *attention)[0] + src
    if not norm_first:
        x = normed(x, norm_weight_1, norm_bias_1)
    hidden = normed(x, norm_weight_2, norm_bias_2) if norm_first else x
    hidden = F.linear(hidden, ffn_weight_1, ffn_bias_1)
    hidden = F.gelu(hidden) if use_gelu else F.relu(hidden)
    x = x + F.linear(hidden, ffn_weight_2, ffn_bias_2)
    return x if norm_first else normed(x, norm_weight_2, norm_bias_2)
