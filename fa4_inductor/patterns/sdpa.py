"""torch.nn.functional.scaled_dot_product_attention with any mask, as torch documents it.

Semantics (its documentation, torch 2.11 to 2.13): scale defaults to 1/sqrt(E); is_causal is aligned to the top left; a
bool mask keeps where True and gives 0 for rows that keep nothing; a float mask is added.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx

from fa4_inductor.capture.fx_view import example, shape_exprs
from fa4_inductor.capture.shadow import Shadow
from fa4_inductor.errors import DeclineReason, DeclineSite
from fa4_inductor.patterns import masks
from fa4_inductor.patterns.elements import Elements, Source
from fa4_inductor.patterns.indices import Index
from fa4_inductor.patterns.operands import BoundOperand, Steps, bind
from fa4_inductor.patterns.product import Found, SourceOf
from fa4_inductor.patterns.rules_pointwise import kind_of
from fa4_inductor.patterns.rules_views import broadcast
from fa4_inductor.patterns.space import Space
from fa4_inductor.spec import AttentionSpec, AuxSpec
from fa4_inductor.spec import expr as E
from fa4_inductor.spec.ops import Kind

_DEFAULTS = {
    "query": None, "key": None, "value": None, "attn_mask": None,
    "dropout_p": 0.0, "is_causal": False, "scale": None, "enable_gqa": False,
}  # fmt: skip
_SIGNATURE = inspect.Signature(
    [inspect.Parameter(n, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=d) for n, d in _DEFAULTS.items()]
)


@dataclass(frozen=True)
class Call:
    """Arguments of one call; tensors as nodes."""

    query: fx.Node
    key: fx.Node
    value: fx.Node
    attn_mask: fx.Node | None
    is_causal: bool
    scale: float
    enable_gqa: bool
    dtype: torch.dtype
    output_shape: tuple[sympy.Expr, ...]

    @property
    def tensors(self) -> tuple[fx.Node, ...]:
        return tuple(n for n in (self.query, self.key, self.value, self.attn_mask) if n is not None)


def read_call(node: fx.Node) -> Call:
    """The arguments of an SDPA node; a scale or flag that Dynamo made symbolic is specialised on its value.

    Raises:
        DeclineSite: DROPOUT.
    """
    bound = _SIGNATURE.bind(*node.args, **node.kwargs)
    bound.apply_defaults()
    values = bound.arguments
    for name in ("dropout_p", "is_causal", "scale", "enable_gqa"):
        values[name] = _constant(values[name])
    if values["dropout_p"] != 0:
        raise DeclineSite(DeclineReason.DROPOUT, f"dropout_p={values['dropout_p']}")
    scale = values["scale"]
    if scale is None:
        scale = int(example(values["query"]).shape[-1]) ** -0.5  # specialises head_dim, as every kernel does
    output = example(node)
    return Call(
        query=values["query"],
        key=values["key"],
        value=values["value"],
        attn_mask=values["attn_mask"],
        is_causal=bool(values["is_causal"]),
        scale=float(scale),
        enable_gqa=bool(values["enable_gqa"]),
        dtype=output.dtype,
        output_shape=shape_exprs(output),
    )


def _constant(value: Any) -> Any:
    value = example(value) if isinstance(value, fx.Node) else value
    if isinstance(value, torch.SymFloat | torch.SymInt):
        return float(value)
    return bool(value) if isinstance(value, torch.SymBool) else value


class SdpaSite:
    """One SDPA call on the shadow of its arguments."""

    def __init__(self, call: Call, shadow: Shadow, nodes: dict[fx.Node, fx.Node], source_of: SourceOf) -> None:
        self.call, self.nodes = call, nodes
        *lead, seqlen_q, _ = call.output_shape
        self.has_heads = len(lead) > 1 or bool(lead and call.enable_gqa)
        heads = lead.pop() if self.has_heads else sympy.Integer(1)
        self.batches = tuple(lead)
        seqlen_k = shape_exprs(example(call.key))[-2]
        self.space = Space(sympy.Mul(*self.batches), heads, seqlen_q, seqlen_k)
        self.ev = Elements(shadow, self.space, source_of)

    def _lead(self, rank: int) -> Index:
        """Index of the dimensions before (S, D) of a tensor of this rank, before broadcasting."""
        batch = self.space.ranges.unmerge(self.space.b, self.batches) if self.batches else ()
        full = (*batch, self.space.h) if self.has_heads else batch
        return full[max(len(full) - (rank - 2), 0) :]

    def match(self) -> Found:
        call, space = self.call, self.space
        q = self._operand(call.query, space.q, "d", key=False)
        k = self._operand(call.key, space.kv, "d", key=True)
        v = self._operand(call.value, self._row_of_v(), "dv", key=True)
        logits: E.Expr = E.score()
        for factor in (*q.factors, *k.factors, E.const(call.scale)):
            logits = E.call("mul", logits, factor)
        if call.is_causal:
            causal = E.call("le", space.to_expr(space.kv), space.to_expr(space.q))
            logits = E.call("where", causal, logits, -float("inf"))
        if call.attn_mask is not None:
            logits = self._masked(logits, call.attn_mask)
        # SDPA adds a half mask in float32: -65504 hides a key there, but rows of fills keep their scores.
        added_in = torch.float32 if call.dtype is torch.float16 else call.dtype
        parts = masks.split(logits, dtypes=(added_in,), fills_are_zero=True, has_sink=False)
        spec = AttentionSpec(
            softmax_scale=1.0,
            score=parts.score,
            keep=parts.keep,
            empty_row=parts.empty_row,
            aux=tuple(AuxSpec(str(a.dtype).removeprefix("torch."), a.ndim) for a in self.ev.aux),
            num_sizes=len(space.symbols),
        )
        return Found(spec, q, k, v, tuple(self.ev.aux), tuple(space.symbols), self._output_view(), None)

    def _row_of_v(self) -> sympy.Expr:
        """kv_idx; a variable of its own where Dynamo has another symbol for the same length (caches of k and v).

        Raises:
            DeclineSite: UNSUPPORTED_SHAPE for lengths that differ, which SDPA does not check on every device.
        """
        length = shape_exprs(self.nodes[self.call.value].meta["val"])[-2]
        if (length - self.space.seqlen_k).is_nonzero:
            raise DeclineSite(DeclineReason.UNSUPPORTED_SHAPE, f"{self.space.seqlen_k} keys and {length} values")
        return self.space.kv if length == self.space.seqlen_k else self.space.ranges.declare("kv_idx_of_v", length)

    def _masked(self, logits: E.Expr, mask: fx.Node) -> E.Expr:
        node = self.nodes[mask]
        shape = shape_exprs(node.meta["val"])
        index = broadcast((*self._lead(len(self.call.output_shape)), self.space.q, self.space.kv), shape)
        value = self.ev.value(node, index)
        if kind_of(node.meta["val"].dtype) is Kind.BOOL:
            return E.call("where", self.space.simplify(value), logits, -float("inf"))
        return logits + value

    def _operand(self, node: fx.Node, position: sympy.Expr, feature: str, *, key: bool) -> BoundOperand:
        """Bind q, k or v as SDPA reads it: batch dimensions broadcast, grouped heads with enable_gqa."""
        shadowed = self.nodes[node]
        shape = shape_exprs(shadowed.meta["val"])
        lead = list(broadcast(self._lead(len(shape)), shape[:-2]))
        if key and self.call.enable_gqa and len(shape) > 2 and shape[-3] != 1:
            lead[-1] = self.space.ranges.div(self.space.h, sympy.cancel(self.space.heads / shape[-3]))
        d = self.space.ranges.declare(feature, shape[-1])
        at = (*lead, position if shape[-2] != 1 else sympy.Integer(0), d)
        try:
            bound = bind(self.ev, shadowed, at, position, d, key=key, scaled=feature == "d")
        except DeclineSite as refusal:
            source = self.ev.source_of(shadowed)
            if refusal.reason is not DeclineReason.UNSUPPORTED_LAYOUT or source is None:
                raise
            bound = self._expanded(source, shadowed.meta["val"], key)
        if bound.dtype == self.call.dtype:
            return bound
        steps: Steps = (*bound.view, ("to", self.call.dtype))  # autocast
        return BoundOperand(bound.source, steps, self.call.dtype, bound.heads, bound.factors)

    def _expanded(self, source: Source, tensor: torch.Tensor, key: bool) -> BoundOperand:
        """An argument brought to (B, H, S, D) as it is, with its batch dimensions expanded and merged."""
        shape, full = shape_exprs(tensor), len(self.call.output_shape)
        shape = (*(sympy.Integer(1),) * (full - len(shape)), *shape)
        heads = shape[-3] if self.has_heads else sympy.Integer(1)
        if not key:
            heads = self.space.heads
        sizes = (*self.batches, heads) if self.has_heads else self.batches
        expanded = tuple(-1 if a == b else b for a, b in zip(shape, sizes))
        steps: Steps = (("unsqueeze", 0),) * (full - tensor.dim())
        if set(expanded) != {-1}:
            steps += (("expand", (*expanded, -1, -1)),)
        steps += (("reshape", (self.space.batch, heads, *shape[-2:])),)
        return BoundOperand(source, steps, tensor.dtype, heads)

    def _output_view(self) -> Steps:
        space, depth = self.space, self.call.output_shape[-1]
        if self.call.output_shape == (space.batch, space.heads, space.seqlen_q, depth):
            return ()
        return (("reshape", self.call.output_shape),)
