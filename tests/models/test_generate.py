"""generate() with a compiled forward and each kind of cache: the tokens of the uncompiled model, no graph more than
Dynamo makes anyway, one kernel per kind of layer and phase."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from transformers import GenerationConfig

from .helpers import Fused, counters, fused

_SMALL = {
    "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96,
    "num_hidden_layers": 1, "vocab_size": 160, "sliding_window": 16, "pad_token_id": 0,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {k: v for k, v in _SMALL.items() if k != "sliding_window"},
    "mistral": _SMALL,
    "gemma3_text": {**_SMALL, "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]},
    "gpt_oss": {**_SMALL, "num_hidden_layers": 2, "num_local_experts": 2, "num_experts_per_tok": 1},
    "gpt2": {"n_embd": 64, "n_head": 4, "n_layer": 1, "vocab_size": 160, "n_positions": 512},
    "bart": {
        "d_model": 64, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4, "encoder_ffn_dim": 96,
        "decoder_attention_heads": 4, "decoder_ffn_dim": 96, "vocab_size": 160, "pad_token_id": 0, "bos_token_id": 1,
        "eos_token_id": 1, "decoder_start_token_id": 2, "forced_eos_token_id": None,
    },
}  # fmt: skip


def _model(name: str, attn: str) -> Any:
    config = transformers.AutoConfig.for_model(name, **CONFIGS[name])
    auto = transformers.AutoModelForSeq2SeqLM if config.is_encoder_decoder else transformers.AutoModelForCausalLM
    torch.manual_seed(0)
    model = auto.from_config(config, attn_implementation=attn).eval().requires_grad_(False)
    for weight in model.parameters():
        weight.mul_(3.0 if weight.dim() > 1 else 1.0)  # attention that is not uniform
    return model


def _prompt(batch: int, length: int) -> dict[str, torch.Tensor]:
    """Left-padded; the last row by a third."""
    ids = torch.randint(3, 160, (batch, length), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[-1, : length // 3] = 0
    return {"input_ids": ids, "attention_mask": mask}


def _generate(model: Any, forward: Callable[..., Any] | None, cache: str, steps: int, **inputs: Any) -> torch.Tensor:
    """Tokens with `forward` in the place of the model's."""
    settings = GenerationConfig(
        max_new_tokens=steps,
        min_new_tokens=steps,
        do_sample=False,
        num_beams=inputs.pop("num_beams", 1),
        pad_token_id=0,
        eos_token_id=1,
        decoder_start_token_id=model.config.decoder_start_token_id if model.config.is_encoder_decoder else None,
        cache_implementation="static" if cache == "static" else None,
        disable_compile=True,
    )
    if forward is not None:
        model.forward = forward
    try:
        with torch.no_grad():
            return model.generate(**inputs, generation_config=settings)
    finally:
        model.__dict__.pop("forward", None)


def _kernels(run: Fused, phase: Callable[[int], bool]) -> int:
    """How many kernels the calls take whose query length satisfies `phase`."""
    calls = [c for c in run.calls if phase(int(c.q.shape[2]))]
    return len({(c.program, c.q.shape[3], c.v.shape[3], c.q.shape[1] // c.k.shape[1]) for c in calls})


def _check(name: str, cache: str, attn: str, steps: int, length: int = 12, **options: Any) -> tuple[int, int, int]:
    """Compares the tokens; returns the numbers of graphs, kernels of the prefill and kernels of the decode steps."""
    model, inputs = _model(name, attn), {**_prompt(2, length), **options}
    run = fused(model.forward, implementation="reference")
    tokens = _generate(model, run.model, cache, steps, **inputs)
    assert torch.equal(tokens, _generate(model, None, cache, steps, **inputs))
    found = counters()
    assert found["found"] == found["fused"] > 0, found
    return run.graphs, _kernels(run, lambda length: length > 1), _kernels(run, lambda length: length == 1)


@pytest.mark.parametrize(("cache", "graphs"), [("dynamic", 3), ("static", 2)])
def test_full_attention(cache: str, graphs: int) -> None:
    """Prefill, the first step and, with a cache that grows, a step of any length."""
    assert _check("llama", cache, "sdpa", steps=5) == (graphs, 1, 1)


@pytest.mark.slow
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_across_the_edge_of_the_window(cache: str) -> None:
    """BC-28: sliding and full layers, left padding, 200 steps."""
    graphs, prefill, decode = _check("gemma3_text", cache, "eager", steps=200)
    model, seen = _model("gemma3_text", "eager"), []
    torch._dynamo.reset()
    forward = torch.compile(model.forward, backend=lambda gm, _: seen.append(gm) or gm.forward)
    _generate(model, forward, cache, 200, **_prompt(2, 12))
    assert graphs == len(seen)
    assert (prefill, decode) == (1, 1)


@pytest.mark.parametrize(
    ("name", "attn", "graphs"),
    [pytest.param("gpt_oss", "eager", 5, marks=pytest.mark.slow), ("gpt2", "eager", 3), ("mistral", "sdpa", 5)],
)
def test_sinks_and_windows(name: str, attn: str, graphs: int) -> None:
    """The steps fill the window, for which Dynamo makes two more graphs; the kernel stays."""
    assert _check(name, "dynamic", attn, steps=6) == (graphs, 1, 1)


def test_beam_search_reorders_the_cache() -> None:
    assert _check("llama", "dynamic", "sdpa", steps=4, num_beams=3)[1:] == (1, 1)


def test_encoder_decoder() -> None:
    """Self-attention sees all keys at each step, as the encoder's layers would without padding."""
    assert _check("bart", "dynamic", "sdpa", steps=4)[2] == 2
