"""Which aux reads are whole tiles or streams, and which layouts suit them."""

from __future__ import annotations

import pytest
from emit_cases import spec_of

from fa4_inductor.lowering.aux_layout import (
    column_loads,
    dense_bytes,
    dense_loads,
    dense_slots,
    streamed_slots,
    suits_pairs,
    suits_tma,
)
from fa4_inductor.lowering.config import KernelConfig
from fa4_inductor.lowering.config_table import HEAD_DIMS, is_long, select_config
from fa4_inductor.spec import AttentionSpec


def loads(spec: AttentionSpec) -> list[str]:
    return [str(load) for load in dense_loads(spec)]


@pytest.mark.parametrize(
    "load",
    ["aux0[q_idx, kv_idx]", "aux0[h, q_idx, kv_idx]", "aux0[b // 4, 0, q_idx, kv_idx]", "aux0[h % 2, q_idx, kv_idx]"],
)
def test_tiles(load):
    spec = spec_of(f"score + {load}", aux=f"bfloat16[{load.count(',') + 1}]")
    assert loads(spec) == [load] and dense_slots(spec) == streamed_slots(spec) == (0,)
    assert dense_bytes(spec, dense_loads(spec)) == 2


@pytest.mark.parametrize(
    "load",
    ["aux0[kv_idx, q_idx]", "aux0[q_idx, kv_idx + 1]", "aux0[q_idx // 2, kv_idx]", "aux0[q_idx, q_idx, kv_idx]",
     "aux0[0, kv_idx]", "aux0[q_idx, 0]", "aux0[kv_idx - q_idx + seqlen_q]"],
)  # fmt: skip
def test_what_is_no_tile(load):
    assert loads(spec_of(f"score + {load}", aux=f"bfloat16[{load.count(',') + 1}]")) == []


def test_loads_of_keep_and_of_the_score_are_one_tile_each():
    spec = spec_of(
        "score + aux0[h, q_idx, kv_idx] + aux0[0, q_idx, kv_idx]",
        "aux1[q_idx, kv_idx] & (aux2[b, kv_idx] > aux3[h])",
        aux="float32[3],bool[2],int64[2],int64[1]",
    )
    assert set(loads(spec)) == {"aux0[h, q_idx, kv_idx]", "aux0[0, q_idx, kv_idx]", "aux1[q_idx, kv_idx]"}
    assert dense_bytes(spec, dense_loads(spec)) == 9
    assert sorted(streamed_slots(spec)) == [0, 1, 2], "a value per head is read once"


def test_vectors_over_the_keys():
    text = "score + aux0[b, 0, kv_idx] + aux0[b, kv_idx, 0] + aux1[kv_idx + 1] + aux2[b, kv_idx]"
    spec = spec_of(text, "aux0[b, 1, kv_idx] > 0.0", aux="float32[3],bfloat16[1],float16[2]")
    assert [str(n) for n in column_loads(spec)] == ["aux0[b, 0, kv_idx]"]
    assert suits_pairs((64, 1), (3, 63)) and suits_pairs((63, 1), (1, 63)) and not suits_pairs((63, 1), (3, 63))
    assert not suits_pairs((64, 2), (3, 32))


def test_an_integer_tile_is_read_element_by_element():
    spec = spec_of(keep="aux0[q_idx, kv_idx] > 2", aux="int64[2]")
    assert loads(spec) == [] and streamed_slots(spec) == (0,)


@pytest.mark.parametrize(
    "strides, sizes, itemsize, good",
    [
        ((64, 1), (7, 64), 2, True),
        ((0, 64, 1), (3, 7, 64), 2, True),
        ((65, 1), (7, 65), 2, False),
        ((65, 1), (1, 65), 2, True),
        ((60, 1), (7, 60), 4, True),
        ((60, 1), (7, 60), 1, False),
        ((1, 64), (7, 64), 2, False),
        ((64, 0), (7, 64), 2, False),
        ((64, 5), (7, 1), 2, True),
    ],
)
def test_layouts_for_tma(strides, sizes, itemsize, good):
    assert suits_tma(strides, sizes, itemsize) is good


def test_every_head_dim_has_room_for_a_bias():
    for d in HEAD_DIMS:
        for size in (1, 2, 4):
            config = select_config(d, d, 1, dense_bytes=size)
            padded = 96 if d == 80 else d
            assert config is not None and config.smem(padded, padded, size).fits
    assert select_config(256, 256, 1, dense_bytes=16) is None


def test_only_long_queries_without_a_window_take_wide_query_tiles():
    def consumers(**facts: bool) -> int:
        config = select_config(64, 64, **facts)
        assert config is not None
        return config.num_consumers

    assert consumers(long_q=True) == 3 and consumers() == 2 and consumers(long_q=True, windowed=True) == 2


def test_a_configuration_survives_its_text():
    config = select_config(128, 128)
    assert config is not None and type(config).parse(config.text) == config


def test_few_key_tiles_beside_a_bias_take_narrow_tiles():
    def config(d: int, **facts: int) -> KernelConfig:
        found = select_config(d, d, 1, **facts)
        assert found is not None
        return found

    short, long = config(128, dense_bytes=2), config(128, dense_bytes=2, long_q=True)
    assert (short.tile_n, short.q_in_registers) == (64, True) and (long.tile_n, long.q_in_registers) == (128, False)
    assert config(64, dense_bytes=2).q_in_registers and not config(64, dense_bytes=4).q_in_registers
    assert [is_long(n, dense=True) for n in (767, 768)] == [False, True]
    assert [is_long(n, dense=False) for n in (4095, 4096)] == [False, True]


def test_bounded_scores_take_turns():
    bounded, other = select_config(128, 128, bounded=True), select_config(128, 128)
    assert bounded is not None and other is not None
    assert (bounded.order_warpgroups, other.order_warpgroups) == (True, False)
    assert select_config(128, 128, 1, bounded=True) == select_config(128, 128, 1)
