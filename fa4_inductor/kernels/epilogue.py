"""What a graph does to the result of attention first: factors by row, and the sum of several results."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence

from torch import fx

from fa4_inductor.kernels.contract import widened
from fa4_inductor.kernels.graph_values import SIZES, GraphValues, index_names
from fa4_inductor.spec import AuxSpec, Expr, Kind
from fa4_inductor.spec.interpret import Env, evaluate


def build_epilogue(
    graph: fx.Graph,
    value: Expr,
    specs: Sequence[AuxSpec],
    result: fx.Node,
    k: fx.Node,
    aux: Sequence[fx.Node],
    sizes: Sequence[fx.Node | int],
    like: fx.Node,
) -> fx.Node:
    """The node of `value` for each element of `result`, in float32 or wider, added at the graph's insert point.

    Args:
        value: over `score` (the element), `b`, `h`, `q_idx`, sizes and loads of `aux`, which `specs` describe.
        result: (B, Hq, Sq, Dv). k: (B or 1, Hkv, Sk, D). All carry `example_value`.
        like: the node that is being replaced; new nodes take its source location.
    """
    values = GraphValues(graph, like)
    out = values.wrap(result)
    lengths = {name: values.length(n, d) for name, n, d in zip(SIZES, (result, result, result, k), (0, 1, 2, 2))}
    numbers = {f"size{i}": values.number(n) for i, n in enumerate(sizes)}
    with values.real_constants():
        names = index_names(values.make, value.free, lengths, numbers, out.device)
        wide = widened(out, Kind.FLOAT)
        loads = [widened(values.wrap(a), spec.kind, wide.dtype) for a, spec in zip(aux, specs, strict=True)]
        return evaluate(value, Env(names | {"score": wide}, loads)).node


def build_sum(graph: fx.Graph, results: Sequence[fx.Node], like: fx.Node) -> fx.Node:
    """The node of the sum of results in float32 or wider (a single result stays as it is)."""
    if len(results) == 1:
        return results[0]
    values = GraphValues(graph, like)
    return functools.reduce(operator.add, (widened(values.wrap(r), Kind.FLOAT) for r in results)).node
