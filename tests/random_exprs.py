"""Random integer and mask expressions over small grids, with the tensors they read and their values by the
interpreter."""

from __future__ import annotations

import functools

import torch
from hypothesis import strategies as st

from fa4_inductor.spec import AuxSpec, Kind
from fa4_inductor.spec import expr as E
from fa4_inductor.spec.interpret import Env, evaluate, grid

AUX = (AuxSpec("bool", 2), AuxSpec("int64", 1), AuxSpec("int64", 2))
B, H = 2, 2
B_IDX, H_IDX, Q, KV = (E.index(n) for n in E.INDEX_NAMES)
LEAVES = (
    Q, KV, Q, KV, B_IDX, H_IDX, E.size("seqlen_q"), E.size("seqlen_k"), E.size("size0"),
    E.load(1, (B_IDX,), Kind.INT), E.load(2, (B_IDX, Q), Kind.INT), E.load(2, (B_IDX, KV), Kind.INT),
)  # fmt: skip


def ints() -> st.SearchStrategy[E.Expr]:
    leaf = st.one_of(st.sampled_from(LEAVES), st.integers(-5, 5).map(E.const))

    def extend(inner: st.SearchStrategy[E.Expr]) -> st.SearchStrategy[E.Expr]:
        binary = st.builds(E.call, st.sampled_from(["add", "sub", "minimum", "maximum"]), inner, inner)
        divided = st.builds(E.call, st.sampled_from(["floordiv", "mod"]), inner, st.integers(1, 4).map(E.const))
        scaled = st.builds(E.call, st.just("mul"), inner, st.integers(-3, 3).map(E.const))
        unary = st.builds(E.call, st.sampled_from(["neg", "abs"]), inner)
        product = st.builds(E.call, st.just("mul"), inner, inner)
        return st.one_of(binary, binary, divided, scaled, unary, product)

    return st.recursive(leaf, extend, max_leaves=5)


def keeps() -> st.SearchStrategy[E.Expr]:
    compare = st.builds(E.call, st.sampled_from(["lt", "le", "gt", "ge", "eq", "ne"]), ints(), ints())
    padding = st.just(E.load(0, (B_IDX, KV), Kind.BOOL))

    def extend(inner: st.SearchStrategy[E.Expr]) -> st.SearchStrategy[E.Expr]:
        binary = st.builds(E.call, st.sampled_from(["and_", "and_", "or_", "xor"]), inner, inner)
        return st.one_of(
            binary, st.builds(E.call, st.just("not_"), inner), st.builds(E.call, st.just("where"), inner, inner, inner)
        )

    return st.recursive(st.one_of(compare, compare, compare, padding), extend, max_leaves=4)


@functools.cache
def aux_tensors(sq: int, sk: int) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(sq * 31 + sk)
    return [
        torch.rand(B, sk, generator=g) < 0.6,
        torch.randint(-2, 9, (B,), generator=g),
        torch.randint(-2, 9, (B, max(sq, sk)), generator=g),
    ]


def value(e: E.Expr, sq: int, sk: int, size0: int, shape: tuple[int, ...], **names: object) -> torch.Tensor:
    env = Env({**grid(B, H, sq, sk), "size0": size0, **names}, aux_tensors(sq, sk))
    return torch.as_tensor(evaluate(e, env)).expand(shape)
