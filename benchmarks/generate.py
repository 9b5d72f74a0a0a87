"""`generate()` of whole models on one GPU: tokens per second with the prefill in it, under Inductor and under fa4.

    python benchmarks/models.py --suite generate [--models llama,gemma2] [--batches 1,16] [--prompts 512]

The model's forward is compiled, so prefill and decode steps both are. Caches: a dynamic one through a compile for all
lengths, a static one, and on request (`--caches graphs`) a static one with CUDA graphs (mode="reduce-overhead"), which
with torch 2.11 and transformers 5.17 ends every backend's process, Inductor's own included.

The greedy tokens are checked against the uncompiled model, which is shown prompt and tokens at once: `agree` is the
share of steps whose token it would take too, `gap` by how much, at most, its largest logit exceeds the one of the token
taken, and `noise` how much its own logits move, at most, when it runs in float32.
"""

from __future__ import annotations

import argparse
import copy
import operator
import os
import sys
import time
from pathlib import Path
from typing import Any

from child import Child, run_batch, serve

HERE = Path(__file__).resolve().parent
# model -> attention implementations under Inductor; fa4 gets the first, which is what transformers takes by default.
VARIANTS: dict[str, tuple[str, ...]] = {
    "llama": ("sdpa", "flex_attention"),
    "gemma2": ("eager", "flex_attention"),
    "gpt_oss": ("eager", "flex_attention"),
}
CACHES = {"dynamic": (None, "default"), "static": ("static", "default"), "graphs": ("static", "reduce-overhead")}
COLUMNS = ["model", "batch", "prompt", "cache", "backend", "attn", "tokens_s", "ms_token", "first_call_s", "graphs"]
COLUMNS += ["kernels", "fused", "agree", "gap", "noise", "note"]


# ------------------------------------------------------------------------------------------- inside one process
def worker(name: str, attn: str, backend: str, cache: str, batch: int, prompt: int, new_tokens: int) -> None:
    """Compiles by generating once, checks the tokens, then times as often as it is asked to."""
    sys.path.insert(0, str(HERE.parent))
    import torch

    from fa4_inductor import measure, model_zoo

    torch._dynamo.config.recompile_limit = 64
    device = os.environ.get("FA4_BENCH_DEVICE", "cuda")
    size = os.environ.get("FA4_BENCH_SIZE", "bench")
    half = torch.bfloat16
    case = model_zoo.build(name, attn, size=size, dtype=half, device=device, batch=batch, seqlen=prompt)
    ids = case.inputs["input_ids"]
    mask = case.inputs.get("attention_mask", torch.ones_like(ids))
    implementation, mode = CACHES[cache]
    dynamic = True if cache == "dynamic" else None
    compiled = torch.compile(case.model.forward, backend=backend, mode=mode, dynamic=dynamic)

    def generate() -> torch.Tensor:
        case.model.forward = compiled
        try:
            return case.model.generate(
                ids, attention_mask=mask, max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=False,
                use_cache=True, pad_token_id=0, cache_implementation=implementation, disable_compile=True,
            )  # fmt: skip
        finally:
            del case.model.forward  # the attribute that hides the class's own

    first = measure.first_call_seconds(generate, device)
    tokens = generate()
    counters = torch._dynamo.utils.counters
    facts: dict[str, Any] = dict(first_call_s=round(first, 1), graphs=counters["stats"]["unique_graphs"])
    if backend == "fa4":
        ours = counters["fa4"]
        facts |= dict(fused=f"{ours['fused']}/{ours['found']}", kernels=ours["kernel_compiles"])
    facts |= agreement(case.model, tokens, mask, new_tokens)
    serve(facts, lambda: one_round(generate, batch * new_tokens, device))


def agreement(model: Any, tokens: Any, mask: Any, new_tokens: int) -> dict[str, float]:
    """How the uncompiled model, shown all tokens at once, judges the last `new_tokens` of them."""
    import torch

    whole = torch.cat([mask, mask.new_ones(mask.shape[0], new_tokens)], dim=1)[:, :-1]

    def logits(model: Any) -> torch.Tensor:
        with torch.no_grad():
            output = model(tokens[:, :-1], attention_mask=whole, use_cache=False, logits_to_keep=new_tokens)
        return output.logits.float()

    taken, half = tokens[:, -new_tokens:], logits(model)
    exact = logits(copy.deepcopy(model).float())
    gap = half.amax(-1) - half.gather(-1, taken[..., None])[..., 0]
    agree = (half.argmax(-1) == taken).float().mean()
    noise = (half - exact).abs().max()
    return dict(agree=round(agree.item(), 4), gap=round(gap.max().item(), 4), noise=round(noise.item(), 4))


def one_round(generate: Any, tokens: int, device: str) -> dict[str, float]:
    """One generation: tokens per second, and ms per step of the batch."""
    import torch

    begin = time.perf_counter()
    sequences = generate()
    if device == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - begin
    return dict(tokens_s=tokens / seconds, ms_token=1e3 * seconds * sequences.shape[0] / tokens)


# --------------------------------------------------------------------------------------------------- the parent
def children(args: argparse.Namespace) -> list[Child]:
    """The processes of all variants, those that are compared with each other side by side."""
    table = []
    for name in args.models.split(",") if args.models else list(VARIANTS):
        for cache in args.caches.split(","):
            for batch in args.batches.split(","):
                for prompt in args.prompts.split(","):
                    first, *others = VARIANTS.get(name, ("eager",))
                    runs = [(first, "fa4"), (first, "inductor"), *((attn, "inductor") for attn in others)]
                    for attn, backend in runs:
                        arguments = [name, attn, backend, cache, batch, prompt, str(args.new_tokens)]
                        labels = dict(model=name, batch=batch, prompt=prompt, cache=cache, backend=backend, attn=attn)
                        table.append(Child("generate.py", arguments, **labels))
    return table


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Per model and way of generating: fa4 beside the fastest of Inductor's attention implementations."""
    lines = []
    same = operator.itemgetter("model", "batch", "prompt", "cache")
    for key in dict.fromkeys(map(same, rows)):
        timed = [row for row in rows if same(row) == key and "tokens_s" in row]
        ours = [row for row in timed if row["backend"] == "fa4"]
        peers = [row for row in timed if row["backend"] != "fa4"]
        if ours and peers:
            best = max(peers, key=lambda row: row["tokens_s"])
            line = dict(zip(("model", "batch", "prompt", "cache"), key, strict=True))
            line |= dict(fa4=ours[0]["tokens_s"], best_inductor=best["tokens_s"], best_attn=best["attn"])
            lines.append(line | dict(ratio=round(ours[0]["tokens_s"] / best["tokens_s"], 2)))
    return lines


def run(args: argparse.Namespace) -> int:
    """The suite; 1 when a run failed, or a token was taken whose logit is further from the largest than the noise."""
    import results_io

    table, rows = children(args), []
    for start in range(0, len(table), args.batch):
        rows += run_batch(table[start : start + args.batch], args.jobs, args.rounds, args.wait_for)
    lines = summary(rows)
    results_io.print_table("generate", rows, COLUMNS)
    if lines:
        results_io.print_table("tokens per second, fa4 beside the best of Inductor", lines, list(lines[0]))
    if args.write:
        tables = [results_io.markdown_table(lines, list(lines[0]))] if lines else []
        tables.append(results_io.markdown_table(rows, COLUMNS))
        path = results_io.write("models_generate", results_io.provenance("cuda"), rows, tables, args.out)
        print(f"written to {path}")
    return int(any("tokens_s" not in row or row["gap"] > 2 * row["noise"] for row in rows))


if __name__ == "__main__":
    worker(*sys.argv[1:5], *map(int, sys.argv[5:8]))
