"""Splits logits into a score, a keep predicate and the contract of rows that keep nothing.

Masks are recognised by what they do: a term or a selection that puts -inf, or a finite number so low that no score can
change it (finfo.min), in the place of a logit. Smaller numbers (-1e4, -1e9) stay what they are: biases.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, replace

import torch

from fa4_inductor.errors import DeclineReason, DeclineSite
from fa4_inductor.patterns.booleans import boolean_selection
from fa4_inductor.spec import expr as E
from fa4_inductor.spec.attention import EmptyRow
from fa4_inductor.spec.ops import Kind

ABSORBING = -1e30
"""With |score| < 1e22 (fp32: 2**-24 of this) the sum is this number itself, and exp(sum - max) is 0."""
ABSORBING_HALF = -6e4
"""For fp16 logits, whose most negative number is -65504."""
LEVEL = -1e30
"""Stands for a finite fill in the rare case that the program must keep it, its multiples for lower ones: log2(e) times
them is still finite."""


BARE_ZERO = -2e3
"""exp of this is 0 in every dtype, also after a score was added whose own exp is finite."""
BARE_LIMIT = 80.0
"""exp of numbers up to this is finite and not 0 in float32."""


class Form(enum.Enum):
    """How the graph normalises the logits. It matters where floating point leaves a row of low logits nothing."""

    SHIFTED = "softmax"  # or exp and sum with the row's maximum subtracted: any finite logits will do
    SCALED = "softmax, scaled when its maximum was subtracted"  # so that no fill overflows by it
    BARE = "exp(s) / sum(exp(s))"  # a row of finite fills is 0 / 0
    MASKED = "m * exp(s) / sum(m * exp(s))"  # the same, also less a maximum, which may be that of a dropped key
    LOG = "exp(s - logsumexp(s))"  # in a row of finite fills the sum is lost, and each key gets 1
    KEYS_SHIFT_SINK = "softmax with a sink, less the maximum of the keys"  # a row of -inf is NaN


@dataclass(frozen=True)
class Mask:
    """Where `keep` is False the logit is `fill` whatever the score is."""

    keep: E.Expr
    fill: float


@dataclass(frozen=True)
class Logits:
    """score, keep and empty_row of an `AttentionSpec`."""

    score: E.Expr
    keep: E.Expr
    empty_row: EmptyRow


@dataclass(frozen=True)
class _Range:
    """`absorbing`: fills up to this are masks. `lowest`: sums below it overflow in every dtype involved."""

    absorbing: float
    lowest: float


@dataclass(frozen=True)
class _Peeled:
    """A logit as `value` where every mask keeps.

    `summed`: masks were added to one another, not only nested. `alive`: where the logit is not -inf. `clear`: where it
    is not a finite fill either, given that it is alive.
    """

    value: E.Expr
    masks: tuple[Mask, ...] = ()
    summed: bool = False
    alive: E.Expr = E.TRUE
    clear: E.Expr = E.TRUE


def split(
    logits: E.Expr,
    *,
    dtypes: tuple[torch.dtype, ...],
    fills_are_zero: bool,
    has_sink: bool,
    form: Form = Form.SHIFTED,
) -> Logits:
    """Split a logit expression.

    Args:
        dtypes: of the product of q and k, and of what the softmax reads. In fp16 fills of about -65504 absorb.
        fills_are_zero: rows of -inf give 0 (SDPA, flex), not NaN (softmax).
        has_sink: a sink column takes part, so no row is empty.

    Raises:
        DeclineSite: UNSUPPORTED_PROGRAM where NaN may arise, and when one scaling makes some fills overflow; EMPTY_ROWS
            when `form` gives rows of low logits a value that no contract has.
    """
    if any(n.is_const and n.value != n.value for n in E.walk(logits)):
        raise DeclineSite(DeclineReason.UNSUPPORTED_PROGRAM, "not a number in a mask")  # 0 * -inf
    limit = ABSORBING_HALF if dtypes[0] is torch.float16 else ABSORBING
    limits = _Range(limit, min(map(_overflow, dtypes)))
    if form is Form.SCALED:
        limits = _Range(limit, -math.inf)
    bare = form in (Form.BARE, Form.MASKED)
    if bare:
        limits = _Range(BARE_ZERO, math.inf)  # all fills are as good as -inf
    peeled = _peel(logits, limits)
    masks = peeled.masks if not bare else tuple(Mask(m.keep, -math.inf) for m in peeled.masks)
    if masks and _hides_infinity(peeled.value):
        raise DeclineSite(DeclineReason.UNSUPPORTED_PROGRAM, "0 * -inf or -inf + inf behind a mask")
    _check_form(form, peeled.value, masks)
    infinite = [m for m in masks if m.fill == -math.inf]
    finite = [m for m in masks if m.fill != -math.inf]
    unkept = EmptyRow.ZERO if fills_are_zero else EmptyRow.NAN
    if has_sink:
        return Logits(peeled.value, E.conjunction([m.keep for m in masks]), EmptyRow.ZERO)
    if not finite:
        return Logits(peeled.value, E.conjunction([m.keep for m in infinite]), unkept)
    if not infinite and len(finite) == 1:
        return Logits(peeled.value, finite[0].keep, EmptyRow.MEAN)
    if not infinite and not peeled.summed and len({m.fill for m in finite}) == 1:
        return Logits(peeled.value, E.conjunction([m.keep for m in finite]), EmptyRow.MEAN)
    # Finite fills stay in the score: a row of them is uniform over just those columns that hold the highest.
    value = E.call("where", peeled.clear, peeled.value, _levels(finite))
    return Logits(value, peeled.alive, unkept)


def _levels(finite: list[Mask]) -> E.Expr:
    """What stands for the fill where a logit is one: an outer mask, which comes later, wins over an inner one."""
    fills = sorted({m.fill for m in finite}, reverse=True)
    level = E.const(LEVEL)
    for mask in finite if len(fills) > 1 else ():
        level = E.call("where", mask.keep, level, LEVEL * (1 + fills.index(mask.fill)))
    return level


def _hides_infinity(e: E.Expr) -> bool:
    """May the logit of a dropped key be +inf or NaN, which a fill does not make -inf, by a constant?"""
    turned = [n for n in E.walk(e) if n.op in ("mul", "div", "sub", "neg", "abs")]
    infinite = any(n.is_const and n.kind is Kind.FLOAT and math.isinf(n.value) for n in E.walk(*turned))
    return infinite or any(n.is_const and n.value == math.inf for n in E.walk(e))


def _check_form(form: Form, value: E.Expr, masks: tuple[Mask, ...]) -> None:
    """Refuse what only a subtracted maximum would make safe; a tensor added to the scores may hold any fill."""
    nodes = list(E.walk(value))
    loads = any(n.op == "load" and n.kind is Kind.FLOAT for n in nodes)
    low = any(n.is_const and n.kind is Kind.FLOAT and abs(n.value) > BARE_LIMIT for n in nodes)
    unsafe = {
        Form.SHIFTED: False,
        Form.SCALED: False,
        Form.BARE: loads or low,
        Form.MASKED: loads or low,
        Form.LOG: loads or low or any(m.fill != -math.inf for m in masks),
        Form.KEYS_SHIFT_SINK: loads or any(m.fill == -math.inf for m in masks),
    }
    if unsafe[form]:
        raise DeclineSite(DeclineReason.EMPTY_ROWS, f"{form.value} of a row that a mask leaves no key")


def _overflow(dtype: torch.dtype) -> float:
    """Numbers from here up round to finfo.min, and not to -inf: half a unit in the last place is lost."""
    info = torch.finfo(dtype)
    return info.min * (1 + info.eps / 4)


def _peel(e: E.Expr, limits: _Range) -> _Peeled:
    if "score" not in e.free:
        e = boolean_selection(e)
    rule = _RULES.get(e.op)
    return rule(e, limits) if rule is not None else _Peeled(e)


def _is_fill(e: E.Expr, limits: _Range) -> bool:
    return e.is_const and e.kind is Kind.FLOAT and e.value <= limits.absorbing


def _peel_where(e: E.Expr, limits: _Range) -> _Peeled:
    condition, a, b = e.args
    if "score" in condition.free:
        return _Peeled(e)  # a threshold on the score belongs to the score: keep knows positions only
    for keep, kept, fill in ((condition, a, b), (~condition, b, a)):
        if _is_fill(fill, limits) and not _is_fill(kept, limits):
            inner = _peel(kept, limits)
            if fill.value == -math.inf:
                alive, clear = E.conjunction([keep, inner.alive]), inner.clear
            else:
                alive = inner.alive if inner.alive is E.TRUE else ~keep | inner.alive
                clear = E.conjunction([keep, inner.clear])
            return _Peeled(inner.value, (*inner.masks, Mask(keep, fill.value)), inner.summed, alive, clear)
    return _peel_choice(e, limits)


def _peel_choice(e: E.Expr, limits: _Range) -> _Peeled:
    """where(c, x, y) of masked logits, as concatenated masks are: the masks of x count where c holds."""
    condition, *branches = e.args
    yes, no = (_peel(b, limits) for b in branches)
    if not yes.masks and not no.masks:
        return _Peeled(e)

    def unless(c: E.Expr, keep: E.Expr) -> E.Expr:
        return keep if keep is E.TRUE else c | keep

    sides = ((~condition, yes), (condition, no))
    return _Peeled(
        E.call("where", condition, yes.value, no.value),
        tuple(Mask(c | m.keep, m.fill) for c, side in sides for m in side.masks),
        yes.summed or no.summed,
        E.conjunction([unless(c, side.alive) for c, side in sides]),
        E.conjunction([unless(c, side.clear) for c, side in sides]),
    )


def _peel_add(e: E.Expr, limits: _Range) -> _Peeled:
    left, right = (_peel(a, limits) for a in e.args)
    if not left.masks and not right.masks:
        return _Peeled(left.value + right.value)
    sums = [a.fill + b.fill for a in left.masks for b in right.masks if a.fill != -math.inf != b.fill]
    if any(total >= limits.lowest for total in sums):
        return _Peeled(e)  # two fills at once give a third level: leave it to the expression
    zero = [p.value.is_const and p.value.value == 0 for p in (left, right)]
    value = right.value if zero[0] else left.value if zero[1] else left.value + right.value
    summed = left.summed or right.summed or bool(left.masks and right.masks)
    alive = [left.alive, right.alive]
    if left.clear is not E.TRUE and right.clear is not E.TRUE:
        alive.append(left.clear | right.clear)  # two finfo.min overflow
    clear = E.conjunction([left.clear, right.clear])
    return _Peeled(value, left.masks + right.masks, summed, E.conjunction(alive), clear)


def _peel_sub(e: E.Expr, limits: _Range) -> _Peeled:
    left = _peel(e.args[0], limits)
    return replace(left, value=left.value - e.args[1]) if left.masks else _Peeled(e)


def _peel_scale(e: E.Expr, limits: _Range) -> _Peeled:
    """A positive constant factor goes to the terms, as long as the fills stay absorbing."""
    x, c = e.args if e.args[1].is_const else e.args[::-1] if e.op == "mul" else e.args
    if not E.is_finite_const(c) or c.value <= 0:
        return _Peeled(e)
    inner = _peel(x, limits)
    factor = c.value if e.op == "mul" else 1.0 / c.value
    fills = [m.fill * factor for m in inner.masks]
    if not inner.masks or any(f > limits.absorbing for f in fills):
        return _Peeled(e)
    value = E.call(e.op, inner.value, c)
    if min(fills) < limits.lowest and any(m.fill != -math.inf for m in inner.masks):
        if max(fills) >= limits.lowest:
            raise DeclineSite(DeclineReason.UNSUPPORTED_PROGRAM, "some fills of the mask overflow and others do not")
        masks = tuple(Mask(m.keep, -math.inf) for m in inner.masks)  # finfo.min * 2 is -inf
        return _Peeled(value, masks, inner.summed, E.conjunction([inner.alive, inner.clear]))
    return replace(inner, value=value, masks=tuple(Mask(m.keep, f) for m, f in zip(inner.masks, fills)))


def _peel_maximum(e: E.Expr, limits: _Range) -> _Peeled:
    """max(logit, finfo.min): -inf and overflow become finfo.min. A fill above it would be a level of its own."""
    x, c = e.args if e.args[1].is_const else e.args[::-1]
    if not _is_fill(c, limits):
        return _Peeled(e)
    inner = _peel(x, limits)
    if not inner.masks or any(m.fill > c.value for m in inner.masks):
        return _Peeled(e)
    masks = tuple(Mask(m.keep, c.value) for m in inner.masks)
    return _Peeled(inner.value, masks, False, E.TRUE, E.conjunction([inner.alive, inner.clear]))


def _peel_cast(e: E.Expr, limits: _Range) -> _Peeled:
    return _peel(e.args[0], limits) if e.args[0].kind is Kind.FLOAT else _Peeled(e)


_RULES = {
    "where": _peel_where,
    "add": _peel_add,
    "sub": _peel_sub,
    "mul": _peel_scale,
    "div": _peel_scale,
    "maximum": _peel_maximum,
    "to_float": _peel_cast,
}
