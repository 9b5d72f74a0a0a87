"""Decisions: kernels are built before they run; a toolchain that fails costs one warning, never the model."""

import logging

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.exc import BackendCompilerFailed

from fa4_inductor import backend, decide, log
from fa4_inductor.errors import KernelUnavailable
from fa4_inductor.lowering import tile_map as lowering_tile_map
from fa4_inductor.lowering.split_config import Variant
from fa4_inductor.runtime import compile as compiler
from fa4_inductor.runtime import launch, tile_map, variants
from fa4_inductor.runtime import target as targets
from fa4_inductor.runtime.target import target_for

HOPPER = target_for("cuda", "sm_90a")


def two_layers(q, k, v):
    for scale in (0.125, 0.25):
        q = torch.softmax(q @ k.transpose(2, 3) * scale, dim=-1) @ v
    return q


def qkv(d=64):
    return [torch.randn(1, 2, 6, d, dtype=torch.bfloat16) for _ in range(3)]


@pytest.fixture(autouse=True)
def on_hopper(monkeypatch):
    """Decisions as on an H200, with graphs that run as they are after the rewrite, and no kernel from earlier tests."""
    torch._dynamo.reset()
    log.reset_warnings()
    log.counters().clear()
    compiler.clear_failures()
    launch.clear_plans()
    monkeypatch.setenv("FA4_INDUCTOR_DISK_CACHE", "0")
    cache = compiler.KernelCache(None, None, None)
    monkeypatch.setattr(compiler, "_kernel_cache", lambda root: cache)
    for module in (decide, targets):
        monkeypatch.setattr(module, "target_for", lambda device, arch=None: HOPPER)
    graphs = []
    monkeypatch.setattr(backend, "_compile", lambda gm, inputs, patches: graphs.append(gm) or gm.forward)
    yield graphs
    torch._dynamo.reset()
    compiler.clear_failures()


def run(args, **options):
    with torch.no_grad():
        return torch.compile(two_layers, backend="fa4", options={f"fa4.{k}": v for k, v in options.items()})(*args)


def fail_with(error):
    def build(key):
        raise error

    return build


def test_kernels_are_built_and_their_launches_prepared_ahead(monkeypatch):
    built = []
    monkeypatch.setattr(compiler, "_build", lambda key: built.append(key) or print)
    monkeypatch.setattr(launch, "_make_plan", lambda *key: pytest.fail("a plan was made at launch"))
    monkeypatch.setattr(launch, "_launch", lambda plan, q, *rest: (torch.zeros_like(q), q.new_empty(0)))
    assert run(qkv()).count_nonzero() == 0
    assert [key.head_dim for key in built] == [64, 64] and log.counters()["fused"] == 2


def test_the_backward_of_what_trains_is_built_ahead_too(monkeypatch):
    built = []
    monkeypatch.setattr(compiler, "_build", lambda key: built.append(key) or print)
    monkeypatch.setattr(launch, "_launch", lambda plan, q, *rest: (torch.zeros_like(q), torch.zeros(q.shape[:3])))
    f = torch.compile(two_layers, backend="fa4")
    assert f(*(t.requires_grad_() for t in qkv())).requires_grad
    backward = [key for key in built if key.direction == "backward"]
    assert len(backward) == 2 and not any(key.need_lse for key in backward)
    assert len(built) == 4 and all(key.need_lse for key in built if key not in backward)
    assert log.counters()["fused"] == 2


def test_head_dims_that_the_backward_kernel_lacks_train_through_sdpa():
    site = torch.compile(two_layers, backend="fa4")
    assert site(*(t.requires_grad_() for t in qkv(192))).requires_grad
    assert log.counters()["fused"] == 2


def test_a_backward_that_cannot_be_built_leaves_the_site_to_sdpa(monkeypatch, caplog):
    def build(key):
        if key.direction == "backward":
            raise RuntimeError("ptxas")
        return print

    monkeypatch.setattr(compiler, "_build", build)
    args = [t.requires_grad_() for t in qkv()]
    with caplog.at_level(logging.WARNING, logger="fa4_inductor"):
        out = torch.compile(two_layers, backend="fa4")(*args)
    torch.testing.assert_close(out, two_layers(*args), rtol=0.02, atol=0.02)
    assert len(caplog.records) == 1 and log.counters()["fused"] == 2


BREAKAGES = [
    ImportError("no cutlass"),
    AttributeError("cute has no x"),
    TypeError("unexpected argument"),
    OSError("ptxas"),
]


@pytest.mark.parametrize("error", BREAKAGES, ids=lambda e: type(e).__name__)
def test_a_broken_toolchain_falls_back_to_sdpa_with_one_warning(monkeypatch, caplog, on_hopper, error):
    monkeypatch.setattr(compiler, "_build", fail_with(error))
    args = qkv()
    with caplog.at_level(logging.WARNING, logger="fa4_inductor"):
        out = run(args)
    torch.testing.assert_close(out, two_layers(*args), rtol=0.05, atol=0.02)
    assert (
        len(caplog.records) == 1 and type(error).__name__ in caplog.text and "needed nvidia-cutlass-dsl" in caplog.text
    )
    assert log.counters()["fused"] == 2 and on_hopper[0].code.count("scaled_dot_product_attention(") == 2


def test_strict_mode_names_the_unavailable_kernel(monkeypatch):
    monkeypatch.setattr(compiler, "_build", fail_with(TypeError("unexpected argument")))
    with pytest.raises(BackendCompilerFailed, match=r"test_decide.py:\d+: kernel_unavailable: .*TypeError"):
        run(qkv(), strict=True)


def test_a_forced_kernel_that_is_unavailable_has_no_substitute(monkeypatch, on_hopper):
    monkeypatch.setattr(compiler, "_build", fail_with(TypeError("unexpected argument")))
    args = qkv()
    torch.testing.assert_close(run(args, implementation="cute"), two_layers(*args))
    assert log.counters()["declined.kernel_unavailable"] == 2 and "softmax" in on_hopper[0].code


@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_103a", "sm_120a"])
def test_other_gpus_do_not_try_the_kernel(monkeypatch, on_hopper, arch):
    monkeypatch.setattr(decide, "target_for", lambda device, _=None: target_for("cuda", arch))
    monkeypatch.setattr(compiler, "_build", lambda key: pytest.fail("tried to build for another GPU"))
    args = qkv()
    torch.testing.assert_close(run(args), two_layers(*args), rtol=0.05, atol=0.02)
    assert log.counters()["fused"] == 2


def test_a_head_dim_without_kernel_goes_to_sdpa_and_says_so(on_hopper):
    args = qkv(d=72)
    gm = []
    with torch.no_grad():
        torch.compile(two_layers, backend=lambda g, _: gm.append(g) or g.forward)(*args)
    outcomes = [o for p in backend.plan(gm[0], decide.Settings()) for o in p.outcomes]
    assert [o.implementation for o in outcomes] == ["sdpa", "sdpa"] and "unsupported_head_dim" in outcomes[0].detail


def test_a_key_that_cannot_be_made_counts_as_unavailable(monkeypatch):
    def refuse(*args, **options):
        raise KernelUnavailable("no such tile")

    monkeypatch.setattr(compiler, "forward_key", refuse)
    args = qkv()
    torch.testing.assert_close(run(args), two_layers(*args), rtol=0.05, atol=0.02)
    assert log.counters()["fused"] == 2


def with_bias(q, k, v, bias):
    return torch.softmax(q @ k.transpose(2, 3) * 0.125 + bias, dim=-1) @ v


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("seqlen, regular", [(80, True), (77, False)])
def test_what_is_built_ahead_is_what_the_first_launch_takes(monkeypatch, dynamic, seqlen, regular):
    """By the strides of aux tensors, and by the shapes seen while compiling where they are symbolic."""
    built, ready = [], []
    monkeypatch.setattr(compiler, "_build", lambda key: built.append(key) or print)
    monkeypatch.setattr(launch, "_launch", lambda plan, q, *rest: ready.append(plan) or (torch.zeros_like(q), q))
    args = [torch.randn(1, 2, seqlen, 64, dtype=torch.bfloat16) for _ in range(3)]
    bias = torch.randn(1, 2, seqlen, seqlen, dtype=torch.bfloat16)
    with torch.no_grad():
        torch.compile(with_bias, backend="fa4", dynamic=dynamic)(*args, bias)
    (prepared,) = launch._plans
    assert prepared.variant is (Variant.NARROW if regular else Variant.DIRECT) and len(built) == 1
    assert built[0].direction == ("forward" if regular else "split")
    assert prepared.regular == built[0].dense_aux == bool(ready[0].slots.dense) == regular


def packed(q, k, v, ids):
    i = torch.arange(q.shape[2])
    keep = (ids[:, None, :, None] == ids[:, None, None, :]) & (i[:, None] >= i[None])
    for _ in range(2):
        q = F.scaled_dot_product_attention(q, k, v, attn_mask=keep)
    return q


def test_kernels_of_tile_maps_are_built_ahead(monkeypatch):
    """One for both layers, and the attention kernel of the first launch is the one that reads the map."""
    built, ready = [], []
    monkeypatch.setattr(lowering_tile_map, "_MIN_FLOPS", 0)
    monkeypatch.setattr(lowering_tile_map, "_MIN_QUERY_TILES", 1)
    monkeypatch.setattr(variants, "choose_variant", lambda *shapes: (Variant.FORWARD, 1))
    monkeypatch.setattr(decide, "choose_variant", lambda *shapes: (Variant.FORWARD, 1))
    monkeypatch.setattr(compiler, "_build", lambda key: built.append(key) or print)
    monkeypatch.setattr(launch, "_launch", lambda plan, q, *rest: ready.append(plan) or (torch.zeros_like(q), q))
    monkeypatch.setattr(launch, "_make_known", lambda *args: None)
    tile_map.clear_plans()
    q, k, v = (torch.randn(1, 2, 300, 64, dtype=torch.bfloat16) for _ in range(3))
    with torch.no_grad():
        torch.compile(packed, backend="fa4")(q, k, v, torch.arange(300)[None] // 77)
    (plan_key,), (attention,) = tile_map._plans, launch._plans
    assert [key.direction for key in built] == ["forward", "tile_map"] and len(ready) == 2
    assert ready[0].spec.tile_map is not None and attention.program == ready[0].spec.text
    assert (plan_key.tile_m, plan_key.tile_n) == (ready[0].spec.tile_map.tile_m, ready[0].spec.tile_map.tile_n)
    assert plan_key.program == built[1].program and plan_key.regular and built[1].regular_aux
    tile_map.clear_plans()
