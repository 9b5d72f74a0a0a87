"""A spec through torch's flex_attention: compiled on CUDA, eager elsewhere. Sinks are applied afterwards, through the
LSE."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from fa4_inductor.analysis.facts import facts
from fa4_inductor.errors import DeclineReason, DeclineSite
from fa4_inductor.kernels.contract import bshd, no_lse, widened
from fa4_inductor.spec import AttentionSpec, EmptyRow, Expr, Kind, parse_spec
from fa4_inductor.spec.expr import TRUE, score, walk
from fa4_inductor.spec.interpret import Env, evaluate
from fa4_inductor.spec.ops import OPS

Mod = Callable[..., torch.Tensor]
_DTYPES = {Kind.BOOL: "bool", Kind.INT: "int64", Kind.FLOAT: "float32"}
# One entry per program: flex_attention is one function to Dynamo, whatever mods it is given.
_RECOMPILE_LIMIT = 256


def attention_flex(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    aux: Sequence[torch.Tensor],
    spec: AttentionSpec,
    sizes: Sequence[int] = (),
    *,
    need_lse: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention by flex_attention (`kernels.contract`).

    Raises:
        DeclineSite: EMPTY_ROWS, for rows that keep no key and must give something else than zeros.
    """
    if spec.sink is None and spec.empty_row is not EmptyRow.ZERO and facts(spec).may_be_empty:
        raise DeclineSite(DeclineReason.EMPTY_ROWS, f"flex_attention gives 0 to empty rows, not {spec.empty_row.value}")
    (batch, heads, seqlen_q, _), seqlen_k = q.shape, k.shape[2]
    aux = [widened(t, s.kind) for t, s in zip(aux, spec.aux, strict=True)]
    if q.numel() == 0 or seqlen_k == 0:
        out, lse = _without_keys(q, v)
    else:
        numbers = {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k, **{f"size{i}": n for i, n in enumerate(sizes)}}
        numbers = {name: torch.tensor(n, device=q.device) for name, n in numbers.items()}
        k, v = (t.expand(batch, -1, -1, -1) for t in (k, v))
        with _vmap_enabled():
            mask = _block_mask(spec, aux, numbers, (batch, heads, seqlen_q, seqlen_k), q.device)
            out, lse = _run(spec.text, q.device.type == "cuda")(q, k, v, mask, aux, numbers)
    if spec.sink is not None:
        sink = _sink(spec.sink, q, seqlen_k, aux, sizes)
        out = out * torch.sigmoid(lse - sink)[..., None].to(out.dtype)
        lse = torch.logaddexp(lse, sink)
    return bshd(out, q.dtype), lse if need_lse else no_lse(q)


@contextlib.contextmanager
def _vmap_enabled() -> Iterator[None]:
    """Makes `torch.vmap`, which flex_attention is built on, work inside an op that a dispatch mode has intercepted.

    The mode's handler runs with functorch's keys excluded, and AOTAutograd installs such a mode for the first call of a
    compiled graph, to check what its custom ops alias.
    """
    include, exclude = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    for name, key in torch._C.DispatchKey.__members__.items():
        if name.startswith("FuncTorch"):
            exclude = exclude.remove(key)
    with torch._C._ForceDispatchKeyGuard(include, exclude):
        yield


def _without_keys(q: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    out = q.new_zeros((*q.shape[:3], v.shape[3]))
    return out, torch.full(q.shape[:3], -torch.inf, dtype=torch.float32, device=q.device)


def _sink(
    sink: Expr, q: torch.Tensor, seqlen_k: int, aux: Sequence[torch.Tensor], sizes: Sequence[int]
) -> torch.Tensor:
    """The sink's logit, fp32 (B, Hq, Sq)."""
    axes = {name: torch.arange(q.shape[i], device=q.device) for i, name in enumerate(("b", "h", "q_idx"))}
    names: dict[str, Any] = {
        n: a.view([-1 if i == j else 1 for j in range(3)]) for i, (n, a) in enumerate(axes.items())
    }
    names |= {"seqlen_q": q.shape[2], "seqlen_k": seqlen_k, **{f"size{i}": n for i, n in enumerate(sizes)}}
    value = torch.as_tensor(evaluate(sink, Env(names, aux)), dtype=torch.float32, device=q.device)
    return value.expand(q.shape[:3])


def _block_mask(
    spec: AttentionSpec,
    aux: Sequence[torch.Tensor],
    numbers: dict[str, torch.Tensor],
    shape: tuple[int, ...],
    device: torch.device,
) -> Any:
    """The BlockMask of `keep`, broadcast over batch and heads it does not depend on; None when all keys are kept."""
    if spec.keep is TRUE:
        return None
    from torch.nn.attention.flex_attention import create_block_mask

    keep = mod_of(spec.keep)

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> torch.Tensor:
        value = keep(None, b, h, q_idx, kv_idx, aux, numbers)
        return value & (kv_idx >= 0)  # a mask must depend on the indices, also where the program does not

    batch, heads, seqlen_q, seqlen_k = shape
    # Captured tensors may differ by batch or head only through an index.
    batch, heads = (batch if "b" in spec.keep.free else 1), (heads if "h" in spec.keep.free else 1)
    return create_block_mask(mask_mod, batch, heads, seqlen_q, seqlen_k, device=device)


@functools.lru_cache(maxsize=256)
def _run(program: str, compiled: bool) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """`(q, k, v, block_mask, aux, numbers) -> (out, lse)` of one program."""
    from torch.nn.attention.flex_attention import flex_attention

    spec = parse_spec(program)
    change = None if spec.score is score() else mod_of(spec.score)

    def call(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: Any,
        aux: list[torch.Tensor],
        numbers: dict[str, torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        def score_mod(s: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> torch.Tensor:
            assert change is not None
            return change(s, b, h, q_idx, kv_idx, aux, numbers)

        options: dict[str, Any] = {
            "scale": spec.softmax_scale,
            "enable_gqa": q.shape[1] != k.shape[1],
            "return_lse": True,
        }
        return flex_attention(q, k, v, score_mod=score_mod if change else None, block_mask=mask, **options)

    compute = torch.compile(call, fullgraph=True) if compiled else call

    def run(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        with warnings.catch_warnings(), torch._dynamo.config.patch(recompile_limit=_RECOMPILE_LIMIT):
            warnings.simplefilter("ignore")  # flex_attention warns when it is not compiled, which is meant here
            return compute(*args)

    return run


@functools.lru_cache(maxsize=1024)
def mod_of(root: Expr) -> Mod:
    """`root` as a function `(score, b, h, q_idx, kv_idx, aux, numbers)` of scalar tensors that Dynamo can trace.

    It is written out as straight-line Python, because Dynamo does not follow the interpreter's walk over expressions.
    """
    names: dict[Expr, str] = {}
    lines = ["def mod(score, b, h, q_idx, kv_idx, aux, numbers):"]
    for i, node in enumerate(walk(root)):
        names[node] = f"t{i}"
        lines.append(f"    t{i} = {_statement(node, [names[a] for a in node.args])}")
    lines.append(f"    return {names[root]}")
    space: dict[str, Any] = {"torch": torch, "inf": torch.inf, "nan": torch.nan}
    space |= {f"op_{name}": op.torch for name, op in OPS.items()}
    exec("\n".join(lines), space)
    return space["mod"]


def _statement(node: Expr, args: list[str]) -> str:
    if node.op == "const":
        return f"torch.full((), {node.value!r}, dtype=torch.{_DTYPES[node.kind]}, device=q_idx.device)"
    if node.op == "size":
        return f"numbers[{node.value!r}]"
    if node.op == "load":
        if not args:
            return f"aux[{node.value}]"
        tensor = f"aux[{node.value}]"
        index = ", ".join(f"torch.clamp({a}, min=0, max={tensor}.size({dim}) - 1)" for dim, a in enumerate(args))
        return f"{tensor}[{index}]"
    if not node.args:
        return node.value or "score"
    return f"op_{node.op}({', '.join(args)})"
