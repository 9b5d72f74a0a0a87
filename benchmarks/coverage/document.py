"""docs/supported.md: what backend "fa4" makes of every architecture, from records of `python -m benchmarks.coverage`.

Architectures with the same programs share a table; long texts are folded. Of several records of one measurement the
last counts.
"""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Callable, Iterable, Sequence

from benchmarks.results_io import ROOT, markdown_table

from .measure import Record, key_of, run_of
from .summary import FAILURES, by_run

PATH = ROOT / "docs" / "supported.md"
FOLD_CHARACTERS = 110
SHARED_BY = 4  # as many architectures with the same programs get a table of their own
PLAIN = "plain: every key, score = q.k * softmax_scale"
NO_AUTO_CLASS, NOT_OFFERED = "in no AutoModel mapping", "does not support an attention implementation"

_INTRO = """# Supported models

Every architecture of transformers that can be built from its config class alone, tiny and with random weights: how many
softmax(QKᵀ)V sites it runs, how many of them backend "fa4" understands and runs as one op, and as which program.
Each fused model is compared with its own uncompiled run with the same attention. The sites are counted by following
tensors through that run (`benchmarks/coverage/sites.py`), not by the backend that is measured. No architecture is
known to the backend by name.

Here every understood site runs through the readable reference implementation on a CPU; what the kernel for Hopper
takes on a GPU is said in the [README](../README.md). Numbers in programs are those of the tiny configs
(24 tokens, windows of 8, one padded row); programs are given without softmax_scale and the rule of empty rows, and
`aux` stands for a tensor of the model. [architecture.md](architecture.md) explains the notation.
"""


def render(records: Iterable[Record]) -> str:
    """The whole document. Raises `ValueError` when no record is of backend "fa4"."""
    latest = list({key_of(record): record for record in records}.values())
    ours = [record for record in latest if record["backend"] == "fa4"]
    if not ours:
        raise ValueError("no record is of backend fa4")
    main_run = collections.Counter(run_of(record) for record in ours).most_common(1)[0][0]
    architectures = _architectures([record for record in ours if run_of(record) == main_run])
    programs = _Programs(architectures)
    parts = [
        _INTRO,
        _provenance(latest),
        "## Summary\n\n" + _summary(latest),
        "## Not fused\n\n" + _not_fused(ours),
        "## Programs\n\n" + programs.table(),
        "## Architectures\n\n" + _tables(architectures, programs),
        "## Without attention, and not measured\n\n" + _rest(architectures),
    ]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def short_program(text: str) -> str:
    """A program's text without version, aux types, scale and rule of empty rows; trivial parts are left out."""
    fields = dict(part.split("=", 1) for part in text.split("; ")[1:])
    shown = [f"{name} = {fields[name]}" for name in ("score", "keep", "sink") if name in fields]
    return "; ".join(part for part in shown if part not in ("score = score", "keep = True")) or PLAIN


@dataclasses.dataclass(frozen=True)
class Architecture:
    """One model type: its records by implementation of attention, and the short programs of its sites."""

    name: str
    records: dict[str, Record]

    @property
    def programs(self) -> frozenset[str]:
        """Short texts of the programs that its fused sites became."""
        outcomes = [outcome for record in self.records.values() for outcome in record.get("outcomes", [])]
        return frozenset(short_program(o["program"]) for o in outcomes if o["status"] == "fused")

    @property
    def listed(self) -> bool:
        """Whether any of its records has a site, or tells of a failure."""
        records = self.records.values()
        return any(r.get("sites") or r.get("fused") or r["status"] in FAILURES for r in records)

    def cell(self, impl: str) -> str:
        """`fused/sites` of one implementation of attention."""
        record = self.records.get(impl, {})
        if "sites" in record:
            return f"{record.get('fused', 0)}/{record['sites']}"
        if record.get("status") != "skip":
            return record.get("status", "")
        return "not offered" if NOT_OFFERED in record["reason"] else "not built"


def _architectures(records: Iterable[Record]) -> list[Architecture]:
    grouped: dict[str, dict[str, Record]] = collections.defaultdict(dict)
    for record in records:
        grouped[record["model"]][record["impl"]] = record
    return [Architecture(name, grouped[name]) for name in sorted(grouped)]


def _left(record: Record) -> list[dict[str, str]]:
    """The outcomes of what a record's graphs hold unfused."""
    return [outcome for outcome in record.get("outcomes", []) if outcome["status"] != "fused"]


def notes(record: Record) -> list[str]:
    """Why sites of a record are not fused, one Markdown text per reason, and its failure."""
    texts = []
    if record["status"] in FAILURES:
        what = record.get("reason") or f"error {record['rel_err']:.1e} of the largest output"
        texts.append(f"**{record['status']}** ({record['impl']}, {record['dtype']}): {folded(what, plain)}")
    left, missing = _left(record), (record.get("sites") or 0) - (record.get("fused") or 0)
    besides = "" if missing > 0 else "besides the sites counted: "
    places: dict[tuple[str, str], list[str]] = collections.defaultdict(list)
    for outcome in left:
        places[outcome["reason"], _without_names(outcome["detail"])].append(outcome["location"] or "unknown place")
    for (reason, detail), where in places.items():
        texts.append(f"{besides}{len(where)} `{reason}` at {_places(where)}: {folded(detail, plain)}")
    if missing < 0:
        texts.append(f"{-missing} more than counted: only softmax ops and fused calls are")
    unseen = missing - len(left)
    if unseen > 0 and record["status"] not in FAILURES:
        breaks = f", {record['graph_breaks']} graph breaks" if record.get("graph_breaks") else ""
        texts.append(f"{unseen} in no captured graph, or not recognised as a site{breaks}")
    return texts


def _places(locations: Iterable[str]) -> str:
    """`a.py:1, 5; b.py:2` for locations `file:line`."""
    lines: dict[str, list[str]] = collections.defaultdict(list)
    for location in dict.fromkeys(locations):
        file, _, line = location.partition(":")
        lines[file] += [line] if line else []
    return "; ".join(f"{file}:{', '.join(numbers)}".rstrip(":") for file, numbers in lines.items())


def _without_names(detail: str) -> str:
    """The sentence with the numbers that FX gives to names taken off, so that equal causes read alike."""
    return re.sub(r"\b([a-z]+(?:_[a-z]+)*)_\d+\b", r"\1", detail)


def plain(text: str) -> str:
    """Text of a table cell that is no Markdown."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;").replace("`", "'")


def code(text: str) -> str:
    """Code of a table cell."""
    return f"`{text}`".replace("|", "\\|")


def folded(text: str, show: Callable[[str], str]) -> str:
    """`show(text)`; of a long text the beginning, which opens to all of it."""
    if len(text) <= FOLD_CHARACTERS:
        return show(text)
    return f"<details><summary>{show(text[: FOLD_CHARACTERS - 30] + ' ...')}</summary>{show(text)}</details>"


def _provenance(records: Iterable[Record]) -> str:
    """When, with what, by which commands; facts that differ between records are all named."""
    facts = [record["run"] for record in records if "run" in record]
    commands = dict.fromkeys(f["command"] for f in facts)
    dates = sorted({f["date"][:10] for f in facts})
    versions = dict.fromkeys(f"{name} {f['versions'][name]}" for f in facts for name in ("torch", "transformers"))
    commits = dict.fromkeys(f["commit"] for f in facts if f["commit"])
    said = [" to ".join(dict.fromkeys((dates[0], dates[-1])))] if dates else []
    said += [f"commit {', '.join(commits)}"] if commits else []
    written = "Written by `python -m benchmarks.coverage --write-docs FILE...` from the results of"
    body = "\n".join(f"    {command}" for command in commands)
    return f"{'; '.join([*said, ', '.join(versions)])}. {written}\n\n{body}"


def _summary(records: Sequence[Record]) -> str:
    rows = []
    runs = sorted(by_run(records).items(), key=lambda run: (run[0][1] != "fa4", run[0]))
    for (impl, backend, dtype, padding, cache, compile_with, options), totals in runs:
        statuses = totals.statuses()
        settings = ", ".join(part for part in (f"padding {padding}", cache, f"compile {compile_with}", options) if part)
        row: dict[str, object] = dict(backend=backend, attention=impl, dtype=dtype, settings=settings)
        row |= dict(attempted=len(totals.records), built=len(totals.built), sites=totals.total("sites"))
        row |= {"with attention": len(totals.with_attention), "fused": totals.fused}
        row |= {"fused, %": f"{totals.fused_percent:.1f}", "all sites fused": totals.fully_fused}
        row |= {name: statuses[name] for name in FAILURES}
        rows.append(row)
    columns = ["backend", "attention", "dtype", "settings", "attempted", "built", "with attention", "sites"]
    columns += ["fused", "fused, %", "all sites fused", *FAILURES]
    note = """Built are the model types that run with a tiny config; of the others most are parts of another model or do
not offer that implementation of attention. `inductor-passes` is Inductor's own `fuse_attention`.
"""
    return markdown_table(rows, columns) + "\n\n" + note


def _not_fused(records: Sequence[Record]) -> str:
    """What is left in any run of ours, architecture by architecture."""
    reasons: collections.Counter[str] = collections.Counter()
    left: dict[str, dict[str, None]] = collections.defaultdict(dict)
    for record in records:
        if (record.get("fused") or 0) < (record.get("sites") or 0):
            reasons.update(outcome["reason"] for outcome in _left(record))
        left[record["model"]] |= dict.fromkeys(notes(record))
    models: dict[str, list[str]] = collections.defaultdict(list)
    for a in _architectures(records):
        models["<br>".join(left[a.name])].append(f"[{a.name}](#model-{a.name})" if a.listed else a.name)
    rows = [{"architectures": ", ".join(names), "what": what} for what, names in models.items() if what]
    if not rows:
        return "Every site of every run above is fused, and no model is wrong."
    counted = markdown_table([dict(reason=f"`{r}`", sites=n) for r, n in reasons.most_common()], ["reason", "sites"])
    return (counted + "\n\n" if reasons else "") + markdown_table(rows, ["architectures", "what"])


class _Programs:
    """Numbers the programs, those of most architectures first."""

    def __init__(self, architectures: Iterable[Architecture]) -> None:
        self.users: collections.Counter[str] = collections.Counter()
        for architecture in architectures:
            self.users.update(architecture.programs)
        ordered = sorted(self.users, key=lambda text: (-self.users[text], text))
        self.numbers = {text: f"P{number}" for number, text in enumerate(ordered, 1)}

    def links(self, texts: Iterable[str]) -> str:
        """Links to the programs, in the order of their numbers."""
        numbers = [number for text, number in self.numbers.items() if text in set(texts)]
        return ", ".join(f"[{number}](#{number.lower()})" for number in numbers)

    def table(self) -> str:
        """All programs and how many architectures have them."""
        rows = []
        for text, number in self.numbers.items():
            program = text if text == PLAIN else folded(text, code)
            anchor = f'<a id="{number.lower()}"></a>{number}'
            rows.append(dict(id=anchor, program=program, architectures=str(self.users[text])))
        return markdown_table(rows, ["id", "program", "architectures"])


def _tables(architectures: Iterable[Architecture], programs: _Programs) -> str:
    """A table per set of programs that enough architectures share, and one for the others."""
    groups: dict[frozenset[str], list[Architecture]] = collections.defaultdict(list)
    for architecture in architectures:
        if architecture.listed:
            groups[architecture.programs].append(architecture)
    shared = [g for g in groups.items() if len(g[1]) >= SHARED_BY and g[0]]
    shared.sort(key=lambda group: (-len(group[1]), programs.links(group[0])))
    parts = ["`fused/sites` with `attn_implementation=` eager and sdpa."]
    for texts, members in shared:
        shown = "\n".join(f"- {programs.links([t])} {code(t) if t != PLAIN else t}" for t in sorted(texts))
        title = f"### {len(members)} architectures: {', '.join(n for t, n in programs.numbers.items() if t in texts)}"
        parts += [title, shown.replace("\\|", "|"), _rows(members, None)]
    others = [a for group in groups.items() if group not in shared for a in group[1]]
    if others:
        parts += ["### The others" if shared else "", _rows(sorted(others, key=lambda a: a.name), programs)]
    return "\n\n".join(filter(None, parts))


def _rows(members: Iterable[Architecture], programs: _Programs | None) -> str:
    rows = []
    for a in members:
        cls = next((record["cls"] for record in a.records.values() if "cls" in record), "")
        row = {"architecture": f'<a id="model-{a.name}"></a>{a.name}', "class": cls}
        row |= {impl: a.cell(impl) for impl in ("eager", "sdpa")}
        left = dict.fromkeys(note for record in a.records.values() for note in notes(record))
        row |= {"programs": programs.links(a.programs) if programs else "", "not fused, and why": "<br>".join(left)}
        rows.append(row)
    columns = ["architecture", "class", "eager", "sdpa", "programs", "not fused, and why"]
    return markdown_table(rows, [c for c in columns if any(row[c] for row in rows)])


def _rest(architectures: Sequence[Architecture]) -> str:
    """Architectures without a site, parts of others, and those that could not be built, folded."""
    none, parts, failed = [], [], []
    for a in architectures:
        records = list(a.records.values())
        if a.listed:
            continue
        if any("sites" in record for record in records):
            none.append(a.name)
        elif any(NO_AUTO_CLASS in record["reason"] for record in records):
            parts.append(a.name)
        else:
            shortest = min((" ".join(record["reason"].split()) for record in records), key=len)
            failed.append(f"- {a.name}: `{shortest[:FOLD_CHARACTERS].replace('`', '')}`")
    sections = (
        (f"{len(none)} without softmax attention", ", ".join(none)),
        (f"{len(parts)} that no auto class builds: parts of other models, or not for AutoModel", ", ".join(parts)),
        (f"{len(failed)} that no tiny config or input was found for", "\n".join(failed)),
    )
    folded = [f"<details><summary>{title}</summary>\n\n{body}\n\n</details>" for title, body in sections if body]
    return "\n\n".join(folded) or "None."
