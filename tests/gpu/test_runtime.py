"""The op on a Hopper GPU: every operand layout, streams, CUDA graphs, empty problems, the disk cache, host time."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fa4_inductor import log
from fa4_inductor.runtime import launch
from fa4_inductor.runtime.ops import ATTENTION
from fa4_inductor.spec import AttentionSpec, AuxSpec, EmptyRow, parse_expr

ROOT = Path(__file__).resolve().parents[2]
_AUX = (AuxSpec("bool", 2),)
PLAIN = AttentionSpec(0.125)
CAUSAL = AttentionSpec(0.125, keep=parse_expr("kv_idx <= q_idx"), empty_row=EmptyRow.NAN)
PADDED = {
    rule: AttentionSpec(0.125, keep=parse_expr("aux0[b, kv_idx]", _AUX), aux=_AUX, empty_row=rule) for rule in EmptyRow
}
SIZED = AttentionSpec(0.125, keep=parse_expr("kv_idx < size0"), num_sizes=1)


@pytest.fixture(autouse=True)
def strict_and_without_gradients(monkeypatch):
    """Strict, or a kernel that cannot run would be replaced by the reference it is compared with."""
    monkeypatch.setenv("FA4_INDUCTOR_STRICT", "1")
    launch.clear_plans()
    with torch.no_grad():
        yield


def qkv(b=2, hq=4, hkv=2, sq=77, sk=131, d=64, dv=64, dtype=torch.bfloat16):
    make = lambda h, s, width: torch.randn(b, s, h, width, device="cuda", dtype=dtype).transpose(1, 2)
    return make(hq, sq, d), make(hkv, sk, d), make(hkv, sk, dv)


def padding(b=2, sk=131):
    mask = torch.rand(b, sk, device="cuda") > 0.3
    mask[0] = False  # a whole batch of empty rows
    return mask


def check(q, k, v, aux, spec, sizes=(), need_lse=True):
    """cute against the fp32 reference: error at most twice that of rounding the reference, NaN in the same places."""
    args = (aux, spec.text, list(sizes))
    out, lse = torch.ops.fa4_inductor._forward(q, k, v, *args, "cute", need_lse)
    want, want_lse = torch.ops.fa4_inductor._forward(q.float(), k.float(), v.float(), *args, "reference", need_lse)
    assert out.shape == want.shape and out.dtype is q.dtype
    assert out.transpose(1, 2).is_contiguous() and want.transpose(1, 2).is_contiguous()
    band = (want.to(q.dtype).float() - want).abs().nan_to_num().max().item() if want.numel() else 0.0
    scale = want.abs().nan_to_num().max().item() if want.numel() else 0.0
    torch.testing.assert_close(out.float(), want, rtol=0, atol=2 * band + 4e-3 * max(scale, 1e-3), equal_nan=True)
    torch.testing.assert_close(lse, want_lse, rtol=0, atol=2e-2, equal_nan=True)
    return out


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("need_lse", [False, True], ids=["out", "out and lse"])
def test_plain_and_causal(dtype, need_lse):
    for spec in (PLAIN, CAUSAL):
        check(*qkv(dtype=dtype), [], spec, need_lse=need_lse)
    check(*qkv(dtype=dtype), [], SIZED, [97], need_lse=need_lse)


@pytest.mark.parametrize("rule", list(EmptyRow), ids=lambda r: r.value)
def test_rows_without_keys(rule):
    check(*qkv(), [padding()], PADDED[rule])


LAYOUTS = {
    "bhsd": lambda t: t.contiguous(),
    "packed": lambda t: torch.stack([t, t], 3).flatten(3)[..., :64],
    "odd row stride": lambda t: torch.nn.functional.pad(t, (0, 1))[..., :64],
    "odd address": lambda t: torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape),
    "transposed": lambda t: t.transpose(2, 3).contiguous().transpose(2, 3),
    "reversed heads": lambda t: t.permute(1, 0, 2, 3).contiguous().permute(1, 0, 2, 3),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_operand_layouts(name):
    change = LAYOUTS[name]
    q, k, v = qkv()
    check(change(q), change(k), change(v), [], CAUSAL)


def test_broadcast_keys_and_values():
    q, k, v = qkv()
    check(q, k[:1], v[:1], [], CAUSAL)
    check(q, k[:1].expand(2, -1, -1, -1), v[:, :, :1].expand(-1, -1, 131, -1), [], CAUSAL)
    check(q, k[:1], v[:1], [padding()], PADDED[EmptyRow.MEAN])


@pytest.mark.parametrize(
    "shape", [{"sk": 0}, {"sq": 0}, {"b": 0}, {"sq": 1, "sk": 1}, {"b": 1, "hq": 2, "hkv": 1}], ids=str
)
def test_small_and_empty_problems(shape):
    for spec in (PLAIN, CAUSAL):
        check(*qkv(**shape), [], spec)


def test_a_zero_dim_aux_on_the_cpu_is_moved():
    spec = AttentionSpec(
        0.125, keep=parse_expr("kv_idx < aux0[()]", (AuxSpec("int64", 0),)), aux=(AuxSpec("int64", 0),)
    )
    check(*qkv(), [torch.tensor(50)], spec)


def test_the_current_stream_is_used():
    q, k, v = qkv(sq=2048, sk=2048)
    want = ATTENTION(q, k, v, [], CAUSAL.text, [], "cute")
    stream = torch.cuda.Stream()
    late = torch.zeros_like(q)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # whoever does not wait for this stream reads zeros
        late.copy_(q)
        got = ATTENTION(late, k, v, [], CAUSAL.text, [], "cute")
    stream.synchronize()
    assert torch.equal(got, want)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_device_that_is_not_the_current_one():
    q, k, v = (t.to("cuda:1") for t in qkv())
    assert torch.cuda.current_device() == 0
    check(q, k, v, [], CAUSAL)
    assert torch.cuda.current_device() == 0


def test_cuda_graph_capture_and_replay():
    q, k, v = qkv()
    mask = padding()
    spec = PADDED[EmptyRow.MEAN]
    for _ in range(2):
        ATTENTION(q, k, v, [mask], spec.text, [], "cute")
    torch.cuda.synchronize()
    compiled = log.counters()["kernel_compiles"]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = ATTENTION(q, k, v, [mask], spec.text, [], "cute")
    for _ in range(3):
        for t in (q, k, v):
            t.normal_()
        mask.copy_(padding())
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, ATTENTION(q, k, v, [mask], spec.text, [], "cute"))
    assert log.counters()["kernel_compiles"] == compiled


def test_few_kernels_serve_all_lengths_and_batches():
    """By the shapes of a launch: one query row, short sequences, sequences of few heads, and all others."""
    before = log.counters()["kernel_compiles"]
    for b, sq, sk in ((1, 1, 513), (3, 64, 64), (2, 300, 17), (5, 129, 1024), (20, 200, 300), (1, 1, 700)):
        check(*qkv(b=b, sq=sq, sk=sk, d=128, dv=128), [], CAUSAL)
    assert log.counters()["kernel_compiles"] - before <= 4


_PROCESS = """
import json, torch
from fa4_inductor import log
from fa4_inductor.runtime.ops import ATTENTION
from fa4_inductor.spec import AttentionSpec, parse_expr
spec = AttentionSpec(0.125, keep=parse_expr("kv_idx <= q_idx + 3"))
torch.manual_seed(0)
q, k, v = (torch.randn(1, 2, 100, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
with torch.no_grad():
    out = ATTENTION(q, k, v, [], spec.text, [], "cute")
    want = ATTENTION(q, k, v, [], spec.text, [], "reference")
print(json.dumps({"error": (out - want).abs().max().item(), **log.counters()}))
"""


def test_a_second_process_compiles_nothing_and_computes_the_same(tmp_path):
    def run():
        path = os.pathsep.join([str(ROOT), *sys.path])
        env = {**os.environ, "FA4_INDUCTOR_CACHE_DIR": str(tmp_path), "PYTHONPATH": path}
        done = subprocess.run([sys.executable, "-c", _PROCESS], env=env, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    first, second = run(), run()
    assert first["kernel_compiles"] == 1 and second["kernel_cache_hits"] == 1 and "kernel_compiles" not in second
    assert first["error"] == second["error"] < 0.02
