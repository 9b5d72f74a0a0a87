"""Inductor's estimate of memory over time, with the outputs of the graph counted.

Inductor keeps a dead buffer for a later allocation where its estimate of the peak allows that. In torch 2.11 the
estimate frees every output before the first step (later versions do not), so a graph with large outputs seems to need
nothing and buffers are kept without limit: a Gemma-2 that returns 500 MiB of logits ran 12 MiB above its true peak.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def outputs_counted() -> Iterator[None]:
    """While it lasts, graphs are compiled with the mended estimate where this torch needs one."""
    from torch._inductor import memory

    if not _frees_outputs_first(memory):
        yield
        return
    estimate = memory.estimate_peak_memory

    def mended(nodes: list[Any], inputs: dict[str, Any], outputs: Any) -> tuple[int, list[int]]:
        _, steps = estimate(nodes, inputs, outputs)
        buffers = [buffer for node in nodes for buffer in node.get_outputs()] + list(inputs.values())
        missing = sum(buffer.mpi_buffer.size_free for buffer in buffers if buffer.get_name() in outputs)
        steps = [step + missing for step in steps]
        return max(steps, default=0), steps

    memory.estimate_peak_memory = mended
    try:
        yield
    finally:
        memory.estimate_peak_memory = estimate


def _frees_outputs_first(memory: Any) -> bool:
    """Versions that have the function named here skip the outputs when they free buffers."""
    return hasattr(memory, "compute_memory_timeline") and not hasattr(memory, "peak_memory_from_buf_info_list")
