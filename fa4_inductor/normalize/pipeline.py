"""Passes over a `Shadow`, in the order of `PASSES`. Each keeps every value: the map from slice nodes moves with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import fx

from fa4_inductor.capture.fx_view import shape_exprs
from fa4_inductor.capture.shadow import Shadow

aten = torch.ops.aten
_COPIES = {aten.clone.default, aten.alias.default, aten.detach.default, aten.lift_fresh_copy.default}
_UNARY_IDENTITIES = {aten.expand.default, aten.view.default, aten._unsafe_view.default, aten.reshape.default}


def normalize(shadow: Shadow) -> Shadow:
    """Run all passes on a shadow, in place; returns it."""
    for run in PASSES:
        run(shadow)
    shadow.graph.lint()
    return shadow


def drop_copies(shadow: Shadow) -> None:
    """clone, contiguous, detach: the same values. Memory is not part of the meaning, and the first holder of a value is
    the one worth binding."""
    for node in _calls(shadow, _COPIES):
        _replace(shadow, node, node.args[0])


def drop_identity_views(shadow: Shadow) -> None:
    """Expands and reshapes to the shape the tensor has (torch.matmul leaves many)."""
    for node in _calls(shadow, _UNARY_IDENTITIES):
        source = node.args[0]
        if shape_exprs(source.meta["val"]) == shape_exprs(node.meta["val"]):
            _replace(shadow, node, source)


def drop_identity_casts(shadow: Shadow) -> None:
    """Casts to the dtype and device the tensor has."""
    for node in _calls(shadow, {aten._to_copy.default}):
        old, new = node.args[0].meta["val"], node.meta["val"]
        if (old.dtype, old.device) == (new.dtype, new.device):
            _replace(shadow, node, node.args[0])


PASSES: tuple[Callable[[Shadow], None], ...] = (drop_copies, drop_identity_casts, drop_identity_views)


def _calls(shadow: Shadow, targets: set[object]) -> Iterator[fx.Node]:
    for node in list(shadow.graph.nodes):
        if node.op == "call_function" and node.target in targets:
            yield node


def _replace(shadow: Shadow, node: fx.Node, source: fx.Node) -> None:
    node.replace_all_uses_with(source)
    moved = shadow.positions.pop(node, [])
    if moved:
        shadow.positions[source] = sorted([*shadow.positions.get(source, []), *moved])
        shadow.value.update(dict.fromkeys(moved, source))
    shadow.graph.erase_node(node)
