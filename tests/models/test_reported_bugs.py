"""What users of neighbouring systems reported on Hugging Face models: windows off by one, sinks, left padding."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from fa4_inductor import model_zoo

from .helpers import counters, error, fused


def mistral(window: int, attn: str) -> torch.nn.Module:
    """One attention layer that sees exactly `window` keys, itself included."""
    config = AutoConfig.for_model(
        "mistral",
        hidden_size=64,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        intermediate_size=64,
        num_hidden_layers=1,
        vocab_size=64,
        sliding_window=window,
    )
    config.use_cache = False
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attn)
    return model.eval().requires_grad_(False)


@pytest.mark.parametrize("attn", ["eager", "sdpa"])
@pytest.mark.parametrize("window", [1, 2, 64])
def test_window_is_not_off_by_one(window: int, attn: str) -> None:
    """huggingface/transformers#45153: key q - W + 1 is visible, key q - W is not; seen by changing single tokens."""
    model = mistral(window, attn)
    run = fused(model, implementation="reference")
    ids = torch.randint(1, 64, (1, 200), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        before = run.model(input_ids=ids).logits[0]
        for key in (0, 50, 120):
            changed = ids.clone()
            changed[0, key] = (ids[0, key] + 7) % 63 + 1
            moved = (run.model(input_ids=changed).logits[0] != before).any(-1).nonzero().flatten()
            assert moved.min() == key
            assert moved.max() == min(key + window - 1, 199)
    assert counters()["fused"] == 1


@pytest.mark.parametrize("side", ["left", "right"])
def test_attention_sinks_with_padding(side: str) -> None:
    """huggingface/transformers#41083: sink column, alternating windows, padding; no NaN in any row."""
    case = model_zoo.build("gpt_oss")
    mask = torch.ones_like(case.inputs["attention_mask"])
    mask[1, slice(40) if side == "left" else slice(-40, None)] = 0
    case.inputs["attention_mask"], case.keep = mask, mask.bool()
    run = fused(case.model, implementation="reference")
    result = error(case, run.model)
    assert result.ok, result
    assert counters()["fused"] == case.sites
    assert all("sink=" in call.program for call in run.calls)
    with torch.no_grad():
        assert run.model(**case.inputs).logits.isfinite().all()


def test_sinks_matter() -> None:
    """The near-miss of the test above: without its sinks the model gives something else."""
    case = model_zoo.build("gpt_oss")
    run = fused(case.model, implementation="reference")
    with_sinks = case.run(run.model)
    for name, parameter in case.model.named_parameters():
        if name.endswith("sinks"):
            parameter.data.fill_(-1e4)
    assert (case.run(run.model) - with_sinks).abs().max() > 0.1


@pytest.mark.parametrize("attn", ["eager", "sdpa"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_left_padded_rows_equal_the_unpadded_run(attn: str, dtype: torch.dtype) -> None:
    """huggingface/transformers#47678: lengths 5, 33 and 65 left-padded in one batch, padded length 1 mod 32."""
    case = model_zoo.build("llama", attn, dtype=dtype)
    lengths = (5, 33, 65)
    ids = torch.randint(3, 250, (3, 65), generator=torch.Generator().manual_seed(0))
    mask = torch.stack([torch.arange(65) >= 65 - n for n in lengths]).long()
    run = fused(case.model, implementation="reference")
    with torch.no_grad():
        padded = run.model(input_ids=ids, attention_mask=mask).logits
        assert padded[mask.bool()].isfinite().all()
        for row, length in enumerate(lengths):
            alone = case.model(input_ids=ids[row : row + 1, -length:]).logits[0]
            exact = case.in_double()
            reference = exact.model(input_ids=ids[row : row + 1, -length:]).logits[0]
            own = (alone.double() - reference).abs().max()
            band = torch.finfo(dtype).eps * reference.abs().max()
            assert (padded[row, -length:].double() - reference).abs().max() <= 2 * own + band
    assert counters()["fused"] == case.sites


DOCUMENTS = (40, 24, 64)


def _blocks() -> torch.Tensor:
    """Causal inside each document, (1, 1, S, S)."""
    return torch.block_diag(*(torch.ones(n, n).tril() for n in DOCUMENTS)).bool()[None, None]


@pytest.mark.parametrize(
    "mask", [None, torch.ones(1, 128, dtype=torch.long), _blocks()], ids=["none", "ones", "blocks"]
)
def test_packed_documents(mask: torch.Tensor | None) -> None:
    """huggingface/transformers#46634: restarting positions are a mask where the model makes one of them."""
    case = model_zoo.build("llama", "sdpa")
    ids = torch.randint(3, 250, (1, 128), generator=torch.Generator().manual_seed(0))
    positions = torch.cat([torch.arange(n) for n in DOCUMENTS])[None]
    inputs = {"attention_mask": mask, "position_ids": positions, "use_cache": False}
    run = fused(case.model, implementation="reference")
    with torch.no_grad():
        before = [model(input_ids=ids, **inputs).logits[0] for model in (case.model, run.model)]
        changed = ids.clone()
        changed[0, 7] = (ids[0, 7] + 7) % 243 + 3
        after = [model(input_ids=changed, **inputs).logits[0] for model in (case.model, run.model)]
    torch.testing.assert_close(before, before[::-1], atol=1e-4, rtol=1e-4)
    eager, ours = ([bool(part.abs().max() > 1e-3) for part in (a - b).split(DOCUMENTS)] for a, b in zip(after, before))
    assert eager == ours == [True, mask is not None and mask.dim() == 2, mask is not None and mask.dim() == 2]
    assert counters()["fused"] == case.sites
