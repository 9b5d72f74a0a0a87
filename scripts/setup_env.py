"""Creates the virtual environment that `make demo` and `make test` run in. Standard library only, any Python >= 3.11.

Three situations, tried in this order:

1. The interpreter given already imports a CUDA build of torch and transformers and a driver answers (a GPU host,
   often without a network): its packages are reused, only what is missing is installed.
2. An NVIDIA driver answers: the normal torch from the configured package index.
3. No driver: a CPU build of torch, from PyTorch's CPU index where that answers within seconds, else the tested version
   from the configured package index (which may carry the CUDA libraries along).

A second run compares a stamp with pyproject.toml and this file and returns at once.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
TESTED_TORCH = "2.13.0"
STAMP_NAME = "fa4_setup.json"
# Distributions that `make lint` and the tests need; a reused GPU host may lack some and have no network to get them.
DEV_MODULES = ("pytest", "xdist", "pytest_timeout", "hypothesis", "ruff", "mypy")
PROBE = (
    "import json, sys, torch, transformers, rich, networkx, sympy;"
    "print(json.dumps([torch.__version__, torch.cuda.is_available(), [p for p in sys.path if 'site-packages' in p]]))"
)


class SetupError(Exception):
    """Set-up cannot go on; the message says what to do next."""


def say(text: str) -> None:
    print(f"set-up: {text}", flush=True)


def has_nvidia_driver() -> bool:
    """True when a driver answers: libcuda initialises, or nvidia-smi lists a device."""
    try:
        if ctypes.CDLL("libcuda.so.1").cuInit(0) == 0:
            return True
    except OSError:
        pass
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return False
    listing = subprocess.run([smi, "-L"], capture_output=True, text=True, check=False)
    return listing.returncode == 0 and "GPU" in listing.stdout


def cpu_index_answers(seconds: float = 4.0) -> bool:
    """True when PyTorch's CPU index serves the page of torch within `seconds`."""
    try:
        with urllib.request.urlopen(f"{CPU_INDEX}/torch/", timeout=seconds) as reply:
            return reply.status == 200
    except OSError:
        return False


def is_new_enough(torch_version: str) -> bool:
    return tuple(int(x) for x in torch_version.split("+")[0].split(".")[:2]) >= (2, 11)


def probe_host(python: str) -> tuple[str, list[str]] | None:
    """(torch version, site-packages folders) of an interpreter that already has a working CUDA stack, else None."""
    result = subprocess.run([python, "-c", PROBE], capture_output=True, text=True, check=False, cwd="/")
    if result.returncode != 0:
        return None
    version, cuda, paths = json.loads(result.stdout.strip().splitlines()[-1])
    return (version, paths) if cuda and is_new_enough(version) else None


def stamp_value() -> str:
    """Changes whenever the environment has to be looked at again."""
    digest = hashlib.sha256()
    for path in (ROOT / "pyproject.toml", Path(__file__)):
        digest.update(path.read_bytes())
    return f"{digest.hexdigest()[:16]} {sys.version_info.major}.{sys.version_info.minor} {ROOT}"


def is_current(venv: Path) -> bool:
    try:
        stamp = json.loads((venv / STAMP_NAME).read_text())
    except (OSError, ValueError):
        return False
    return stamp.get("value") == stamp_value() and (venv / "bin" / "python").exists()


def create_venv(venv: Path, pip_needed: bool) -> Path:
    """The venv's interpreter; an existing venv of the same Python is kept, a broken or foreign one is replaced."""
    python = venv / "bin" / "python"
    if python.exists():
        modules = "sys, pip" if pip_needed else "sys"
        probe = [str(python), "-c", f"import {modules}; print('%d.%d' % sys.version_info[:2])"]
        have = subprocess.run(probe, capture_output=True, text=True, check=False)
        if have.returncode == 0 and have.stdout.strip() == "{}.{}".format(*sys.version_info[:2]):
            return python
        say(f"{venv} is broken or of another Python: making it anew")
        shutil.rmtree(venv)
    say(f"virtual environment {venv} (Python {sys.version.split()[0]})")
    command = [sys.executable, "-m", "venv", str(venv)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0 and not pip_needed:  # Debian splits ensurepip off; the host's pip will do
        result = subprocess.run([*command, "--without-pip", "--clear"], capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise SetupError(
            f"python -m venv failed:\n{result.stdout}{result.stderr}\n"
            f"On Debian and Ubuntu: apt-get install python3-venv; or pass another interpreter: make PYTHON=... test"
        )
    return python


def pip(python: Path, *args: str, what: str, hint: str, quick: bool = False) -> None:
    """Runs pip install; `quick` gives up at once where there is no network."""
    command = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "--progress-bar", "off"]
    command += ["--retries", "0", "--timeout", "5"] if quick else []
    say(f"installing {what} ...")
    start = time.monotonic()
    result = subprocess.run([*command, *args], capture_output=True, text=True, check=False, cwd=ROOT)
    if result.returncode != 0:
        tail = "\n".join((result.stdout + result.stderr).strip().splitlines()[-12:])
        raise SetupError(f"installing {what} failed:\n{tail}\nNext: {hint}")
    say(f"installed {what} ({time.monotonic() - start:.0f} s)")


def can_import(python: Path, *modules: str) -> bool:
    code = "import importlib.util as u, sys; sys.exit(any(u.find_spec(m) is None for m in sys.argv[1:]))"
    return subprocess.run([str(python), "-c", code, *modules], check=False, cwd="/").returncode == 0


def installed_torch(python: Path) -> str | None:
    code = "import importlib.metadata as m; print(m.version('torch'))"
    result = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=False)
    return result.stdout.strip() if result.returncode == 0 else None


def reuse_host(python: Path, host: tuple[str, list[str]]) -> str:
    """Makes the host's packages visible in the venv through a .pth file, which works when the host is a venv too."""
    version, folders = host
    say(f"reusing torch {version} and the packages beside it from {sys.executable}")
    code = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    site = Path(subprocess.check_output([str(python), "-c", code], text=True).strip())
    (site / "host_packages.pth").write_text("".join(f"{folder}\n" for folder in folders))
    retry = "give the host a package index, then run make again"
    try:
        pip(python, "--no-deps", "--no-build-isolation", "-e", ".", what="fa4_inductor", hint=retry, quick=True)
    except SetupError:
        # Without an installed distribution there is no entry point: `import fa4_inductor` registers the backend.
        say("it cannot be built offline here: the source tree goes on the path instead")
        (site / "fa4_inductor_source.pth").write_text(f"{ROOT}\n")
    missing = [m for m in DEV_MODULES if not can_import(python, m)]
    if missing:
        names = {"xdist": "pytest-xdist", "pytest_timeout": "pytest-timeout"}
        wanted = [names.get(m, m) for m in missing]
        try:
            pip(python, *wanted, what="test tools", hint=retry, quick=True)
        except SetupError:
            say(f"no package index answers, so these stay missing: {', '.join(wanted)}. Next: {retry}")
    if not can_import(python, "cutlass"):
        say("CuTe-DSL is missing, so no kernel of ours will run. Next: pip install 'nvidia-cutlass-dsl[cu13]~=4.8.1'")
    return f"reuse {version}"


def install_torch(python: Path, driver: bool) -> str:
    """Installs torch unless a fitting one is there; returns where it came from."""
    have = installed_torch(python)
    if have is not None and is_new_enough(have) and driver == ("+cpu" not in have):
        return f"kept {have}"
    hint = "check the network and the package index (pip config list), then run make again"
    if driver:
        pip(python, "torch>=2.11", what="torch with CUDA (several GB, minutes)", hint=hint)
        return "index"
    if cpu_index_answers():
        what = f"torch {TESTED_TORCH} from the CPU index"
        pip(python, f"torch=={TESTED_TORCH}", "--index-url", CPU_INDEX, what=what, hint=hint)
        return "cpu index"
    say(f"PyTorch's CPU index does not answer; torch {TESTED_TORCH} comes from the configured package index")
    pip(python, f"torch=={TESTED_TORCH}", what=f"torch {TESTED_TORCH}", hint=hint)
    return "index"


def set_up(venv: Path) -> None:
    driver = has_nvidia_driver()
    say("NVIDIA driver found" if driver else "no NVIDIA driver: CPU build of torch")
    host = probe_host(sys.executable) if driver else None
    python = create_venv(venv, pip_needed=host is None)
    if host is not None:
        source = reuse_host(python, host)
    else:
        source = install_torch(python, driver)
        hint = "check the network and the package index (pip config list), then run make again"
        pip(python, "-e", ".[dev]", what="fa4_inductor with its test tools", hint=hint)
        if driver:
            pip(python, "nvidia-cutlass-dsl[cu13]~=4.8.1", what="CuTe-DSL libraries for CUDA 13", hint=hint)
    (venv / STAMP_NAME).write_text(json.dumps({"value": stamp_value(), "torch": source}))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv")
    parser.add_argument("--force", action="store_true", help="look at everything again, whatever the stamp says")
    args = parser.parse_args()
    venv = args.venv if args.venv.is_absolute() else Path.cwd() / args.venv
    if sys.version_info < (3, 11):  # noqa: UP036 - an older interpreter is what `make` may find
        say(f"Python {sys.version.split()[0]} is too old. Next: make PYTHON=/path/to/python3.11-or-newer test")
        return 1
    if is_current(venv) and not args.force:
        return 0
    os.environ.pop("PYTHONHOME", None)
    start = time.monotonic()
    try:
        set_up(venv)
    except (SetupError, OSError, subprocess.SubprocessError) as error:
        say(f"{error}")
        return 1
    say(f"ready ({time.monotonic() - start:.0f} s)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
