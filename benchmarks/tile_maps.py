"""What tile maps give: time against the kept part of masks that depend on data, and what making the map costs.

    python benchmarks/tile_maps.py --peers flex

For each mask (packed documents, key padding, random blocks) the time of one attention with its map and
without one, of making the map, of flex_attention with a BlockMask, and TFLOP/s over kept scores. Calls are timed as
replays of CUDA graphs, in turn.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import results_io
import torch
from kernel_ours import overridden
from kernels import CALLS_PER_GRAPH, in_graph, parse_variants, time_interleaved
from torch import Tensor

from fa4_inductor.kernels.graph_aux import eager_tile_map
from fa4_inductor.lowering.split_config import Variant
from fa4_inductor.lowering.tile_map import map_source, with_tile_map
from fa4_inductor.runtime import compile as compiler
from fa4_inductor.runtime import launch
from fa4_inductor.settings import Settings
from fa4_inductor.spec import AttentionSpec, parse_spec

HEADS, TOKENS = 16, 16384
CAUSAL = "(kv_idx <= q_idx)"
Mod = Callable[..., Tensor]


@dataclass(frozen=True)
class Mask:
    """keep over one aux tensor, the same for flex_attention, and the tensors (batch, seqlen) to measure."""

    keep: str
    aux: str
    mod: Callable[[Tensor], Mod]
    tensors: dict[str, Callable[[int, int], Tensor]]


def _documents(length: int) -> Callable[[int, int], Tensor]:
    return lambda b, s: (torch.arange(s, device="cuda") // length).int().repeat(b, 1)


def _random_documents(b: int, s: int) -> Tensor:
    return torch.cumsum(torch.rand(b, s, device="cuda") < 1 / 1000, 1).int()


def _kept(part: float) -> Callable[[int, int], Tensor]:
    return lambda b, s: (torch.arange(s, device="cuda") < int(s * part)).repeat(b, 1)


def _blocks(part: float) -> Callable[[int, int], Tensor]:
    def make(b: int, s: int) -> Tensor:
        blocks = torch.rand(b, 1, s // 128, s // 128, device="cuda") < part
        blocks |= torch.eye(s // 128, dtype=torch.bool, device="cuda")
        return blocks.repeat_interleave(128, 2).repeat_interleave(128, 3).contiguous()

    return make


_PARTS = {f"{part:.0%}": part for part in (0.25, 0.5, 0.75, 1.0)}
_PADDING = {name: _kept(part) for name, part in _PARTS.items()}
MASKS = {
    "documents, causal": Mask(
        f"{CAUSAL} & (aux0[b, kv_idx] == aux0[b, q_idx])",
        "int32[2]",
        lambda ids: lambda b, h, q, k: (q >= k) & (ids[b, q] == ids[b, k]),
        {f"of {n}": _documents(n) for n in (500, 1000, 4096)} | {"random": _random_documents},
    ),
    "padding, causal": Mask(
        f"{CAUSAL} & aux0[b, kv_idx]", "bool[2]", lambda kept: lambda b, h, q, k: (q >= k) & kept[b, k], _PADDING
    ),
    "padding": Mask("aux0[b, kv_idx]", "bool[2]", lambda kept: lambda b, h, q, k: kept[b, k], _PADDING),
    "dense blocks": Mask(
        "aux0[b, 0, q_idx, kv_idx]",
        "bool[4]",
        lambda mask: lambda b, h, q, k: mask[b, 0, q, k],
        {name: _blocks(part) for name, part in {"10%": 0.1, **_PARTS}.items()},
    ),
}


def spec_of(mask: Mask, head_dim: int) -> AttentionSpec:
    return parse_spec(
        f"fa4/1; aux={mask.aux}; sizes=0; scale={head_dim**-0.5!r}; score=score; keep={mask.keep}; empty_row=zero"
    )


def plain_spec(head_dim: int) -> AttentionSpec:
    return AttentionSpec(head_dim**-0.5)


def mapped(spec: AttentionSpec, head_dim: int) -> AttentionSpec:
    config, _ = compiler.forward_config(with_tile_map(spec, 0, 0), head_dim, head_dim, long_q=True, regular=True)
    assert config is not None
    return with_tile_map(spec, config.tile_m, config.tile_n)


def keys(head_dims: list[int], target: Any) -> list[Any]:
    """The kernels of all cases."""
    found = {}
    options: dict[str, Any] = {"variant": Variant.LONG, "regular": True}
    for d in head_dims:
        for mask in MASKS.values():
            spec, with_map = spec_of(mask, d), mapped(spec_of(mask, d), d)
            for s in (spec, with_map, plain_spec(d)):
                found[compiler.forward_key(s.text, torch.bfloat16, d, d, 1, False, target, **options)] = 0
            tiles = with_map.tile_map
            assert tiles is not None
            program = map_source(with_map).program
            found[compiler.tile_map_key(program, tiles.tile_m, tiles.tile_n, target, regular=True)] = 0
    return list(found)


def configured(call: Callable[[], Tensor], overrides: dict[str, Any]) -> Callable[[], Tensor]:
    """The op with some fields of its kernel's configuration changed; for calls that a CUDA graph repeats."""

    def run() -> Tensor:
        with overridden(overrides):
            launch.clear_plans()
            out = call()
            launch.clear_plans()
        return out

    return run


def calls_of(
    mask: Mask, head_dim: int, aux: Tensor, peers: list[str], variants: list[dict[str, Any]]
) -> tuple[dict[str, Any], AttentionSpec, float]:
    """The calls to time, the spec with its map, and the largest difference between the results."""
    shape = (aux.shape[0], aux.shape[-1], HEADS, head_dim)
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for _ in range(3))
    spec = spec_of(mask, head_dim)
    with_map = mapped(spec, head_dim)

    def make_map() -> Tensor:
        return eager_tile_map(with_map, q, k, [aux])

    found = make_map()
    forward = launch.forward_without_lse

    def attention(overrides: dict[str, Any], spec: AttentionSpec, *tensors: Tensor) -> Callable[[], Tensor]:
        return configured(lambda: forward(q, k, v, tensors, spec.text, [], "cute"), overrides)

    runs = {
        "with map": attention({}, with_map, aux, found),
        **{f"with map {o}": attention(o, with_map, aux, found) for o in variants},
        "without": attention({}, spec, aux),
        "map": make_map,
        "plain": attention({}, plain_spec(head_dim)),
    }
    difference = float((runs["with map"]().float() - runs["without"]().float()).abs().max())
    if "flex" in peers:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        torch._dynamo.config.recompile_limit = 256
        block_mask = create_block_mask(mask.mod(aux), shape[0], None, shape[1], shape[1], device="cuda")
        flex = torch.compile(flex_attention, dynamic=False)
        runs["flex"] = lambda: flex(q, k, v, block_mask=block_mask)
        runs["flex"]()
    return runs, with_map, difference


def measure(name: str, kind: str, head_dim: int, seqlen: int, args: argparse.Namespace) -> dict[str, Any]:
    mask, batch = MASKS[name], max(1, TOKENS // seqlen)
    aux = mask.tensors[kind](batch, seqlen)
    runs, spec, difference = calls_of(mask, head_dim, aux, args.peers.split(","), parse_variants(args.variants)[1:])
    times = time_interleaved({n: in_graph([run]) for n, run in runs.items()}, args.rounds, args.budget_ms)
    us = {n: 1e3 * ms / CALLS_PER_GRAPH for n, ms in times.items()}
    kept, found = _kept_fraction(mask, aux), runs["map"]()
    visited = float(found[..., 0].sum()) / (found.shape[0] * found.shape[2] * (found.shape[3] - 2))
    flops = 4.0 * batch * HEADS * seqlen**2 * head_dim * kept
    return {
        "mask": f"{name} {kind}", "D": head_dim, "S": seqlen, "kept": kept, "visited": visited, "us": us,
        "tflops": {n: 1e-6 * flops / t for n, t in us.items() if n not in ("map", "plain")},
        "map part": us["map"] / us["with map"], "of tiles": us["plain"] * visited / us["with map"],
        "difference": difference,
    }  # fmt: skip


def _kept_fraction(mask: Mask, aux: Tensor) -> float:
    (batch, *_, seqlen), kept, mod = aux.shape, 0, mask.mod(aux)
    keys = torch.arange(seqlen, device="cuda")[None]
    for b in range(batch):
        for first in range(0, seqlen, 1024):
            rows = torch.arange(first, min(first + 1024, seqlen), device="cuda")[:, None]
            kept += int(mod(torch.tensor(b, device="cuda"), 0, rows, keys).expand(len(rows), seqlen).sum())
    return kept / (batch * seqlen**2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head-dims", default="128,64")
    parser.add_argument("--seqlens", default="8192", help="comma separated; 16k tokens in all")
    parser.add_argument("--peers", default="flex", help="flex or none")
    parser.add_argument("--only", default="", help="substring of the mask")
    parser.add_argument("--variants", default="", help="further configurations, as in benchmarks/kernels.py")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--budget-ms", type=float, default=10.0)
    parser.add_argument("--build", action="store_true", help="only build the kernels, into the kernel cache")
    parser.add_argument("--results", type=Path, default=results_io.RESULTS)
    args = parser.parse_args()
    head_dims = [int(d) for d in args.head_dims.split(",")]
    if args.build:
        from fa4_inductor.runtime.target import target_for
        from fa4_inductor.runtime.workers import build_all

        arch = None if torch.cuda.is_available() else "sm_90a"
        print(build_all(keys(head_dims, target_for("cuda", arch)), Settings.from_env()).values())
        if not torch.cuda.is_available():
            return
    torch.manual_seed(0)
    results = []
    seqlens = [int(s) for s in args.seqlens.split(",")]
    kinds = [(name, kind) for name, mask in MASKS.items() for kind in mask.tensors if args.only in f"{name} {kind}"]
    for d, seqlen, (name, kind) in itertools.product(head_dims, seqlens, kinds):
        if args.build:
            aux = MASKS[name].tensors[kind](max(1, TOKENS // seqlen), seqlen)
            calls_of(MASKS[name], d, aux, args.peers.split(","), parse_variants(args.variants)[1:])
            continue
        results.append(measure(name, kind, d, seqlen, args))
        print(row_of(results[-1]), flush=True)
        write(results, args.results)  # an interrupted run keeps what it has


def write(results: list[dict[str, Any]], folder: Path) -> Path:
    rows = [row_of(r) for r in results]
    note = (
        f"bf16, {HEADS} heads, {TOKENS} tokens in all; us of one call, TFLOP/s over kept scores in brackets. "
        "`visited`: part of the tiles that the map lists; `plain rate`: speed over these tiles relative to our plain "
        "kernel's."
    )
    tables = [note, results_io.markdown_table(rows, list(rows[0]))]
    return results_io.write("tile_maps", results_io.provenance("cuda"), results, tables, folder)


def row_of(result: dict[str, Any]) -> dict[str, str]:
    row = {name: str(result[name]) for name in ("mask", "D", "S")}
    row |= {name: f"{result[name]:.1%}" for name in ("kept", "visited")}
    for name, us in result["us"].items():
        rate = result["tflops"].get(name)
        row[name] = f"{us:.1f}" + (f" ({rate:.0f})" if rate else "")
    row |= {"map / call": f"{result['map part']:.1%}", "plain rate": f"{result['of tiles']:.2f}"}
    return row | {"difference": f"{result['difference']:.1e}"}


if __name__ == "__main__":
    main()
