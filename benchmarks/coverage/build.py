"""A tiny random model of a type, and inputs it accepts."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import os
import re
import traceback
from typing import Any

import torch
from torch import Tensor, nn

from .configs import default_config, is_decoder, model_class, shrink
from .inputs import trials

MAX_TRIALS = 24
# Wider than this is no tiny model any more.
MAX_HIDDEN = 1024
# Tables and sinks that enter scores or embeddings: drawn at unit scale.
_UNIT_SCALE = r"relative|bias_table|sink|rel_pos|embed_tokens|word_embed|wte"


@dataclasses.dataclass
class Case:
    """A model with eager attention, the keyword arguments to run it with, the padded side, and its dtype."""

    model: nn.Module
    inputs: dict[str, Tensor]
    padding: str
    dtype: torch.dtype

    def with_attention(self, implementation: str) -> nn.Module:
        """The same model and weights with another `attn_implementation`. Raises where it is not offered."""
        if implementation == "eager":
            return self.model
        config = copy.deepcopy(self.model.config)
        other = type(self.model)._from_config(config, attn_implementation=implementation, dtype=self.dtype).eval()
        other.load_state_dict(self.model.state_dict())
        return other


def run(model: Any, inputs: dict[str, Tensor], seed: int = 3) -> Any:
    """The output of `model`, without gradients; `seed` is for models that draw random numbers."""
    torch.manual_seed(seed)
    with torch.no_grad():
        return model(**inputs)


def randomize(model: nn.Module) -> None:
    """Weights large enough that scores, masks, caps and biases all matter.

    Hugging Face's own initialisation leaves attention near uniform, so that an error in a mask would hardly show.
    """
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if not parameter.is_floating_point() or parameter.dim() == 0:
            continue
        values = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() == 1 and "sink" not in name:
            values = parameter.data.float() + 0.05 * values
        elif not re.search(_UNIT_SCALE, name):
            fan_in = max(parameter.shape[1:]) if parameter.dim() == 3 else parameter[0].numel() or 1
            values *= fan_in**-0.5
        parameter.data.copy_(values)


def build(model_type: str, dtype: torch.dtype, padding: str = "auto", cache: bool = False) -> Case:
    """A tiny model of that type and the first inputs that it runs on.

    Args:
        padding: side of the padded row; "auto" is left for decoder-only language models, right for others.
        cache: `use_cache` of the config.

    Raises:
        LookupError: when no auto class has the type.
        RuntimeError: when no config can be built or no inputs fit; the message has each attempt's error.
    """
    cls, errors = model_class(model_type), []
    side = padding if padding != "auto" else "left" if is_decoder(model_type) else "right"
    for wide in (False, True):
        try:
            config = shrink(default_config(model_type), cache, wide)
            if wide and not 0 < (getattr(config.get_text_config(), "hidden_size", 1) or 1) <= MAX_HIDDEN:
                break
            torch.manual_seed(0)
            model = cls._from_config(config, attn_implementation="eager", dtype=dtype).eval()  # type: ignore[attr-defined]
            randomize(model)
        except Exception as error:
            errors.append(f"{type(error).__name__}: {str(error)[:200]}")
            continue
        for inputs in itertools.islice(trials(model, side), MAX_TRIALS):
            inputs = {name: t.to(dtype) if t.is_floating_point() else t for name, t in inputs.items()}
            try:
                run(model, inputs)
                return Case(model, inputs, side, dtype)
            except Exception as error:
                errors.append(f"{sorted(inputs)}: {_where(error)}")
    raise RuntimeError(" | ".join(dict.fromkeys(errors)) or "no inputs fit")


def _where(error: Exception) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {str(error)[:160]} @{os.path.basename(last.filename)}:{last.lineno}"
