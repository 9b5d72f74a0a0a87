"""Counting attention while a model runs: each softmax of scores q.k whose result reaches a product, and fused calls."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_PRODUCTS = ("mm", "bmm", "addmm", "baddbmm")
_SOFTMAXES = ("_softmax", "_safe_softmax")
# Ops that scores and probabilities pass through on their way from q.k to the product with v.
_FLOW_NAMES = """
_to_copy clone copy_ add sub rsub mul div add_ sub_ mul_ div_ masked_fill masked_fill_ where cat constant_pad_nd tanh
clamp clamp_min clamp_max maximum minimum native_dropout index index_select index_put_ index_put stack nan_to_num roll
slice_scatter select_scatter as_strided_scatter scatter_ repeat _unsafe_view triu tril exp neg softplus reciprocal
gather fill_ relu"""
_FLOW = frozenset(_FLOW_NAMES.split())

# What a tensor carries: the number of the softmax it comes from (0: scores, before any), and the ops since q.k.
Tag = tuple[int, str]


class Sites(TorchDispatchMode):
    """Follows tensors by storage while a model runs.

    A product of two computed tensors makes scores; a softmax of scores makes probabilities; where they reach a product
    there is a site. Routers of experts do not count: their logits come from a product with a weight.

    Attributes:
        found: number of the softmax -> the ops from q.k to the product with v, as text.
        softmaxes: all softmaxes seen, whatever they are for.
        fused_calls: calls that are fused attention already; `FusedCalls` counts them here.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.weights = {_storage(t) for t in itertools.chain(model.parameters(), model.buffers())}
        self.tags: dict[int, Tag] = {}
        self.found: dict[int, str] = {}
        self.softmaxes = self.fused_calls = 0
        self.paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        op = func.overloadpacket.__name__
        inputs = [(_storage(t), t) for t in _tensors((args, kwargs))]
        outputs = _tensors(out)
        tag = None if self.paused else self._tag(op, inputs, outputs)
        self.softmaxes += op in _SOFTMAXES and not self.paused
        self._mark(outputs, {key for key, _ in inputs}, tag)
        return out

    def _tag(self, op: str, inputs: list[tuple[int, Tensor]], outputs: list[Tensor]) -> Tag | None:
        """What the outputs carry. Notes a site when the op is a product that probabilities reach."""
        tagged = [(*self.tags[key], t.numel()) for key, t in inputs if key in self.tags]
        if op in _PRODUCTS:
            self.found |= {softmax: f"{ops} {op}" for softmax, ops, _ in tagged if softmax}
            with_weight = "bmm" not in op and any(key in self.weights for key, _ in inputs[-2:])
            return None if with_weight else (0, op)
        if not tagged:
            return None
        softmax, ops, _ = tagged[0]
        if op in _SOFTMAXES:
            return (self.softmaxes + 1, f"{ops} softmax")
        largest = max(numel for *_, numel in tagged)
        if op not in _FLOW or (op == "mul" and outputs[0].numel() > largest):  # an outer product is no scaling
            return None
        return (softmax, ops if "view" in op else f"{ops} {op.strip('_').replace('to_copy', 'cast')}")

    def _mark(self, outputs: Iterable[Tensor], inputs: set[int], tag: Tag | None) -> None:
        for t in outputs:
            key = _storage(t)
            if key in inputs and (tag is None or key in self.weights):
                continue  # a view, or an in-place op that says nothing new
            self.tags.pop(key, None)
            if tag and t.is_floating_point():
                self.tags[key] = tag


class FusedCalls(TorchFunctionMode):
    """Counts calls that are fused attention already, and hides their insides from `Sites`."""

    def __init__(self, sites: Sites) -> None:
        self.sites = sites

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        fused = func is F.scaled_dot_product_attention or getattr(func, "__name__", "") == "flex_attention"
        self.sites.fused_calls += fused
        self.sites.paused = fused
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self.sites.paused = False


def _storage(t: Tensor) -> int:
    return t.untyped_storage()._cdata if t.layout == torch.strided else id(t)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
