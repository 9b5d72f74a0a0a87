"""From the op's gradient to what computes it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fa4_inductor.runtime.launch import spec_of

IMPLEMENTATIONS = ("reference",)
"""Those of `fa4_inductor::attention` that have a backward."""

Gradients = tuple[Tensor, Tensor, Tensor]


def backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    aux: Sequence[Tensor],
    program: str,
    sizes: Sequence[int],
    implementation: str,
) -> Gradients:
    """Implementation of `fa4_inductor::_backward`; what the forward got and gave, any strides.

    Args:
        grad_out: (B, Hq, Sq, Dv). grad_lse: (B, Hq, Sq), None where the LSE is not used.

    Returns:
        Gradients of q, k and v, in their shapes and dtypes, BSHD memory.

    Raises:
        ValueError: for an implementation without a backward.
    """
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation {implementation!r} has no backward: known are {', '.join(IMPLEMENTATIONS)}")
    return _by_reference(grad_out, grad_lse, q, k, v, out, lse, aux, program, sizes)


def _by_reference(
    grad_out: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    aux: Sequence[Tensor], program: str, sizes: Sequence[int],
) -> Gradients:  # fmt: skip
    from fa4_inductor.kernels.reference import attention_reference
    from fa4_inductor.kernels.reference_backward import backward_reference

    spec, aux = spec_of(program), [t.to(q.device) for t in aux]
    dtype = torch.float64 if q.dtype is torch.float64 else torch.float32
    if dtype is torch.float64:  # the op's LSE has too few bits
        lse = attention_reference(q, k, v, aux, spec, sizes, need_lse=True, dtype=dtype)[1]
    return backward_reference(grad_out, grad_lse, q, k, v, out, lse, aux, spec, tuple(sizes), dtype=dtype)
