"""Calls of our ops from the Python that Inductor generates, past the dispatcher.

In a compiled graph without gradients the dispatcher has nothing to decide, yet boxing the arguments of an op that is
implemented in Python takes about as long as the rest of a launch. So Inductor's fallback kernel for our ops names the
implementation instead of the op; everything else about it (layout constraints, memory planning, CUDA graphs) is that of
any op. C++ wrappers keep the op. Torch's profiler then does not see the op itself, as it does not see other kernels
that Inductor calls.
"""

from __future__ import annotations

import functools
from typing import Any

from fa4_inductor import log
from fa4_inductor.runtime import ops

_log = log.get_logger(__name__)


@functools.cache
def call_directly() -> None:
    """Let graphs that Inductor compiles from now on in this process call our implementations themselves."""
    for op, implementation in ops.IMPLEMENTATIONS.items():
        try:
            _lower(op, f"{ops.NAMESPACE_PATH}.{implementation}")
        except (AttributeError, ImportError, TypeError) as error:
            _log.warning("this version of Inductor calls our ops through the dispatcher, some us slower: %s", error)
            return


def _lower(op: Any, name: str) -> None:
    """Lower `op` as Inductor does by itself, and rename what the generated code calls."""
    from torch._inductor import ir, lowering
    from torch._inductor.virtualized import V

    if op not in lowering.lowerings:
        # the constraint that the op's tag stands for
        lowering.make_fallback(op, layout_constraint=lowering.constrain_to_fx_strides, warn=False)
    fallback = lowering.lowerings[op]

    @functools.wraps(fallback)
    def lowered(*args: Any, **kwargs: Any) -> Any:
        known = len(V.graph.operations)
        result = fallback(*args, **kwargs)
        if not V.graph.cpp_wrapper:
            for operation in V.graph.operations[known:]:
                if isinstance(operation, ir.FallbackKernel) and operation.op_overload is op:
                    operation.python_kernel_name = name
        return result

    lowering.lowerings[op] = lowered
