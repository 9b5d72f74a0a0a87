"""Generated code calls our implementations, not our ops, and everything else about the ops stays."""

import pytest
import torch
from torch._inductor.utils import run_and_get_code

from fa4_inductor.runtime import ops
from fa4_inductor.runtime.direct import call_directly
from fa4_inductor.spec import AttentionSpec, parse_expr

PROGRAM = AttentionSpec(0.125, keep=parse_expr("kv_idx <= q_idx")).text


def operands(length=6):
    return (torch.randn(2, 4, length, 8), torch.randn(2, 2, length, 8), torch.randn(2, 2, length, 8))


def attend(q, k, v):
    return ops.ATTENTION(q * 2.0, k, v.mT.contiguous().mT, [], PROGRAM, [], "reference") + 1.0


def attend_with_lse(q, k, v):
    out, lse = ops.FORWARD(q, k, v, [], PROGRAM, [], "reference", True)
    return out + lse[..., None]


@pytest.mark.parametrize("function", [attend, attend_with_lse], ids=lambda f: f.__name__)
@pytest.mark.parametrize("dynamic", [False, True])
def test_the_dispatcher_is_not_in_the_generated_code(function, dynamic):
    call_directly()
    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic)
    with torch.no_grad():
        got, (code,) = run_and_get_code(compiled, *operands())
        name = "launch_forward(" if function is attend_with_lse else "launch_forward_without_lse("
        assert f"torch.ops.fa4_inductor.{name}" in code and "_forward.default(" not in code
        for length in (6, 9):
            args = operands(length)
            torch.testing.assert_close(compiled(*args), function(*args))


def test_the_layout_that_the_op_asks_for_is_kept():
    """A producer is not laid out anew in front of the op."""
    call_directly()
    seen = []
    original = torch.ops.fa4_inductor.launch_forward_without_lse

    def recorded(q, *rest):
        seen.append(q.stride())
        return original(q, *rest)

    def f(x, k, v):
        return ops.ATTENTION((x * 2.0).transpose(1, 2), k, v, [], PROGRAM, [], "reference")

    x, (_, k, v) = torch.randn(2, 6, 4, 8), operands()
    torch.ops.fa4_inductor.launch_forward_without_lse = recorded
    try:
        with torch.no_grad():
            torch.compile(f, fullgraph=True)(x, k, v)
    finally:
        torch.ops.fa4_inductor.launch_forward_without_lse = original
    assert seen == [(192, 8, 32, 1)]
