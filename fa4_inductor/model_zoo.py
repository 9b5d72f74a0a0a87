"""Unmodified Hugging Face models with random weights, built from their config classes without a hub.

Shared by the tests, the benchmarks, the demo and `python -m fa4_inductor explain`. Hugging Face's own initialisation
leaves attention close to uniform, where a lost mask or scale would go unnoticed, so weights are drawn again: logits
with a standard deviation near 3, visible bias tables and sinks.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import re
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from .model_configs import ENTRIES, SIZES, Entry, Shape

__all__ = ["SIZES", "Case", "build", "implementations", "names"]

_SCORE_GAIN = 1.7  # of q and k each, so that logits have a standard deviation of about its square
_QUERY_KEY = re.compile(r"\.(q_proj|k_proj|query|key|q_norm|k_norm|query_key_value|Wqkv|c_attn|q|k)\.weight$")
_TABLE = re.compile(r"(embed|wte|wpe|shared|relative_attention_bias|sinks|cls_token)")


class _NoDowncast(TorchFunctionMode):
    """Keeps a float64 model in float64 where its code asks for float32 (softmax, norms, rotary tables).

    Not only for accuracy: a float64 mask filled with finfo.min turns into -inf in a float32 softmax, and an all-padding
    row into NaN.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.float:
            return args[0].double()
        if func in (torch.Tensor.to, F.softmax, torch.softmax, torch.Tensor.softmax):
            args = tuple(torch.float64 if a is torch.float32 else a for a in args)
            kwargs = {k: torch.float64 if v is torch.float32 else v for k, v in kwargs.items()}
        return func(*args, **kwargs)


@dataclasses.dataclass
class Case:
    """A model with inputs. `keep`, bool (B, S), marks positions that are not padding; None when all count."""

    name: str
    attn_implementation: str
    model: torch.nn.Module
    inputs: dict[str, torch.Tensor]
    keep: torch.Tensor | None
    sites: int
    exact: bool = False

    def run(self, model: Callable[..., Any] | None = None) -> torch.Tensor:
        """First output of `model` (default: the case's own) under no_grad; (N, ...) without the padding positions."""
        exact = _NoDowncast() if self.exact else contextlib.nullcontext()
        with torch.no_grad(), exact:
            output = (self.model if model is None else model)(**self.inputs)
        first = output.logits if "logits" in output else output.last_hidden_state
        return first[self.keep] if self.keep is not None else first

    def resized(self, batch: int, seqlen: int) -> Case:
        """The same model with inputs of another size (images keep their size)."""
        entry, device = ENTRIES[self.name], next(self.model.parameters()).device
        shape = Shape(batch, seqlen, "attention_mask" in self.inputs)
        inputs, keep = _inputs(entry, self.model, shape, device, seed=batch * 1000 + seqlen)
        return dataclasses.replace(self, inputs=inputs, keep=keep)

    def in_double(self) -> Case:
        """The same weights, inputs and attention in float64 throughout: what errors are measured against.

        The attention implementation stays, since it is part of the meaning: sdpa leaves out Gemma-2's softcap.
        """
        model = copy.deepcopy(self.model).double()
        if hasattr(model, "set_experts_implementation"):
            model.set_experts_implementation("eager")  # grouped_mm has no float64
        inputs = {k: v.double() if v.is_floating_point() else v for k, v in self.inputs.items()}
        return dataclasses.replace(self, model=model, inputs=inputs, exact=True)


def names() -> tuple[str, ...]:
    """Models that `build` knows."""
    return tuple(ENTRIES)


def _model_class(entry: Entry, config: Any) -> Any:
    import transformers

    cls = getattr(transformers, entry.class_name)
    return cls._model_mapping[type(config)] if hasattr(cls, "_model_mapping") else cls


def implementations(name: str) -> tuple[str, ...]:
    """The `attn_implementation` values among eager and sdpa that the installed transformers offers for a model."""
    config = _config(_entry(name), "tiny")
    return ("eager", "sdpa") if _model_class(_entry(name), config)._supports_sdpa else ("eager",)


def _entry(name: str) -> Entry:
    if name not in ENTRIES:
        raise ValueError(f"unknown model {name!r}: known are {', '.join(ENTRIES)}")
    return ENTRIES[name]


def _config(entry: Entry, size: str, layers: int | None = None) -> Any:
    from transformers import AutoConfig

    if size not in SIZES:
        raise ValueError(f"unknown size {size!r}: known are {', '.join(SIZES)}")
    depth = {} if layers is None else {"num_hidden_layers": layers}
    config = AutoConfig.for_model(entry.model_type, **entry.sizes[size] | depth)
    if hasattr(config, "use_cache"):
        config.use_cache = False
    return config


def build(
    name: str,
    attn_implementation: str = "eager",
    size: str = "tiny",
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    batch: int | None = None,
    seqlen: int | None = None,
    layers: int | None = None,
) -> Case:
    """A model in eval mode with inputs; the same numbers in every process on one kind of device.

    batch, seqlen and layers stand for those of the size; encoder-decoders keep their layers.

    Raises ValueError for an unknown name or size, and what transformers raises for an attention it does not offer.
    """
    entry = _entry(name)
    config = _config(entry, size, layers)
    with torch.device(device):
        model = _model_class(entry, config)._from_config(config, dtype=dtype, attn_implementation=attn_implementation)
    model.eval().requires_grad_(False)
    _draw_weights(model)
    shape = entry.shapes[size]
    shape = Shape(batch or shape.batch, seqlen or shape.seqlen, shape.padded)
    inputs, keep = _inputs(entry, model, shape, torch.device(device), seed=0)
    return Case(name, attn_implementation, model, inputs, keep, entry.sites(config))


def _draw_weights(model: torch.nn.Module) -> None:
    """Redraws every weight: matrices keep the variance of their input, tables and sinks have unit variance."""
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(1)
    in_first = {id(m.weight) for m in model.modules() if type(m).__name__ == "Conv1D"}
    unscaled = getattr(model.config, "model_type", "") == "t5"  # T5 does not divide by sqrt(head_dim)
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=generator, device=device)
        gain = 1.0
        if _QUERY_KEY.search("." + name):
            gain = _SCORE_GAIN * (model.config.d_kv**-0.25 if unscaled else 1.0)
        if _TABLE.search(name):
            value = noise
        elif weight.dim() < 2:  # biases start at 0 and norms at 1 (or 0 for 1 + weight): stay near there
            value = gain * (weight.data.float() + 0.1 * noise)
        else:
            fan_in = weight.shape[0] if id(weight) in in_first else weight.shape[1:].numel()
            fan_in = weight.shape[1] if weight.dim() == 3 else fan_in  # experts (E, in, out)
            value = gain * fan_in**-0.5 * noise
        weight.data.copy_(value)


def _inputs(
    entry: Entry, model: Any, shape: Shape, device: torch.device, seed: int
) -> tuple[dict[str, torch.Tensor], torch.Tensor | None]:
    """Forward arguments and the positions that count; a quarter of a padded batch's last row is padding."""
    generator = torch.Generator().manual_seed(seed)
    config = model.config
    if entry.model_type == "vit":
        image = (shape.batch, config.num_channels, config.image_size, config.image_size)
        pixels = torch.randn(image, generator=generator).to(device, next(model.parameters()).dtype)
        return {"pixel_values": pixels}, None
    size = (shape.batch, shape.seqlen)
    inputs = {"input_ids": torch.randint(3, config.vocab_size, size, generator=generator).to(device)}
    keep = None
    if shape.padded:
        mask = torch.ones(size, dtype=torch.long)
        quarter = shape.seqlen // 4
        mask[-1, slice(quarter) if entry.padding_side == "left" else slice(shape.seqlen - quarter, None)] = 0
        inputs["attention_mask"] = mask.to(device)
        keep = mask.bool().to(device)
    if entry.class_name == "AutoModelForSeq2SeqLM":
        decoder = (shape.batch, max(shape.seqlen // 2, 1))
        inputs["decoder_input_ids"] = torch.randint(3, config.vocab_size, decoder, generator=generator).to(device)
        keep = None  # outputs are the decoder's, which has no padding
    return inputs, keep
