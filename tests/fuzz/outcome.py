"""What became of one program, and whether it still computes what it says."""

from __future__ import annotations

import contextlib
import re
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from fa4_inductor import backend, log
from fa4_inductor.settings import Settings
from tests.fuzz.capture import record
from tests.fuzz.grammar import write
from tests.fuzz.mutate import mutate
from tests.fuzz.program import Program, Sizes
from tests.fuzz.writer import Choose


@dataclass(frozen=True)
class Result:
    """Attributes:
    fused: number of sites replaced. declined: reasons of the others.
    failure: what is wrong, or None. limit: a difference that `known_limit` explains.
    """

    fused: int
    declined: tuple[str, ...]
    failure: str | None = None
    limit: str | None = None


def generate(choose: Choose) -> Program:
    """A program that runs: mutations which break it are dropped."""
    program = _running(write(choose))
    while not runs(program):
        program = _running(write(choose))
    for _ in range(choose((0, 0, 1, 1, 2, 3))):
        mutated = mutate(program, choose)
        if mutated is not program and runs(mutated):
            program = mutated
    return program


def _running(program: Program) -> Program:
    """`program` without the lines that raise: a fill that its dtype cannot hold, an average of integers."""
    while (line := _failing(program)) is not None and 0 <= line < len(program.lines):
        program = replace(program, lines=(*program.lines[:line], *program.lines[line + 1 :]))
    return program


def runs(program: Program) -> bool:
    """Does the program run in eager, at both sizes, and return tensors?"""
    return _failing(program) is None


def _failing(program: Program) -> int | None:
    """Index of the line that raises, len(lines) for the result, None if all is well."""
    for sizes in (program.sizes, program.second):
        if sizes is None:
            continue
        try:
            results = _call(program.function(), program.tensors(sizes), program.grad)
        except Exception as error:
            frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == "<string>"]
            return (frames[-1].lineno or 0) - program.first_line if frames else len(program.lines)
        if not all(isinstance(r, torch.Tensor) for r in results):
            return len(program.lines)
    return None


def _call(function: Any, tensors: Sequence[torch.Tensor], grad: bool) -> tuple[Any, ...]:
    with torch.set_grad_enabled(grad), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = function(*tensors)
    return result if isinstance(result, tuple) else (result,)


def judge(program: Program) -> Result:
    """Run a program with its sites replaced and compare."""
    counted = log.counters()
    counted.clear()
    function = program.function()
    try:
        with _counting(program) as compiled:
            for sizes in (program.sizes, program.second):
                if sizes is not None and (failure := _difference(program, compiled, sizes)):
                    limit = known_limit(program)
                    return _result(counted, None if limit else failure, limit)
    except _Uncapturable as error:
        return Result(0, (f"capture: {type(error.__cause__).__name__}",))
    except Exception as error:
        return _result(counted, f"crash: {type(error).__name__}: {error}")
    del function
    internal = counted["declined.internal_error"]
    return _result(counted, "internal_error" if internal else None)


_FILL = re.compile(r"finfo|-1e30|-3e38|-65504")


def known_limit(program: Program) -> str | None:
    """The limit of decision 0005 that a program can meet in rows which its masks leave no key, or None."""
    if any(i.kind == "odd" for i in program.inputs):
        return "data that hold +inf or NaN"
    if any(i.dtype == "float64" for i in program.inputs) and re.search(r"float32|\.float\(", program.source):
        if any("1e9" in text for text in (*program.lines, *(i.kind for i in program.inputs))):
            return "float64 scores rounded to float32 beside -1e9"
    if not any(_FILL.search(line) for line in program.lines):
        return None
    if any(i.kind in ("additive:-inf", "additive:min") for i in program.inputs):
        return "a finite fill beside a mask that is data"
    if ".float16" in program.source or any(i.dtype == "float16" for i in program.inputs):
        return "a row of finite fills in fp16"
    return None


def _result(counted: Counter[str], failure: str | None, limit: str | None = None) -> Result:
    reasons = [n.removeprefix("declined.") for n, c in counted.items() if n.startswith("declined.") for _ in range(c)]
    return Result(counted["fused"], tuple(sorted(reasons)), failure, limit)


class _Uncapturable(Exception):
    """The program does not become one graph; there is nothing to test."""


@contextlib.contextmanager
def _counting(program: Program) -> Iterator[Any]:
    settings = Settings.from_env().with_options({"fa4.implementation": program.implementation})
    if not program.dynamo:
        try:
            with torch.set_grad_enabled(program.grad):
                gm = record(program.function(), program.tensors())
        except Exception as error:
            raise _Uncapturable from error
        backend.fuse(gm, settings)
        yield gm.forward
        return

    def fused(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        backend.fuse(gm, settings)
        return gm.forward

    torch._dynamo.reset()
    dynamic = None if program.second is None else True
    yield torch.compile(program.function(), backend=fused, fullgraph=False, dynamic=dynamic)


def _difference(program: Program, compiled: Any, sizes: Sizes) -> str | None:
    """The first tensor that differs from eager: a result, or an input that is written."""
    inputs, again = program.tensors(sizes), program.tensors(sizes)
    inputs, again = ([t.detach() for t in x] if program.grad and not program.dynamo else x for x in (inputs, again))
    expected = _call(program.function(), inputs, program.grad)
    actual = _call(compiled, again, program.grad)
    exact: list[Any] = []
    for n, (a, e) in enumerate(zip((*actual, *again), (*expected, *inputs), strict=True)):
        unit = program.rounding(e.dtype)
        if not torch.equal(a, e) and not _close(a, e, unit):
            exact = exact or _in_double(program, sizes)
            if exact and program.may_overflow and exact[n].shape == e.shape:
                e = torch.where(e.isfinite() | ~exact[n].isfinite(), e, exact[n].to(e.dtype))
            if not exact or not _close(a, e, unit, exact[n], program.has_half_types):
                return f"result {n} at {sizes}: off by {_gap(a, e)}"
    return None


def _in_double(program: Program, sizes: Sizes) -> list[Any]:
    """Results and inputs of the same program in double: by decision 0005, rounding of scores to half types is noise."""
    tensors = [t.detach().double() if t.is_floating_point() else t for t in program.tensors(sizes)]
    try:
        return [*_call(program.function(wide=True), tensors, False), *tensors]
    except Exception:  # operands of several dtypes
        return []


def _gap(a: torch.Tensor, e: torch.Tensor) -> float:
    if a.shape != e.shape or a.dtype != e.dtype:
        return float("inf")
    a, e = a.detach().double(), e.detach().double()
    if not torch.equal(a.isnan(), e.isnan()):
        return float("nan")
    same = (a == e) | e.isnan()
    return float((a - e)[~same].abs().max()) if not bool(same.all()) else 0.0


_NOISE = 0.02
"""An error of eager beyond this part of the largest result is no rounding of float32: double means something else."""


def _close(
    a: torch.Tensor, e: torch.Tensor, unit: float, exact: torch.Tensor | None = None, half: bool = False
) -> bool:
    """Is `a` as near to `e` as rounding by `unit` explains? With `exact`: as near to that as a few times `e` is."""
    if a.shape != e.shape or a.dtype != e.dtype or a.device != e.device:
        return False
    finite = e.detach().double()
    finite = finite[finite.isfinite()]
    band = 16 * unit * float(finite.abs().max()) if finite.numel() else 0.0
    if exact is None or exact.shape != e.shape or not exact.is_floating_point():
        return _gap(a, e) <= band
    own = _gap(e.double(), exact.double())
    if not half and not own <= _NOISE * max(band / (16 * unit), 1e-3):
        return False
    return _gap(a.double(), exact.double()) <= 4 * own + band
