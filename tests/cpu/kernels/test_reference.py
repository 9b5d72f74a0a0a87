"""The oracle itself, against torch's own operators and against hand-made cases."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fa4_inductor.kernels import reference
from fa4_inductor.kernels.reference import attention_reference
from fa4_inductor.spec import parse_spec


def spec_of(score="score", keep="True", *, aux="", sizes=0, scale=0.25, sink=None, empty_row="zero"):
    sink_text = f"; sink={sink}" if sink else ""
    return parse_spec(
        f"fa4/1; aux={aux}; sizes={sizes}; scale={scale}; score={score}; keep={keep}{sink_text}; empty_row={empty_row}"
    )


def qkv(b=2, hq=4, hkv=2, sq=7, sk=9, d=16, dv=8, dtype=torch.float32):
    g = torch.Generator().manual_seed(0)
    make = lambda *s: torch.randn(*s, generator=g).to(dtype)
    return make(b, hq, sq, d), make(b, hkv, sk, d), make(b, hkv, sk, dv)


def run(operands, spec, aux=(), sizes=(), **kw):
    return attention_reference(*operands, aux, spec, sizes, **kw)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_plain_gqa_matches_sdpa(dtype):
    q, k, v = qkv(dtype=dtype)
    out, lse = run((q, k, v), spec_of(), need_lse=True, dtype=torch.float64)
    want = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), scale=0.25, enable_gqa=True)
    torch.testing.assert_close(out, want.to(dtype))
    assert out.dtype == dtype and out.transpose(1, 2).is_contiguous()
    scores = q.double() @ k.double().repeat_interleave(2, 1).mT * 0.25
    torch.testing.assert_close(lse, scores.logsumexp(-1))


def test_no_lse_is_the_empty_tensor():
    assert run(qkv(), spec_of())[1].shape == (0,)


def test_batch_one_keys_are_shared():
    q, k, v = qkv()
    out, _ = run((q, k[:1], v[:1]), spec_of(keep="kv_idx <= q_idx"))
    want, _ = run((q, k[:1].expand(2, -1, -1, -1), v[:1].expand(2, -1, -1, -1)), spec_of(keep="kv_idx <= q_idx"))
    torch.testing.assert_close(out, want)


def test_chunks_do_not_change_the_result(monkeypatch):
    operands, bias = qkv(), torch.randn(4, 7, 9)
    spec = spec_of("score + aux0[h, q_idx, kv_idx]", "kv_idx <= q_idx + size0", aux="float32[3]", sizes=1)
    whole = run(operands, spec, [bias], [1], need_lse=True)
    monkeypatch.setattr(reference, "_MAX_SCORES", 2 * 9 * 3)
    parts = run(operands, spec, [bias], [1], need_lse=True)
    for a, b in zip(whole, parts):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("contract", ["zero", "nan", "mean"])
def test_empty_rows(contract):
    q, k, v = qkv(hkv=4)
    out, lse = run((q, k, v), spec_of(keep="q_idx < 4", empty_row=contract), need_lse=True)
    mask = (torch.arange(7) < 4)[:, None].expand(7, 9)
    scores = q @ k.mT * 0.25
    if contract == "zero":
        want = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.25)
    else:
        fill = float("-inf") if contract == "nan" else torch.finfo(torch.float32).min
        want = scores.masked_fill(~mask, fill).softmax(-1) @ v
    torch.testing.assert_close(out, want, equal_nan=True)
    assert torch.all(lse[:, :, 4:] == -torch.inf) and torch.all(lse[:, :, :4].isfinite())


@pytest.mark.parametrize("contract", ["zero", "nan", "mean"])
def test_a_row_of_minus_infinity_is_an_empty_row(contract):
    q, k, v = qkv(hkv=4)
    bias = torch.zeros(7, 9)
    bias[3], bias[4, :5] = -torch.inf, -torch.inf
    out, lse = run(
        (q, k, v), spec_of("score + aux0[q_idx, kv_idx]", aux="float32[2]", empty_row=contract), [bias], need_lse=True
    )
    want = (q @ k.mT * 0.25 + bias).softmax(-1) @ v  # NaN in row 3
    fill = {"zero": 0.0, "nan": torch.nan, "mean": v.mean(-2)}[contract]
    want[:, :, 3] = torch.as_tensor(fill)
    torch.testing.assert_close(out, want, equal_nan=True)
    assert torch.all(lse[:, :, 3] == -torch.inf)


def test_sink_is_an_extra_column_and_saves_empty_rows():
    q, k, v = qkv(hkv=4)
    logits = torch.randn(4)
    out, lse = run((q, k, v), spec_of(keep="q_idx < 4", aux="float32[1]", sink="aux0[h]"), [logits], need_lse=True)
    mask = (torch.arange(7) < 4)[:, None]
    scores = (q @ k.mT * 0.25).masked_fill(~mask, -torch.inf)
    full = torch.cat([scores, logits.view(1, 4, 1, 1).expand(2, 4, 7, 1)], -1)
    torch.testing.assert_close(out, full.softmax(-1)[..., :-1] @ v)
    torch.testing.assert_close(lse, full.logsumexp(-1))
    assert torch.all(out[:, :, 4:] == 0)


@pytest.mark.parametrize("shape", [{"sk": 0}, {"sq": 0}, {"b": 0}, {"sk": 0, "sq": 1}])
@pytest.mark.parametrize("contract", ["zero", "nan", "mean"])
def test_zero_sizes(shape, contract):
    q, k, v = qkv(**shape)
    out, lse = run((q, k, v), spec_of(keep="kv_idx <= q_idx", empty_row=contract), need_lse=True)
    assert out.shape == (*q.shape[:3], 8) and lse.shape == q.shape[:3]
    assert torch.all(out == 0) and torch.all(lse == -torch.inf)


@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), -float("inf")])
def test_garbage_in_dropped_keys_does_not_leak(garbage):
    q, k, v = qkv(hkv=4)
    clean, _ = run((q, k, v), spec_of(keep="kv_idx <= q_idx"))
    k[:, :, 5], v[:, :, 5] = garbage, garbage
    out, _ = run((q, k, v), spec_of(keep="kv_idx <= q_idx"))
    torch.testing.assert_close(out[:, :, :5], clean[:, :, :5])
    assert not out[:, :, 5:].isfinite().any()  # rows that do keep key 5 see it


def test_half_aux_is_used_at_full_width():
    operands = qkv()
    bias = torch.full((1,), 1 / 3, dtype=torch.bfloat16)
    spec = spec_of("score + aux0[0] * aux0[0] * aux0[0]", aux="bfloat16[1]")
    want = spec_of("score + aux0[0] * aux0[0] * aux0[0]", aux="float64[1]")
    a, _ = run(operands, spec, [bias], dtype=torch.float64, need_lse=True)
    b, _ = run(operands, want, [bias.double()], dtype=torch.float64, need_lse=True)
    torch.testing.assert_close(a, b, rtol=0, atol=0)
