"""torch.compile(model, backend="fa4"): every attention in the graph as one FlashAttention-style kernel.

Importing the package registers the backend, also from a source tree that was never installed (an installed one is found
by its entry point without any import). Nothing here imports CuTe-DSL.
"""

from __future__ import annotations

import importlib
import importlib.util
from importlib.metadata import EntryPoint
from typing import Any

__version__ = "0.1.0"
__all__ = ["__version__", "explain"]


def _register() -> None:
    """Adds the entry point of pyproject.toml to Dynamo's registry; an installed package is found there without this.

    An entry point rather than `register_backend`: it is loaded at first use, and loading it twice is harmless, while
    registering a name twice is an error in Dynamo.
    """
    from torch._dynamo.backends import registry

    backends = registry._BACKENDS
    backends.setdefault("fa4", EntryPoint("fa4", "fa4_inductor.backend:fa4", "torch_dynamo_backends"))


def __getattr__(name: str) -> Any:
    if name == "explain":
        function = importlib.import_module(f"{__name__}.explain").explain
        globals()["explain"] = function  # the import bound the submodule to this name
        return function
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


if importlib.util.find_spec("torch") is not None:  # `doctor` must be able to say that torch is missing
    _register()
