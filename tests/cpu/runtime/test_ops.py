"""The op: schema, fake and composite front behave under opcheck, Inductor, inference mode and dynamic shapes."""

import torch

from fa4_inductor.runtime.ops import ATTENTION
from fa4_inductor.spec import AttentionSpec, AuxSpec, parse_expr

CAUSAL = AttentionSpec(0.3, keep=parse_expr("kv_idx <= q_idx"))
_AUX = (AuxSpec("bool", 2),)
PADDED = AttentionSpec(0.3, keep=parse_expr("aux0[b, kv_idx] & (kv_idx < size0)", _AUX), aux=_AUX, num_sizes=1)


def operands(sq=6, sk=6, dtype=torch.float32, requires_grad=False):
    def make(heads, length):
        return torch.randn(2, length, heads, 8, dtype=dtype).transpose(1, 2).requires_grad_(requires_grad)

    return make(4, sq), make(2, sk), make(2, sk)


def eager(q, k, v, mask):
    scores = q @ k.repeat_interleave(2, 1).transpose(2, 3) * 0.3
    return scores.masked_fill(~mask, -torch.inf).softmax(-1) @ v.repeat_interleave(2, 1)


def test_opcheck():
    mask = torch.ones(2, 6, dtype=torch.bool)
    for need_lse in (False, True):
        args = (*operands(), [mask], PADDED.text, [4], "reference", need_lse)
        torch.library.opcheck(torch.ops.fa4_inductor._forward.default, args)
    args = (*operands(), [mask], PADDED.text, [4], "reference")
    torch.library.opcheck(torch.ops.fa4_inductor._forward_without_lse.default, args)


def test_value_and_layout():
    q, k, v = operands()
    out = ATTENTION(q, k, v, [], CAUSAL.text, [], "reference")
    torch.testing.assert_close(out, eager(q, k, v, torch.ones(6, 6, dtype=torch.bool).tril()))
    assert out.transpose(1, 2).is_contiguous()


def test_modes_without_gradients():
    q, k, v = operands(requires_grad=True)
    with torch.no_grad():
        assert not ATTENTION(q, k, v, [], CAUSAL.text, [], "reference").requires_grad
    with torch.inference_mode():
        ATTENTION(q, k, v, [], CAUSAL.text, [], "reference")


def test_under_inductor_with_dynamic_lengths():
    mask = torch.rand(2, 64) > 0.3
    mask[:, 0] = True

    program = PADDED.text

    def f(q, k, v, mask):
        return ATTENTION(q * 2, k, v, [mask], program, [k.shape[2] - 1], "reference").transpose(1, 2).flatten(2)

    compiled = torch.compile(f, dynamic=True, fullgraph=True)
    with torch.no_grad():
        for length in (6, 9, 17):
            q, k, v = operands(length, length + 2)
            keep = mask[:, : length + 2]
            kept = (keep & (torch.arange(length + 2) < length + 1))[:, None, None]
            want = eager(q * 2, k, v, kept).transpose(1, 2).flatten(2)
            torch.testing.assert_close(compiled(q, k, v, keep), want)
