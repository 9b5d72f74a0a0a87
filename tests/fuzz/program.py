"""A generated program: Python source over a few tensors, with the sizes and inputs to run it on."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

Sizes = dict[str, int]
DYNAMIC = ("B", "S", "T")
"""Sizes that may differ between two calls of one compiled program; the others are written into its source."""


_HALF = ("float16", "bfloat16")


@dataclass(frozen=True)
class Input:
    """One tensor argument.

    Attributes:
        shape: expressions in the size names, such as "H * D".
        kind: "normal", "positive", "keep" (bool), "rows" (bool, some rows all False), "ids:5" (integers below 5),
            "flags" (integers 0 and 1), "additive:-inf" (0 or that number), "odd" (a few inf and nan).
    """

    name: str
    shape: tuple[str, ...]
    kind: str = "normal"
    dtype: str = "float32"

    def tensor(self, sizes: Sizes, number: int) -> torch.Tensor:
        """The same numbers for the same position and sizes."""
        shape = [int(eval(e, {}, dict(sizes))) for e in self.shape]
        draw = torch.Generator().manual_seed(1000 + number)
        kind, _, rest = self.kind.partition(":")
        chance = torch.rand(shape, generator=draw, dtype=torch.float64)
        if kind == "keep":
            return chance > 0.3
        if kind == "rows":
            return (chance > 0.3) & (torch.rand([*shape[:-1], 1], generator=draw) > 0.3)
        if kind == "ids":
            return (chance * int(rest)).long()
        if kind == "flags":
            return (chance > 0.3).long()
        dtype = getattr(torch, self.dtype)
        if kind == "additive":
            fill = float(rest) if rest != "min" else torch.finfo(dtype).min
            return torch.where(chance > 0.7, fill, 0.0).to(dtype)
        normal = torch.randn(shape, generator=draw, dtype=torch.float64)
        if kind == "odd":
            normal = torch.where(chance > 0.95, math.inf, torch.where(chance < 0.05, -math.inf, normal))
            normal = torch.where((chance > 0.5) & (chance < 0.52), math.nan, normal)
        return (chance + 0.5 if kind == "positive" else normal).to(dtype)


@dataclass(frozen=True)
class Program:
    """Attributes:
    lines: statements over the inputs and the sizes; each line stands on its own.
    results: names that are returned.
    second: other values of `DYNAMIC` sizes for a second call of the same compiled function.
    dynamo: captured by Dynamo; otherwise by `capture.record`, which is ten times as fast.
    """

    sizes: Sizes
    inputs: tuple[Input, ...]
    lines: tuple[str, ...]
    results: tuple[str, ...]
    second: Sizes | None = None
    dynamo: bool = False
    autocast: str | None = None
    grad: bool = False
    implementation: str = "reference"
    mutations: tuple[str, ...] = field(default=(), compare=False)

    @property
    def source(self) -> str:
        """The text of the function `f`."""
        names = ", ".join(i.name for i in self.inputs)
        body = [*self._size_lines(), *self.lines]
        if self.autocast:
            body = [f"with torch.autocast('cpu', dtype=torch.{self.autocast}):", *("    " + line for line in body)]
        body.append(f"return {', '.join(self.results)}")
        return f"def f({names}):\n" + "".join(f"    {line}\n" for line in body)

    def _size_lines(self) -> list[str]:
        lines = []
        for name, value in self.sizes.items():
            places = [(i.name, i.shape.index(name)) for i in self.inputs if name in i.shape]
            if self.second is not None and name in DYNAMIC and places:
                lines.append(f"{name} = {places[0][0]}.shape[{places[0][1]}]")
            else:
                lines.append(f"{name} = {value}")
        return lines

    @property
    def first_line(self) -> int:
        """Number of the line of `source` that `lines[0]` is."""
        return 2 + len(self.sizes) + bool(self.autocast)

    def rounding(self, dtype: torch.dtype) -> float:
        """The coarsest unit of rounding of results of `dtype`: of a narrower type on the way, but at least float32,
        which torch takes for integers beside a tensor without dimensions."""
        if not dtype.is_floating_point:
            return 0.0
        named = self._half_types | {"float32"}
        unit = max(torch.finfo(d).eps for d in (dtype, *(getattr(torch, n) for n in named)))
        large = "1e4" in self.source or any("1e4" in i.kind for i in self.inputs)
        return max(unit, 1e4 * torch.finfo(torch.float32).eps / 8) if large else unit  # scores beside -1e4

    @property
    def _half_types(self) -> set[str]:
        return {n for n in _HALF if f".{n}" in self.source or any(i.dtype == n for i in self.inputs)}

    @property
    def has_half_types(self) -> bool:
        """Does anything run in float16 or bfloat16?"""
        return bool(self._half_types)

    @property
    def may_overflow(self) -> bool:
        """Is there an exp without a maximum subtracted, whose overflow is noise by decision 0005?"""
        return any(re.search(r"\.?exp2?\(", line) and not re.search(r"max|logsumexp", line) for line in self.lines)

    def function(self, wide: bool = False) -> Callable[..., Any]:
        """`source` compiled; `wide`: with float64 for every half type."""
        space: dict[str, Any] = {"torch": torch, "F": torch.nn.functional, "math": math}
        source = re.sub(r"(?<=\.)(?:b?float16)\b", "float64", self.source) if wide else self.source
        exec(source, space)
        return space["f"]

    def tensors(self, sizes: Sizes | None = None) -> list[torch.Tensor]:
        """Fresh inputs at `sizes` (default: the program's)."""
        tensors = [i.tensor(sizes or self.sizes, n) for n, i in enumerate(self.inputs)]
        if self.grad:
            tensors = [t.requires_grad_(t.is_floating_point() and n < 3) for n, t in enumerate(tensors)]
        return tensors

    def __str__(self) -> str:
        how = [
            f"{name}={value!r}"
            for name, value in (("second", self.second), ("dynamo", self.dynamo), ("grad", self.grad),
                                ("implementation", self.implementation), ("mutations", self.mutations))
            if value not in (None, False, "reference", ())
        ]  # fmt: skip
        lines = [f"# {i.name}: {', '.join(i.shape) or '()'} {i.kind} {i.dtype}" for i in self.inputs]
        return "\n".join([*(f"# {h}" for h in how), *lines, self.source])
