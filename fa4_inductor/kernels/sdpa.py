"""A spec as the smallest equivalent `F.scaled_dot_product_attention` call: no mask, is_causal, or a mask that is only
as large as what it depends on. As eager function, and as nodes of an FX graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fa4_inductor.analysis.facts import facts
from fa4_inductor.errors import DeclineReason, DeclineSite
from fa4_inductor.kernels.contract import bshd, no_lse, widened
from fa4_inductor.kernels.graph_values import SIZES, GraphValue, GraphValues, Memo, index_names
from fa4_inductor.spec import AttentionSpec, EmptyRow, Expr
from fa4_inductor.spec.expr import TRUE, is_finite_const
from fa4_inductor.spec.interpret import Env, evaluate

Make = Callable[..., Any]
"""`make(function, *args, **kwargs)`: calls it, or records the call in a graph."""
_HALF = (torch.float16, torch.bfloat16)


def attention_sdpa(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    aux: Sequence[torch.Tensor],
    spec: AttentionSpec,
    sizes: Sequence[int] = (),
    *,
    need_lse: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Eager form (`kernels.contract`), for specs that `lowering.support.supports_sdpa` accepts.

    Raises:
        DeclineSite: for an LSE, which SDPA does not return, and for scores that are not affine.
    """
    if need_lse:
        raise DeclineSite(DeclineReason.UNSUPPORTED_PROGRAM, "SDPA does not return the LSE")
    make: Make = lambda function, *args, **kwargs: function(*args, **kwargs)  # noqa: E731
    lengths = dict(zip(SIZES, (*q.shape[:3], k.shape[2]), strict=True))
    out = _call(make, q, k, v, aux, spec, lengths, {f"size{i}": n for i, n in enumerate(sizes)}, None)
    return bshd(out, q.dtype), no_lse(q)


def build_sdpa(
    graph: fx.Graph,
    spec: AttentionSpec,
    q: fx.Node,
    k: fx.Node,
    v: fx.Node,
    aux: Sequence[fx.Node],
    sizes: Sequence[fx.Node | int],
    like: fx.Node,
    memo: Memo | None = None,
) -> fx.Node:
    """The node of the (B, Hq, Sq, Dv) result, added at the graph's insert point with all it needs.

    Args:
        q, k, v, aux, sizes: as in `patterns.match.AttentionMatch`, views applied; nodes carry `example_value`.
        like: the node that is being replaced; new nodes take its source location.
        memo: pass one dict per graph to share masks between sites that have the same program and tensors.

    Raises:
        DeclineSite: for scores that are not affine.
    """
    values = GraphValues(graph, like)
    q_, k_, v_ = (values.wrap(n) for n in (q, k, v))
    lengths = {name: values.length(n, dim) for name, n, dim in zip(SIZES, (q, q, q, k), (0, 1, 2, 2), strict=True)}
    numbers = {f"size{i}": values.number(n) for i, n in enumerate(sizes)}
    sharing = (memo, values, aux, sizes)
    with values.real_constants():
        return _call(values.make, q_, k_, v_, [values.wrap(a) for a in aux], spec, lengths, numbers, sharing).node


def _call(
    make: Make, q: Any, k: Any, v: Any, aux: Sequence[Any], spec: AttentionSpec, lengths: dict[str, Any],
    numbers: dict[str, Any], sharing: tuple | None,
) -> Any:  # fmt: skip
    known = facts(spec)
    slope = known.constant_slope
    if slope is None or spec.sink is not None:
        raise DeclineSite(DeclineReason.UNSUPPORTED_PROGRAM, "SDPA needs a score of the form constant * score + bias")
    scale = spec.softmax_scale * slope
    # torch's CPU kernel scales what is_causal masked: -inf * scale must stay -inf
    if scale < 0:
        q, scale = make(torch.neg, q), -scale
    options: dict[str, Any] = {"scale": scale}
    bias = None if known.bias is None or is_finite_const(known.bias) else known.bias  # a constant changes no weight
    nan_rows = spec.empty_row is EmptyRow.NAN and known.may_be_empty
    if bias is None and known.is_causal and not nan_rows and scale != 0:
        options["is_causal"] = True
    elif bias is not None or not known.is_full:
        key = (str(spec.keep), str(bias), spec.empty_row, q.dtype, q.device)
        build = lambda: _mask(make, q, aux, spec, bias, lengths, numbers)  # noqa: E731
        options["attn_mask"] = _shared(sharing, lengths, key, build)
    if not _same(q, k, 1):
        options["enable_gqa"] = True
    k, v = (t.expand(lengths["batch"], -1, -1, -1) if _is_one(t.size(0)) and not _same(q, t, 0) else t for t in (k, v))
    out = make(F.scaled_dot_product_attention, q, k, v, **options)
    if nan_rows:  # SDPA gives zeros there
        dead = _shared(sharing, lengths, ("dead", *key), lambda: _dead_rows(make, options["attn_mask"]))
        out = make(torch.where, dead, make(torch.full, (), torch.nan, dtype=q.dtype, device=q.device), out)
    return out


def _dead_rows(make: Make, mask: Any) -> Any:
    """Rows, (B or 1, H or 1, Sq or 1, 1), that the mask leaves no key."""
    dropped = make(torch.logical_not, mask) if mask.dtype is torch.bool else make(torch.eq, mask, -torch.inf)
    return make(torch.all, dropped, -1, True)


def _shared(sharing: tuple | None, lengths: dict[str, Any], key: tuple, build: Callable[[], Any]) -> Any:
    """`build()`, or what an earlier site of the graph built from the same program and tensors."""
    if sharing is None or sharing[0] is None:
        return build()
    memo, values, aux_nodes, size_nodes = sharing
    known = tuple(n if isinstance(n, int) else str(values.value_of(n)) for n in lengths.values())
    key = (*key, known, tuple(aux_nodes), tuple(size_nodes))
    return values.wrap(values.shared(memo, key, build))


def _mask(
    make: Make,
    q: Any,
    aux: Sequence[Any],
    spec: AttentionSpec,
    bias: Expr | None,
    lengths: dict[str, Any],
    numbers: dict[str, Any],
) -> Any:
    """bool mask, or additive one where there is a bias or rows without keys must give the mean of V."""
    used = spec.keep.free | (bias.free if bias is not None else frozenset())
    wide = torch.float64 if q.dtype is torch.float64 else torch.float32
    env = Env(
        index_names(make, used, lengths, numbers, q.device),
        [widened(t, s.kind, wide) for t, s in zip(aux, spec.aux, strict=True)],
    )
    keep = None if spec.keep is TRUE else _four_dims(make, evaluate(spec.keep, env), lengths, q.device)
    mean = spec.empty_row is EmptyRow.MEAN and facts(spec).may_be_empty
    if bias is None and not mean:
        return keep
    dtype = torch.float32 if q.dtype in _HALF and q.device.type == "cpu" else q.dtype
    value = 0.0 if bias is None else evaluate(bias, env)
    if keep is None:
        return _four_dims(make, value, lengths, q.device).to(dtype)
    fill = torch.finfo(dtype).min if mean else -torch.inf
    if bias is None:
        zero = make(torch.zeros, (), dtype=dtype, device=q.device)
        return make(torch.where, keep, zero, fill)
    return make(torch.where, keep, _four_dims(make, value, lengths, q.device).to(dtype), fill)


def _four_dims(make: Make, value: Any, lengths: dict[str, Any], device: Any) -> Any:
    """`value` with four dims, the last of which has seqlen_k entries (SDPA's kernels do not broadcast it)."""
    if not isinstance(value, torch.Tensor | fx.Proxy):
        value = make(torch.full, (1, 1, 1, 1), value, device=device)
    if value.dim() < 4:
        value = make(torch.reshape, value, (1,) * (4 - value.dim()) + tuple(value.shape))
    return value.expand(-1, -1, -1, lengths["seqlen_k"]) if _is_one(value.size(3)) else value


def _same(a: Any, b: Any, dim: int) -> bool:
    """Whether two tensors or graph values surely agree in one dimension."""
    sizes = [(t.example if isinstance(t, GraphValue) else t).shape[dim] for t in (a, b)]
    return bool(statically_known_true(sizes[0] == sizes[1]))


def _is_one(size: Any) -> bool:
    return isinstance(size, int) and size == 1
