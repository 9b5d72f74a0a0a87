"""flex_attention with user lambdas and captured tensors, and the calls that must be left alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from fa4_inductor.errors import DeclineReason
from tests.cases.oracle import checked

SEQLEN = 64
CAUSAL = "kv_idx <= q_idx"
slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625])
table = torch.randn(4, 2 * SEQLEN - 1, generator=torch.Generator().manual_seed(3))
document = torch.arange(SEQLEN) // 20
prefix_length = torch.tensor([5, 40])

SCORE_MODS: dict[str, tuple[Callable[..., Any] | None, str, str]] = {
    "none": (None, "scale=0.25; score=score", ""),
    "alibi": (
        lambda s, b, h, q, k: s + slopes[h] * (k - q),
        "scale=0.25; score=score + aux{0}[h] * float(kv_idx - q_idx)",
        "float32[1]",
    ),
    "softcap": (lambda s, b, h, q, k: 20 * torch.tanh(s / 20), "scale=0.0125; score=tanh(score) * 20.0", ""),
    "relative": (
        lambda s, b, h, q, k: s + table[h, q - k + SEQLEN - 1],
        "scale=0.25; score=score + aux{0}[h, q_idx - kv_idx + 63]",
        "float32[2]",
    ),
}
MASK_MODS: dict[str, tuple[Callable[..., Any] | None, str, str]] = {
    "full": (None, "True", ""),
    "causal": (lambda b, h, q, k: q >= k, CAUSAL, ""),
    "window": (lambda b, h, q, k: (q >= k) & (q - k < 7), f"({CAUSAL}) & (kv_idx >= q_idx - 6)", ""),
    "document": (
        lambda b, h, q, k: (q >= k) & (document[q] == document[k]),
        f"({CAUSAL}) & (aux0[q_idx] == aux0[kv_idx])",
        "int64[1]",
    ),
    "prefix": (
        lambda b, h, q, k: (q >= k) | (k < prefix_length[b]),
        f"({CAUSAL}) | (kv_idx <= aux0[b] - 1)",
        "int64[1]",
    ),
}


def _qkv() -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(5)
    return tuple(torch.randn(2, heads, SEQLEN, 16, generator=generator) for heads in (4, 2, 2))


def _block_mask(mask_mod: Callable[..., Any] | None) -> BlockMask | None:
    return None if mask_mod is None else create_block_mask(mask_mod, 2, None, SEQLEN, SEQLEN, device="cpu")


@pytest.mark.parametrize("mask", MASK_MODS)
@pytest.mark.parametrize("score", SCORE_MODS)
def test_mods(score: str, mask: str) -> None:
    score_mod, score_text, score_aux = SCORE_MODS[score]
    mask_mod, keep_text, mask_aux = MASK_MODS[mask]
    function, report = checked(lambda q, k, v, m: flex_attention(q, k, v, score_mod, m, enable_gqa=True))
    with torch.no_grad():
        function(*_qkv(), _block_mask(mask_mod))
    aux = ",".join(a for a in (mask_aux, score_aux) if a)
    score_text = score_text.replace("{0}", "1" if mask_aux else "0")
    expected = f"fa4/1; aux={aux}; sizes=0; {score_text}; keep={keep_text}; empty_row=zero"
    assert report.programs == [expected], report.sites
    assert report.error < 1e-5


@pytest.mark.parametrize("mask", ["causal", "document"])
def test_block_mask_made_inside_and_dynamic_shapes(mask: str) -> None:
    mask_mod = MASK_MODS[mask][0]
    for dynamic in (False, True):
        torch._dynamo.reset()
        function, report = checked(
            lambda q, k, v: flex_attention(q, k, v, block_mask=_block_mask(mask_mod), enable_gqa=True),
            dynamic=dynamic,
        )
        with torch.no_grad():
            function(*_qkv())
        assert len(report.matches) == 1, report.sites
        assert report.error < 1e-5


def test_a_fresh_mask_for_every_length() -> None:
    """Masks made outside by the same code share two graphs: of the first length, and of all others."""
    function, report = checked(lambda q, k, v, m: flex_attention(q, k, v, block_mask=m, enable_gqa=True), dynamic=None)
    for batch, seqlen in ((2, 64), (3, 48), (4, 80), (2, 33)):
        q, k, v = (torch.randn(batch, heads, seqlen, 16) for heads in (4, 2, 2))
        block_mask = create_block_mask(MASK_MODS["window"][0], None, None, seqlen, seqlen, device="cpu", BLOCK_SIZE=16)
        with torch.no_grad():
            function(q, k, v, block_mask)
    assert len(report.sites) == len(report.matches) <= 2, report.sites
    assert len(report.errors) == 4 and report.error < 1e-5


def test_minus_infinity_in_the_score_is_a_mask() -> None:
    function, report = checked(
        lambda q, k, v: flex_attention(
            q, k, v, lambda s, b, h, i, j: torch.where(i >= j, s, -float("inf")), scale=0.5, enable_gqa=True
        )
    )
    with torch.no_grad():
        function(*_qkv())
    assert report.programs == [f"fa4/1; aux=; sizes=0; scale=0.5; score=score; keep={CAUSAL}; empty_row=zero"]
    assert report.error < 1e-5


@pytest.mark.parametrize(("fill", "is_mask"), [(-65504.0, False), (torch.finfo(torch.float32).min, True)])
def test_finite_fills_of_half_inputs(fill: float, is_mask: bool) -> None:
    """Scores are float32 whatever q and k are: the least number of float16 is a bias there, as scores may be lower."""
    function, report = checked(
        lambda q, k, v: flex_attention(q, k, v, lambda s, b, h, i, j: torch.where(i >= j, s, fill), enable_gqa=True)
    )
    with torch.no_grad():
        function(*(20.0 * t.half() for t in _qkv()))
    (program,) = report.programs
    assert ("keep=True" in program) is not is_mask
    assert report.error < 0.1


def test_sparsity_in_the_block_lists_alone_declines() -> None:
    """BC-12: the mask function keeps everything, the lists drop half of the blocks."""
    counts = torch.ones(1, 1, 4, dtype=torch.int32)
    indices = torch.zeros(1, 1, 4, 4, dtype=torch.int32)
    block_mask = BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=16)
    function, report = checked(lambda q, k, v, m: flex_attention(q, k, v, block_mask=m, enable_gqa=True))
    with torch.no_grad():
        function(*_qkv(), block_mask)
    assert [d.reason for d in report.declined] == [DeclineReason.UNSUPPORTED_PROGRAM]


def test_autocast_casts_the_operands() -> None:
    function, report = checked(lambda q, k, v, m: flex_attention(q, k, v, block_mask=m, enable_gqa=True))
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        out = function(*_qkv(), _block_mask(MASK_MODS["causal"][0]))
    (match,) = report.matches
    casts = [operand.view[-1:] for operand in (match.q, match.k, match.v)]
    assert casts == [(("to", torch.bfloat16),)] * 3
    assert out.dtype is match.out_dtype is torch.bfloat16
    assert report.error < 0.02
