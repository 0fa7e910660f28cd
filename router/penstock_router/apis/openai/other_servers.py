"""Lists fields that clients of other servers add to completions and chats, by their effect here.

The servers are SGLang, llama.cpp, text-generation-inference, vLLM and hosted models, as documented
or in their request schemas.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from penstock_router.json_fields import (
    ANY_NUMBER,
    ANYTHING,
    BOOLEAN,
    INT32_MAX,
    STRING,
    Field,
    Kind,
    Table,
    another_name,
    integer,
    not_served,
    table,
    taken,
    unless,
)

# ---- Other names of served fields --------------------------------------------------------------


# Another server's name -> our name of the field. Routes with the field accept both.
_NAMES: Mapping[str, str] = {
    "n_cmpl": "n",
    "random_seed": "seed",
    "sampling_seed": "seed",
    "repeat_penalty": "repetition_penalty",
    "typical": "typical_p",
    "max_new_tokens": "max_tokens",
    "n_predict": "max_tokens",
    "min_new_tokens": "min_tokens",
    "no_stop_trim": "include_stop_str_in_output",
    "stop_sequences": "stop",
    "return_tokens": "return_token_ids",
    "rid": "request_id",
    "prompt_cache_key": "session_id",
    "thinking_budget": "thinking_token_budget",
    "thinking_budget_tokens": "thinking_token_budget",
    "reasoning_budget": "thinking_token_budget",
    "reasoning_budget_tokens": "thinking_token_budget",
}
# Values with which these names have no effect.
_NOTHING: Mapping[str, tuple[Any, ...]] = {
    "n_predict": (-2,),
    "thinking_budget": (-1,),
    "thinking_budget_tokens": (-1,),
    "reasoning_budget": (-1,),
    "reasoning_budget_tokens": (-1,),
}


def _other_names(fields: Table) -> list[Field]:
    found = []
    for name, ours in _NAMES.items():
        if ours in fields and name not in fields:
            kind, nothing = fields[ours].kind, _NOTHING.get(name)
            kind = unless(kind, *nothing) if nothing else kind
            found.append(another_name(name, fields[ours], kind))
    return found


# ---- Fields that would change the answer, and are not served -----------------------------------


def _read_switch(name: str, value: Any) -> float:
    """Read a number; 0 and negative values switch the field off."""
    given: float = ANY_NUMBER.read(name, value)
    return max(given, 0.0)


def _off_below_0(name: str) -> Field:
    field = not_served(name, Kind(_read_switch, ANY_NUMBER.schema), 0.0)
    return replace(field, nothing={"type": "number", "maximum": 0})


_NOT_SERVED: Sequence[Field] = (
    # Samplers.
    not_served("mirostat", integer(0, 2), 0),
    not_served("mirostat_mode", integer(0, 2), 0),
    not_served("dry_multiplier", ANY_NUMBER, 0.0),
    not_served("xtc_probability", ANY_NUMBER, 0.0),
    _off_below_0("top_n_sigma"),
    _off_below_0("nsigma"),
    not_served("dynatemp_range", ANY_NUMBER, 0.0),
    not_served("dynamic_temperature", BOOLEAN, False),
    not_served("smoothing_factor", ANY_NUMBER, 0.0),
    _off_below_0("adaptive_target"),
    not_served("top_a", ANY_NUMBER, 0.0),
    not_served("tfs", ANY_NUMBER, 1.0),
    not_served("tfs_z", ANY_NUMBER, 1.0),
    not_served("epsilon_cutoff", ANY_NUMBER, 0.0),
    not_served("eta_cutoff", ANY_NUMBER, 0.0),
    not_served("min_keep", integer(0, INT32_MAX), 0, 1),
    not_served("samplers", ANYTHING, []),
    not_served("sampler_priority", ANYTHING, []),
    not_served("sampler_order", ANYTHING, []),
    not_served("temperature_last", BOOLEAN, False),
    not_served("no_repeat_ngram_size", integer(0, INT32_MAX), 0),
    not_served("encoder_repetition_penalty", ANY_NUMBER, 1.0),
    not_served("penalty_alpha", ANY_NUMBER, 0.0),
    not_served("guidance_scale", ANY_NUMBER, 1.0),
    not_served("negative_prompt", STRING, ""),
    not_served("custom_logit_processor", ANYTHING),
    # Fields about the end of an answer.
    not_served("stop_regex", ANYTHING, "", []),
    not_served("t_max_predict_ms", integer(-1, 2**63 - 1), 0, -1),
    not_served("t_max_prompt_ms", integer(-1, 2**63 - 1), 0, -1),
    not_served("n_indent", integer(0, INT32_MAX), 0),
    # Fields about constraints that begin within an answer.
    not_served("grammar_lazy", BOOLEAN, False),
    not_served("grammar_triggers", ANYTHING, []),
    not_served("preserved_tokens", ANYTHING, []),
    # Fields about the contents of the answer.
    not_served("separate_reasoning", BOOLEAN, True),
    not_served("stream_reasoning", BOOLEAN, True),
    not_served("reasoning_format", STRING, "auto", "deepseek"),
    not_served("parse_tool_calls", BOOLEAN, True),
    not_served("response_fields", ANYTHING, []),
    not_served("post_sampling_probs", BOOLEAN, False),
    not_served("n_probs", integer(0, INT32_MAX), 0),
    not_served("return_hidden_states", BOOLEAN, False),
    not_served("return_routed_experts", BOOLEAN, False),
    not_served("return_meta_info", BOOLEAN, False),
    not_served("return_prompt_token_ids", BOOLEAN, False),
    # Fields about the contents of the prompt.
    not_served("input_ids", ANYTHING),
    not_served("input_embeds", ANYTHING),
    not_served("image_data", ANYTHING, []),
    not_served("multimodal_data", ANYTHING, []),
    not_served("tool_prompt", STRING),
    not_served("guideline", STRING),
    not_served("safe_prompt", BOOLEAN, False),
    not_served("task", STRING),
    not_served("plugins", ANYTHING, []),
    not_served("session_params", ANYTHING, {}),
    not_served("images_config", ANYTHING, {}),
    not_served("max_dynamic_patch", ANYTHING),
    not_served("min_dynamic_patch", ANYTHING),
    not_served("use_audio_in_video", BOOLEAN, False),
    # Adapters are requested by `model` or `lora_path`.
    not_served("lora", ANYTHING, []),
)

# ---- Fields that cannot change the answer ------------------------------------------------------

_SETTINGS_OF_OTHERS = "A setting of samplers that are not served."
_OF_ANOTHER_PLACE = "Where and how another server computes."
_OF_ANOTHER_ANSWER = "What another server adds to its answers."
_TAKEN: Mapping[str, Sequence[str]] = {
    _SETTINGS_OF_OTHERS: (
        *("mirostat_tau", "mirostat_eta", "xtc_threshold", "dynatemp_exponent"),
        *("dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers"),
        *("dynatemp_low", "dynatemp_high", "smoothing_curve", "adaptive_decay", "custom_params"),
    ),
    _OF_ANOTHER_PLACE: (
        *("cache_prompt", "id_slot", "slot_id", "n_keep", "n_discard", "n_cache_reuse"),
        *("backend_sampling", "reasoning_control", "sse_ping_interval", "speculative.n_max"),
        *("speculative.n_min", "speculative.p_min", "bootstrap_host", "bootstrap_port"),
        *("bootstrap_room", "routed_dp_rank", "data_parallel_rank", "disagg_prefill_dp_rank"),
        *("extra_key", "ngram_corpus_id", "keep_alive", "provider", "route", "models"),
        *("transforms", "num_ctx"),
    ),
    _OF_ANOTHER_ANSWER: (
        *("verbose", "timings_per_token", "return_progress", "return_cached_tokens_details"),
        *("routed_experts_start_len", "routed_experts_prompt_start", "return_token_offsets"),
        *("return_mm_kwargs", "custom_labels", "usage"),
    ),
}


def with_other_servers(fields: Sequence[Field]) -> Table:
    own = table(fields)
    taken_fields = [taken(name, False, help=why) for why, names in _TAKEN.items() for name in names]
    others = [*_other_names(own), *_NOT_SERVED, *taken_fields]
    return {**own, **{entry.name: entry for entry in others if entry.name not in own}}
