"""A spec as the CuTe kernel wants it: what the graph computes better once than the kernel per score becomes an aux
tensor.

Costly terms of the distance become tables (`lowering.hoist`); boolean key masks get the first and last key that they
keep beside them (`lowering.kept_bounds`); int64 tensors that are read per row or per key are
narrowed to int32, saturating, as the kernel's arithmetic would do it at each load. The graph then does the rest, once
for all layers that share it (`kernels.graph_aux`).
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass

from fa4_inductor.analysis.parts import Stage, stage
from fa4_inductor.lowering.hoist import HoistedTable, hoist_distance_terms
from fa4_inductor.lowering.kept_bounds import KeptBounds, bound_by_kept_keys
from fa4_inductor.spec.attention import AttentionSpec, AuxSpec
from fa4_inductor.spec.expr import Expr, walk
from fa4_inductor.spec.simplify import drop_unused_aux


@dataclass(frozen=True)
class Prepared:
    """What to launch and how its aux tensors come from those of the original spec.

    Attributes:
        spec: equivalent to the original over the new aux tensors.
        source: the original spec.
        tables, bounds: computed from the original aux tensors; number i of all is slot `len(source.aux) + i` below.
        slots: for each aux tensor of `spec`, the original slot or table it is.
        narrowed: aux tensors of `spec` that are int64 in the original and int32 here.
    """

    spec: AttentionSpec
    source: AttentionSpec
    tables: tuple[HoistedTable, ...]
    bounds: tuple[KeptBounds, ...]
    slots: tuple[int, ...]
    narrowed: frozenset[int]


@functools.lru_cache(maxsize=1024)
def prepare(spec: AttentionSpec) -> Prepared:
    """`spec` for the kernel. A spec that needs nothing comes back as it is, with all its slots."""
    result, tables = hoist_distance_terms(spec)
    result, bounds = bound_by_kept_keys(result)
    result, slots = drop_unused_aux(result) if tables else (result, tuple(range(len(result.aux))))
    read = _read_per_row_or_key(result)
    narrowed = frozenset(i for i, aux in enumerate(result.aux) if aux.dtype == "int64" and i in read)
    if narrowed:
        aux = tuple(AuxSpec("int32", a.ndim) if i in narrowed else a for i, a in enumerate(result.aux))
        result = dataclasses.replace(result, aux=aux)
    return Prepared(result, spec, tables, bounds, slots, narrowed)


def _read_per_row_or_key(spec: AttentionSpec) -> set[int]:
    """Slots with a load that is not uniform per (b, h); for the others one conversion per tile is nothing."""
    roots: list[Expr] = [r for r in (spec.score, spec.keep, spec.sink) if r is not None]
    return {n.value for n in walk(*roots) if n.op == "load" and stage(n) is not Stage.UNIFORM}
