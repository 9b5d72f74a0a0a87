"""Tile configuration of the backward kernel."""

from __future__ import annotations

import os

import torch

from fa4_inductor.analysis.facts import AttentionFacts
from fa4_inductor.lowering.derive import score_derivative
from fa4_inductor.lowering.program_roots import make_roots, may_fill
from fa4_inductor.spec.attention import AttentionSpec
from fa4_inductor.spec.expr import const

ENABLED_BY = "FA4_INDUCTOR_UNTRIED_BACKWARD"
"""Environment variable: "1" lets sites train on those parts of the backward kernel that have not run on a GPU yet."""

KEYS_PER_TILE = 128
HEAD_DIMS = tuple((d, dv) for d in (64, 80, 96, 128) for dv in (64, 80, 96, 128))
"""Pairs (head_dim, head_dim_v) that the kernel has."""
_TRIED_HEAD_DIMS = ((64, 64), (128, 128))


def padded_head_dim(head_dim: int) -> int:
    """The columns of a tile in shared memory and in the accumulator of dQ."""
    return 64 if head_dim <= 64 else 128


def keeps_half_p(spec: AttentionSpec, dtype: torch.dtype) -> bool:
    """Whether P in bf16 stands for P * score' in dS: half the registers, where score' is 1."""
    return dtype is torch.bfloat16 and score_derivative(spec.score) is const(1.0)


def backward_tile_m(
    head_dim: int, head_dim_v: int, spec: AttentionSpec, dtype: torch.dtype, learned: bool = False
) -> int | None:
    """Query rows per tile; None for head dims that the kernel does not have. learned: with gradients of aux tensors.

    128 rows need the registers that P in half precision leaves free: without, ptxas waits for every wgmma.
    """
    if (head_dim, head_dim_v) not in HEAD_DIMS:
        return None
    narrow = (head_dim, head_dim_v) == (64, 64)
    return 128 if narrow and keeps_half_p(spec, dtype) and not learned else 64


def asked_for_untried() -> bool:
    """Whether `ENABLED_BY` is set."""
    return os.environ.get(ENABLED_BY) == "1"


def untried(head_dims: tuple[int, int], learned: bool, spec: AttentionSpec, facts: AttentionFacts) -> str:
    """What a site's gradients need of the kernel that is compiled and read, but has not run on a GPU and has not been
    asked for (`ENABLED_BY`); empty where there is nothing (docs/decisions/0016).

    Args:
        learned: captured tensors need gradients, too.
    """
    if asked_for_untried():
        return ""
    if head_dims not in _TRIED_HEAD_DIMS:
        return f"head dims {head_dims}"
    if learned:
        return "gradients of captured tensors"
    if torch.are_deterministic_algorithms_enabled():
        return "key tiles in a fixed order"
    if may_fill(make_roots(spec, facts, True, True, (), ())):
        return "rows of nothing but fills"
    return ""
