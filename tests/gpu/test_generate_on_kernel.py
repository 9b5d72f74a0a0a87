"""generate() on a Hopper GPU through our kernels, with both kinds of cache; a thousand replays of a CUDA graph."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from fa4_inductor import model_zoo

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import generate as generation

PROMPT, NEW_TOKENS, BATCH = 70, 40, 3
OPTIONS = {"fa4.implementation": "cute", "fa4.strict": True}


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize(("name", "attn"), [("llama", "sdpa"), ("mistral", "eager"), ("gpt_oss", "eager")])
def test_greedy_tokens_are_those_of_the_model(name: str, attn: str, cache: str) -> None:
    """Every token's logit is within the model's own rounding noise of the largest; one kernel serves all steps."""
    half = torch.bfloat16
    case = model_zoo.build(name, attn, dtype=half, device="cuda", batch=BATCH, seqlen=PROMPT)
    ids, mask = case.inputs["input_ids"], case.inputs.get("attention_mask")
    mask = torch.ones_like(ids) if mask is None else mask
    implementation, _ = generation.CACHES[cache]
    dynamic = True if cache == "dynamic" else None
    case.model.forward = torch.compile(case.model.forward, backend="fa4", dynamic=dynamic, options=OPTIONS)
    with torch.no_grad():
        tokens = case.model.generate(
            ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False,
            use_cache=True, pad_token_id=0, cache_implementation=implementation, disable_compile=True,
        )  # fmt: skip
    del case.model.forward
    found = torch._dynamo.utils.counters["fa4"]
    assert found["found"] == found["fused"] > 0, found
    judged = generation.agreement(case.model, tokens, mask, NEW_TOKENS)
    assert judged["gap"] <= 2 * judged["noise"], judged
    assert judged["agree"] > 0.9, judged


def test_a_thousand_replays_with_changing_inputs() -> None:
    """A captured decode step whose position moves: each replay against the uncaptured call."""
    slots, heads, kv_heads, width = 512, 8, 2, 128

    def step(q, k, v, position):
        keep = torch.arange(slots, device=q.device) <= position
        return scaled_dot_product_attention(q, k, v, attn_mask=keep[None, None, None], enable_gqa=True)

    def randn(count: int, length: int) -> torch.Tensor:
        return torch.randn(2, count, length, width, device="cuda", dtype=torch.bfloat16)

    torch.manual_seed(0)
    k, v = randn(kv_heads, slots), randn(kv_heads, slots)
    replayed = torch.compile(step, backend="fa4", options=OPTIONS | {"triton.cudagraphs": True})
    uncaptured = torch.compile(step, backend="fa4", options=OPTIONS)
    position = torch.zeros((), dtype=torch.int64, device="cuda")
    with torch.no_grad():
        for i in range(1000):
            position.fill_(i * 7 % slots)
            q = randn(heads, 1)
            torch.compiler.cudagraph_mark_step_begin()
            got, expected = replayed(q, k, v, position), uncaptured(q, k, v, position)
            assert torch.equal(got, expected), i
            if i % 100 == 0:
                wide = step(q.float(), k.float(), v.float(), position)
                assert (expected.float() - wide).abs().max() <= 2**-7 * wide.abs().max(), i
