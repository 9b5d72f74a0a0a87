"""Normalisation of shadow graphs: ordered, named passes that leave fewer spellings for the matcher."""

from fa4_inductor.normalize.pipeline import PASSES, normalize

__all__ = ["PASSES", "normalize"]
