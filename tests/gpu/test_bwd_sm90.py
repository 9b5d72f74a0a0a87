"""The backward kernel on a Hopper GPU, behind the op: gradients against fp32, and against what eager loses."""

import pytest
import torch

from fa4_inductor.kernels.contract import widened
from fa4_inductor.kernels.reference import attention_reference
from fa4_inductor.kernels.reference_backward import backward_reference
from fa4_inductor.lowering import backward_config
from fa4_inductor.runtime import launch
from fa4_inductor.runtime.ops import ATTENTION, ATTENTION_WITH_LSE
from fa4_inductor.spec import AttentionSpec, AuxSpec, EmptyRow, parse_expr
from fa4_inductor.spec.interpret import Env, evaluate, grid

_AUX = (AuxSpec("bfloat16", 3), AuxSpec("bool", 2), AuxSpec("float32", 1), AuxSpec("int32", 2))


def spec(score="score", keep="True", sink=None, scale=0.125, **rest):
    programs = {"score": parse_expr(score, _AUX), "keep": parse_expr(keep, _AUX)}
    return AttentionSpec(scale, **programs, sink=sink and parse_expr(sink, _AUX), aux=_AUX, num_sizes=1, **rest)


SPECS = {
    "plain": spec(),
    "causal": spec(keep="kv_idx <= q_idx"),
    "bottom_right": spec(keep="kv_idx <= q_idx + seqlen_k - seqlen_q"),
    "softcap": spec("20.0 * tanh(score * 0.05)", "kv_idx <= q_idx"),
    "bent": spec("where(score > 0.1, score * score, 0.3 * score)"),
    "scaled": spec("score * -0.7 + aux2[h]"),
    "bias": spec("score + aux0[h, q_idx, kv_idx]"),
    "alibi": spec("score + aux2[h] * float(kv_idx - q_idx)", "kv_idx <= q_idx"),
    "padding": spec(keep="aux1[b, kv_idx] & (kv_idx <= q_idx)"),
    "window": spec(keep="(kv_idx <= q_idx) & (kv_idx > q_idx - size0)"),
    "documents": spec(keep="(kv_idx <= q_idx) & (aux3[b, kv_idx] == aux3[b, q_idx])"),
    "sink": spec(keep="kv_idx <= q_idx", sink="aux2[h]"),
    "empty_zero": spec(keep="kv_idx < q_idx"),
    "empty_mean": spec(keep="kv_idx < q_idx - 3", empty_row=EmptyRow.MEAN),
}


@pytest.fixture(autouse=True)
def strict(monkeypatch):
    """Or a kernel that cannot run would be replaced by the reference it is compared with."""
    monkeypatch.setenv("FA4_INDUCTOR_STRICT", "1")
    monkeypatch.setenv(backward_config.ENABLED_BY, "1")
    launch.clear_plans()
    torch.manual_seed(5)


def operands(b, hq, hkv, sq, sk, d, dtype, kv_batch=None):
    def make(batch, heads, length):
        return torch.randn(batch, length, heads, d, device="cuda", dtype=dtype).transpose(1, 2).requires_grad_()

    keep = torch.rand(b, sk, device="cuda") < 0.8
    keep[:, 0] = True
    documents = (torch.arange(max(sq, sk), device="cuda") // 50).expand(b, -1).to(torch.int32).contiguous()
    bias = torch.randn(hq, sq, sk, device="cuda", dtype=torch.bfloat16)
    aux = [bias, keep, torch.rand(hq, device="cuda") * 0.2, documents]
    kv_batch = kv_batch or b
    return make(b, hq, sq), make(kv_batch, hkv, sk), make(kv_batch, hkv, sk), aux


def eager(q, k, v, aux, program, sizes):
    """Attention as a model would write it: products in q's dtype, softmax in fp32."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = (q @ k.transpose(2, 3)).float() * program.softmax_scale
    names = {**grid(*q.shape[:3], k.shape[2], device=q.device), "size0": sizes[0], "score": scores}
    env = Env(names, [widened(t, a.kind) for t, a in zip(aux, program.aux, strict=True)])
    keep = torch.as_tensor(evaluate(program.keep, env), device=q.device)
    logits = evaluate(program.score, env).masked_fill(~keep, -1e30)
    if program.sink is not None:
        sink = evaluate(program.sink, env).expand(*logits.shape[:3], 1)
        return torch.softmax(torch.cat([logits, sink], -1), -1)[..., :-1].to(q.dtype) @ v
    return torch.softmax(logits, -1).to(q.dtype) @ v


def check(name, shape, d=64, dtype=torch.bfloat16, grad_lse=False, kv_batch=None):
    program, sizes = SPECS[name], (100,)
    q, k, v, aux = operands(*shape, d, dtype, kv_batch)
    args = (q, k, v, aux, program.text, list(sizes), "cute")
    grad_out = torch.randn(q.shape, device="cuda", dtype=dtype)
    if grad_lse:
        out, lse = ATTENTION_WITH_LSE(*args)
        d_lse = torch.randn_like(lse).masked_fill(lse == -torch.inf, 0.0)
        got = torch.autograd.grad((out, lse), (q, k, v), (grad_out, d_lse))
    else:
        d_lse = None
        got = torch.autograd.grad(ATTENTION(*args), (q, k, v), grad_out)
    q32, k32, v32 = (t.detach().float() for t in (q, k, v))
    out32, lse32 = attention_reference(q32, k32, v32, aux, program, sizes, need_lse=True)
    rest = (q32, k32, v32, out32, lse32, aux, program, sizes)
    want = backward_reference(grad_out.float(), d_lse, *rest)
    if grad_lse or name.startswith("empty"):
        losses = [0.0, 0.0, 0.0]
    else:
        theirs = torch.autograd.grad(eager(q, k, v, aux, program, sizes), (q, k, v), grad_out)
        losses = [(t.float() - w).abs().max().item() for t, w in zip(theirs, want, strict=True)]
    for gradient, truth, loss, operand in zip(got, want, losses, (q, k, v), strict=True):
        assert gradient.shape == operand.shape and gradient.dtype is dtype
        error, scale = (gradient.float() - truth).abs().max().item(), truth.abs().max().item()
        assert error <= max(2 * loss, 1e-2 * scale), (error, loss, scale)
        assert bool(gradient.isfinite().all())


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("name", SPECS)
def test_programs(name, d):
    check(name, (2, 4, 2, 200, 333 if name in ("plain", "bottom_right", "bent") else 200), d)


@pytest.mark.parametrize(
    "shape",
    [
        (1, 1, 1, 1, 1),
        (1, 2, 2, 1, 77),
        (2, 1, 1, 300, 64),
        (1, 8, 1, 129, 257),
        (3, 6, 2, 64, 128),
        (1, 2, 1, 1000, 1000),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_shapes(shape, dtype):
    check("plain", shape, 128, dtype)


@pytest.mark.parametrize("shape", [(1, 16, 2, 300, 300), (1, 12, 4, 200, 200), (2, 6, 1, 130, 260)])
def test_query_heads_of_few_key_heads_are_split(shape):
    check("causal", shape, 128)


def test_gradients_of_the_log_sum_exp():
    check("softcap", (2, 4, 2, 130, 130), grad_lse=True)


def test_keys_that_the_batch_shares():
    check("plain", (3, 4, 2, 100, 150), kv_batch=1)


def test_any_strides_and_an_expanded_grad_out():
    q, k, v, aux = operands(2, 4, 2, 90, 90, 64, torch.bfloat16)
    text = SPECS["causal"].text
    strange = [t.detach().transpose(2, 3).contiguous().transpose(2, 3).requires_grad_() for t in (q, k, v)]
    got = torch.autograd.grad(ATTENTION(*strange, aux, text, [0], "cute").sum(), strange)
    want = torch.autograd.grad(ATTENTION(q, k, v, aux, text, [0], "cute").sum(), (q, k, v))
    for a, b in zip(got[1:], want[1:], strict=True):
        assert torch.equal(a, b)
    torch.testing.assert_close(got[0], want[0], rtol=0.02, atol=0.02)  # the order of additions into dQ is not fixed


@pytest.mark.parametrize("name", ["plain", "causal", "window", "padding"])
@pytest.mark.parametrize("d", [64, 96, 128])
def test_deterministic_gradients_are_the_same_bits_every_time(name, d):
    q, k, v, aux = operands(2, 8, 2, 700, 700, d, torch.bfloat16)
    grad_out = torch.randn(q.shape, device="cuda", dtype=q.dtype)
    runs = []
    torch.use_deterministic_algorithms(True)
    try:
        for _ in range(20):
            out = ATTENTION(q, k, v, aux, SPECS[name].text, [100], "cute")
            runs.append(torch.autograd.grad(out, (q, k, v), grad_out))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(runs[0], run, strict=True))
    once = torch.autograd.grad(ATTENTION(q, k, v, aux, SPECS[name].text, [100], "cute"), (q, k, v), grad_out)
    assert torch.equal(runs[0][1], once[1]) and torch.equal(runs[0][2], once[2])
    torch.testing.assert_close(runs[0][0], once[0], rtol=0.02, atol=0.02)


@pytest.mark.parametrize("shape", [(0, 5, 7), (2, 0, 7), (2, 5, 0)])
def test_nothing_to_attend(shape):
    batch, sq, sk = shape
    q, k, v, aux = (
        operands(batch, 2, 2, sq, sk, 64, torch.bfloat16) if sk else operands(batch, 2, 2, sq, 1, 64, torch.bfloat16)
    )
    k, v = (t[:, :, :sk].detach().requires_grad_() for t in (k, v))
    out = ATTENTION(q, k, v, aux, SPECS["plain"].text, [0], "cute")
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    assert not any(g.count_nonzero() for g in grads)


def test_memory_is_linear_in_the_length():
    peaks = []
    for length in (1024, 4096):
        q, k, v, _ = operands(1, 4, 4, length, length, 64, torch.bfloat16)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        program = AttentionSpec(0.125, keep=parse_expr("kv_idx <= q_idx"))
        ATTENTION(q, k, v, [], program.text, [], "cute").sum().backward()
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[1] < 5 * peaks[0], peaks
