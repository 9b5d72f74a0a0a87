"""Inputs of hand-made graphs, with fake values as Dynamo records them."""

from __future__ import annotations

import torch
from torch import fx
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext


def placeholders(graph: fx.Graph, tensors: list[torch.Tensor], mode: FakeTensorMode) -> list[fx.Node]:
    """Inputs; under a mode with a ShapeEnv the lengths of q, k and v are symbolic."""
    nodes = []
    for i, t in enumerate(tensors):
        node = graph.placeholder(f"x{i}")
        sizes = [DimDynamic.DYNAMIC if i < 3 and dim == 2 else DimDynamic.STATIC for dim in range(t.dim())]
        context = StatelessSymbolicContext(dynamic_sizes=sizes) if mode.shape_env else None
        node.meta["example_value"] = mode.from_tensor(t, symbolic_context=context, source=ConstantSource(f"x{i}"))
        nodes.append(node)
    return nodes
