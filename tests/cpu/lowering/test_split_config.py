"""When the split-KV kernel runs, with which configuration and how many splits."""

import math

import pytest

from fa4_inductor.lowering.config_table import HEAD_DIMS
from fa4_inductor.lowering.split_config import (
    MAX_SPLITS,
    SplitConfig,
    Variant,
    choose_variant,
    plan_splits,
    select_split_config,
    workspace_size,
)
from fa4_inductor.runtime.target import target_for

HOPPER = target_for("cuda", "sm_90a")
SMS = HOPPER.sm_count


def choose(batch: int, heads: int, kv_heads: int, sq: int, sk: int, d: int = 128) -> tuple[Variant, int]:
    return choose_variant(batch, heads, kv_heads, sq, sk, (d, d), HOPPER)


def test_every_pair_of_head_dims_has_a_configuration():
    for d in HEAD_DIMS:
        for dv in HEAD_DIMS:
            for split in (False, True):
                for simple in (False, True):
                    config = select_split_config(d, dv, split, simple)
                    assert config is not None and config.num_stages >= 2
                    assert SplitConfig.parse(config.text) == config
    assert select_split_config(72, 72, True) is None


def test_one_sequence_is_split_over_the_whole_gpu():
    variant, splits = choose(1, 32, 8, 1, 32768)
    assert variant is Variant.SPLIT and 0.95 * SMS < 8 * splits <= SMS


def test_small_head_dims_take_two_ctas_per_sm():
    variant, splits = choose(1, 32, 8, 1, 32768, d=64)
    assert variant is Variant.SPLIT and 1.9 * SMS < 8 * splits <= 2 * SMS


def test_a_full_gpu_needs_no_splits():
    assert choose(64, 32, 8, 1, 4096) == choose(16, 32, 8, 1, 4096) == (Variant.DIRECT, 1)


def test_many_rows_are_merged_for_many_keys_alone():
    assert choose(1, 8, 8, 512, 512) == (Variant.NARROW, 1)
    assert choose(1, 32, 8, 64, 32768)[0] is Variant.SPLIT


def test_short_sequences_of_few_heads():
    assert choose(1, 8, 8, 100, 100) == choose(1, 8, 8, 200, 200, d=64) == (Variant.DIRECT, 1)
    assert choose(1, 8, 8, 200, 200) == (Variant.NARROW, 1)
    assert choose(8, 12, 12, 200, 200) == choose(1, 32, 8, 512, 32768) == (Variant.FORWARD, 1)


def test_a_short_cache_is_not_split_finer_than_its_tiles():
    assert choose(1, 8, 8, 1, 40) == (Variant.SPLIT, 1)
    assert choose(1, 8, 8, 1, 300)[1] <= 5
    assert choose(1, 8, 8, 2, 40) == (Variant.DIRECT, 1)


@pytest.mark.parametrize("batch", [1, 3, 16, 17, 40, 64])
def test_one_kernel_serves_all_steps_of_a_growing_cache(batch):
    assert len({choose(batch, 32, 8, 1, length)[0] for length in range(1, 20000, 37)}) == 1


def test_long_prefill_keeps_the_forward_kernel():
    assert choose(8, 32, 8, 512, 512) == (Variant.FORWARD, 1)
    assert choose(1, 16, 16, 8192, 8192) == (Variant.LONG, 1)


def test_other_machines_have_no_split_kernel():
    assert choose_variant(1, 8, 8, 1, 4096, (128, 128), target_for("cpu")) == (Variant.FORWARD, 1)


def test_dense_tiles_of_many_rows_come_by_tma():
    shape = (1, 8, 8, 200, 200, (64, 64), HOPPER)
    assert choose_variant(*shape)[0] is not Variant.FORWARD
    assert choose_variant(*shape, dense=True) == (Variant.NARROW, 1)


@pytest.mark.parametrize("shape", [(0, 8, 8, 1, 64), (1, 0, 0, 1, 64), (1, 8, 8, 0, 64), (1, 8, 8, 1, 0)])
def test_empty_shapes(shape):
    assert choose(*shape)[1] == 1


@pytest.mark.parametrize("blocks", [1, 8, 40, 128, 131, 133, 264, 512, 5000])
@pytest.mark.parametrize("seqlen_k", [1, 64, 65, 1000, 4096, 131072])
def test_splits_are_within_bounds_and_never_slower_than_none(blocks, seqlen_k):
    config = select_split_config(128, 128, True)
    assert config is not None
    splits = plan_splits(blocks, blocks * 4, seqlen_k, SMS, config)
    assert 1 <= splits <= min(MAX_SPLITS, -(-seqlen_k // config.tile_n))
    tiles = -(-seqlen_k // config.tile_n)
    waves = lambda n: math.ceil(blocks * n / SMS) * math.ceil(tiles / n)
    assert waves(splits) <= waves(1)


@pytest.mark.parametrize("batch", [1, 7, 100, 140, 1000, 20000])
@pytest.mark.parametrize("seqlen_q", [1, 3, 16])
def test_workspaces_stay_small(batch, seqlen_q):
    for seqlen_k in (4096, 131072, 1 << 21):
        _, splits = choose(batch, 16, 8, seqlen_q, seqlen_k, d=256)
        assert splits == 1 or workspace_size(splits, batch * 16 * seqlen_q, 256) <= 1 << 29


def test_workspace():
    assert workspace_size(3, 10, 128) == 3 * 10 * 129
