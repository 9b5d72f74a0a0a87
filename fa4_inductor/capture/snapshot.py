"""A graph as it was: cheap to take, built again only when it is needed."""

from __future__ import annotations

import copy

from torch import fx


class Snapshot:
    """The nodes of `module.graph` now. Arguments of nodes are never changed in place, so references to them suffice."""

    def __init__(self, module: fx.GraphModule) -> None:
        self.module = module
        self._codegen = copy.deepcopy(module.graph._codegen)
        self._nodes = [(n, n.op, n.target, n.args, n.kwargs, n.name, n.type, n.meta.copy()) for n in module.graph.nodes]
        # Dynamo notes on placeholders where they come from, which AOTAutograd insists on
        self._notes = {n: vars(n).copy() for n in module.graph.nodes}

    def restore(self) -> None:
        """Give the module a graph of new nodes that are as the old ones were."""
        graph = fx.Graph(tracer_cls=self.module.graph._tracer_cls)
        graph.set_codegen(self._codegen)
        new: dict[fx.Node, fx.Node] = {}
        for node, kind, target, args, kwargs, name, annotation, meta in self._nodes:
            args, kwargs = fx.node.map_arg((args, kwargs), new.__getitem__)
            new[node] = graph.create_node(kind, target, args, kwargs, name, annotation)
            new[node].meta = meta
            vars(new[node]).update({k: x for k, x in self._notes[node].items() if k not in vars(new[node])})
        self.module.graph = graph
