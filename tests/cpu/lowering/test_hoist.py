"""Distance terms become tables with exactly the values of the term; other terms stay where they are."""

import pytest
import torch

from fa4_inductor.lowering.hoist import hoist_distance_terms, materialise
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
    ],
)
def test_hoisted_spec_has_the_same_score(text: str, sizes: tuple[int, int, int, int]) -> None:
    torch.manual_seed(0)
    aux = (torch.randn(8, 3), torch.randn(3), torch.rand(sizes[0], sizes[3]) > 0.5)
    spec = AttentionSpec(1.0, parse_expr(text, AUX), aux=AUX)
    hoisted, tables = hoist_distance_terms(spec)
    assert len(tables) == 1
    new_aux = (*aux, *(materialise(t, aux, *sizes, None) for t in tables))
    assert [a.dim() for a in new_aux[3:]] == [3]
    torch.testing.assert_close(_values(verify(hoisted), new_aux, sizes), _values(spec, aux, sizes), rtol=0, atol=0)


@pytest.mark.parametrize(
    "text",
    [
        "score + aux1[h] * float(kv_idx - q_idx)",  # ALiBi: one multiply-add
        "score + aux0[kv_idx - q_idx + 7, h]",  # already a table over the distance
        "score + exp(float(kv_idx))",  # not a function of the distance
        "score + tanh(score + float(kv_idx - q_idx))",
        "score + log(float(q_idx * 2 - kv_idx))",
    ],
)
def test_other_terms_stay(text: str) -> None:
    spec = AttentionSpec(1.0, parse_expr(text, AUX), aux=AUX)
    assert hoist_distance_terms(spec) == (spec, ())
