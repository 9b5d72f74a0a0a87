"""Many random graphs: each must be fused and equal, or left alone for a reason and equal.

    python -m tests.fuzz.campaign --first 0 --graphs 1000 --record campaign.json --failures failures.txt
    python -m tests.fuzz.campaign --first 4711 --graphs 1 --show      # one graph: its source and its outcome
    python -m tests.fuzz.campaign --summary a.json b.json            # totals of records

A graph is its seed. What fails is reduced to fewer lines before it is reported.
"""

from __future__ import annotations

import argparse
import datetime
import json
import logging
import random
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tests.fuzz.outcome import Result, generate, judge, runs
from tests.fuzz.program import Program


def program_of(seed: int) -> Program:
    """The graph of a seed."""
    draw = random.Random(seed)
    return generate(lambda options: options[draw.randrange(len(options))])


def reduced(program: Program) -> Program:
    """A program with fewer lines that still fails, though perhaps in another way."""
    smaller = True
    while smaller:
        smaller = False
        for i in range(len(program.lines) - 1, -1, -1):
            candidate = replace(program, lines=program.lines[:i] + program.lines[i + 1 :])
            if runs(candidate) and judge(candidate).failure:
                program, smaller = candidate, True
        for name in program.results if len(program.results) > 1 else ():
            candidate = replace(program, results=tuple(r for r in program.results if r != name))
            if candidate.results and judge(candidate).failure:
                program, smaller = candidate, True
    text = program.source.split("\n", 1)[1]
    return replace(program, inputs=tuple(i for i in program.inputs if i.name in text))


def kind(result: Result) -> str:
    """What a graph counts as."""
    if result.failure:
        return "failed"
    if result.limit:
        return "known limit"
    return "fused" if result.fused else "declined" if result.declined else "no attention"


def run(first: int, graphs: int, failures: Any) -> dict[str, Any]:
    """Outcomes of seeds first..first+graphs-1, as counts."""
    kinds: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    begin = time.monotonic()
    for seed in range(first, first + graphs):
        program = program_of(seed)
        result = judge(program)
        kinds[kind(result)] += 1
        reasons.update(set(result.declined))
        if result.failure:
            small = reduced(program)
            print(f"# ---- seed {seed}: {result.failure}\n# reduced: {judge(small).failure}\n{small}", file=failures)
            failures.flush()
    return {
        "date": datetime.date.today().isoformat(),
        "commit": _commit(),
        "torch": torch.__version__,
        "first_seed": first,
        "graphs": graphs,
        "seconds": round(time.monotonic() - begin),
        "outcomes": dict(kinds.most_common()),
        "graphs_with_reason": dict(reasons.most_common()),
    }


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def totals(records: list[dict[str, Any]]) -> dict[str, Any]:
    """A record's slices added up."""
    outcomes: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    for record in records:
        outcomes.update(record["outcomes"])
        reasons.update(record["graphs_with_reason"])
    return {
        "graphs": sum(r["graphs"] for r in records),
        "seconds": sum(r["seconds"] for r in records),
        "outcomes": dict(outcomes.most_common()),
        "graphs_with_reason": dict(reasons.most_common()),
    }


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--graphs", type=int, default=300)
    parser.add_argument("--record", type=Path, help="append the counts to this JSON list")
    parser.add_argument("--failures", type=Path, help="write failing graphs here instead of to standard output")
    parser.add_argument("--summary", type=Path, nargs="+", help="print the totals of these records and stop")
    parser.add_argument("--show", action="store_true", help="print every graph and its outcome")
    args = parser.parse_args(argv)
    if args.summary:
        records = [record for path in args.summary for record in json.loads(path.read_text())]
        print(json.dumps(totals(records), indent=1))
        return 0
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    if args.show:
        for seed in range(args.first, args.first + args.graphs):
            program = program_of(seed)
            print(f"# ---- seed {seed}\n{program}{judge(program)}\n")
        return 0
    with open(args.failures, "a") if args.failures else sys.stdout as failures:
        record = run(args.first, args.graphs, failures)
    if args.record:
        earlier = json.loads(args.record.read_text()) if args.record.exists() else []
        args.record.write_text(json.dumps([*earlier, record], indent=1) + "\n")
    print(json.dumps(record), file=sys.stderr)
    return int(record["outcomes"].get("failed", 0) > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
