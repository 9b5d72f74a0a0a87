"""Emitted programs on the device against the interpreter, element by element."""

from __future__ import annotations

import pytest
import torch
from emit_cases import OPS_PROGRAMS, compile_spec, tensors_for

from fa4_inductor.analysis import facts
from fa4_inductor.lowering.emit_expr import LOG2_E
from fa4_inductor.spec import AttentionSpec
from fa4_inductor.spec.interpret import Env, evaluate, grid

B, H, SQ, SK = 2, 3, 33, 47


def run_on_device(spec: AttentionSpec, score: torch.Tensor, aux: list[torch.Tensor], sizes: list[int], **options):
    shape = score.shape
    value = torch.full_like(score, torch.nan)
    keep = torch.ones(shape, dtype=torch.uint8, device="cuda")
    ranges = torch.zeros((*shape[:3], 4), dtype=torch.int32, device="cuda")
    sink = torch.zeros(shape[:3], device="cuda")
    passed = tuple(t.view(torch.uint8) if t.dtype == torch.bool else t for t in aux)
    compile_spec(spec, **options)(score, value, keep, ranges, sink, passed or None, tuple(sizes) or None)
    torch.cuda.synchronize()
    return value, keep.bool(), ranges, sink


def interpreted(e, score, aux, sizes, **names) -> torch.Tensor:
    env = {
        **grid(B, H, SQ, SK, "cuda"),
        "score": score.double(),
        **{f"size{i}": s for i, s in enumerate(sizes)},
        **names,
    }
    wide = [t.double() if t.is_floating_point() else t for t in aux]
    return torch.as_tensor(evaluate(e, Env(env, wide)), device="cuda")


@pytest.mark.parametrize("fast_math", [True, False])
@pytest.mark.parametrize("name", OPS_PROGRAMS)
def test_program_values(name, fast_math):
    spec = OPS_PROGRAMS[name]
    aux = [t.cuda() for t in tensors_for(spec)]
    sizes = [3] * spec.num_sizes
    score = torch.rand(B, H, SQ, SK, device="cuda") * 4 + 0.01
    value, keep, ranges, sink = run_on_device(spec, score, aux, sizes, need_lse=True, fast_math=fast_math)
    want = interpreted(spec.score, score, aux, sizes).double().expand(score.shape) * LOG2_E
    if name == "exact":  # a decision at a boundary may flip with the last bit
        assert ((value - want).abs() > 1e-3).float().mean() < 0.005
    else:
        loose = fast_math and name in ("fast", "softcap")  # tanh.approx is good to 2^-11
        torch.testing.assert_close(value.double(), want, rtol=2e-3 if loose else 2e-5, atol=2e-2 if loose else 2e-5)
    assert torch.equal(keep, interpreted(spec.keep, score, aux, sizes).expand(score.shape))
    if spec.sink is not None:
        want = interpreted(spec.sink, score, aux, sizes).double() * LOG2_E
        torch.testing.assert_close(sink.double(), want[..., 0].expand(sink.shape), rtol=1e-5, atol=1e-5)
    if facts(spec).keep.free:
        rows = {"q_lo": torch.zeros((), dtype=torch.int64, device="cuda"), "q_hi": grid(B, H, SQ, SK, "cuda")["q_idx"]}
        for i, bound in enumerate((*facts(spec).kv_range, *facts(spec).kv_full_rest)):
            want = interpreted(bound, score, aux, sizes, **rows).expand(B, H, SQ, 1)[..., 0]
            assert torch.equal(ranges[..., i].long(), want)


def test_largest_finite_fill_in_data_stays_finite():
    from emit_cases import spec_of

    fill = torch.finfo(torch.float32).min
    mask = torch.full((SQ, SK), fill, device="cuda")
    mask[0, 0] = -torch.inf
    value, *_ = run_on_device(
        spec_of("score + aux0[q_idx, kv_idx]", aux="float32[2]"), torch.ones(B, H, SQ, SK, device="cuda"), [mask], []
    )
    assert (value[:, :, 0, 0] == -torch.inf).all() and value[:, :, 1:].isfinite().all()
