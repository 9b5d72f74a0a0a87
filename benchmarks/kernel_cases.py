"""What benchmarks/kernels.py measures, as data: programs, and suites of cases that run them.

A new program is an entry of PROGRAMS (or of NATIVE, where one call of the kernel is not all of it), a new measurement
a case of a suite.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fa4_inductor.spec import AttentionSpec, parse_spec
from fa4_inductor.spec.interpret import Env, evaluate

WINDOW, PREFIX, DOCUMENT, TOKENS, VALID = 1024, 2048, 1000, 32768, 300
Aux = tuple[Tensor, ...]
Mod = Callable[..., Tensor]


@dataclass(frozen=True)
class Case:
    """One row of a table: bf16 operands q (B, H, Sq, D), k (B, Hkv, Sk, D), v (B, Hkv, Sk, Dv), BSHD in memory.

    Attributes:
        seqlen: keys; also queries unless seqlen_q is given. batch: 32k tokens in total where it is 0.
        head_dim_v: head_dim where it is 0.
    """

    program: str
    head_dim: int
    seqlen: int
    heads: int = 16
    kv_heads: int = 16
    batch: int = 0
    seqlen_q: int = 0
    head_dim_v: int = 0

    @property
    def b(self) -> int:
        return self.batch or max(1, TOKENS // self.seqlen)

    @property
    def sq(self) -> int:
        return self.seqlen_q or self.seqlen

    @property
    def dv(self) -> int:
        return self.head_dim_v or self.head_dim

    @property
    def spec(self) -> AttentionSpec:
        return parse_spec(PROGRAMS[self.program].text(self.head_dim**-0.5))

    @property
    def title(self) -> str:
        dims = f"D{self.head_dim}" + (f",{self.dv}" if self.dv != self.head_dim else "")
        lengths = f"S{self.seqlen}" if self.sq == self.seqlen else f"S{self.sq}x{self.seqlen}"
        return f"{dims} {lengths} B{self.b} H{self.heads}/{self.kv_heads} {self.program}"

    def baseline(self) -> Case | None:
        """The plain kernel of this shape and sparsity, which a program is compared with."""
        name = (NATIVE if self.program in NATIVE else PROGRAMS)[self.program].baseline
        return dataclasses.replace(self, program=name, head_dim_v=0) if name else None

    def flops(self, aux: Aux) -> float:
        """4 * B * H * kept scores * mean head dim: two matrix products."""
        if self.program in NATIVE:
            return NATIVE[self.program].flops(self)
        kept = self.b * self.sq * self.seqlen * kept_fraction(self, aux)
        return 2.0 * self.heads * kept * (self.head_dim + self.dv)

    @property
    def kv_bytes(self) -> float:
        """Bytes of K and V."""
        return 2.0 * self.b * self.seqlen * self.kv_heads * (self.head_dim + self.dv)


def _no_aux(case: Case, device: str) -> Aux:
    return ()


def _no_mods(aux: Aux) -> tuple[Mod | None, Mod | None]:
    return None, None


@dataclass(frozen=True)
class Program:
    """A program as spec text, and as FlexAttention's user would write it.

    Attributes:
        make_aux: random tensors for a case. mods: (score_mod, mask_mod) for flex_attention over them.
        baseline: the program of the same sparsity whose score is plain; "" for such a program.
    """

    score: str = "score"
    keep: str = "True"
    aux: str = ""
    sizes: tuple[int, ...] = ()
    make_aux: Callable[[Case, str], Aux] = _no_aux
    mods: Callable[[Aux], tuple[Mod | None, Mod | None]] = _no_mods
    baseline: str = "plain"

    def text(self, scale: float) -> str:
        parts = [f"fa4/1; aux={self.aux}; sizes={len(self.sizes)}; scale={scale!r}; score={self.score}"]
        return "; ".join([*parts, f"keep={self.keep}", "empty_row=zero"])


def causal_mask(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


def _normal(*shape: int, device: str, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device=device, dtype=dtype)


def _slopes(case: Case, device: str) -> Aux:
    return (2.0 ** (-8.0 * torch.arange(1, case.heads + 1, device=device) / case.heads),)


def _documents(case: Case, device: str) -> Aux:
    return ((torch.arange(case.seqlen, device=device) // DOCUMENT).int().repeat(case.b, 1),)


def _lengths(case: Case, device: str) -> Aux:
    """Three quarters of the keys in every other sequence, all of them in the others."""
    used = [case.seqlen - (case.seqlen // 4) * (i % 2) for i in range(case.b)]
    kept = torch.arange(case.seqlen, device=device)[None] < torch.tensor(used, device=device)[:, None]
    return (kept,)


def t5_bucket(distance: Tensor) -> Tensor:
    """T5's bidirectional relative position buckets: 32 buckets, distances up to 128."""
    bucket = (distance > 0).long() * 16
    distance = distance.abs()
    far = 8 + (torch.log(distance.float() / 8) / 2.772588722239781 * 8).long()
    return bucket + torch.where(distance < 8, distance, torch.clamp(far, max=15))


_BUCKET = (
    "where(kv_idx > q_idx, 16, 0) + where(abs(kv_idx - q_idx) < 8, abs(kv_idx - q_idx), "
    "minimum(int(log(float(abs(kv_idx - q_idx)) / 8.0) / 2.772588722239781 * 8.0) + 8, 15))"
)
CAUSAL = "kv_idx <= q_idx"
PROGRAMS: dict[str, Program] = {
    "plain": Program(baseline=""),
    "causal": Program(keep=CAUSAL, mods=lambda aux: (None, causal_mask), baseline=""),
    "softcap_causal": Program(
        "50.0 * tanh(score / 50.0)", CAUSAL, baseline="causal",
        mods=lambda aux: (lambda s, b, h, q, k: 50.0 * torch.tanh(s / 50.0), causal_mask),
    ),
    "alibi_causal": Program(
        "score + aux0[h] * float(kv_idx - q_idx)", CAUSAL, "float32[1]", make_aux=_slopes, baseline="causal",
        mods=lambda aux: (lambda s, b, h, q, k: s + aux[0][h] * (k - q), causal_mask),
    ),
    "relative_table": Program(
        "score + aux0[h, kv_idx - q_idx + (seqlen_q - 1)]", aux="bfloat16[2]",
        make_aux=lambda c, device: (_normal(c.heads, c.sq + c.seqlen - 1, device=device),),
        mods=lambda aux: (lambda s, b, h, q, k: s + aux[0][h, k - q + (aux[0].shape[1] // 2)], None),
    ),
    "t5_buckets": Program(
        f"score + aux0[{_BUCKET}, h]", aux="bfloat16[2]",
        make_aux=lambda c, device: (_normal(32, c.heads, device=device),),
        mods=lambda aux: (lambda s, b, h, q, k: s + aux[0][t5_bucket(k - q), h], None),
    ),
    "dense_bias": Program(
        "score + aux0[h, q_idx, kv_idx]", aux="bfloat16[3]",
        make_aux=lambda c, device: (_normal(c.heads, c.sq, c.seqlen, device=device),),
        mods=lambda aux: (lambda s, b, h, q, k: s + aux[0][h, q, k], None),
    ),
    "window": Program(
        keep=f"({CAUSAL}) & (kv_idx > q_idx - size0)", sizes=(WINDOW,),
        mods=lambda aux: (None, lambda b, h, q, k: (q >= k) & (q - k < WINDOW)),
    ),
    "prefix": Program(
        keep=f"({CAUSAL}) | (kv_idx < size0)", sizes=(PREFIX,),
        mods=lambda aux: (None, lambda b, h, q, k: (q >= k) | (k < PREFIX)),
    ),
    "documents_causal": Program(
        keep=f"({CAUSAL}) & (aux0[b, kv_idx] == aux0[b, q_idx])", aux="int32[2]", make_aux=_documents,
        mods=lambda aux: (None, lambda b, h, q, k: (q >= k) & (aux[0][b, q] == aux[0][b, k])), baseline="causal",
    ),
    "padding_causal": Program(
        keep=f"({CAUSAL}) & aux0[b, kv_idx]", aux="bool[2]", make_aux=_lengths, baseline="causal",
        mods=lambda aux: (None, lambda b, h, q, k: (q >= k) & aux[0][b, k]),
    ),
    # the mask of a decode step with a static cache
    "valid_slots": Program(
        keep="aux0[b, kv_idx]", aux="bool[2]", baseline="",
        make_aux=lambda c, device: ((torch.arange(c.seqlen, device=device) < VALID)[None].repeat(c.b, 1),),
        mods=lambda aux: (None, lambda b, h, q, k: aux[0][b, k]),
    ),
    # two of the project's own choosing: a Gemma-like local layer with ALiBi, and packed documents with a relative table
    "softcap_alibi_window": Program(
        "30.0 * tanh((score + aux0[h] * float(kv_idx - q_idx)) / 30.0)", f"({CAUSAL}) & (kv_idx > q_idx - size0)",
        "float32[1]", (WINDOW,), _slopes, baseline="window",
        mods=lambda aux: (
            lambda s, b, h, q, k: 30.0 * torch.tanh((s + aux[0][h] * (k - q)) / 30.0),
            lambda b, h, q, k: (q >= k) & (q - k < WINDOW),
        ),
    ),
    "table_documents_causal": Program(
        "score + aux1[h, kv_idx - q_idx + (seqlen_q - 1)]", f"({CAUSAL}) & (aux0[b, kv_idx] == aux0[b, q_idx])",
        "int32[2],bfloat16[2]", baseline="documents_causal",
        make_aux=lambda c, device: (
            *_documents(c, device), _normal(c.heads, c.sq + c.seqlen - 1, device=device)
        ),
        mods=lambda aux: (
            lambda s, b, h, q, k: s + aux[1][h, k - q + (aux[1].shape[1] // 2)],
            lambda b, h, q, k: (q >= k) & (aux[0][b, q] == aux[0][b, k]),
        ),
    ),
    # a row of a pair representation attends along S; the batch is B x rows, flattened
    "evoformer": Program(
        "score + aux0[b, kv_idx] + aux1[b // size0, h, q_idx, kv_idx]", aux="bfloat16[2],bfloat16[4]", sizes=(256,),
        make_aux=lambda c, device: (
            _normal(c.b, c.seqlen, device=device), _normal(c.b // 256, c.heads, c.sq, c.seqlen, device=device)
        ),
        mods=lambda aux: (lambda s, b, h, q, k: s + aux[0][b, k] + aux[1][b // 256, h, q, k], None),
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Native:
    """A module's attention as its author writes it, compiled whole by both sides: several calls, or more around them.

    Attributes:
        function: `(q, k, v, *aux) -> out` in eager torch; q, k, v may carry more heads than the case's.
        make: (q, k, v, *aux) for a case.
        baseline: as in `Program`.
    """

    function: Callable[..., Tensor]
    make: Callable[[Case, str], Aux]
    flops: Callable[[Case], float]
    baseline: str = "causal"


def _differential(q: Tensor, k: Tensor, v: Tensor, weight: Tensor) -> Tensor:
    """softmax(Q1 K1) V - weight softmax(Q2 K2) V (arXiv 2410.05258), causal."""
    length = q.shape[2]
    mask = torch.ones(length, length, dtype=torch.bool, device=q.device).tril()
    (q1, q2), (k1, k2) = q.chunk(2, 1), k.chunk(2, 1)
    terms = [
        torch.softmax((a @ b.mT * q.shape[3] ** -0.5).masked_fill(~mask, -torch.inf), -1)
        for a, b in ((q1, k1), (q2, k2))
    ]
    return (terms[0] - weight * terms[1]) @ v


def _differential_inputs(case: Case, device: str) -> Aux:
    q, k = (_normal(case.b, case.sq, 2 * case.heads, case.head_dim, device=device).transpose(1, 2) for _ in range(2))
    v = _normal(case.b, case.sq, case.heads, case.head_dim, device=device).transpose(1, 2)
    return q, k, v, torch.full((), 0.3, device=device, dtype=torch.bfloat16)


NATIVE: dict[str, Native] = {
    "differential": Native(
        _differential,
        _differential_inputs,
        lambda c: 2 * 4.0 * c.b * c.heads * c.head_dim * c.sq * (c.sq + 1) / 2,
    ),
}


def make_operands(case: Case, device: str) -> tuple[Tensor, Tensor, Tensor]:
    def operand(length: int, heads: int, width: int) -> Tensor:
        return _normal(case.b, length, heads, width, device=device).transpose(1, 2)

    return (
        operand(case.sq, case.heads, case.head_dim),
        operand(case.seqlen, case.kv_heads, case.head_dim),
        operand(case.seqlen, case.kv_heads, case.dv),
    )


def names_of(case: Case, rows: Tensor, device: str) -> dict[str, Any]:
    """Values of a program's names for these query rows, all keys, batch entry and head as `b` and `h` of 0 dims."""
    sizes = {f"size{i}": n for i, n in enumerate(PROGRAMS[case.program].sizes)}
    keys = torch.arange(case.seqlen, device=device)[None]
    return {"q_idx": rows[:, None], "kv_idx": keys, "seqlen_q": case.sq, "seqlen_k": case.seqlen, **sizes}


@functools.lru_cache(maxsize=2)
def _triangle(length: int) -> float:
    return (length + 1) / (2 * length)


def kept_fraction(case: Case, aux: Aux) -> float:
    """Part of all scores that the mask keeps, counted on the aux tensors' device; masks here do not depend on h."""
    keep = case.spec.keep
    if not keep.free:
        return 1.0
    if PROGRAMS[case.program].keep == CAUSAL and case.sq == case.seqlen:
        return _triangle(case.sq)
    device = str(aux[0].device) if aux else "cpu"
    batches, kept, step = (range(case.b) if "b" in keep.free else range(1)), 0, 1024
    for b in batches:
        for first in range(0, case.sq, step):
            rows = torch.arange(first, min(first + step, case.sq), device=device)
            names = names_of(case, rows, device) | {"b": torch.full((), b, device=device)}
            kept += int(evaluate(keep, Env(names, aux)).expand(len(rows), case.seqlen).sum())
    return kept / (len(batches) * case.sq * case.seqlen)


def forward_cases() -> list[Case]:
    """Plain attention: the sizes of the peers' published tables."""
    cases = [
        Case(program, d, s, h, h)
        for d, h in ((128, 16), (64, 32))
        for s in (1024, 4096, 16384)
        for program in ("plain", "causal")
    ]
    grouped = [Case(p, 128, s, 32, 8) for s in (1024, 4096, 16384) for p in ("plain", "causal")]
    return [*cases, Case("causal", 256, 4096, 8, 8, 4), *grouped]


def program_cases() -> list[Case]:
    """Masks and score modifications at B2 H16 S8192; row and differential attention as in arXiv 2511.02043."""
    special = ("plain", "evoformer", "valid_slots")
    cases = [Case(name, d, 8192, 16, 16, 2) for d in (128, 64) for name in PROGRAMS if name not in special]
    cases += [Case("evoformer", d, 256, 4, 4, b * 256) for d, b in ((64, 32), (64, 8), (64, 1), (128, 32), (128, 8))]
    cases += [Case("differential", 64, s, 32, 32, 16384 // s) for s in (512, 4096, 16384)]
    return [*cases, *(Case("differential", 128, s, 16, 16, 16384 // s) for s in (512, 1024, 2048))]


def dims_cases() -> list[Case]:
    """The other head dims, 16k tokens."""
    dims = ((80, 80), (96, 96), (192, 192), (192, 128), (256, 256))
    return [Case(p, d, 4096, 16, 16, 4, 0, dv) for d, dv in dims for p in ("plain", "causal")]


def small_cases() -> list[Case]:
    """Short sequences, few heads, odd head dims, Sq != Sk."""
    cases = [
        Case(p, d, s, 8, 8, b) for d in (128, 64) for b, s in ((1, 64), (8, 64), (1, 512), (8, 128), (8, 512))
        for p in ("plain", "causal")
    ]  # fmt: skip
    cases += [Case("plain", d, 512, 8, 8, 4, 0, dv) for d, dv in ((80, 80), (96, 96), (192, 192), (192, 128))]
    return [*cases, *(Case("plain", 128, sk, 16, 16, 2, sq) for sq, sk in ((1, 512), (16, 1024), (77, 512), (512, 77)))]


def decode_cases() -> list[Case]:
    """One query row against a cache, with grouped heads and without; 16 rows, as in speculative decoding; a static
    cache of 32k slots of which 300 are valid, beside a cache of 300."""
    cases = [Case("plain", 128, s, 32, 8, b, 1) for b in (1, 4, 16, 64) for s in (1024, 4096, 32768)]
    cases += [Case("plain", 64, s, heads, 8, b, 1) for heads in (32, 64) for b in (1, 16) for s in (4096, 32768)]
    cases += [Case("plain", 128, s, 32, 32, b, 1) for b, s in ((1, 4096), (1, 32768), (16, 4096))]
    cases += [Case("plain", 128, 131072, 32, 8, 1, 1), Case("plain", 128, 4096, 32, 8, 1, 16)]
    cases += [Case("plain", d, 8192, 16, 8, 4, 1, dv) for d, dv in ((80, 80), (192, 128), (256, 256))]
    return [*cases, Case("valid_slots", 128, 32768, 32, 8, 1, 1), Case("plain", 128, 300, 32, 8, 1, 1)]


SUITES: dict[str, Callable[[], list[Case]]] = {
    "forward": forward_cases,
    "programs": program_cases,
    "dims": dims_cases,
    "small": small_cases,
    "decode": decode_cases,
}
COLD = ("decode",)
"""Suites that find nothing in L2, as a decode step does after the other layers."""
IN_GRAPHS = ("small", "decode")
"""Suites whose calls are timed as replays of CUDA graphs, because a call takes less time than its launch by Python."""
