"""Result files, and their totals: one summary per run, a run being all records that differ in the model alone."""

from __future__ import annotations

import collections
import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path

from .measure import Record, run_of

FAILURES = ("wrong", "crash", "timeout")
COMMONEST_CHAINS = 12


def read(paths: Iterable[Path]) -> list[Record]:
    """The records of JSON-lines files. Raises `ValueError` that names the file and line of what is none."""
    records = []
    for path in paths:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            try:
                records.append(json.loads(line))
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}:{number} is not a record: {error}") from error
    return records


@dataclasses.dataclass(frozen=True)
class Totals:
    """A run in figures. `partly` counts models with some sites fused, `unfused` those with none of their sites."""

    records: tuple[Record, ...]

    @property
    def built(self) -> list[Record]:
        """Models that ran eagerly."""
        return [r for r in self.records if "sites" in r]

    @property
    def with_attention(self) -> list[Record]:
        """Models with at least one site."""
        return [r for r in self.built if r["sites"]]

    def total(self, field: str) -> int:
        """Sum of a field over the models with attention."""
        return sum(r.get(field) or 0 for r in self.with_attention)

    @property
    def fused(self) -> int:
        """Counted sites that are fused: what one model has more of than was counted makes up for no other's."""
        return sum(min(r.get("fused") or 0, r["sites"]) for r in self.with_attention)

    @property
    def fused_percent(self) -> float:
        """Share of the sites that are fused."""
        return 100 * self.fused / max(self.total("sites"), 1)

    @property
    def fully_fused(self) -> int:
        """Models whose every site is fused."""
        return sum((r.get("fused") or 0) >= r["sites"] for r in self.with_attention)

    @property
    def partly_fused(self) -> int:
        """Models some of whose sites are fused."""
        return sum(0 < (r.get("fused") or 0) < r["sites"] for r in self.with_attention)

    def statuses(self) -> collections.Counter[str]:
        """How many records have which status."""
        return collections.Counter(r["status"] for r in self.records)


def by_run(records: Iterable[Record]) -> dict[tuple[str, ...], Totals]:
    """Totals per (implementation of attention, `measure.run_of`), in the order in which they first occur."""
    groups: dict[tuple[str, ...], list[Record]] = {}
    for record in records:
        groups.setdefault((record["impl"], *run_of(record)), []).append(record)
    return {key: Totals(tuple(group)) for key, group in groups.items()}


def text(records: Iterable[Record]) -> str:
    """The summary of every run: totals, failures, and the commonest ways from q.k to the product with v."""
    return "\n\n".join(_run_text(key, totals) for key, totals in by_run(records).items())


def _title(impl: str, backend: str, dtype: str, padding: str, cache: str, compile_with: str, options: str) -> str:
    parts = [backend, options, f"compile {compile_with}", f"attention {impl}", dtype, f"padding {padding}", cache]
    return ", ".join(filter(None, parts))


def _run_text(key: tuple[str, ...], totals: Totals) -> str:
    softmaxes, calls = totals.total("sites_softmax"), totals.total("sites_sdpa")
    broken = sum(bool(r.get("graph_breaks")) for r in totals.with_attention)
    lines = [
        f"{_title(*key)}: attempted {len(totals.records)}, built {len(totals.built)}, "
        f"with attention {len(totals.with_attention)}",
        f"  sites {totals.total('sites')} (softmax {softmaxes}, sdpa {calls}), fused {totals.fused} = "
        f"{totals.fused_percent:.1f}%; models fully fused {totals.fully_fused}, partly {totals.partly_fused}",
        f"  status {dict(totals.statuses())}; {totals.total('graph_breaks')} graph breaks in {broken} models",
    ]
    for record in totals.records:
        if record["status"] in FAILURES:
            reason = " ".join(record.get("reason", "").split())[:150]
            lines.append(f"  {record['status']}: {record['model']} rel_err={record.get('rel_err')} {reason}")
    chains: collections.Counter[str] = collections.Counter()
    for record in totals.with_attention:
        chains.update(record.get("chains", {}))
    lines.append("  commonest op chains from QK^T to PV:")
    lines += [f"    {count:4d}  {chain}" for chain, count in chains.most_common(COMMONEST_CHAINS)]
    return "\n".join(lines)
