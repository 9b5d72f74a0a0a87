"""Autotuning: the candidates of a kernel are timed at its first launch, once per key and GPU, and the choice is kept.

A choice is a small file beside the kernel cache, named by the key of the table's configuration (which contains versions
and sources) and the name of the GPU. Whatever is wrong with it costs another timing and at most one message.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import statistics
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from fa4_inductor import log
from fa4_inductor.errors import KernelUnavailable
from fa4_inductor.lowering.aux_layout import dense_bytes, dense_loads
from fa4_inductor.lowering.candidates import candidates
from fa4_inductor.lowering.config import KernelConfig
from fa4_inductor.runtime import compile as compiler
from fa4_inductor.runtime.compile import Kernel
from fa4_inductor.runtime.key import CompileKey
from fa4_inductor.settings import Settings
from fa4_inductor.spec import parse_spec

_FORMAT = 1
_ROUNDS = 5
_ROUND_MS = 2.0
_HOST_CYCLES = 40_000  # of the GPU, in which the host launches once: 20 us
_WORTH = 0.99  # of the table's time: what is less of a gain is noise
_chosen: dict[str, str] = {}
_log = log.get_logger(__name__)


def candidate_keys(key: CompileKey) -> list[CompileKey]:
    """`key`, which has the table's configuration, and this forward kernel in the other configurations that may win."""
    if key.direction != "forward":
        return [key]
    spec = parse_spec(key.program)
    width = dense_bytes(spec, dense_loads(spec) if key.dense_aux else ())
    configs = candidates(
        KernelConfig.parse(key.config), key.head_dim, key.head_dim_v, width, fixed_tiles=spec.tile_map is not None
    )
    return [dataclasses.replace(key, config=config.text) for config in configs]


def keys_to_build(key: CompileKey, settings: Settings, gpu: str) -> list[CompileKey]:
    """The kernels that the first launch needs; the first is the one without which there is none."""
    if not settings.autotune:
        return [key]
    chosen = recall(key, settings, gpu)
    return candidate_keys(key) if chosen is None else [chosen]


def kernel_of(key: CompileKey, settings: Settings, gpu: str) -> tuple[Kernel, Contest | None]:
    """The kernel to launch, and the contest that its first launch has to hold.

    Raises:
        KernelUnavailable: as `compile.get_kernel`; only the first of `keys_to_build` counts.
    """
    first, *others = keys_to_build(key, settings, gpu)
    kernel = compiler.get_kernel(first, settings)
    kernels = {first.config: kernel}
    for other in others:
        try:
            kernels[other.config] = compiler.get_kernel(other, settings)
        except KernelUnavailable as error:
            _log.info("a candidate is left out: %s", error)
    return kernel, Contest(key, kernels, settings, gpu) if len(kernels) > 1 else None


@dataclasses.dataclass(frozen=True)
class Contest:
    """Kernels of one key by the text of their configuration, the table's first."""

    key: CompileKey
    kernels: Mapping[str, Kernel]
    settings: Settings
    gpu: str

    def settle(self, calls: Mapping[str, Callable[[], object]]) -> Kernel:
        """The fastest kernel, remembered. calls: one launch of each, by the same texts, on the current device."""
        times = time_ms(calls)
        table, best = self.key.config, min(times, key=lambda text: times[text])
        if times[best] > _WORTH * times[table]:
            best = table
        _log.info("autotuning of %s: %s; took %s", self.key.program, times, best)
        log.count("kernels_tuned")
        _remember(self.key, best, times, self.settings, self.gpu)
        return self.kernels[best]


def time_ms(calls: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """Median milliseconds of each call, in turns."""

    def once(call: Callable[[], object], repeat: int) -> float:
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(_HOST_CYCLES * repeat)  # else the host is what is timed where kernels are short
        start.record()
        for _ in range(repeat):
            call()
        stop.record()
        stop.synchronize()
        return start.elapsed_time(stop) / repeat

    repeats = {}
    for text, call in calls.items():
        call()
        repeats[text] = min(100, max(2, int(_ROUND_MS / max(once(call, 2), 1e-3))))
    samples: dict[str, list[float]] = {text: [] for text in calls}
    for _ in range(_ROUNDS):
        for text, call in calls.items():
            samples[text].append(once(call, repeats[text]))
    return {text: statistics.median(values) for text, values in samples.items()}


def recall(key: CompileKey, settings: Settings, gpu: str) -> CompileKey | None:
    """The key with the configuration that an earlier contest chose; None where there was none."""
    name = _name(key, gpu)
    if name not in _chosen and settings.disk_cache:
        config = _read(_folder(settings) / f"{name}.json", key)
        if config is not None:
            _chosen[name] = config
    return dataclasses.replace(key, config=_chosen[name]) if name in _chosen else None


def _name(key: CompileKey, gpu: str) -> str:
    return hashlib.sha256(json.dumps([key.digest(), gpu]).encode()).hexdigest()


def _folder(settings: Settings) -> Path:
    return settings.cache_dir / "tuned"


def _read(path: Path, key: CompileKey) -> str | None:
    try:
        content: Any = json.loads(path.read_text())
        config = content["config"]
        if content["format"] == _FORMAT and config in [k.config for k in candidate_keys(key)]:
            return config
        problem = "is foreign"
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        problem = f"is unreadable ({type(error).__name__})"
    log.warn_once(f"the record of autotuning {path} {problem}", "It is ignored; the kernel is timed again")
    return None


def _remember(key: CompileKey, config: str, times: Mapping[str, float], settings: Settings, gpu: str) -> None:
    _chosen[_name(key, gpu)] = config
    if not settings.disk_cache:
        return
    path = _folder(settings) / f"{_name(key, gpu)}.json"
    content = {"format": _FORMAT, "config": config, "gpu": gpu, "ms": dict(times), "key": key.describe()}
    temporary = None
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(descriptor, "w") as file:
            json.dump(content, file, indent=1)
        os.replace(temporary, path)
    except OSError as error:
        if temporary is not None and os.path.exists(temporary):
            os.unlink(temporary)
        cause = f"a choice of autotuning could not be kept in {path.parent} ({error.strerror or error})"
        log.warn_once(cause, "Each process times kernels anew; set FA4_INDUCTOR_CACHE_DIR to a writable directory")


def forget() -> None:
    """Forget the choices of this process; the disk keeps them."""
    _chosen.clear()
