"""Names of torch-level operations, by what the slicer does with them. Anything not named here is an opaque leaf."""

from __future__ import annotations

_WORDS = str.split

CONTRACTIONS = frozenset(_WORDS("matmul bmm baddbmm einsum mm addmm addbmm tensordot imatmul __matmul__"))
SDPA = frozenset({"scaled_dot_product_attention"})
FLEX = frozenset({"flex_attention"})
SOFTMAX = frozenset(_WORDS("softmax _softmax log_softmax softmin logsumexp"))
"""A contraction is looked at when one of these is above it; whether it really is a softmax is decided on elements."""
SOFTMAX_BY_HAND = tuple(
    frozenset(_WORDS(names))
    for names in ("exp exp2", "sum", "div truediv true_divide div_ itruediv reciprocal pow pow_ ipow log")
)
"""One of each: an exponential divided by a sum. Else it is a gate or a decay, as in linear attention."""

STATE = frozenset(_WORDS("_enter_autocast _exit_autocast"))
VMAP = frozenset(
    _WORDS(
        "_vmap_increment_nesting _vmap_decrement_nesting lazy_load_decompositions"
        " _add_batch_dim _remove_batch_dim _saved_tensors_hooks_disable _saved_tensors_hooks_enable"
    )
)

_POINTWISE = _WORDS(
    "add sub rsub mul div true_divide truediv floordiv floor_divide fmod remainder mod pow neg negative pos abs"
    " exp exp2 log log2 log1p expm1 sqrt rsqrt tanh sigmoid erf sin cos floor ceil round trunc reciprocal square sign"
    " maximum minimum max min clamp clip clamp_min clamp_max where masked_fill eq ne lt le gt ge equal"
    " logical_and logical_or logical_not logical_xor bitwise_and bitwise_or bitwise_not bitwise_xor and_ or_ xor invert"
    " and or rand ror rxor lshift rshift bitwise_left_shift bitwise_right_shift"
    " not_ isinf isnan isneginf nan_to_num softplus relu"
    " add_ sub_ mul_ div_ masked_fill_ clamp_ clamp_min_ clamp_max_ neg_ exp_ tanh_ pow_ copy_ fill_ zero_ sqrt_ floor_"
    " floor_divide_ logical_and_ logical_or_ logical_not_ bitwise_and_ bitwise_or_ eq_ ne_ abs_ log_ triu_ tril_"
    " iadd isub imul itruediv ifloordiv iand ior ixor ipow setitem"
    " to type type_as float half bfloat16 double bool int long dropout alpha_dropout"
)
_VIEWS = _WORDS(
    "view reshape permute transpose t swapaxes swapdims movedim moveaxis expand expand_as view_as reshape_as unsqueeze"
    " squeeze flatten unflatten select narrow getitem split chunk unbind split_with_sizes tensor_split slice"
    " contiguous clone detach cat concat concatenate stack repeat repeat_interleave tile broadcast_to broadcast_tensors"
    " pad flip roll _unsafe_view alias mT T adjoint diagonal getattr index_select gather take_along_dim"
)
_FACTORIES = _WORDS(
    "arange zeros ones full empty zeros_like ones_like full_like empty_like new_zeros new_ones new_full new_empty"
    " new_tensor tensor scalar_tensor eye triu tril linspace as_tensor _to_tensor lift_fresh meshgrid"
)
_OTHER = _WORDS(
    "embedding index index_put softmax _softmax log_softmax softmin logsumexp amax amin sum cumsum diff argmax any all"
    " size sym_size item finfo iinfo sym_max sym_min sym_float sym_not sym_sum dim numel"
    " _vmap_increment_nesting _vmap_decrement_nesting lazy_load_decompositions _add_batch_dim _remove_batch_dim"
)
_WRITES = _WORDS("index_copy_ index_put_ index_fill_ index_add_ scatter_ scatter_add_ masked_scatter_ put_")
"""Writes into caches: nothing to understand, but the slice must know that the tensor holds other values after them."""
TRANSPARENT = frozenset(_POINTWISE + _VIEWS + _FACTORIES + _OTHER + _WRITES) | CONTRACTIONS
