"""Random inputs, an fp32 reference and an error bound for the forward kernel.

Everything is keyed by the name of a fixture program (tests/compile/programs).
"""

from __future__ import annotations

import importlib
import math
import os
import random
import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from fa4_inductor.lowering.split_config import SplitConfig, workspace_size

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "compile"))

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
GUARD_ROWS = 3  # rows behind the output that must stay untouched
GUARD = 77.0


def load_program(name: str) -> ModuleType:
    return importlib.import_module(f"programs.{name}")


@dataclass
class Inputs:
    """Arguments of one launch, and the masks and biases the reference needs."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    scale: float
    aux: tuple[torch.Tensor, ...]
    sizes: tuple[int, ...]


def _operand(
    rng: random.Random, shape: tuple[int, int, int, int], dtype: torch.dtype, amplitude: float
) -> torch.Tensor:
    """(B, H, S, D) in one of the layouts that models produce: BHSD, BSHD, a slice of a fused projection or cache."""
    b, h, s, d = shape
    layout = rng.choice(["bhsd", "bshd", "fused", "sliced"])
    if layout == "bhsd":
        x = torch.randn(b, h, s, d, device="cuda")
    elif layout == "bshd":
        x = torch.randn(b, s, h, d, device="cuda").transpose(1, 2)
    elif layout == "fused":
        x = torch.randn(b, s, h, 3 * d, device="cuda")
        return (x * amplitude).to(dtype)[..., d : 2 * d].transpose(1, 2)
    else:
        x = torch.randn(b, h, s + 5, d, device="cuda")
        return (x * amplitude).to(dtype)[:, :, 2 : 2 + s]
    return (x * amplitude).to(dtype)


def _bias(rng: random.Random, h: int, sq: int, sk: int) -> torch.Tensor:
    """Random numbers, sometimes with the fills of an additive mask: whole tiles of them, and of -inf."""
    bias = torch.randn(h, sq, sk, device="cuda")
    if rng.random() < 0.5:
        fill = rng.choice([-60000.0, -math.inf])
        bias[:, :, rng.randrange(1, sk + 1) :] = fill
        bias[:, : sq // 3, : sk // 2] = fill
        bias[:, :, 0] = 0.0
    return bias


def _for_tma(t: torch.Tensor) -> torch.Tensor:
    """The same values in rows of a multiple of 16 bytes."""
    width = 16 // t.element_size()
    padded = torch.zeros(*t.shape[:-1], -(-t.shape[-1] // width) * width, dtype=t.dtype, device=t.device)
    padded[..., : t.shape[-1]] = t
    return padded[..., : t.shape[-1]]


def make_aux(name: str, rng: random.Random, b: int, h: int, sq: int, sk: int) -> tuple[torch.Tensor, ...]:
    """The aux tensors of a fixture program."""
    if name == "alibi_causal":
        return (2.0 ** (-8.0 * torch.arange(1, h + 1, device="cuda") / h),)
    if name in ("padding", "padding_causal"):
        # right padding, left padding, no key at all, holes
        lengths = torch.tensor([rng.choice([0, 1, sk // 2, sk]) for _ in range(b)], device="cuda")
        kept = torch.arange(sk, device="cuda")[None] < lengths[:, None]
        style = rng.choice(["right", "left", "holes"])
        if style == "left":
            kept = kept.flip(1)
        if style == "holes":
            kept = torch.rand(b, sk, device="cuda") < 0.9
        return (kept,)
    if name == "dense_mask":
        mask = torch.rand(b, sq, sk, device="cuda") < 0.3
        mask[:, sq // 3 : sq // 2] = False
        return (mask,)
    if name == "dense_bias":
        return (torch.randn(h, sq, sk, device="cuda").to(torch.bfloat16),)
    if name == "tma_bias":
        return (_for_tma(_bias(rng, h, sq, sk).to(torch.bfloat16)),)
    if name == "tma_mask":
        mask = torch.rand(b, sq, sk, device="cuda") < 0.3
        mask[:, sq // 3 : sq // 2] = False
        return (_for_tma(mask),)
    if name == "tma_bias_mask_causal":
        return _for_tma(_bias(rng, h, sq, sk).to(torch.float16)), _for_tma(
            torch.rand(b, 1, sq, sk, device="cuda") < 0.5
        )
    if name == "tma_bias_wide_causal":
        return (_for_tma(_bias(rng, 1, sq, sk)[0]),)
    if name == "distance_table":
        return (torch.randn(1, h, sq + sk - 1, device="cuda"),)
    if name == "t5_table":
        return (torch.randn(33, h, device="cuda"),)
    if name == "sink_window":
        return (torch.randn(h, device="cuda").to(torch.bfloat16),)
    if name == "cache_positions":
        last = rng.randrange(sk)
        return (torch.tensor([max(0, last - sq + 1 + i) for i in range(sq)], device="cuda"),)
    if name == "document_causal":
        cuts = torch.rand(b, max(sq, sk), device="cuda") < 0.02
        return (torch.cumsum(cuts, 1),)
    return ()


def reference(name: str, x: Inputs, low_precision: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) in fp32, or with the roundings of eager attention in the inputs' dtype."""
    dtype = x.q.dtype if low_precision else torch.float32
    b, h, sq, _ = x.q.shape
    sk, group = x.k.shape[2], h // x.k.shape[1]
    k = x.k.expand(b, -1, -1, -1).repeat_interleave(group, 1).to(dtype)
    v = x.v.expand(b, -1, -1, -1).repeat_interleave(group, 1).to(dtype)
    if name == "cache_positions":
        # unused slots are NaN
        k, v = k.nan_to_num(), v.nan_to_num()
    s = (x.q.to(dtype) @ k.transpose(-1, -2)).mul(x.scale)
    qi = torch.arange(sq, device="cuda")[:, None]
    ki = torch.arange(sk, device="cuda")[None]
    keep = torch.ones(b, 1, sq, sk, dtype=torch.bool, device="cuda")
    if "causal" in name:
        keep = keep & (ki <= qi + (x.sizes[0] if name == "offset_causal" else 0))
    if name == "cache_positions":
        keep = keep & (ki <= x.aux[0][:, None])
    if name in ("window", "sink_window"):
        keep = keep & (ki <= qi) & (ki > qi - x.sizes[0])
    if name == "softcap_causal":
        s = 20 * torch.tanh(s / 20)
    if name == "alibi_causal":
        s = s + (x.aux[0][:, None, None] * (ki - qi)).to(dtype)
    if "padding" in name:
        keep = keep & x.aux[0][:, None, None]
    if name in ("dense_mask", "tma_mask"):
        keep = keep & x.aux[0][:, None]
    if name == "tma_bias_mask_causal":
        keep = keep & x.aux[1]
    if name == "document_causal":
        ids = x.aux[0]
        keep = keep & (ids[:, None, :sq, None] == ids[:, None, None, :sk])
    if name in ("dense_bias", "tma_bias", "tma_bias_mask_causal", "tma_bias_wide_causal"):
        s = s + x.aux[0].to(dtype)
    if name == "distance_table":
        s = s + x.aux[0][0][:, ki - qi + sq - 1].to(dtype)
    if name == "t5_table":
        s = s + x.aux[0][(ki - qi + 16).clamp(0, 32)].permute(2, 0, 1).to(dtype)
    s = s.float().masked_fill(~keep, -math.inf)
    logits = s
    if name == "sink_window":
        logits = torch.cat([s, x.aux[0].float()[None, :, None, None].expand(b, h, sq, 1)], -1)
    lse, p = torch.logsumexp(logits, -1), torch.softmax(logits, -1)[..., :sk]
    empty = (s == -math.inf).all(-1, keepdim=True).expand(b, h, sq, 1)
    out = (p.to(dtype) @ v).float()
    if name == "padding":
        out = torch.where(empty, v.float().mean(2, keepdim=True), out)
    if name in ("dense_mask", "tma_mask", "tma_bias_mask_causal"):
        out = torch.where(empty, 0.0, out)
    return out, lse


_LENGTHS = (
    [1, 2, 63, 64, 65, 127, 128, 129, 191, 193, 255, 300, 521, 640],
    [1, 7, 64, 80, 127, 128, 129, 200, 257, 384, 521, 777],
)
_DECODE_LENGTHS = ([1, 1, 1, 2, 3, 7, 16, 17, 64, 100, 300], [1, 7, 63, 64, 65, 129, 300, 777, 1500, 4100])


def random_inputs(
    name: str, rng: random.Random, dtype: str, dims: tuple[int, int], group: int, decode: bool = False
) -> Inputs:
    """Odd lengths, Sq != Sk, batch-1 K and V, several memory layouts. decode: few queries, more keys."""
    b, hkv = rng.choice([1, 2, 3]), rng.choice([1, 2])
    sq, sk = map(rng.choice, _DECODE_LENGTHS if decode else _LENGTHS)
    if name in ("document_causal",):
        sk = sq
    b_kv = rng.choice([1, b])
    kind = DTYPES[dtype]
    amplitude = rng.choice([1.0, 1.0, 3.0])
    q = _operand(rng, (b, hkv * group, sq, dims[0]), kind, amplitude)
    k = _operand(rng, (b_kv, hkv, sk, dims[0]), kind, amplitude)
    v = _operand(rng, (b_kv, hkv, sk, dims[1]), kind, 1.0)
    if rng.random() < 0.2:
        # scores that dwarf those of the tile visited first: the fixed shift fails and the tile runs again
        k[:, :, : sk // 2] *= rng.choice([8.0, 60.0])
    aux = make_aux(name, rng, b, hkv * group, sq, sk)
    sizes = (rng.choice([1, 17, 128, 200, 4096]),) if "window" in name else ()
    if name == "offset_causal":
        sizes = (rng.choice([max(0, sk - sq), 0, 5]),)
    if name == "cache_positions":
        unused = int(aux[0].max()) + 1
        k[:, :, unused:], v[:, :, unused:] = math.nan, math.nan
    return Inputs(q, k, v, dims[0] ** -0.5, aux, sizes)


def split_arguments(config: SplitConfig, x: Inputs, num_splits: int) -> tuple[torch.Tensor | None, int]:
    """What the split-KV kernel takes besides: a poisoned workspace, and the number of splits."""
    if not config.split:
        return None, 1
    b, h, sq, _ = x.q.shape
    # the kernel counts a workspace's elements in int32, and a launch never plans one that is larger
    num_splits = min(num_splits, (2**31 - 1) // max(1, workspace_size(1, b * h * sq, x.v.shape[-1])))
    size = workspace_size(num_splits, b * h * sq, x.v.shape[-1])
    return torch.full((size,), math.nan, device="cuda"), num_splits


def launch(
    compiled: Any, program: ModuleType, x: Inputs, need_lse: bool, *more: Any
) -> tuple[torch.Tensor, torch.Tensor | None, bool]:
    """Run the compiled kernel, with arguments that only it takes, on poisoned outputs.

    Returns (out, lse, guard rows untouched).
    """
    b, h, sq, _ = x.q.shape
    buffer = torch.full((b, sq + GUARD_ROWS, h, x.v.shape[-1]), GUARD, dtype=x.q.dtype, device="cuda")
    out = buffer[:, :sq].transpose(1, 2)
    lse = torch.full((b, h, sq), GUARD, device="cuda") if need_lse else None
    mean = None
    if program.EMPTY_ROW == "mean" and program.MAY_BE_EMPTY:
        mean = x.v.float().mean(2)
    aux = tuple(t.view(torch.uint8) if t.dtype == torch.bool else t for t in x.aux) or None
    compiled(x.q, x.k, x.v, out, lse, mean, x.scale, aux, x.sizes or None, *more)
    torch.cuda.synchronize()
    return out, lse, bool((buffer[:, sq:] == GUARD).all())


def check(name: str, x: Inputs, out: torch.Tensor, lse: torch.Tensor | None, guard: bool) -> str:
    """Empty string if right, else what is wrong."""
    exact, exact_lse = reference(name, x, low_precision=False)
    rounded, _ = reference(name, x, low_precision=True)
    same = out.float().isnan() == exact.isnan()
    if not bool(same.all()):
        return f"NaN pattern differs at {int((~same).sum())} elements"
    exact = exact.nan_to_num()
    error = float((out.float().nan_to_num() - exact).abs().max())
    eager = float((rounded.nan_to_num() - exact).abs().max())
    band = float(exact.abs().max()) * torch.finfo(x.q.dtype).eps
    if not error <= 2 * eager + band:
        return f"error {error:.3e} exceeds 2 x {eager:.3e} + {band:.3e}"
    if not guard:
        return "rows behind the output were written"
    if lse is not None:
        tolerance = 0.02 if name == "softcap_causal" else 2e-3
        finite = exact_lse.isfinite()
        if not bool((lse.isfinite() == finite).all()) or bool((lse[~finite] != -math.inf).any()):
            return "LSE of empty rows is not -inf"
        relative = (lse - exact_lse)[finite].abs() / exact_lse[finite].abs().clamp_min(1e3) * 1e3
        worst = float(relative.max()) if bool(finite.any()) else 0.0
        if worst > tolerance:
            return f"LSE error {worst:.3e}"
    return ""


def random_problem(
    compiled: Any, config: Any, name: str, rng: random.Random, dtype: str, dims: tuple[int, int], group: int,
    need_lse: bool,
) -> tuple[Inputs, str]:  # fmt: skip
    """Launch a kernel of this configuration on random inputs; returns them and, if the result is wrong, how."""
    few = isinstance(config, SplitConfig)
    x = random_inputs(name, rng, dtype, dims, group, decode=few)
    more = split_arguments(config, x, rng.choice([1, 2, 3, 7, 33, 256])) if few else ()
    wrong = check(name, x, *launch(compiled, load_program(name), x, need_lse, *more))
    return x, f"{wrong} with {more[1]} splits" if wrong and more else wrong
