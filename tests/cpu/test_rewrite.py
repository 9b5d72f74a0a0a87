"""Splicing: values, layout, dtype and dead code of Dynamo graphs after a replacement; what must stay, stays."""

import dataclasses
import operator

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from fa4_inductor.errors import DeclineReason, DeclineSite
from fa4_inductor.patterns.match import AttentionMatch, Operand
from fa4_inductor.rewrite import Splicer, is_pure, layout_matters, operand_value, target_name
from fa4_inductor.runtime.ops import ATTENTION
from fa4_inductor.spec import AttentionSpec

SPEC = AttentionSpec(0.25)


def find(gm, name, nth=-1):
    return [n for n in gm.graph.nodes if target_name(n) == name][nth]


def capture(f, *args, dynamic=None, edit=None):
    """Run `f` under a backend that calls `edit(gm)` and then executes the graph; returns (output, graph)."""
    seen = []

    def backend(gm, inputs):
        if edit is not None:
            edit(gm)
            gm.graph.lint()
            gm.recompile()
        seen.append(gm)
        return gm.forward

    torch._dynamo.reset()
    out = torch.compile(f, backend=backend, dynamic=dynamic, fullgraph=True)(*args)
    return out, seen[0]


def match_of(gm, output="matmul", *, q="q", k="k", v="v", view=(), out_view=(), out_dtype=None, spec=SPEC):
    """A match of the last `output` call; q, k, v are found as the placeholders of those names."""

    def operand(name):
        return Operand(next(n for n in gm.graph.nodes if n.op == "placeholder" and n.name.endswith(f"_{name}_")), view)

    node = find(gm, output)
    dtype = out_dtype or node.meta["example_value"].dtype
    return AttentionMatch(spec, operand(q), operand(k), operand(v), (), (), node, out_view, dtype)


def replace(gm, **kwargs):
    splicer = Splicer(gm.graph)
    splicer.splice((match_of(gm, **kwargs), "reference"))
    splicer.finish()


def eager(q, k, v):
    return torch.matmul(torch.softmax(torch.matmul(q, k.transpose(2, 3)) * 0.25, -1), v)


def qkv(b=2, h=3, s=5, d=8):
    return [torch.randn(b, h, s, d) for _ in range(3)]


def names(gm):
    return [target_name(n) for n in gm.graph.nodes if n.op.startswith("call")]


@pytest.mark.parametrize("dynamic", [False, True])
def test_value_and_dead_code(dynamic):
    def f(q, k, v):
        return eager(q, k, v).transpose(1, 2).contiguous().view(2, -1, 24)

    args = qkv()
    with torch.no_grad():
        out, gm = capture(f, *args, dynamic=dynamic, edit=replace)
    torch.testing.assert_close(out, f(*args))
    calls = [n for n in names(gm) if n not in ("size", "getattr")]
    assert calls[-4:] == ["attention.default", "transpose", "contiguous", "view"]
    assert "softmax" not in calls and "matmul" not in calls
    assert find(gm, "attention.default").meta["stack_trace"]


@pytest.mark.parametrize(
    "use",
    [
        lambda o: o,
        lambda o: o.view(2, -1),
        lambda o: (o * 2).view(6, 5, 8),
        lambda o: o.unsqueeze(0).view(6, 5, 8),
        lambda o: o.as_strided((2, 3), (1, 1)),
    ],
    ids=["returned", "viewed", "viewed after pointwise", "viewed after view", "as_strided"],
)
def test_strides_are_restored_where_a_user_can_tell(use):
    def f(q, k, v):
        return use(eager(q, k, v))

    args = qkv()
    with torch.no_grad():
        out, gm = capture(f, *args, edit=replace)
        want = f(*args)
    torch.testing.assert_close(out, want)
    assert out.stride() == want.stride() and "contiguous" in names(gm)


@pytest.mark.parametrize(
    "use",
    [
        lambda o: o.transpose(1, 2).contiguous(),
        lambda o: F.linear(o.transpose(1, 2).reshape(2, 5, 24), torch.ones(2, 24)),
    ],
    ids=["transposed", "projected"],
)
def test_no_copy_where_no_user_can_tell(use):
    def f(q, k, v):
        return use(eager(q, k, v))

    args = qkv()
    with torch.no_grad():
        out, gm = capture(f, *args, edit=replace)
    torch.testing.assert_close(out, f(*args))
    assert names(gm).count("contiguous") <= 1 and names(gm).count("permute") == 0


def test_operand_views_output_view_and_dtype():
    def f(q, k, v):
        a, b, c = (t.double().view(2, 5, 3, 8).transpose(1, 2) for t in (q, k, v))
        return eager(a, b, c).transpose(1, 2).flatten(2).float().sum(1)

    args = [torch.randn(2, 5, 24) for _ in range(3)]
    view = (("unflatten", 2, (3, 8)), ("permute", (0, 2, 1, 3)))

    def edit(gm):
        replace(gm, output="float", view=view, out_view=(("permute", (0, 2, 1, 3)), ("reshape", (2, 5, 24))))

    with torch.no_grad():
        out, gm = capture(f, *args, edit=edit)
    torch.testing.assert_close(out, f(*args), rtol=1e-4, atol=1e-4)
    assert "double" not in names(gm) and "softmax" not in names(gm)


def test_out_dtype():
    def f(q, k, v):
        return (eager(q.float(), k.float(), v.float()) * 1).sum(1)

    args = [t.bfloat16() for t in qkv()]
    with torch.no_grad():
        out, gm = capture(f, *args, edit=replace)
    assert out.dtype is torch.float32 and "to" in names(gm)
    torch.testing.assert_close(out, f(*args), rtol=0.05, atol=0.05)


def test_a_replacement_of_another_shape_is_refused_and_leaves_the_graph_as_it_was():
    def f(q, k, v):
        return eager(q, k, v).sum()

    def edit(gm):
        before = str(gm.graph)
        with pytest.raises(DeclineSite, match="the replacement is") as refusal:
            replace(gm, out_view=(("permute", (0, 2, 1, 3)),))
        assert refusal.value.reason is DeclineReason.INTERNAL_ERROR and str(gm.graph) == before

    with torch.no_grad():
        capture(f, *qkv(), edit=edit)


def test_a_gradient_that_is_cut_inside_the_site_stays_cut():
    def f(q, k, v):
        p = torch.softmax(torch.matmul(q, k.transpose(2, 3)) * 0.25, -1).detach()
        return torch.matmul(p, v.detach()) + 0, q.sum()

    args = [t.requires_grad_() for t in qkv()]
    (out, _), gm = capture(f, *args, edit=replace)
    assert not out.requires_grad and "detach" in names(gm)


def test_only_pure_nodes_that_fed_the_site_are_erased():
    def f(q, k, v, counter):
        counter.add_(1)
        torch.rand(3)
        scores = torch.matmul(q, k.transpose(2, 3)) * 0.25
        scores.add_(counter * 0)
        return torch.matmul(F.dropout(torch.softmax(scores, -1), 0.1, False), v).sum(1)

    args = [*qkv(), torch.zeros(1)]
    with torch.no_grad():
        _, gm = capture(f, *args, edit=replace)
    left = names(gm)
    assert left.count("add_") == 2 and "matmul" in left and "rand" in left
    assert "softmax" not in left and "dropout" not in left


def node_of(target, *args, **kwargs):
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    make = graph.call_method if isinstance(target, str) else graph.call_function
    return make(target, (x, *args), kwargs)


IMPURE = [
    node_of("add_", 1),
    node_of(operator.iadd, 1),
    node_of(operator.setitem, 0, 1),
    node_of(torch.add, 1, out=1),
    node_of(F.dropout, 0.5),
    node_of(F.dropout, 0.5, True),
    node_of(F.relu, inplace=True),
    node_of(torch.rand_like),
    node_of(torch.bernoulli),
    node_of(torch._C._set_grad_enabled),
    node_of(torch.amp.autocast_mode._enter_autocast),
    node_of(torch.ops.aten.add_.Tensor, 1),
    node_of("backward"),
    node_of(torch.ops.higher_order.cond),
    node_of(lambda x: x),
]
PURE = [
    node_of("transpose", 1, 2),
    node_of(operator.add, 1),
    node_of(operator.matmul, 1),
    node_of(torch.softmax, -1),
    node_of(F.dropout, 0.5, False),
    node_of(F.dropout, p=0.0),
    node_of(torch.ops.aten.add.Tensor, 1),
    node_of(torch.ops.higher_order.flex_attention),
    node_of(torch._C._nn.scaled_dot_product_attention, 1, 2),
    node_of(operator.getitem, 0),
]


@pytest.mark.parametrize("node", IMPURE, ids=[f"{i}-{target_name(n)}" for i, n in enumerate(IMPURE)])
def test_impure(node):
    assert not is_pure(node)


@pytest.mark.parametrize("node", PURE, ids=[f"{i}-{target_name(n)}" for i, n in enumerate(PURE)])
def test_pure(node):
    assert is_pure(node)


def test_layout_matters_through_views_and_pointwise_calls():
    def make(*chain):
        graph = torch.fx.Graph()
        first = node = graph.placeholder("x")
        for name in chain:
            node = graph.call_method(name, (node,))
        return first

    assert not layout_matters(make("transpose", "mul", "contiguous", "view"))
    assert layout_matters(make("transpose", "mul", "view"))
    assert (
        layout_matters(make("is_contiguous")) and layout_matters(make("stride")) and layout_matters(make("some_new_op"))
    )


def test_operand_value_has_the_views_shape():
    def f(q):
        return q + 1

    def edit(gm):
        (node,) = (n for n in gm.graph.nodes if n.op == "placeholder")
        value = operand_value(
            Operand(node, (("unflatten", 2, (3, 8)), ("permute", (0, 2, 1, 3)), ("to", torch.bfloat16)))
        )
        assert tuple(value.shape) == (2, 3, 5, 8) and value.dtype is torch.bfloat16

    capture(f, torch.randn(2, 5, 24), edit=edit)


def test_the_op_is_what_the_graph_calls():
    with torch.no_grad():
        _, gm = capture(lambda q, k, v: eager(q, k, v).sum(), *qkv(), edit=replace)
    node = find(gm, "attention.default")
    assert node.target is ATTENTION and node.args[4] == SPEC.text and node.args[6] == "reference"


# What may follow an attention in a model: each takes (B, H, S, D)-like tensors of any rank and layout.
TAILS = {
    "transpose": lambda t: t.transpose(1, -1 if t.dim() < 3 else 2),
    "permute": lambda t: t.permute(*reversed(range(t.dim()))),
    "contiguous": lambda t: t.contiguous(),
    "clone": lambda t: t.clone(),
    "scale": lambda t: t * 2.0,
    "relu": lambda t: torch.relu(t),
    "unsqueeze": lambda t: t.unsqueeze(0),
    "flatten": lambda t: t.flatten(1),
    "reshape": lambda t: t.reshape(t.shape[0], -1, t.shape[-1]),
    "select": lambda t: t[:, 0],
    "half": lambda t: t.chunk(2, 0)[0],
    "view": lambda t: t.view(t.shape[0], -1) if t.is_contiguous() else t.reshape(t.shape[0], -1),
    "norm": lambda t: F.layer_norm(t, t.shape[-1:]),
    "linear": lambda t: F.linear(t, torch.ones(3, t.shape[-1], dtype=t.dtype)),
    "matmul": lambda t: t @ torch.ones(t.shape[-1], 2, dtype=t.dtype),
    "strides": lambda t: t * t.stride(1),
    "softmax": lambda t: torch.softmax(t, -1),
    "in place": lambda t: t.mul_(2.0),
}


@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.lists(st.sampled_from(sorted(TAILS)), min_size=1, max_size=4))
def test_whatever_follows_sees_the_values_and_strides_it_saw_before(tail):
    def f(q, k, v):
        out = eager(q, k, v)
        for name in tail:
            if out.dim() < 2:
                break
            out = TAILS[name](out)
        return out

    args = [t.double() for t in qkv()]  # amplified by the tail, an fp32 rounding would look like a fault
    with torch.no_grad():
        want = f(*args)
        site = lambda gm: find(gm, "matmul", 1)
        out, gm = capture(f, *args, edit=lambda gm: splice_at(gm, site(gm)))
    assert "attention.default" in names(gm)
    torch.testing.assert_close(out, want, rtol=1e-6, atol=1e-9)
    assert out.stride() == want.stride()


def splice_at(gm, node):
    match = dataclasses.replace(match_of(gm), output=node, out_dtype=torch.float64)
    splicer = Splicer(gm.graph)
    splicer.splice((match, "reference"))
    splicer.finish()
