"""Decode steps under the backend on a Hopper GPU: static and growing caches, unused slots, CUDA graphs."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from fa4_inductor import log
from fa4_inductor.lowering.split_config import SPLIT_VARIANTS
from fa4_inductor.runtime import launch

STRICT = {"fa4.implementation": "cute", "fa4.strict": True}
BATCH, HEADS, KV_HEADS, SLOTS = 2, 8, 2, 1000


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    log.counters().clear()
    launch.clear_plans()
    torch.manual_seed(0)
    with torch.no_grad():
        yield
    torch._dynamo.reset()
    launch.clear_plans()


def step(q, k, v, mask):
    """As transformers' SDPA path with a static cache."""
    return scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


def randn(heads: int, length: int) -> torch.Tensor:
    return torch.randn(BATCH, heads, length, 128, device="cuda", dtype=torch.bfloat16)


def check(got: torch.Tensor, q, k, v, mask) -> None:
    """Against fp32 over the valid slots, and at most twice the error of the same dtype."""
    valid = int(mask.any(0).flatten().nonzero().max()) + 1
    k, v, mask = k[:, :, :valid], v[:, :, :valid], mask[..., :valid]
    exact, eager = step(q.float(), k.float(), v.float(), mask), step(q, k, v, mask)
    bound = 2 * (eager.float() - exact).abs().max() + 2**-8 * exact.abs().max()
    assert (got.float() - exact).abs().max() <= bound


def slots(valid: int) -> torch.Tensor:
    """(B, 1, 1, slots): the last sequence is left-padded by a third."""
    mask = (torch.arange(SLOTS, device="cuda") < valid).repeat(BATCH, 1)
    mask[-1, : valid // 3] = False
    return mask[:, None, None]


@pytest.mark.parametrize("graphs", [False, True])
def test_a_static_cache_fills_up(graphs):
    compiled = torch.compile(step, backend="fa4", options={**STRICT, "triton.cudagraphs": graphs})
    k, v = randn(KV_HEADS, SLOTS), randn(KV_HEADS, SLOTS)
    # in place, as caches are written, so that a captured graph sees them
    full_k, full_v = k.clone(), v.clone()
    for valid in (1, 2, 63, 64, 65, 300, 999, 1000):
        k.copy_(full_k)
        v.copy_(full_v)
        k[:, :, valid:], v[:, :, valid:] = torch.nan, torch.nan
        q, mask = randn(HEADS, 1), slots(valid)
        torch.compiler.cudagraph_mark_step_begin()
        check(compiled(q, k, v, mask), q, k, v, mask)
    assert log.counters()["fused"] == 1
    assert [key.variant in SPLIT_VARIANTS for key in launch._plans] == [True]


def test_a_growing_cache_takes_one_kernel():
    compiled = torch.compile(lambda q, k, v: step(q, k, v, None), backend="fa4", dynamic=True, options=STRICT)
    k, v = randn(KV_HEADS, 5000), randn(KV_HEADS, 5000)
    for length in (3, 64, 65, 200, 1023, 5000):
        q = randn(HEADS, 1)
        mask = torch.ones(1, length, dtype=torch.bool, device="cuda")
        check(compiled(q, k[:, :, :length], v[:, :, :length]), q, k[:, :, :length], v[:, :, :length], mask)
    assert len(launch._plans) == 1


def test_a_chunk_behind_a_cache():
    """Several queries at once, as in assisted decoding: bottom-right causal."""

    def chunk(q, k, v):
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril(k.shape[2] - q.shape[2])
        return step(q, k, v, mask)

    compiled = torch.compile(chunk, backend="fa4", options=STRICT)
    for rows in (2, 7, 16, 40):
        q, k, v = randn(HEADS, rows), randn(KV_HEADS, 700), randn(KV_HEADS, 700)
        exact, eager = chunk(q.float(), k.float(), v.float()), chunk(q, k, v)
        bound = 2 * (eager.float() - exact).abs().max() + 2**-8 * exact.abs().max()
        assert (compiled(q, k, v).float() - exact).abs().max() <= bound
