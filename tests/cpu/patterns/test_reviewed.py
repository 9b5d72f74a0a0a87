"""Graphs that were once fused into something else than they say, or refused for no good reason."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from tests.models.helpers import counters, fused

Function = Callable[..., torch.Tensor]


def _attend(scores: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return scores.softmax(-1) @ v


def _elsewhere(mix: Callable[[torch.Tensor], torch.Tensor], rows: slice = slice(None)) -> Function:
    return lambda q, k, v: _attend(mix(q @ k.mT), v[rows])


# The same product of q and k, read at two positions: one program variable cannot stand for both.
ELSEWHERE = {
    "transposed": _elsewhere(lambda s: s + s.mT),
    "times_transposed": _elsewhere(lambda s: s * s.mT),
    "rows": _elsewhere(lambda s: s[:, :, 1:] + s[:, :, :-1]),
    "batch": _elsewhere(lambda s: s[1:] + s[:-1], slice(1, None)),
    "first_batch": _elsewhere(lambda s: s + s[:1]),
}


def _written(write: Callable[[torch.Tensor], object]) -> Function:
    def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        k = k - 0.5
        scores = q @ k.mT
        write(k)
        return _attend(scores, v) + k.sum()

    return function


# k is written between the scores and the site, in ways that do not look like it.
WRITTEN = {
    "relu": _written(lambda k: F.relu(k, True)),
    "elu": _written(lambda k: F.elu(k, 1.0, True)),
    "foreach": _written(lambda k: torch._foreach_mul_([torch.ones(2), k], 2.0)),
    "as_strided": _written(lambda k: k.as_strided((10,), (1,)).fill_(3.0)),
    "unfold": _written(lambda k: k.unfold(2, 2, 2).mul_(3.0)),
    "data": _written(lambda k: k.data.mul_(3.0)),
    # once an endless loop: a product ends the slice, and one that writes was put back into it
    "product_out": _written(lambda k: torch.bmm(torch.ones(8, 8, 8), torch.ones(8, 8, 16), out=k.view(8, 8, 16))),
}


def _qkv(seed: int = 0) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(seed)
    return tuple(torch.randn(2, 4, 8, 16) for _ in range(3))


def _declines(function: Function, *args: torch.Tensor, reason: str) -> None:
    with torch.no_grad():
        expected = function(*(a.clone() for a in args))
        result = fused(function, implementation="reference").model(*args)
    torch.testing.assert_close(result, expected, equal_nan=True)
    assert counters()["fused"] == 0
    assert counters()[f"declined.{reason}"] == 1, counters()


@pytest.mark.parametrize("name", ELSEWHERE)
def test_scores_of_other_positions_decline(name: str) -> None:
    _declines(ELSEWHERE[name], *_qkv(), reason="unsupported_op")


@pytest.mark.parametrize("name", WRITTEN)
def test_a_write_that_hides_declines(name: str) -> None:
    _declines(WRITTEN[name], *_qkv(), reason="mutation")


def test_a_bias_read_through_an_opaque_view_before_it_is_written_declines() -> None:
    def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        doubled = bias.as_strided((8, 8), (1, 8)) * 2
        bias.add_(1)
        return _attend(q @ k.mT + doubled, v)

    _declines(function, *_qkv(), torch.randn(8, 8), reason="mutation")


def _fuses(function: Function, *args: torch.Tensor) -> None:
    with torch.no_grad():
        expected = function(*args)
        result = fused(function, implementation="reference").model(*args)
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4, equal_nan=True)
    assert counters()["fused"] == 1


def test_a_fill_that_overflows_is_minus_infinity() -> None:
    """Rows that keep nothing are NaN in eager then, not the mean of V."""
    keep = torch.rand(8, 8) > 0.5
    keep[3] = False
    _fuses(lambda q, k, v, keep: _attend(torch.where(keep, q @ k.mT, -1e38) * 4, v), *_qkv(), keep)
    both = keep & keep.mT
    function = lambda q, k, v, keep: _attend(torch.where(keep, q @ k.mT, -1e38).masked_fill(~both, -torch.inf) * 4, v)
    _fuses(function, *_qkv(), keep)


def test_a_threshold_on_the_score_belongs_to_the_score() -> None:
    """`keep` knows positions only."""

    def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        scores = q @ k.mT
        return _attend(scores.masked_fill(scores < 0, -torch.inf), v)

    _fuses(function, *_qkv())


@pytest.mark.parametrize("attention", [lambda q, k, v: _attend(q @ k.mT, v), F.scaled_dot_product_attention])
def test_attention_inside_vmap_declines_with_its_reason(attention: Function) -> None:
    _declines(torch.func.vmap(attention), *_qkv(), reason="unsupported_op")


def test_fp16_fills_of_sdpa_keep_the_scores_of_a_row_of_fills() -> None:
    """SDPA adds the mask in float32, in which score - 65504 still knows the score."""
    keep = torch.rand(8, 8) > 0.5
    keep[3] = False

    def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        mask = torch.zeros(8, 8, dtype=q.dtype).masked_fill(~keep, torch.finfo(q.dtype).min)
        return F.scaled_dot_product_attention(q, k, v, mask)

    args = (*(3 * x.half() for x in _qkv()), keep)
    with torch.no_grad():
        expected = function(*args)
        result = fused(function, implementation="reference").model(*args)
    torch.testing.assert_close(result, expected, rtol=2e-2, atol=2e-2)
    assert counters()["fused"] == 1
