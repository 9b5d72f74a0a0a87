"""The choice of an implementation: ordered, with a cost rule, and with the reason for everything passed over."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from fa4_inductor import log
from fa4_inductor.analysis.empty import may_be_empty
from fa4_inductor.analysis.facts import facts
from fa4_inductor.errors import Declined, DeclineReason
from fa4_inductor.lowering.support import SUPPORT, Operands, Supported
from fa4_inductor.runtime.target import Target
from fa4_inductor.settings import Settings
from fa4_inductor.spec.attention import AttentionSpec, EmptyRow

_log = log.get_logger(__name__)

AUTO = ("cute", "sdpa")
"""Tried in this order when nothing is forced. `flex` and `reference` run only when asked for: the first compiles one
Triton kernel per length on devices where SDPA is the measured choice, the second is slow."""


@dataclass(frozen=True)
class Choice:
    """What runs a site.

    Attributes:
        implementation: "cute", "sdpa", "flex", "reference"; None leaves the user's graph as it is.
        spec: the spec to run: the match's, without an empty-row contract that cannot occur at these lengths.
        passed_over: (implementation, why not) in the order they were tried.
    """

    implementation: str | None
    spec: AttentionSpec
    passed_over: tuple[tuple[str, Declined], ...] = ()

    @property
    def declined(self) -> Declined | None:
        """Why the graph stays as it is: the refusal of the implementation that came closest (the last one tried)."""
        if self.implementation is not None:
            return None
        return self.passed_over[-1][1]


def choose(spec: AttentionSpec, operands: Operands, target: Target, settings: Settings) -> Choice:
    """The implementation of one site. A forced one (`fa4.implementation`) never falls back to another.

    Args:
        operands: dtype and shapes of the site. target: the device it runs on.
    """
    spec, known = settled(spec, operands), facts(spec, operands.lengths)
    order = AUTO if settings.implementation == "auto" else (settings.implementation,)
    passed: list[tuple[str, Declined]] = []
    for name in order:
        answer = SUPPORT[name](spec, known, operands, target)
        if isinstance(answer, Supported) and settings.implementation == "auto":
            answer = _worth_it(name, operands, target) or answer
        if isinstance(answer, Supported):
            _log.debug("%s runs %s; passed over: %s", name, spec.text, _text(passed))
            return Choice(name, spec, tuple(passed))
        passed.append((name, answer))
    _log.debug("the graph stays as it is for %s: %s", spec.text, _text(passed))
    return Choice(None, spec, tuple(passed))


def settled(spec: AttentionSpec, operands: Operands) -> AttentionSpec:
    """`spec` with an empty-row contract that cannot come into play replaced by the one every implementation keeps.

    Emptiness is judged with what is known of the lengths here, which Dynamo guards; the program text then says `zero`,
    so nobody has to judge again without that knowledge.
    """
    if spec.empty_row is EmptyRow.ZERO or may_be_empty(spec, operands.lengths):
        return spec
    return dataclasses.replace(spec, empty_row=EmptyRow.ZERO)


def _worth_it(name: str, operands: Operands, target: Target) -> Declined | None:
    """The cost rule: a refusal where the user's graph is at least as fast.

    Measured on 2026-11-30 with torch 2.13, one thread of an x86-64 server, Inductor on both sides, H 8, D 64. Time of
    eager attention over time of SDPA: fp32, S 64 to 1024, 1.1-2.8 without mask, 1.1-2.0 with an additive mask, 1.2-3.1
    causal; bf16 1.0-1.3, 19-27 and 15-55 (Inductor's own bf16 matrix products are slow). S 16 and 32: equal within 5 %.
    One query per sequence is the exception: 0.9 in fp32, 0.2-0.3 in bf16 with a mask.
    """
    if name == "sdpa" and target.device_type == "cpu" and isinstance(operands.seqlen_q, int) and operands.seqlen_q == 1:
        return Declined(
            DeclineReason.NOT_FASTER, "for one query row on a CPU, SDPA is no faster than the graph as it is"
        )
    return None


def _text(passed: list[tuple[str, Declined]]) -> str:
    return "; ".join(f"{name} ({declined})" for name, declined in passed) or "nothing"
