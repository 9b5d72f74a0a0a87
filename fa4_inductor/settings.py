"""Settings: one frozen dataclass, from `FA4_INDUCTOR_*` variables, overridden by `fa4.*` options of torch.compile.

torch.compile(model, backend="fa4", options={"fa4.strict": True, "fa4.implementation": "reference"})
FA4_INDUCTOR_CACHE_DIR=/scratch/fa4 python train.py
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fa4_inductor.errors import SettingsError

ENV_PREFIX = "FA4_INDUCTOR_"
OPTION_PREFIX = "fa4."
IMPLEMENTATIONS = ("auto", "reference", "cute", "sdpa", "flex")
_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off", "")


def default_cache_dir() -> Path:
    """`$XDG_CACHE_HOME/fa4_inductor`, or `~/.cache/fa4_inductor`."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "fa4_inductor"


def _parse_bool(name: str, value: Any) -> bool:
    if isinstance(value, bool):
        return value
    text = str(value).strip().lower()
    if text in _TRUE:
        return True
    if text in _FALSE:
        return False
    raise SettingsError(f"{name}={value!r} is not a boolean: use 1 or 0")


def _parse_implementation(name: str, value: Any) -> str:
    text = str(value).strip().lower()
    if text not in IMPLEMENTATIONS:
        raise SettingsError(f"{name}={value!r} is not an implementation: use one of {', '.join(IMPLEMENTATIONS)}")
    return text


def _parse_path(name: str, value: Any) -> Path:
    text = str(value).strip()
    if not text:
        raise SettingsError(f"{name} is empty: give a directory, or set {ENV_PREFIX}DISK_CACHE=0 to use none")
    return Path(text).expanduser().absolute()


def _parse_threads(name: str, value: Any) -> int:
    try:
        threads = int(str(value))
    except ValueError:
        threads = 0
    if threads < 1:
        raise SettingsError(f"{name}={value!r} is not a number of threads: use an integer of at least 1")
    return threads


def _parse_arch(name: str, value: Any) -> str | None:
    text = str(value or "").strip().lower()
    if not text:
        return None
    if not text.startswith("sm_") or not text[3:].rstrip("af").isdigit():
        raise SettingsError(f"{name}={value!r} is not a GPU architecture: write it as sm_90a")
    return text


def _setting(default: Any, parse: Callable[[str, Any], Any], doc: str, factory: Callable[[], Any] | None = None) -> Any:
    metadata = {"parse": parse, "doc": doc}
    if factory is not None:
        return dataclasses.field(default_factory=factory, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True)
class Settings:
    """Every knob. Field `strict` is variable `FA4_INDUCTOR_STRICT` and option `fa4.strict`, and so on."""

    disable: bool = _setting(False, _parse_bool, "Look for nothing: the graph goes to Inductor as it is.")
    strict: bool = _setting(False, _parse_bool, "Raise on a declined site or unavailable kernel.")
    implementation: str = _setting(
        "auto", _parse_implementation, f"Run every matched site with one implementation: {', '.join(IMPLEMENTATIONS)}."
    )
    disk_cache: bool = _setting(True, _parse_bool, "Keep compiled kernels on disk.")
    cache_dir: Path = _setting(None, _parse_path, "Directory of the kernel cache.", factory=default_cache_dir)
    compile_threads: int = _setting(4, _parse_threads, "Most kernels of one graph that are built at once.")
    autotune: bool = _setting(
        False, _parse_bool, "Time the few candidate configurations of a kernel once; on under mode max-autotune."
    )
    target_arch: str | None = _setting(None, _parse_arch, "Compile for this architecture, such as sm_90a.")

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Settings:
        """Defaults overridden by `FA4_INDUCTOR_*`. Raises `SettingsError` that names the variable."""
        env = os.environ if environ is None else environ
        values = {}
        for field in dataclasses.fields(cls):
            name = ENV_PREFIX + field.name.upper()
            if name in env:
                values[field.name] = field.metadata["parse"](name, env[name])
        return cls(**values)

    def with_options(self, options: Mapping[str, Any]) -> Settings:
        """These settings overridden by `fa4.*` keys. Raises `SettingsError` for an unknown key or a bad value."""
        fields = {field.name: field for field in dataclasses.fields(self)}
        values = {}
        for key, value in options.items():
            name = key.removeprefix(OPTION_PREFIX).replace("-", "_")
            if not key.startswith(OPTION_PREFIX) or name not in fields:
                known = ", ".join(OPTION_PREFIX + n for n in fields)
                raise SettingsError(f"unknown option {key!r}: known are {known}")
            values[name] = fields[name].metadata["parse"](key, value)
        return dataclasses.replace(self, **values)


def split_options(options: Mapping[str, Any] | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """torch.compile's options as (ours under `fa4.*`, Inductor's)."""
    ours: dict[str, Any] = {}
    inductor: dict[str, Any] = {}
    for key, value in (options or {}).items():
        (ours if key.startswith(OPTION_PREFIX) else inductor)[key] = value
    return ours, inductor


def describe() -> list[tuple[str, str, str, str]]:
    """Rows (variable, option, default, meaning) of the settings table in the docs."""
    rows = []
    for field in dataclasses.fields(Settings):
        default = "~/.cache/fa4_inductor" if field.name == "cache_dir" else str(field.default)
        rows.append((ENV_PREFIX + field.name.upper(), OPTION_PREFIX + field.name, default, field.metadata["doc"]))
    return rows
