"""The machine a kernel is built for, as plain data, so that everything that depends on it works without one."""

from __future__ import annotations

import dataclasses
import functools
import os
import platform

import torch

# SM counts of known parts, used only when a kernel is built for an architecture that is not present.
_NOMINAL_SM_COUNT = {"sm_90a": 132, "sm_100a": 148}
# Architectures whose `a` variant unlocks the instructions our kernels need (WGMMA, tcgen05).
_ARCH_SPECIFIC = {(9, 0): "sm_90a", (10, 0): "sm_100a", (10, 3): "sm_103a", (12, 0): "sm_120a"}


@dataclasses.dataclass(frozen=True)
class Target:
    """device_type "cuda" or "cpu"; arch such as "sm_90a" ("cpu" on a CPU); number of SMs; name for people."""

    device_type: str
    arch: str
    sm_count: int
    name: str

    @property
    def is_hopper(self) -> bool:
        """Whether sm_90a code runs here."""
        return self.arch == "sm_90a"


def target_for(device: torch.device | str, arch: str | None = None) -> Target:
    """Target of a torch device; `arch` overrides it and needs no GPU. Raises RuntimeError for an absent CUDA device."""
    if arch is not None:
        return Target("cuda", arch, _NOMINAL_SM_COUNT.get(arch, 132), f"{arch} (not present)")
    device = torch.device(device)
    if device.type != "cuda":
        return Target(device.type, device.type, os.cpu_count() or 1, platform.processor() or platform.machine())
    return _cuda_target(device.index if device.index is not None else torch.cuda.current_device())


@functools.cache
def _cuda_target(index: int) -> Target:
    props = torch.cuda.get_device_properties(index)
    arch = _ARCH_SPECIFIC.get((props.major, props.minor), f"sm_{props.major}{props.minor}")
    return Target("cuda", arch, props.multi_processor_count, props.name)
