"""Emitted programs, word for word. A change that is meant is accepted with FA4_ACCEPT=1 and shows in the diff."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from emit_cases import spec_of

from fa4_inductor.analysis import facts
from fa4_inductor.lowering.aux_layout import column_loads, dense_loads, streamed_slots, table_loads
from fa4_inductor.lowering.emit_program import emit_program, emit_tile_test
from fa4_inductor.lowering.prepare import prepare
from fa4_inductor.lowering.tile_map import with_tile_map

GOLDEN = Path(__file__).resolve().parents[2] / "golden" / "emit"
CAUSAL, WINDOW = "kv_idx <= q_idx", "(kv_idx <= q_idx) & (kv_idx > q_idx - size0)"
PROGRAMS = {
    "plain": spec_of(),
    "causal": spec_of(keep=CAUSAL, empty_row="nan"),
    "window": spec_of(keep=WINDOW, sizes=1, empty_row="mean"),
    "softcap_causal": spec_of("tanh(score) * 50.0", CAUSAL),
    "alibi_causal": spec_of("score + aux0[h] * float(kv_idx - q_idx)", CAUSAL, aux="float32[1]"),
    "padding": spec_of(keep=f"aux0[b, kv_idx] & ({CAUSAL})", aux="bool[2]", empty_row="mean"),
    "documents": spec_of(keep=f"({CAUSAL}) & (aux0[b, kv_idx] == aux0[b, q_idx])", aux="int64[2]"),
    "dense_bias": spec_of("score + aux0[h, q_idx, kv_idx]", aux="bfloat16[3]"),
    "distance_table": spec_of("score + aux0[0, h, kv_idx - q_idx + (seqlen_q - 1)]", aux="float32[3]"),
    "sink_window": spec_of(keep=WINDOW, aux="bfloat16[1]", sizes=1, sink="aux0[h]"),
    "window_or_global": spec_of(keep=f"({CAUSAL}) & ((q_idx - kv_idx < 1024) | (kv_idx < 4))"),
    "prefix": spec_of(keep=f"({CAUSAL}) | (kv_idx < aux0[b])", aux="int32[1]"),
}
# for aux tensors whose strides are what the kernel likes best
REGULAR = {
    "regular_padding": PROGRAMS["padding"],
    "regular_dense_bias": PROGRAMS["dense_bias"],
    "regular_distance_table": prepare(PROGRAMS["distance_table"]).spec,
    "regular_evoformer": spec_of(
        "score + aux0[b, 0, kv_idx] + aux1[b // size0, h, q_idx, kv_idx]", aux="bfloat16[3],bfloat16[4]", sizes=1
    ),
    "regular_dense_mask": spec_of(keep="aux0[q_idx, kv_idx]", aux="bool[2]"),
}
# the kernel that walks a tile map, and the one that makes it
MAPPED = {"mapped_padding": with_tile_map(PROGRAMS["padding"], 128, 96)}
TESTS = {"test_documents": PROGRAMS["documents"], "test_dense_mask": REGULAR["regular_dense_mask"]}
ALL = PROGRAMS | REGULAR | MAPPED | TESTS


@pytest.mark.parametrize("name", ALL)
def test_text(name):
    spec, path = ALL[name], GOLDEN / f"{name}.py.txt"
    layout = (
        {
            "dense": dense_loads(spec),
            "tables": table_loads(spec),
            "columns": column_loads(spec),
            "unit_stride": streamed_slots(spec),
            "accumulate": True,
        }
        if name in REGULAR
        else {}
    )
    if name in TESTS:
        text = emit_tile_test(spec, facts(spec), dense=dense_loads(spec), unit_stride=streamed_slots(spec))
    else:
        text = emit_program(spec, facts(spec), use_tile_map=name in MAPPED, **layout)
    if os.environ.get("FA4_ACCEPT") == "1":
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert text == path.read_text(), f"the text of {name} changed; FA4_ACCEPT=1 accepts it"


def test_no_golden_file_is_left_over():
    assert {p.name.removesuffix(".py.txt") for p in GOLDEN.iterdir()} == set(ALL)
