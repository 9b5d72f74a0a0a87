"""What the matcher hands to later stages, in terms of nodes of the captured graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fa4_inductor.errors import Declined
from fa4_inductor.spec import AttentionSpec, AuxSpec
from fa4_inductor.spec.expr import Expr

ViewStep = tuple[Any, ...]
"""("permute", dims) | ("unsqueeze", dim) | ("squeeze", dim) | ("select", dim, index) | ("narrow", dim, start, length) |
("unflatten", dim, sizes) | ("expand", sizes) | ("reshape", sizes) | ("repeat_interleave", count, dim) | ("to", dtype).

dims, dim and index are non-negative ints; sizes, start and length are ints or fx Nodes that hold a SymInt.
In "expand", -1 keeps a dimension.
"""


@dataclass(frozen=True)
class Operand:
    """`node`, then `view` applied from left to right.

    No step but "to", "repeat_interleave" and a non-viewable "reshape" moves data.
    """

    node: fx.Node
    view: tuple[ViewStep, ...] = ()


@dataclass(frozen=True)
class Epilogue:
    """What the graph does to the (B, Hq, Sq, Dv) result before `output_view`: `value` over an element of it, which is
    called `score`, over `b`, `h` and `q_idx`. It is linear in `score`.

    `aux` and `sizes` are those of `value`, as in `AttentionMatch`.
    """

    value: Expr
    aux: tuple[Operand, ...]
    specs: tuple[AuxSpec, ...]
    sizes: tuple[fx.Node | int, ...]


@dataclass(frozen=True)
class AttentionMatch:
    """One site proven to be `spec`.

    Attributes:
        spec: the verified, simplified meaning.
        q: (B, Hq, Sq, D) after its view; k: (B or 1, Hkv, Sk, D); v: (B or 1, Hkv, Sk, Dv). All three have one dtype.
        aux: captured tensors in slot order; ranks and dtypes as in `spec.aux`.
        sizes: values of `size0, size1, ...`: ints or nodes that hold a SymInt.
        output: the node to replace. All that the operands name is computed before it and still holds the value read.
        output_view: steps from the (B, Hq, Sq, Dv) result to `output`'s shape.
        out_dtype: dtype of `output`; differs from q's when the graph casts around the site.
        lse: the node of the log-sum-exp of the rows (B, Hq, Sq), where it is used: natural log times `lse_scale`.
        location: "file.py:123" of the user's innermost frame, or "".
        epilogue: None when the result is used as it is.
        terms: how many matches in a row have this output, which is the sum of their results (1: this one alone).
    """

    spec: AttentionSpec
    q: Operand
    k: Operand
    v: Operand
    aux: tuple[Operand, ...]
    sizes: tuple[fx.Node | int, ...]
    output: fx.Node
    output_view: tuple[ViewStep, ...]
    out_dtype: torch.dtype
    location: str = ""
    lse: fx.Node | None = None
    lse_scale: float = 1.0
    epilogue: Epilogue | None = None
    terms: int = 1


Site = AttentionMatch | Declined


def apply_view(value: Any, view: tuple[ViewStep, ...]) -> Any:
    """`view` applied to a tensor or an `fx.Proxy`; sizes that are fx Nodes must have been replaced by the caller."""
    for name, *args in view:
        if name in ("reshape", "expand", "permute"):
            args = [list(args[0])]
        elif name == "unflatten":
            args = [args[0], list(args[1])]
        value = getattr(value, name)(*args)
    return value
