"""Random sweep of the backward kernel against fp32, with gradients of what the programs capture.

Run as a script: python tests/gpu/bwd_sweep.py --workers 8 --per-job 10
"""

from __future__ import annotations

import argparse
import os
import random
import time
import traceback

import fwd_sweep

Job = tuple[str, str, int, int, int, bool]

# name: score, keep, slots of the aux tensors that learn
PROGRAMS: dict[str, tuple[str, str, tuple[int, ...]]] = {
    "plain": ("score", "True", ()),
    "causal": ("score", "kv_idx <= q_idx", ()),
    "window": ("score", "(kv_idx <= q_idx) & (kv_idx > q_idx - size0)", ()),
    "softcap": ("20.0 * tanh(score * 0.05)", "kv_idx <= q_idx", ()),
    "padding": ("score", "aux4[b, kv_idx]", ()),
    "bias": ("score + aux0[h, q_idx, kv_idx]", "kv_idx <= q_idx", (0,)),
    "bias_of_all": ("score + aux0[0, q_idx, kv_idx]", "True", (0,)),
    "bias_of_batch": ("score + aux1[b, h, q_idx, kv_idx]", "aux4[b, kv_idx]", (1,)),
    "fills": ("score + aux1[b, h, q_idx, kv_idx]", "True", ()),
    "fills_that_learn": ("score + aux1[b, h, q_idx, kv_idx]", "kv_idx <= q_idx", (1,)),
    "fills_by_key": ("score + aux6[b, kv_idx] + aux3[h] * float(kv_idx - q_idx)", "kv_idx <= q_idx", (3,)),
    "capped_bias": ("20.0 * tanh((score + aux0[h, q_idx, kv_idx]) * 0.05)", "kv_idx <= q_idx", (0,)),
    "table": ("score + aux2[0, h, kv_idx - q_idx + seqlen_q + 255, 0]", "True", (2,)),
    "causal_table": ("score + aux2[0, h, kv_idx - q_idx + seqlen_q + 255, 0]", "kv_idx <= q_idx", (2,)),
    "buckets": ("score + aux5[minimum(abs(kv_idx - q_idx), 31), h]", "True", (5,)),
    "slopes": ("score + aux3[h] * float(kv_idx - q_idx)", "kv_idx <= q_idx", (3,)),
    "temperature": ("score * aux3[h] + aux6[b, kv_idx]", "True", (3, 6)),
    "rows": ("score * aux7[q_idx] + aux6[b, kv_idx]", "kv_idx <= q_idx", (6, 7)),
    "bent": ("where(score > 0.1, score * aux3[h], 0.3 * score) + aux3[0]", "kv_idx <= q_idx + 5", (3,)),
}


def jobs() -> list[Job]:
    """(program, dtype, head_dim, head_dim_v, group, whether the LSE has a gradient) of every kernel to build."""
    table: list[Job] = []
    for i, name in enumerate(PROGRAMS):
        kind, other = ("float16", "bfloat16") if i % 2 else ("bfloat16", "float16")
        table.append((name, kind, 64, 64, 1 + i % 3, i % 4 == 0))
        table.append((name, other, 128, 128, (1, 4, 2)[i % 3], i % 4 == 2))
    for i, dims in enumerate(((80, 80), (96, 96), (64, 128), (128, 64), (96, 64), (80, 128))):
        kind, other = ("float16", "bfloat16") if i % 2 else ("bfloat16", "float16")
        table += [("causal", kind, *dims, 2, False), ("bias", other, *dims, 1, False)]
        table += [("plain", other, *dims, 1, True), ("softcap", kind, *dims, 2, False)]
    return table


def _problem(job: Job, rng: random.Random):
    import torch

    name, dtype, d, dv, group, _ = job
    kind = getattr(torch, dtype)
    batch, kv_heads = rng.choice((1, 2, 3)), rng.choice((1, 2))
    lengths = [rng.choice((1, 31, 64, 65, 127, 128, 129, 200, 257, 333, 500)) for _ in range(2)]
    sq, sk = lengths if rng.random() < 0.5 else (lengths[0], lengths[0])
    heads = kv_heads * group

    def make(b, h, s, n):
        return torch.randn(b, s, h, n, device="cuda", dtype=kind).transpose(1, 2).requires_grad_()

    keep = torch.rand(batch, sk, device="cuda") < 0.8
    keep[:, 0] = True
    like = {"device": "cuda", "dtype": torch.bfloat16}
    aux = [
        torch.randn(heads, sq, sk, **like),
        torch.randn(batch, heads, sq, sk, **like),
        torch.randn(1, heads, sq + sk + 514, 2, **like),
        torch.rand(heads, device="cuda") * 0.5,
        keep,
        torch.randn(32, heads, device="cuda"),
        torch.randn(batch, sk, device="cuda"),
        torch.rand(sq, **like),
    ]
    if name.startswith("fills"):  # some keys, and all of some rows, as in a padding mask
        fill = rng.choice((torch.finfo(torch.bfloat16).min, -1e9))
        rows = torch.rand(batch, 1, sq, 1, device="cuda") < 0.3
        aux[1].masked_fill_(rows | (torch.rand_like(aux[1][:, :1]) < 0.3), fill)
        aux[6].masked_fill_(torch.arange(sk, device="cuda") < sk // 3, fill)
    for slot in PROGRAMS[name][2]:
        aux[slot].requires_grad_()
    return make(batch, heads, sq, d), make(batch, kv_heads, sk, d), make(batch, kv_heads, sk, dv), aux


def _spec(name: str, scale: float):
    from fa4_inductor.spec import AttentionSpec, AuxSpec, parse_expr

    kinds = (("bfloat16", 3), ("bfloat16", 4), ("bfloat16", 4), ("float32", 1), ("bool", 2), ("float32", 2))
    aux = tuple(AuxSpec(*k) for k in (*kinds, ("float32", 2), ("bfloat16", 1)))
    score, keep, _ = PROGRAMS[name]
    return AttentionSpec(scale, score=parse_expr(score, aux), keep=parse_expr(keep, aux), aux=aux, num_sizes=1)


def _wrong(job: Job, rng: random.Random) -> str:
    """What is wrong about the gradients of one random problem; "" when they are right."""
    import torch

    from fa4_inductor.kernels.reference import attention_reference
    from fa4_inductor.kernels.reference_backward import backward_reference
    from fa4_inductor.runtime.ops import ATTENTION, ATTENTION_WITH_LSE

    name, dtype, d, _, _, grad_lse = job
    learned, program, sizes = PROGRAMS[name][2], _spec(name, d**-0.5), (rng.choice((1, 50, 128, 300)),)
    q, k, v, aux = _problem(job, rng)
    args = (q, k, v, aux, program.text, list(sizes), "cute")
    wanted = (q, k, v, *(aux[slot] for slot in learned))
    d_lse = None
    if grad_lse:
        out, lse = ATTENTION_WITH_LSE(*args)
        d_lse = torch.randn_like(lse).masked_fill(lse == -torch.inf, 0.0)
        grad_out = torch.randn_like(out)
        got = torch.autograd.grad((out, lse), wanted, (grad_out, d_lse))
    else:
        out = ATTENTION(*args)
        grad_out = torch.randn_like(out)
        got = torch.autograd.grad(out, wanted, grad_out)
    # a fill swallows the score in fp32, and must not in fp64
    wide = torch.float32 if name.startswith("fills") else torch.float64
    exact, fixed = [t.detach().to(wide) for t in (q, k, v)], [t.detach() for t in aux]
    out_, lse_ = attention_reference(*exact, fixed, program, sizes, need_lse=True, dtype=wide)
    rest = (*exact, out_, lse_, fixed, program, sizes)
    want = backward_reference(grad_out.to(wide), d_lse, *rest, learned=learned, dtype=wide)
    names = ("dq", "dk", "dv", *(f"aux{slot}" for slot in learned))
    for label, operand, a, b in zip(names, wanted, got, want, strict=True):
        if a.shape != operand.shape or a.dtype is not operand.dtype or not bool(a.isfinite().all()):
            return f"{label} is {a.dtype} {tuple(a.shape)} or not finite"
        b = b.double()
        # A sum of n rounded terms may lose sqrt(n) roundings of one of them, where its terms cancel.
        noise = 2.0**-8 * float(out.numel()) ** 0.5 / max(1.0, float(b.numel()) ** 0.5) * 0.2
        error, scale = float((a.double() - b).norm()), float(b.norm())
        if error > 0.012 * scale + noise * float(b.numel()) ** 0.5:
            return f"{label} is {error:.3g} off, of {scale:.3g}"
    return ""


def run_job(job: Job, count: int, seed: int) -> tuple[Job, int, list[str], float]:
    """Check one kernel on `count` random shapes; returns the failures."""
    import torch

    os.environ["FA4_INDUCTOR_STRICT"] = "1"
    torch.backends.cuda.matmul.allow_tf32 = False
    rng = random.Random(f"{seed} {job}")
    torch.manual_seed(rng.randrange(1 << 30))
    failures: list[str] = []
    started = time.time()
    try:
        for i in range(count):
            state = rng.getstate()
            wrong = _wrong(job, rng)
            if wrong:
                rng.setstate(state)
                shapes = [tuple(t.shape) for t in _problem(job, rng)[:2]]
                failures.append(f"{wrong} at {i}: {shapes}")
    except Exception:
        failures.append(traceback.format_exc()[-1500:])
    return job, count, failures, time.time() - started


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--per-job", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="names of programs, comma separated")
    args = parser.parse_args()
    table = [job for job in jobs() if not args.only or job[0] in args.only.split(",")]
    checked, failures = fwd_sweep.sweep(table, args.workers, args.per_job, args.seed, run_job)
    print(f"{checked} combinations, {len(failures)} failures")
    raise SystemExit(bool(failures))
