"""The test that classes tiles by extremes, and the lists that maps hold, against every element of random masks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fa4_inductor.analysis import facts
from fa4_inductor.analysis.tile_test import is_closed_form, tile_test
from fa4_inductor.kernels.tile_map import EMPTY, FULL, MASKED, classify, list_tiles, listed_classes, tile_map_eager
from fa4_inductor.lowering.tile_map import map_source
from fa4_inductor.spec import AttentionSpec, parse_spec
from fa4_inductor.spec.expr import Expr
from fa4_inductor.spec.interpret import Env, evaluate

CPU = torch.device("cpu")
CAUSAL = "(kv_idx <= q_idx)"
# mask, aux, whether all its tiles are decided by extremes
MASKS = {
    "documents": (f"{CAUSAL} & (aux0[b, kv_idx] == aux0[b, q_idx])", "int32[2]", True),
    "other documents": ("aux0[b, kv_idx] != aux0[b, q_idx]", "int32[2]", True),
    "padding": (f"{CAUSAL} & aux0[b, kv_idx]", "bool[2]", True),
    "padding of both": ("aux0[b, kv_idx] & aux0[b, q_idx] | (kv_idx == q_idx)", "bool[2]", True),
    "lengths by row": ("(kv_idx < aux0[b, q_idx]) | (kv_idx >= aux0[b, q_idx] + 9)", "int32[2]", True),
    "distance of positions": ("abs(aux0[b, kv_idx] - aux0[b, q_idx]) <= 2", "int32[2]", True),
    "not": ("~((aux0[b, kv_idx] > aux0[b, q_idx]) | (aux0[b, kv_idx] + 1 < aux0[b, q_idx]))", "int32[2]", True),
    "choice": ("where(aux1[h], aux0[b, kv_idx] >= aux0[b, q_idx], kv_idx >= q_idx)", "int32[2],bool[1]", True),
    "parity": ("(minimum(aux0[b, kv_idx], 3) < maximum(aux0[b, q_idx], 1)) & (kv_idx % 2 == 0)", "int32[2]", True),
    "dense": (f"{CAUSAL} & aux0[b, q_idx, kv_idx]", "bool[3]", False),
    "float documents": ("aux0[b, kv_idx] == aux0[b, q_idx]", "float32[2]", False),
}  # fmt: skip


def spec_of(keep: str, aux: str = "") -> AttentionSpec:
    return parse_spec(f"fa4/1; aux={aux}; sizes=0; scale=1.0; score=score; keep={keep}; empty_row=zero")


def tensors(spec: AttentionSpec, length: int, style: str, seed: int) -> list[torch.Tensor]:
    """Aux tensors every dimension of which is `length`: sorted (packed documents), random or constant."""
    g = torch.Generator().manual_seed(seed)
    found = []
    for a in spec.aux:
        x = torch.randint(0, 6, [length] * a.ndim, generator=g)
        x = {"sorted": x.sort(-1).values, "random": x, "constant": torch.full_like(x, 3)}[style]
        found.append((x > 2) if a.dtype == "bool" else x.to(a.torch_dtype))
    return found


def class_by_extremes(
    spec: AttentionSpec, aux: list[torch.Tensor], b: int, h: int, rows: range, keys: range, end: int, length: int
) -> int:
    """The class of a tile as the kernel finds it, without looking at elements."""
    test = tile_test(facts(spec).keep)
    names = {"b": torch.tensor(b), "h": torch.tensor(h), "seqlen_q": length, "seqlen_k": length}

    def value(e: Expr, **more: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(evaluate(e, Env({**names, **more}, aux)))

    q, kv = torch.arange(rows.start, rows.stop), torch.arange(keys.start, keys.stop)
    extremes = {
        f"{name}[{i}][{j}]": pick(value(e, **{index: over}))
        for name, values, index, over in (("rows", test.rows, "q_idx", q), ("columns", test.columns, "kv_idx", kv))
        for i, e in enumerate(values)
        for j, pick in enumerate((torch.amin, torch.amax))
    }
    bounds = {"q_lo": q[0], "q_hi": q[-1], "kv_lo": kv[0], "kv_hi": kv[-1]}
    possible, certain = (bool(value(e, **extremes, **bounds)) for e in (test.possible, test.certain))
    return (FULL if certain and keys.stop == end else MASKED) if possible else EMPTY


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(list(MASKS)), st.integers(1, 40), st.sampled_from(["sorted", "random", "constant"]),
    st.sampled_from([(4, 8), (8, 4), (16, 16)]), st.integers(0, 99),
)  # fmt: skip
def test_extremes_against_every_element(name, length, style, tile, seed):
    keep, aux_text, _ = MASKS[name]
    spec = spec_of(keep, aux_text)
    aux, (tile_m, tile_n) = tensors(spec, length, style, seed), tile
    exact = classify(aux, spec, (), 2, 2, length, length, tile_m, tile_n, CPU)
    for b, h, m, n in torch.cartesian_prod(*(torch.arange(k) for k in exact.shape)).tolist():
        rows, end = range(m * tile_m, min((m + 1) * tile_m, length)), (n + 1) * tile_n
        keys = range(n * tile_n, min(end, length))
        true = int(exact[b, h, m, n])
        b_, h_ = min(b, length - 1), min(h, length - 1)
        found = class_by_extremes(spec, aux, b_, h_, rows, keys, end, length)
        assert found in (true, MASKED), (m, n)


@pytest.mark.parametrize("name", MASKS)
def test_what_extremes_decide(name):
    keep, aux, decided = MASKS[name]
    test = tile_test(facts(spec_of(keep, aux)).keep)
    assert test.elements is not decided


def test_packed_documents_are_classed_exactly():
    spec = spec_of(*MASKS["documents"][:2])
    ids = torch.repeat_interleave(torch.arange(5), torch.tensor([16, 7, 9, 24, 8]))[None]
    exact = classify([ids], spec, (), 1, 1, 64, 64, 8, 8, CPU)
    for m in range(8):
        for n in range(8):
            rows, keys = range(8 * m, 8 * m + 8), range(8 * n, 8 * n + 8)
            assert class_by_extremes(spec, [ids], 0, 0, rows, keys, keys.stop, 64) == int(exact[0, 0, m, n]), (m, n)


@pytest.mark.parametrize(
    ("keep", "aux", "closed"),
    [
        (CAUSAL, "", True),
        (f"{CAUSAL} | (kv_idx < aux0[b])", "int32[1]", True),
        (f"{CAUSAL} & (q_idx - kv_idx < 9) & (aux0[h] > 2)", "int32[1]", True),
        (f"{CAUSAL} & aux0[b, kv_idx]", "bool[2]", False),
        ("kv_idx < aux0[b, q_idx]", "int32[2]", False),
        ("aux0[b, q_idx]", "bool[2]", False),
    ],
)
def test_closed_forms(keep, aux, closed):
    assert is_closed_form(facts(spec_of(keep, aux)).keep) is closed


def test_a_map_lists_masked_tiles_from_the_front_and_full_ones_from_the_end():
    keep = torch.zeros(1, 16, 20, dtype=torch.bool)
    keep[0, :, 4:8], keep[0, 8:, 12:16], keep[0, 3, 0], keep[0, :, 16:] = True, True, True, True
    spec = spec_of("aux0[b, q_idx, kv_idx]", "bool[3]")
    found = tile_map_eager([keep], spec, (), 1, 1, 16, 18, 8, 4, CPU)
    assert found.tolist() == [[[[3, 2, 4, 0, 0, 0, 1], [3, 1, 4, 0, 0, 1, 3]]]]
    assert listed_classes(found)[0, 0].tolist() == [[1, 2, 0, 0, 1], [0, 2, 0, 2, 1]]


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 3), st.integers(1, 9))
def test_lists_hold_their_classes(seed, num_m, num_n):
    g = torch.Generator().manual_seed(seed)
    classes = torch.randint(0, 3, (2, 1, num_m, num_n), generator=g, dtype=torch.int32)
    assert torch.equal(listed_classes(list_tiles(classes)), classes)


def test_the_source_of_a_map_knows_the_mask_alone():
    keep = "aux1[b, kv_idx] & (kv_idx < size1)"
    text = f"fa4/1; aux=float32[1],bool[2]; sizes=2; scale=0.5; score=score * aux0[h]; keep={keep}; empty_row=nan"
    source = map_source(parse_spec(text))
    assert (source.slots, source.sizes, source.by_batch, source.by_head) == ((1,), (1,), True, False)
    other = text.replace("scale=0.5", "scale=0.25").replace("empty_row=nan", "empty_row=zero")
    assert map_source(parse_spec(other)) == source
