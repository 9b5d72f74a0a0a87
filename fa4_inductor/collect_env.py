"""What is installed, what the device is, whether the kernel cache works, and what to do about what is missing.

    python -m fa4_inductor doctor [--json]

Standard library imports only; torch and CuTe-DSL are looked at in other processes, so that a broken installation of
either is a finding and not a crash. Nothing here raises.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

OK, NOTE, MISSING = "ok", "note", "missing"
_TORCH_MIN = (2, 11)
_CUTLASS_PIN = "4.8"
_PROBE_SECONDS = 120

_TORCH_PROBE = """
import json, torch
facts = {"cuda_build": torch.version.cuda, "available": torch.cuda.is_available(), "devices": []}
if facts["available"]:
    for i in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(i)
        facts["devices"].append([p.name, p.major, p.minor, p.total_memory])
import fa4_inductor
from torch._dynamo.backends.registry import list_backends
facts["registered"] = "fa4" in list_backends()
facts["package"] = fa4_inductor.__file__
from fa4_inductor.settings import Settings
settings = Settings.from_env()
facts["cache_dir"], facts["disk_cache"] = str(settings.cache_dir), settings.disk_cache
print(json.dumps(facts))
"""
_CUTLASS_PROBE = "import cutlass, cutlass.cute, tvm_ffi, json; print(json.dumps({'cutlass': cutlass.__file__}))"


@dataclasses.dataclass(frozen=True)
class Check:
    """One finding. status: "ok", "note" (fine to live with) or "missing" (something needed here); remedy: a command."""

    name: str
    value: str
    status: str = OK
    remedy: str = ""


def version_of(distribution: str) -> str | None:
    """Installed version of a distribution, or None."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _probe(code: str) -> tuple[dict[str, Any] | None, str]:
    """(facts that `code` prints as JSON, "") from a fresh interpreter, or (None, the last line of its complaint)."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    command = [sys.executable, "-c", code]
    try:
        run = subprocess.run(
            command, capture_output=True, text=True, timeout=_PROBE_SECONDS, env=environment, check=False
        )
        return json.loads(run.stdout.strip().splitlines()[-1]), ""
    except subprocess.TimeoutExpired:
        return None, f"no answer within {_PROBE_SECONDS} s"
    except (OSError, ValueError, IndexError):
        lines = run.stderr.strip().splitlines()
        return None, lines[-1] if lines else f"exit code {run.returncode}"


def driver_version() -> str | None:
    """Version of the NVIDIA driver, from the kernel module or nvidia-smi; None without a driver."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
        return next(word for word in text.split() if word[0].isdigit() and word.count(".") >= 1)
    except (OSError, StopIteration):
        pass
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return None
    command = [smi, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return run.stdout.split("\n")[0].strip() or None if run.returncode == 0 else None


def _python_checks() -> list[Check]:
    python = Check("Python", f"{platform.python_version()} at {sys.executable}")
    if sys.version_info < (3, 11):  # noqa: UP036 - the wrong interpreter is what this looks for
        python = dataclasses.replace(python, status=MISSING, remedy="use Python 3.11 or newer")
    compiler = os.environ.get("CXX") or "g++"
    path = shutil.which(compiler)
    if path is None:
        remedy = "apt-get install g++ (Inductor needs it)"
        return [python, Check("C++ compiler", f"{compiler} not found", MISSING, remedy)]
    return [python, Check("C++ compiler", path)]


def _torch_checks(facts: dict[str, Any] | None, complaint: str) -> list[Check]:
    version = version_of("torch")
    if version is None:
        return [Check("torch", "not installed", MISSING, "pip install 'torch>=2.11'")]
    if tuple(int(x) for x in version.split("+")[0].split(".")[:2]) < _TORCH_MIN:
        return [Check("torch", f"{version} is too old", MISSING, "pip install -U 'torch>=2.11'")]
    if facts is None:
        remedy = "reinstall the package that the message names, then run doctor again"
        return [Check("torch", version), Check("fa4 backend", f"does not load: {complaint}", MISSING, remedy)]
    build = f"CUDA {facts['cuda_build']}" if facts["cuda_build"] else "CPU build"
    checks = [Check("torch", f"{version} ({build})")]
    if facts["registered"]:
        checks.append(Check("fa4 backend", f"registered, from {Path(facts['package']).parent}"))
    else:
        checks.append(Check("fa4 backend", "not registered", MISSING, "pip install -e . in the project's folder"))
    return checks


def _device_checks(facts: dict[str, Any] | None) -> list[Check]:
    driver = driver_version()
    checks = [Check("NVIDIA driver", driver or "none", OK if driver else NOTE)]
    devices = facts["devices"] if facts else []
    if not devices:
        if driver and facts:
            remedy = "install a CUDA build of torch that this driver supports: pip install torch"
            return [*checks, Check("GPU", "there is a driver, but torch sees no GPU", MISSING, remedy)]
        text = "none: matched attention runs through SDPA where that is faster, else as the user wrote it"
        return [*checks, Check("GPU", text, NOTE)]
    for name, major, minor, memory in devices:
        text = f"{name}, compute capability {major}.{minor}, {memory / 2**30:.0f} GiB"
        if major == 9:
            checks.append(Check("GPU", text + ": CuTe-DSL kernel for sm_90a"))
        else:
            checks.append(Check("GPU", text + ": no kernel of ours yet, attention runs through SDPA", NOTE))
    return checks


def _kernel_checks(facts: dict[str, Any] | None) -> list[Check]:
    """The kernel toolchain: needed where there is a Hopper GPU, otherwise only for compiling without one."""
    needed = MISSING if facts and any(major == 9 for _, major, *_ in facts["devices"]) else NOTE
    extra = "[cu13]" if facts and str(facts["cuda_build"]).startswith("13") else ""
    remedy = f"pip install 'nvidia-cutlass-dsl{extra}~=4.8.1' 'apache-tvm-ffi>=0.1.15'"
    checks = []
    for name in ("nvidia-cutlass-dsl", "apache-tvm-ffi"):
        version = version_of(name)
        if version is None:
            checks.append(Check(name, "not installed: no kernel of ours can be built", needed, remedy))
        elif name == "nvidia-cutlass-dsl" and not version.startswith(_CUTLASS_PIN):
            checks.append(Check(name, f"{version}: tested with {_CUTLASS_PIN}", NOTE, remedy))
        else:
            checks.append(Check(name, version))
    if all(version_of(name) for name in ("nvidia-cutlass-dsl", "apache-tvm-ffi")):
        found, complaint = _probe(_CUTLASS_PROBE)
        if found:
            checks.append(Check("CuTe-DSL", "imports"))
        else:
            checks.append(Check("CuTe-DSL", f"fails to import: {complaint}", needed, remedy))
    return checks


def _optional_checks() -> list[Check]:
    found = {name: version_of(name) for name in ("transformers", "triton", "flash-attn-4")}
    checks = [Check(name, version or "not installed", OK if version else NOTE) for name, version in found.items()]
    if found["transformers"] is None:
        checks[0] = dataclasses.replace(checks[0], remedy="pip install transformers (for the demo and explain)")
    return checks


def cache_checks(folder: Path, enabled: bool) -> list[Check]:
    """Whether the kernel cache can be written, and what it holds."""
    if not enabled:
        return [Check("kernel cache", "off (FA4_INDUCTOR_DISK_CACHE=0): every process compiles its kernels", NOTE)]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder):
            pass
        entries = list(folder.rglob("meta.json"))
        size = sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())
    except OSError as error:
        remedy = "set FA4_INDUCTOR_CACHE_DIR to a folder you can write; kernels work, but are compiled in every process"
        return [Check("kernel cache", f"{folder}: {error.strerror or error}", MISSING, remedy)]
    return [Check("kernel cache", f"{folder}: writable, {len(entries)} kernels, {size / 2**20:.1f} MiB")]


def collect() -> list[Check]:
    """All findings, in the order a person would look."""
    facts, complaint = _probe(_TORCH_PROBE) if version_of("torch") else (None, "torch is missing")
    checks = _python_checks() + _torch_checks(facts, complaint) + _device_checks(facts) + _kernel_checks(facts)
    if facts:
        checks += cache_checks(Path(facts["cache_dir"]), facts["disk_cache"])
    return checks + _optional_checks()


def is_fine(checks: Iterable[Check]) -> bool:
    """Whether nothing that is needed on this machine is missing."""
    return all(check.status != MISSING for check in checks)


def as_json(checks: Iterable[Check]) -> str:
    """The findings as a JSON object with "ok" and "checks"."""
    rows = list(checks)
    return json.dumps({"ok": is_fine(rows), "checks": [dataclasses.asdict(c) for c in rows]}, indent=2)
