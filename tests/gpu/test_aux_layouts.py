"""Aux tensors of every layout on a Hopper GPU: TMA and unit strides where they allow it, the other kernel where not."""

from __future__ import annotations

import pytest
import torch
from test_runtime import check, qkv

from fa4_inductor.runtime import launch
from fa4_inductor.spec import AttentionSpec, AuxSpec, EmptyRow, parse_expr

B, H, SQ, SK = 2, 4, 77, 136


@pytest.fixture(autouse=True)
def strict_and_without_gradients(monkeypatch):
    monkeypatch.setenv("FA4_INDUCTOR_STRICT", "1")
    launch.clear_plans()
    torch.manual_seed(0)
    with torch.no_grad():
        yield


def spec_of(score: str, keep: str, *aux: AuxSpec) -> AttentionSpec:
    return AttentionSpec(0.125, parse_expr(score, aux), parse_expr(keep, aux), aux=aux, empty_row=EmptyRow.ZERO)


BIAS = spec_of("score + aux0[b, h, q_idx, kv_idx]", "kv_idx <= q_idx + 59", AuxSpec("bfloat16", 4))
MASK = spec_of("score", "aux0[b, 0, q_idx, kv_idx]", AuxSpec("bool", 4))
TABLE = spec_of("score + aux0[h, abs(kv_idx - q_idx)]", "True", AuxSpec("float32", 2))
EVOFORMER = spec_of(
    "score + aux0[b, kv_idx] + aux1[b // 2, h, q_idx, kv_idx]", "True", AuxSpec("bfloat16", 2), AuxSpec("bfloat16", 4)
)


def bias(*shape: int) -> torch.Tensor:
    return torch.randn(shape or (B, H, SQ, SK), device="cuda", dtype=torch.bfloat16)


def padded(t: torch.Tensor) -> torch.Tensor:
    """Rows one element longer than they look."""
    return torch.nn.functional.pad(t, (0, 1))[..., : t.shape[-1]]


BIASES = {
    "contiguous": (bias, True),
    "broadcast heads": (lambda: bias(B, 1, SQ, SK).expand(B, H, SQ, SK), True),
    "broadcast rows": (lambda: bias(B, H, 1, SK).expand(B, H, SQ, SK), True),
    "longer than the lengths": (lambda: bias(B, H, SQ + 3, SK + 8), True),
    "rows of odd length": (lambda: padded(bias()), False),
    "odd address": (lambda: torch.cat([bias(1), bias().flatten()])[1:].view(B, H, SQ, SK), False),
    "transposed": (lambda: bias(B, H, SK, SQ).transpose(2, 3), False),
    "broadcast keys": (lambda: bias(B, H, SQ, 1).expand(B, H, SQ, SK), False),
}


@pytest.mark.parametrize("name", BIASES)
def test_dense_bias(name):
    make, regular = BIASES[name]
    check(*qkv(B, H, 2, SQ, SK), [make()], BIAS)
    assert [key.regular for key in launch._plans] == [regular]


def test_another_layout_of_the_same_shapes_takes_the_other_kernel():
    operands = qkv(B, H, 2, SQ, SK)
    for aux in (bias(), padded(bias()), bias()):
        check(*operands, [aux], BIAS)
    assert sorted(key.regular for key in launch._plans) == [False, True]


@pytest.mark.parametrize("sk", [136, 144])
def test_dense_mask(sk):
    mask = torch.rand(B, 1, SQ, sk, device="cuda") < 0.3
    mask[:, :, 5] = False
    check(*qkv(B, H, 2, SQ, sk), [mask], MASK)
    assert [key.regular for key in launch._plans] == [sk % 16 == 0]


@pytest.mark.parametrize("fill", [torch.finfo(torch.bfloat16).min, -torch.inf])
def test_additive_masks(fill):
    """Fills of whole tiles, and in front of the keys that count.

    The LSE is left out: that of a row of nothing but finfo.min is beyond fp32 in the kernel's base 2.
    """
    aux = bias()
    aux += torch.full_like(aux, fill).triu(20)
    aux[:, :, 30] = fill
    aux[:, 1, 40:, :100] = fill
    check(*qkv(B, H, 2, SQ, SK), [aux], BIAS, need_lse=False)


@pytest.mark.parametrize("step", [1, 2])
def test_table(step):
    table = torch.randn(H, SK * step, device="cuda")[:, ::step]
    check(*qkv(B, H, 2, SQ, SK), [table], TABLE)
    assert [key.regular for key in launch._plans] == [step == 1]


def test_two_broadcast_biases():
    check(*qkv(B, H, 2, SQ, SK), [bias(B, SK), bias(1, H, SQ, SK)], EVOFORMER)
