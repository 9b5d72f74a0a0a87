"""Chosen inputs for the forward kernel: extreme scores, empty rows, broadcast operands, large grids."""

from __future__ import annotations

import functools
import math
import random

import fwd_cases as cases
import pytest
import torch


@functools.cache
def kernel(name: str, dtype: str, d: int, group: int = 1, **overrides):
    import prebuilt

    return prebuilt.forward(name, dtype, d, d, group, True, prebuilt.resolve_config(name, d, d, overrides))


def run(name: str, x: cases.Inputs, dtype: str = "bfloat16", **overrides) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch and compare with fp32; returns (out, lse)."""
    group = x.q.shape[1] // x.k.shape[1]
    compiled = kernel(name, dtype, x.q.shape[-1], group, **overrides)
    out, lse, guard = cases.launch(compiled, cases.load_program(name), x, True)
    assert cases.check(name, x, out, lse, guard) == ""
    assert lse is not None
    return out, lse


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def inputs(b: int, h: int, sq: int, sk: int, d: int, dtype: torch.dtype = torch.bfloat16, hkv: int = 0) -> cases.Inputs:
    hkv = hkv or h
    q, k, v = randn(b, h, sq, d, dtype=dtype), randn(b, hkv, sk, d, dtype=dtype), randn(b, hkv, sk, d, dtype=dtype)
    return cases.Inputs(q, k, v, d**-0.5, (), ())


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("name", ["plain", "causal"])
@pytest.mark.parametrize("step", [3.0, 30.0, 300.0])
def test_scores_that_rise_from_tile_to_tile(name, step):
    """Tiles are visited from the last key to the first, so that every fixed shift is too low: the tile runs again."""
    x = inputs(1, 2, 300, 1200, 128)
    ramp = torch.linspace(1.0, 0.0, 1200, device="cuda")[:, None] * step
    x.q[..., 0] = 16.0
    x.k[..., 0] = ramp[:, 0].to(torch.bfloat16)
    run(name, x)


def test_scores_that_fall_from_tile_to_tile():
    x = inputs(1, 2, 300, 1200, 128)
    x.q[..., 0] = 16.0
    x.k[..., 0] = torch.linspace(0.0, 300.0, 1200, device="cuda").to(torch.bfloat16)
    run("plain", x)


def test_one_row_of_many_needs_the_redo():
    x = inputs(2, 3, 700, 900, 64)
    x.q[1, 2, 417] *= 100.0
    run("plain", x)


def test_fp16_scores_beyond_fp16():
    """Unscaled scores pass 65504, where eager fp16 gives NaN."""
    x = inputs(1, 2, 128, 128, 64, torch.float16)
    x.q.mul_(100.0)
    x.k.mul_(100.0)
    assert float((x.q.float() @ x.k.float().transpose(-1, -2)).abs().max()) > 65504
    group = kernel("causal", "float16", 64)
    out, lse, guard = cases.launch(group, cases.load_program("causal"), x, True)
    exact, exact_lse = cases.reference("causal", x, low_precision=False)
    assert guard and bool(out.isfinite().all())
    torch.testing.assert_close(out.float(), exact, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(lse, exact_lse, atol=1e-2, rtol=1e-4)


@pytest.mark.parametrize("empty", ["all", "first", "last", "middle"])
def test_tiles_of_empty_rows(empty):
    x = inputs(2, 2, 512, 512, 64)
    mask = torch.rand(2, 512, 512, device="cuda") < 0.5
    rows = {"all": slice(None), "first": slice(0, 256), "last": slice(256, None), "middle": slice(128, 384)}[empty]
    mask[:, rows] = False
    x.aux = (mask,)
    out, lse = run("dense_mask", x)
    assert float(out[:, :, rows].abs().max()) == 0.0
    assert bool((lse[:, :, rows] == -math.inf).all())


def test_window_leaves_rows_behind_the_keys_empty():
    x = inputs(1, 2, 512, 100, 128)
    x.sizes = (64,)
    out, lse = run("window", x)
    assert bool(out[:, :, 200:].isnan().all()) and bool((lse[:, :, 200:] == -math.inf).all())


def test_broadcast_keys_and_values():
    """Batch and head strides of 0 in k and v."""
    x = inputs(1, 4, 200, 300, 128, hkv=1)
    x.q = randn(3, 4, 200, 128)
    x.k, x.v = x.k.expand(3, 4, -1, -1), x.v.expand(3, 4, -1, -1)
    run("causal", x)


@pytest.mark.parametrize("pairs", [70_000, 140_000])
def test_more_batch_times_heads_than_a_grid_dimension(pairs):
    x = inputs(1, pairs, 1, 3, 64)
    compiled = kernel("plain", "bfloat16", 64)
    out, lse, guard = cases.launch(compiled, cases.load_program("plain"), x, True)
    p = torch.softmax((x.q.float() * x.k.float()).sum(-1) * x.scale, -1)
    exact = (p[..., None] * x.v.float()).sum(2, keepdim=True)
    assert guard
    torch.testing.assert_close(out.float(), exact, atol=3e-2, rtol=2e-2)


@pytest.mark.parametrize("name", ["plain", "causal", "padding"])
def test_same_bits_every_time(name):
    rng = random.Random(0)
    x = inputs(2, 4, 600, 600, 64)
    x.aux = cases.make_aux(name, rng, 2, 4, 600, 600)
    compiled, program = kernel(name, "bfloat16", 64), cases.load_program(name)
    first, _, _ = cases.launch(compiled, program, x, True)
    for _ in range(5):
        again, _, _ = cases.launch(compiled, program, x, True)
        assert torch.equal(again.nan_to_num(7.0), first.nan_to_num(7.0))


def test_keys_behind_the_last_one_are_never_read():
    """NaN right behind seqlen_k, in the same storage."""
    x = inputs(1, 2, 130, 200, 128)
    k, v = randn(1, 2, 256, 128), randn(1, 2, 256, 128)
    k[:, :, 200:], v[:, :, 200:] = math.nan, math.nan
    x.k, x.v = k[:, :, :200], v[:, :, :200]
    out, _ = run("plain", x)
    assert bool(out.isfinite().all())


def test_additive_causal_mask_through_tma():
    """The tiles visited first are nothing but fills: a row gets its shift where its keys begin."""
    x = inputs(1, 2, 1024, 1024, 64)
    mask = torch.full((1, 1024, 1024), torch.finfo(torch.bfloat16).min, device="cuda").triu(1)
    x.aux = (mask.to(torch.bfloat16).expand(2, -1, -1),)
    run("tma_bias", x)


@pytest.mark.parametrize("fill", [-1e9, -(2.0**32), -1e30])
def test_rows_of_nothing_but_fills_are_uniform(fill):
    x = inputs(1, 2, 300, 520, 64)
    bias = torch.zeros(2, 300, 520, device="cuda", dtype=torch.bfloat16)
    bias[:, 100:130] = fill
    x.aux = (bias,)
    out, _ = run("tma_bias", x)
    uniform = x.v.float().mean(2, keepdim=True).expand(1, 2, 30, 64)
    torch.testing.assert_close(out[:, :, 100:130].float(), uniform, atol=5e-3, rtol=0)
