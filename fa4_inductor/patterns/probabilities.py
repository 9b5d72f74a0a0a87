"""From the element of P to the logits behind it: softmax ops, hand-written exp/sum/div, an extra sink column."""

from __future__ import annotations

import math
from dataclasses import dataclass

import sympy
import torch
from torch import fx

from fa4_inductor.errors import DeclineReason, DeclineSite
from fa4_inductor.patterns.elements import Atom, Elements, has_atoms
from fa4_inductor.patterns.masks import Form
from fa4_inductor.patterns.rules_tensors import reduced_dim
from fa4_inductor.patterns.rules_views import dimension, shape
from fa4_inductor.patterns.terms import is_zero, mask_of
from fa4_inductor.spec import expr as E
from fa4_inductor.spec.ops import Kind

FLOAT32_EPSILON = 2.0**-24
"""In float32 and narrower, a number of at least 1 does not change when this is added."""


@dataclass(frozen=True)
class Distribution:
    """Logits of the keys, and of the sink column if there is one; `dtype` is the type the softmax reads them in.

    `form` is how they are normalised.
    """

    logits: E.Expr
    sink: E.Expr | None
    dtype: torch.dtype
    form: Form


def distribution(ev: Elements, p: E.Expr) -> Distribution | None:
    """What `p`, the element of P at (.., q_idx, kv_idx), is a softmax of; None if it is no softmax over kv_idx.

    Raises:
        DeclineSite: NOT_ATTENTION if p is a softmax over the keys with something done to it, or the refusal of an
            element in its logits.
    """
    atom = ev.atom_of(p)
    if atom is not None and atom.kind == "softmax":
        found = _of_softmax(ev, atom.node, atom.index)
    else:
        found = _hand_written(ev, p)
    if found is None:
        if any(_over_keys(ev, n) for n in E.walk(p)) or ("score" in p.free and has_atoms(p)):
            raise DeclineSite(DeclineReason.NOT_ATTENTION, "the probabilities are changed before they meet V")
        return None
    return _without_row_constants(ev, found)


def _over_keys(ev: Elements, e: E.Expr) -> bool:
    atom = ev.atom_of(e)
    if atom is None or atom.kind not in ("softmax", "log_softmax"):
        return False
    at = atom.index[dimension(atom.node)]
    return at == ev.space.kv or (not at.is_Integer and ev.space.kv in at.free_symbols)


def _of_softmax(ev: Elements, node: fx.Node, index: tuple[sympy.Expr, ...]) -> Distribution | None:
    source = node.args[0]
    assert isinstance(source, fx.Node)
    dim = dimension(node)
    size, space = shape(source)[dim], ev.space
    offset = sympy.expand(index[dim] - space.kv)
    extra = sympy.expand(size - space.seqlen_k)
    if not offset.is_Integer or not extra.is_Integer or not 0 <= offset <= extra:
        return None
    if any(space.depends(e, space.kv) for i, e in enumerate(index) if i != dim) and space.kv != 0:
        return None
    logits, dtype = ev.value(source, index), source.meta["val"].dtype
    if extra == 0:
        return Distribution(logits, None, dtype, Form.SHIFTED)
    if extra > 1:
        detail = f"the softmax has {size} columns, the product with V takes {space.seqlen_k} of them"
        raise DeclineSite(DeclineReason.UNSUPPORTED_OP, detail)
    column = space.seqlen_k if offset == 0 else sympy.Integer(0)
    sink = ev.value(source, (*index[:dim], column, *index[dim + 1 :]))
    return Distribution(logits, sink, dtype, Form.SHIFTED)


def _hand_written(ev: Elements, p: E.Expr) -> Distribution | None:
    """e / sum(e), e / (c + sum(e)) with e = exp(y), and exp(y - logsumexp(y)) in its expanded form."""
    for weight, normaliser in _quotients(p):
        logits = _logit_of_weight(weight)
        for total, extra in _as_sum(normaliser) if logits is not None else ():
            atom = ev.atom_of(_without_floor(ev, total, weight))
            if logits is None or atom is None or atom.kind != "sum" or atom.body is not weight:
                continue
            dtype = atom.node.meta["val"].dtype
            form = Form.BARE if weight.op in ("exp", "exp2") else Form.MASKED
            if extra is None or _is_lost(ev, extra, weight, dtype):
                return Distribution(logits, None, dtype, form)
            sink = _logit_of(ev, extra)
            if sink is not None:
                return Distribution(logits, sink, dtype, form)
    if p.op == "exp" and p.args[0].op == "sub" and (found := _log_sum_exp(ev, p.args[0])) is not None:
        y, dtype = found
        return Distribution(y, None, dtype, Form.LOG)
    return None


def _is_lost(ev: Elements, extra: E.Expr, weight: E.Expr, dtype: torch.dtype) -> bool:
    """Is a term of the normaliser so small that adding it changes no bit?"""
    small = extra.is_const and 0 <= extra.value <= FLOAT32_EPSILON
    return small and dtype is not torch.float64 and _reaches_one(ev, weight)


def _quotients(p: E.Expr) -> list[tuple[E.Expr, E.Expr]]:
    """(a, b) of a / b, and of a * (1 / b)."""
    if p.op == "div":
        return [(p.args[0], p.args[1])]
    inverses = [(a, _without_ones(b)) for a, b in (p.args, p.args[::-1])] if p.op == "mul" else []
    return [(a, b.args[1]) for a, b in inverses if b.op == "div" and b.args[0].is_const and b.args[0].value == 1]


def _without_ones(e: E.Expr) -> E.Expr:
    """torch computes 1.0 / x as reciprocal(x) * 1.0."""
    while e.op == "mul" and e.args[1].is_const and e.args[1].value == 1:
        e = e.args[0]
    return e


def _logit_of_weight(e: E.Expr) -> E.Expr | None:
    """y with exp(y) = e; a weight that a mask sets to zero has the logit -inf."""
    if e.op == "exp":
        return e.args[0]
    if e.op == "exp2":
        return E.call("mul", e.args[0], math.log(2.0))
    masked = [(m, x) for x, f in (e.args, e.args[::-1]) if (m := mask_of(f)) is not None] if e.op == "mul" else []
    if e.op == "where" and "score" not in e.args[0].free:
        masked = [(c, x) for c, x, z in ((e.args[0], *e.args[1:]), (~e.args[0], *e.args[:0:-1])) if is_zero(z)]
    for keep, inner in masked:
        y = _logit_of_weight(inner)
        return None if y is None else E.call("where", keep, y, -math.inf)
    return None


def _without_floor(ev: Elements, total: E.Expr, weight: E.Expr) -> E.Expr:
    """max(total, c) is total where the total is at least 1 and c is less."""
    if total.op == "maximum" and _reaches_one(ev, weight):
        for x, c in (total.args, total.args[::-1]):
            if c.is_const and c.value <= 1:
                return x
    return total


def _reaches_one(ev: Elements, weight: E.Expr) -> bool:
    """Is the weight exp(y - max(y)), whose largest value in a row is 1?"""
    shifted = weight.args[0] if weight.op in ("exp", "exp2") else weight
    top = ev.atom_of(shifted.args[1]) if shifted.op == "sub" else None
    return top is not None and top.kind == "max" and top.body is shifted.args[0]


def _as_sum(e: E.Expr) -> list[tuple[E.Expr, E.Expr | None]]:
    return [(e, None)] if e.op != "add" else [(e.args[0], e.args[1]), (e.args[1], e.args[0])]


def _logit_of(ev: Elements, e: E.Expr) -> E.Expr | None:
    """z with exp(z) = e, for a term of the normaliser that does not depend on the key."""
    if {"kv_idx", "score"} & e.free:
        return None
    if e in ev.collapsed:  # a computed tensor that became one load
        node, index = ev.collapsed[e]
        return ev.operand(node.args[0], index) if node.target is torch.ops.aten.exp.default else None
    if e.op == "exp":
        return e.args[0]
    return E.const(math.log(e.value)) if e.is_const and e.value > 0 else None


def _log_sum_exp(ev: Elements, e: E.Expr) -> tuple[E.Expr, torch.dtype] | None:
    """y if e = y - (log(sum(exp(y - c))) + c)."""
    y, lse = e.args
    candidates: list[tuple[E.Expr, E.Expr | None]] = [(lse, None)]
    if lse.op == "add":
        candidates = [(lse.args[0], lse.args[1]), (lse.args[1], lse.args[0])]
    for log, shift in candidates:
        total = ev.atom_of(log.args[0]) if log.op == "log" else None
        if total is None or total.kind != "sum" or total.body is None:
            continue
        expected = y if shift is None else y - shift
        if total.body is E.call("exp", expected):
            return y, total.node.meta["val"].dtype
    return None


def sink_of_gate(ev: Elements, gate: E.Expr, logits: E.Expr) -> E.Expr | None:
    """s of sigmoid(logsumexp(logits) - s) = sum(exp(logits)) / (exp(s) + sum(exp(logits))), or None."""
    if gate.op != "sigmoid" or gate.args[0].op != "sub":
        return None
    lse, sink = gate.args[0].args
    if {"kv_idx", "score"} & sink.free or has_atoms(sink):
        return None
    return sink if _log_sum_exp(ev, logits - lse) is not None else None


def _without_row_constants(ev: Elements, found: Distribution) -> Distribution:
    """Softmax does not change when the maximum of the row is subtracted from all its logits."""
    logits, dropped = _drop(ev, found.logits, scaled=found.sink is None)
    sink = found.sink
    if sink is not None:
        sink, same = _drop(ev, sink)
        if [m for m, _ in same] != [m for m, _ in dropped]:
            raise DeclineSite(DeclineReason.NOT_ATTENTION, "the sink is shifted differently from the scores")
    for e in (logits, sink):
        if e is not None and has_atoms(e):
            raise DeclineSite(DeclineReason.UNSUPPORTED_OP, "a reduction over the scores inside the scores")
    form = found.form
    if dropped and form is not Form.LOG:
        form = _form_of_shift(ev, [(_atom(ev, m), shifted) for m, shifted in dropped], form, sink)
        if form is Form.SHIFTED and found.logits.op != "sub":
            form = Form.SCALED
    return Distribution(logits, sink, found.dtype, form)


def _form_of_shift(ev: Elements, dropped: list[tuple[Atom, E.Expr]], form: Form, sink: E.Expr | None) -> Form:
    """What subtracting these maxima, each from an expression, makes of a form.

    Raises:
        DeclineSite: NOT_ATTENTION for the maximum of something else that may be infinite.
    """
    own = [maximum for maximum, shifted in dropped if maximum.body is shifted]
    for maximum, shifted in dropped:
        if maximum.body is not shifted and (maximum.body is None or not _surely_finite(maximum.body)):
            raise DeclineSite(DeclineReason.NOT_ATTENTION, "the maximum of something else is subtracted")
    if not own or form is Form.MASKED:
        return form
    if sink is None or any(shape(m.node.args[0])[reduced_dim(m.node)] != ev.space.seqlen_k for m in own):
        return Form.SHIFTED
    return Form.KEYS_SHIFT_SINK


def _surely_finite(e: E.Expr) -> bool:
    """Are all values finite where the scores are?"""
    plain = {"add", "sub", "mul", "neg", "tanh", "sigmoid", "abs", "minimum", "maximum", "where", "score"}
    return e.op in plain and all(_surely_finite(a) for a in e.args if a.kind is Kind.FLOAT) or E.is_finite_const(e)


def _atom(ev: Elements, e: E.Expr) -> Atom:
    atom = ev.atom_of(e)
    assert atom is not None
    return atom


def _drop(ev: Elements, e: E.Expr, *, scaled: bool = False) -> tuple[E.Expr, list[tuple[E.Expr, E.Expr]]]:
    """`e` without the maxima subtracted from it, and each of them with what it was subtracted from.

    `scaled`: in (x - max) * c with c > 0, too.
    """
    dropped: list[tuple[E.Expr, E.Expr]] = []
    if e.op == "where" and e.args[2].is_const and e.args[2].value == -math.inf:
        inner, dropped = _drop(ev, e.args[1], scaled=scaled)
        return E.call("where", e.args[0], inner, e.args[2]), dropped
    if scaled and e.op in ("mul", "div"):
        x, c = e.args if e.args[1].is_const or e.op == "div" else e.args[::-1]
        if E.is_finite_const(c) and c.value > 0:
            inner, dropped = _drop(ev, x, scaled=True)
            return E.call(e.op, inner, c), dropped
        return e, dropped
    if e.op == "neg":
        e = 0.0 - e.args[0]
    while e.op == "sub" and (atom := ev.atom_of(e.args[1])) is not None and atom.kind == "max":
        if "kv_idx" in e.args[1].free:
            break
        dropped.append((e.args[1], e.args[0]))
        e = e.args[0]
    return e, dropped
