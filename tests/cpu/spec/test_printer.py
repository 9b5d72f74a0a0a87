"""Program text reads back to the same object; malformed text is refused."""

import pytest

from fa4_inductor.errors import ProgramError
from fa4_inductor.spec import AttentionSpec, AuxSpec, EmptyRow, TileMap, parse_expr, parse_spec, verify
from fa4_inductor.spec import expr as E

AUX = (AuxSpec("bool", 2), AuxSpec("float32", 1), AuxSpec("int64", 0))

ROUND_TRIPS = [
    "-(q_idx - kv_idx) * 2 - (3 - h)",
    "~(q_idx <= kv_idx) | (b == 0)",
    "where(kv_idx > q_idx - 8, score, -inf)",
    "(q_idx - (kv_idx - 1)) % 4 // 2",
    "(q_idx <= 3) == (kv_idx <= 4)",
    "-(-score)",
    "aux0[b, kv_idx] ^ True",
    "aux1[minimum(q_idx, aux2[()])] * float(size0 - seqlen_k)",
    "tanh(score / nan) * -0.5",
    "int(log(float(abs(q_idx - kv_idx)) / 8.0))",
]


@pytest.mark.parametrize("text", ROUND_TRIPS)
def test_expression_text_reads_back_to_the_same_object(text: str) -> None:
    e = parse_expr(text, AUX)
    assert str(e) == text
    assert parse_expr(str(e), AUX) is e


@pytest.mark.parametrize(
    "text",
    ["foo", "q_idx +", "score.x", "aux7[b]", "b < h < 2", "__import__('os')", "score and score", "tanh(score, 1)"],
)
def test_malformed_text_is_refused(text: str) -> None:
    with pytest.raises(ProgramError):
        parse_expr(text, AUX)


def test_spec_text_reads_back() -> None:
    spec = AttentionSpec(
        softmax_scale=0.1,
        score=parse_expr("50.0 * tanh(score * 0.02) + aux1[h]", AUX),
        keep=parse_expr("(kv_idx <= q_idx) & aux0[b, kv_idx]", AUX),
        sink=parse_expr("aux1[h]", AUX),
        empty_row=EmptyRow.MEAN,
        aux=AUX,
        num_sizes=1,
    )
    assert parse_spec(verify(spec).text) == spec


def test_other_versions_are_refused() -> None:
    text = AttentionSpec(1.0).text
    with pytest.raises(ProgramError, match="version"):
        parse_spec(text.replace("fa4/1", "fa4/0"))


def test_equal_expressions_are_one_object() -> None:
    assert parse_expr("kv_idx <= q_idx") is (E.index("kv_idx") <= E.index("q_idx"))
    assert E.const(1) is not E.const(1.0)
    assert E.const(True) is not E.const(1)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (AttentionSpec(1.0, keep=parse_expr("score > 0.0")), "keep may not depend on the score"),
        (AttentionSpec(1.0, score=parse_expr("score + aux1[h]", AUX)), "aux1 is not declared"),
        (AttentionSpec(1.0, score=parse_expr("score + float(size0)")), "size0 is not declared"),
        (AttentionSpec(1.0, sink=parse_expr("float(kv_idx)")), "sink may depend on"),
        (AttentionSpec(1.0, keep=parse_expr("aux0[b]", AUX), aux=AUX), "rank 2"),
    ],
)
def test_verifier_names_what_is_wrong(spec: AttentionSpec, message: str) -> None:
    with pytest.raises(ProgramError, match=message):
        verify(spec)


def test_a_tile_map_is_part_of_the_text() -> None:
    text = "fa4/1; aux=bool[2],int32[4]; sizes=0; scale=1.0; score=score; keep=aux0[b, kv_idx]; empty_row=zero"
    spec = parse_spec(f"{text}; tile_map=aux1[128, 96]")
    assert verify(spec).tile_map == TileMap(1, 128, 96) and spec.text == f"{text}; tile_map=aux1[128, 96]"
    with pytest.raises(ProgramError, match="no tile map"):
        verify(parse_spec(f"{text}; tile_map=aux0[128, 96]"))
    with pytest.raises(ProgramError, match="malformed"):
        parse_spec(f"{text}; tile_map=aux1")
