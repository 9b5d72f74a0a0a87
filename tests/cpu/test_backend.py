"""The backend: what is fused, forwarded, counted; and that nothing of ours can break a user's model."""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.exc import BackendCompilerFailed, TensorifyScalarRestartAnalysis
from torch.utils.checkpoint import checkpoint

from fa4_inductor import backend, log
from fa4_inductor.rewrite import Splicer

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = {"fa4.implementation": "reference"}


def attention(q, k, v):
    scores = torch.matmul(q, k.transpose(2, 3)) * 0.25
    causal = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
    return torch.matmul(torch.softmax(scores.masked_fill(~causal, float("-inf")), dim=-1), v)


def escaping(q, k, v):
    p = torch.softmax(torch.matmul(q, k.transpose(2, 3)) * 0.25, dim=-1)
    return torch.matmul(p, v), p


def qkv(length=6, **kwargs):
    return [torch.randn(2, 3, length, 8, **kwargs) for _ in range(3)]


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    log.reset_warnings()
    log.counters().clear()
    yield
    torch._dynamo.reset()


@pytest.fixture
def uncompiled(monkeypatch):
    """Graphs run as they are after the rewrite; returns the (graph, patches) seen."""
    seen = []

    def run(gm, example_inputs, patches):
        seen.append((gm, patches))
        return gm.forward

    monkeypatch.setattr(backend, "_compile", run)
    return seen


def compiled(f, options=None, **kwargs):
    return torch.compile(f, backend="fa4", options={**REFERENCE, **(options or {})}, **kwargs)


def ops_in(gm):
    return [n for n in gm.graph.nodes if n.op == "call_function" and "fa4_inductor" in str(n.target)]


def test_under_inductor():
    args = qkv()
    with torch.no_grad():
        out = compiled(lambda q, k, v: attention(q, k, v).transpose(1, 2).flatten(2))(*args)
        torch.testing.assert_close(out, attention(*args).transpose(1, 2).flatten(2))
    assert log.counters() == {"found": 1, "matched": 1, "fused": 1}


@pytest.mark.parametrize("implementation", ["sdpa", "auto"])
def test_sdpa_takes_the_place_of_eager_attention_on_the_cpu(uncompiled, implementation):
    args = qkv()
    with torch.no_grad():
        out = compiled(lambda q, k, v: attention(q, k, v), {"fa4.implementation": implementation})(*args)
        torch.testing.assert_close(out, attention(*args))
    ((gm, _),) = uncompiled
    (call,) = (n for n in gm.graph.nodes if "scaled_dot_product" in str(n.target))
    assert call.kwargs["is_causal"] and "softmax" not in gm.code


def test_a_site_may_feed_the_next_one_directly(uncompiled):
    f = lambda q, k, v: attention(attention(q, k, v), k, attention(v, k, q))
    args = qkv()
    with torch.no_grad():
        torch.testing.assert_close(compiled(f)(*args), f(*args))
    assert log.counters()["fused"] == 3 and "softmax" not in uncompiled[0][0].code


@pytest.mark.parametrize("ambient", [False, True], ids=["in the graph", "around it"])
@pytest.mark.parametrize("implementation", ["sdpa", "reference"])
def test_autocast_changes_nothing_about_rows_without_keys(uncompiled, implementation, ambient):
    def f(q, k, v, mask):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return g(q, k, v, mask)

    def g(q, k, v, mask):
        fill = torch.where(mask[:, None, None, :], 0.0, torch.finfo(q.dtype).min)
        return torch.softmax(q @ k.transpose(2, 3) + fill, -1) @ v

    args = [*qkv(), torch.tensor([[False] * 6, [True] * 4 + [False] * 2])]
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16, enabled=ambient):
        out = compiled(g if ambient else f, {"fa4.implementation": implementation, "fa4.strict": True})(*args)
        want = f(*args)
    assert out.dtype is want.dtype is torch.bfloat16
    torch.testing.assert_close(out, want, rtol=0.02, atol=0.02)


def test_sites_share_one_mask(uncompiled):
    def f(q, k, v, mask):
        fill = torch.where(mask[:, None, None, :], 0.0, torch.finfo(q.dtype).min)
        x = torch.softmax(q @ k.transpose(2, 3) + fill, -1) @ v
        return torch.softmax(x @ k.transpose(2, 3) + fill, -1) @ v

    args = [*qkv(), torch.tensor([[True] * 6, [True] * 4 + [False] * 2])]
    with torch.no_grad():
        torch.testing.assert_close(compiled(f, {"fa4.implementation": "sdpa"})(*args), f(*args))
    calls = [n for n in uncompiled[0][0].graph.nodes if "scaled_dot_product" in str(n.target)]
    assert len(calls) == 2 and calls[0].kwargs["attn_mask"] is calls[1].kwargs["attn_mask"]


def test_dynamic_lengths_share_one_graph(uncompiled):
    f = compiled(attention, dynamic=True, fullgraph=True)
    with torch.no_grad():
        for length in (6, 11, 17):
            args = qkv(length)
            torch.testing.assert_close(f(*args), attention(*args))
    assert len(uncompiled) == 1 and log.counters()["fused"] == 1


def test_several_graphs_and_graph_breaks(uncompiled):
    def f(q, k, v):
        x = attention(q, k, v)
        torch._dynamo.graph_break()
        return attention(x, k, v)

    args = qkv()
    with torch.no_grad():
        torch.testing.assert_close(compiled(f)(*args), f(*args))
    assert log.counters()["fused"] == 2 and len(uncompiled) == 2


def test_sites_inside_checkpointed_bodies(uncompiled):
    def f(q, k, v):
        return checkpoint(attention, q, k, v, use_reentrant=False) + 1

    args = qkv()
    with torch.no_grad():
        torch.testing.assert_close(compiled(f)(*args), f(*args))
    assert log.counters()["fused"] == 1


def test_a_region_without_gradients_inside_training_is_fused(uncompiled):
    def f(q, k, v):
        with torch.no_grad():
            target = attention(q, k, v)
        return (q - target).pow(2).sum()

    args = [t.requires_grad_() for t in qkv()]
    loss = compiled(f)(*args)
    torch.testing.assert_close(torch.autograd.grad(loss, args[0]), torch.autograd.grad(f(*args), args[0]))
    assert log.counters()["fused"] == 1


def test_a_declined_site_runs_as_it_was_and_is_counted(uncompiled):
    args = qkv()
    with torch.no_grad():
        torch.testing.assert_close(compiled(escaping)(*args), escaping(*args))
    assert log.counters()["declined.probs_escape"] == 1 and log.counters()["fused"] == 0


def test_strict_mode_names_the_declined_site(uncompiled):
    with torch.no_grad(), pytest.raises(BackendCompilerFailed, match=r"test_backend.py:\d+: probs_escape"):
        compiled(escaping, {"fa4.strict": True})(*qkv())


def test_strict_mode_accepts_a_fused_graph(uncompiled):
    args = qkv()
    with torch.no_grad():
        torch.testing.assert_close(compiled(attention, {"fa4.strict": True})(*args), attention(*args))


def test_disable(uncompiled):
    with torch.no_grad():
        compiled(attention, {"fa4.disable": True})(*qkv())
    assert not log.counters() and not ops_in(uncompiled[0][0])


def test_an_unknown_option_is_an_error_that_names_the_known_ones():
    with pytest.raises(BackendCompilerFailed, match=r"unknown option 'fa4\.strikt': known are .*fa4\.strict"):
        compiled(attention, {"fa4.strikt": True})(*qkv())


@pytest.mark.parametrize("mode, autotune", [("max-autotune", True), ("reduce-overhead", False), (None, False)])
def test_max_autotune_is_ours_too(uncompiled, monkeypatch, mode, autotune):
    seen = []
    monkeypatch.setattr(backend, "fuse", lambda gm, settings: seen.append(settings.autotune) or [])
    torch.compile(torch.neg, backend="fa4", mode=mode)(torch.ones(2))
    assert seen == [autotune]


def test_mode_and_options_reach_inductor(uncompiled):
    f = lambda x: x + 1
    torch.compile(f, backend="fa4", mode="reduce-overhead")(torch.ones(2))
    torch._dynamo.reset()
    torch.compile(f, backend="fa4", options={"max-autotune": True, "fa4.strict": True})(torch.ones(2))
    torch._dynamo.reset()
    torch.compile(f, backend="fa4")(torch.ones(2))
    assert [patches for _, patches in uncompiled] == [{"triton.cudagraphs": True}, {"max_autotune": True}, {}]


def raising(error):
    def fail(*args, **kwargs):
        raise error

    return fail


@pytest.mark.parametrize("where", ["find_sites", "decide", "_splice"])
def test_a_bug_of_ours_leaves_the_graph_as_it_was_with_one_warning(uncompiled, monkeypatch, caplog, where):
    monkeypatch.setattr(backend, where, raising(ZeroDivisionError("bug")))
    args = qkv()
    with torch.no_grad(), caplog.at_level(logging.WARNING, logger="fa4_inductor"):
        torch.testing.assert_close(compiled(attention)(*args), attention(*args))
        torch.testing.assert_close(compiled(lambda *a: attention(*a) + 1)(*args), attention(*args) + 1)
    assert [r.levelname for r in caplog.records] == ["WARNING"] and "ZeroDivisionError" in caplog.text
    assert log.counters()["declined.internal_error"] == 2 and not ops_in(uncompiled[0][0])


def test_a_bug_of_ours_is_an_error_in_strict_mode(uncompiled, monkeypatch):
    monkeypatch.setattr(backend, "find_sites", raising(ZeroDivisionError("bug")))
    with pytest.raises(BackendCompilerFailed, match="ZeroDivisionError"):
        compiled(attention, {"fa4.strict": True})(*qkv())


def test_a_half_done_rewrite_is_undone(uncompiled, monkeypatch):
    splice = backend._splice

    def splice_then_fail(plan, settings):
        splice(plan, settings)
        raise ZeroDivisionError("bug")

    monkeypatch.setattr(backend, "_splice", splice_then_fail)
    args = qkv()
    with torch.no_grad():
        torch.testing.assert_close(compiled(attention)(*args), attention(*args))
    (gm, _) = uncompiled[0]
    assert not ops_in(gm) and "softmax" in gm.code


def test_a_site_whose_rewrite_fails_does_not_take_the_others_along(uncompiled, monkeypatch, caplog):
    replace, calls = Splicer.replace, []

    def fails_once(self, part):
        calls.append(part)
        replace(self, part if len(calls) > 1 else (part[0], raising(ZeroDivisionError("bug"))))

    monkeypatch.setattr(Splicer, "replace", fails_once)
    f = lambda q, k, v: attention(attention(q, k, v), k, v)
    args = qkv()
    with torch.no_grad(), caplog.at_level(logging.WARNING, logger="fa4_inductor"):
        torch.testing.assert_close(compiled(f)(*args), f(*args))
    assert len(calls) == 2 and log.counters()["fused"] == 1 and log.counters()["declined.internal_error"] == 1
    assert len(caplog.records) == 1 and "ZeroDivisionError" in caplog.text


def test_a_rewrite_that_inductor_cannot_compile_is_undone(monkeypatch, caplog):
    attempts = []

    def fails_on_our_op(gm, example_inputs, patches):
        attempts.append(len(ops_in(gm)))
        if ops_in(gm):
            raise RuntimeError("lowering failed")
        return gm.forward

    monkeypatch.setattr(backend, "_compile", fails_on_our_op)
    args = qkv()
    with torch.no_grad(), caplog.at_level(logging.WARNING, logger="fa4_inductor"):
        torch.testing.assert_close(compiled(attention)(*args), attention(*args))
    assert attempts == [1, 0] and "lowering failed" in caplog.text


def test_inductor_compiles_the_graph_that_was_put_back(monkeypatch):
    compile_fx, attempts = backend._compile, []

    def fails_once(*args):
        attempts.append(args)
        return raising(RuntimeError("out of disk"))() if len(attempts) == 1 else compile_fx(*args)

    monkeypatch.setattr(backend, "_compile", fails_once)
    args = qkv()
    with torch.no_grad():
        torch.testing.assert_close(compiled(attention)(*args), attention(*args))
    assert len(attempts) == 2


def test_an_error_of_the_users_graph_stays_theirs(monkeypatch, caplog):
    monkeypatch.setattr(backend, "_compile", raising(RuntimeError("the user's op is broken")))
    broken = pytest.raises(BackendCompilerFailed, match="the user's op is broken")
    with torch.no_grad(), caplog.at_level(logging.WARNING, logger="fa4_inductor"), broken:
        compiled(attention)(*qkv())
    assert not caplog.records


@pytest.mark.parametrize("where", ["find_sites", "_compile"])
def test_dynamos_restarts_pass_through(monkeypatch, where):
    monkeypatch.setattr(backend, where, raising(TensorifyScalarRestartAnalysis()))
    gm = torch.fx.symbolic_trace(lambda x: x + 1)
    with pytest.raises(TensorifyScalarRestartAnalysis):
        backend.fa4(gm, [torch.ones(2)])


def test_dropout_in_training_is_a_reason_not_a_crash(uncompiled):
    def f(q, k, v):
        p = F.dropout(torch.softmax(torch.matmul(q, k.transpose(2, 3)), dim=-1), 0.5, True)
        return torch.matmul(p, v)

    with torch.no_grad():
        compiled(f)(*qkv())
    assert log.counters()["declined.dropout"] == 1


def test_importing_the_backend_does_not_import_cutlass():
    code = "import sys, fa4_inductor.backend; sys.exit('cutlass' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=120, check=True)


def test_a_dynamo_reset_reaches_inductors_cuda_graphs(monkeypatch, uncompiled):
    calls = []
    monkeypatch.setattr("torch._inductor.cudagraph_trees.reset_cudagraph_trees", lambda: calls.append(1))
    torch.compile(lambda x: x + 1, backend="fa4")(torch.ones(2))
    torch._dynamo.reset()
    assert calls


def test_inference_mode(uncompiled):
    args = qkv()
    with torch.inference_mode():
        torch.testing.assert_close(compiled(attention)(*args), attention(*args))
    assert log.counters()["fused"] == 1


_PROCESS = """
import json, sys, torch
sys.path.insert(0, "tests/cpu")
from test_backend import attention, compiled, qkv
from torch._dynamo.utils import counters
f = compiled(lambda q, k, v: attention(q, k, v).sum(1))
with torch.no_grad():
    f(*qkv())
names = {"fx": "inductor", "aot": "aot_autograd", "fa4": "fa4"}
print(json.dumps({short: dict(counters[name]) for short, name in names.items()}))
"""


def test_a_second_process_finds_inductors_caches_warm(tmp_path):
    def run():
        env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-c", _PROCESS]
        done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    first, second = run(), run()
    assert first["fx"]["fxgraph_cache_miss"] == 1 and first["fa4"]["fused"] == second["fa4"]["fused"] == 1
    assert second["fx"]["fxgraph_cache_hit"] == 1 and second["aot"]["autograd_cache_hit"] == 1
