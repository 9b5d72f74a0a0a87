"""SDPA as an implementation: eager form and graph form against the reference, with the smallest mask."""

from __future__ import annotations

import pytest
import torch
from fx_inputs import placeholders
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fa4_inductor.analysis import facts
from fa4_inductor.errors import DeclineReason, DeclineSite
from fa4_inductor.kernels.reference import attention_reference
from fa4_inductor.kernels.sdpa import attention_sdpa, build_sdpa
from fa4_inductor.lowering.support import Operands, Supported, supports_sdpa
from fa4_inductor.runtime.target import target_for
from fa4_inductor.spec import AttentionSpec, parse_spec

B, HQ, HKV, SQ, SK, D, DV = 2, 4, 2, 6, 9, 16, 8
CPU = target_for("cpu")


def spec_of(score="score", keep="True", aux="", sizes=0, empty_row="zero", scale=0.3) -> AttentionSpec:
    text = f"aux={aux}; sizes={sizes}; scale={scale}; score={score}; keep={keep}; empty_row={empty_row}"
    return parse_spec(f"fa4/1; {text}")


CASES = {  # spec, options of the SDPA call, shape of the mask
    "plain": (spec_of(), set(), None),
    "scaled": (spec_of("score * 2.0 + 1.0"), set(), None),
    "causal": (spec_of(keep="kv_idx <= q_idx"), {"is_causal"}, None),
    "negative": (spec_of("score * -2.0", "kv_idx <= q_idx"), {"is_causal"}, None),
    "scale 0": (spec_of(keep="kv_idx <= q_idx", scale=0.0), {"attn_mask"}, (1, 1, SQ, SK)),
    "negative padding": (spec_of("score * -1.0", "aux0[b, kv_idx]", "bool[2]"), {"attn_mask"}, (B, 1, 1, SK)),
    "bottom right": (spec_of(keep="kv_idx <= q_idx + (seqlen_k - seqlen_q)"), {"attn_mask"}, (1, 1, SQ, SK)),
    "padding": (spec_of(keep="aux0[b, kv_idx]", aux="bool[2]"), {"attn_mask"}, (B, 1, 1, SK)),
    "rows": (spec_of(keep="q_idx < size0", sizes=1), {"attn_mask"}, (1, 1, SQ, SK)),
    "padding mean": (
        spec_of(keep="aux0[b, kv_idx] & (kv_idx <= q_idx)", aux="bool[2]", empty_row="mean"),
        {"attn_mask"},
        (B, 1, SQ, SK),
    ),
    "alibi": (
        spec_of("score + aux0[h] * float(kv_idx - q_idx)", "kv_idx <= q_idx", "float32[1]"),
        {"attn_mask"},
        (1, HQ, SQ, SK),
    ),
    "half bias": (spec_of("score + aux0[h, q_idx, kv_idx] * 3.0", aux="bfloat16[3]"), {"attn_mask"}, (1, HQ, SQ, SK)),
    "key bias": (spec_of("score - float(aux0[kv_idx])", aux="uint8[1]"), {"attn_mask"}, (1, 1, 1, SK)),
    "bias mean": (
        spec_of("score + aux0[h] * float(kv_idx)", "q_idx < size0", "float32[1]", 1, "mean"),
        {"attn_mask"},
        (1, HQ, SQ, SK),
    ),
    "padding nan": (spec_of(keep="aux0[b, kv_idx]", aux="bool[2]", empty_row="nan"), {"attn_mask"}, (B, 1, 1, SK)),
    "rows nan": (spec_of(keep="q_idx < size0", sizes=1, empty_row="nan"), {"attn_mask"}, (1, 1, SQ, SK)),
    "nothing": (spec_of(keep="False"), {"attn_mask"}, (1, 1, 1, SK)),
}  # fmt: skip


def aux_for(spec: AttentionSpec) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(3)
    out = []
    for aux in spec.aux:
        x = torch.randn([16] * aux.ndim, generator=g)
        out.append(x > 0 if aux.dtype == "bool" else x.abs().mul(3).to(aux.torch_dtype))
    return out


def operands(dtype=torch.float32, kv_batch=B):
    g = torch.Generator().manual_seed(0)
    shapes = (B, HQ, SQ, D), (kv_batch, HKV, SK, D), (kv_batch, HKV, SK, DV)
    return [torch.randn(s, generator=g).to(dtype) for s in shapes]


def check(got, q, k, v, aux, spec, sizes):
    want, _ = attention_reference(q.double(), k.double(), v.double(), aux, spec, sizes, dtype=torch.float64)
    band = (4 if q.dtype.itemsize == 2 else 64) * torch.finfo(q.dtype).eps * want.nan_to_num().abs().max()
    assert torch.equal(got.isnan(), want.isnan())
    assert (got.double() - want).nan_to_num().abs().max() <= band, spec.text


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", CASES)
def test_eager_form(name, dtype):
    spec, q_k_v = CASES[name][0], operands(dtype)
    aux, sizes = aux_for(spec), [4] * spec.num_sizes
    assert isinstance(supports_sdpa(spec, facts(spec), Operands.of(*q_k_v), CPU), Supported)
    out, lse = attention_sdpa(*q_k_v, aux, spec, sizes)
    check(out, *q_k_v, aux, spec, sizes)
    assert out.transpose(1, 2).is_contiguous() and lse.shape == (0,)


def graph_of(specs, q_k_v, aux, sizes, mode, between=None):
    """A graph with one SDPA site per spec, all reading the same tensors."""
    graph, memo, outs = fx.Graph(), {}, []
    nodes = placeholders(graph, [*q_k_v, *aux], mode)
    for i, spec in enumerate(specs):
        if between and i:
            between(graph, nodes)
        like = graph.call_function(torch.neg, (nodes[0],))  # stands for the node that is replaced
        like.meta["example_value"] = nodes[0].meta["example_value"]
        with graph.inserting_before(like):
            outs.append(build_sdpa(graph, spec, *nodes[:3], nodes[3:], sizes, like, memo))
        graph.erase_node(like)
    graph.output(tuple(outs))
    graph.lint()
    return fx.GraphModule({}, graph)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_graph_form(name, dynamic):
    spec, options, mask_shape = CASES[name]
    q_k_v, aux, sizes = operands(kv_batch=1), aux_for(spec), [4] * spec.num_sizes
    mode = FakeTensorMode(shape_env=ShapeEnv() if dynamic else None)
    module = graph_of([spec], q_k_v, aux, sizes, mode)
    (call,) = [n for n in module.graph.nodes if n.target is torch.nn.functional.scaled_dot_product_attention]
    assert set(call.kwargs) == options | {"scale", "enable_gqa"}
    if mask_shape is not None and not dynamic:
        assert tuple(call.kwargs["attn_mask"].meta["example_value"].shape) == mask_shape
    (out,) = module(*q_k_v, *aux)
    check(out, *q_k_v, aux, spec, sizes)
    for node in module.graph.nodes:
        assert node.op == "output" or "example_value" in node.meta


def masks_in(module: fx.GraphModule) -> set[fx.Node]:
    calls = [n for n in module.graph.nodes if n.target is torch.nn.functional.scaled_dot_product_attention]
    return {n.kwargs["attn_mask"] for n in calls}


def test_layers_share_one_mask():
    spec, q_k_v = CASES["padding"][0], operands()
    module = graph_of([spec] * 3, q_k_v, aux_for(spec), [], FakeTensorMode())
    assert len(masks_in(module)) == 1


def test_layers_with_other_masks_or_a_write_in_between_do_not_share():
    spec, q_k_v = CASES["padding"][0], operands()
    other = spec_of(keep="~aux0[b, kv_idx]", aux="bool[2]")
    assert len(masks_in(graph_of([spec, other], q_k_v, aux_for(spec), [], FakeTensorMode()))) == 2

    def write(graph, nodes):
        node = graph.call_method("logical_not_", (nodes[3],))
        node.meta["example_value"] = nodes[3].meta["example_value"]

    module = graph_of([spec, spec], q_k_v, aux_for(spec), [], FakeTensorMode(), write)
    assert len(masks_in(module)) == 2


@pytest.mark.parametrize("score", ["tanh(score)", "score * score", "score * aux0[h]", "0.0"])
def test_scores_that_are_not_affine_are_refused(score):
    spec = spec_of(score, aux="float32[1]")
    with pytest.raises(DeclineSite, match="constant"):
        attention_sdpa(*operands(), aux_for(spec), spec)


def test_an_lse_is_refused():
    with pytest.raises(DeclineSite, match="LSE"):
        attention_sdpa(*operands(), [], spec_of(), need_lse=True)


@pytest.mark.parametrize("empty_row", ["nan", "zero"])
def test_rows_of_minus_infinity_in_an_additive_mask(empty_row):
    """Eager softmax gives NaN for such a row, SDPA itself zeros; both spellings reach here as the same bias."""
    spec = spec_of("score + aux0[q_idx, kv_idx]", aux="float32[2]", empty_row=empty_row)
    q, k, v = operands()
    mask = torch.randn(SQ, SK).masked_fill(torch.rand(SQ, SK) < 0.3, -torch.inf)
    mask[2] = -torch.inf
    out, _ = attention_sdpa(q, k, v, [mask], spec)
    scores = q @ k.repeat_interleave(2, 1).mT * 0.3 + mask
    want = scores.softmax(-1) @ v.repeat_interleave(2, 1)
    torch.testing.assert_close(out, want if empty_row == "nan" else want.nan_to_num(0.0), equal_nan=True)
    torch.testing.assert_close(out, attention_reference(q, k, v, [mask], spec)[0], equal_nan=True)
    module = graph_of([spec, spec], (q, k, v), [mask], [], FakeTensorMode())
    for result in module(q, k, v, mask):
        torch.testing.assert_close(result, out, equal_nan=True)
    tests = [n for n in module.graph.nodes if n.target is torch.all]
    assert len(tests) == (empty_row == "nan")  # shared, and absent where zeros are meant


def test_mean_rows_are_refused_away_from_the_cpu():
    spec, hopper = CASES["padding mean"][0], target_for("cuda", "sm_90a")
    refusal = supports_sdpa(spec, facts(spec), Operands.of(*operands()), hopper)
    assert refusal.reason is DeclineReason.EMPTY_ROWS
