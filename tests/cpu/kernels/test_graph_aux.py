"""Prepared specs: the same attention over tensors that the graph computes once."""

from __future__ import annotations

import pytest
import torch
from fx_inputs import placeholders
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fa4_inductor.kernels.graph_aux import build_aux, eager_aux
from fa4_inductor.kernels.reference import attention_reference
from fa4_inductor.lowering.prepare import prepare
from fa4_inductor.spec import parse_spec, verify

B, HQ, HKV, SQ, SK = 2, 4, 2, 6, 9


def spec_of(score="score", keep="True", aux=""):
    return parse_spec(f"fa4/1; aux={aux}; sizes=0; scale=0.3; score={score}; keep={keep}; empty_row=zero")


BUCKET = (
    "where(abs(kv_idx - q_idx) < 2, abs(kv_idx - q_idx), minimum(int(log(float(abs(kv_idx - q_idx))) * 2.0) + 2, 5))"
)
DOCUMENTS = "(aux0[b, kv_idx] == aux0[b, q_idx]) & (kv_idx <= q_idx)"
CASES = {  # spec, aux of the prepared spec
    "table": (
        spec_of(f"score + aux0[{BUCKET}, h]", "aux1[b, kv_idx]", "bfloat16[2],bool[2]"),
        ["bool[2]", "int32[2]", "bfloat16[4]"],
    ),
    "padding": (spec_of(keep="(kv_idx <= q_idx) & aux0[b, kv_idx]", aux="bool[2]"), ["bool[2]", "int32[2]"]),
    "mask of one head": (spec_of(keep="aux0[b, 0, kv_idx]", aux="bool[3]"), ["bool[3]", "int32[3]"]),
    "formula": (spec_of("score + exp(float(-abs(kv_idx - q_idx)))"), ["float32[4]"]),
    "documents": (spec_of(keep=DOCUMENTS, aux="int64[2]"), ["int32[2]"]),
    "uniform": (spec_of(keep="kv_idx < aux0[b]", aux="int64[1]"), ["int64[1]"]),
    "nothing": (spec_of("score + aux0[h, q_idx, kv_idx]", aux="float32[3]"), ["float32[3]"]),
}


def inputs(spec):
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(s, generator=g) for s in ((B, HQ, SQ, 8), (B, HKV, SK, 8), (B, HKV, SK, 8)))
    aux = []
    for a in spec.aux:
        x = torch.randn([9] * a.ndim, generator=g) * 2
        aux.append(x > -2 if a.dtype == "bool" else x.abs().to(a.torch_dtype))
    return q, k, v, aux


@pytest.mark.parametrize("name", CASES)
def test_prepared_spec_is_the_same_attention(name):
    spec, kinds = CASES[name]
    q, k, v, aux = inputs(spec)
    prepared = prepare(spec)
    assert [f"{a.dtype}[{a.ndim}]" for a in verify(prepared.spec).aux] == kinds
    new = eager_aux(prepared, q, k, aux)
    assert [f"{str(t.dtype)[6:]}[{t.dim()}]" for t in new] == kinds
    got, want = attention_reference(q, k, v, new, prepared.spec), attention_reference(q, k, v, aux, spec)
    torch.testing.assert_close(got[0], want[0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_graph_form(name, dynamic):
    spec, kinds = CASES[name]
    q, k, v, aux = inputs(spec)
    graph, memo, outs = fx.Graph(), {}, []
    nodes = placeholders(graph, [q, k, v, *aux], FakeTensorMode(shape_env=ShapeEnv() if dynamic else None))
    for _ in range(2):
        like = graph.call_function(torch.neg, (nodes[0],))
        like.meta["example_value"] = nodes[0].meta["example_value"]
        with graph.inserting_before(like):
            outs.append(tuple(build_aux(graph, prepare(spec), nodes[0], nodes[1], nodes[3:], like, memo)))
        graph.erase_node(like)
    assert outs[0] == outs[1]  # the second layer computes nothing
    graph.output(outs[0])
    graph.lint()
    for got, want in zip(fx.GraphModule({}, graph)(q, k, v, *aux), eager_aux(prepare(spec), q, k, aux)):
        assert torch.equal(got, want)


def test_narrowing_saturates():
    from fa4_inductor.kernels.graph_aux import narrow

    wide = torch.tensor([2**40, -(2**40), 7])
    assert narrow(lambda f, *args: f(*args), wide).tolist() == [2**31 - 1, -(2**31), 7]
