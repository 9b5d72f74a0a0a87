"""Chosen inputs for the split-KV kernel: unused cache slots, empty splits and rows, many splits, repeatability."""

from __future__ import annotations

import functools
import math

import fwd_cases as cases
import prebuilt
import pytest
import torch


@functools.cache
def kernel(name: str, d: int, group: int, split: bool, dtype: str = "bfloat16"):
    config = prebuilt.resolve_config(name, d, d, {"split": split})
    return prebuilt.forward(name, dtype, d, d, group, True, config), config


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda").to(torch.bfloat16)


def inputs(b: int, h: int, hkv: int, sq: int, sk: int, d: int, aux=(), sizes=()) -> cases.Inputs:
    q, k, v = randn(b, h, sq, d), randn(b, hkv, sk, d), randn(b, hkv, sk, d)
    return cases.Inputs(q, k, v, d**-0.5, tuple(aux), tuple(sizes))


def run(name: str, x: cases.Inputs, num_splits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch and compare with fp32; num_splits 0: the kernel without splits."""
    group = x.q.shape[1] // x.k.shape[1]
    compiled, config = kernel(name, x.q.shape[-1], group, num_splits > 0)
    more = cases.split_arguments(config, x, num_splits)
    out, lse, guard = cases.launch(compiled, cases.load_program(name), x, True, *more)
    assert cases.check(name, x, out, lse, guard) == ""
    assert lse is not None
    return out, lse


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("num_splits", [0, 1, 5, 40, 256])
@pytest.mark.parametrize("sq", [1, 4, 70])
def test_unused_slots_are_never_read(num_splits, sq):
    x = inputs(2, 8, 2, sq, 1000, 128, aux=(torch.arange(200, 200 + sq, device="cuda"),))
    x.k[:, :, 200 + sq :], x.v[:, :, 200 + sq :] = math.nan, math.nan
    out, _ = run("cache_positions", x, num_splits)
    assert bool(out.isfinite().all())


@pytest.mark.parametrize("num_splits", [0, 7])
def test_keys_behind_the_last_one_are_never_read(num_splits):
    x = inputs(1, 4, 1, 3, 200, 128)
    k, v = randn(1, 1, 256, 128), randn(1, 1, 256, 128)
    k[:, :, 200:], v[:, :, 200:] = math.nan, math.nan
    x.k, x.v = k[:, :, :200], v[:, :, :200]
    out, _ = run("plain", x, num_splits)
    assert bool(out.isfinite().all())


@pytest.mark.parametrize("num_splits", [0, 3])
def test_rows_without_keys(num_splits):
    x = inputs(2, 4, 4, 5, 300, 64)
    mask = torch.rand(2, 5, 300, device="cuda") < 0.5
    mask[0] = False
    mask[1, 3] = False
    x.aux = (mask,)
    out, lse = run("dense_mask", x, num_splits)
    assert float(out[0].abs().max()) == 0.0 and bool((lse[0] == -math.inf).all())


@pytest.mark.parametrize("num_splits", [0, 12])
def test_scores_far_apart_between_splits(num_splits):
    """One key of one split outweighs all others by hundreds of nats; elsewhere the weights underflow."""
    x = inputs(1, 8, 2, 1, 2000, 128)
    x.k[:, :, 1234] = x.q[:, ::4, 0] * 20
    run("plain", x, num_splits)


@pytest.mark.parametrize("num_splits", [0, 33])
def test_same_bits_every_time(num_splits):
    x = inputs(2, 32, 8, 1, 4096, 128)
    first, _ = run("plain", x, num_splits)
    for _ in range(5):
        assert torch.equal(run("plain", x, num_splits)[0], first)


def test_graph_replays_with_changing_lengths():
    """One captured launch serves every position: the kept keys are found on the device."""
    x = inputs(1, 8, 2, 1, 512, 128, aux=(torch.zeros(1, dtype=torch.int64, device="cuda"),))
    compiled, config = kernel("cache_positions", 128, 4, True)
    out = torch.empty_like(x.q.transpose(1, 2)).transpose(1, 2)
    lse = torch.empty(x.q.shape[:3], device="cuda")
    more = cases.split_arguments(config, x, 8)
    arguments = (x.q, x.k, x.v, out, lse, None, x.scale, x.aux, None, *more)
    compiled(*arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        compiled(*arguments)
    for position in (0, 63, 64, 200, 511):
        x.aux[0].fill_(position)
        graph.replay()
        torch.cuda.synchronize()
        assert cases.check("cache_positions", x, out, lse, True) == ""
