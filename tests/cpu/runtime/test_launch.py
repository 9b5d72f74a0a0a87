"""Launch: operand checks, alignment, empty problems and argument order, with a recording kernel."""

import contextlib
import logging

import pytest
import torch

from fa4_inductor import log
from fa4_inductor.errors import KernelUnavailable
from fa4_inductor.lowering.config_table import LONG_SEQLEN_Q
from fa4_inductor.lowering.split_config import Variant
from fa4_inductor.runtime import compile as compiler
from fa4_inductor.runtime import launch, variants
from fa4_inductor.runtime import target as targets
from fa4_inductor.spec import AttentionSpec, AuxSpec, EmptyRow, parse_expr

DEV = torch.device("cpu")


def operands(b=2, hq=4, hkv=2, sq=3, sk=5, d=8, dv=16, dtype=torch.float16):
    return (
        torch.randn(b, hq, sq, d).to(dtype), torch.randn(b, hkv, sk, d).to(dtype), torch.randn(b, hkv, sk, dv).to(dtype)
    )  # fmt: skip


class Recorder:
    def __init__(self):
        self.calls = []

    def __call__(self, *args):
        self.calls.append(args)


def plan_of(spec, needs_v_mean=False):
    recorder = Recorder()
    bool_aux = any(a.dtype == "bool" for a in spec.aux)
    return launch.Plan(recorder, spec, spec.softmax_scale, needs_v_mean, bool_aux), recorder


@pytest.fixture(autouse=True)
def current_device(monkeypatch):
    launch.clear_plans()
    monkeypatch.setattr(launch, "current_device", lambda: None)  # as DEV.index
    yield
    launch.clear_plans()


@pytest.mark.parametrize("need_lse", [False, True])
def test_arguments_of_the_kernel(need_lse):
    aux = (AuxSpec("bool", 2), AuxSpec("int32", 0))
    spec = AttentionSpec(0.25, keep=parse_expr("aux0[b, kv_idx] & (kv_idx <= size0)", aux), aux=aux, num_sizes=1)
    plan, kernel = plan_of(spec, needs_v_mean=True)
    q, k, v = operands()
    mask = torch.ones(2, 5, dtype=torch.bool)
    out, lse = launch._launch(plan, q, k, v, [mask, torch.tensor(1, dtype=torch.int32)], [7], need_lse)
    (args,) = kernel.calls
    assert args[0] is q and args[1] is k and args[2] is v and args[3] is out
    assert args[4] is lse
    assert torch.equal(args[5], v.float().mean(2)) and args[6] == 0.25
    assert args[7][0].dtype is torch.uint8 and args[7][1].dtype is torch.int32 and args[8] == (7,)
    assert out.shape == (2, 4, 3, 16) and out.transpose(1, 2).is_contiguous() and out.dtype is q.dtype
    assert (lse.shape == (2, 4, 3) and lse.dtype is torch.float32) if need_lse else lse is None


@pytest.mark.parametrize("shape", [{"b": 0}, {"sq": 0}, {"hq": 0, "hkv": 0}])
def test_nothing_to_compute_launches_nothing(shape):
    plan, kernel = plan_of(AttentionSpec(1.0))
    q, k, v = operands(**shape)
    out, _ = launch._launch(plan, q, k, v, [], [], True)
    assert out.shape == (*q.shape[:3], 16) and not kernel.calls


@pytest.mark.parametrize("empty_row", list(EmptyRow))
@pytest.mark.parametrize("sink", [None, "0.5"])
def test_no_keys_agrees_with_the_reference(empty_row, sink):
    spec = AttentionSpec(1.0, sink=parse_expr(sink) if sink else None, empty_row=empty_row)
    plan, kernel = plan_of(spec)
    q, k, v = operands(sk=0)
    out, lse = launch._launch(plan, q, k, v, [], [], True)
    want, want_lse = launch.forward(q, k, v, [], spec.text, [], "reference", True)
    assert not kernel.calls and torch.equal(out, want) and torch.equal(lse, want_lse)


def test_a_plan_is_found_by_shape_after_its_checks(monkeypatch):
    recorder, made = Recorder(), []
    plan, recorder = plan_of(AttentionSpec(0.5))
    monkeypatch.setattr(launch, "_make_plan", lambda *key: made.append(key) or plan)
    monkeypatch.setattr(launch, "_MAX_KNOWN", 2)
    program = plan.spec.text
    for length in (3, 3, 4, 5, 6, 3):
        launch.forward(*operands(sk=length), [], program, [], "cute", False)
    assert len(recorder.calls) == 6 and len(made) == 1 and len(launch._known) <= 2
    with pytest.raises(ValueError, match="do not fit"):
        q, k, v = operands()
        launch.forward(q, k[:, :, :2], v, [], program, [], "cute", False)
    launch.clear_plans()
    launch.forward(*operands(), [], program, [], "cute", False)
    assert len(made) == 2


@pytest.mark.parametrize("need_lse", [False, True])
def test_the_short_way_makes_the_same_call(need_lse):
    """Shapes and strides seen before, at any address."""
    recorder, spec = Recorder(), AttentionSpec(0.5)
    launch.prepare(recorder, launch.PlanKey(spec.text, torch.float16, 8, 16, 2, DEV, need_lse, Variant.FORWARD, True))
    args = operands()
    storage = torch.zeros(args[1].numel() + 1, dtype=torch.float16)
    odd = storage[1:].view_as(args[1]).copy_(args[1])
    for k in (args[1], args[1], odd):
        out, lse = launch.forward(args[0], k, args[2], [], spec.text, [], "cute", need_lse)
        assert out.shape == (2, 4, 3, 16) and out.transpose(1, 2).is_contiguous() and out.dtype is torch.float16
        assert lse.shape == ((2, 4, 3) if need_lse else (0,)) and lse.dtype is torch.float32
    first, second, third = recorder.calls
    assert len(launch._known) == 1
    for call in (second, third):
        assert call[5:] == first[5:] and (call[4] is None) == (not need_lse)
        assert all(torch.equal(a, b) for a, b in zip(call[:3], first[:3]))
        assert [t.stride() for t in call[:4]] == [t.stride() for t in first[:4]]
    assert second[1] is args[1] and third[1].data_ptr() % 16 == 0


def test_on_another_device_the_short_way_is_not_taken(monkeypatch):
    recorder, spec, entered = Recorder(), AttentionSpec(0.5), []
    launch.prepare(recorder, launch.PlanKey(spec.text, torch.float16, 8, 16, 2, DEV, False, Variant.FORWARD, True))
    args = operands()
    launch.forward(*args, [], spec.text, [], "cute", False)
    monkeypatch.setattr(launch, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "device", lambda device: entered.append(device) or contextlib.nullcontext())
    launch.forward(*args, [], spec.text, [], "cute", False)
    assert entered == [DEV] and len(recorder.calls) == 2


def test_a_plan_built_ahead_is_used(monkeypatch):
    monkeypatch.setattr(launch, "_make_plan", lambda *key: pytest.fail("made although prepared"))
    recorder, spec = Recorder(), AttentionSpec(0.5)
    launch.prepare(recorder, launch.PlanKey(spec.text, torch.float16, 8, 16, 2, DEV, False, Variant.FORWARD, True))
    launch.forward(*operands(), [], spec.text, [], "cute", False)
    assert len(recorder.calls) == 1


def test_a_kernel_that_is_refused_at_launch_is_replaced_with_one_warning(caplog):
    calls = []

    def refuse(*args):
        calls.append(args)
        raise TypeError("Mismatched number of arguments")

    log.reset_warnings()
    spec, args = AttentionSpec(0.5), operands()
    launch.prepare(refuse, launch.PlanKey(spec.text, torch.float16, 8, 16, 2, DEV, False, Variant.FORWARD, True))
    want = launch.forward(*args, [], spec.text, [], "reference", False)[0]
    with caplog.at_level(logging.WARNING, logger="fa4_inductor"):
        for _ in range(3):
            torch.testing.assert_close(launch.forward(*args, [], spec.text, [], "cute", False)[0], want)
    assert len(calls) == 1 and len(caplog.records) == 1 and "TypeError" in caplog.text
    launch.clear_plans()
    launch.prepare(
        refuse, launch.PlanKey(spec.text, torch.float16, 8, 16, 2, DEV, False, Variant.FORWARD, True), strict=True
    )
    with pytest.raises(KernelUnavailable, match="could not be launched"):
        launch.forward(*args, [], spec.text, [], "cute", False)


def good(t):
    strides = [s * t.element_size() % 16 for s in t.stride()[:3]]
    return t.stride(3) == 1 and not any(strides) and t.data_ptr() % 16 == 0


BASE = torch.arange(2 * 3 * 4 * 64, dtype=torch.float32).half()
LAYOUTS = {
    "bhsd": (BASE.view(2, 3, 4, 64), False),
    "bshd": (BASE.view(2, 4, 3, 64).transpose(1, 2), False),
    "broadcast": (BASE[:64].view(1, 1, 1, 64).expand(2, 3, 4, 64), False),
    "transposed": (BASE.view(2, 3, 64, 4).transpose(2, 3), True),
    "odd row stride": (torch.arange(2 * 3 * 4 * 65).half().view(2, 3, 4, 65)[..., :64], True),
    "odd address": (torch.arange(2 * 3 * 4 * 64 + 1).half()[1:].view(2, 3, 4, 64), True),
    "odd stride of a single batch": (BASE.as_strided((1, 3, 4, 64), (7, 256, 64, 1)), False),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_alignment_copies_only_what_tma_cannot_read(name):
    t, copied = LAYOUTS[name]
    result = launch.aligned(t)
    assert good(result) and torch.equal(result, t)
    assert (result.data_ptr() != t.data_ptr()) == copied


BAD = {
    "head_dim": lambda q, k, v: (q, k[..., :4], v),
    "kv length": lambda q, k, v: (q, k, v[:, :, :3]),
    "heads": lambda q, k, v: (q[:, :3], k, v),
    "batch": lambda q, k, v: (q, k[:1].expand(3, -1, -1, -1), v),
    "dtype": lambda q, k, v: (q, k, v.float()),
}


@pytest.mark.parametrize("name", BAD)
def test_operands_that_do_not_fit_are_refused(name):
    with pytest.raises(ValueError, match="do not fit"):
        launch.forward(*BAD[name](*operands()), [], AttentionSpec(1.0).text, [], "reference", False)


def test_an_unknown_implementation_is_refused():
    with pytest.raises(ValueError, match="unknown implementation 'fast'"):
        launch.forward(*operands(), [], AttentionSpec(1.0).text, [], "fast", False)


def test_fp64_operands_are_computed_in_fp64():
    q, k, v = operands(dtype=torch.float64)
    out, lse = launch.forward(q, k, v, [], AttentionSpec(0.3).text, [], "reference", True)
    scores = q @ k.repeat_interleave(2, 1).transpose(2, 3) * 0.3
    torch.testing.assert_close(out, scores.softmax(-1) @ v.repeat_interleave(2, 1), rtol=1e-12, atol=1e-12)
    assert lse.dtype is torch.float32


def test_aux_layouts_choose_the_kernel(monkeypatch):
    """One kernel for tensors that TMA can read, one for all others, whatever came first."""
    made = []

    def make(key):
        recorder = Recorder()
        made.append((key, recorder))
        return launch.make_plan(recorder, key, dense_aux=key.regular, strict=False)

    monkeypatch.setattr(launch, "_make_plan", make)
    aux = (AuxSpec("float32", 3),)
    spec = AttentionSpec(0.5, parse_expr("score + aux0[h, q_idx, kv_idx]", aux), aux=aux)
    args = operands(sk=8)
    good = torch.zeros(4, 3, 8)
    layouts = [good, good[:1].expand(4, 3, 8), torch.zeros(4, 3, 9)[..., :8], good.mT.contiguous().mT, good]
    for t in layouts:
        launch.forward(*args, [t], spec.text, [], "cute", False)
    (first, regular), (second, irregular) = made
    assert first.regular and not second.regular
    assert len(regular.calls) == 3 and len(irregular.calls) == 2
    assert [call[7][0].stride() for call in irregular.calls] == [layouts[2].stride(), layouts[3].stride()]


def test_strides_of_single_rows_do_not_matter(monkeypatch):
    recorder = Recorder()
    monkeypatch.setattr(launch, "_make_plan", lambda key: launch.make_plan(recorder, key, key.regular, False))
    aux = (AuxSpec("float32", 3),)
    spec = AttentionSpec(0.5, parse_expr("score + aux0[h, q_idx, kv_idx]", aux), aux=aux)
    bias = torch.zeros(4, 9, 8).as_strided((4, 1, 8), (72, 5, 1))
    launch.forward(*operands(sk=8, sq=1), [bias], spec.text, [], "cute", False)
    (call,) = recorder.calls
    assert call[7][0].stride() == (72, 16, 1)


def test_long_queries_have_a_kernel_of_their_own(monkeypatch):
    made = []
    make = lambda key: made.append(key) or launch.make_plan(Recorder(), key, False, False)
    monkeypatch.setattr(launch, "_make_plan", make)
    for length in (3, LONG_SEQLEN_Q, LONG_SEQLEN_Q + 1, 3):
        launch.forward(*operands(sq=length), [], AttentionSpec(0.5).text, [], "cute", False)
    assert [key.variant for key in made] == [Variant.FORWARD, Variant.LONG]


@pytest.mark.parametrize("variant", [Variant.DIRECT, Variant.SPLIT])
def test_kernels_of_few_rows_are_told_their_splits(monkeypatch, variant):
    """And get memory for the partial results, on the first launch and on those that are known."""
    recorder, made = Recorder(), []
    make = lambda key: made.append(key) or launch.make_plan(recorder, key, False, False)
    monkeypatch.setattr(launch, "_make_plan", make)
    monkeypatch.setattr(variants, "choose_variant", lambda *shapes: (variant, 3))
    for _ in range(2):
        launch.forward(*operands(b=2, hq=4, sq=3, d=8, dv=16), [], AttentionSpec(0.5).text, [], "cute", False)
    assert [key.variant for key in made] == [variant] and len(recorder.calls) == 2
    for call in recorder.calls:
        workspace, splits = call[9:]
        assert splits == 3
        if variant is Variant.DIRECT:
            assert workspace is None
        else:
            assert workspace.shape == (3 * 2 * 4 * 3 * 17,) and workspace.dtype is torch.float32


def test_a_kernel_that_deals_out_its_tiles_gets_a_new_counter_at_each_launch():
    hopper = targets.target_for("cuda", "sm_90a")
    text = "fa4/1; aux=bool[2],int32[4]; sizes=0; scale=1.0; score=score; keep=aux0[b, kv_idx]; empty_row=zero"

    def kernel_of(program):
        key = compiler.forward_key(
            program, torch.bfloat16, 64, 64, 1, False, hopper, variant=Variant.FORWARD, regular=True
        )
        recorder = Recorder()
        return compiler.launchable(key, recorder), recorder

    kernel, recorder = kernel_of(f"{text}; tile_map=aux1[128, 128]")
    arguments = (*operands(), torch.zeros(1), None, None, 1.0, ("mask", "map"), None)
    kernel(*arguments)
    kernel(*arguments)
    first, second = (call[7] for call in recorder.calls)
    assert first[:2] == second[:2] == ("mask", "map") and len(first) == 3
    assert first[2].tolist() == [0] and first[2].dtype is torch.int32 and first[2].data_ptr() != second[2].data_ptr()
    plain, recorder = kernel_of(text)
    assert plain is recorder
