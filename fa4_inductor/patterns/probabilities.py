"""From the element of P to the logits behind it: softmax ops, hand-written exp/sum/div, an extra sink column."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import sympy
import torch
from torch import fx

from fa4_inductor.errors import DeclineReason, DeclineSite
from fa4_inductor.patterns.elements import Atom, Elements
from fa4_inductor.patterns.masks import Form
from fa4_inductor.patterns.rules_tensors import reduced_dim
from fa4_inductor.patterns.rules_views import dimension, shape
from fa4_inductor.spec import expr as E
from fa4_inductor.spec.ops import Kind


@dataclass(frozen=True)
class Distribution:
    """Logits of the keys, and of the sink column if there is one; `dtype` is the type the softmax reads them in.

    `form` is how they are normalised. `zeroed` is true where a probability is set to 0 after the softmax; None if none
    is.
    """

    logits: E.Expr
    sink: E.Expr | None
    dtype: torch.dtype
    form: Form
    zeroed: E.Expr | None = None


def distribution(ev: Elements, p: E.Expr) -> Distribution | None:
    """What `p`, the element of P at (.., q_idx, kv_idx), is a softmax of; None if it is no softmax over kv_idx.

    Raises:
        DeclineSite: NOT_ATTENTION if p is a softmax over the keys with something done to it, or the refusal of an
            element in its logits.
    """
    p, zeroed = _zeroed(_unscaled(p))
    atom = ev.atom_of(p)
    if atom is not None and atom.kind == "softmax":
        found = _of_softmax(ev, atom.node, atom.index)
    else:
        found = _hand_written(ev, p)
    if found is None:
        if any(_over_keys(ev, n) for n in E.walk(p)) or ("score" in p.free and ev.has_atoms(p)):
            raise DeclineSite(DeclineReason.NOT_ATTENTION, "the probabilities are changed before they meet V")
        return None
    return replace(_without_row_constants(ev, found), zeroed=zeroed)


def _zeroed(p: E.Expr) -> tuple[E.Expr, E.Expr | None]:
    """x and c of where(c, 0, x), in which c knows nothing of the scores."""
    if p.op == "where" and "score" not in p.args[0].free:
        for value, other, condition in ((p.args[1], p.args[2], p.args[0]), (p.args[2], p.args[1], ~p.args[0])):
            if value.is_const and value.value == 0:
                return _unscaled(other), condition
    return p, None


def _unscaled(p: E.Expr) -> E.Expr:
    """p * 1 and casts."""
    while p.op == "to_float" or p.op in ("mul", "div") and p.args[1].is_const and p.args[1].value == 1:
        p = p.args[0]
    return p


def _over_keys(ev: Elements, e: E.Expr) -> bool:
    atom = ev.atom_of(e)
    if atom is None or atom.kind != "softmax":
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
    """exp(y) / sum(exp(y)), exp(y) / (c + sum(exp(y))), and exp(y - logsumexp(y)) in its expanded form."""
    if p.op == "div" and p.args[0].op == "exp":
        for total, extra in _as_sum(p.args[1]):
            atom = ev.atom_of(total)
            if atom is not None and atom.kind == "sum" and atom.body is p.args[0]:
                sink = None if extra is None else _logit_of(extra)
                if extra is None or sink is not None:
                    return Distribution(p.args[0].args[0], sink, atom.node.meta["val"].dtype, Form.BARE)
    if p.op == "exp" and p.args[0].op == "sub" and (found := _log_sum_exp(ev, p.args[0])) is not None:
        y, dtype = found
        return Distribution(y, None, dtype, Form.LOG)
    return None


def _as_sum(e: E.Expr) -> list[tuple[E.Expr, E.Expr | None]]:
    return [(e, None)] if e.op != "add" else [(e.args[0], e.args[1]), (e.args[1], e.args[0])]


def _logit_of(e: E.Expr) -> E.Expr | None:
    """z with exp(z) = e, for a term of the normaliser that does not depend on the key."""
    if {"kv_idx", "score"} & e.free:
        return None
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
    if {"kv_idx", "score"} & sink.free or ev.has_atoms(sink):
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
        if e is not None and ev.has_atoms(e):
            raise DeclineSite(DeclineReason.UNSUPPORTED_OP, "a reduction over the scores inside the scores")
    form = found.form
    if dropped and form is not Form.LOG:
        form = _form_of_shift(ev, [(_atom(ev, m), shifted) for m, shifted in dropped], form, sink)
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
    if not own:
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
