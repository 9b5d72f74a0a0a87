"""CompileKey: everything a compiled kernel depends on, by name. Batch, lengths and strides are not in it."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import platform
import sys
from pathlib import Path
from typing import Any

_PACKAGE = Path(__file__).resolve().parent.parent
# A kernel's machine code is a function of these: the kernels, and all that turns program text into device code.
_SOURCES = ("kernels/cute", "lowering", "analysis", "spec")
_TOOLCHAIN = (
    "nvidia-cutlass-dsl",
    "nvidia-cutlass-dsl-libs-base",
    "nvidia-cutlass-dsl-libs-core",
    "nvidia-cutlass-dsl-libs-cu12",
    "nvidia-cutlass-dsl-libs-cu13",
    "apache-tvm-ffi",
)


@functools.cache
def toolchain_versions() -> tuple[tuple[str, str], ...]:
    """(name, version) of what turns source into machine code; absent packages are left out."""
    versions = [("python", f"{sys.version_info.major}.{sys.version_info.minor}"), ("machine", platform.machine())]
    for name in _TOOLCHAIN:
        try:
            versions.append((name, importlib.metadata.version(name)))
        except importlib.metadata.PackageNotFoundError:
            continue
    return tuple(versions)


@functools.cache
def source_fingerprint() -> str:
    """Hash of the names and contents of all our sources that shape a kernel's machine code."""
    return fingerprint_tree(_PACKAGE, _SOURCES)


def fingerprint_tree(root: Path, folders: tuple[str, ...]) -> str:
    """Hash of the names and contents of every `*.py` below `root/folder`, in name order."""
    digest = hashlib.sha256()
    for folder in folders:
        for path in sorted((root / folder).rglob("*.py")):
            content = path.read_bytes()
            digest.update(f"{path.relative_to(root).as_posix()}\0{len(content)}\0".encode())
            digest.update(content)
    return digest.hexdigest()


@dataclasses.dataclass(frozen=True)
class CompileKey:
    """Identity of one compiled kernel; equal keys mean interchangeable kernels, in any process on this kind of machine.

    Attributes:
        program: AttentionSpec text, which carries aux dtypes and ranks and the number of sizes.
        dtype: of q, k, v and out, such as "bfloat16".
        qhead_per_kvhead: Hq // Hkv.
        num_sms: multiprocessors of the device, which size the persistent grid.
        config: text of the KernelConfig, or of the SplitConfig for "split".
        regular_aux: streamed aux tensors have an innermost stride of 1 (lowering.aux_layout).
        dense_aux: dense loads come by TMA, which their tensors' strides must allow.
        direction: "forward"; "split": the kernel of few query rows; "tile_map": that which makes the map of a mask;
            "backward" (`need_lse` then says that the LSE has a gradient).
        toolchain: (package, version) pairs that shape machine code.
        sources: fingerprint of our own sources that do.
    """

    program: str
    dtype: str
    head_dim: int
    head_dim_v: int
    qhead_per_kvhead: int
    need_lse: bool
    arch: str
    num_sms: int
    config: str
    regular_aux: bool = False
    dense_aux: bool = False
    direction: str = "forward"
    toolchain: tuple[tuple[str, str], ...] = dataclasses.field(default_factory=toolchain_versions)
    sources: str = dataclasses.field(default_factory=source_fingerprint)

    def digest(self) -> str:
        """Hex name of this key, the same in every process. Raises TypeError for a field that has no exact text."""
        fields = {field.name: _exact(field.name, getattr(self, field.name)) for field in dataclasses.fields(self)}
        return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()

    def describe(self) -> dict[str, Any]:
        """Fields as JSON-able data, stored beside the artefact for people."""
        return dataclasses.asdict(self)


def _exact(name: str, value: Any) -> Any:
    """Only types whose JSON text is exact and stable may take part in a digest: anything else fails closed."""
    if isinstance(value, tuple):
        return [_exact(name, item) for item in value]
    if value is None or type(value) in (str, int, bool):
        return value
    kind = type(value).__name__
    raise TypeError(f"CompileKey.{name} is a {kind}: only str, int, bool, None and tuples of them identify a kernel")
