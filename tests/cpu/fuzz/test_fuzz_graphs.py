"""Random attention and almost-attention: each graph is fused and equal, or declined with a reason and equal.

`python -m tests.fuzz.campaign --graphs 20000` runs more of them; docs/fuzzing.md keeps the record.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st

from tests.fuzz.campaign import kind
from tests.fuzz.outcome import generate, judge
from tests.fuzz.program import Program

GRAPHS, PARTS = 300, 4


@st.composite
def programs(draw: Any) -> Program:
    """Shrinks towards the first alternative of every decision, and so to a short plain spelling."""

    def choose(options: Sequence[Any]) -> Any:
        return options[draw(st.integers(0, len(options) - 1))]

    return generate(choose)


@pytest.mark.parametrize("part", range(PARTS))
def test_random_graphs(part: int) -> None:
    outcomes: Counter[str] = Counter()

    @hypothesis.seed(part)
    @hypothesis.settings(
        max_examples=GRAPHS // PARTS, database=None, deadline=None, suppress_health_check=list(hypothesis.HealthCheck)
    )
    @hypothesis.given(programs())
    def check(program: Program) -> None:
        result = judge(program)
        outcomes[kind(result)] += 1
        assert result.failure is None, f"{result}\n{program}"

    check()
    assert outcomes["fused"] >= GRAPHS // PARTS // 8, f"a matcher that declines everything proves nothing: {outcomes}"
