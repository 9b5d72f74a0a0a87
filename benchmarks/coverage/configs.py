"""Tiny configs: from a model type's default config to one of the same class with few layers and small widths.

Fields are recognised by their names, which transformers shares between models. Types that insist on a relation between
fields that no name tells have an entry in `OVERRIDES`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import transformers
import transformers.models.auto.modeling_auto as auto
from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

VOCAB = 128
MAX_POSITIONS = 64
WINDOW = 8
# Vision models keep at least this many patches a side, or an image of about this size.
MIN_PATCHES, MIN_IMAGE = 4, 56
# The auto classes to ask for a type's class, in this order; "" is AutoModel.
_TASKS = """
CAUSAL_LM SEQ_TO_SEQ_CAUSAL_LM MASKED_LM IMAGE_CLASSIFICATION DEPTH_ESTIMATION SEMANTIC_SEGMENTATION
UNIVERSAL_SEGMENTATION IMAGE_TEXT_TO_TEXT BACKBONE OBJECT_DETECTION MULTIMODAL_LM"""
TASKS = ["", *_TASKS.split()]
_COMMON = """
llama mistral gemma2 gemma3_text qwen2 qwen3 phi3 gpt2 gpt_neo gpt_neox gptj opt bloom falcon mpt gpt_oss olmo2 cohere
deepseek_v3 mixtral bert roberta distilbert albert deberta-v2 modernbert xlnet longformer t5 bart m2m_100 whisper
wav2vec2 vit swin beit dinov2 segformer detr clip siglip"""
# Measured first, and alone under `--models common`.
COMMON = _COMMON.split()


@dataclasses.dataclass(frozen=True)
class Rule:
    """What becomes of an integer field whose whole name matches `pattern`.

    Attributes:
        limit: the largest value, or a function of the default; None keeps the default.
        kind: "width" is left alone where widths are kept, "kv_heads" too; "depth" is a number of layers.
    """

    pattern: str
    limit: int | Callable[[int], int] | None
    kind: str = ""


def _as_token(fallback: Callable[[int], int]) -> Callable[[int], int]:
    return lambda value: value if value < VOCAB else fallback(value)


RULES = (  # the first that matches decides
    Rule(
        r"type_vocab_size|.*(codebook|feature|residual|adapter|shared|mtp)_?layers?|max_window_layers|num_labels", None
    ),
    Rule(
        r"(.*_)?vocab_size\w*|num_embeddings|max_position_embeddings|n_positions|n_ctx|max_seq(uence)?_len(gth)?", VOCAB
    ),
    Rule(r"(pad|bos|decoder_start|eos)_token_id", _as_token(lambda value: 2)),
    Rule(
        r"(image|video|audio|vision|mask|boi|eoi|img|speech|sep)\w*_token_(id|index)",
        _as_token(lambda value: 100 + value % 28),
    ),
    Rule(r"(.*_)?max_(source|target)_positions", MAX_POSITIONS, "width"),
    Rule(r"(\w+_)?(kv|key_value|query)_?(heads|groups)", None, "kv_heads"),
    Rule(r"qk_rope_head_dim|rotary_dim|rotary_ndims|qk_pos_emb_head_dim", 8, "width"),
    Rule(
        r"(.*_)?(head_dim|head_size|d_kv|d_head|kv_channels|attention_key_size|dim_head)|num_conv_pos_embeddings",
        16,
        "width",
    ),
    Rule(r"(.*_)?(num_)?(n_)?(attention_)?heads?|num_head", 4),
    Rule(
        r"(.*_)?(kv|q|o)_lora_rank|(.*_)?moe_(ffn_)?intermediate_size|expert_ffn_hidden_size"
        r"|(.*_)?expert_intermediate_size",
        32,
        "width",
    ),
    Rule(
        r"(.*_)?(intermediate_size|intermediate_dim|ffn_dim|ffn_hidden_size|d_ff|n_inner|mlp_dim|inner_dim|d_inner)",
        128,
    ),
    Rule(
        r"(.*_)?(num_)?(n_)?(encoder_|decoder_|hidden_)*(layers?|blocks|depth)|e_layers|d_layers",
        2,
        "depth",
    ),
    Rule(r"num_(local_)?experts|n_routed_experts|(.*_)?num_experts|num_conv_pos_embedding_groups", 4),
    Rule(r"num_experts_per_tok(en)?|moe_topk|moe_top_k|top_k|(.*_)?moe_k|expert_top_k", 2),
    Rule(r"n_group|topk_group|first_k_dense_replace", 1),
    Rule(
        r"sliding_window(_size)?|window_size|attention_window|attention_chunk_size",
        lambda value: WINDOW if value > 16 else value,
    ),
    Rule(
        r"hidden_size|d_model|n_embd|dim|hidden_dim|embed_dim|emb_dim|word_embed_proj_dim|d_embed|model_dim|width",
        64,
        "width",
    ),
    Rule(
        r"embedding_size|projection_dim|(text|vision|qformer|encoder|decoder|mm|audio)_(hidden|embed)_(size|dim)",
        64,
        "width",
    ),
    Rule(r"num_queries|num_query_tokens", 12),
)


def _rope(*sections: int, **parameters: float) -> dict[str, Any]:
    rope = dict(rope_type="default", rope_theta=1e4, mrope_section=list(sections), **parameters)
    return {"rope_parameters": rope}


_DEBERTA = dict(relative_attention=True, pos_att_type=["c2p", "p2c"], max_relative_positions=16)
_GLM_ROPE = _rope(1, 1, 2, partial_rotary_factor=0.5)
# By the model type of a config or sub-config, applied last.
OVERRIDES: dict[str, dict[str, Any]] = {
    "bamba": dict(mamba_n_heads=8, mamba_d_head=16, attn_layer_indices=[1]),
    "beit": dict(use_relative_position_bias=True),
    "big_bird": dict(block_size=2, num_random_blocks=1),
    "bigbird_pegasus": dict(block_size=2, num_random_blocks=1),
    "deberta": _DEBERTA,
    "deberta-v2": dict(_DEBERTA, position_buckets=8),
    "deepseek_v2": dict(num_experts_per_tok=2),
    "dots1": dict(n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=1),
    "esm": dict(vocab_size=VOCAB, pad_token_id=1, mask_token_id=4),
    "falcon_h1": dict(mamba_d_ssm=128, mamba_n_heads=8, mamba_d_head=16),
    "gemma3n_text": dict(num_kv_shared_layers=0),
    "glm4v_moe_text": _GLM_ROPE,
    "glm4v_text": _GLM_ROPE,
    "glm_image_text": _GLM_ROPE,
    "gpt_neo": dict(attention_types=[[["global", "local"], 1]]),
    "hunyuan_v1_dense": dict(head_dim=16),
    "jamba": dict(attn_layer_period=2, attn_layer_offset=1),
    "layoutlmv3": dict(coordinate_size=12, shape_size=8),
    "led": dict(
        attention_window=[WINDOW, WINDOW], max_encoder_position_embeddings=128, max_decoder_position_embeddings=128
    ),
    "llama": dict(num_key_value_heads=2),
    "longformer": dict(attention_window=[WINDOW, WINDOW]),
    "nemotron": dict(num_key_value_heads=2, head_dim=16),
    "phi3": dict(num_key_value_heads=2),
    "qwen2_5_vl_text": _rope(2, 3, 3),
    "qwen2_vl_text": _rope(2, 3, 3),
    "xmod": dict(default_language="en_XX"),
}


@dataclasses.dataclass(frozen=True)
class _Facts:
    """What the size of one field depends on besides its name."""

    depth: int
    heads: int
    staged: bool  # widths and depths are lists, one entry per stage
    layers: list[int]  # those that are kept: two, or one of each layer type
    keep_widths: bool

    @classmethod
    def of(cls, base: PreTrainedConfig, wide: bool) -> _Facts:
        depth = _first_int(base, "num_hidden_layers", "n_layer", "num_layers", "n_layers")
        heads = _first_int(base, "num_attention_heads", "n_head", "num_heads", "n_heads")
        stages = ("depths", "hidden_sizes", "num_heads", "embed_dims")
        staged = any(isinstance(getattr(base, name, None), list | tuple) for name in stages)
        types = list(getattr(base, "layer_types", None) or getattr(base, "layers_block_type", None) or [])
        layers = sorted({types.index(kind) for kind in types} | set(range(min(2, depth))))
        return cls(depth, heads, staged, layers, staged or wide)


def _first_int(config: PreTrainedConfig, *names: str) -> int:
    values = (getattr(config, name, None) for name in names)
    return next((value for value in values if isinstance(value, int)), 0)


def shrink(base: PreTrainedConfig, cache: bool = False, wide: bool = False) -> PreTrainedConfig:
    """A config of `base`'s class with small sizes: two layers, or one of each layer type.

    Args:
        cache: `use_cache` of the result.
        wide: keep widths and head counts, for types that insist on relations between them.

    Raises:
        Whatever the config class raises for sizes that do not fit together.
    """
    facts, small = _Facts.of(base, wide), {}
    for name in (field.name for field in dataclasses.fields(base)):
        try:
            value = getattr(base, name)
        except Exception:  # per-layer attributes of heterogeneous configs
            continue
        changed = shrink(value, cache, wide) if _is_plain_config(value) else _small(base, name, value, facts, wide)
        if changed is not None:
            small[name] = changed
    if hasattr(base, "use_cache"):
        small["use_cache"] = cache
    return type(base)(**small | OVERRIDES.get(base.model_type, {}))


def _is_plain_config(value: Any) -> bool:
    return isinstance(value, PreTrainedConfig) and value.model_type != "timm_backbone"


def _small(base: PreTrainedConfig, name: str, value: Any, facts: _Facts, wide: bool) -> Any:
    """The value to pass for one field; None leaves it to the class."""
    if isinstance(value, PreTrainedConfig):  # a timm backbone: needs the hub
        stages = list(getattr(value, "out_indices", None) or [4])
        sizes = dict(embedding_size=16, hidden_sizes=[16, 16, 32, 32], depths=[1] * 4)
        return transformers.ResNetConfig(**sizes, out_indices=stages)
    patch = base.__dict__.get("patch_size")
    if name == "image_size" and isinstance(value, int) and isinstance(patch, int) and not facts.staged:
        return patch * max(MIN_PATCHES, -(-MIN_IMAGE // patch))
    if name == "eos_token_id" and isinstance(value, list):
        return 2
    if isinstance(value, list | tuple) and value:
        return _small_list(name, value, facts)
    if isinstance(value, dict) and "mrope_section" in value and not wide:
        return {**value, "mrope_section": [2, 3, 3]}
    if isinstance(value, int) and not isinstance(value, bool) and value > 1:
        return _small_int(name, value, facts)
    return None


def _small_list(name: str, value: Any, facts: _Facts) -> Any:
    limit = {"depths": 2, "conv_dim": 32}.get(name)
    if limit is not None and all(isinstance(x, int) for x in value):
        return type(value)(min(x, limit) for x in value)
    if len(value) == facts.depth > 2 and not facts.staged:
        return type(value)(value[i] for i in facts.layers)
    return value


def _small_int(name: str, value: int, facts: _Facts) -> int | None:
    rule = next((rule for rule in RULES if re.fullmatch(rule.pattern, name)), Rule("", None))
    is_width = rule.kind in ("width", "kv_heads") or "head" in name
    if facts.keep_widths and (is_width or name in ("intermediate_size", "mlp_dim", "num_encoder_blocks")):
        return None
    if rule.kind == "kv_heads":
        return min(value, 4 if value == facts.heads else 2)
    if rule.kind == "depth" and value == facts.depth:
        return min(value, len(facts.layers))
    if callable(rule.limit):
        return rule.limit(value)
    return None if rule.limit is None else min(value, rule.limit)


def model_types() -> list[str]:
    """All model types of the installed transformers, the common ones first."""
    return COMMON + sorted(set(CONFIG_MAPPING_NAMES) - set(COMMON))


def default_config(model_type: str) -> PreTrainedConfig:
    """The default config of a model type. Raises what its class raises."""
    return CONFIG_MAPPING[model_type]()


def model_class(model_type: str) -> type:
    """The class that AutoModel, or else another auto class, gives. Raises `LookupError` when there is none."""
    for task in TASKS:
        mapping = getattr(auto, f"MODEL_{'FOR_' + task + '_' if task else ''}MAPPING_NAMES", {})
        if name := mapping.get(model_type):
            return getattr(transformers, name if isinstance(name, str) else name[0])
    raise LookupError("in no AutoModel mapping")


def is_decoder(model_type: str) -> bool:
    """Whether the type is a decoder-only language model, which generates and is therefore padded on the left."""
    causal, masked = auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
    return model_type in causal and model_type not in masked
