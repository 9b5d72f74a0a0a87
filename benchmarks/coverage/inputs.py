"""Inputs to try: from the signature of a model's forward and the sizes in its config."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

BATCH, SEQLEN, DECODER_SEQLEN = 2, 24, 16
# Token ids are drawn from here: above the special tokens, below the placeholders of images and audio.
TOKENS = (5, 96)
SAMPLES = 6400


class _Sizes:
    """Looks names up in a model's config and its sub-configs."""

    def __init__(self, config: PreTrainedConfig) -> None:
        self.configs = [config, *(v for v in vars(config).values() if isinstance(v, PreTrainedConfig))]

    def find(self, *names: str, default: int) -> Any:
        """The first of `names` that any config has as a number or a collection that is not empty."""
        for name, config in itertools.product(names, self.configs):
            value = getattr(config, name, None)
            if isinstance(value, int | list | tuple | dict) and value:
                return value
        return default

    def image(self) -> tuple[int, int]:
        """Height and width of images; 64 x 64 where the config asks for a size that is no tiny one."""
        size = self.find("image_size", "input_size", default=64)
        if isinstance(size, dict):
            size = list(size.values())
        height, width = (size, size) if isinstance(size, int) else (size[0], size[-1])
        return (height, width) if 16 <= height <= 512 else (64, 64)

    def channels(self) -> int:
        """Channels of images."""
        channels = self.find("num_channels", "in_channels", "in_chans", default=3)
        return channels if isinstance(channels, int) else 3


_MEL = ("feature_projection_input_dim", "num_mel_bins", "input_feat_per_channel", "n_mels", "feature_size", "input_dim")


def _candidates(sizes: _Sizes) -> dict[str, list[Tensor]]:
    """For each argument the tensors to try, by the shapes that models want."""
    generator = torch.Generator().manual_seed(2)
    longest = sizes.find("max_position_embeddings", default=SEQLEN)

    def ids(length: int) -> Tensor:
        length = min(length, longest) if longest > 0 else length
        return torch.randint(*TOKENS, (BATCH, length), generator=generator)

    def rand(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    image = (sizes.channels(), *sizes.image())
    mel = sizes.find(*_MEL, default=80)
    frames = sizes.find("num_frames", "frames_per_clip", default=8)
    time = 2 * sizes.find("max_source_positions", default=64)
    spectrum = sizes.find("spec_size", default=64) * 4
    return {
        "input_ids": [ids(SEQLEN)],
        "decoder_input_ids": [ids(DECODER_SEQLEN)],
        "bbox": [torch.arange(4).mul(10).expand(BATCH, SEQLEN, 4).contiguous()],
        "pixel_values": [rand(BATCH, *image), rand(BATCH, frames, *image), rand(BATCH, 1, *image)],
        "pixel_values_videos": [rand(BATCH, frames, *image)],
        "input_features": [rand(BATCH, mel, time), rand(BATCH, time, mel), rand(BATCH, 1, spectrum, mel)],
        "input_values": [
            rand(BATCH, SAMPLES),
            rand(BATCH, 1, SAMPLES),
            rand(BATCH, sizes.find("max_length", default=64), mel),
        ],
    }


def _padded(ids: Tensor, side: str) -> Tensor:
    """(B, S) attention mask, int64: the second row has a quarter of its positions padded."""
    mask = torch.ones(ids.shape, dtype=torch.long)
    padding = ids.shape[1] // 4
    mask[1, slice(padding) if side == "left" else slice(-padding, None)] = 0
    return mask


def trials(model: nn.Module, side: str) -> Iterator[dict[str, Tensor]]:
    """Keyword arguments of `forward` to try in turn: the main input and what the signature requires, then all it knows.

    Args:
        side: where the second row is padded, "left" or "right"; "none" gives no attention mask. Models that take none
            are tried without as well.
    """
    variadic = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    parameters = {n: p for n, p in inspect.signature(model.forward).parameters.items() if p.kind not in variadic}
    make = _candidates(_Sizes(model.config))
    main = [model.main_input_name] if isinstance(model.main_input_name, str) else list(model.main_input_name)
    required = [name for name, p in parameters.items() if p.default is p.empty]
    needed = dict.fromkeys([*main, *required, "decoder_input_ids"])
    known = [name for name in make if name != "pixel_values_videos"]
    choices = [[name for name in names if name in parameters and name in make] for names in (needed, known)]
    for masked, names in itertools.product((True, False) if side != "none" else (False,), choices):
        for combination in itertools.product(*(make[name] for name in names)):
            inputs = dict(zip(names, combination))
            if "bbox" in parameters and "input_ids" in inputs:
                inputs["bbox"] = make["bbox"][0]
            first = inputs.get("input_ids", inputs.get("input_values"))
            if masked and "attention_mask" in parameters and first is not None and first.dim() == 2:
                inputs["attention_mask"] = _padded(first, side)
            if inputs and masked == ("attention_mask" in inputs):
                yield inputs
