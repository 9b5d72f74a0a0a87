"""Unmodified models and flex_attention on a Hopper GPU: every site runs on our kernel, within the error limit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from fa4_inductor import measure, model_zoo
from fa4_inductor.lowering.split_config import Variant
from tests.models.helpers import TINY, counters, error, fused

CUTE = {"implementation": "cute", "strict": True}


@pytest.mark.parametrize(("name", "attn"), TINY)
def test_every_site_runs_on_the_kernel(name: str, attn: str) -> None:
    case = model_zoo.build(name, attn, dtype=torch.bfloat16, device="cuda")
    result = error(case, fused(case.model, **CUTE).model)
    assert result.ok, result
    assert counters()["fused"] == counters()["found"] == case.sites, counters()


@pytest.mark.parametrize("name", ["llama", "gemma2", "t5", "gpt_oss", "bert"])
def test_fp16(name: str) -> None:
    case = model_zoo.build(name, dtype=torch.float16, device="cuda")
    result = error(case, fused(case.model, **CUTE).model)
    assert result.ok, result


@pytest.mark.parametrize("name", ["llama", "mistral", "bloom", "t5", "gpt_oss"])
def test_few_compiles_serve_all_lengths(name: str) -> None:
    """One kernel of each program per variant that the lengths ask for, and none for lengths like those before.

    Alike includes even or odd: it decides whether rows of a captured half-precision tensor can be loaded in pairs.
    """
    case = model_zoo.build(name, dtype=torch.bfloat16, device="cuda")
    run = fused(case.model, dynamic=True, **CUTE)
    built = []
    for batch, seqlen in ((2, 96), (3, 65), (4, 130), (2, 517), (2, 94), (3, 67), (4, 132), (2, 519)):
        sized = case.resized(batch, seqlen)
        result = error(sized, run.model)
        assert result.ok, (batch, seqlen, result)
        built.append(counters()["kernel_compiles"])
    assert built[3] <= len(Variant) * case.sites
    assert built[4:] == built[3:4] * 4, "a length like one before compiled another kernel"
    assert run.graphs == 1


def test_default_is_the_kernel_in_half_and_sdpa_in_fp32() -> None:
    half = model_zoo.build("llama", dtype=torch.bfloat16, device="cuda")
    run = fused(half.model)
    assert error(half, run.model).ok
    assert len(run.calls) == half.sites
    single = model_zoo.build("llama", dtype=torch.float32, device="cuda")
    run = fused(single.model)
    assert error(single, run.model).ok
    assert run.calls == []
    assert counters()["matched"] == single.sites


def _flex_variants() -> dict[str, Callable[[], dict]]:
    def softcap() -> dict:
        return {"score_mod": lambda s, b, h, q, k: 20.0 * torch.tanh(s / 20.0)}

    def alibi() -> dict:
        slopes = torch.rand(4, device="cuda")
        return {"score_mod": lambda s, b, h, q, k: s + slopes[h] * (k - q)}

    def table() -> dict:
        bias = torch.randn(4, 2 * 300, device="cuda")
        return {"score_mod": lambda s, b, h, q, k: s + bias[h, q - k + 299]}

    def window() -> dict:
        def mask(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
            return (q >= k) & (q - k < 50)

        return {"block_mask": create_block_mask(mask, None, None, 300, 300, device="cuda")}

    def documents() -> dict:
        ids = torch.arange(300, device="cuda") // 77
        return {
            "block_mask": create_block_mask(
                lambda b, h, q, k: (ids[q] == ids[k]) & (q >= k), None, None, 300, 300, device="cuda"
            )
        }

    return {f.__name__: f for f in (softcap, alibi, table, window, documents)}


@pytest.mark.parametrize("name", list(_flex_variants()))
def test_flex_attention(name: str) -> None:
    torch.manual_seed(0)
    mods = _flex_variants()[name]()
    q = torch.randn(2, 4, 300, 64, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(2, 2, 300, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return flex_attention(q, k, v, enable_gqa=True, **mods)

    run = fused(attend, **CUTE)
    out = run.model(q, k, v)
    assert counters()["fused"] == 1
    result = measure.compare(out, attend(q, k, v), attend(q.double(), k.double(), v.double()))
    assert result.ok, result


@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_cuda_graph_replays_follow_the_inputs(name: str) -> None:
    case = model_zoo.build(name, dtype=torch.bfloat16, device="cuda")
    model = torch.compile(case.model, backend="fa4", mode="reduce-overhead", options=None)
    for seed in range(8):
        case.inputs["input_ids"] = torch.randint_like(case.inputs["input_ids"], 3, 250)
        torch.compiler.cudagraph_mark_step_begin()
        result = error(case, model)
        assert result.ok, (seed, result)
    assert counters()["fused"] == case.sites
