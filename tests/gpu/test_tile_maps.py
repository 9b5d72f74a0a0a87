"""Tile maps on a Hopper GPU: their classes against every element of the mask, and attention that walks them."""

from __future__ import annotations

import random

import pytest
import torch

from fa4_inductor.kernels.graph_aux import eager_tile_map
from fa4_inductor.kernels.tile_map import EMPTY, FULL, MASKED, classify, listed_classes
from fa4_inductor.lowering.split_config import Variant
from fa4_inductor.lowering.tile_map import with_tile_map
from fa4_inductor.runtime import compile as compiler
from fa4_inductor.runtime import launch, ops, tile_map, variants
from fa4_inductor.spec import AttentionSpec, parse_spec

CAUSAL = "(kv_idx <= q_idx)"
# mask, aux, whether its map is exact
MASKS = {
    "documents": (f"{CAUSAL} & (aux0[b, kv_idx] == aux0[b, q_idx])", "int32[2]", False),
    "padding": (f"{CAUSAL} & aux0[b, kv_idx]", "bool[2]", False),
    "padding of both": ("aux0[b, q_idx] & aux0[b, kv_idx]", "bool[2]", False),
    "lengths by row": ("kv_idx < aux0[b, q_idx]", "int32[2]", False),
    "dense": ("aux0[b, 0, q_idx, kv_idx]", "bool[4]", True),
    "dense by head": (f"{CAUSAL} & aux0[b, h, q_idx, kv_idx]", "bool[4]", True),
    "blocks": ("(aux0[q_idx // 64, kv_idx // 64] > 0) | (kv_idx == q_idx)", "int32[2]", True),
}


@pytest.fixture(autouse=True)
def _strict(monkeypatch):
    monkeypatch.setenv("FA4_INDUCTOR_STRICT", "1")
    # the kernel of few query rows knows no maps
    monkeypatch.setattr(variants, "choose_variant", lambda *shapes: (Variant.FORWARD, 1))
    launch.clear_plans()
    tile_map.clear_plans()
    torch.manual_seed(0)


def spec_of(name: str, score: str = "score") -> AttentionSpec:
    keep, aux, _ = MASKS[name]
    return parse_spec(f"fa4/1; aux={aux}; sizes=0; scale=0.125; score={score}; keep={keep}; empty_row=mean")


def make_aux(name: str, b: int, h: int, sq: int, sk: int, rng: random.Random) -> torch.Tensor:
    longest = max(sq, sk)
    if name == "documents":
        return torch.cumsum(torch.rand(b, longest, device="cuda") < rng.choice([0.002, 0.02]), 1).int()
    if name in ("padding", "padding of both"):
        lengths = torch.tensor([rng.choice([0, 1, longest // 2, longest]) for _ in range(b)], device="cuda")
        kept = torch.arange(longest, device="cuda") < lengths[:, None]
        return kept if rng.random() < 0.7 else torch.rand(b, longest, device="cuda") < 0.99
    if name == "lengths by row":
        return torch.randint(0, sk + 1, (b, sq), device="cuda").sort(1).values.int()
    if name == "blocks":
        return torch.randint(0, 2, (-(-sq // 64), -(-sk // 64)), device="cuda").int()
    heads = h if "head" in name else 1
    blocks = torch.rand(b, heads, -(-sq // 64), -(-sk // 64), device="cuda")
    mask = (blocks < 0.4).repeat_interleave(64, 2).repeat_interleave(64, 3)[:, :, :sq, :sk]
    speckled = torch.rand(b, heads, sq, sk, device="cuda") < 0.999
    return (mask & speckled if rng.random() < 0.5 else mask).contiguous()


def make_map(spec: AttentionSpec, aux: torch.Tensor, b: int, h: int, sq: int, sk: int) -> torch.Tensor:
    return eager_tile_map(spec, torch.empty(b, h, sq, 1), torch.empty(b, h, sk, 1), [aux])


@pytest.mark.parametrize("tile", [(128, 128), (192, 96)])
@pytest.mark.parametrize("name", MASKS)
def test_classes(name, tile):
    rng = random.Random(name)
    spec = with_tile_map(spec_of(name), *tile)
    for sq, sk in ((1, 1), (300, 300), (1000, 700), (129, 2048), (2048, 640)):
        aux = make_aux(name, 2, 3, sq, sk, rng)
        if rng.random() < 0.3:
            aux = torch.stack([aux, aux], -1)[..., 0]  # no unit stride
        found = make_map(spec, aux, 2, 3, sq, sk)
        exact = classify([aux], spec_of(name), (), *found.shape[:2], sq, sk, *tile, aux.device).cpu()
        classes = listed_classes(found.cpu())
        if MASKS[name][2]:
            assert torch.equal(classes, exact)
        assert bool(((classes == exact) | (classes == MASKED)).all())
        decided = [int((exact == c).sum()) for c in (EMPTY, FULL)]
        assert [int((classes == c).sum()) for c in (EMPTY, FULL)] <= decided


def test_many_key_tiles_are_listed_in_several_chunks():
    spec = with_tile_map(spec_of("documents"), 128, 64)
    ids = torch.cumsum(torch.rand(1, 80_000, device="cuda") < 0.0005, 1).int()
    found = make_map(spec, ids, 1, 1, 80_000, 80_000)
    starts = torch.arange(0, 80_000, 64, device="cuda")
    ends = (starts + 63).clamp(max=79_999)
    rows_lo, rows_hi = ids[0, ::128], ids[0, (torch.arange(0, 80_000, 128, device="cuda") + 127).clamp(max=79_999)]
    q_last = (torch.arange(0, 80_000, 128, device="cuda") + 127).clamp(max=79_999)
    overlap = (ids[0, starts][None] <= rows_hi[:, None]) & (rows_lo[:, None] <= ids[0, ends][None])
    visited = overlap & (starts[None] <= q_last[:, None])
    assert torch.equal(found[0, 0, :, 0].long(), visited.sum(1))
    assert torch.equal(listed_classes(found.cpu())[0, 0] > 0, visited.cpu())


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("name", MASKS)
def test_attention(name, d):
    """Odd sizes, empty rows, rows whose first kept key is in a full tile, and scores that force the redo."""
    rng = random.Random(name)
    plain = spec_of(name)
    for sq, sk, amplitude in ((300, 300, 1.0), (1000, 700, 1.0), (640, 2000, 1.0), (513, 513, 8.0)):
        mapped = with_tile_map(plain, 0, 0)
        config, _ = compiler.forward_config(mapped, d, d, long_q=False, regular=True)
        assert config is not None
        mapped = with_tile_map(plain, config.tile_m, config.tile_n)
        q, k, v = (
            torch.randn(2, s, heads, d, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
            for s, heads in ((sq, 4), (sk, 2), (sk, 2))
        )
        q = q * amplitude
        aux = make_aux(name, 2, 4, sq, sk, rng)
        found = make_map(mapped, aux, 2, 4, sq, sk)
        forward = ops.FORWARD
        out, lse = forward(q, k, v, [aux, found], mapped.text, [], "cute", True)
        want, want_lse = forward(q.float(), k.float(), v.float(), [aux], plain.text, [], "reference", True)
        rounding = (want.to(q.dtype).float() - want).abs().max().item()
        limit = 2 * rounding + 4e-3 * want.abs().max().item()
        torch.testing.assert_close(out.float(), want, rtol=0, atol=limit)
        torch.testing.assert_close(lse, want_lse, rtol=1e-3, atol=2e-2)
        again, _ = forward(q, k, v, [aux, found], mapped.text, [], "cute", True)
        assert torch.equal(out, again)


def test_a_kernel_of_other_tiles_ignores_the_map():
    plain = spec_of("documents")
    mapped = with_tile_map(plain, 64, 32)
    q, k, v = (torch.randn(1, 4, 400, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    ids = make_aux("documents", 1, 4, 400, 400, random.Random(0))
    wrong = torch.zeros(1, 1, 7, 15, device="cuda", dtype=torch.int32)
    out = ops.ATTENTION(q, k, v, [ids, wrong], mapped.text, [], "cute")
    want = ops.ATTENTION(q, k, v, [ids], plain.text, [], "cute")
    assert torch.equal(out, want)


def test_more_query_tiles_than_ctas_can_claim():
    """The list of claimed tiles fills up: there are more CTAs than SMs, and each ends early."""
    heads = 60_000
    q, k, v = (torch.randn(1, heads, s, 64, device="cuda", dtype=torch.bfloat16) for s in (1, 3, 3))
    mapped = with_tile_map(spec_of("padding of both"), 128, 128)
    kept = torch.tensor([[True, False, True]], device="cuda")
    found = make_map(mapped, kept, 1, 1, 1, 3)
    out = ops.ATTENTION(q, k, v, [kept, found], mapped.text, [], "cute")
    scores = (q.float() * k.float()).sum(-1) * 0.125
    p = torch.softmax(scores.masked_fill(~kept, -torch.inf), -1)
    torch.testing.assert_close(out.float(), (p[..., None] * v.float()).sum(2, keepdim=True), atol=3e-2, rtol=2e-2)


def test_the_redo_finds_its_tiles_among_the_claimed_ones():
    """A few rows of many tiles whose scores no fixed shift holds."""
    q, k, v = (torch.randn(2, 8, 2048, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    q[1, 3, 417] *= 100.0
    q[0, 7, 2047] *= 100.0
    plain, kept = spec_of("padding"), torch.ones(2, 2048, dtype=torch.bool, device="cuda")
    kept[1, 1500:] = False
    mapped = with_tile_map(plain, 128, 128)
    found = make_map(mapped, kept, 2, 8, 2048, 2048)
    out = ops.ATTENTION(q, k, v, [kept, found], mapped.text, [], "cute")
    want = ops.ATTENTION(q.float(), k.float(), v.float(), [kept], plain.text, [], "reference")
    torch.testing.assert_close(out.float(), want, rtol=0, atol=2e-2)


def test_layers_share_one_map():
    import fa4_inductor  # noqa: F401
    from fa4_inductor import log

    def layers(q, k, v, ids):
        i = torch.arange(q.shape[2], device=q.device)
        keep = (ids[:, None, :, None] == ids[:, None, None, :]) & (i[:, None] >= i[None])
        for _ in range(3):
            q = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=keep)
        return q

    q, k, v = (torch.randn(2, 16, 2048, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    ids = torch.cumsum(torch.rand(2, 2048, device="cuda") < 0.005, 1)
    options = {"fa4.strict": True, "fa4.implementation": "cute"}
    with torch.no_grad():
        compiled = torch.compile(layers, backend="fa4", options=options)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as trace:
            out = compiled(q, k, v, ids)
        torch.testing.assert_close(out.float(), layers(q, k, v, ids).float(), rtol=0, atol=2e-2)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as trace:
            compiled(q, k, v, ids)
    calls = {e.key: e.count for e in trace.key_averages() if e.key.startswith("fa4_inductor::")}
    assert calls.get("fa4_inductor::tile_map") == 1, calls
    assert log.counters()["fused"] == 3


def test_cuda_graphs_follow_the_mask():
    def layers(q, k, v, ids):
        i = torch.arange(q.shape[2], device=q.device)
        keep = (ids[:, None, :, None] == ids[:, None, None, :]) & (i[:, None] >= i[None])
        for _ in range(2):
            q = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=keep)
        return q

    q, k, v = (torch.randn(2, 16, 2048, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    ids = torch.zeros(2, 2048, device="cuda", dtype=torch.int64)
    with torch.no_grad():
        compiled = torch.compile(layers, backend="fa4", mode="reduce-overhead")
        for _ in range(6):
            ids.copy_(torch.cumsum(torch.rand(2, 2048, device="cuda") < 0.01, 1))
            torch.compiler.cudagraph_mark_step_begin()
            out = compiled(q, k, v, ids).float()
            torch.testing.assert_close(out, layers(q, k, v, ids).float(), rtol=0, atol=2e-2)


def test_gradients_of_layers_with_a_map():
    def layers(q, k, v, ids):
        i = torch.arange(q.shape[2], device=q.device)
        keep = (ids[:, None, :, None] == ids[:, None, None, :]) & (i[:, None] >= i[None])
        for _ in range(2):
            q = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=keep)
        return q

    ids = torch.cumsum(torch.rand(2, 2048, device="cuda") < 0.005, 1)
    operands = [torch.randn(2, 16, 2048, 64, device="cuda", dtype=torch.bfloat16) for _ in range(4)]

    def gradients(function, dtype):
        q, k, v, weight = (t.to(dtype) for t in operands)
        inputs = [t.clone().requires_grad_() for t in (q, k, v)]
        (function(*inputs, ids) * weight).sum().backward()
        return [t.grad.float() for t in inputs]

    exact, eager = gradients(layers, torch.float32), gradients(layers, torch.bfloat16)
    compiled = torch.compile(layers, backend="fa4", options={"fa4.strict": True, "fa4.implementation": "cute"})
    for got, want, rounded in zip(gradients(compiled, torch.bfloat16), exact, eager):
        limit = 2 * (rounded - want).abs().max().item() + 1e-3 * want.abs().max().item()
        assert (got - want).abs().max().item() <= limit
