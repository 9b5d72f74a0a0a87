"""Stable one-line text for expressions and specs, and the parser that reads it back to the same objects.

The text of a spec is its identity: it travels as an argument of the op and is part of every cache key. Change its
grammar only together
with `VERSION`, which makes older cached graphs unreadable on purpose.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Sequence

from fa4_inductor.errors import ProgramError
from fa4_inductor.spec import expr as E
from fa4_inductor.spec.attention import AttentionSpec, AuxSpec, Dropout, EmptyRow, TileMap
from fa4_inductor.spec.ops import BINARY_SYMBOLS, OPS, Kind

VERSION = "fa4/1"

# Python's precedence, so that the text is also valid Python with the same meaning.
_PRECEDENCE = {"|": 1, "^": 2, "&": 3, "+": 4, "-": 4, "*": 5, "/": 5, "//": 5, "%": 5}
_COMPARE, _UNARY, _ATOM = 0, 6, 7
_CALL_NAMES = {"to_bool": "bool", "to_int": "int", "to_float": "float"}
_CALLS = {_CALL_NAMES.get(name, name): name for name, op in OPS.items() if op.symbol is None}
_AST_SYMBOLS = {
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.FloorDiv: "//", ast.Mod: "%",
    ast.BitAnd: "&", ast.BitOr: "|", ast.BitXor: "^",
    ast.Eq: "==", ast.NotEq: "!=", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=",
}  # fmt: skip


def print_expr(e: E.Expr) -> str:
    """One line of Python that `parse_expr` reads back to the same object."""
    memo: dict[E.Expr, tuple[str, int]] = {}
    for node in E.walk(e):
        memo[node] = _print_node(node, memo)
    return memo[e][0]


def _print_node(node: E.Expr, memo: dict[E.Expr, tuple[str, int]]) -> tuple[str, int]:
    if node.op == "const":
        text = _print_const(node)
        return text, _UNARY if text.startswith("-") else _ATOM
    if node.op == "score":
        return "score", _ATOM
    if node.op in ("index", "size"):
        return node.value, _ATOM
    if node.op == "load":
        return f"aux{node.value}[{', '.join(memo[a][0] for a in node.args) or '()'}]", _ATOM
    symbol = OPS[node.op].symbol
    if symbol is None:
        return f"{_CALL_NAMES.get(node.op, node.op)}({', '.join(memo[a][0] for a in node.args)})", _ATOM
    if len(node.args) == 1:
        # A negated constant would read back as the constant, and "--x" is hard on the eye.
        return symbol + _paren(memo[node.args[0]], _ATOM), _UNARY
    level = _PRECEDENCE.get(symbol, _COMPARE)
    left, right = (memo[a] for a in node.args)
    return f"{_paren(left, level + (level == _COMPARE))} {symbol} {_paren(right, level + 1)}", level


def _paren(part: tuple[str, int], least: int) -> str:
    return part[0] if part[1] >= least else f"({part[0]})"


def _print_const(node: E.Expr) -> str:
    value = node.value
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    return repr(value)


def parse_expr(text: str, aux: Sequence[AuxSpec] = ()) -> E.Expr:
    """Read one expression. `aux` gives the kinds of `aux0[...]`, `aux1[...]`.

    Raises:
        ProgramError: the text is not a score-program expression.
    """
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except SyntaxError as error:
        raise ProgramError(f"cannot parse {text!r}: {error.msg}") from error
    return _parse(tree.body, tuple(aux))


def _parse(node: ast.expr, aux: tuple[AuxSpec, ...]) -> E.Expr:
    match node:
        case ast.Constant(value=bool() | int() | float() as value):
            return E.const(value)
        case ast.Name():
            return _parse_name(node.id)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_parse(operand, aux)
        case ast.UnaryOp(op=ast.Invert(), operand=operand):
            return ~_parse(operand, aux)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _AST_SYMBOLS:
            return E.call(BINARY_SYMBOLS[_AST_SYMBOLS[type(op)]], _parse(left, aux), _parse(right, aux))
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _AST_SYMBOLS:
            return E.call(BINARY_SYMBOLS[_AST_SYMBOLS[type(op)]], _parse(left, aux), _parse(right, aux))
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _CALLS:
            return E.call(_CALLS[name], *(_parse(a, aux) for a in args))
        case ast.Subscript(value=ast.Name(id=name), slice=sub) if name.startswith("aux") and name[3:].isdigit():
            return _parse_load(int(name[3:]), sub, aux)
    raise ProgramError(f"not a score-program expression: {ast.unparse(node)}")


def _parse_name(name: str) -> E.Expr:
    if name == "score":
        return E.score()
    if name in E.INDEX_NAMES:
        return E.index(name)
    if name in ("inf", "nan"):
        return E.const(float(name))
    return E.size(name)


def _parse_load(slot: int, sub: ast.expr, aux: tuple[AuxSpec, ...]) -> E.Expr:
    if slot >= len(aux):
        raise ProgramError(f"aux{slot} is not declared")
    parts = sub.elts if isinstance(sub, ast.Tuple) else [sub]
    return E.load(slot, tuple(_parse(p, aux) for p in parts), aux[slot].kind)


def print_spec(spec: AttentionSpec) -> str:
    """The program text: the whole meaning of a spec in one line."""
    fields = {
        "aux": ",".join(f"{a.dtype}[{a.ndim}]" for a in spec.aux),
        "sizes": str(spec.num_sizes),
        "scale": repr(float(spec.softmax_scale)),
        "score": print_expr(spec.score),
        "keep": print_expr(spec.keep),
    }
    if spec.sink is not None:
        fields["sink"] = print_expr(spec.sink)
    fields["empty_row"] = spec.empty_row.value
    if spec.tile_map is not None:
        fields["tile_map"] = f"aux{spec.tile_map.slot}[{spec.tile_map.tile_m}, {spec.tile_map.tile_n}]"
    if spec.dropout is not None:
        fields["dropout"] = f"{float(spec.dropout.p)!r} by aux{spec.dropout.slot}"
    return "; ".join([VERSION, *(f"{name}={text}" for name, text in fields.items())])


def parse_spec(text: str) -> AttentionSpec:
    """Read a program text back.

    Raises:
        ProgramError: wrong version, missing field or malformed expression.
    """
    version, *parts = text.split("; ")
    if version != VERSION:
        raise ProgramError(f"program version {version!r}, this build reads {VERSION!r}; clear the compile caches")
    fields = dict(part.split("=", 1) for part in parts)
    try:
        aux = tuple(_parse_aux(a) for a in fields["aux"].split(",") if a)
        return AttentionSpec(
            softmax_scale=float(fields["scale"]),
            score=parse_expr(fields["score"], aux),
            keep=parse_expr(fields["keep"], aux),
            sink=parse_expr(fields["sink"], aux) if "sink" in fields else None,
            empty_row=EmptyRow(fields["empty_row"]),
            aux=aux,
            num_sizes=int(fields["sizes"]),
            tile_map=_parse_tile_map(fields["tile_map"]) if "tile_map" in fields else None,
            dropout=_parse_dropout(fields["dropout"]) if "dropout" in fields else None,
        )
    except (KeyError, ValueError) as error:
        raise ProgramError(f"malformed program {text!r}: {error}") from error


def _parse_tile_map(text: str) -> TileMap:
    slot, _, tile = text.removeprefix("aux").rstrip("]").partition("[")
    tile_m, tile_n = tile.split(", ")
    return TileMap(int(slot), int(tile_m), int(tile_n))


def _parse_dropout(text: str) -> Dropout:
    p, slot = text.split(" by aux")
    return Dropout(float(p), int(slot))


def _parse_aux(text: str) -> AuxSpec:
    dtype, _, ndim = text.rstrip("]").partition("[")
    return AuxSpec(dtype, int(ndim))


__all__ = ["VERSION", "Kind", "parse_expr", "parse_spec", "print_expr", "print_spec"]
