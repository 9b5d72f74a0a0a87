"""Facts about a spec, derived from its expressions: kept intervals, tile classes, bounds, decompositions, empty
rows."""

from fa4_inductor.analysis.empty import SAME_LENGTHS, Lengths, may_be_empty
from fa4_inductor.analysis.facts import AttentionFacts, facts
from fa4_inductor.analysis.parts import Stage, stage

__all__ = ["SAME_LENGTHS", "AttentionFacts", "Lengths", "Stage", "facts", "may_be_empty", "stage"]
