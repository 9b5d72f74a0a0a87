"""Examples run as they stand: a docstring, a `main()`, a guard, and no device that the machine may not have.

    python scripts/check_examples.py [ROOT]
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path


def calls_main_when_run(tree: ast.Module) -> bool:
    """True for a top-level `if __name__ == "__main__":` whose body calls main()."""
    for node in tree.body:
        if isinstance(node, ast.If) and "__name__" in ast.unparse(node.test) and "__main__" in ast.unparse(node.test):
            return any(isinstance(c, ast.Call) and ast.unparse(c.func) == "main" for c in ast.walk(node))
    return False


def check_example(path: Path, name: str) -> list[str]:
    text = path.read_text()
    tree = ast.parse(text, name)
    problems = []
    if not ast.get_docstring(tree):
        problems.append(f"{name}: no docstring saying what it shows")
    if not any(isinstance(n, ast.FunctionDef) and n.name == "main" for n in tree.body):
        problems.append(f"{name}: no main()")
    if not calls_main_when_run(tree):
        problems.append(f'{name}: no `if __name__ == "__main__": main()`')
    literals = [n for n in ast.walk(tree) if isinstance(n, ast.Constant) and str(n.value).split(":")[0] == "cuda"]
    attributes = [n for n in ast.walk(tree) if isinstance(n, ast.Attribute) and n.attr == "cuda"]
    moves = [n for n in attributes if ast.unparse(n.value) != "torch"]
    if (literals or moves) and "is_available()" not in text:
        line = (literals or moves)[0].lineno
        problems.append(f"{name}:{line}: uses cuda without asking torch.cuda.is_available()")
    return problems


def check(root: Path) -> list[str]:
    """Violations in `root/examples`, as `path[:line]: message`."""
    paths = sorted((root / "examples").glob("*.py"))
    return [problem for path in paths for problem in check_example(path, path.relative_to(root).as_posix())]


def main(argv: list[str]) -> int:
    root = Path(argv[0]) if argv else Path(__file__).resolve().parent.parent
    problems = check(root)
    print("\n".join(problems) if problems else "examples: each runs as it stands")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
