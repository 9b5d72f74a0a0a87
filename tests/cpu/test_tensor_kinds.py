"""Attention on tensors as programs hand them over: strided and broadcast memory, subclasses, dynamic and exported."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx
from torch.utils.checkpoint import checkpoint

from fa4_inductor import backend, log

BATCH, HEADS, SEQLEN, HEAD_DIM = 2, 4, 6, 8
Tensors = tuple[torch.Tensor, ...]


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, keep: torch.Tensor | None = None) -> torch.Tensor:
    scores = torch.matmul(q, k.transpose(2, 3)) * 0.25
    causal = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
    keep = causal if keep is None else causal & keep
    return torch.matmul(torch.softmax(scores.masked_fill(~keep, -torch.inf), dim=-1), v)


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, keep: torch.Tensor | None = None) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, keep, is_causal=keep is None)


class Block(torch.nn.Module):
    """Self-attention on (B, S, HEADS * HEAD_DIM); q, k and v are strided views of one projection."""

    def __init__(self) -> None:
        super().__init__()
        width = HEADS * HEAD_DIM
        self.qkv, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.eval().requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, HEAD_DIM)).permute(2, 0, 3, 1, 4)
        return self.out(attention(q, k, v).transpose(1, 2).flatten(2))


def tokens(batch: int = BATCH, length: int = SEQLEN) -> torch.Tensor:
    return torch.randn(batch, length, HEADS * HEAD_DIM)


def qkv(**options: Any) -> Tensors:
    return tuple(torch.randn(BATCH, HEADS, SEQLEN, HEAD_DIM, **options) for _ in range(3))


@pytest.fixture(autouse=True)
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[fx.GraphModule]:
    """The graphs seen after the rewrite, which then run as they are."""
    seen: list[fx.GraphModule] = []

    def run(gm: fx.GraphModule, example_inputs: list[Any], patches: dict[str, Any]) -> Callable[..., Any]:
        seen.append(gm)
        return gm.forward

    monkeypatch.setattr(backend, "_compile", run)
    log.counters().clear()
    return seen


def compiled(f: Callable[..., Any], implementation: str = "reference", **options: Any) -> Callable[..., Any]:
    return torch.compile(f, backend="fa4", options={"fa4.implementation": implementation}, **options)


def check(f: Callable[..., Any], *args: Any, fused: int = 1, **options: Any) -> None:
    """`f` gives compiled what it gives uncompiled, and so many sites were fused."""
    with torch.no_grad():
        torch.testing.assert_close(compiled(f, **options)(*args), f(*args), equal_nan=True)
    assert log.counters()["fused"] == fused, log.counters()


LAYOUTS: dict[str, Callable[[], Tensors]] = {
    "heads last": lambda: tuple(torch.randn(BATCH, SEQLEN, HEADS, HEAD_DIM).transpose(1, 2) for _ in range(3)),
    "packed": lambda: torch.randn(BATCH, SEQLEN, 3, HEADS, HEAD_DIM).permute(2, 0, 3, 1, 4).unbind(0),
    "channels last": lambda: tuple(t.contiguous(memory_format=torch.channels_last) for t in qkv()),
    "features first": lambda: tuple(torch.randn(BATCH, HEADS, HEAD_DIM, SEQLEN).mT for _ in range(3)),
    "every other": lambda: tuple(torch.randn(BATCH, HEADS, 2 * SEQLEN, 16)[:, :, ::2, 1::2] for _ in range(3)),
    "one key for all": lambda: (
        qkv()[0],
        torch.randn(1, 1, SEQLEN, HEAD_DIM).expand(BATCH, HEADS, -1, -1),
        torch.randn(1, HEADS, 1, HEAD_DIM).expand(BATCH, -1, SEQLEN, -1),
    ),
    "overlapping": lambda: tuple(
        torch.randn(999).as_strided((BATCH, HEADS, SEQLEN, HEAD_DIM), (40, 30, 7, 1)) for _ in range(3)
    ),
}  # fmt: skip


@pytest.mark.parametrize("implementation", ["reference", "sdpa"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_strided_operands(layout: str, implementation: str) -> None:
    check(lambda *args: attention(*args) + sdpa(*args), *LAYOUTS[layout](), implementation=implementation, fused=2)


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (BATCH, 1, 1, SEQLEN), (1, HEADS, SEQLEN, 1), (BATCH, HEADS, 1, 1)])
def test_broadcast_masks(shape: tuple[int, ...]) -> None:
    """A mask of stride 0, as `expand` leaves it; a row without any key included."""
    keep = torch.rand(shape) > 0.4
    keep = keep.expand(BATCH, HEADS, SEQLEN, SEQLEN)
    check(lambda *args: (attention(*args), sdpa(*args)), *qkv(), keep, fused=2)


def test_autocast_with_queries_and_keys_in_float32() -> None:
    """BC-25: a norm leaves q and k in float32 where v is bfloat16; both products are computed in bfloat16."""
    block = Block()

    def normed(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with torch.autocast("cpu", torch.bfloat16):
            q, k, v = block.qkv(x).unflatten(-1, (3, HEADS, HEAD_DIM)).permute(2, 0, 3, 1, 4)
            q, k = (F.layer_norm(t.float(), (HEAD_DIM,)) for t in (q, k))
            assert (q.dtype, k.dtype, v.dtype) == (torch.float32, torch.float32, torch.bfloat16)
            return attention(q, k, v), sdpa(q, k, v)

    x = tokens()
    with torch.no_grad():
        got, want = compiled(normed)(x), normed(x)
    assert [t.dtype for t in got] == [t.dtype for t in want] == [torch.bfloat16] * 2
    torch.testing.assert_close(got, want, atol=2e-2, rtol=2e-2)
    assert log.counters()["fused"] == 2


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_body_without_gradients(reentrant: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "None of the inputs have requires_grad=True": that is the point
        check(lambda *args: checkpoint(attention, *args, use_reentrant=reentrant) + 1, *qkv())


def test_mask_from_the_graph_before() -> None:
    def f(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        keep = torch.arange(SEQLEN) < lengths[:, None]
        torch._dynamo.graph_break()
        return attention(q, k, v, keep[:, None, None])

    check(f, *qkv(), torch.tensor([4, 6]))


def test_attention_that_a_graph_break_cuts_is_left_alone(graphs: list[fx.GraphModule]) -> None:
    def f(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        p = torch.softmax(q @ k.mT, dim=-1)
        torch._dynamo.graph_break()
        return p @ v

    check(f, *qkv(), fused=0)
    assert len(graphs) == 2


@pytest.mark.parametrize("position", range(3))
@pytest.mark.parametrize("f", [attention, sdpa])
def test_a_subclass_among_the_operands_declines(f: Callable[..., Any], position: int) -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    args = list(qkv())
    args[position] = TwoTensor(args[position], args[position] + 1)
    with torch.no_grad():
        got, want = compiled(f)(*args), f(*args)
    torch.testing.assert_close((got.a, got.b), (want.a, want.b))
    assert log.counters()["declined.tensor_subclass"] == 1, log.counters()


def test_quantised_weights() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.ao.quantization is deprecated, its modules are in use
        block = torch.ao.quantization.quantize_dynamic(Block(), {torch.nn.Linear}, dtype=torch.qint8)
        check(block, tokens())


@pytest.mark.parametrize("decomposed", [False, True])
def test_exported_module(decomposed: bool) -> None:
    shapes = ({1: torch.export.Dim("length")},)
    program = torch.export.export(Block(), (tokens(),), dynamic_shapes=shapes)
    program = program.run_decompositions() if decomposed else program
    check(program.module(), tokens(length=9))


def test_marked_dynamic(graphs: list[fx.GraphModule]) -> None:
    block = Block()
    f = compiled(block, fullgraph=True)
    for length in (6, 9, 17):
        x = tokens(length=length)
        torch._dynamo.mark_dynamic(x, 1)
        torch.testing.assert_close(f(x), block(x))
    assert len(graphs) == 1


def test_automatic_dynamic_shapes_end_in_one_program(graphs: list[fx.GraphModule]) -> None:
    """One graph, then one with a dynamic length, then one with a dynamic batch; a batch of one has its own."""
    block = Block()
    f = compiled(block, fullgraph=True)
    for batch, length in ((2, 6), (2, 9), (3, 17), (4, 8), (2, 30), (1, 5), (1, 7)):
        x = tokens(batch, length)
        torch.testing.assert_close(f(x), block(x))
    assert len(graphs) == 4
    assert len({n.args[4] for gm in graphs for n in gm.graph.nodes if "fa4_inductor" in str(n.target)}) == 1
