"""Magnitudes that break attention kernels, on every fixture program: error at most twice that of same-dtype PyTorch.

Key tiles are visited from the last to the first, so a shift fixed at the first tile visited meets scores that rise
towards the first key.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import fwd_cases as cases
import pytest
import torch

PROGRAMS = (
    "plain", "causal", "window", "softcap_causal", "alibi_causal", "padding", "padding_causal", "document_causal",
    "distance_table", "t5_table", "sink_window", "dense_mask", "tma_bias", "tma_mask",
)  # fmt: skip
LENGTH, NATS = 640, 200.0


def jobs() -> list[tuple[Any, ...]]:
    """The kernels of these tests, to be built ahead (prebuilt.export_all)."""
    return [(name, dtype, 64, 64, 1, True, ()) for name in PROGRAMS for dtype in _dtypes(name)]


def _dtypes(name: str) -> tuple[str, ...]:
    return ("bfloat16", "float16") if name in ("plain", "causal", "tma_bias") else ("bfloat16",)


@functools.cache
def kernel(name: str, dtype: str) -> Any:
    import prebuilt

    return prebuilt.forward(name, dtype, 64, 64, 1, True, prebuilt.resolve_config(name, 64, 64, {}))


def inputs(name: str, dtype: str) -> cases.Inputs:
    q, k, v = (torch.randn(2, 2, LENGTH, 64, device="cuda").to(cases.DTYPES[dtype]) for _ in range(3))
    aux = cases.make_aux(name, random.Random(1), 2, 2, LENGTH, LENGTH)
    return cases.Inputs(q, k, v, 0.125, aux, (200,) if "window" in name else ())


def _add_scores(x: cases.Inputs, per_key: torch.Tensor) -> None:
    """Adds `per_key` nats to the scores of all rows with each key, as well as the dtype can."""
    x.q[..., 0] = 16.0
    x.k[..., 0] = (per_key / (16.0 * x.scale)).to(x.k.dtype)


def near_sixty(x: cases.Inputs) -> None:
    largest = (x.q.float() @ x.k.float().mT).abs().amax() * x.scale
    x.q.mul_(60.0 / largest)


def rising(x: cases.Inputs) -> None:
    _add_scores(x, torch.linspace(NATS, 0.0, LENGTH, device="cuda"))


def falling(x: cases.Inputs) -> None:
    _add_scores(x, torch.linspace(0.0, NATS, LENGTH, device="cuda"))


def rising_slowly(x: cases.Inputs) -> None:
    """Each tile a little above the one before, within what a fixed shift bears."""
    _add_scores(x, torch.linspace(60.0, 0.0, LENGTH, device="cuda"))


def last_visited_far_above(x: cases.Inputs) -> None:
    _add_scores(x, torch.where(torch.arange(LENGTH, device="cuda") < 5, NATS, 0.0))


def first_visited_far_above(x: cases.Inputs) -> None:
    _add_scores(x, torch.where(torch.arange(LENGTH, device="cuda") >= LENGTH - 5, NATS, 0.0))


def far_below(x: cases.Inputs) -> None:
    _add_scores(x, torch.where(torch.arange(LENGTH, device="cuda") % 3 == 0, 0.0, -NATS))


def an_outlier_per_row(x: cases.Inputs) -> None:
    """One key of each row, another one each time, far above all others."""
    partner = torch.randperm(LENGTH, device="cuda")
    direction = x.q.float() / x.q.float().square().sum(-1, keepdim=True)
    x.k[:, :, partner] = (x.k[:, :, partner].float() + direction * 300.0 / x.scale).to(x.k.dtype)


PATTERNS = (
    near_sixty, rising, falling, rising_slowly, last_visited_far_above, first_visited_far_above, far_below,
    an_outlier_per_row,
)  # fmt: skip


@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda f: f.__name__)
@pytest.mark.parametrize(("name", "dtype"), [(n, d) for n in PROGRAMS for d in _dtypes(n)])
def test_error(name: str, dtype: str, pattern: Callable[[cases.Inputs], None]) -> None:
    torch.manual_seed(0)
    x = inputs(name, dtype)
    pattern(x)
    out, lse, guard = cases.launch(kernel(name, dtype), cases.load_program(name), x, True)
    assert cases.check(name, x, out, lse, guard) == ""


@pytest.mark.parametrize("share", [0.1, 0.5, 0.98])
@pytest.mark.parametrize("fill", [-1e30, -3e38])
def test_fills_among_biases(fill: float, share: float) -> None:
    torch.manual_seed(0)
    x = inputs("tma_bias", "bfloat16")
    bias = torch.randn(2, LENGTH, LENGTH, device="cuda")
    bias = bias.masked_fill(torch.rand_like(bias) < share, fill)
    bias[:, :, 3] = 0.0  # no row of nothing but fills, whose LSE has no exact value
    x.aux = (bias.to(torch.bfloat16),)
    out, lse, guard = cases.launch(kernel("tma_bias", "bfloat16"), cases.load_program("tma_bias"), x, True)
    assert cases.check("tma_bias", x, out, lse, guard) == ""


@pytest.mark.parametrize("pattern", [near_sixty, rising], ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", ["plain", "causal", "softcap_causal", "tma_bias", "document_causal"])
def test_same_bits_beside_other_work(name: str, pattern: Callable[[cases.Inputs], None]) -> None:
    """The order of the CTAs in time is another one when the GPU is busy; the result is not."""
    torch.manual_seed(0)
    x, busy = inputs(name, "bfloat16"), torch.cuda.Stream()
    pattern(x)
    compiled, program = kernel(name, "bfloat16"), cases.load_program(name)
    first, first_lse, _ = cases.launch(compiled, program, x, True)
    assert first_lse is not None
    noise = torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16)
    for size in (128, 512, 2048, 2048):
        with torch.cuda.stream(busy):
            for _ in range(20):
                noise[:size] @ noise
        again, lse, _ = cases.launch(compiled, program, x, True)
        assert lse is not None and torch.equal(again.nan_to_num(7.0), first.nan_to_num(7.0))
        assert torch.equal(lse, first_lse)
