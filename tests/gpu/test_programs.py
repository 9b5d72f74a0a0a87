"""Each program of the benchmark, as emitted: error at most twice that of same-dtype PyTorch, always the same bits."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fa4_inductor.spec.interpret import Env, evaluate, grid

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import kernel_ours
from kernel_cases import PROGRAMS, Case, make_operands

Tensors = tuple[torch.Tensor, ...]

LENGTHS = {"window": 2600, "prefix": 2600, "softcap_alibi_window": 2600, "evoformer": 200}


def case_of(name: str, head_dim: int) -> Case:
    batch = 256 if name == "evoformer" else 2
    return Case(name, head_dim, LENGTHS.get(name, 1230), 2, 1 if name == "causal" else 2, batch)


def eager(case: Case, operands: Tensors, aux: Tensors, dtype: torch.dtype) -> torch.Tensor:
    """Attention as a model writes it in `dtype`, softmax in fp32."""
    q, k, v = (t.to(dtype) for t in operands)
    group = case.heads // case.kv_heads
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    names = grid(case.b, case.heads, case.sq, case.seqlen, "cuda")
    names |= {f"size{i}": n for i, n in enumerate(PROGRAMS[case.program].sizes)}
    names["score"] = q @ k.mT * case.head_dim**-0.5
    typed = [t.to(dtype) if t.is_floating_point() else t for t in aux]
    logits = evaluate(case.spec.score, Env(names, typed)).to(dtype).float()
    keep = torch.as_tensor(evaluate(case.spec.keep, Env(names, typed)), device="cuda")
    return torch.softmax(logits.masked_fill(~keep, -torch.inf), -1).to(dtype) @ v


def as_they_are(case: Case, operands: Tensors) -> None:
    """Random operands."""


def near_sixty(case: Case, operands: Tensors) -> None:
    operands[0].mul_(60.0 * case.head_dim**0.5 / (operands[0].float().norm(dim=-1) * 11.0).max())


def rising(case: Case, operands: Tensors) -> None:
    """By 200 nats from the last key to the first, against the order in which key tiles are visited."""
    operands[0][..., 0] = 16.0
    ramp = torch.linspace(200.0, 0.0, case.seqlen, device="cuda") * case.head_dim**0.5 / 16.0
    operands[1][..., 0] = ramp.to(operands[1].dtype)


def an_outlier(case: Case, operands: Tensors) -> None:
    """One key 200 nats above the others, in the tile visited last."""
    operands[0][..., 0] = 16.0
    operands[1][..., 0] = 0.0
    operands[1][:, :, 3, 0] = 200.0 * case.head_dim**0.5 / 16.0


def neighbours_apart(case: Case, operands: Tensors) -> None:
    """Rows that are 8 apart, which one thread holds and gives one shift, have scores of very different size."""
    operands[0][:, :, torch.arange(case.sq, device="cuda") // 8 % 2 == 0] *= 40.0


@pytest.mark.parametrize(
    "pattern", [as_they_are, near_sixty, rising, an_outlier, neighbours_apart], ids=lambda f: f.__name__
)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", PROGRAMS)
def test_error_and_bits(name: str, head_dim: int, pattern: Callable[..., None]) -> None:
    torch.manual_seed(0)
    case = case_of(name, head_dim)
    operands, aux = make_operands(case, "cuda"), PROGRAMS[name].make_aux(case, "cuda")
    pattern(case, operands)
    run = kernel_ours.ours(case, operands, aux, {})
    out = run().clone()
    exact = eager(case, operands, aux, torch.float32)
    own = (eager(case, operands, aux, torch.bfloat16).float() - exact).abs().max().item()
    band = exact.abs().max().item() * torch.finfo(torch.bfloat16).eps
    assert (out.float() - exact).abs().max().item() <= 2 * own + band
    for _ in range(3):
        assert torch.equal(run(), out)
