"""What the backend sees in a model: each attention site, where it is in the user's source, and what becomes of it.

report = fa4_inductor.explain(model, input_ids)
print(report)                  # a table
report.sites[0].program        # the score program of the first site
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from fa4_inductor.settings import Settings

_STYLES = {"fused": "green", "matched": "yellow", "declined": "red"}


@dataclasses.dataclass(frozen=True)
class SiteReport:
    """One attention site; fields as in `decide.Outcome`. `graph` counts Dynamo's graphs, `index` all sites."""

    index: int
    graph: int
    location: str
    status: str
    program: str | None
    implementation: str | None
    reason: str | None
    detail: str
    shapes: str
    specialised_on: str


@dataclasses.dataclass(frozen=True)
class Report:
    """All sites of one call, in graph order. `graphs` is the number of graphs Dynamo captured."""

    sites: tuple[SiteReport, ...]
    graphs: int

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data."""
        return dataclasses.asdict(self)

    def table(self) -> Any:
        """The report as a `rich` table; sites that differ in nothing but their layer share a row."""
        from rich.table import Table
        from rich.text import Text

        table = Table(title=self.summary(), title_justify="left", show_lines=True)
        for name in ("site", "becomes", "program, and why"):
            table.add_column(name, overflow="fold")
        for sites in self._groups():
            site = sites[0]
            where = Text(f"{_ranges([s.index for s in sites])}\n{site.location or 'unknown place'}")
            status = Text(site.status, style=_STYLES.get(site.status, ""))
            if site.implementation is not None:
                status.append(f"\n{site.implementation}")
            why = ": ".join(part for part in (site.reason, site.detail) if part)
            program = (site.program or "").replace("; ", "\n")
            kernel = f"compiled for {site.specialised_on}" if site.specialised_on else ""
            table.add_row(where, status, Text("\n".join(part for part in (program, site.shapes, kernel, why) if part)))
        return table

    def _groups(self) -> list[list[SiteReport]]:
        groups: dict[SiteReport, list[SiteReport]] = {}
        for site in self.sites:
            groups.setdefault(dataclasses.replace(site, index=0, graph=0), []).append(site)
        return list(groups.values())

    def summary(self) -> str:
        """One line: sites found, fused and left, and graphs."""
        fused = sum(site.status == "fused" for site in self.sites)
        left = len(self.sites) - fused
        return f"{len(self.sites)} attention sites in {self.graphs} graphs: {fused} fused, {left} left as they are"

    def __str__(self) -> str:
        from rich.console import Console

        console = Console(width=120, color_system=None)
        with console.capture() as capture:
            console.print(self.table())
        return capture.get()


def _ranges(indices: list[int]) -> str:
    """`#0-3, #5` for 0, 1, 2, 3, 5."""
    parts: list[list[int]] = []
    for index in indices:
        if parts and index == parts[-1][-1] + 1:
            parts[-1].append(index)
        else:
            parts.append([index])
    return ", ".join(f"#{part[0]}" if len(part) == 1 else f"#{part[0]}-{part[-1]}" for part in parts)


def explain(model: Callable[..., Any], *args: Any, **kwargs: Any) -> Report:
    """Run `model(*args, **kwargs)` once, unfused, and report every attention site Dynamo shows of it.

    Settings come from `FA4_INDUCTOR_*`; with `FA4_INDUCTOR_TARGET_ARCH=sm_90a` the report tells, on any machine, what
    happens on that GPU. Gradient mode counts: what trains may run by another implementation than
    under `torch.no_grad()`, or be left alone.

    Args:
        model: a module or function, compiled afresh whatever was compiled before.

    Returns:
        A report; empty when no graph holds an attention.
    """
    from fa4_inductor.backend import plan

    settings = Settings.from_env()
    sites: list[SiteReport] = []
    graphs = 0

    def record(gm: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        nonlocal graphs
        for module_plan in plan(gm, settings, explaining=True):
            for outcome in module_plan.outcomes:
                sites.append(SiteReport(len(sites), graphs, **dataclasses.asdict(outcome)))
        graphs += 1
        return gm.forward

    torch.compile(model, backend=record)(*args, **kwargs)
    return Report(tuple(sites), graphs)
