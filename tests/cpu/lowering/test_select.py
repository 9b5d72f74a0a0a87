"""Which implementation is chosen, and the reason for each that is not."""

from __future__ import annotations

import pytest
import torch

from fa4_inductor.errors import DeclineReason
from fa4_inductor.lowering.select import choose, settled
from fa4_inductor.lowering.support import Operands
from fa4_inductor.runtime.target import target_for
from fa4_inductor.settings import Settings
from fa4_inductor.spec import EmptyRow, parse_spec

CPU, HOPPER, AMPERE = target_for("cpu"), target_for("cuda", "sm_90a"), target_for("cuda", "sm_80")
R = DeclineReason


def spec_of(score="score", keep="True", aux="", sizes=0, sink="", empty_row="zero"):
    sink = f"; sink={sink}" if sink else ""
    return parse_spec(
        f"fa4/1; aux={aux}; sizes={sizes}; scale=0.3; score={score}; keep={keep}{sink}; empty_row={empty_row}"
    )


def operands(dtype=torch.bfloat16, sq=128, sk=128, d=64, dv=64, sizes=()):
    q, k, v = ((2, 8, sq, d), (2, 2, sk, d), (2, 2, sk, dv))
    return Operands.of(*(torch.empty(s, dtype=dtype, device="meta") for s in (q, k, v)), sizes)


def outcome(choice):
    return choice.implementation, [(name, declined.reason) for name, declined in choice.passed_over]


PLAIN, CAUSAL = spec_of(), spec_of(keep="kv_idx <= q_idx")
SOFTCAP = spec_of("20.0 * tanh(score)", "kv_idx <= q_idx")
SINK = spec_of(aux="float32[1]", sink="aux0[h]")
PADDED = {c: spec_of(keep="aux0[b, kv_idx]", aux="bool[2]", empty_row=c) for c in ("zero", "nan", "mean")}
FP32_BIAS = spec_of("score + aux0[h, q_idx, kv_idx]", aux="float32[3]")
HALF_BIAS = spec_of("score + aux0[h, q_idx, kv_idx]", aux="bfloat16[3]")


@pytest.mark.parametrize(
    "spec,ops,target,want",
    [
        (CAUSAL, operands(), HOPPER, ("cute", [])),
        (SINK, operands(torch.float16, d=192, dv=128), HOPPER, ("cute", [])),
        (PADDED["mean"], operands(), HOPPER, ("cute", [])),
        (PADDED["nan"], operands(), HOPPER, ("cute", [])),
        (CAUSAL, operands(torch.float32), HOPPER, ("sdpa", [("cute", R.UNSUPPORTED_DTYPE)])),
        (CAUSAL, operands(d=72, dv=72), HOPPER, ("sdpa", [("cute", R.UNSUPPORTED_HEAD_DIM)])),
        (CAUSAL, operands(), AMPERE, ("sdpa", [("cute", R.UNSUPPORTED_DEVICE)])),
        (SOFTCAP, operands(), AMPERE, (None, [("cute", R.UNSUPPORTED_DEVICE), ("sdpa", R.UNSUPPORTED_PROGRAM)])),
        (FP32_BIAS, operands(), AMPERE, (None, [("cute", R.UNSUPPORTED_DEVICE), ("sdpa", R.UNSUPPORTED_PROGRAM)])),
        (HALF_BIAS, operands(), AMPERE, ("sdpa", [("cute", R.UNSUPPORTED_DEVICE)])),
        (PADDED["mean"], operands(), AMPERE, (None, [("cute", R.UNSUPPORTED_DEVICE), ("sdpa", R.EMPTY_ROWS)])),
        (PLAIN, operands(), CPU, ("sdpa", [("cute", R.UNSUPPORTED_DEVICE)])),
        (FP32_BIAS, operands(), CPU, ("sdpa", [("cute", R.UNSUPPORTED_DEVICE)])),
        (PADDED["zero"], operands(), CPU, ("sdpa", [("cute", R.UNSUPPORTED_DEVICE)])),
        (PADDED["mean"], operands(), CPU, ("sdpa", [("cute", R.UNSUPPORTED_DEVICE)])),
        (PADDED["nan"], operands(), CPU, ("sdpa", [("cute", R.UNSUPPORTED_DEVICE)])),
        (SINK, operands(), CPU, (None, [("cute", R.UNSUPPORTED_DEVICE), ("sdpa", R.UNSUPPORTED_PROGRAM)])),
        (PLAIN, operands(sq=1), CPU, (None, [("cute", R.UNSUPPORTED_DEVICE), ("sdpa", R.NOT_FASTER)])),
    ],
)
def test_automatic_choice(spec, ops, target, want):
    choice = choose(spec, ops, target, Settings())
    assert outcome(choice) == want
    assert (choice.declined is None) == (choice.implementation is not None)


@pytest.mark.parametrize(
    "name,spec,ops,target,reason",
    [
        ("reference", SINK, operands(torch.float64, d=7, dv=3), CPU, None),
        ("reference", PADDED["nan"], operands(), HOPPER, None),
        ("reference", PLAIN, operands(torch.int32), CPU, R.UNSUPPORTED_DTYPE),
        ("flex", SOFTCAP, operands(), CPU, None),
        ("flex", SINK, operands(), AMPERE, None),
        ("flex", PADDED["mean"], operands(), CPU, R.EMPTY_ROWS),
        ("flex", PLAIN, operands(d=80, dv=80), AMPERE, R.UNSUPPORTED_HEAD_DIM),
        ("cute", PLAIN, operands(), CPU, R.UNSUPPORTED_DEVICE),
        ("cute", spec_of("score + aux0[h]", aux="float64[1]"), operands(), HOPPER, R.UNSUPPORTED_PROGRAM),
        (
            "cute",
            spec_of(keep="kv_idx * 2 > 4611686018427387904 % (q_idx + 5)"),
            operands(),
            HOPPER,
            R.UNSUPPORTED_PROGRAM,
        ),
        (
            "cute",
            spec_of("score + aux0[h, b, 0, 0, kv_idx]", aux="float32[5]"),
            operands(),
            HOPPER,
            R.UNSUPPORTED_PROGRAM,
        ),
        ("sdpa", PLAIN, operands(sq=1), CPU, None),  # forced: the cost rule does not count
        ("sdpa", SINK, operands(), CPU, R.UNSUPPORTED_PROGRAM),
    ],
)
def test_forced_choice_never_falls_back(name, spec, ops, target, reason):
    choice = choose(spec, ops, target, Settings(implementation=name))
    if reason is None:
        assert outcome(choice) == (name, [])
    else:
        assert outcome(choice) == (None, [(name, reason)])
        assert choice.declined.detail


WINDOW = "(kv_idx <= q_idx) & (q_idx - kv_idx < 8)"


@pytest.mark.parametrize(
    "keep,sq,sk,sizes,empty_row",
    [
        (WINDOW, 64, 64, (), "zero"),
        (WINDOW, 64, 65, (), "zero"),
        (WINDOW, 80, 64, (), "nan"),  # rows from 71 on see nothing
        ("kv_idx <= q_idx + size0", 4, 9, (5,), "zero"),
        ("kv_idx <= q_idx + size0", 4, 9, (-1,), "nan"),
        ("kv_idx <= q_idx + size0", 4, 9, (None,), "nan"),
        ("aux0[b, kv_idx]", 64, 64, (), "nan"),
    ],
)
def test_contracts_that_cannot_occur_are_dropped(keep, sq, sk, sizes, empty_row):
    spec = spec_of(keep=keep, aux="bool[2]", sizes=len(sizes), empty_row="nan")
    assert settled(spec, operands(sq=sq, sk=sk, sizes=sizes)).empty_row is EmptyRow(empty_row)


def test_symbolic_lengths_prove_what_their_ranges_allow():
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

    env = ShapeEnv()
    s = env.create_symintnode(env.create_symbol(9, ConstantSource("s"), DimDynamic.DYNAMIC), hint=9)
    spec = spec_of(keep=WINDOW, empty_row="mean")
    assert settled(spec, operands(sq=s, sk=s)).empty_row is EmptyRow.ZERO
    assert settled(spec, operands(sq=s, sk=s + 3)).empty_row is EmptyRow.ZERO
    assert settled(spec, operands(sq=s + 3, sk=s)).empty_row is EmptyRow.MEAN
    cached = spec_of(keep="(kv_idx <= q_idx + size0) & (kv_idx > q_idx + size0 - 4)", sizes=1, empty_row="mean")
    assert settled(cached, operands(sq=1, sk=s + 1, sizes=(s,))).empty_row is EmptyRow.MEAN  # Sk > size0 is not known
