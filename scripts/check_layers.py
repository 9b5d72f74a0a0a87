"""Import direction of fa4_inductor, as the table in docs/architecture.md states it.

    python scripts/check_layers.py [ROOT]

Every import statement counts, also inside functions and under TYPE_CHECKING. Besides:
cutlass only in kernels/cute (and, inside a function, in runtime/compile.py), no torch.fx in kernels/cute.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGE = "fa4_inductor"
LEAVES = {"errors", "settings", "log"}
# stage -> stages it may import (its own always); anything not named here sits on top and may import all.
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "settings": {"errors"},
    "log": {"errors", "settings"},
    "spec": {"errors"},
    "capture": LEAVES | {"spec"},
    "normalize": LEAVES | {"spec", "capture"},
    "patterns": LEAVES | {"spec", "capture", "normalize"},
    "analysis": LEAVES | {"spec"},
    "runtime.target": LEAVES | {"spec"},
    "lowering": LEAVES | {"spec", "analysis", "runtime.target"},
    "kernels": LEAVES | {"spec", "capture", "analysis", "lowering", "runtime.target"},
    "kernels.cute": set(),
    "runtime": LEAVES | {"spec", "analysis", "lowering", "kernels", "kernels.cute", "runtime.target"},
}
CUTLASS = {"cutlass", "cuda"}
LAZY_CUTLASS = {"runtime/compile.py"}


@dataclass(frozen=True)
class Import:
    """One imported module, absolute, with where it stands."""

    module: str
    line: int
    lazy: bool  # inside a function


def stage_of(module: str) -> str:
    """The stage a module of ours belongs to: `fa4_inductor.kernels.cute.softmax` -> `kernels.cute`."""
    parts = module.split(".")[1:]
    for length in (2, 1):
        name = ".".join(parts[:length])
        if len(parts) >= length and name in ALLOWED:
            return name
    return "top"


def imports_of(tree: ast.Module, module: str, is_package: bool) -> Iterator[Import]:
    """All imports of a module, relative ones resolved; `from a import b` yields `a.b`."""
    lazy = {id(n) for f in ast.walk(tree) if isinstance(f, ast.FunctionDef | ast.AsyncFunctionDef) for n in ast.walk(f)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, node.lineno, id(node) in lazy) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = module.split(".")
                keep = len(parents) - node.level + is_package
                base = ".".join([*parents[:keep], *([node.module] if node.module else [])])
            yield from (Import(f"{base}.{alias.name}", node.lineno, id(node) in lazy) for alias in node.names)


def violation(path: str, stage: str, item: Import) -> str | None:
    """Why this import is not allowed there, or None."""
    root = item.module.split(".")[0]
    if root in CUTLASS and stage != "kernels.cute":
        if not (path in LAZY_CUTLASS and item.lazy):
            return f"imports {item.module}: only kernels/cute may (and runtime/compile.py inside a function)"
    if stage == "kernels.cute" and item.module.startswith("torch.fx"):
        return "imports torch.fx: kernels never see the graph"
    if root == PACKAGE and stage != "top":
        target = stage_of(item.module)
        if target != stage and target not in ALLOWED[stage]:
            return f"({stage}) imports {item.module} ({target}), which is not above it in docs/architecture.md"
    return None


def check(root: Path) -> list[str]:
    """Violations in `root/fa4_inductor`, as `path:line: message`."""
    problems = []
    package = root / PACKAGE
    for path in sorted(package.rglob("*.py")):
        relative = path.relative_to(package)
        is_package = relative.name == "__init__.py"
        dotted = ".".join([PACKAGE, *relative.with_suffix("").parts[: -1 if is_package else None]])
        stage = stage_of(dotted)
        for item in imports_of(ast.parse(path.read_text(), str(path)), dotted, is_package):
            if message := violation(relative.as_posix(), stage, item):
                problems.append(f"{PACKAGE}/{relative.as_posix()}:{item.line}: {message}")
    return problems


def main(argv: list[str]) -> int:
    root = Path(argv[0]) if argv else Path(__file__).resolve().parent.parent
    problems = check(root)
    print("\n".join(problems) if problems else "layers: every import points upwards")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
