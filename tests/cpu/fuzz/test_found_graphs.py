"""Graphs that the generator found fused into something else than they say, or that raised inside; the smallest of each
kind."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from tests.models.helpers import counters, fused

Tensor = torch.Tensor
LOW = torch.finfo(torch.float32).min
KEEP = torch.tensor([[True, True, False], [False, False, False], [True, False, True]])


def _qkv(keys: int = 3) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    return torch.randn(2, 2, 3, 4), torch.randn(2, 2, keys, 4), torch.randn(2, 2, keys, 4)


def _outcome(function: Callable[..., Tensor], *args: Tensor) -> str:
    """ "fused" or the reason, after comparing with eager."""
    with torch.no_grad():
        expected = function(*(a.clone() for a in args))
        result = fused(function, implementation="reference").model(*args)
    tolerance = 1e-4 if expected.dtype is torch.float32 else 2e-2
    torch.testing.assert_close(result, expected, rtol=tolerance, atol=tolerance, equal_nan=True)
    if counters()["fused"]:
        return "fused"
    (reason,) = [name.removeprefix("declined.") for name in counters() if name.startswith("declined.")]
    return reason


def _bare(s: Tensor) -> Tensor:
    return s.exp() / s.exp().sum(-1, keepdim=True)


def _shifted(s: Tensor) -> Tensor:
    return _bare(s - s.amax(-1, keepdim=True))


def _shifted_then_scaled(s: Tensor) -> Tensor:
    """Subtracted first, a finite fill does not overflow by the factor."""
    return _bare((s - s.amax(-1, keepdim=True)) * 2)


def _by_logsumexp(s: Tensor) -> Tensor:
    return (s - s.logsumexp(-1, keepdim=True)).exp()


def _softmax_plus_one(s: Tensor) -> Tensor:
    top = s.amax(-1, keepdim=True)
    e = (s - top).exp()
    return e / ((-top).exp() + e.sum(-1, keepdim=True))


# A row of low fills: 0 / 0 without a subtracted maximum, 1 for every key by logsumexp, NaN where the maximum is -inf.
FILLED = [
    (_shifted, LOW, "fused"), (_shifted, -torch.inf, "fused"), (_shifted, -1e4, "fused"),
    (_shifted_then_scaled, LOW, "fused"), (_shifted_then_scaled, -torch.inf, "fused"),
    (_bare, LOW, "fused"), (_bare, -torch.inf, "fused"), (_bare, -1e4, "fused"), (_bare, -500.0, "empty_rows"),
    (_by_logsumexp, LOW, "empty_rows"), (_by_logsumexp, -torch.inf, "fused"), (_by_logsumexp, -50.0, "fused"),
    (_softmax_plus_one, LOW, "fused"), (_softmax_plus_one, -torch.inf, "empty_rows"),
]  # fmt: skip


@pytest.mark.parametrize(("normalise", "fill", "outcome"), FILLED)
def test_hand_written_softmax_of_rows_without_keys(normalise: Callable, fill: float, outcome: str) -> None:
    def function(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
        return normalise((q @ k.mT).masked_fill(~keep, fill)) @ v

    assert _outcome(function, *_qkv(), KEEP) == outcome


def test_the_maximum_before_the_mask_does_not_save_a_row_of_fills() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
        s = q @ k.mT
        return _bare(s + torch.where(keep, 0.0, LOW) - s.amax(-1, keepdim=True)) @ v

    assert _outcome(function, *_qkv(), KEEP) == "fused"


def test_a_fill_above_the_clamp_is_a_level_of_its_own() -> None:
    """max(s, finfo.min) turns -inf into finfo.min; a row of both has its weight on the higher fill."""

    def function(q: Tensor, k: Tensor, v: Tensor, keep: Tensor, near: Tensor, half: float = LOW / 2) -> Tensor:
        s = (q @ k.mT).masked_fill(~keep, half) + torch.where(near, 0.0, -torch.inf)
        return torch.maximum(s, torch.full((), LOW)).softmax(-1) @ v

    near = KEEP.clone()
    near[1, 0] = True
    assert _outcome(function, *_qkv(), KEEP, near) == "unsupported_dtype"
    same = lambda *args: function(*args, half=LOW)
    assert _outcome(same, *_qkv(), KEEP, near) == "fused"


def test_a_mask_that_is_normalised_is_data() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, mask / mask.sum(-1, keepdim=True))

    assert _outcome(function, *_qkv(), torch.rand(3, 3)) == "fused"
    softmax = lambda q, k, v, mask: F.scaled_dot_product_attention(q, k, v, mask.softmax(0) + (q @ k.mT).softmax(-1))
    assert _outcome(softmax, *_qkv(), torch.rand(3, 3)) == "fused"

    def product(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return (q @ k.mT + mask - mask.amax(-1, keepdim=True)).softmax(-1) @ v

    assert _outcome(product, *_qkv(), torch.rand(3, 3)) == "fused"


def _masked(mask: Callable[[Tensor], Tensor], dtype: torch.dtype = torch.float32) -> str:
    def function(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
        return (q @ k.mT + mask(keep)).softmax(-1).to(v.dtype) @ v

    return _outcome(function, *(x.to(dtype) for x in _qkv()), KEEP)


def test_a_fill_beyond_the_type_it_is_computed_in_is_minus_infinity() -> None:
    """(1 - m) * -1e9 in fp16, also when the product is cast there and back; a row of -inf is NaN, not the mean of v."""
    assert _masked(lambda keep: (1 - keep.half()) * -1e9, torch.float16) == "fused"
    assert _masked(lambda keep: ((~keep).float() * -3e38).half().float()) == "fused"
    assert _masked(lambda keep: ((~keep).float() * LOW).bfloat16(), torch.bfloat16) == "fused"


def test_a_fill_that_arithmetic_makes_overflow_is_minus_infinity() -> None:
    for mask in (lambda keep: torch.where(keep, 0.0, LOW) / 0.125, lambda keep: (1 - keep.float()) * -3e38 * 2):
        assert _masked(mask) == "fused"

    def function(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
        s = q @ k.mT
        return torch.where(keep, s, s - 1e30).softmax(-1) @ v

    assert _outcome(function, *(x.half() for x in _qkv()), KEEP) == "fused"


def test_not_a_number_in_a_mask_declines() -> None:
    """(1 - m) * -inf is 0 * -inf where the key is kept."""
    assert _masked(lambda keep: (1 - keep.float()) * -torch.inf) == "unsupported_program"

    def function(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
        s = torch.where(keep, q @ k.mT, -torch.inf) * keep
        return (s + (~keep).float() * LOW).softmax(-1) @ v

    assert _outcome(function, *_qkv(), KEEP) == "unsupported_program"

    def inverted(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
        return (q @ k.mT + (~keep).float() * LOW - keep.float().log()).softmax(-1) @ v

    assert _outcome(inverted, *_qkv(), KEEP) == "unsupported_program"


def test_fills_that_add_up_to_finfo_min_do_not_overflow() -> None:
    """finfo.min - 1e30 rounds to finfo.min, the level of the keys that only one mask drops."""
    never = torch.zeros(3, 3, dtype=torch.bool)

    def function(q: Tensor, k: Tensor, v: Tensor, keep: Tensor, never: Tensor) -> Tensor:
        return ((q @ k.mT).masked_fill(~never, LOW) + torch.where(keep, 0.0, -1e30)).softmax(-1) @ v

    assert _outcome(function, *_qkv(), KEEP, never) in ("fused", "unsupported_dtype")


def test_a_mask_by_log_or_division_is_minus_infinity() -> None:
    assert _masked(lambda keep: keep.float().log()) == "fused"
    assert _masked(lambda keep: 1 - 1 / keep.float()) == "fused"


def test_a_clamp_of_bf16_scores_meets_fills_of_the_same_bf16() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
        s = (q @ k.mT).masked_fill(~keep.mT, -torch.inf).masked_fill(~keep, -1e9)
        return s.clamp(min=-1e9).softmax(-1) @ v

    assert _outcome(function, *(x.bfloat16() for x in _qkv()), KEEP) == "fused"


def test_a_mask_of_data_narrowed_with_the_scores_declines() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return (q @ k.mT + mask).bfloat16().softmax(-1).float() @ v

    assert _outcome(function, *_qkv(), torch.where(KEEP, 0.0, LOW)) == "empty_rows"


def test_one_key_behind_a_mask_of_one_element() -> None:
    """Its row may be -inf although no index is left in the program to depend on."""

    def function(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, temperature: Tensor) -> Tensor:
        return ((q[:, :, :1] @ k.mT + mask) * temperature).softmax(-1) @ v

    assert _outcome(function, *_qkv(keys=1), torch.full((1, 1), -torch.inf), torch.rand(2, 1, 1)) == "fused"


def test_more_keys_than_values_decline() -> None:
    """Eager reads beyond the values where its kernel does not check, so there is nothing to compare."""
    torch._dynamo.reset()
    q, k, v = _qkv()
    compiled = fused(F.scaled_dot_product_attention, implementation="reference").model
    with torch.no_grad():
        compiled(q, k, v[:, :, :1].expand(2, 2, 1, 4))
    assert counters()["declined.unsupported_shape"] == 1


def test_a_number_times_the_output_is_no_gate() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s = q @ k.mT
        return (s.softmax(-1) @ v) * 2 + s

    assert _outcome(function, *(x[..., :3] for x in _qkv())) == "probs_escape"


def test_tensors_without_elements_decline() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q.unflatten(1, (2, 1)) @ k.unflatten(1, (2, 1)).mT).softmax(-1) @ v.unflatten(1, (2, 1))

    assert _outcome(function, *_qkv(keys=0)) == "unsupported_shape"
    assert _outcome(F.scaled_dot_product_attention, *_qkv(keys=0)) == "unsupported_shape"


def test_floor_division_of_masked_scores_is_nan() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s = (q @ k.mT).masked_fill(torch.ones(3, 3, dtype=torch.bool).triu(1), -torch.inf)
        return s.div(3, rounding_mode="floor").softmax(-1) @ v

    assert _outcome(attend, *_qkv()) == "unsupported_program"


def test_a_negative_scale_where_sdpa_masks_before_it_scales() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(-q, k, v, is_causal=True)

    args = tuple(t.half() for t in _qkv())
    model = fused(attend, implementation="sdpa").model
    with torch.no_grad():
        torch.testing.assert_close(model(*args), attend(*args))
    assert counters()["fused"] == 1
