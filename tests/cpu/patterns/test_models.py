"""Whole models of the zoo: every site is understood, its program is the expected one, and it agrees with eager."""

from __future__ import annotations

import pytest
import torch

from fa4_inductor import model_zoo
from tests.cases.oracle import Report, checked

CAUSAL = "kv_idx <= q_idx"
PADDED = f"({CAUSAL}) & aux0[b, kv_idx]"
WINDOWED = f"({CAUSAL}) & (kv_idx >= q_idx - 31) & aux0[b, kv_idx]"
ENCODER_BUCKET = (
    "16 * int(kv_idx >= q_idx + 1) + where(abs(kv_idx - q_idx) <= 7, abs(kv_idx - q_idx), "
    "minimum(int(log(float(abs(kv_idx - q_idx)) / 8.0) / 2.772588722239781 * 8.0) + 8, 15))"
)


def _text(
    keep: str, score: str = "score", aux: str = "bool[2]", scale: float = 0.125, empty: str = "{empty}", sink: str = ""
) -> str:
    return f"fa4/1; aux={aux}; sizes=0; scale={scale}; score={score}; keep={keep}; {sink}empty_row={empty}"


PROGRAMS = {
    "llama": {_text(PADDED)},
    "qwen3": {_text(PADDED)},
    "gpt2": {_text(PADDED)},
    "mistral": {_text(WINDOWED)},
    "gemma2": {_text(k, "tanh(score) * 50.0", scale=0.00125) for k in (PADDED, WINDOWED)},
    "gpt_oss": {
        _text(k, aux="bool[2],float32[1]", sink="sink=aux1[h]; ", empty="zero") for k in (PADDED, WINDOWED)
    },
    "bert": {_text("aux0[b, kv_idx]")},
    "vit": {_text("True", aux="", empty="{full}")},
    "bloom": {_text(PADDED, "aux1[b, h, kv_idx] + score", "bool[2],float32[3]")},
    "t5_encoder": {_text("aux0[b, kv_idx]", f"score + aux1[{ENCODER_BUCKET}, h]", "bool[2],float32[2]", 1.0, "mean")},
}  # fmt: skip
CASES = [(name, impl) for name in model_zoo.names() for impl in model_zoo.implementations(name)]


def _run(name: str, implementation: str, dtype: torch.dtype = torch.float32, dynamic: bool = False) -> Report:
    case = model_zoo.build(name, implementation, dtype=dtype)
    function, report = checked(case.model, dynamic=dynamic)
    with torch.no_grad():
        function(**case.inputs)
    assert not report.declined, report.declined
    assert len(report.matches) == case.sites
    return report


@pytest.mark.parametrize(("name", "implementation"), CASES)
def test_model(name: str, implementation: str) -> None:
    report = _run(name, implementation)
    assert report.error < 2e-5
    if name in PROGRAMS:
        eager = implementation == "eager"
        empty, full = ("mean", "nan") if eager else ("zero", "zero")
        assert set(report.programs) == {p.format(empty=empty, full=full) for p in PROGRAMS[name]}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "implementation"), CASES)
def test_model_with_dynamic_shapes(name: str, implementation: str) -> None:
    assert _run(name, implementation, dynamic=True).error < 2e-5


@pytest.mark.slow
@pytest.mark.parametrize(("name", "implementation"), CASES)
def test_model_in_bfloat16(name: str, implementation: str) -> None:
    assert _run(name, implementation, dtype=torch.bfloat16).error < 0.1


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_autocast(implementation: str) -> None:
    case = model_zoo.build("llama", implementation)

    def autocast_inside(**inputs: torch.Tensor) -> object:
        with torch.autocast("cpu", torch.bfloat16):
            return case.model(**inputs)

    function, report = checked(autocast_inside)
    with torch.no_grad():
        function(**case.inputs)
    assert len(report.matches) == case.sites, report.sites
    assert {m.out_dtype for m in report.matches} == {torch.bfloat16}
    assert report.error < 0.1


@pytest.mark.parametrize("cache", ["static", "dynamic"])
def test_decoding_with_a_cache(cache: str) -> None:
    from transformers import DynamicCache, StaticCache

    case = model_zoo.build("llama", "sdpa")
    function, report = checked(case.model)
    config = case.model.config
    past = StaticCache(config=config, max_cache_len=128) if cache == "static" else DynamicCache(config=config)
    mask = case.inputs["attention_mask"]
    with torch.no_grad():
        function(**case.inputs, past_key_values=past, use_cache=True)
        mask = torch.cat([mask, mask.new_ones(mask.shape[0], 1)], 1)
        ids = torch.full((mask.shape[0], 1), 3)
        function(input_ids=ids, attention_mask=mask, past_key_values=past, use_cache=True)
    assert not report.declined, report.declined
    assert len(report.matches) == 2 * case.sites
    assert report.error < 2e-5
