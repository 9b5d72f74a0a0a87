"""The attention IR: score-program expressions, AttentionSpec, its text, its legality and its eager meaning. Imports
nothing of ours but errors."""

from fa4_inductor.spec.attention import AttentionSpec, AuxSpec, Dropout, EmptyRow, TileMap
from fa4_inductor.spec.expr import Expr
from fa4_inductor.spec.ops import Kind
from fa4_inductor.spec.printer import parse_expr, parse_spec, print_expr, print_spec
from fa4_inductor.spec.verify import verify

__all__ = [
    "AttentionSpec",
    "AuxSpec",
    "Dropout",
    "EmptyRow",
    "Expr",
    "Kind",
    "TileMap",
    "parse_expr",
    "parse_spec",
    "print_expr",
    "print_spec",
    "verify",
]
