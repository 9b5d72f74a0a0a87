"""Damage to a program: edits of its text that leave something which runs, and is attention almost, or by accident."""

from __future__ import annotations

import re
from dataclasses import replace

from tests.fuzz.program import Program
from tests.fuzz.writer import FILLS, Choose

# What stands for what: a token found in a line is replaced by one of its alternatives.
_TOKENS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (r"(?<![\w.])-1(?=[,)\]])", ("-2", "0", "1")),
    (r"(?<![\w.])-2(?=[,)\]])", ("-1", "-3", "1")),
    (r"dim=-1", ("dim=-2", "dim=1")),
    (r"<=", ("<", ">", "==")),
    (r"(?<![<-])>(?!=)", (">=", "<")),
    (r"==", ("!=", "<=")),
    (r"float\('-inf'\)", (*FILLS[1:], "float('inf')", "float('nan')", "0.0")),
    (r"torch\.finfo\(s\.dtype\)\.min", ("torch.finfo(s.dtype).max", "float('-inf')", "-1e4", "-65504.0")),
    (r"-1e[49]\b", ("float('-inf')", "1e9", "-1e30", "-10.0")),
    (r"\bamax\b", ("amin", "mean")),
    (r"\bexp\(", ("exp2(", "expm1(", "cosh(")),
    (r"\bsoftmax\b", ("log_softmax", "softmin")),
    (r"\btril\b", ("triu",)),
    (r"\.triu\(1\)", (".triu()", ".tril()")),
    (r"transpose\(1, 2\)", ("transpose(0, 1)", "transpose(2, 3)", "transpose(1, 3)", "contiguous()")),
    (r"permute\(0, 2, 1, 3\)",
        ("permute(0, 2, 3, 1)", "permute(2, 1, 0, 3)", "permute(0, 1, 3, 2)", "permute(0, 3, 2, 1)")),
    (r"transpose\(-1, -2\)", ("transpose(-1, -3)", "permute(0, 2, 1, 3)", "clone()", "flip(-1).mT")),
    (r"\.mT\b", ("", ".flip(-1).mT", ".mT.roll(1, -1)", ".mT.mT")),
    (r"keepdim=True", ("keepdim=False",)),
    (r" \+ ", (" - ", " * ", " / ")),
    (r" \* ", (" / ", " + ")),
    (r" - ", (" + ",)),
    (r" / ", (" * ", " - ")),
    (r" & ", (" | ", " ^ ")),
    (r" \| ", (" & ", " ^ ")),
    (r"~", ("", "~~")),
    (r"\bS\b", ("T",)),
    (r"\bT\b", ("S", "H")),
    (r"\bH\b", ("B", "S")),
    (r"\bk\b", ("q", "v")),
    (r"\bq\b", ("k", "v")),
    (r"\bv\b", ("k", "q")),
    (r"\bp\b", ("s",)),
    (r"\bs\b", ("p", "(s * 2)")),
    (r"\bi\b", ("j", "(i + 1)", "i.flip(0)", "i * 2")),
    (r"\bj\b", ("i", "(j - 1)", "j.flip(-1)", "j // 2", "j % 3")),
    (r"\[:, None, None, :\]", ("[:, None, :, None]", "[:, :, None, None]")),
    (r"\[:, None, None\]", ("[None, :, None]",)),
    (r"masked_fill\(", ("masked_fill_(",)),
    (r"\b0\.0\b", ("1.0", "-0.0", "float('nan')", "1e-3", "float('-inf')")),
    (r"\b1\b", ("2", "0")),
    (r"\b2\b", ("1", "3")),
    (r"dtype=torch\.float32", ("dtype=torch.float64", "dtype=torch.bfloat16")),
    (r"repeat_interleave\(G", ("repeat(1, G, 1, 1).chunk(1, dim=0)[0].repeat_interleave(1",)),
    (r"// G", ("% K",)),
    (r"\.bool\(\)", (".to(torch.int32)", ".to(torch.uint8)")),
    (r"scale=0\.3", ("scale=-0.3", "scale=0.0", "scale=1e4")),
)  # fmt: skip
_NEW_LINES = (
    "{x}.mul_(2.0)", "{x} = {x} * 2", "{x}.copy_({x}.flip(-1))", "{x}[..., 0] = 0", "{x}.zero_()", "r = {x}.sum()",
    "{x} = {x}.flip(-1)", "{x} = {x}.roll(1, -1)", "{x}.view(-1)[0] = 1", "{x} = {x}.mT.contiguous().mT",
    "{x}.add_({y})", "{x} = {x} + {y}", "{x} = {x} * {y}", "{x} = {x}.nan_to_num()", "{x} = {x}.to(torch.float16)",
    "{x}.logical_not_()", "{x} = ~{x}", "{x} = {x}.clone()", "{x} = {x}.transpose(-1, -2)", "torch.relu_({x})",
    "{x}[0].mul_(3.0)", "{x} = {x}.to(torch.int64)", "{x} = {y}", "{x} = torch.where({x} > 0.5, {x}, {y})",
    "{x} = {x}[..., :2]", "{x} = torch.cat([{x}, {y}], -1)", "{x} = {x} - {x}.amax(-1, keepdim=True)", "{x} = {x}.T",
    "{x} = {x}.cumsum(-1)", "{x} = {x}.sort(-1).values", "{x} = {x} / {x}.sum(-1, keepdim=True)", "{x}.t_()",
    "F.relu({x}, True)", "{x}.data.mul_(0.5)", "{x}.unsqueeze(0).squeeze(0).add_(1)", "{x} = {x}.detach()",
    "{x} = {x}.expand(2, *{x}.shape)[1]", "torch.mul({x}, 2, out={x})", "{x} = {x}.softmax(-1)",
    "{x}[..., 1:] = {y}[..., :-1]",
    "{x} = {x}.gather(-1, torch.zeros_like({x}, dtype=torch.long))", "{x} = {x}.as_strided({x}.shape, {x}.stride())",
    "{x} = {x}.masked_fill({x} != {x}, 0)", "{x} = {x}.mean(1, keepdim=True)", "{x} = {x} @ {y}", "{x} = {y} @ {x}",
    "{x} = {x}.unsqueeze(0)", "{x} = F.pad({x}, (1, 0))[..., :-1]", "{x} = {x}.view({x}.shape[::-1])",
    "{x} = {x}.reshape({x}.mT.shape)", "{x} = torch.stack([{x}, {y}], 1)[:, 0]", "{x} = {x}.to(torch.bool)",
)  # fmt: skip


def mutate(program: Program, choose: Choose) -> Program:
    """One edit at a place that `choose` picks. The result need not run."""
    edit = choose((_token, _token, _token, _line, _line, _structure, _result))
    return edit(program, choose)


def _edited(program: Program, lines: list[str], what: str) -> Program:
    return replace(program, lines=tuple(lines), mutations=(*program.mutations, what))


def _token(program: Program, choose: Choose) -> Program:
    places = [
        (row, match.start(), match.end(), others)
        for row, line in enumerate(program.lines)
        for pattern, others in _TOKENS
        for match in re.finditer(pattern, line)
    ]
    if not places:
        return program
    row, start, end, others = choose(places)
    lines, other = list(program.lines), choose(others)
    old = lines[row]
    lines[row] = old[:start] + other + old[end:]
    return _edited(program, lines, f"{old} -> {lines[row]}")


def _names(program: Program) -> list[str]:
    assigned = [m.group(1) for line in program.lines if (m := re.match(r"(\w+) = ", line))]
    return list(dict.fromkeys([*assigned, *(i.name for i in program.inputs)]))


def _line(program: Program, choose: Choose) -> Program:
    names = _names(program)
    line = choose(_NEW_LINES).format(x=choose(names), y=choose(names))
    lines = list(program.lines)
    lines.insert(choose(range(len(lines) + 1)), line)
    return _edited(program, lines, line)


def _structure(program: Program, choose: Choose) -> Program:
    """Drop, double or swap lines."""
    lines = list(program.lines)
    at = choose(range(len(lines)))
    kind = choose(("drop", "double", "swap"))
    if kind == "drop":
        del lines[at]
    elif kind == "double":
        lines.insert(at, lines[at])
    else:
        other = choose(range(len(lines)))
        lines[at], lines[other] = lines[other], lines[at]
    return _edited(program, lines, f"{kind} {program.lines[at]}")


def _result(program: Program, choose: Choose) -> Program:
    name = choose(_names(program))
    return replace(program, results=(*program.results, name), mutations=(*program.mutations, f"return {name}"))
