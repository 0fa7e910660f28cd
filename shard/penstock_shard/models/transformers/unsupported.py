"""Refuses models, at load, that would be served wrongly.

transformers does not fail if a model ignores a registered attention function, or expresses
something only in the attention mask, which our function never sees: the text would silently be
wrong. Here the configuration, the class, and each probed layer's attention call are checked.
`selfcheck/own_attention.py` has a fourth check.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import transformers
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    PreTrainedConfig,
    PreTrainedModel,
)

from penstock_shard.attention.base import LayerSpec
from penstock_shard.checkpoint.text_config import has_text_model
from penstock_shard.errors import ModelError
from penstock_shard.models.decoder.families import own_layer_types
from penstock_shard.models.layer_config import each_layer
from penstock_shard.models.transformers import recurrences, sparse_indexers
from penstock_shard.models.transformers.sparse_indexers import most_unselected_tokens

_LAYER_TYPES = {"full_attention", "sliding_attention"}
# Layers may differ in these values, because attention calls show them.
_LAYER_ATTRIBUTES = {"head_dim", "num_key_value_heads"}
# Rope types whose angles change for the whole batch past the original context.
_BATCH_DEPENDENT_ROPE = {"dynamic", "longrope"}
# Architectures without a language model's head; transformers would load a random one.
_SCORES = re.compile(
    r"(For(Sequence|Token)Classification|ForQuestionAnswering|ForMultipleChoice|RewardModel)$"
)
_INSTEAD = (
    "is not served; serve a decoder, which generates text, and vectors with --embeddings last or "
    "mean"
)


def architecture_of(config: PreTrainedConfig) -> str:
    architectures = getattr(config, "architectures", None) or [type(config).__name__]
    return str(architectures[0])


def check_config(config: PreTrainedConfig, max_model_len: int) -> None:
    """Raise ModelError if the configuration shows that the model cannot be served."""
    name = architecture_of(config)
    text = config.get_text_config()
    # Check this first, because reading a differing attribute raises an error.
    differing = set(getattr(text, "per_layer_attributes", None) or ()) - _LAYER_ATTRIBUTES
    if differing:
        raise ModelError(
            f"{name} has layers that differ in {', '.join(sorted(differing))}, which is not "
            "served; serve a model whose layers are alike in it"
        )
    served = _LAYER_TYPES | own_layer_types(text)
    if most_unselected_tokens(text) is not None:
        served |= sparse_indexers.LAYER_TYPES
    if recurrences.are_served(text):
        served |= recurrences.LAYER_TYPES
    odd = sorted(set(getattr(text, "layer_types", None) or ()) - served)
    if odd:
        raise ModelError(f"{name} has layers of type {', '.join(odd)}, which are not served")
    if getattr(text, "alibi", False) or getattr(text, "position_embedding_type", None) == "alibi":
        raise ModelError(f"{name} uses ALiBi position biases, which are not served")
    for layer in each_layer(text):
        _check_heads(name, layer)
    _check_rope(name, text, max_model_len)


def check_purpose(config: PreTrainedConfig) -> None:
    """Raise ModelError for a model that is no decoder. transformers would list all its classes, or
    load a decoder of the same type without trained weights.
    """
    reason = _other_purpose(architecture_of(config), config)
    if reason is not None:
        raise ModelError(f"{architecture_of(config)} ({config.model_type}) {reason}")


def _other_purpose(name: str, config: PreTrainedConfig) -> str | None:
    """Return what the model is, if it is no decoder, and what to serve instead."""
    if _SCORES.search(name):
        return f"gives scores or classes of texts, and {_INSTEAD}"
    if getattr(config, "is_encoder_decoder", False):
        return f"is an encoder-decoder, or half of one, and {_INSTEAD}"
    if _is_encoder(name, config):
        return f"is an encoder, whose tokens see those after them, and {_INSTEAD}"
    own_code = getattr(config, "auto_map", None) or {}
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING or "AutoModelForCausalLM" in own_code:
        return None
    if has_text_model(config):
        return None
    if type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return (
            "is a model of images and text of a type whose text is not served either so far; "
            "serve a model of text alone"
        )
    version = transformers.__version__
    return f"has no class that generates text in transformers {version}, and {_INSTEAD}"


def _is_encoder(name: str, config: PreTrainedConfig) -> bool:
    """True if tokens see later tokens: in a type that fills in masks, or in a changed decoder."""
    if type(config) in MODEL_FOR_MASKED_LM_MAPPING:
        return not getattr(config, "is_decoder", False)
    text = config.get_text_config()
    sees_all = getattr(text, "use_bidirectional_attention", None) in (True, "all")
    # XLNet's name for this.
    sees_all = sees_all or getattr(text, "attn_type", None) == "bi"
    return sees_all or getattr(text, "is_causal", None) is False or "Bidirectional" in name


def _check_heads(name: str, text: PreTrainedConfig) -> None:
    """Check sizes now. Modelling code would fail only at its first step, with an error about
    shapes.
    """
    heads = getattr(text, "num_attention_heads", None)
    kv_heads = getattr(text, "num_key_value_heads", None)
    if heads and kv_heads is not None and (kv_heads < 1 or heads % kv_heads):
        raise ModelError(
            f"{name}: num_attention_heads is {heads}; it must be a multiple of "
            f"num_key_value_heads, {kv_heads}"
        )
    head_dim = getattr(text, "head_dim", None)
    if head_dim is None and heads:
        head_dim = text.hidden_size // heads
    rotates = getattr(text, "rope_parameters", None)
    if rotates and head_dim and head_dim % 2:
        raise ModelError(f"{name}: head_dim is {head_dim}; rotary positions need an even one")


def _check_rope(name: str, text: PreTrainedConfig, max_model_len: int) -> None:
    parameters = getattr(text, "rope_parameters", None) or {}
    # One set of parameters, or one per type of layer.
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    for rope in nested or [parameters]:
        if rope.get("rope_type", "default") not in _BATCH_DEPENDENT_ROPE:
            continue
        original = _original_context(rope, text)
        if max_model_len > original:
            raise ModelError(
                f"{name}: rope type {rope['rope_type']} past {original} tokens depends on what "
                f"else is in the batch; use --max-model-len {original}"
            )


def _original_context(rope: dict[str, Any], text: PreTrainedConfig) -> int:
    original = rope.get("original_max_position_embeddings") or getattr(
        text, "original_max_position_embeddings", None
    )
    return int(original or text.max_position_embeddings)


def check_ours_alone(text: PreTrainedConfig, reason: Exception) -> None:
    """Raise ModelError for a type that only our decoder serves. `reason` says why it does not
    compute this model.
    """
    if own_layer_types(text):
        raise ModelError(
            f"{text.model_type} is served by our decoder alone, which does not compute this model: "
            f"{reason}"
        )


def check_class(module: PreTrainedModel) -> None:
    """Raise ModelError if the class's attention cannot be replaced."""
    if not module._can_set_attn_implementation():
        raise ModelError(
            f"{type(module).__name__} does not let its attention be replaced (its code in "
            "transformers ignores the attention interface), so it cannot run on a paged cache; "
            "it is not served"
        )


def check_layers(
    module: PreTrainedModel,
    specs: Sequence[LayerSpec],
    max_model_len: int,
) -> None:
    """Raise ModelError unless the probed model fits its configuration: one attention call in each
    layer that attends, with the stated window and softcap, and a state in each layer that has one.
    """
    name = type(module).__name__
    text = module.config.get_text_config()
    types = getattr(text, "layer_types", None) or ["full_attention"] * int(text.num_hidden_layers)
    states = sum(spec.state is not None for spec in specs)
    with_state = [kind for kind in types if kind in recurrences.WITH_STATE]
    if states != len(with_state):
        raise ModelError(
            f"{name}: {states} layers keep a state here, and {len(with_state)} are to, of types "
            f"{', '.join(sorted(set(with_state)))}; it is not served"
        )
    specs = [spec for spec in specs if spec.state is None]
    expected = [i for i, kind in enumerate(types) if kind not in recurrences.WITHOUT_ATTENTION]
    if sorted(spec.index for spec in specs) != expected:
        raise ModelError(
            f"{name}: {len(specs)} attention calls for {len(expected)} layers that attend; models "
            "whose layers do not each attend once are not served"
        )
    _check_windows(name, text, specs, max_model_len)
    softcap = getattr(text, "attn_logit_softcapping", None)
    if softcap and any(spec.softcap is None for spec in specs):
        raise ModelError(
            f"{name}: attention calls do not get the softcap that the configuration states; "
            "it is not served"
        )


def _check_windows(
    name: str, text: PreTrainedConfig, specs: Sequence[LayerSpec], max_model_len: int
) -> None:
    """Check that the configured window reached the attention call."""
    layer_types = getattr(text, "layer_types", None) or ()
    seen = any(spec.window is not None for spec in specs)
    # Without layer types, a window applies to all layers.
    if layer_types and ("sliding_attention" in layer_types or not seen):
        wrong = [
            spec.index
            for spec in specs
            if (layer_types[spec.index] == "sliding_attention") != (spec.window is not None)
        ]
    else:
        window = getattr(text, "sliding_window", None)
        used = window is not None and getattr(text, "use_sliding_window", True)
        wrong = [0] if used and not seen and max_model_len > int(window or 0) else []
    if wrong:
        raise ModelError(
            f"{name}: the attention call of layer {wrong[0]} does not get the sliding window "
            "that the configuration states; it is not served"
        )
