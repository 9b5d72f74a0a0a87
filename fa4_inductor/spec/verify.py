"""Legality of a spec. Run after every pass in tests, and once before a spec leaves the compiler."""

from __future__ import annotations

from fa4_inductor.errors import ProgramError
from fa4_inductor.spec.attention import AttentionSpec, AuxSpec
from fa4_inductor.spec.expr import LENGTH_NAMES, Expr, walk
from fa4_inductor.spec.ops import Kind


def verify(spec: AttentionSpec) -> AttentionSpec:
    """Return `spec` if it is legal.

    Raises:
        ProgramError: a kind, a slot, a rank or a dependency is wrong; the message names it.
    """
    _expect(spec.score.kind is Kind.FLOAT, "score must be a float expression")
    _expect(spec.keep.kind is Kind.BOOL, "keep must be a bool expression")
    _expect("score" not in spec.keep.free, "keep may not depend on the score")
    if spec.sink is not None:
        _expect(spec.sink.kind is Kind.FLOAT, "sink must be a float expression")
        _expect(not spec.sink.free & {"score", "kv_idx"}, "sink may depend on b, h and q_idx only")
    _expect(spec.softmax_scale == spec.softmax_scale, "softmax_scale is nan")
    if spec.tile_map is not None:
        slot = spec.tile_map.slot
        _expect(0 <= slot < len(spec.aux), f"aux{slot} is not declared")
        _expect(spec.aux[slot] == AuxSpec("int32", 4), f"aux{slot} is no tile map: those are int32 of rank 4")
    if spec.dropout is not None:
        slot = spec.dropout.slot
        _expect(0.0 < spec.dropout.p <= 1.0, f"dropout of {spec.dropout.p}; none at all has no field")
        _expect(0 <= slot < len(spec.aux), f"aux{slot} is not declared")
        _expect(spec.aux[slot] == AuxSpec("int64", 1), f"aux{slot} has no words for dropout: those are int64 of rank 1")
    for root in (spec.score, spec.keep, *([spec.sink] if spec.sink is not None else [])):
        for node in walk(root):
            _verify_node(node, spec)
    return spec


def _verify_node(node: Expr, spec: AttentionSpec) -> None:
    if node.op == "load":
        _expect(0 <= node.value < len(spec.aux), f"aux{node.value} is not declared")
        aux = spec.aux[node.value]
        _expect(
            len(node.args) == aux.ndim, f"aux{node.value} has rank {aux.ndim}, indexed with {len(node.args)} indices"
        )
        _expect(node.kind is aux.kind, f"aux{node.value} is {aux.dtype}, read as {node.kind.name}")
    elif node.op == "size" and node.value not in LENGTH_NAMES:
        _expect(int(node.value[4:]) < spec.num_sizes, f"{node.value} is not declared")


def _expect(condition: bool, message: str) -> None:
    if not condition:
        raise ProgramError(message)
