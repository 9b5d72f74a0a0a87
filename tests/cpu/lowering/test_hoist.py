"""Distance terms become tables with exactly the values of the term; other terms stay where they are."""

import pytest
import torch

from fa4_inductor.lowering.aux_layout import table_loads, table_slots
from fa4_inductor.lowering.hoist import PADDING, hoist_distance_terms, materialise, table_length
from fa4_inductor.spec import AttentionSpec, AuxSpec, parse_expr, verify
from fa4_inductor.spec.interpret import Env, evaluate, grid

AUX = (AuxSpec("float32", 2), AuxSpec("float32", 1), AuxSpec("bool", 2))
T5_BUCKET = (
    "int(float(kv_idx > q_idx)) * 4 + where(abs(kv_idx - q_idx) < 2, abs(kv_idx - q_idx), "
    "minimum(int(log(float(abs(kv_idx - q_idx)) / 2.0) * 3.0) + 2, 3))"
)


def _values(spec: AttentionSpec, aux: tuple[torch.Tensor, ...], sizes: tuple[int, int, int, int]) -> torch.Tensor:
    env = Env({**grid(*sizes), "score": torch.zeros(sizes)}, aux)
    return evaluate(spec.score, env).broadcast_to(sizes)


@pytest.mark.parametrize("sizes", [(1, 3, 7, 7), (2, 3, 4, 9), (2, 3, 9, 1)])
@pytest.mark.parametrize(
    "text",
    [
        f"score + aux0[{T5_BUCKET}, h]",
        "score * 0.5 + exp(float(q_idx - kv_idx))",
        "score + sin(float(q_idx - kv_idx) + float(b)) * aux1[h]",
        "score + aux0[kv_idx - q_idx + (seqlen_q - 1), h]",
        "score + aux0[h, kv_idx - q_idx + seqlen_k]",
    ],
)
def test_hoisted_spec_has_the_same_score(text: str, sizes: tuple[int, int, int, int]) -> None:
    torch.manual_seed(0)
    aux = (torch.randn(8, 3), torch.randn(3), torch.rand(sizes[0], sizes[3]) > 0.5)
    spec = AttentionSpec(1.0, parse_expr(text, AUX), aux=AUX)
    hoisted, tables = hoist_distance_terms(spec)
    assert len(tables) == 1
    new_aux = (*aux, *(materialise(t, aux, *sizes, None) for t in tables))
    table = new_aux[3]
    assert table.shape[2:] == (table_length(*sizes[2:]), 2) and table.shape[2] % 4 == 0
    assert torch.equal(table[:, :, :-1, 1], table[:, :, 1:, 0]), "a pair ends with what the next one begins with"
    torch.testing.assert_close(_values(verify(hoisted), new_aux, sizes), _values(spec, aux, sizes), rtol=0, atol=0)


@pytest.mark.parametrize(
    "text",
    [
        "score + aux1[h] * float(kv_idx - q_idx)",  # ALiBi: one multiply-add
        "score + exp(float(kv_idx))",  # not a function of the distance
        "score + tanh(score + float(kv_idx - q_idx))",
        "score + log(float(q_idx * 2 - kv_idx))",
    ],
)
def test_other_terms_stay(text: str) -> None:
    spec = AttentionSpec(1.0, parse_expr(text, AUX), aux=AUX)
    assert hoist_distance_terms(spec) == (spec, ())


def test_tables_reach_beyond_every_tile_at_a_ragged_edge() -> None:
    """Query tiles have up to 192 rows and key tiles up to 256 keys; a thread reads eight entries before its own."""
    for sq, sk in ((1, 1), (1, 300), (193, 1), (640, 777)):
        last_q, last_k = -(-sq // 192) * 192 - 1, -(-sk // 256) * 256 - 1
        first, last = (kv - q + sq - 1 + PADDING for kv, q in ((0, last_q), (last_k, 0)))
        assert first >= 8 and last < table_length(sq, sk)


@pytest.mark.parametrize(
    ("text", "dtype", "kept"),
    [
        ("score + aux0[kv_idx - q_idx + 7, h]", "bfloat16", "bfloat16"),
        ("score + aux0[kv_idx - q_idx + 7, h] * 0.3", "bfloat16", "float32"),
        ("score + aux0[kv_idx - q_idx + 7, h]", "float16", "float32"),
    ],
)
def test_tables_are_bfloat16_where_that_is_exact(text: str, dtype: str, kept: str) -> None:
    aux = (AuxSpec(dtype, 2),)
    hoisted, (table,) = hoist_distance_terms(AttentionSpec(1.0, parse_expr(text, aux), aux=aux))
    values = materialise(table, (torch.randn(20, 3),), 1, 3, 5, 6, None)
    assert hoisted.aux[1] == AuxSpec(kept, 4) and values.dtype == getattr(torch, kept)


def test_the_kernel_knows_the_padding() -> None:
    tables = pytest.importorskip("fa4_inductor.kernels.cute.tables")
    assert tables.PADDING == PADDING


def test_loads_of_tables_are_found() -> None:
    spec = AttentionSpec(1.0, parse_expr("score + aux0[kv_idx - q_idx + 7, h] + aux1[h]", AUX), aux=AUX)
    hoisted, _ = hoist_distance_terms(spec)
    (load,) = table_loads(hoisted)
    assert load.value == 3 and table_slots(hoisted) == (3,) and table_loads(spec) == ()
