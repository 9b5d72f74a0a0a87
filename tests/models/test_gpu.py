"""The same models on a Hopper GPU in bf16: through our kernel, and through Inductor with CUDA graphs."""

from __future__ import annotations

import pytest
import torch

from fa4_inductor import measure, model_zoo

from .helpers import TINY, counters, error, fused

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("name", "attn"), TINY)
def test_runs_through_our_kernel(name: str, attn: str) -> None:
    case = model_zoo.build(name, attn, dtype=torch.bfloat16, device="cuda")
    result = error(case, fused(case.model, implementation="cute", strict=True).model)
    assert result.ok, result
    assert counters()["fused"] == case.sites, counters()


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt_oss"])
def test_few_kernels_serve_all_lengths(name: str) -> None:
    case = model_zoo.build(name, dtype=torch.bfloat16, device="cuda")
    run = fused(case.model, dynamic=True, implementation="cute", strict=True)
    built = []
    for batch, seqlen in ((2, 96), (3, 301), (1, 1024), (5, 17), (2, 95), (3, 302), (1, 1023), (5, 18)):
        sized = case.resized(batch, seqlen)
        result = error(sized, run.model)
        assert result.ok, (batch, seqlen, result)
        built.append(counters()["kernel_compiles"])
    assert built[4:] == built[3:4] * 4, "a length like one before compiled another kernel"


def test_cuda_graphs() -> None:
    case = model_zoo.build("llama", dtype=torch.bfloat16, device="cuda")
    model = torch.compile(case.model, backend="fa4", mode="reduce-overhead")
    for seed in range(4):
        ids = torch.randint(3, 250, case.inputs["input_ids"].shape, generator=torch.Generator().manual_seed(seed))
        case.inputs["input_ids"] = ids.cuda()
        got = case.run(model).clone()
        result = measure.compare(got, case.run(), case.in_double().run())
        assert result.ok, (seed, result)
