"""One entry of the case corpus: an attention-like function, the program it must become, or the reason it must not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from fa4_inductor.errors import DeclineReason

BATCH, HEADS, KV_HEADS, SEQLEN, HEAD_DIM = 2, 4, 2, 24, 16
CAUSAL = "kv_idx <= q_idx"


@dataclass(frozen=True)
class Case:
    """A function of float64 q, k, v (B, H, S, D) and extra tensors, with what the matcher must say.

    Attributes:
        program: expected text after "scale=" (score, keep, sink, empty_row), or None.
        aux: expected "dtype[rank],..." of the program.
        decline: expected reason of the only site; None when it must match.
        sites: number of attention-like sites (0: nothing to report).
        programs: as `program`, for each of several sites. declines: the reasons of several sites.
        epilogue: expected changes of the results, as " + "-joined text.
    """

    name: str
    function: Callable[..., Any]
    program: str | None = None
    aux: str = ""
    decline: DeclineReason | None = None
    extra: Callable[[], tuple[Any, ...]] = tuple
    kv_heads: int = HEADS
    dtype: torch.dtype = torch.float64
    sites: int = 1
    seqlen_k: int = SEQLEN
    epilogue: str | None = None
    programs: tuple[str, ...] = ()
    declines: tuple[DeclineReason, ...] = ()

    def inputs(self) -> tuple[Any, ...]:
        generator = torch.Generator().manual_seed(7)

        def draw(heads: int, length: int) -> torch.Tensor:
            return torch.randn(BATCH, heads, length, HEAD_DIM, generator=generator, dtype=torch.float64).to(self.dtype)

        q = draw(HEADS, SEQLEN)
        return (q, draw(self.kv_heads, self.seqlen_k), draw(self.kv_heads, self.seqlen_k), *self.extra())

    @property
    def texts(self) -> set[str]:
        """Of all sites."""
        return {f"fa4/1; aux={self.aux}; {text}" for text in self.programs or (self.program,)}

    @property
    def reasons(self) -> tuple[DeclineReason, ...]:
        """Of all sites that must decline."""
        return self.declines or (() if self.decline is None else (self.decline,))


def program(
    score: str = "score",
    keep: str = "True",
    empty_row: str = "nan",
    scale: float = 0.25,
    sink: str | None = None,
    sizes: int = 0,
) -> str:
    sink_text = f"sink={sink}; " if sink else ""
    return f"sizes={sizes}; scale={scale}; score={score}; keep={keep}; {sink_text}empty_row={empty_row}"


def lower_triangle(device: Any = None) -> torch.Tensor:
    return torch.tril(torch.ones(SEQLEN, SEQLEN, dtype=torch.bool))


def padding() -> torch.Tensor:
    """bool (B, S): the last row of the batch is a quarter padding on the left."""
    keep = torch.ones(BATCH, SEQLEN, dtype=torch.bool)
    keep[-1, : SEQLEN // 4] = False
    return keep
