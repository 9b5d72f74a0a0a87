"""Programs for the emitter's tests, and how to get one from its text to a compiled harness."""

import hashlib
import importlib.util
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from fa4_inductor.analysis import facts
from fa4_inductor.lowering.emit_program import emit_program, write_program
from fa4_inductor.spec import AttentionSpec, parse_spec, verify

_directory = tempfile.TemporaryDirectory(prefix="fa4_emitted_")


def spec_of(
    score: str = "score", keep: str = "True", *, aux: str = "", sizes: int = 0, sink: str = "", empty_row: str = "zero"
) -> AttentionSpec:
    parts = [f"fa4/1; aux={aux}; sizes={sizes}; scale=1.0; score={score}; keep={keep}"]
    return verify(parse_spec("; ".join([*parts, *([f"sink={sink}"] if sink else []), f"empty_row={empty_row}"])))


# Together they use every op of spec/ops.py, in logits (fast forms) and below comparisons (exact forms).
_UNARY = (
    "exp(score) + exp2(score) + log(score) + log2(score) + sqrt(score) + rsqrt(score) + tanh(score) + sigmoid(score)"
)
_UNARY += (
    " + erf(score) + sin(score) + cos(score) + floor(score) + ceil(score) + trunc(score) + round(score) + abs(score)"
)
_LOAD = "aux0[h, kv_idx]"
OPS_PROGRAMS: dict[str, AttentionSpec] = {
    "fast": spec_of(_UNARY + " - score / (score + 2.0) + pow(score, 1.5) + score % 0.7"),
    "exact": spec_of(f"float(({_UNARY} - score / (score + 2.0)) % 0.7 > 0.25)"),
    "float select": spec_of(
        f"where({_LOAD} < score, minimum(score, {_LOAD}), maximum(-score, {_LOAD})) + float(score != 0.5)",
        aux="float32[2]",
    ),
    "integers": spec_of(
        "score + float(minimum(q_idx // 3, kv_idx % 5) * abs(q_idx - kv_idx) - maximum(b, h) + int(score * 4.0))"
        " + float((kv_idx - q_idx) // 4 + (kv_idx - q_idx) % 8 + (kv_idx - q_idx) // 3 % size0)"
        " + float(int(kv_idx > 3) + seqlen_q - seqlen_k)",
        sizes=1,
    ),
    "bits": spec_of(
        keep="bit_and(kv_idx, 53) <= bit_or(q_idx // 2, bit_xor(q_idx, 5)) + bit_and(q_idx - kv_idx, 3)"
    ),
    "logic": spec_of(
        keep="((q_idx > 1) ^ (kv_idx != 2)) | ~(kv_idx * q_idx >= 6) & where(h == 1, kv_idx < 2, bool(kv_idx % 3))"
    ),
    "loads": spec_of(
        "score + aux0[q_idx, kv_idx] * aux1[h] + aux2[kv_idx] + float(aux3[b, kv_idx] + aux4[abs(kv_idx - q_idx)])",
        "aux5[b, 0, kv_idx] & (aux6[aux4[q_idx + 1]] > 0)",
        aux="float16[2],bfloat16[1],float32[1],int64[2],int32[1],bool[3],uint8[1]",
    ),
    "sink and range": spec_of(
        keep="(kv_idx < aux0[b]) & ((q_idx - kv_idx < size0) | (kv_idx < 2)) & (kv_idx // 2 <= q_idx // 2)",
        aux="int64[1],float32[1]", sizes=1, sink="aux1[h] + 0.1 * float(q_idx)",
    ),
    "alibi": spec_of("score + aux0[h] * float(kv_idx - q_idx)", "kv_idx <= q_idx", aux="float32[1]"),
    "softcap": spec_of("20.0 * tanh(score / 20.0) - 3.0", "kv_idx <= q_idx + (seqlen_k - seqlen_q)"),
}  # fmt: skip


def tensors_for(spec: AttentionSpec) -> list[torch.Tensor]:
    """Random aux tensors, every dimension 7 long."""
    g = torch.Generator().manual_seed(1)
    out = []
    for aux in spec.aux:
        shape = [7] * aux.ndim
        if aux.dtype == "bool":
            out.append(torch.rand(shape, generator=g) < 0.5)
        elif aux.kind.name == "INT":
            out.append(torch.randint(0, 7, shape, generator=g).to(aux.torch_dtype))
        else:
            out.append(torch.randn(shape, generator=g).to(aux.torch_dtype))
    return out


def load_module(text: str) -> ModuleType:
    """Import a program text the way the runtime does: from a real file."""
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    path = write_program(text, digest, Path(_directory.name))
    module_spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[path.stem] = module
    module_spec.loader.exec_module(module)
    return module


def compile_spec(spec: AttentionSpec, **options: Any) -> Any:
    """The compiled harness of a spec."""
    from emit_harness import build_harness

    return build_harness(
        load_module(emit_program(spec, facts(spec), **options)),
        tuple((a.dtype, a.ndim) for a in spec.aux),
        spec.num_sizes,
    )
