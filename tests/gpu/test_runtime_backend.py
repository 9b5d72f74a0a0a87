"""The backend on a Hopper GPU: our kernel under CUDA graphs, with changing inputs and lengths, compiled once."""

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from fa4_inductor import log, measure, model_zoo
from fa4_inductor.lowering.split_config import Variant
from fa4_inductor.runtime import launch, tuning

STRICT = {"fa4.implementation": "cute", "fa4.strict": True}


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    log.counters().clear()
    with torch.no_grad():
        yield
    torch._dynamo.reset()


def padded(q, k, v, mask):
    """Eager attention with a key padding mask, as models spell it."""
    scores = torch.matmul(q, k.transpose(2, 3)) * 0.125
    scores = scores + (1.0 - mask[:, None, None, :].to(q.dtype)) * torch.finfo(q.dtype).min
    return torch.matmul(torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype), v)


def inputs(length=200, seed=0):
    torch.manual_seed(seed)
    q, k, v = (torch.randn(2, 4, length, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    mask = torch.ones(2, length, device="cuda", dtype=torch.int64)
    mask[0, : length // 3] = 0
    return q, k, v, mask


def close(got, args):
    """At most twice the error of eager in the same dtype, against fp64."""
    exact = padded(*(t.double() for t in args[:3]), args[3])
    eager = padded(*args)
    bound = 2 * (eager.double() - exact).abs().max() + 2**-8 * exact.abs().max()
    assert (got.double() - exact).abs().max() <= bound


def test_reduce_overhead_replays_with_changing_inputs():
    options = {**STRICT, "triton.cudagraphs": True}
    compiled = torch.compile(padded, backend="fa4", options=options)
    for step in range(10):
        args = inputs(seed=step)
        torch.compiler.cudagraph_mark_step_begin()
        close(compiled(*args).clone(), args)
        if step == 0:
            built = log.counters()["kernel_compiles"] + log.counters()["kernel_cache_hits"]
    assert log.counters()["fused"] == 1
    assert log.counters()["kernel_compiles"] + log.counters()["kernel_cache_hits"] == built == 1
    assert torch._dynamo.utils.counters["inductor"]["cudagraph_skips"] == 0


def test_mode_reduce_overhead():
    compiled = torch.compile(padded, backend="fa4", mode="reduce-overhead")
    for step in range(4):
        args = inputs(seed=step)
        torch.compiler.cudagraph_mark_step_begin()
        close(compiled(*args).clone(), args)
    assert log.counters()["fused"] == 1


def test_max_autotune_times_the_candidates_once(tmp_path, monkeypatch):
    monkeypatch.setenv("FA4_INDUCTOR_CACHE_DIR", str(tmp_path))
    args = inputs(length=700)
    for _ in range(2):  # the second time as in another process
        launch.clear_plans()
        tuning.forget()
        torch._dynamo.reset()
        compiled = torch.compile(padded, backend="fa4", mode="max-autotune-no-cudagraphs")
        for _ in range(2):
            close(compiled(*args), args)
        assert log.counters()["kernels_tuned"] == 1
    assert len(list((tmp_path / "tuned").iterdir())) == 1


def test_dynamic_lengths_use_few_kernels():
    compiled = torch.compile(padded, backend="fa4", options=STRICT, dynamic=True)
    built = []
    for length in (200, 77, 513, 1024, 201, 78, 514, 1023):
        args = inputs(length)
        close(compiled(*args), args)
        built.append(log.counters()["kernel_compiles"] + log.counters()["kernel_cache_hits"])
    # None at all where an earlier test of this process left the kernels in memory.
    assert built[3] <= len(Variant) and built[4:] == built[3:4] * 4
    assert log.counters()["fused"] == 1


def test_lengths_as_zero_dim_tensors_do_not_recompile():
    def f(q, k, v, used):
        keep = torch.arange(k.shape[2], device=k.device) < used
        scores = (q @ k.transpose(2, 3) * 0.125).masked_fill(~keep, torch.finfo(q.dtype).min)
        return torch.softmax(scores, -1) @ v

    compiled = torch.compile(f, backend="fa4", options=STRICT)
    q, k, v, _ = inputs()
    for step in range(20):
        used = torch.tensor(10 + 7 * step, device="cuda")
        torch.testing.assert_close(compiled(q, k, v, used), f(q, k, v, used), rtol=0, atol=2e-2)
    assert log.counters()["kernel_compiles"] + log.counters()["kernel_cache_hits"] == 1
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_programs_that_differ_in_a_constant_or_a_captured_tensor_are_not_mixed_up():
    def make(slope):
        return lambda score, b, h, q_idx, kv_idx: score + slope * (kv_idx - q_idx)

    q, k, v, _ = inputs()
    f = lambda q, k, v, mod: flex_attention(q, k, v, score_mod=mod, scale=0.125)
    compiled = torch.compile(f, backend="fa4", options=STRICT)
    for slope in (0.0, -0.1, -0.5, torch.tensor(-0.25, device="cuda"), torch.tensor(-1.0, device="cuda")):
        want = f(q.float(), k.float(), v.float(), make(slope))
        torch.testing.assert_close(compiled(q, k, v, make(slope)).float(), want, rtol=0, atol=2e-2)


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_a_model_under_reduce_overhead(name):
    case = model_zoo.build(name, "eager", dtype=torch.bfloat16, device="cuda")
    compiled = torch.compile(case.model, backend="fa4", options={**STRICT, "triton.cudagraphs": True})
    exact = case.in_double().run()
    for _ in range(3):
        torch.compiler.cudagraph_mark_step_begin()
        error = measure.compare(case.run(compiled).clone(), case.run(), exact)
        assert error.ok, error
    assert log.counters()["fused"] == case.sites
