"""The checking scripts catch what they are for, and the project passes them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import check_examples  # noqa: E402
import check_layers  # noqa: E402
import check_sizes  # noqa: E402
import setup_env  # noqa: E402
import write_docs  # noqa: E402

Write = Callable[[str, str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a file into an otherwise empty project and returns the project's root."""

    def _write(name: str, text: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return tmp_path

    return _write


@pytest.mark.parametrize("script", [check_layers, check_sizes, check_examples], ids=lambda m: m.__name__)
def test_project_passes(script: ModuleType) -> None:
    assert script.check(ROOT) == []


@pytest.mark.parametrize(
    ("name", "text", "part"),
    [
        ("spec/a.py", "from fa4_inductor.capture import slice", "not above it"),
        ("spec/a.py", "def f():\n    from ..patterns import matcher", "not above it"),
        ("errors.py", "from . import settings", "not above it"),
        ("analysis/a.py", "import fa4_inductor.lowering.select", "not above it"),
        ("lowering/a.py", "from fa4_inductor.runtime.cache import x", "not above it"),
        ("kernels/sdpa.py", "from ..runtime import ops", "not above it"),
        ("kernels/cute/a.py", "from ...spec import expr", "not above it"),
        ("kernels/cute/a.py", "from torch.fx import Node", "torch.fx"),
        ("patterns/a.py", "import cutlass.cute as cute", "only kernels/cute"),
        ("runtime/compile.py", "import cutlass", "only kernels/cute"),
        ("runtime/launch.py", "def f():\n    import cutlass", "only kernels/cute"),
    ],
)
def test_layers_catches(write: Write, name: str, text: str, part: str) -> None:
    (problem,) = check_layers.check(write(f"fa4_inductor/{name}", text))
    assert part in problem
    assert problem.startswith(f"fa4_inductor/{name}:")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("spec/a.py", "from ..errors import Declined\nfrom . import expr"),
        ("spec/__init__.py", "from .expr import Expr\nfrom ..errors import Declined"),
        ("lowering/a.py", "from ..runtime.target import Target\nfrom ..analysis import facts"),
        ("runtime/compile.py", "def f():\n    import cutlass.cute"),
        ("runtime/a.py", "from ..kernels.cute import fwd"),
        ("kernels/cute/a.py", "import cutlass\nfrom .softmax import x\nimport torch"),
        ("backend.py", "from . import rewrite, runtime, patterns"),
        ("__init__.py", "from .explain import explain"),
    ],
)
def test_layers_allows(write: Write, name: str, text: str) -> None:
    assert check_layers.check(write(f"fa4_inductor/{name}", text)) == []


def test_layers_exit_code(write: Write) -> None:
    root = write("fa4_inductor/spec/a.py", "import fa4_inductor.backend")
    result = subprocess.run([sys.executable, ROOT / "scripts/check_layers.py", root], capture_output=True, text=True)
    assert result.returncode == 1
    assert "fa4_inductor/spec/a.py:1" in result.stdout


def _function(lines: int, docstring: int = 0) -> str:
    doc = ['    """Doc', *["    x"] * (docstring - 2), '    """'] if docstring else []
    return "\n".join(["def f():", *doc, *["    x = 1"] * (lines - 1)]) + "\n"


@pytest.mark.parametrize(
    ("name", "text", "caught"),
    [
        ("fa4_inductor/a.py", "x = 1\n" * 400, False),
        ("fa4_inductor/a.py", "x = 1\n" * 401, True),
        ("fa4_inductor/a.py", _function(60), False),
        ("fa4_inductor/a.py", _function(61), True),
        ("fa4_inductor/a.py", _function(60, docstring=9), False),
        ("fa4_inductor/kernels/cute/a.py", _function(150), False),
        ("fa4_inductor/kernels/cute/a.py", _function(151), True),
        ("tests/cpu/a.py", _function(61), True),
    ],
)
def test_sizes(write: Write, name: str, text: str, caught: bool) -> None:
    problems = check_sizes.check(write(name, text))
    assert bool(problems) == caught
    assert all(p.startswith(name) for p in problems)


GOOD_EXAMPLE = '"""Shows."""\ndef main():\n    pass\nif __name__ == "__main__":\n    main()\n'


@pytest.mark.parametrize(
    ("text", "part"),
    [
        (GOOD_EXAMPLE, None),
        (GOOD_EXAMPLE.replace('"""Shows."""\n', ""), "docstring"),
        (GOOD_EXAMPLE.replace("def main", "def run"), "no main()"),
        (GOOD_EXAMPLE.replace('    main()\n', "    pass\n"), "__main__"),
        (GOOD_EXAMPLE.replace("pass\n", 'x = "cuda:0"\n', 1), "is_available"),
        (GOOD_EXAMPLE.replace("pass\n", "x.cuda()\n", 1), "is_available"),
        (GOOD_EXAMPLE.replace("pass\n", 'x = "cuda" if torch.cuda.is_available() else "cpu"\n', 1), None),
    ],
)
def test_examples(write: Write, text: str, part: str | None) -> None:
    problems = check_examples.check(write("examples/a.py", text))
    if part is None:
        assert problems == []
    else:
        assert len(problems) == 1
        assert part in problems[0]


def test_setup_is_skipped_by_a_current_stamp(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").touch()
    assert not setup_env.is_current(tmp_path)
    (tmp_path / setup_env.STAMP_NAME).write_text(json.dumps({"value": setup_env.stamp_value()}))
    assert setup_env.is_current(tmp_path)
    (tmp_path / setup_env.STAMP_NAME).write_text('{"value": "older"}')
    assert not setup_env.is_current(tmp_path)


def test_setup_error_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    def fail(venv: Path) -> None:
        raise setup_env.SetupError("installing torch failed. Next: check the network")

    monkeypatch.setattr(setup_env, "set_up", fail)
    monkeypatch.setattr(sys, "argv", ["setup_env.py", "--venv", str(tmp_path / "venv")])
    assert setup_env.main() == 1
    assert "Next: check the network" in capsys.readouterr().out


def test_settings_docs_are_what_the_code_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert write_docs.main(["--check"]) == 0
    (tmp_path / "docs").mkdir()
    text = (ROOT / "docs" / "settings.md").read_text()
    (tmp_path / "docs" / "settings.md").write_text(text.replace("FA4_INDUCTOR_STRICT", "FA4_INDUCTOR_STERN"))
    monkeypatch.setattr(write_docs, "ROOT", tmp_path)
    assert write_docs.main(["--check"]) == 1
    assert write_docs.main([]) == 0
    assert (tmp_path / "docs" / "settings.md").read_text() == text
