"""Shared set-up: offline, one thread per worker, a private kernel cache, clean Dynamo state, skips by hardware."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# CuTe-DSL decides once per process, when it is imported, what it compiles for; without a GPU it takes its own default.
os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))


def _hopper_missing() -> str | None:
    """Why tests/gpu cannot run here, or None."""
    import torch

    if not torch.cuda.is_available():
        return "needs an NVIDIA GPU"
    major = torch.cuda.get_device_capability()[0]
    return None if major == 9 else f"needs compute capability 9.0, this GPU has {major}.x"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Folders say which hardware a test needs: tests/gpu a Hopper GPU, tests/compile CuTe-DSL without a GPU."""
    gpu_reason: str | None | bool = False
    for item in items:
        parts = Path(item.path).relative_to(ROOT).parts if Path(item.path).is_relative_to(ROOT) else ()
        if "gpu" in parts[:2] or item.get_closest_marker("gpu"):
            if gpu_reason is False:
                gpu_reason = _hopper_missing()
            if gpu_reason:
                item.add_marker(pytest.mark.skip(reason=str(gpu_reason)))
        needs_cutlass = "compile" in parts[:2] or item.get_closest_marker("cutlass")
        if needs_cutlass and importlib.util.find_spec("cutlass") is None:
            item.add_marker(pytest.mark.skip(reason="needs nvidia-cutlass-dsl"))


@pytest.fixture(scope="session", autouse=True)
def _private_kernel_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Kernels compiled by tests never come from, or land in, the user's cache."""
    previous = os.environ.get("FA4_INDUCTOR_CACHE_DIR")
    os.environ["FA4_INDUCTOR_CACHE_DIR"] = str(tmp_path_factory.mktemp("fa4_cache"))
    yield
    if previous is None:
        del os.environ["FA4_INDUCTOR_CACHE_DIR"]
    else:
        os.environ["FA4_INDUCTOR_CACHE_DIR"] = previous


@pytest.fixture(autouse=True)
def _clean_dynamo() -> Iterator[None]:
    """Compiled code, counters and seeds do not leak from one test into the next."""
    if "torch" in sys.modules:
        import torch

        torch.manual_seed(0)
    yield
    if "torch._dynamo" in sys.modules:
        import torch

        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
