"""The matcher: attention sites of a captured graph as `AttentionSpec`s, or refusals with their reason."""

from fa4_inductor.patterns.match import AttentionMatch, Operand, Site, apply_view
from fa4_inductor.patterns.sites import find_sites

__all__ = ["AttentionMatch", "Operand", "Site", "apply_view", "find_sites"]
