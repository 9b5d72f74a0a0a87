"""First and last kept key of boolean key masks, as aux tensors that the graph computes once for all layers.

A mask `aux0[b, kv_idx]` (padding, the valid slots of a static cache) says nothing in closed form, so every key would be
read and most of them dropped. With its first and last True beside it, `keep` has bounds: tiles outside are never
visited, and a cache of many slots costs what its valid ones cost. The bounds follow from the mask, so `keep` stays what
it was.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from fa4_inductor.spec import expr as E
from fa4_inductor.spec.attention import AttentionSpec, AuxSpec
from fa4_inductor.spec.ops import Kind

_KV = E.index("kv_idx")


@dataclass(frozen=True)
class KeptBounds:
    """An int32 tensor (*lead, 2) for the bool aux tensor `slot` (*lead, keys): its first True and one behind its last;
    (keys, 0) where it has none."""

    slot: int


def bound_by_kept_keys(spec: AttentionSpec) -> tuple[AttentionSpec, tuple[KeptBounds, ...]]:
    """`spec` with bounds on the key beside each conjunct of `keep` that is a bool load by key and, at most, b and h.

    Returns the new spec, whose `aux` is the old one followed by one tensor per mask, and what these are.
    """
    masks = [t for t in E.conjuncts(spec.keep) if _is_key_mask(t)]
    slots = list(dict.fromkeys(t.value for t in masks))
    bounds = []
    for mask in masks:
        slot, lead = len(spec.aux) + slots.index(mask.value), mask.args[:-1]
        first, behind = (E.load(slot, (*lead, E.const(i)), Kind.INT) for i in range(2))
        bounds += [E.call("ge", _KV, first), E.call("lt", _KV, behind)]
    if not masks:
        return spec, ()
    aux = (*spec.aux, *(AuxSpec("int32", spec.aux[slot].ndim) for slot in slots))
    keep = E.conjunction([spec.keep, *bounds])
    return dataclasses.replace(spec, keep=keep, aux=aux), tuple(map(KeptBounds, slots))


def _is_key_mask(e: E.Expr) -> bool:
    return (
        e.op == "load"
        and e.kind is Kind.BOOL
        and e.args[-1:] == (_KV,)
        and not any({"q_idx", "kv_idx"} & a.free for a in e.args[:-1])
    )


def kept_bounds(make: Callable[..., Any], mask: Any) -> Any:
    """What `KeptBounds` describes, by torch ops on a bool tensor (*lead, keys) or a graph value of one."""
    keys = mask.shape[-1]
    index = make(torch.arange, keys, device=mask.device)
    # one more entry, so that there is a maximum where there are no keys
    behind, from_first = (
        make(torch.nn.functional.pad, make(torch.where, mask, distance, 0), (0, 1)).amax(-1)
        for distance in (index + 1, keys - index)
    )
    return make(torch.stack, [keys - from_first, behind], -1).to(torch.int32)
