"""Which attention probabilities dropout keeps, in torch integer operations: Philox 4x32 (Salmon et al., SC'11).

`kernels/cute/dropout.py` computes the same bits on the device. An element's number depends on its indices (b, h, q, kv)
and the words of the call only, so that every tile shape, and the backward, finds the same mask.

One evaluation gives four words, for the elements (q, kv), (q, kv + 8), (q + 8, kv), (q + 8, kv + 8): in an accumulator
of wgmma these belong to one thread, whether its rows are queries (forward) or keys (backward).
"""

from __future__ import annotations

import torch

from fa4_inductor.spec.attention import DROPOUT_WORDS

ROUNDS = 7
"""The fewest that pass BigCrush (Table 2 of the paper)."""
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = 0xFFFFFFFF
Words = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def philox(counter: Words, key: tuple[torch.Tensor, torch.Tensor], rounds: int = ROUNDS) -> Words:
    """Four words of random bits. All int64 with values in [0, 2**32); shapes broadcast."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        (high0, low0), (high1, low1) = _product(c0, MULTIPLIERS[0]), _product(c2, MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + WEYL[0]) & _LOW, (k1 + WEYL[1]) & _LOW
    return c0, c1, c2, c3


def _product(a: torch.Tensor, factor: int) -> tuple[torch.Tensor, torch.Tensor]:
    """High and low word of a product that int64 has no room for: in halves of the factor."""
    low = a * (factor & 0xFFFF)
    high = a * (factor >> 16) + (low >> 16)
    return high >> 16, ((high & 0xFFFF) << 16) | (low & 0xFFFF)


def threshold(p: float) -> int:
    """Words below this drop their element."""
    return round(p * 2**32)


def kept(
    words: torch.Tensor, p: float, heads: int, b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor
) -> torch.Tensor:
    """bool, True where the probability of (b, h, q, kv) is kept; the indices broadcast.

    Args:
        words: `DROPOUT_WORDS` integers from [0, 2**32), of one call of one site. heads: all query heads.
    """
    assert words.numel() == DROPOUT_WORDS, "dropout takes its key and its call from the captured words"
    key0, key1, call = (words[i].long() & _LOW for i in range(DROPOUT_WORDS))
    q, kv = q.long(), kv.long()
    bits = philox((_group(q), _group(kv), b.long() * heads + h.long(), call), (key0, key1))
    of_key = [torch.where((kv & 8) != 0, bits[i + 1], bits[i]) for i in (0, 2)]
    return torch.where((q & 8) != 0, of_key[1], of_key[0]) >= threshold(p)


def _group(index: torch.Tensor) -> torch.Tensor:
    """The number that `index` and `index + 8` of a block of 16 share."""
    return (index >> 4) * 8 + (index & 7)
