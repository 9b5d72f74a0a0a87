"""The other side of benchmarks/kernels.py: what else computes the same attention on the same tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from kernel_cases import NATIVE, PROGRAMS, WINDOW, Aux, Case
from torch import Tensor

PEERS = ("fa4", "cudnn", "fa2", "flex", "flex_flash", "inductor")


def peer(name: str, case: Case, operands: tuple[Tensor, ...], aux: Aux) -> Callable[[], Any]:
    """One call of a peer. Raises NotImplementedError where it has no such feature, and whatever it raises itself."""
    if (name == "inductor") != (case.program in NATIVE):
        raise NotImplementedError(f"{name} does not run {case.program}")
    if name == "inductor":
        function = torch.compile(NATIVE[case.program].function, dynamic=False)
        return lambda: function(*operands)
    if name == "fa4":
        return _flash_attention_4(case, operands)
    if name in ("cudnn", "fa2"):
        return _sdpa(name, case, operands, aux)
    return _flex(case, operands, aux, {"BACKEND": "FLASH"} if name == "flex_flash" else None)


def _flash_attention_4(case: Case, operands: tuple[Tensor, ...]) -> Callable[[], Any]:
    from flash_attn.cute import flash_attn_func

    features: dict[str, dict[str, Any]] = {
        "plain": {},
        "causal": {"causal": True},
        "window": {"causal": True, "window_size": (WINDOW - 1, 0)},
        "softcap_causal": {"causal": True, "softcap": 50.0},
    }
    if case.program not in features:
        raise NotImplementedError(f"flash-attn-4 has no {case.program}")
    q, k, v = (t.transpose(1, 2) for t in operands)
    return lambda: flash_attn_func(q, k, v, **features[case.program])


def _sdpa(name: str, case: Case, operands: tuple[Tensor, ...], aux: Aux) -> Callable[[], Any]:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    backend = SDPBackend.CUDNN_ATTENTION if name == "cudnn" else SDPBackend.FLASH_ATTENTION
    if case.program not in ("plain", "causal", "dense_bias"):
        raise NotImplementedError(f"SDPA has no {case.program}")
    causal, grouped = case.program == "causal", case.heads != case.kv_heads
    mask = aux[0][None] if case.program == "dense_bias" else None
    q, k, v = operands

    def run() -> Any:
        with sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=grouped
            )

    return run


def _flex(case: Case, operands: tuple[Tensor, ...], aux: Aux, options: dict[str, str] | None) -> Callable[[], Any]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    # One recompilation per shape; past the default limit flex_attention would silently run uncompiled.
    torch._dynamo.config.recompile_limit = 256
    score_mod, mask_mod = PROGRAMS[case.program].mods(aux)
    mask = None
    if mask_mod is not None:
        batch = case.b if "b" in case.spec.keep.free else None
        mask = create_block_mask(mask_mod, batch, None, case.sq, case.seqlen, device=operands[0].device)
    flex, grouped = torch.compile(flex_attention, dynamic=False), case.heads != case.kv_heads
    q, k, v = operands
    return lambda: flex(q, k, v, score_mod=score_mod, block_mask=mask, enable_gqa=grouped, kernel_options=options)
