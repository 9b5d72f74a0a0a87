"""What each implementation can run, exactly as the spec says. A refusal names its reason; nothing is approximated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fa4_inductor.analysis.empty import Lengths
from fa4_inductor.analysis.facts import AttentionFacts
from fa4_inductor.errors import Declined, DeclineReason
from fa4_inductor.lowering import backward_config
from fa4_inductor.lowering.config_table import HEAD_DIMS, select_config
from fa4_inductor.lowering.emit_expr import INT_LIMIT
from fa4_inductor.runtime.target import Target
from fa4_inductor.spec.attention import AttentionSpec, EmptyRow
from fa4_inductor.spec.expr import Expr, size, walk
from fa4_inductor.spec.ops import Kind

_HALF = (torch.float16, torch.bfloat16)
_FLOATS = (*_HALF, torch.float32, torch.float64)
_CUTE_AUX = frozenset({"bool", "uint8", "int32", "int64", "float16", "bfloat16", "float32"})
_MAX_AUX_RANK = 4


@dataclass(frozen=True)
class Supported:
    """This implementation computes the spec."""

    implementation: str


@dataclass(frozen=True)
class Operands:
    """Dtype and shapes of one site: q (B, Hq, Sq, D), k (B or 1, Hkv, Sk, D), v (B or 1, Hkv, Sk, Dv).

    Sizes are ints or SymInts; head dims must be ints for every implementation but the reference. `sizes` are the values
    of `size0, size1, ...`, None where nothing is known. `learned_aux`: captured tensors need gradients, too.
    """

    dtype: torch.dtype
    batch: Any
    num_heads_q: Any
    num_heads_kv: Any
    seqlen_q: Any
    seqlen_k: Any
    head_dim: Any
    head_dim_v: Any
    sizes: tuple[Any, ...] = ()
    need_lse: bool = False
    needs_grad: bool = False
    learned_aux: bool = False

    @classmethod
    def of(cls, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sizes: Sequence[Any] = ()) -> Operands:
        """From (fake) tensors and the run-time integers of the site."""
        (batch, heads, seqlen_q, head_dim), (_, kv_heads, seqlen_k, _) = q.shape, k.shape
        return cls(q.dtype, batch, heads, kv_heads, seqlen_q, seqlen_k, head_dim, v.shape[3], tuple(sizes))

    @property
    def lengths(self) -> Lengths:
        """What is statically known about the lengths."""
        named = {"seqlen_q": self.seqlen_q, "seqlen_k": self.seqlen_k}
        named |= {f"size{i}": n for i, n in enumerate(self.sizes) if n is not None}
        values = tuple((name, int(n)) for name, n in named.items() if isinstance(n, int))
        facts = [size(name) for name, n in named.items() if not isinstance(n, int) and _surely(0, n)]
        if not (isinstance(self.seqlen_q, int) and isinstance(self.seqlen_k, int)):
            q, k = size("seqlen_q"), size("seqlen_k")
            facts += [k - q] if _surely(self.seqlen_q, self.seqlen_k) else []
            facts += [q - k] if _surely(self.seqlen_k, self.seqlen_q) else []
        return Lengths(values, tuple(facts))


def _surely(small: Any, large: Any) -> bool:
    """small <= large for all values that these sizes can take."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return bool(statically_known_true(small <= large))


Support = Supported | Declined


def _no(reason: DeclineReason, detail: str) -> Declined:
    return Declined(reason, detail)


def supports_reference(spec: AttentionSpec, facts: AttentionFacts, operands: Operands, target: Target) -> Support:
    """Everything, everywhere, slowly: for checking what was understood."""
    if operands.dtype not in _FLOATS:
        return _no(DeclineReason.UNSUPPORTED_DTYPE, f"attention over {operands.dtype} is not defined")
    return Supported("reference")


def supports_cute(spec: AttentionSpec, facts: AttentionFacts, operands: Operands, target: Target) -> Support:
    """Hopper, half types, the head dims of the configuration table, programs in int32 and fp32."""
    if spec.dropout is not None:
        return _no(DeclineReason.DROPOUT, "only the reference drops probabilities")
    if not target.is_hopper:
        return _no(DeclineReason.UNSUPPORTED_DEVICE, f"the kernel is for sm_90a, this is {target.arch} ({target.name})")
    if operands.dtype not in _HALF:
        return _no(
            DeclineReason.UNSUPPORTED_DTYPE, f"the kernel takes bfloat16 and float16, not {_name(operands.dtype)}"
        )
    head_dims = (operands.head_dim, operands.head_dim_v)
    if not all(isinstance(d, int) for d in head_dims) or select_config(*head_dims) is None:
        known = ", ".join(map(str, HEAD_DIMS))
        return _no(DeclineReason.UNSUPPORTED_HEAD_DIM, f"head dims {head_dims}; the kernel has {known}")
    if operands.needs_grad and head_dims not in backward_config.HEAD_DIMS:
        return _no(DeclineReason.NEEDS_GRAD, f"the backward kernel does not have head dims {head_dims}")
    if operands.learned_aux and torch.are_deterministic_algorithms_enabled():
        return _no(DeclineReason.NEEDS_GRAD, "the kernel adds gradients of captured tensors up in no fixed order")
    for slot, aux in enumerate(spec.aux):
        if aux.dtype not in _CUTE_AUX or aux.ndim > _MAX_AUX_RANK:
            return _no(DeclineReason.UNSUPPORTED_PROGRAM, f"aux{slot} is {aux.dtype} of rank {aux.ndim}")
    large = next((n for n in _nodes(spec) if n.is_const and n.kind is Kind.INT and abs(n.value) >= INT_LIMIT), None)
    if large is not None:
        return _no(DeclineReason.UNSUPPORTED_PROGRAM, f"the integer {large.value} does not fit into int32 arithmetic")
    if operands.needs_grad and (what := backward_config.untried(head_dims, operands.learned_aux, spec, facts)):
        detail = f"{what}: not tried on a GPU yet; {backward_config.ENABLED_BY}=1 lets the kernel do it"
        return _no(DeclineReason.NEEDS_GRAD, detail)
    return Supported("cute")


def supports_sdpa(spec: AttentionSpec, facts: AttentionFacts, operands: Operands, target: Target) -> Support:
    """score = constant * score + bias, any mask, no sink, and an empty-row contract that SDPA keeps too."""
    if spec.dropout is not None:
        return _no(DeclineReason.DROPOUT, "only the reference drops probabilities")
    if operands.dtype not in _FLOATS:
        return _no(DeclineReason.UNSUPPORTED_DTYPE, f"SDPA takes floating point, not {_name(operands.dtype)}")
    if spec.sink is not None:
        return _no(DeclineReason.UNSUPPORTED_PROGRAM, "SDPA has no sink")
    if operands.learned_aux:
        return _no(DeclineReason.NEEDS_GRAD, "SDPA is used without gradients of captured tensors only")
    if operands.need_lse:
        return _no(DeclineReason.UNSUPPORTED_PROGRAM, "SDPA does not give the log-sum-exp of its rows")
    if facts.constant_slope is None:
        return _no(DeclineReason.UNSUPPORTED_PROGRAM, "SDPA needs a score of the form constant * score + bias")
    if not bias_is_exact(spec, facts, operands.dtype, target):
        dtype = _name(operands.dtype)
        return _no(DeclineReason.UNSUPPORTED_PROGRAM, f"SDPA would round the bias to {dtype}")
    if facts.may_be_empty and not _keeps_empty_rows(spec, target):
        contract = spec.empty_row.value
        return _no(DeclineReason.EMPTY_ROWS, f"rows that keep no key must give {contract}, SDPA gives something else")
    return Supported("sdpa")


def bias_is_exact(spec: AttentionSpec, facts: AttentionFacts, dtype: torch.dtype, target: Target) -> bool:
    """Whether the additive mask can carry the bias: in fp32 on the CPU, in q's dtype elsewhere."""
    bias = facts.bias
    if bias is None or not bias.free and not bias.args:
        return True
    if dtype not in _HALF or target.device_type == "cpu":
        return True
    name = _name(dtype)
    return bias.op == "load" and spec.aux[bias.value].dtype in (name, "bool")


def _keeps_empty_rows(spec: AttentionSpec, target: Target) -> bool:
    """SDPA gives zeros, and NaN can be put in afterwards. On the CPU a finfo.min fill of its additive mask gives the
    mean of V, as in eager; other devices' kernels do not promise that."""
    return spec.empty_row is not EmptyRow.MEAN or target.device_type == "cpu"


def supports_flex(spec: AttentionSpec, facts: AttentionFacts, operands: Operands, target: Target) -> Support:
    """Any score and mask over captured tensors; sinks through the LSE; rows without keys give zeros."""
    if spec.dropout is not None:
        return _no(DeclineReason.DROPOUT, "only the reference drops probabilities")
    if operands.needs_grad:
        return _no(DeclineReason.NEEDS_GRAD, "flex_attention is used without gradients only")
    if operands.dtype not in _FLOATS or (target.device_type == "cuda" and operands.dtype is torch.float64):
        return _no(DeclineReason.UNSUPPORTED_DTYPE, f"flex_attention does not take {_name(operands.dtype)} here")
    dims = (operands.head_dim, operands.head_dim_v)
    if target.device_type == "cuda" and not all(isinstance(d, int) and d >= 16 and d & (d - 1) == 0 for d in dims):
        return _no(DeclineReason.UNSUPPORTED_HEAD_DIM, f"flex_attention wants powers of two from 16, not {dims}")
    if facts.may_be_empty and spec.sink is None and spec.empty_row is not EmptyRow.ZERO:
        contract = spec.empty_row.value
        return _no(DeclineReason.EMPTY_ROWS, f"rows that keep no key must give {contract}, flex_attention gives 0")
    return Supported("flex")


def _nodes(spec: AttentionSpec) -> list[Expr]:
    return list(walk(*(root for root in (spec.score, spec.keep, spec.sink) if root is not None)))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


SUPPORT: dict[str, Callable[[AttentionSpec, AttentionFacts, Operands, Target], Support]] = {
    "cute": supports_cute,
    "sdpa": supports_sdpa,
    "flex": supports_flex,
    "reference": supports_reference,
}
