"""Dropout of attention probabilities on the device: the bits of `kernels.philox`, for the elements one thread has."""

import cutlass
from cutlass import Boolean, Int32, Uint32, Uint64

ROUNDS = 7  # these three as in kernels.philox, whose module explains them
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)


def group(index: Int32) -> Uint32:
    """The number that `index` and `index + 8` of a block of 16 share."""
    return Uint32((index >> 4) * 8 + (index & 7))


def philox(counter: tuple, key: tuple) -> tuple[Uint32, Uint32, Uint32, Uint32]:
    """Four words of random bits. The words of the key are the same in all threads."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        product0 = Uint64(c0) * Uint64(MULTIPLIERS[0])
        product1 = Uint64(c2) * Uint64(MULTIPLIERS[1])
        c0, c1 = Uint32(product1 >> 32) ^ c1 ^ k0, Uint32(product1)
        c2, c3 = Uint32(product0 >> 32) ^ c3 ^ k1, Uint32(product0)
        k0, k1 = k0 + Uint32(WEYL[0]), k1 + Uint32(WEYL[1])
    return c0, c1, c2, c3


def kept(words: tuple, p: cutlass.Constexpr, row: Int32, q: Int32, kv: Int32) -> tuple[Boolean, ...]:
    """Whether (q, kv), (q, kv + 8), (q + 8, kv), (q + 8, kv + 8) are kept, for q and kv with bit 3 clear.

    Args:
        words: key and call, three Uint32. row: b * heads + h.
    """
    if p == 1.0:
        return (Boolean(False),) * 4
    key0, key1, call = words
    bits = philox((group(q), group(kv), Uint32(row), call), (key0, key1))
    return tuple(word >= Uint32(round(p * 2**32)) for word in bits)
