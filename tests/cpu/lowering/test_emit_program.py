"""Emitted program texts, run as they are with torch stand-ins for the device ops, against the interpreter."""

from __future__ import annotations

import dataclasses
import re
from types import SimpleNamespace

import pytest
import torch
from emit_cases import OPS_PROGRAMS, spec_of, tensors_for
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_exprs import AUX, B, H, aux_tensors, keeps

from fa4_inductor.analysis import facts
from fa4_inductor.errors import ProgramError
from fa4_inductor.kernels.graph_aux import eager_aux
from fa4_inductor.kernels.reference import attention_reference
from fa4_inductor.lowering.aux_layout import column_loads, dense_loads, table_loads
from fa4_inductor.lowering.emit_expr import LOG2_E
from fa4_inductor.lowering.emit_program import emit_program, write_program
from fa4_inductor.lowering.hoist import PADDING
from fa4_inductor.lowering.prepare import prepare
from fa4_inductor.spec import AttentionSpec, EmptyRow
from fa4_inductor.spec.interpret import Env, evaluate, grid

SQ, SK = 5, 6


def _tensor(x):
    return x if isinstance(x, torch.Tensor) else torch.tensor(x)


def _lifted(f):
    return lambda *args: f(*map(_tensor, args))


def _fma(a, b, c):
    return _tensor(a) * b + c


_ROUND = {"floor": torch.floor, "ceil": torch.ceil, "trunc": torch.trunc, "round_even": torch.round}
OPS_STAND_IN = SimpleNamespace(
    LOG2_E=LOG2_E, imin=_lifted(torch.minimum), imax=_lifted(torch.maximum), select=_lifted(torch.where), fma=_fma,
    exp2=_lifted(torch.exp2), log2=_lifted(torch.log2), tanh_approx=_lifted(torch.tanh), fabs=_lifted(torch.abs),
    clamp_index=lambda i, last: torch.where((_tensor(i) < 0) | (_tensor(i) > last), last, i),
)  # fmt: skip
POPS_STAND_IN = SimpleNamespace(
    minimum=_lifted(torch.minimum), maximum=_lifted(torch.maximum), iabs=_lifted(torch.abs), fma_rz=_fma,
    mul_rz=lambda a, b: _tensor(a) * b, truncate=lambda x: x.to(torch.int64),
    saturate=lambda x: x.clamp(-(2**31), 2**31 - 1),
    floordiv=lambda a, b: torch.div(_tensor(a), b, rounding_mode="floor"), mod=_lifted(torch.remainder),
    float_mod=_lifted(torch.remainder), divide=_lifted(torch.div), fast_divide=_lifted(torch.div),
    logical_not=_lifted(torch.logical_not), exp=_lifted(torch.exp), log=_lifted(torch.log), sqrt=_lifted(torch.sqrt),
    rsqrt=_lifted(torch.rsqrt), sigmoid=_lifted(torch.sigmoid), exact_sigmoid=_lifted(torch.sigmoid),
    **{name: _lifted(f) for name, f in _ROUND.items()},
)  # fmt: skip
_MATH = {n: _lifted(getattr(torch, n)) for n in ("sin", "cos", "erf", "pow", "exp", "exp2", "log", "log2", "tanh")}


def execute(text: str) -> SimpleNamespace:
    """The module of a program text, its device imports replaced by stand-ins."""
    space = {
        "Boolean": lambda x: _tensor(x).bool(),
        "Float32": lambda x: _tensor(x).double(),
        "Int32": lambda x: _tensor(x).long(),
        "cute": SimpleNamespace(math=SimpleNamespace(**_MATH)),
        "ops": OPS_STAND_IN,
        "pops": POPS_STAND_IN,
    }
    exec(re.sub(r"^from .*$", "", text, flags=re.M), space)
    return SimpleNamespace(**space)


def context(aux, sizes, sq=SQ, sk=SK):
    return SimpleNamespace(aux=aux, sizes=sizes, seqlen_q=sq, seqlen_k=sk)


def program_values(spec, aux, sizes, score, *, beyond=0, **options):
    """(score in log2 units, keep, sink) over the grid, which may reach beyond the lengths."""
    module = execute(emit_program(spec, facts(spec), **options))
    ctx = context(aux, sizes)
    names = grid(B, H, SQ + beyond, SK + beyond)
    b, h, q, kv = (names[n] for n in ("b", "h", "q_idx", "kv_idx"))
    u = module.uniform(ctx, b, h) if hasattr(module, "uniform") else ()
    r = module.row(ctx, b, h, q, u) if hasattr(module, "row") else ()
    c = module.column(ctx, b, h, kv, u) if hasattr(module, "column") else ()
    value = score * LOG2_E if module.PLAIN else module.score(ctx, score / spec.softmax_scale, b, h, q, kv, u, r, c)
    keep = _tensor(module.keep(ctx, b, h, q, kv, u, r, c) if hasattr(module, "keep") else True)
    if hasattr(module, "kv_interval"):
        lo, hi = module.kv_interval(ctx, b, h, q, u, r)
        keep = keep & (kv >= lo) & (kv < hi)
    assert module.MASKED or bool(keep.all())
    _check_shifted(module, ctx, (score / spec.softmax_scale, b, h, q, kv, u, r, c), value)
    if hasattr(module, "keep_column"):
        assert not (keep & ~_tensor(module.keep_column(ctx, b, h, kv, u, c))).any()
    return value, keep, module.sink(ctx, b, h, q) if module.HAS_SINK else None


def _check_shifted(module, ctx, arguments, value):
    """The forms of the score that add a shift add nothing else."""
    shift = 0.75
    if hasattr(module, "shared_score"):
        _, b, h, q, kv, u, r, _ = arguments
        first = _tensor(kv) - 3
        shifted = module.shared_score(ctx, *arguments, shift, first, 3.0) + module.row_score(ctx, b, h, q, u, r)
    elif hasattr(module, "shifted_score"):
        shifted = module.shifted_score(ctx, *arguments, shift)
    else:
        return
    both = torch.broadcast_tensors(_tensor(shifted).double(), _tensor(value + shift).double())
    torch.testing.assert_close(*both, rtol=1e-6, atol=1e-6, equal_nan=True)


def interpreted(e, spec, aux, sizes, score):
    names = {**grid(B, H, SQ, SK), "score": score, **{f"size{i}": s for i, s in enumerate(sizes)}}
    return torch.as_tensor(evaluate(e, Env(names, [t.double() if t.is_floating_point() else t for t in aux])))


@pytest.mark.parametrize("fast_math", [True, False])
@pytest.mark.parametrize("name", OPS_PROGRAMS)
def test_ops_programs(name, fast_math):
    spec = OPS_PROGRAMS[name]
    aux, sizes = tensors_for(spec), [3] * spec.num_sizes
    score = torch.randn(B, H, SQ, SK, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).abs() * 2
    value, keep, sink = program_values(spec, aux, sizes, score, need_lse=True, fast_math=fast_math)
    shape = score.shape
    want = interpreted(spec.score, spec, aux, sizes, score).double() * LOG2_E
    torch.testing.assert_close(value.double().expand(shape), want.expand(shape), rtol=1e-5, atol=1e-5, equal_nan=True)
    assert torch.equal(keep.expand(shape), interpreted(spec.keep, spec, aux, sizes, score).expand(shape))
    if sink is not None:
        want = interpreted(spec.sink, spec, aux, sizes, score).double() * LOG2_E
        torch.testing.assert_close(sink.double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scale", [0.125, -3.0])
@pytest.mark.parametrize("name", ["fast", "exact", "softcap", "alibi", "loads"])
def test_scale_is_part_of_the_program(name, scale):
    spec = dataclasses.replace(OPS_PROGRAMS[name], softmax_scale=scale)
    aux, sizes = tensors_for(spec), [3] * spec.num_sizes
    score = torch.rand(B, H, SQ, SK, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 0.1
    value, _, _ = program_values(spec, aux, sizes, score, need_lse=True)
    want = interpreted(spec.score, spec, aux, sizes, score).double() * LOG2_E
    torch.testing.assert_close(value.double().expand(score.shape), want.expand(score.shape), rtol=1e-5, atol=1e-5)


@settings(max_examples=120, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(keeps(), st.integers(-2, 3))
def test_random_keeps(keep, size0):
    spec = AttentionSpec(1.0, keep=keep, aux=AUX, num_sizes=1)
    aux = aux_tensors(SQ, SK)
    _, got, _ = program_values(spec, aux, [size0], torch.zeros(()))
    want = interpreted(keep, spec, aux, [size0], torch.zeros(()))
    assert torch.equal(torch.broadcast_to(got, (B, H, SQ, SK)), torch.broadcast_to(want, (B, H, SQ, SK)))
    program_values(spec, aux, [size0], torch.zeros(()), beyond=9)  # no load leaves its tensor (torch would raise)


@pytest.mark.parametrize("name", [n for n, s in OPS_PROGRAMS.items() if s.keep.free and s.keep.op != "const"])
def test_ranges_are_those_of_the_facts(name):
    spec = OPS_PROGRAMS[name]
    aux, sizes = tensors_for(spec), [3] * spec.num_sizes
    module, names = execute(emit_program(spec, facts(spec))), grid(B, H, SQ, SK)
    lo, hi = torch.zeros((), dtype=torch.int64), names["q_idx"]
    got = (*module.kv_range(context(aux, sizes), names["b"], names["h"], lo, hi),
           *module.kv_full(context(aux, sizes), names["b"], names["h"], lo, hi))  # fmt: skip
    env = Env({**names, "q_lo": lo, "q_hi": hi, **{f"size{i}": s for i, s in enumerate(sizes)}}, aux)
    for bound, expression in zip(got, (*facts(spec).kv_range, *facts(spec).kv_full_rest)):
        want = torch.as_tensor(evaluate(expression, env))
        assert torch.equal(*torch.broadcast_tensors(_tensor(bound), want)), expression


@pytest.mark.parametrize("keep", ["kv_idx <= aux0[q_idx]", "(kv_idx <= aux0[q_idx]) & (kv_idx > aux0[q_idx] - 3)"])
def test_bounds_loaded_by_row(keep):
    spec = spec_of(keep=keep, aux="int64[1]")
    aux, names = [torch.tensor([0, 4, 2, 5, 1])], grid(B, H, SQ, SK)
    module = execute(emit_program(spec, facts(spec)))
    arguments = context(aux, []), names["b"], names["h"], names["q_idx"]
    kept = evaluate(spec.keep, Env(names, aux))
    for bounds in (module.row_range(*arguments), module.row_full(*arguments)):
        lo, hi = map(_tensor, bounds)
        assert torch.equal(*torch.broadcast_tensors((names["kv_idx"] >= lo) & (names["kv_idx"] < hi), kept))


@pytest.mark.parametrize("name", [n for n, s in OPS_PROGRAMS.items() if s.aux])
def test_elements_beyond_the_lengths_read_inside_their_tensors(name):
    spec = OPS_PROGRAMS[name]
    aux = [t[(slice(0, 4),) * t.dim()] for t in tensors_for(spec)]  # shorter than any length, too
    score = torch.ones(B, H, SQ + 9, SK + 9, dtype=torch.float64)
    value, _, _ = program_values(spec, aux, [3] * spec.num_sizes, score, beyond=9, need_lse=True)
    assert value.shape == score.shape


def test_alibi_is_two_multiply_adds_per_element():
    text = emit_program(OPS_PROGRAMS["alibi"], facts(OPS_PROGRAMS["alibi"]))
    body = text.split("def score")[1].split("def ")[0]
    assert body.count("fma") == 2 and "Float32" not in body and "*" not in body


def test_distance_bias_loses_no_digits_far_from_the_origin():
    """Near the diagonal the bias is small, though slope * kv_idx is large there: an fp32 run must still get it
    right."""
    score = execute(emit_program(OPS_PROGRAMS["alibi"], facts(OPS_PROGRAMS["alibi"]))).score
    slope, q = torch.tensor(0.7 * LOG2_E), torch.tensor(100_000.0)
    kv = q - torch.arange(64.0)
    wide = lambda x: torch.as_tensor(x, dtype=torch.float64)
    OPS_STAND_IN.fma = lambda a, b, c: (wide(a) * wide(b) + wide(c)).float()  # one rounding, as the device's
    try:
        got = score(None, 0.0, 0, 0, 0, 0, (slope,), (slope * -q, None), (kv,))
    finally:
        OPS_STAND_IN.fma = _fma
    error = got.double() - slope.double() * (kv.double() - q.double())
    assert (error - error.mean()).abs().max() < 1e-5  # what is common to the row cancels in the softmax


def test_row_constants_are_dropped_unless_the_lse_or_a_sink_sees_them():
    spec = spec_of("score + 0.5 * float(q_idx)")
    assert "PLAIN = True" in emit_program(spec, facts(spec))
    assert "PLAIN = False" in emit_program(spec, facts(spec), need_lse=True)
    sunk = spec_of("score + 0.5 * float(q_idx)", sink="0.0")
    assert "PLAIN = False" in emit_program(sunk, facts(sunk))


@pytest.mark.parametrize("scale,plain", [(0.5, True), (0.0, False), (-0.5, False)])
def test_only_positive_scales_are_plain(scale, plain):
    spec = dataclasses.replace(spec_of(), softmax_scale=scale)
    module = execute(emit_program(spec, facts(spec)))
    assert module.PLAIN is plain
    if not plain:
        assert float(module.score(None, 2.0, 0, 0, 0, 0, (), (), ())) == pytest.approx(2.0 * scale * LOG2_E)


def test_largest_finite_fills_stay_finite():
    fill = torch.finfo(torch.float32).min
    spec = spec_of(f"where(kv_idx > 2, score, {fill!r}) + aux0[b, kv_idx]", aux="float32[2]")
    text = emit_program(spec, facts(spec))
    assert f"{fill!r})\n" in text and "pops.mul_rz(Float32(" in text and "INF)" not in text.split("NAN = ")[1]


@pytest.mark.parametrize("empty_row", list(EmptyRow))
def test_flags(empty_row):
    spec = dataclasses.replace(
        spec_of("30.0 * tanh(score)", "(kv_idx <= q_idx) & (kv_idx > q_idx - 4)"), empty_row=empty_row
    )
    module = execute(emit_program(spec, facts(spec)))
    assert (module.PLAIN, module.MASKED, module.HAS_SINK, module.MAY_BE_EMPTY) == (False, True, False, True)
    assert empty_row.value == module.EMPTY_ROW and pytest.approx(30.0 * LOG2_E) == module.BOUND_LOG2


def test_text_is_deterministic_and_written_once(tmp_path):
    spec = OPS_PROGRAMS["integers"]
    text = emit_program(spec, facts(spec))
    assert text == emit_program(spec, facts(spec))
    path = write_program(text, "abc", tmp_path / "programs")
    assert path.read_text() == text and path.parent.stat().st_mode & 0o077 == 0
    before = path.stat().st_mtime_ns
    assert write_program(text, "abc", tmp_path / "programs").stat().st_mtime_ns == before
    assert write_program(text + "#", "abc", tmp_path / "programs").read_text() == text + "#"


def test_integers_beyond_int32_are_refused():
    spec = spec_of(keep="kv_idx * 3 > 9223372036854775807 - q_idx % 5")
    with pytest.raises(ProgramError, match="int32"):
        emit_program(spec, facts(spec))


def test_reference_agrees_with_a_program_driven_softmax():
    """End to end on one program: softmax of the emitted scores equals the reference."""
    spec = OPS_PROGRAMS["alibi"]
    q, k, v = (torch.randn(B, H, n, 8, generator=torch.Generator().manual_seed(n)) for n in (SQ, SK, SK))
    slopes = torch.tensor([0.5, 0.25])
    value, keep, _ = program_values(spec, [slopes], [], (q @ k.mT).double())
    p = torch.exp2(value.masked_fill(~keep, -torch.inf) - value.amax(-1, keepdim=True))
    want, _ = attention_reference(q, k, v, [slopes], spec)
    torch.testing.assert_close(((p / p.sum(-1, keepdim=True)) @ v.double()).float(), want, rtol=1e-5, atol=1e-5)


def test_a_table_is_read_by_the_kernel():
    spec = spec_of("score + aux0[kv_idx - q_idx + 4, h] * 0.5", "kv_idx <= q_idx", aux="float32[2]")
    prepared = prepare(spec)
    aux = eager_aux(prepared, torch.zeros(B, H, SQ, 8), torch.zeros(B, H, SK, 8), tensors_for(spec))
    module = execute(emit_program(prepared.spec, facts(prepared.spec), tables=table_loads(prepared.spec)))
    names = grid(B, H, SQ, SK)
    b, h, q, kv = (names[n] for n in ("b", "h", "q_idx", "kv_idx"))
    score, r = torch.randn(B, H, SQ, SK, dtype=torch.float64), module.row(context((), ()), b, h, q, ())
    ((lead_b, lead_h),) = module.table_index(context((), ()), b, h)
    entries = aux[0][lead_b, lead_h, kv - q + SQ - 1 + PADDING, 0]
    assert module.TABLES == (0,) and not hasattr(module, "uniform")
    where = (context((), ()), score, b, h, q, kv, (), r, ())
    want = interpreted(spec.score, spec, tensors_for(spec), [], score).double() * LOG2_E
    torch.testing.assert_close(module.score(*where, (entries,)), want, rtol=1e-6, atol=1e-6)
    shared = module.shared_score(*where, 0.5, kv, 0.0, (entries,)) + module.row_score(*where[:1], b, h, q, (), r)
    torch.testing.assert_close(shared, want + 0.5, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("text", ["score + aux0[h, q_idx, kv_idx]", "score + aux1[kv_idx] + aux0[h, q_idx, kv_idx]"])
def test_a_dense_bias_may_come_with_the_product(text):
    spec = dataclasses.replace(spec_of(text, aux="bfloat16[3],float32[1]"), softmax_scale=0.125)
    module = execute(emit_program(spec, facts(spec), dense=dense_loads(spec), accumulate=True))
    aux, names = tensors_for(spec), grid(B, H, SQ, SK)
    b, h, q, kv = (names[n] for n in ("b", "h", "q_idx", "kv_idx"))
    score, ctx = torch.randn(B, H, SQ, SK, dtype=torch.float64), context(aux, ())
    u = module.uniform(ctx, b, h) if hasattr(module, "uniform") else ()
    c = module.column(ctx, b, h, kv, u) if hasattr(module, "column") else ()
    bias = aux[0].double()[h, q, kv]
    want = interpreted(spec.score, spec, aux, [], score).double() * LOG2_E
    assert module.ACCUMULATED == 0
    plain = module.score(ctx, score, b, h, q, kv, u, (), c, (bias,))
    torch.testing.assert_close(plain, want, rtol=1e-6, atol=1e-6)
    with_bias = (ctx, score + bias, b, h, q, kv, u, (), c, 0.5)
    shared = hasattr(module, "shared_score")
    got = module.shared_score(*with_bias, kv, 0.0, (None,)) if shared else module.shifted_score(*with_bias, (None,))
    torch.testing.assert_close(got, want + 0.5, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("text", "scale"),
    [("score + aux0[h, q_idx, kv_idx]", 0.3), ("score + aux0[h, q_idx, kv_idx] * 2.0", 0.125), ("tanh(score)", 0.125)],
)
def test_other_biases_are_added_by_the_program(text, scale):
    spec = dataclasses.replace(spec_of(text, aux="bfloat16[3]"), softmax_scale=scale)
    assert "ACCUMULATED" not in emit_program(spec, facts(spec), dense=dense_loads(spec), accumulate=True)


def test_a_vector_over_the_keys_is_read_by_the_kernel():
    spec = spec_of("score + aux0[b, 0, kv_idx]", "kv_idx <= q_idx", aux="float32[3]")
    module, aux = execute(emit_program(spec, facts(spec), columns=column_loads(spec))), tensors_for(spec)
    names, ctx = grid(B, H, SQ, SK), context(aux, ())
    b, h, q, kv = (names[n] for n in ("b", "h", "q_idx", "kv_idx"))
    score, entries = torch.randn(B, H, SQ, SK, dtype=torch.float64), aux[0][b, 0, kv].double()
    want = interpreted(spec.score, spec, aux, [], score).double() * LOG2_E
    assert module.COLUMNS == (0,) and module.column_index(ctx, b, h) == ((b, 0),)
    where = (ctx, score, b, h, q, kv, (), module.row(ctx, b, h, q, ()), ())
    torch.testing.assert_close(module.score(*where, (entries,)), want, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(module.shared_score(*where, 0.5, kv, 0.0, (entries,)), want + 0.5, rtol=1e-6, atol=1e-6)
    short = context([aux[0][..., :3]], ())
    assert int(module.kv_full(short, b, h, torch.tensor(SQ - 1), torch.tensor(SQ - 1))[1]) == 3, "full tiles end inside"
