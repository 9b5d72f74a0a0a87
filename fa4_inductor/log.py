"""Logging, one-time warnings and counters.

`TORCH_LOGS="+fa4_inductor"` shows debug output. Counters live in `torch._dynamo.utils.counters["fa4"]`:
`found` `matched` `fused` `declined` `declined.<reason>` `kernel_compiles` `kernel_cache_hits`.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections import Counter
from collections.abc import Callable

ROOT = "fa4_inductor"
_warned: set[str] = set()
_warned_lock = threading.Lock()


def get_logger(name: str) -> logging.Logger:
    """The logger of a module of this package (pass `__name__`)."""
    return logging.getLogger(name)


def warn_once(cause: str, remedy: str) -> bool:
    """Warn that `cause` happened and what helps; False, silently, when this process already warned of that cause."""
    with _warned_lock:
        if cause in _warned:
            return False
        _warned.add(cause)
    logging.getLogger(ROOT).warning("%s. %s", cause.rstrip("."), remedy)
    return True


def reset_warnings() -> None:
    """Forget which warnings were given (tests)."""
    with _warned_lock:
        _warned.clear()


def counters() -> Counter[str]:
    """The live counter mapping of this package."""
    from torch._dynamo.utils import counters as dynamo_counters

    return dynamo_counters["fa4"]


def count(name: str, amount: int = 1) -> None:
    """Add to one counter. A process without Dynamo, whose counters these are, has no reader: it builds kernels."""
    if "torch._dynamo" in sys.modules:
        counters()[name] += amount


def artifact(name: str, payload: Callable[[], str]) -> None:
    """Attach a text to the structured trace (`TORCH_TRACE`), evaluated only when a trace is being written."""
    from torch._logging import trace_structured

    trace_structured("artifact", metadata_fn=lambda: {"name": name, "encoding": "string"}, payload_fn=payload)
