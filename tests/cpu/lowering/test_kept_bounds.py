"""Bounds of boolean key masks: which masks have them, what they are, and that they change no mask."""

from __future__ import annotations

import pytest
import torch
from emit_cases import spec_of

from fa4_inductor.analysis import facts
from fa4_inductor.lowering.kept_bounds import KeptBounds, bound_by_kept_keys, kept_bounds
from fa4_inductor.spec import AttentionSpec, verify


def bounded(keep: str, aux: str) -> tuple[AttentionSpec, tuple[KeptBounds, ...]]:
    spec, bounds = bound_by_kept_keys(spec_of(keep=keep, aux=aux))
    return verify(spec), bounds


def test_a_cache_of_valid_slots_has_a_range():
    """What a decode step with a static cache reads depends on the mask's last True, not on the cache."""
    spec, bounds = bounded("aux0[b, kv_idx]", "bool[2]")
    assert bounds == (KeptBounds(0),) and [(a.dtype, a.ndim) for a in spec.aux] == [("bool", 2), ("int32", 2)]
    lo, hi = facts(spec).kv_range
    assert "aux" in lo.free and "aux" in hi.free and {"q_lo", "q_hi"} & (lo.free | hi.free) == set()


def test_one_tensor_per_mask():
    spec, bounds = bounded("aux0[b, kv_idx] & aux1[h, kv_idx] & (kv_idx <= q_idx)", "bool[2],bool[2]")
    assert bounds == (KeptBounds(0), KeptBounds(1)) and len(spec.aux) == 4


@pytest.mark.parametrize(
    ("keep", "aux"),
    [
        ("aux0[b, q_idx, kv_idx]", "bool[3]"),
        ("aux0[q_idx, kv_idx]", "bool[2]"),
        ("aux0[b, kv_idx] | (kv_idx == q_idx)", "bool[2]"),
        ("~aux0[b, kv_idx]", "bool[2]"),
        ("aux0[b, kv_idx - q_idx]", "bool[2]"),
        ("aux0[b, kv_idx] > 0", "int32[2]"),
    ],
)
def test_other_masks_stay_as_they_are(keep, aux):
    spec = spec_of(keep=keep, aux=aux)
    assert bound_by_kept_keys(spec) == (spec, ())


def test_values():
    mask = torch.tensor([[0, 1, 0, 1, 0], [1, 1, 1, 1, 1], [0, 0, 0, 0, 0], [0, 0, 0, 0, 1]]).bool()
    call = lambda function, *args, **options: function(*args, **options)
    got = kept_bounds(call, mask)
    assert got.dtype is torch.int32 and got.tolist() == [[1, 4], [0, 5], [5, 0], [4, 5]]
    assert kept_bounds(call, mask[:, :0]).tolist() == [[0, 0]] * 4
    assert kept_bounds(call, mask.view(2, 2, 5)).shape == (2, 2, 2)
