"""torch.compile(model, backend="fa4"): every attention in the graph as one FlashAttention-style kernel.

Importing the package registers the backend, also from a source tree that was never installed (an installed one is found
by its entry point without any import). Nothing here imports CuTe-DSL.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import types
from collections.abc import Callable
from importlib.metadata import EntryPoint
from typing import Any

__version__ = "0.1.0"
__all__ = ["__version__", "explain"]
explain: Callable[..., Any]  # bound by `_Package` below


class _Package(types.ModuleType):
    """This package, whose `explain` stays the function also after the submodule of that name is imported."""

    @property
    def explain(self) -> Callable[..., Any]:
        """`explain(model, *args, **kwargs) -> Report`, see `fa4_inductor/explain.py`."""
        return importlib.import_module(f"{__name__}.explain").explain

    @explain.setter
    def explain(self, submodule: types.ModuleType) -> None:
        """The import system binds a submodule to its package; that would hide the function."""


def _register() -> None:
    """Adds the entry point of pyproject.toml to Dynamo's registry; an installed package is found there without this.

    An entry point rather than `register_backend`: it is loaded at first use, and loading it twice is harmless, while
    registering a name twice is an error in Dynamo.
    """
    from torch._dynamo.backends import registry

    backends = registry._BACKENDS
    backends.setdefault("fa4", EntryPoint("fa4", "fa4_inductor.backend:fa4", "torch_dynamo_backends"))


sys.modules[__name__].__class__ = _Package
# `doctor` must be able to say that torch is missing; a process that only builds kernels (runtime.workers) compiles no
# graph, and importing Dynamo takes it as long as a kernel
if importlib.util.find_spec("torch") is not None and "_FA4_INDUCTOR_WORKER" not in os.environ:
    _register()
