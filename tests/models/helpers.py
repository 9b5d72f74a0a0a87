"""Running a model with its sites replaced, without paying for Inductor's code generation."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from fa4_inductor import measure, model_zoo
from fa4_inductor.backend import fuse
from fa4_inductor.runtime.ops import ATTENTION
from fa4_inductor.settings import Settings

TINY = [(name, attn) for name in model_zoo.names() for attn in model_zoo.implementations(name)]


@dataclasses.dataclass
class Call:
    """One fused op of a graph: its program and the fake operands."""

    program: str
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    aux: Sequence[torch.Tensor]


@dataclasses.dataclass
class Fused:
    """A compiled model, and what its graphs hold."""

    model: Callable[..., Any]
    calls: list[Call]
    graphs: int = 0


def fused(model: Callable[..., Any], dynamic: bool | None = None, **options: Any) -> Fused:
    """`model` compiled with its sites replaced; the rewritten graphs then run eagerly. Options without "fa4."."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    settings = Settings.from_env().with_options({f"fa4.{name}": value for name, value in options.items()})
    result = Fused(model, [])

    def backend(gm: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        fuse(gm, settings)
        result.graphs += 1
        for node in gm.graph.nodes:
            if node.target is ATTENTION:
                q, k, v, aux, program, *_ = fx.node.map_arg(node.args, lambda n: n.meta["example_value"])
                result.calls.append(Call(program, q, k, v, aux))
        return gm.forward

    result.model = torch.compile(model, backend=backend, dynamic=dynamic)
    return result


def counters() -> collections.Counter[str]:
    """This package's counters since the last `fused`."""
    return collections.Counter(torch._dynamo.utils.counters["fa4"])


def error(case: model_zoo.Case, model: Callable[..., Any]) -> measure.Error:
    """Error of a compiled model on the case's inputs, against the uncompiled model in float64."""
    return measure.compare(case.run(model), case.run(), case.in_double().run())
