"""Mask arithmetic becomes formulas: expected texts, and equality of all truth values."""

from __future__ import annotations

import itertools

import pytest
import torch

from fa4_inductor.patterns.booleans import boolean_selection
from fa4_inductor.spec import AuxSpec, Expr, parse_expr
from fa4_inductor.spec.interpret import Env, evaluate

A, B, C = "aux0[()]", "aux1[()]", "aux2[()]"
BOOL = AuxSpec("bool", 0)
FORMULAS = {
    f"float({A}) * float({B}) > 0.0": f"{A} & {B}",
    f"bool(int({A}) * int(~{B}))": f"{A} & ~{B}",
    f"float({A}) + float({B}) == 2.0": f"{A} & {B}",
    f"int({A}) + int({B}) > 0": f"{A} | {B}",
    f"where({A}, where({B}, 1.0, 0.0), 0.0) == 1.0": f"{A} & {B}",
    f"(1.0 - float({A})) * -10000.0 < 0.0": f"~{A}",
    f"float({A}) == float({B})": f"where({A}, {B}, ~{B})",
    f"float({A}) * 0.0 > 1.0": "False",
}
SELECTIONS = {
    f"where(~{A}, -1e+30, 1.0 - float({A}))": f"where({A}, 0.0, -1e+30)",
    f"(1.0 - float({A}) * float({B})) * -1e+30": f"where({A} & {B}, 0.0, -1e+30)",
    f"minimum(where({A}, 0.0, -8.0), where({B}, 0.0, -8.0))": f"where({A} & {B}, 0.0, -8.0)",
    f"where({A} & {B}, 0.0, 1.0) * 2.0": f"where({A} & {B}, 0.0, 2.0)",
    "where(q_idx >= 3, 1.0, 0.0) - where(q_idx <= 2, 0.0, 1.0)": "0.0",
    "where(kv_idx <= 2, 1.0, 0.0) * where(kv_idx >= 3, 5.0, 7.0)": "where(kv_idx <= 2, 7.0, 0.0)",
}
UNCHANGED = (
    f"float({A}) + float({B}) * 3.0",  # four values
    f"float({A}) * score",
    f"float({A}) * float(kv_idx)",
    f"{A} & ({B} | ~{C})",
    "kv_idx <= q_idx",
)


def parse(text: str) -> Expr:
    return parse_expr(text, (BOOL, BOOL, BOOL))


@pytest.mark.parametrize(("text", "expected"), [*FORMULAS.items(), *SELECTIONS.items(), *zip(UNCHANGED, UNCHANGED)])
def test_text(text: str, expected: str) -> None:
    assert str(boolean_selection(parse(text))) == str(parse(expected))


@pytest.mark.parametrize("text", [*FORMULAS, *SELECTIONS])
def test_values(text: str) -> None:
    before, after = parse(text), boolean_selection(parse(text))
    for values in itertools.product((True, False), repeat=3):
        for index in range(6):
            env = Env({"q_idx": torch.tensor(index), "kv_idx": torch.tensor(index)}, [torch.tensor(v) for v in values])
            assert evaluate(before, env) == evaluate(after, env), values
