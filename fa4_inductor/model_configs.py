"""Sizes of the models in `model_zoo`: "tiny" takes seconds on a CPU, "demo" can be timed there, "bench" fills a GPU.

Head dims are ones the kernel has, also in the tiny models, so that a tiny model on a GPU runs through it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

SIZES = ("tiny", "demo", "bench")
Config = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Shape:
    """Batch and sequence length of one forward, and whether one row of the batch is padded."""

    batch: int
    seqlen: int
    padded: bool


@dataclasses.dataclass(frozen=True)
class Entry:
    """How one model is built. `sizes` and `shapes` by size name; `sites` counts the attention sites of a config."""

    model_type: str
    sizes: dict[str, Config]
    shapes: dict[str, Shape]
    sites: Callable[[Any], int]
    class_name: str = "AutoModelForCausalLM"
    padding_side: str = "left"


def _layers(config: Any) -> int:
    return int(config.num_hidden_layers)


def _encoder_layers(config: Any) -> int:
    return int(config.num_layers)


def _encoder_and_decoder_sites(config: Any) -> int:
    return int(config.num_layers) + 2 * int(config.num_decoder_layers)


def _decoder(
    hidden: int, heads: int, kv_heads: int, head_dim: int, intermediate: int, layers: int, **more: Any
) -> Config:
    """A Llama-like decoder; the names are those of Hugging Face's configs."""
    return dict(
        vocab_size=32000 if hidden > 1024 else 256,
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        **more,
    )


def _shapes(bench: Shape, tiny: Shape = Shape(2, 96, True)) -> dict[str, Shape]:
    return {"tiny": tiny, "demo": Shape(1, 1024, False), "bench": bench}


_LONG = _shapes(Shape(1, 8192, False))
_PADDED = _shapes(Shape(2, 4096, True))
_LLAMA = {
    "tiny": _decoder(128, 4, 2, 64, 128, 2),
    "demo": _decoder(512, 8, 2, 64, 512, 4, max_position_embeddings=4096),
    "bench": _decoder(2048, 32, 8, 64, 8192, 4, max_position_embeddings=32768),
}
_MISTRAL = {
    "tiny": _decoder(128, 4, 2, 64, 128, 2, sliding_window=32),
    "demo": _decoder(512, 8, 2, 64, 1024, 4, sliding_window=128),
    "bench": _decoder(4096, 32, 8, 128, 14336, 4, sliding_window=1024, max_position_embeddings=32768),
}
_GEMMA2 = {
    "tiny": _decoder(128, 2, 1, 256, 128, 2, sliding_window=32),
    "demo": _decoder(512, 4, 2, 256, 1024, 4, sliding_window=128),
    "bench": _decoder(2304, 8, 4, 256, 9216, 4, sliding_window=4096),
}
# All experts are used in the small sizes: a router near a tie would turn rounding into another expert.
_GPT_OSS = {
    "tiny": _decoder(128, 4, 2, 64, 64, 2, sliding_window=32, num_local_experts=2, num_experts_per_tok=2),
    "demo": _decoder(512, 8, 2, 64, 256, 4, sliding_window=128, num_local_experts=2, num_experts_per_tok=2),
    "bench": _decoder(2880, 64, 8, 64, 2880, 4, sliding_window=128, num_local_experts=4, num_experts_per_tok=2),
}
_QWEN3 = {
    "tiny": _decoder(128, 4, 2, 64, 128, 2),
    "demo": _decoder(512, 8, 2, 64, 1024, 4),
    "bench": _decoder(2048, 16, 8, 128, 6144, 4),
}
_TOKENS = dict(bos_token_id=1, eos_token_id=1)  # the defaults lie outside these vocabularies
_GPT2 = {
    "tiny": dict(n_embd=128, n_layer=2, n_head=2, n_positions=512, vocab_size=256, **_TOKENS),
    "demo": dict(n_embd=512, n_layer=4, n_head=8, n_positions=1024, vocab_size=256, **_TOKENS),
    "bench": dict(n_embd=1024, n_layer=4, n_head=16, n_positions=4096, vocab_size=32000, **_TOKENS),
}


def _bert_like(hidden: int, heads: int, intermediate: int, layers: int, **more: Any) -> Config:
    names = dict(hidden_size=hidden, num_attention_heads=heads, num_hidden_layers=layers)
    return names | dict(intermediate_size=intermediate) | more


_BERT = {
    "tiny": _bert_like(128, 2, 128, 2, vocab_size=256),
    "demo": _bert_like(512, 8, 1024, 4, vocab_size=256, max_position_embeddings=1024),
    "bench": _bert_like(1024, 16, 4096, 4, max_position_embeddings=4096),
}
_VIT = {
    "tiny": _bert_like(128, 2, 128, 2, image_size=64, patch_size=8),
    "demo": _bert_like(512, 8, 1024, 4, image_size=224, patch_size=7),
    "bench": _bert_like(1024, 16, 4096, 4, image_size=224, patch_size=16),
}
_BLOOM = {
    "tiny": dict(hidden_size=128, n_layer=2, n_head=2, vocab_size=256),
    "demo": dict(hidden_size=512, n_layer=4, n_head=8, vocab_size=256),
    "bench": dict(hidden_size=2048, n_layer=4, n_head=16, vocab_size=32000),
}
_MPT = {
    "tiny": dict(d_model=128, n_heads=2, n_layers=2, max_seq_len=512, vocab_size=256),
    "demo": dict(d_model=512, n_heads=8, n_layers=4, max_seq_len=1024, vocab_size=256),
    "bench": dict(d_model=2048, n_heads=16, n_layers=4, max_seq_len=4096, vocab_size=32000),
}
_T5 = {
    "tiny": dict(d_model=128, d_kv=64, num_layers=2, num_decoder_layers=2, num_heads=2, d_ff=128, vocab_size=256),
    "demo": dict(d_model=512, d_kv=64, num_layers=4, num_decoder_layers=4, num_heads=8, d_ff=1024, vocab_size=256),
    "bench": dict(d_model=1024, d_kv=64, num_layers=4, num_decoder_layers=4, num_heads=16, d_ff=2816, vocab_size=32000),
}
_T5_SHAPES = _shapes(Shape(4, 2048, True))

ENTRIES: dict[str, Entry] = {
    "llama": Entry("llama", _LLAMA, _LONG, _layers),
    "mistral": Entry("mistral", _MISTRAL, _shapes(Shape(1, 16384, False)), _layers),
    "gemma2": Entry("gemma2", _GEMMA2, _LONG, _layers),
    "gpt_oss": Entry("gpt_oss", _GPT_OSS, _LONG, _layers),
    "qwen3": Entry("qwen3", _QWEN3, _LONG, _layers),
    "gpt2": Entry("gpt2", _GPT2, _shapes(Shape(4, 4096, True)), _layers),
    "bert": Entry("bert", _BERT, _shapes(Shape(8, 2048, True)), _layers, "AutoModel", "right"),
    "bloom": Entry("bloom", _BLOOM, _PADDED, _layers),
    "mpt": Entry("mpt", _MPT, _PADDED, _layers),
    "t5_encoder": Entry("t5", _T5, _T5_SHAPES, _encoder_layers, "T5EncoderModel", "right"),
    "t5": Entry("t5", _T5, _T5_SHAPES, _encoder_and_decoder_sites, "AutoModelForSeq2SeqLM", "right"),
    "vit": Entry("vit", _VIT, _shapes(Shape(32, 0, False), Shape(2, 0, False)), _layers, "AutoModel"),
}
