"""AttentionSpec: the meaning of one attention site, free of graphs, devices and kernels."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch

from fa4_inductor.errors import ProgramError
from fa4_inductor.spec.expr import TRUE, Expr, score, walk
from fa4_inductor.spec.ops import Kind

_AUX_KINDS = {
    "bool": Kind.BOOL,
    "uint8": Kind.INT, "int8": Kind.INT, "int16": Kind.INT, "int32": Kind.INT, "int64": Kind.INT,
    "float16": Kind.FLOAT, "bfloat16": Kind.FLOAT, "float32": Kind.FLOAT, "float64": Kind.FLOAT,
}  # fmt: skip


class EmptyRow(enum.Enum):
    """What a query row gets that keeps no key with a logit above -inf (and has no sink)."""

    NAN = "nan"  # eager softmax over a row of -inf
    ZERO = "zero"  # torch SDPA with a bool mask (since 2.5), flex_attention
    MEAN = "mean"  # eager with a finfo.min fill: the row is uniform over all seqlen_k columns


@dataclass(frozen=True)
class AuxSpec:
    """dtype (torch name without "torch.") and rank of one captured tensor."""

    dtype: str
    ndim: int

    def __post_init__(self) -> None:
        if self.dtype not in _AUX_KINDS:
            raise ProgramError(f"aux dtype {self.dtype!r} is not supported; known: {', '.join(_AUX_KINDS)}")

    @property
    def kind(self) -> Kind:
        return _AUX_KINDS[self.dtype]

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @classmethod
    def of(cls, tensor: torch.Tensor) -> AuxSpec:
        return cls(str(tensor.dtype).removeprefix("torch."), tensor.dim())


@dataclass(frozen=True)
class TileMap:
    """Which tiles of `keep` are empty, mixed or full has been found out ahead, for tiles of tile_m query rows and
    tile_n keys: aux tensor `slot`, int32 (B or 1, Hq or 1, ceil(Sq / tile_m), 2 + ceil(Sk / tile_n)).

    A row of it lists the key tiles that one tile of query rows has to visit:

        [number of tiles, number of masked ones, masked tiles ... (unused) ... full tiles]

    Masked tiles stand from the front, full ones from the end. A full tile is kept by all its rows and keys, what is not
    listed by none. Whoever ignores the map computes the same.
    """

    slot: int
    tile_m: int
    tile_n: int


DROPOUT_WORDS = 3
"""Integers from [0, 2**32) that dropout reads: two words of the Philox key, one that numbers the call."""


@dataclass(frozen=True)
class Dropout:
    """Probabilities are set to 0 with probability `p`, the others divided by 1 - p, before they meet V.

    Which ones is a function of the indices and of aux tensor `slot`, int64 `(DROPOUT_WORDS,)` (`kernels.philox`), drawn
    anew for every call of every site. Normalisation and LSE know nothing of it.
    """

    p: float
    slot: int


@dataclass(frozen=True)
class AttentionSpec:
    """softmax over kept keys of `score`, times V.

    Attributes:
        softmax_scale: factor on q . k; `score()` inside the programs stands for the scaled product.
        score: FLOAT expression, the logit in natural units.
        keep: BOOL expression without `score`; False removes the key from the row.
        sink: FLOAT expression over (b, h, q_idx), the logit of one extra column that takes part in the softmax and
            is then dropped.
        empty_row: contract for rows that keep no key (or none with a logit above -inf); irrelevant (and ZERO) when
            there is a sink.
        aux: dtypes and ranks of the captured tensors, in slot order.
        num_sizes: number of run-time integers `size0..`.
        tile_map: a map of `keep` among the aux tensors, or None.
        dropout: what is done to the probabilities, or None.
    """

    softmax_scale: float
    score: Expr = score()
    keep: Expr = TRUE
    sink: Expr | None = None
    empty_row: EmptyRow = EmptyRow.ZERO
    aux: tuple[AuxSpec, ...] = ()
    num_sizes: int = 0
    tile_map: TileMap | None = None
    dropout: Dropout | None = None

    @property
    def sink_slots(self) -> frozenset[int]:
        """Aux slots that the sink reads and nothing else does: what learns there costs no work over the scores."""
        if self.sink is None:
            return frozenset()
        elsewhere = {n.value for n in walk(self.score, self.keep) if n.op == "load"}
        return frozenset(n.value for n in walk(self.sink) if n.op == "load") - elsewhere

    @property
    def sink_reads(self) -> frozenset[int]:
        """Aux slots that the sink reads."""
        return frozenset() if self.sink is None else frozenset(n.value for n in walk(self.sink) if n.op == "load")

    @property
    def score_slots(self) -> frozenset[int]:
        """Aux slots that the score reads."""
        return frozenset(n.value for n in walk(self.score) if n.op == "load")

    @property
    def text(self) -> str:
        """The program text (`spec.printer`): the identity of this spec."""
        from fa4_inductor.spec.printer import print_spec

        return print_spec(self)
