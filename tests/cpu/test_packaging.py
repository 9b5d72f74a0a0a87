"""What a user relies on before any model runs: registration, light imports, metadata that agrees with the code."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import fa4_inductor

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def in_fresh_process(code: str) -> str:
    """stdout of `code` in a new interpreter that sees the source tree and no installed copy."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="/", env=environment)
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


def test_version_is_the_projects() -> None:
    assert fa4_inductor.__version__ == PROJECT["version"]


def test_entry_point_leads_to_the_backend() -> None:
    module, _, name = PROJECT["entry-points"]["torch_dynamo_backends"]["fa4"].partition(":")
    assert (module, name) == ("fa4_inductor.backend", "fa4")
    assert callable(getattr(__import__(module, fromlist=[name]), name))


def test_import_registers_without_cutlass_or_transformers_and_leaves_cuda_alone() -> None:
    code = (
        "import sys, fa4_inductor, torch\n"
        "from torch._dynamo.backends.registry import list_backends, lookup_backend\n"
        "assert 'fa4' in list_backends()\n"
        "first = lookup_backend('fa4')\n"
        "assert first is lookup_backend('fa4')\n"
        "loaded = [m for m in ('cutlass', 'transformers') if m in sys.modules]\n"
        "print(loaded, torch.cuda.is_initialized())"
    )
    assert in_fresh_process(code) == "[] False"


def test_registering_twice_is_harmless() -> None:
    code = (
        "import fa4_inductor\n"
        "from torch._dynamo.backends.registry import lookup_backend\n"
        "lookup_backend('fa4'); fa4_inductor._register(); import fa4_inductor.backend\n"
        "print(lookup_backend('fa4') is fa4_inductor.backend.fa4)"
    )
    assert in_fresh_process(code) == "True"


def test_explain_is_the_function_also_after_its_module_is_imported() -> None:
    code = (
        "import fa4_inductor.explain\n"
        "from fa4_inductor.explain import Report\n"
        "from fa4_inductor import explain\n"
        "print(fa4_inductor.explain.__name__, explain is fa4_inductor.explain)"
    )
    assert in_fresh_process(code) == "explain True"


def test_import_without_torch_leaves_doctor_working() -> None:
    code = (
        "import importlib.util, sys\n"
        "real = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, package=None: None if name == 'torch' else real(name, package)\n"
        "sys.modules['torch'] = None\n"
        "import fa4_inductor, fa4_inductor.collect_env as env\n"
        "env.version_of = lambda name: None\n"
        "print(env.is_fine(env.collect()))"
    )
    assert in_fresh_process(code) == "False"


def test_kernel_toolchain_is_optional_metadata() -> None:
    marked = [d for d in PROJECT["dependencies"] if d.startswith(("nvidia-cutlass-dsl", "apache-tvm-ffi"))]
    assert len(marked) == 2
    assert all("sys_platform == 'linux'" in d and "x86_64" in d for d in marked)
