"""flex_attention as an implementation, against the reference."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fa4_inductor.errors import DeclineReason, DeclineSite
from fa4_inductor.kernels.flex import attention_flex, mod_of
from fa4_inductor.kernels.reference import attention_reference
from fa4_inductor.runtime import ops  # noqa: F401 - registers the op
from fa4_inductor.spec import AuxSpec, parse_expr, parse_spec
from fa4_inductor.spec.interpret import Env, evaluate


def spec_of(score="score", keep="True", aux="", sizes=0, sink="", empty_row="zero"):
    sink = f"; sink={sink}" if sink else ""
    return parse_spec(
        f"fa4/1; aux={aux}; sizes={sizes}; scale=0.3; score={score}; keep={keep}{sink}; empty_row={empty_row}"
    )


CASES = {
    "plain": spec_of(),
    "causal softcap": spec_of("20.0 * tanh(score / 20.0)", "kv_idx <= q_idx"),
    "alibi": spec_of(
        "score + aux0[h] * float(kv_idx - q_idx)", "kv_idx <= q_idx + (seqlen_k - seqlen_q)", "float32[1]"
    ),
    "padding, empty rows": spec_of(keep="aux0[b, kv_idx] & (q_idx > size0)", aux="bool[2]", sizes=1),
    "sink": spec_of(keep="(kv_idx <= q_idx) & (q_idx < 5)", aux="bfloat16[1]", sink="aux0[h] + 0.5"),
    "table": spec_of("score + aux0[minimum(maximum(kv_idx - q_idx, -2), 2) + 2, h]", "h > 0", aux="float32[2]"),
}


def operands(b=2, hq=4, hkv=2, sq=7, sk=9, d=16, dv=8, kv_batch=1):
    g = torch.Generator().manual_seed(0)
    return [torch.randn(s, generator=g) for s in ((b, hq, sq, d), (kv_batch, hkv, sk, d), (kv_batch, hkv, sk, dv))]


def aux_for(spec):
    g = torch.Generator().manual_seed(3)
    tensors = [torch.randn([9] * a.ndim, generator=g) for a in spec.aux]
    return [t > 0 if a.dtype == "bool" else t.to(a.torch_dtype) for t, a in zip(tensors, spec.aux)]


@pytest.mark.parametrize("name", CASES)
def test_matches_the_reference(name):
    spec, q_k_v, aux = CASES[name], operands(), aux_for(CASES[name])
    got = attention_flex(*q_k_v, aux, spec, [2] * spec.num_sizes, need_lse=True)
    want = attention_reference(*q_k_v, aux, spec, [2] * spec.num_sizes, need_lse=True)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert got[0].transpose(1, 2).is_contiguous()


class Intercepting(TorchDispatchMode):
    """What AOTAutograd installs for the first call of a graph with custom ops."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_runs_inside_an_op_that_a_dispatch_mode_intercepts():
    spec, q_k_v = CASES["alibi"], operands()
    aux = aux_for(spec)
    with Intercepting():
        out = torch.ops.fa4_inductor._forward_without_lse(*q_k_v, aux, spec.text, [], "flex")
    torch.testing.assert_close(out, attention_reference(*q_k_v, aux, spec)[0], rtol=1e-5, atol=1e-5)


def test_rows_of_minus_infinity_give_zeros():
    spec, mask = spec_of("score + aux0[q_idx, kv_idx]", aux="float32[2]"), torch.randn(7, 9)
    mask[2], mask[3, :5] = -torch.inf, -torch.inf
    got = attention_flex(*operands(), [mask], spec, need_lse=True)
    torch.testing.assert_close(got, attention_reference(*operands(), [mask], spec, need_lse=True), rtol=1e-5, atol=1e-5)
    assert (got[0][:, :, 2] == 0).all()


@pytest.mark.parametrize("shape", [{"sk": 0}, {"sq": 0}, {"b": 0, "kv_batch": 1}])
@pytest.mark.parametrize("name", ["causal softcap", "sink"])
def test_zero_sizes(name, shape):
    spec, q_k_v = CASES[name], operands(**shape)
    got = attention_flex(*q_k_v, aux_for(spec), spec, need_lse=True)
    want = attention_reference(*q_k_v, aux_for(spec), spec, need_lse=True)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("contract", ["nan", "mean"])
def test_other_contracts_of_empty_rows_are_refused(contract):
    spec = spec_of(keep="aux0[b, kv_idx]", aux="bool[2]", empty_row=contract)
    with pytest.raises(DeclineSite) as refusal:
        attention_flex(*operands(), aux_for(spec), spec)
    assert refusal.value.reason is DeclineReason.EMPTY_ROWS


def test_a_contract_that_cannot_occur_does_not_matter():
    spec = spec_of(keep="kv_idx <= q_idx", empty_row="nan")
    attention_flex(*operands(), [], spec)


def test_mod_is_the_interpreter():
    aux = (AuxSpec("float32", 2),)
    e = parse_expr(
        "where((q_idx // 2 == kv_idx % 3) | (h != 1), score * 2.0, aux0[q_idx - 3, kv_idx + 99]) - minimum(score, 0.5)",
        aux,
    )
    tensors, names = [torch.randn(5, 6)], {"score": torch.tensor(1.5), "b": torch.tensor(0)}
    for h in range(2):
        for q in range(5):
            names |= {"h": torch.tensor(h), "q_idx": torch.tensor(q), "kv_idx": torch.tensor(q + 1)}
            want = evaluate(e, Env(names, tensors))
            assert torch.equal(
                mod_of(e)(*(names[n] for n in ("score", "b", "h", "q_idx", "kv_idx")), tensors, {}), want
            )
