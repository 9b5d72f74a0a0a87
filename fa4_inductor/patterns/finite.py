"""Which captured tensors hold real numbers only, as scores do, and never a -inf that someone put there as a mask.

Parameters and products over features, and what arithmetic makes of them. An activation or an input of the model could
be a mask.
"""

from __future__ import annotations

import torch
from torch import fx

from fa4_inductor.patterns.rules_views import VIEW_RULES, shape

aten = torch.ops.aten
_READS = {aten._to_copy.default, aten.gather.default, aten.index.Tensor, aten.embedding.default}
_ARITHMETIC = {
    aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar, aten.add.Tensor, aten.sub.Tensor,
    aten.neg.default,
}  # fmt: skip
_PRODUCTS = {aten.bmm.default, aten.mm.default}


def is_finite(node: fx.Node, parameters: frozenset[fx.Node]) -> bool:
    """Is `node`, a value of a shadow graph with these parameters, such a tensor?"""
    if node in parameters:
        return True
    if node.target in VIEW_RULES or node.target in _READS:
        return isinstance(node.args[0], fx.Node) and is_finite(node.args[0], parameters)
    if node.target in _PRODUCTS:
        return shape(node.args[0])[-1] != 1
    return node.target in _ARITHMETIC and all(is_finite(n, parameters) for n in node.all_input_nodes)
