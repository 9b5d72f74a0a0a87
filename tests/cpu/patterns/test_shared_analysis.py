"""Layers of equal structure are analysed once; layers that differ in anything the analysis reads are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import layer_norm, scaled_dot_product_attention

from fa4_inductor.capture.slice import GraphIndex, backward_slice
from fa4_inductor.patterns import sites
from tests.cases.oracle import checked
from tests.fx_inputs import placeholders

SEQLEN = 8
Layer = Callable[..., torch.Tensor]
generator = torch.Generator().manual_seed(11)
table = torch.randn(2, 2, SEQLEN, SEQLEN, generator=generator)
other = torch.randn(2, 2, SEQLEN, SEQLEN, generator=generator)
bias = torch.randn(2, generator=generator)
offset = torch.randn(2, generator=generator)
causal = torch.ones(SEQLEN, SEQLEN, dtype=torch.bool).tril()


def _softmax(scale: float = 0.5, window: int = 3, dims: tuple[int, ...] = (0, 1, 2, 3), index: Any = (0, 1)) -> Layer:
    def layer(x: torch.Tensor) -> torch.Tensor:
        q_idx, kv_idx = torch.arange(SEQLEN)[:, None], torch.arange(SEQLEN)[None]
        scores = x @ x.mT * scale + table.permute(dims)[index]
        return scores.masked_fill(q_idx - kv_idx > window, -torch.inf).softmax(-1) @ x

    return layer


def _with_keys(keys: torch.Tensor | None = None) -> Layer:
    """The values are the keys, or another tensor of the same kind."""

    def layer(x: torch.Tensor) -> torch.Tensor:
        k = layer_norm(x, (4,))
        v = k if keys is None else layer_norm(x + keys, (4,))
        return (x @ k.mT).softmax(-1) @ v

    return layer


def _written(twice: bool) -> Layer:
    def layer(x: torch.Tensor) -> torch.Tensor:
        mask = torch.zeros(SEQLEN, SEQLEN)
        mask.masked_fill_(~causal, -torch.inf)
        if twice:
            mask[0, 1] = 0.0
        else:
            mask[0, 2] = 0.0
        return (x @ x.mT + mask).softmax(-1) @ x

    return layer


def _sdpa(**options: Any) -> Layer:
    return lambda x: scaled_dot_product_attention(x, x, x, **options)


def _flex(add: bool = True, cap: float = 5.0, window: int = 3, same: bool = True, masked: bool = True) -> Layer:
    def score_mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return torch.tanh(s / cap) + (bias[h] + (bias if same else offset)[b] if add else bias[h])

    mask = create_block_mask(lambda b, h, q, k: q - k <= window, 2, None, SEQLEN, SEQLEN, device="cpu")
    return lambda x: flex_attention(x, x, x, score_mod, mask if masked else None)


SAME: dict[str, Callable[[], Layer]] = {
    "softmax": _softmax,
    "keys are values": _with_keys,
    "written mask": lambda: _written(True),
    "sdpa": lambda: _sdpa(is_causal=True),
    "sdpa with a mask": lambda: _sdpa(attn_mask=causal),
    "flex": _flex,
    "flex without mask": lambda: _flex(masked=False),
}
DIFFERENT: dict[str, tuple[Layer, Layer]] = {
    "constant": (_softmax(), _softmax(scale=0.25)),
    "window": (_softmax(), _softmax(window=4)),
    "permutation": (_softmax(), _softmax(dims=(0, 1, 3, 2))),
    "leading permutation": (_softmax(), _softmax(dims=(1, 0, 2, 3))),
    "element": (_softmax(), _softmax(index=(1, 0))),
    "list for tuple": (_softmax(), _softmax(index=[0, 1])),
    "keys are values": (_with_keys(), _with_keys(torch.ones(4))),
    "written element": (_written(True), _written(False)),
    "sdpa scale": (_sdpa(), _sdpa(scale=0.25)),
    "sdpa causal": (_sdpa(), _sdpa(is_causal=True)),
    "sdpa mask": (_sdpa(attn_mask=table), _sdpa(attn_mask=table[0])),
    "sdpa dtype": (_sdpa(attn_mask=causal), _sdpa(attn_mask=causal.float())),
    "flex constant": (_flex(), _flex(cap=6.0)),
    "flex window": (_flex(), _flex(window=4)),
    "flex mask": (_flex(), _flex(masked=False)),
    "flex term": (_flex(), _flex(add=False)),
    "flex tensors": (_flex(), _flex(same=False)),
}


def _stack(monkeypatch: pytest.MonkeyPatch, *layers: Layer) -> tuple[int, Any]:
    """Structures analysed while the layers compile into one graph, and the report on their sites."""
    searches: list[sites._Search] = []

    class Recorded(sites._Search):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            searches.append(self)

    monkeypatch.setattr(sites, "_Search", Recorded)

    def model(x: torch.Tensor) -> torch.Tensor:
        for layer in layers:
            x = layer(layer_norm(x, (4,)))
        return x

    function, report = checked(model)
    with torch.no_grad():
        function(torch.randn(2, 2, SEQLEN, 4, generator=torch.Generator().manual_seed(3)))
    assert report.error < 1e-5
    assert len(report.matches) == len(layers), report.sites
    return sum(found is not None for s in searches for found in s.results.values()), report


@pytest.mark.parametrize("name", SAME)
def test_equal_layers_are_analysed_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = SAME[name]()
    analysed, report = _stack(monkeypatch, layer, layer, layer)
    assert analysed == 1
    assert len(set(report.programs)) == 1
    assert len({m.q.node for m in report.matches}) == 3


@pytest.mark.parametrize("name", DIFFERENT)
def test_layers_that_differ_are_analysed_apart(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    analysed, report = _stack(monkeypatch, *DIFFERENT[name], *DIFFERENT[name])
    assert analysed == 2
    first, second = ((m.spec, m.aux, m.v.node is m.k.node) for m in report.matches[:2])
    assert first != second


def test_layers_with_a_tensor_each_bind_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = [_sdpa(attn_mask=t) for t in (table, other)] + [
        lambda x, t=t: flex_attention(x, x, x, lambda s, b, h, q, k: s + t[b, h, q, k]) for t in (table, other)
    ]
    analysed, report = _stack(monkeypatch, *layers)
    assert analysed == 2
    assert len({m.aux[0].node for m in report.matches}) == 2
    assert [m.aux[0].node for m in report.matches[:2]] == [m.aux[0].node for m in report.matches[2:]]


def _key(index: Any, *, one_object: bool = False, transposed: bool = False, parameter: bool = False) -> tuple:
    graph, mode = fx.Graph(), FakeTensorMode()
    second = torch.nn.Parameter(torch.zeros(3, 3)) if parameter else torch.zeros(3, 3)
    a, b = placeholders(graph, [torch.zeros(3, 3), second], mode)
    if one_object:
        b.meta["example_value"] = a.meta["example_value"]
    elif transposed:
        b.meta["example_value"] = b.meta["example_value"].mT
    node = graph.call_function(torch.add, (graph.call_method("__getitem__", (a, index)), b))
    graph.output(node)
    return backward_slice([node], node, GraphIndex(graph)).key()


def test_key_of_a_slice_tells_apart_what_a_trace_can_see() -> None:
    """Constants that compare equal, leaves that are one tensor or a parameter, and memory layouts."""
    indices = [0, False, 0.0, -0.0, None, ..., (0, 1), [0, 1], (0, True), slice(0, 1), slice(0, None), "0", torch.int32]
    keys = [_key(index) for index in indices]
    keys += [_key(0, one_object=True), _key(0, transposed=True), _key(0, parameter=True)]
    assert len(set(keys)) == len(keys)
    assert _key((0, 1)) == _key((0, 1))
