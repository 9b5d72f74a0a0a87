"""Whether gradients pass through a site as they pass through attention.

A shadow shows values, and `detach` has none of its own. A site whose graph stops a gradient somewhere between its
operands and its output is therefore the attention it was taken for, but its gradient is not that of attention.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from fa4_inductor.errors import Declined, DeclineReason
from fa4_inductor.patterns.match import AttentionMatch, Operand

_MAXIMA = frozenset({"max", "amax"})
# Results that hold nothing of their input but shape, dtype and device.
_LIKE = ("_like", "new_zeros", "new_ones", "new_full", "new_empty", "new_tensor", "finfo")


def trains(match: AttentionMatch) -> bool:
    """Whether gradients flow through the site."""
    return _requires_grad(match.output)


def learned_slots(match: AttentionMatch) -> frozenset[int]:
    """Aux slots of the site whose tensors need a gradient."""
    return frozenset(i for i, a in enumerate(match.aux) if _requires_grad(a.node))


def untrainable(*matches: AttentionMatch) -> Declined | None:
    """Why the gradients of a site (or of the terms of one output) cannot be those of its spec; None when they are."""
    operands = {operand.node for match in matches for operand in _operands(match)}
    for node in _between(operands, matches[0]):
        if _loses_gradient(node):
            return _declined(matches[0], f"the gradient is stopped inside the site, by {node.name}")
        if _requires_grad(node) and not node.all_input_nodes:
            return _declined(matches[0], f"{node.name} cancels out of the program, and has a gradient of 0 in eager")
    return None


def _declined(match: AttentionMatch, detail: str) -> Declined:
    return Declined(DeclineReason.NEEDS_GRAD, detail, match.location)


def _operands(match: AttentionMatch) -> tuple[Operand, ...]:
    return (match.q, match.k, match.v, *match.aux, *(() if match.epilogue is None else match.epilogue.aux))


def _between(operands: set[fx.Node], match: AttentionMatch) -> Iterator[fx.Node]:
    """Nodes of floating-point tensors from the outputs of a site up to its operands, or to where nothing comes in."""
    seen = set(operands)
    pending = [match.output] + ([] if match.lse is None else [match.lse])
    while pending:
        node = pending.pop()
        value = node.meta.get("example_value")
        if node in seen or (isinstance(value, torch.Tensor) and not value.is_floating_point()):
            continue
        seen.add(node)
        # flex_attention gives a tuple; sizes and other numbers carry no gradient
        if isinstance(value, torch.Tensor | tuple):
            yield node
            pending.extend(node.all_input_nodes)


def _loses_gradient(node: fx.Node) -> bool:
    value = node.meta.get("example_value")
    if not isinstance(value, torch.Tensor) or value.requires_grad:
        return False
    name = _name(node)
    if not any(_requires_grad(n) for n in node.all_input_nodes) or any(part in name for part in _LIKE):
        return False
    # softmax does not change with what is subtracted from a row, so the maximum may be detached
    return not all(_is_maximum(n) for n in node.all_input_nodes)


def _is_maximum(node: fx.Node) -> bool:
    if _name(node) in ("getitem", "getattr") and isinstance(node.args[0], fx.Node):
        return _is_maximum(node.args[0])
    return _name(node) in _MAXIMA


def _requires_grad(node: fx.Node) -> bool:
    value: Any = node.meta.get("example_value")
    return isinstance(value, torch.Tensor) and value.requires_grad


def _name(node: fx.Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
