"""Layers whose mask depends on data get one tile map in the graph, made once and shared."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.backends.debugging import aot_eager

from fa4_inductor.kernels.tile_map import classify, listed_classes
from fa4_inductor.lowering import tile_map as choice
from fa4_inductor.lowering.support import Operands
from fa4_inductor.patterns import find_sites
from fa4_inductor.patterns.match import AttentionMatch
from fa4_inductor.rewrite import Splicer
from fa4_inductor.runtime.ops import ATTENTION, TILE_MAP
from fa4_inductor.spec import parse_spec


@pytest.fixture(autouse=True)
def _small_maps(monkeypatch):
    monkeypatch.setattr(choice, "_MIN_FLOPS", 0)
    monkeypatch.setattr(choice, "_MIN_QUERY_TILES", 1)


def packed(ids, length):
    i = torch.arange(length)
    return (ids[:, None, :, None] == ids[:, None, None, :]) & (i[:, None] >= i[None])


def run(function, *args, dynamic=False):
    """(result, the spliced graph's map nodes, its attention nodes, ops called); the kernel's place takes the
    reference."""
    seen = []

    def backend(gm, inputs):
        splicer = Splicer(gm.graph)
        for site in find_sites(gm):
            assert isinstance(site, AttentionMatch), site
            splicer.splice((site, "cute"))
        splicer.finish()
        gm.graph.lint()
        maps = [n for n in gm.graph.nodes if n.target is TILE_MAP]
        calls = [n for n in gm.graph.nodes if n.target is ATTENTION]
        seen.append((maps, calls, [n.args for n in calls]))
        for node in calls:
            node.args = (*node.args[:6], "reference")  # there is no kernel on a CPU
        gm.recompile()
        return aot_eager(gm, inputs)

    with torch.no_grad():
        compiled = torch.compile(function, backend=backend, dynamic=dynamic, fullgraph=True)
        result = compiled(*args)
        torch.testing.assert_close(result, function(*args), rtol=1e-4, atol=1e-5)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as trace:
            compiled(*args)
    ran = sum(e.count for e in trace.key_averages() if e.key == "fa4_inductor::tile_map")
    return seen[0], ran


def three_layers(q, k, v, ids):
    keep = packed(ids, q.shape[2])
    for _ in range(3):
        q = F.scaled_dot_product_attention(q, k, v, attn_mask=keep)
    return q


def operands(length=200, heads=2, d=64):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, length, d) for _ in range(3))
    return q, k, v, torch.cumsum(torch.rand(2, length) < 0.02, 1)


@pytest.mark.parametrize("dynamic", [False, True])
def test_all_layers_share_one_map(dynamic):
    q, k, v, ids = operands()
    (maps, calls, args), ran = run(three_layers, q, k, v, ids, dynamic=dynamic)
    assert len(maps) == ran == 1 and len(calls) == 3
    for call in args:
        spec = parse_spec(call[4])
        assert spec.tile_map is not None and call[3][spec.tile_map.slot] is maps[0]


def test_layers_that_make_their_own_mask_run_one_map():
    """HF models build the mask once, others in each layer: equal ops on equal tensors are one after AOTAutograd."""

    def layers(q, k, v, ids):
        for _ in range(2):
            q = F.scaled_dot_product_attention(q, k, v, attn_mask=packed(ids, q.shape[2]))
        return q

    _, ran = run(layers, *operands())
    assert ran == 1


def test_each_mask_has_its_map():
    def local_and_global(q, k, v, ids):
        i = torch.arange(q.shape[2])
        keep = packed(ids, q.shape[2])
        near = keep & (i[:, None] - i[None] < 50)
        for mask in (keep, near, keep, near):
            q = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return q

    (maps, calls, _), ran = run(local_and_global, *operands())
    assert len(maps) == ran == 2 and len(calls) == 4


def test_a_mask_that_is_written_between_layers_gets_a_new_map():
    def layers(q, k, v, ids):
        ids = ids.clone()
        for _ in range(2):
            q = F.scaled_dot_product_attention(q, k, v, attn_mask=packed(ids, q.shape[2]))
            ids[:, 100:] += 1
        return q

    (maps, _, _), _ = run(layers, *operands())
    assert len(maps) == 2


def test_the_map_is_that_of_the_mask():
    q, k, v, ids = operands()
    graphs = []

    def backend(gm, inputs):
        splicer = Splicer(gm.graph)
        for site in find_sites(gm):
            splicer.splice((site, "cute"))
        splicer.finish()
        (node,) = (n for n in gm.graph.nodes if n.target is TILE_MAP)
        gm.graph.output_node().args = ((node,),)
        gm.recompile()
        graphs.append(node.args)
        return gm.forward

    with torch.no_grad():
        (found,) = (torch.compile(lambda *a: three_layers(*a), backend=backend, fullgraph=True)(q, k, v, ids),)
    _, program, _, *shape = graphs[0]
    batch, heads, seqlen_q, seqlen_k, tile_m, tile_n = shape
    assert (batch, heads, seqlen_q, seqlen_k) == (2, 1, 200, 200)
    exact = classify([ids.int()], parse_spec(program), (), 2, 1, 200, 200, tile_m, tile_n, torch.device("cpu"))
    assert torch.equal(listed_classes(found), exact)


def wants(keep, aux="", heads=16, length=4096, batch=2):
    spec = parse_spec(f"fa4/1; aux={aux}; sizes=0; scale=1.0; score=score; keep={keep}; empty_row=zero")
    return choice.wants_tile_map(spec, Operands(torch.bfloat16, batch, heads, heads, length, length, 128, 128))


DOCUMENTS = "(kv_idx <= q_idx) & (aux0[b, kv_idx] == aux0[b, q_idx])"
DENSE = "aux0[b, 0, q_idx, kv_idx]"


def test_masks_that_want_a_map():
    assert wants(DOCUMENTS, "int32[2]")
    assert wants("aux0[b, kv_idx]", "bool[2]")
    assert wants(DENSE, "bool[4]")


def test_masks_that_do_not(monkeypatch):
    assert not wants("kv_idx <= q_idx")
    assert not wants("(kv_idx <= q_idx) & (kv_idx < aux0[b])", "int32[1]")
    assert not wants("aux0[b, h, q_idx, kv_idx]", "bool[4]"), "reading it costs as much as attention"
    assert not wants(DENSE, "bool[4]", heads=4)
    monkeypatch.undo()
    assert not wants(DOCUMENTS, "int32[2]", batch=1, heads=8, length=2000), "too few query tiles"
    assert not wants(DOCUMENTS, "int32[2]", batch=1, heads=8, length=1024)
    assert wants(DOCUMENTS, "int32[2]")
