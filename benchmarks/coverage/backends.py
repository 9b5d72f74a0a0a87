"""What is measured: torch.compile backends by name, and how many sites each of their graphs has fused."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import fx

from fa4_inductor import backend as fa4_backend
from fa4_inductor.decide import Outcome
from fa4_inductor.settings import Settings, split_options

Backend = Callable[..., Callable[..., Any]]
DETAIL_CHARACTERS = 300
# Backends whose graph can run eagerly after the rewrite, several times faster than code is generated for it.
EAGER = ("fa4", "inductor-passes")


def _run_as_is(gm: fx.GraphModule, *_: Any, **__: Any) -> Callable[..., Any]:
    """Runs an Inductor-level graph eagerly instead of generating code for it."""
    from functorch.compile import make_boxed_func

    for node in gm.graph.nodes:  # Inductor does not mind strides; fused nodes have others than eager's views accept
        if node.target is torch.ops.aten.view.default:
            node.target = torch.ops.aten.reshape.default
    gm.recompile()
    return make_boxed_func(gm.forward)


def inductor_passes(gm: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    """Inductor up to and including the joint-graph passes (fuse_attention); then the graph runs eagerly."""
    from torch._inductor.compile_fx import compile_fx

    return compile_fx(gm, inputs, inner_compile=_run_as_is)


def fa4_eager(gm: fx.GraphModule, inputs: list[Any], options: dict[str, Any] | None = None) -> Callable[..., Any]:
    """The rewrite of backend "fa4"; then the graph runs eagerly."""
    ours, _ = split_options(options)
    fa4_backend.fuse(gm, Settings.from_env().with_options(ours))
    return gm.forward


def resolve(name: str, compile_with: str = "inductor", options: dict[str, Any] | None = None) -> Backend:
    """The backend of that name: fa4, inductor-passes, any that Dynamo knows, or an importable `module:attribute`.

    Args:
        compile_with: what runs the graph: "eager" as it is after the rewrite (`EAGER` only), "inductor" whatever the
            backend itself makes of it.
        options: torch.compile's `options`.

    Raises:
        ValueError: when the backend cannot be compiled with that.
        ImportError, AttributeError, InvalidBackend: when there is no such backend.
    """
    if compile_with == "eager" and name not in EAGER:
        raise ValueError(f"--compile eager is for {' and '.join(EAGER)}, not for {name}")
    if compile_with != "eager" and name == "inductor-passes":
        raise ValueError("inductor-passes generates no code: use --compile eager, or --backend inductor")
    if name == "fa4":
        backend: Backend = fa4_eager if compile_with == "eager" else fa4_backend.fa4
    elif name == "inductor-passes":
        backend = inductor_passes
    elif ":" in name:
        module, _, attribute = name.partition(":")
        backend = getattr(importlib.import_module(module), attribute)
    else:
        backend = torch._dynamo.lookup_backend(name)
    return functools.partial(backend, options=options) if options else backend


def fused_so_far(name: str) -> int:
    """Sites that the backend of that name says it has fused in this process."""
    group, counter = ("fa4", "fused") if name == "fa4" else ("inductor", "fuse_attention")
    return torch._dynamo.utils.counters[group][counter]


class Outcomes(logging.Handler):
    """Collects, while entered, the outcome of each site from the log records of backend "fa4"."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.seen: list[dict[str, Any]] = []
        self._logger = logging.getLogger(fa4_backend.__name__)
        self._level = self._logger.level

    def __enter__(self) -> Outcomes:
        self._logger.setLevel(logging.DEBUG)
        self._logger.addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._logger.removeHandler(self)
        self._logger.setLevel(self._level)

    def emit(self, record: logging.LogRecord) -> None:
        """Keeps the outcome that a record is about."""
        for outcome in record.args if isinstance(record.args, tuple) else ():
            if isinstance(outcome, Outcome):
                fields = dataclasses.asdict(outcome) | {"detail": outcome.detail[:DETAIL_CHARACTERS]}
                self.seen.append({name: value for name, value in fields.items() if name != "specialised_on"})


class Probe:
    """Wraps a backend: what each graph has fused is added up each time the graph executes.

    Attributes:
        compiled, executed: sites fused in all graphs compiled; the same of the graphs that ran since `start()`.
        outcomes: those in `log` of the graphs that ran since `start()`; only backend "fa4" tells.
        graphs: number of graphs compiled.
    """

    def __init__(self, backend: Backend, name: str, log: Outcomes) -> None:
        self.backend, self.name, self._log = backend, name, log
        self.compiled = self.executed = self.graphs = 0
        self.outcomes: list[dict[str, Any]] = []
        self.watch: AbstractContextManager[Any] = nullcontext()

    def start(self, watch: AbstractContextManager[Any] | None = None) -> None:
        """Forgets what has run so far; graphs run inside `watch` from now on."""
        self.executed, self.outcomes = 0, []
        self.watch = watch or nullcontext()

    def __call__(self, gm: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        """The backend's callable for `gm`, counted."""
        self.graphs += 1
        before, known = fused_so_far(self.name), len(self._log.seen)
        compiled = self.backend(gm, inputs)
        fused, outcomes = fused_so_far(self.name) - before, self._log.seen[known:]
        self.compiled += fused

        def run(*args: Any) -> Any:
            nonlocal fused
            before = fused_so_far(self.name)
            with self.watch:
                out = compiled(*args)
            late = fused_so_far(self.name) - before  # by backends that compile at the first call
            fused += late
            self.compiled += late
            self.executed += fused
            self.outcomes += outcomes
            return out

        return run
