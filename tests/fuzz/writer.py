"""The state of a program while it is written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.fuzz.program import Input

Choose = Callable[[Sequence[Any]], Any]
FILLS = ("float('-inf')", "torch.finfo(s.dtype).min", "torch.finfo(torch.float32).min", "-1e4", "-1e9", "-1e30",
         "-65504.0", "torch.finfo(s.dtype).min / 2", "-3e38")  # fmt: skip
ADDITIVE = ("additive:-inf", "additive:min", "additive:-1e4", "additive:-1e9", "normal")


@dataclass
class Writer:
    """A program in the making.

    Attributes:
        rank: of q, k, v and the scores: 2, 3 (batch times heads), 4 or 5 (heads in two dimensions).
        kv: expression of the number of heads that k and v have when they meet q.
    """

    choose: Choose
    sizes: dict[str, int]
    dtype: str
    rank: int
    inputs: list[Input] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    results: list[str] = field(default_factory=list)
    kv: str = "H"

    def chance(self, one_in: int) -> bool:
        return self.choose((False,) * (one_in - 1) + (True,))

    def add(self, *lines: str) -> None:
        self.lines.extend(lines)

    def new(self, name: str, *shape: str, kind: str = "normal", dtype: str | None = None) -> str:
        """Declare an input; its name, with a number where it is taken."""
        taken = {i.name for i in self.inputs}
        unique = next(n for n in (name, *(f"{name}{i}" for i in range(2, 99))) if n not in taken)
        self.inputs.append(Input(unique, shape, kind, dtype or self.dtype))
        return unique

    def data(self, name: str, kind: str = "normal", dtype: str | None = None) -> str:
        """A new tensor that broadcasts to (B, H, S, T), with random dimensions of size 1 and leading ones left out."""
        dims = [self.choose((d, "1")) if d in "BH" else self.choose((d, d, d, "1")) for d in ("B", "H", "S", "T")]
        while dims[0] == "1" and len(dims) > 2 and self.chance(2):
            dims.pop(0)
        return self.fit(self.new(name, *dims, kind=kind, dtype=dtype), lead=len(dims) > 2)

    def fit(self, e: str, lead: bool = True) -> str:
        """`e`, which broadcasts to (B, H, S, T), made to broadcast to the scores. `lead`: it has more than 2 dims."""
        if self.rank == 4 or not lead:
            return e
        full = f"({e}).expand(B, H, S, T)"
        return {2: f"{full}[0, 0]", 3: f"{full}.reshape(B * H, S, T)", 5: f"{full}.unflatten(1, (H // G, G))"}[
            self.rank
        ]

    def once(self, name: str, line: str) -> str:
        """`name`, which `line` defines, defined once."""
        if not any(written.startswith(f"{name} = ") for written in self.lines):
            self.add(f"{name} = {line}")
        return name
