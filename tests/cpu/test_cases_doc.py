"""docs/cases.md names every reported case once, and only tests and cases that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests.cpu.patterns.test_cases import ALL

DOCS = Path(__file__).resolve().parents[2] / "docs"
CASES = 34
LATER = ("training", "decode")


def rows() -> list[list[str]]:
    """Cells (case, reports, what has to hold, tests, left) of each case."""
    lines = (DOCS / "cases.md").read_text().splitlines()
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("| BC-")]


def functions(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def broken_links(text: str) -> list[str]:
    """Links to tests whose name is no function of that file, or no case of the corpus."""
    corpus = {case.name for case in ALL}
    broken = []
    for name, target in re.findall(r"\[(\w+)\]\(\.\./(tests/[\w/]+\.py)\)", text):
        path = DOCS.parent / target
        exists = path.is_file() and name in functions(path)
        if not exists or (target.startswith("tests/cases/") and name not in corpus):
            broken.append(f"{target}::{name}")
    return broken


def test_every_case_is_there_once() -> None:
    assert [row[0] for row in rows()] == [f"BC-{number:02}" for number in range(1, CASES + 1)]
    assert all(len(row) == 5 and row[2] for row in rows())


def test_reports_are_public_threads() -> None:
    for row in rows():
        links = re.findall(r"\[([\w-]+)#(\d+)\]\(https://github\.com/[\w-]+/([\w-]+)/issues/(\d+)\)", row[1])
        assert links and row[1].count("](") == len(links), row[0]
        assert all(shown == repo and number == issue for shown, number, repo, issue in links), row[0]


def test_named_tests_exist() -> None:
    assert broken_links((DOCS / "cases.md").read_text()) == []
    assert broken_links("[no_such](../tests/cpu/test_cases_doc.py)") == ["tests/cpu/test_cases_doc.py::no_such"]
    assert broken_links("[program](../tests/cases/case.py)") == ["tests/cases/case.py::program"]


def test_what_has_no_test_says_where_it_belongs() -> None:
    for case, _, _, tests, left in rows():
        assert re.search(r"\]\(\.\./tests/", tests) or left in LATER, case
        assert not left or left.startswith(LATER), case
