"""What kernels would like to know of aux tensors' layouts: which are read along rows, and which in whole tiles.

- A *dense* load has `q_idx, kv_idx` as its last indices and only (b, h) before them: one tile [q_idx, kv_idx] per key
  tile, which TMA can bring in beside K.
- A *table* load is what `lowering.hoist` put in the place of a term of the distance `kv_idx - q_idx`.
- A *streamed* tensor is read at a last index that changes with the row or key. With an innermost stride of 1 an address
  is one multiply-add.

Strides and addresses are known at launch, so a program has two kernels: one for regular tensors, which have that stride
and suit TMA where they are dense, and one for all others (docs/decisions/0007-regular-aux-tensors.md).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

from fa4_inductor.analysis.facts import facts
from fa4_inductor.analysis.parts import Stage, stage
from fa4_inductor.lowering.hoist import POSITION
from fa4_inductor.spec.attention import AttentionSpec
from fa4_inductor.spec.expr import Expr, const, index, walk
from fa4_inductor.spec.linear import linear

TMA_ALIGNMENT = 16
"""Bytes: what TMA demands of addresses and of all strides but the innermost."""
_BYTES = {"bool": 1, "uint8": 1, "float16": 2, "bfloat16": 2, "float32": 4}


def _loads(spec: AttentionSpec) -> list[Expr]:
    """Loads per element, row or key; keep in its solved form."""
    return [n for n in walk(spec.score, facts(spec).keep) if n.op == "load" and n.args]


@functools.lru_cache(maxsize=1024)
def dense_loads(spec: AttentionSpec) -> tuple[Expr, ...]:
    """The dense loads of the score and of keep in a fixed order, one entry per tile to load."""
    return tuple(n for n in _loads(spec) if spec.aux[n.value].dtype in _BYTES and _is_dense(n))


def dense_slots(spec: AttentionSpec) -> tuple[int, ...]:
    """Aux slots of the dense loads."""
    return tuple(dict.fromkeys(load.value for load in dense_loads(spec)))


@functools.lru_cache(maxsize=1024)
def table_loads(spec: AttentionSpec) -> tuple[Expr, ...]:
    """The loads from distance tables, which only `lowering.hoist` makes: it leaves no other load of this form in a
    score."""
    return tuple(n for n in walk(spec.score) if n.op == "load" and _is_table(n) and _in_pairs(spec, n))


@functools.lru_cache(maxsize=1024)
def column_loads(spec: AttentionSpec) -> tuple[Expr, ...]:
    """The loads of the score from vectors over the key."""
    return tuple(n for n in walk(spec.score) if n.op == "load" and n.args and _is_column(n) and _in_pairs(spec, n))


def _in_pairs(spec: AttentionSpec, load: Expr) -> bool:
    return spec.aux[load.value].dtype in ("float32", "bfloat16")


def _is_column(load: Expr) -> bool:
    return load.args[-1] is index("kv_idx") and all(stage(i) is Stage.UNIFORM for i in load.args[:-1])


def column_slots(spec: AttentionSpec) -> tuple[int, ...]:
    """Aux slots of the column loads."""
    return tuple(dict.fromkeys(load.value for load in column_loads(spec)))


def table_slots(spec: AttentionSpec) -> tuple[int, ...]:
    """Aux slots of the table loads."""
    return tuple(dict.fromkeys(load.value for load in table_loads(spec)))


@functools.lru_cache(maxsize=1024)
def streamed_slots(spec: AttentionSpec) -> tuple[int, ...]:
    """Aux slots of streamed tensors, tables among them."""
    tables = table_loads(spec)
    streamed = [n for n in _loads(spec) if n in tables or stage(n.args[-1]) is not Stage.UNIFORM]
    return tuple(dict.fromkeys(n.value for n in streamed))


class RegularSlots(NamedTuple):
    """Which aux slots a kernel for regular tensors wants how: dense ones for TMA, tables and columns in pairs, and all
    of them, the streamed ones, with an innermost stride of 1."""

    dense: tuple[int, ...] = ()
    tables: tuple[int, ...] = ()
    columns: tuple[int, ...] = ()
    streamed: tuple[int, ...] = ()


def regular_slots(spec: AttentionSpec, dense_aux: bool = True) -> RegularSlots:
    """dense_aux: whether the kernel reads dense tensors by TMA."""
    dense = dense_slots(spec) if dense_aux else ()
    return RegularSlots(dense, table_slots(spec), column_slots(spec), streamed_slots(spec))


def dense_bytes(spec: AttentionSpec, loads: tuple[Expr, ...]) -> int:
    """Bytes per score of these dense loads."""
    return sum(_BYTES[spec.aux[n.value].dtype] for n in loads)


def _is_dense(load: Expr) -> bool:
    return load.args[-2:] == (index("q_idx"), index("kv_idx")) and all(
        stage(i) is Stage.UNIFORM for i in load.args[:-2]
    )


def _is_table(load: Expr) -> bool:
    return (
        len(load.args) == 4
        and load.args[3] is const(0)
        and linear(load.args[2]) == linear(POSITION)
        and all(stage(i) is Stage.UNIFORM for i in load.args[:2])
    )


def has_unit_stride(strides: Sequence[int | None], sizes: Sequence[int | None]) -> bool:
    """Whether the innermost stride is 1. Strides of dimensions of size 1 mean nothing. What is None is not known yet,
    and taken for good: the launch looks at every tensor."""
    return sizes[-1] == 1 or strides[-1] in (1, None)


def suits_pairs(strides: Sequence[int | None], sizes: Sequence[int | None]) -> bool:
    """Whether rows are contiguous and begin an even number of elements apart."""
    outer = zip(strides[:-1], sizes)
    return has_unit_stride(strides, sizes) and not any(
        stride is not None and size != 1 and stride % 2 for stride, size in outer
    )


def suits_tma(strides: Sequence[int | None], sizes: Sequence[int | None], itemsize: int) -> bool:
    """Whether TMA can read the tensor: a unit stride, and all other strides are multiples of 16 bytes."""
    outer = zip(strides[:-1], sizes)
    return has_unit_stride(strides, sizes) and not any(
        stride is not None and size != 1 and stride * itemsize % TMA_ALIGNMENT for stride, size in outer
    )
