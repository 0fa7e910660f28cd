"""The configuration of the text model in a model of images and text, as if it were a separate
model. `text_names` has the names of its tensors.
"""

from __future__ import annotations

import copy
from typing import Any

from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    PreTrainedConfig,
    conversion_mapping,
)

# Models of images and text. For text alone, a text-only model gives the same logits.
_TYPES = frozenset(
    {
        "gemma3",
        "gemma3n",
        "gemma4",
        "gemma4_unified",
        "glm46v",
        "glm4v",
        "glm4v_moe",
        "idefics3",
        "internvl",
        "kimi_k25",
        "lfm2_vl",
        "llama4",
        "llava",
        "llava_next",
        "minimax_m3_vl",
        "mistral3",
        "mistral4",
        "qwen2_5_vl",
        "qwen2_vl",
        "qwen3_5",
        "qwen3_5_moe",
        "qwen3_vl",
        "qwen3_vl_moe",
        "qwen4_exp",
        "smolvlm",
    }
)
# Text types without a causal LM -> types with one that computes the same if a token's three
# positions are equal, as in text.
_SAME_AS = {
    "glm4v_moe_text": "glm4_moe",
    "glm4v_text": "glm4",
    "qwen2_5_vl_text": "qwen2",
    "qwen2_vl_text": "qwen2",
    "qwen3_vl_moe_text": "qwen3_moe",
    "qwen3_vl_text": "qwen3",
}
# Parameters that divide rotary embeddings between the three positions.
_THREE_POSITIONS = ("mrope_section", "mrope_interleaved")


def has_text_model(config: PreTrainedConfig) -> bool:
    """Tell whether this is a model of images and text whose text model is served."""
    if type(config).__module__.split(".")[:2] != ["transformers", "models"]:
        # The configuration class comes with the model's own code.
        return False
    text = config.get_text_config()
    _complete(text)
    has_class = text.model_type in _SAME_AS or type(text) in MODEL_FOR_CAUSAL_LM_MAPPING
    return config.model_type in _TYPES and has_class


def text_config(config: PreTrainedConfig, *, has_head: bool | None) -> PreTrainedConfig:
    """Return the configuration of the text model; return any other configuration unchanged.

    The embedding is tied unless the files have a head: the two parts of such configurations may
    disagree about it. Without files, `has_head` is None.
    """
    if not has_text_model(config):
        return config
    text = copy.deepcopy(config.get_text_config())
    if text.model_type in _SAME_AS:
        text = _plain(text)
    text.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING[type(text)].__name__]
    text.dtype = text.dtype or config.dtype
    if has_head is not None:
        text.tie_word_embeddings = not has_head
    return text


def _plain(text: PreTrainedConfig) -> PreTrainedConfig:
    """Convert the configuration to its type in `_SAME_AS`."""
    values: dict[str, Any] = text.to_dict()
    rope = values["rope_parameters"]
    for name in _THREE_POSITIONS:
        rope.pop(name, None)
    model_type = _SAME_AS[values.pop("model_type")]
    if model_type == "glm4":
        rope.setdefault("partial_rotary_factor", 1.0)
        values.setdefault("head_dim", text.hidden_size // text.num_attention_heads)
    if model_type == "qwen3_moe":
        values["norm_topk_prob"] = True
    plain: PreTrainedConfig = CONFIG_MAPPING[model_type](**values)
    return plain


def _complete(text: PreTrainedConfig) -> None:
    if text.model_type == "mistral4":
        from transformers import Mistral4ForCausalLM

        AutoModelForCausalLM.register(type(text), Mistral4ForCausalLM, exist_ok=True)
    if text.model_type == "minimax_m3_vl_text":
        conversions = conversion_mapping.get_checkpoint_conversion_mapping("minimax_m3_vl")
        conversion_mapping.register_checkpoint_conversion_mapping(
            text.model_type, conversions, overwrite=True
        )
