"""Can a query row keep no key at all? Provable non-emptiness; anything that depends on data may be empty.

Known of every launch: 0 <= q_idx < seqlen_q and seqlen_k >= 1. `Lengths` adds what the graph knows (static lengths,
Sq == Sk, Sq <= Sk), without which a sliding window cannot be shown to reach a key.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from fa4_inductor.analysis.bounds import may_be_minus_inf
from fa4_inductor.analysis.intervals import Q
from fa4_inductor.analysis.solve import KV, solve
from fa4_inductor.spec.attention import AttentionSpec
from fa4_inductor.spec.expr import FALSE, TRUE, Expr, const, size, substitute, walk
from fa4_inductor.spec.linear import Linear, linear

_SEQLEN_Q, _SEQLEN_K = size("seqlen_q"), size("seqlen_k")
# Disjunctions multiply the cases to try; beyond this many the row counts as possibly empty.
_MAX_CASES = 64
# A proof tries every subset of the known inequalities.
_MAX_FACTS = 9


@dataclass(frozen=True)
class Lengths:
    """What is known about run-time integers when a graph is compiled.

    Attributes:
        values: static ones, name to int: `(("seqlen_k", 128), ("size0", 4))`.
        nonnegative: INT expressions over sizes known to be >= 0, such as `seqlen_k - seqlen_q`.
    """

    values: tuple[tuple[str, int], ...] = ()
    nonnegative: tuple[Expr, ...] = ()

    def known(self, e: Expr) -> Expr:
        """`e` with the static sizes put in."""
        return substitute(e, {size(name): const(value) for name, value in self.values})


UNKNOWN = Lengths()
SAME_LENGTHS = Lengths(nonnegative=(_SEQLEN_K - _SEQLEN_Q, _SEQLEN_Q - _SEQLEN_K))


def may_be_empty(spec: AttentionSpec, lengths: Lengths = UNKNOWN) -> bool:
    """False only if every query row provably keeps a key with a logit above -inf (or has a sink).

    A launch with seqlen_k == 0 is outside the question: it has no columns and gives zeros.
    """
    if spec.sink is not None:
        return False
    if may_be_minus_inf(spec.score):
        return True
    keep = solve(lengths.known(spec.keep))
    facts = [linear(lengths.known(e)) for e in (Q, _SEQLEN_Q - 1 - Q, _SEQLEN_K - 1, *lengths.nonnegative)]
    facts = (facts + _division_facts(keep))[:_MAX_FACTS]
    return not any(_kept_key_exists(case, facts, lengths) for case in itertools.islice(_cases(keep), _MAX_CASES))


def _division_facts(keep: Expr) -> list[Linear]:
    """0 <= x - n * (x // n) <= n - 1 for the floor divisions in bounds on the key."""
    found = []
    for node in walk(keep):
        if node.op == "floordiv" and "kv_idx" not in node.free and node.args[1].is_const and node.args[1].value > 0:
            rest = linear(node.args[0]) - Linear(((node, node.args[1].value),), 0)
            found += [rest, (rest * -1).shifted(node.args[1].value - 1)]
    return found


def _cases(keep: Expr) -> list[list[Expr]]:
    """Disjunctive normal form: lists of conjuncts, any of which suffices. Capped, since a missing case only costs a
    proof."""
    if keep.op == "or_":
        return [*_cases(keep.args[0]), *_cases(keep.args[1])][:_MAX_CASES]
    if keep.op == "and_":
        pairs = itertools.product(_cases(keep.args[0]), _cases(keep.args[1]))
        return [a + b for a, b in itertools.islice(pairs, _MAX_CASES)]
    return [[keep]]


def _kept_key_exists(conjuncts: list[Expr], facts: list[Linear], lengths: Lengths) -> bool:
    """Whether every lower bound on the key is below every upper bound, for all rows."""
    lows, highs = [Linear((), 0)], [linear(lengths.known(_SEQLEN_K))]
    for term in conjuncts:
        if term is TRUE:
            continue
        if term is FALSE or term.op not in ("lt", "ge") or "aux" in term.free:
            return False
        if term.args[0] is KV and "kv_idx" not in term.args[1].free:
            (highs if term.op == "lt" else lows).append(linear(term.args[1]))
        elif "kv_idx" in term.free or not _condition_holds(term, facts):
            return False
    return all(_nonnegative((hi - lo).shifted(-1), facts) for lo in lows for hi in highs)


def _condition_holds(term: Expr, facts: list[Linear]) -> bool:
    """A row condition `a < b` or `a >= b` on integers that is always true."""
    a, b = (linear(x) for x in term.args)
    return _nonnegative((b - a).shifted(-1) if term.op == "lt" else a - b, facts)


def _nonnegative(goal: Linear, facts: list[Linear]) -> bool:
    """goal >= 0 follows: goal minus some known nonnegative forms is a nonnegative constant."""
    for chosen in itertools.product((0, 1), repeat=len(facts)):
        rest = goal
        for take, fact in zip(chosen, facts):
            if take:
                rest = rest - fact
        if not rest.terms and rest.constant >= 0:
            return True
    return False
