"""Attention modules of torch itself: Dynamo keeps them as one call, and the attention inside is found all the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fa4_inductor.errors import DeclineReason
from tests.cases.oracle import Report, checked

BATCH, LENGTH, MEMORY, EMBED, HEADS = 2, 5, 7, 16, 2
CAUSAL = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
PADDING = torch.arange(LENGTH) >= torch.tensor([[3], [LENGTH]])
FLOAT_CAUSAL = nn.Transformer.generate_square_subsequent_mask(LENGTH)


def _text(keep: str = "True", score: str = "score", aux: str = "", empty: str = "zero") -> str:
    return f"fa4/1; aux={aux}; sizes=0; scale=0.3535533905932738; score={score}; keep={keep}; empty_row={empty}"


def _mha(batch_first: bool = True, **options: Any) -> nn.MultiheadAttention:
    torch.manual_seed(0)
    return nn.MultiheadAttention(EMBED, HEADS, batch_first=batch_first, **options).eval()


def _run(function: Callable[..., Any], *args: torch.Tensor, dynamic: bool = False) -> Report:
    compiled, report = checked(function, dynamic=dynamic)
    with torch.no_grad():
        expected, got = function(*args), compiled(*args)
    torch.testing.assert_close(got, expected, equal_nan=True)
    assert report.error < 2e-6
    return report


def _x(length: int = LENGTH) -> torch.Tensor:
    return torch.randn(BATCH, length, EMBED)


MASKS = {
    "none": ({}, _text()),
    "padding": ({"key_padding_mask": PADDING}, _text("~aux0[b, kv_idx]", aux="bool[2]")),
    "bool": ({"attn_mask": CAUSAL}, _text("~aux0[q_idx, kv_idx]", aux="bool[2]")),
    "float": ({"attn_mask": FLOAT_CAUSAL}, _text(score="score + aux0[q_idx, kv_idx]", aux="float32[2]")),
    "causal": ({"attn_mask": FLOAT_CAUSAL, "is_causal": True}, _text("kv_idx <= q_idx")),
    "both": (
        {"attn_mask": CAUSAL, "key_padding_mask": PADDING, "is_causal": True},
        _text("~aux0[b, kv_idx] & ~aux1[q_idx, kv_idx]", aux="bool[2],bool[2]"),
    ),
}


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("mask", MASKS)
def test_multihead_attention(mask: str, batch_first: bool) -> None:
    module, (options, program) = _mha(batch_first), MASKS[mask]
    x = _x() if batch_first else _x().transpose(0, 1)
    report = _run(lambda x: module(x, x, x, need_weights=False, **options)[0], x)
    assert report.programs == [program]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("options", [{}, {"kdim": 12, "vdim": 12}, {"bias": False}, {"add_bias_kv": True}])
def test_cross_attention(options: dict[str, Any], dynamic: bool) -> None:
    module = _mha(**options)
    memory = torch.randn(BATCH, MEMORY, options.get("kdim", EMBED))
    report = _run(lambda x, y: module(x, y, y, need_weights=False)[0], _x(), memory, dynamic=dynamic)
    assert report.programs == [_text()]


def test_functional_without_batch() -> None:
    module, x = _mha(), torch.randn(LENGTH, EMBED)
    weights = (module.in_proj_weight, module.in_proj_bias, None, None, False, 0.0)

    def call(x: torch.Tensor) -> torch.Tensor:
        out = (module.out_proj.weight, module.out_proj.bias)
        return F.multi_head_attention_forward(
            x, x, x, EMBED, HEADS, *weights, *out, training=False, need_weights=False
        )[0]

    assert _run(call, x).programs == [_text()]


def test_unused_weights() -> None:
    module = _mha()
    report = _run(lambda x: module(x, x, x, attn_mask=CAUSAL)[0], _x())
    assert report.programs == [_text("~aux0[q_idx, kv_idx]", aux="bool[2]", empty="nan")]


@pytest.mark.parametrize("average", [True, False])
def test_weights_that_are_used_decline(average: bool) -> None:
    module = _mha()
    report = _run(lambda x: module(x, x, x, average_attn_weights=average), _x())
    assert [d.reason for d in report.declined] == [DeclineReason.PROBS_ESCAPE] and not report.matches


def test_dropout_in_training_declines() -> None:
    module = _mha(dropout=0.5).train()
    compiled, report = checked(lambda x: module(x, x, x, need_weights=False)[0])
    with torch.no_grad():
        compiled(_x())
    assert [d.reason for d in report.declined] == [DeclineReason.DROPOUT] and not report.matches


LAYER_MASKS = {
    "none": ({}, _text(empty="nan")),
    "padding": ({"src_key_padding_mask": PADDING}, _text("~aux0[b, kv_idx]", aux="bool[2]", empty="nan")),
    "causal": ({"src_mask": CAUSAL, "is_causal": True}, _text("~aux0[q_idx, kv_idx]", aux="bool[2]", empty="nan")),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("mask", LAYER_MASKS)
def test_encoder_layer_fast_path(mask: str, norm_first: bool, dynamic: bool) -> None:
    torch.manual_seed(0)
    activation = "gelu" if norm_first else "relu"
    layer = nn.TransformerEncoderLayer(EMBED, HEADS, 32, activation=activation, batch_first=True, norm_first=norm_first)
    options, program = LAYER_MASKS[mask]
    report = _run(lambda x: layer.eval()(x, **options), _x(), dynamic=dynamic)
    assert report.programs == [program]


def test_encoder_layer_with_both_masks() -> None:
    layer = nn.TransformerEncoderLayer(EMBED, HEADS, 32, batch_first=True).eval()
    report = _run(lambda x: layer(x, src_mask=CAUSAL, src_key_padding_mask=PADDING), _x())
    keep = "~aux0[b, kv_idx] & ~aux1[q_idx, kv_idx]"
    assert report.programs == [_text(keep, aux="bool[2],bool[2]", empty="nan")]


def test_encoder_row_without_keys_is_nan() -> None:
    layer = nn.TransformerEncoderLayer(EMBED, HEADS, 32, batch_first=True).eval()
    padding = torch.tensor([[True], [False]]).expand(BATCH, LENGTH).contiguous()
    compiled, report = checked(lambda x: layer(x, src_key_padding_mask=padding))
    with torch.no_grad():
        out = compiled(_x())
    assert out[0].isnan().all() and not out[1].isnan().any()
    assert report.error < 2e-6 and len(report.matches) == 1


@pytest.mark.parametrize("batch_first", [True, False])
def test_encoder(batch_first: bool) -> None:
    layer = nn.TransformerEncoderLayer(EMBED, HEADS, 32, batch_first=batch_first)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    x = _x() if batch_first else _x().transpose(0, 1)
    report = _run(lambda x: encoder(x, src_key_padding_mask=PADDING), x)
    # The fast path takes any mask for "drop where not zero"; without it the padding becomes an additive mask.
    assert len(report.matches) == 2 and not report.declined and len(set(report.programs)) == 1


@pytest.mark.parametrize("batch_first", [True, False])
def test_decoder_layer(batch_first: bool) -> None:
    layer = nn.TransformerDecoderLayer(EMBED, HEADS, 32, batch_first=batch_first).eval()
    x, memory = (t if batch_first else t.transpose(0, 1) for t in (_x(), _x(MEMORY)))
    report = _run(lambda x, y: layer(x, y, tgt_mask=FLOAT_CAUSAL, tgt_is_causal=True), x, memory)
    assert report.programs == [_text("kv_idx <= q_idx"), _text()]


def test_autocast() -> None:
    module = _mha()

    def call(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return module(x, x, x, need_weights=False)[0]

    compiled, report = checked(call)
    with torch.no_grad():
        out = compiled(_x())
    assert out.dtype is torch.bfloat16 and [m.out_dtype for m in report.matches] == [torch.bfloat16]
