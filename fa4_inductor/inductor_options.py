"""What Inductor is told about a graph: the user's mode and options, and ours where the user says nothing."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from fa4_inductor.lowering.tile_map import size_hint
from fa4_inductor.runtime.ops import ATTENTION, ATTENTION_WITH_LSE

# An allocation takes about 1 us on the host, which is what a GPU needs to write this much.
LARGE_BUFFER_BYTES = 4 << 20


def inductor_patches(mode: str | None, options: dict[str, Any]) -> dict[str, Any]:
    """Inductor's configuration for torch.compile's `mode` and `options`; the options win."""
    from torch._inductor import list_mode_options

    patches: dict[str, Any] = {}
    if mode and mode != "default":
        patches.update(list_mode_options(mode))
    patches.update({name.replace("-", "_"): value for name, value in options.items()})
    return patches


def memory_patches(gm: fx.GraphModule) -> dict[str, Any]:
    """Frees large dead buffers at once instead of keeping them for reuse.

    Our op allocates its output, so it cannot take a buffer that Inductor holds free, and Inductor lets one wait as long
    as the graph's own peak (of a language model: its logits) is not exceeded, by its estimate. Freed, its memory goes
    back to PyTorch's allocator, which serves the op from it (engineering log, entries 11 and 57).
    """
    large = any(_query_bytes(node) >= LARGE_BUFFER_BYTES for node in gm.graph.nodes)
    return {"allow_buffer_reuse": False} if large else {}


def _query_bytes(node: fx.Node) -> int:
    """Bytes of the query of a call of our op on a GPU, as far as known while compiling; 0 for other nodes."""
    if node.target not in (ATTENTION, ATTENTION_WITH_LSE):
        return 0
    query = node.args[0]
    value = query.meta.get("example_value") if isinstance(query, fx.Node) else None
    if not isinstance(value, torch.Tensor) or value.device.type != "cuda":
        return 0
    return math.prod(size_hint(size) or 0 for size in value.shape) * value.element_size()
