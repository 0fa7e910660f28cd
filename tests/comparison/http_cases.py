"""The requests that a router is asked: one for each route, and a case for each field of its body.

The tables of this checkout's router give the cases of other servers' names of fields, of fields
that have no effect, and of fields that may only ask for nothing.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from comparison.cases import Case, Cases, Json, merge, of_fields, requests_of
from comparison.shard_cases import ADAPTER, MODEL
from support.sampling_values import SAMPLING_VALUES
from support.streams import CONSTRAINTS

from penstock_router.json_fields import Table, Use
from penstock_router.routes.table import ROUTES as SERVED

_WRITTEN = {constraint.kind: constraint.value for constraint in CONSTRAINTS}
_SCHEMA = json.loads(_WRITTEN["json_schema"])
_OPTIONS = ["a short one", "and one that is longer"]
# Ids of special tokens, and one that is not.
_SPECIAL_IDS = [0, 1, 600]
_EVERY_FOURTH_ID = list(range(3, 3072, 4))
_USER = {"role": "user", "content": "The quick brown fox"}
_ASSISTANT = {"role": "assistant", "content": "It jumps"}
_PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}},
    "required": ["city"],
}
_FUNCTION: Json = {"name": "weather", "description": "of a city", "parameters": _PARAMETERS}
_TOOL: Json = {"type": "function", "function": _FUNCTION}


@dataclass(frozen=True)
class Route:
    """A request to a path, and what its fields change in it."""

    base: Json
    cases: Cases


def _silent(value: object) -> Case:
    return Case({"": value}, shows=False)


# ---- fields of several routes; `_with_names` puts their names in --------------------------------

_SAMPLING = {
    **{name: Case({"": value}) for name, value in SAMPLING_VALUES.items()},
    "repetition_penalty": Case({"": 1.7}),
    "presence_penalty": Case({"": 1.9}),
    "frequency_penalty": Case({"": 1.6}),
    "seed": Case({"": -8}),
}
_PAIR = {"x": {"type": "integer"}, "y": {"type": "string"}}
_JSON_OUTPUT = {
    "structured_outputs": {"json": {"type": "object", "properties": _PAIR, "required": ["x", "y"]}}
}
_CONSTRAINTS = {
    "structured_outputs.json": Case({"": _SCHEMA}),
    "structured_outputs.regex": Case({"": _WRITTEN["regex"]}),
    "structured_outputs.choice": Case({"": _OPTIONS}),
    "structured_outputs.grammar": Case({"": _WRITTEN["grammar"]}),
    "structured_outputs.json_object": Case({"": True}),
    "structured_outputs.structural_tag": Case({"": json.loads(_WRITTEN["structural_tag"])}),
    "structured_outputs.whitespace_pattern": Case({"": "[ ]?"}, _JSON_OUTPUT),
    # Which is what no field says.
    "structured_outputs.disable_any_whitespace": Case({"": False}, _JSON_OUTPUT),
    "structured_outputs.disable_additional_properties": Case({"": True}, _JSON_OUTPUT),
    "structured_outputs.disable_fallback": Case({"": True}, _JSON_OUTPUT, shows=False),
    "guided_json": Case({"": _SCHEMA}),
    "guided_regex": Case({"": _WRITTEN["regex"]}),
    "guided_choice": Case({"": _OPTIONS}),
    "guided_grammar": Case({"": _WRITTEN["grammar"]}),
    "guided_whitespace_pattern": Case({"": "[ ]?"}, {"guided_json": _SCHEMA}),
    "guided_decoding_backend": _silent("guidance"),
}
_CONSTRAINTS_OF_OTHERS = {
    "json_schema": Case({"": _SCHEMA}),
    "regex": Case({"": _WRITTEN["regex"]}),
    "ebnf": Case({"": _WRITTEN["grammar"]}),
    "grammar": Case({"": _WRITTEN["grammar"]}),
}
_SCHEDULING = {
    "priority": _silent(3),
    "slo": _silent(0.5),
    "is_latency_sensitive": _silent(True),
    "cache_salt": _silent("salted"),
    "request_id": _silent("mine"),
    "session_id": _silent("a session"),
    "kv_hints.actions": _silent([{"action_type": "retain", "payload": {"ttl_seconds": 9}}]),
    "timeout": _silent(500),
}
# Of all that generate but Anthropic's and TGI's.
_GENERATION = {
    "model": Case({"": ADAPTER}),
    **_SAMPLING,
    **_CONSTRAINTS,
    **_SCHEDULING,
    "repeat_last_n": Case({"": 2}, {"repetition_penalty": 1.7}),
    "logit_bias": Case({"": {"7": -9, "8": 3}}),
    "allowed_token_ids": Case({"": list(range(500, 600))}),
    "bad_words": Case({"": ["the", " a"]}),
    "stop": Case({"": ["e", "a"]}),
    "stop_token_ids": Case({"": _EVERY_FOURTH_ID}),
    "include_stop_str_in_output": Case({"": True}, {"stop": ["e", "a"]}),
    "ignore_eos": Case({"": True}, {"allowed_token_ids": [2], "ignore_eos": False}),
    "min_tokens": Case({"": 12}, {"stop_token_ids": _EVERY_FOURTH_ID}),
    "skip_special_tokens": Case({"": False}, {"allowed_token_ids": _SPECIAL_IDS}),
    "spaces_between_special_tokens": _silent(False),
    "stream": Case({"": True}),
    "stream_interval": Case({"": 4}, {"stream": True}, shows=False),
}
# Of completions and chats.
_OPENAI = {
    **_GENERATION,
    **_CONSTRAINTS_OF_OTHERS,
    "lora_path": Case({"": ADAPTER}),
    "n": Case({"": 3}),
    "echo": Case({"": True}),
    "prompt_logprobs": Case({"": 2}),
    "truncate_prompt_tokens": Case({"": 4}),
    "truncation_side": Case({"": "left"}, {"truncate_prompt_tokens": 4}),
    "add_special_tokens": Case({"": True}),
    "return_token_ids": Case({"": True}),
    "stream_options.include_usage": Case({"": True}, {"stream": True}),
    "stream_options.continuous_usage_stats": Case({"": True}, {"stream": True}, shows=False),
    "max_tokens": Case({"": 9}),
    "response_format": Case({"": {"type": "json_object"}}),
}
_TEMPLATE = {
    "add_generation_prompt": Case({"": False}),
    "chat_template": Case({"": "{{ messages }}"}),
    "chat_template_kwargs": _silent({"mood": "merry"}),
    "documents": _silent([{"text": "a text"}]),
    "reasoning_effort": _silent("low"),
}


def _with_names(cases: Cases, within: str = "") -> dict[str, Case]:
    """The cases with their fields' names in place of "", nested as their dots say."""
    named = {}
    for name, case in cases.items():
        change: Json = case.change.get("", case.change)
        if "" in case.change:
            for part in reversed(f"{within}{name}".split(".")):
                change = {part: change}
        named[f"{within}{name}"] = Case(change, case.beside, case.shows)
    return named


# ---- the routes --------------------------------------------------------------------------------


def _completions() -> Route:
    base = {
        "model": MODEL,
        "prompt": "The quick brown fox jumps over",
        "seed": 7,
        "temperature": 0.9,
        "max_tokens": 24,
        "ignore_eos": True,
        "logprobs": 1,
    }
    cases = {
        **_OPENAI,
        "prompt": Case({"": ["The lazy dog", [5, 6, 7]]}),
        "best_of": Case({"": 4}),
        "logprobs": Case({"": 4}),
        "logprob_token_ids": Case({"": [5, 6]}),
        "return_tokens_as_token_ids": Case({"": True}),
    }
    # This tokenizer has no special tokens to add.
    cases["add_special_tokens"] = _silent(False)
    return Route(base, _with_names(cases))


def _chats() -> Route:
    base = {
        "model": MODEL,
        "messages": [_USER],
        "seed": 7,
        "temperature": 0.9,
        "max_tokens": 24,
        "ignore_eos": True,
    }
    scored = {"logprobs": True}
    continued = {"messages": [_USER, _ASSISTANT], "add_generation_prompt": False}
    calls = {"tools": [_TOOL], "tool_choice": "required", "max_tokens": 200, "ignore_eos": False}
    cases = {
        **_OPENAI,
        **_TEMPLATE,
        "messages": Case({"": [_USER, _ASSISTANT, _USER]}),
        "add_special_tokens": _silent(True),
        "echo": Case({"": True}, {**continued, "continue_final_message": True}),
        "continue_final_message": Case({"": True}, continued),
        "max_completion_tokens": Case({"": 9}),
        "logprobs": Case({"": True}),
        "top_logprobs": Case({"": 3}, scored),
        "logprob_token_ids": Case({"": [5, 6]}, scored),
        "return_tokens_as_token_ids": Case({"": True}, scored),
        "include_reasoning": _silent(True),
        "thinking_token_budget": Case({"": 3}),
        "enable_thinking": _silent(True),
        "thinking": Case({"": {"type": "enabled", "budget_tokens": 3}}),
        "reasoning.effort": _silent("low"),
        "reasoning.max_tokens": Case({"": 3}),
        "reasoning.enabled": _silent(True),
        "reasoning.exclude": _silent(False),
        "tools": Case({"": [_TOOL]}),
        "tool_choice": Case({"": "required"}, {**calls, "tool_choice": "none"}),
        "parallel_tool_calls": Case({"": False}, calls),
    }
    return Route(base, _with_names(cases))


def _messages() -> Route:
    base = {
        "model": MODEL,
        "messages": [_USER],
        "max_tokens": 24,
        "temperature": 0.9,
        "seed": 7,
    }
    tool = {"name": "weather", "input_schema": _PARAMETERS}
    written = {"type": "json_schema", "schema": _SCHEMA}
    names = (
        *("model", "timeout", "stream", "stream_interval", "logit_bias", "min_tokens"),
        *("stop_token_ids", "allowed_token_ids", "bad_words", "repeat_last_n"),
        *("include_stop_str_in_output", "skip_special_tokens", "spaces_between_special_tokens"),
        *("priority", "slo", "is_latency_sensitive", "cache_salt", "session_id", "request_id"),
        "kv_hints.actions",
    )
    thinks = {"thinking": {"type": "enabled"}}
    cases = {
        **_SAMPLING,
        **{name: _GENERATION[name] for name in names},
        **_CONSTRAINTS,
        **_CONSTRAINTS_OF_OTHERS,
        "response_format": _OPENAI["response_format"],
        "reasoning_effort": _silent("low"),
        "enable_thinking": _silent(True),
        # The fake runner ends a sequence only where nothing else is allowed.
        "ignore_eos": _silent(True),
        "messages": Case({"": [_USER, _ASSISTANT, _USER]}),
        "system": Case({"": "Be brief."}),
        "tools": Case({"": [tool]}),
        "tool_choice": Case({"": {"type": "any"}}, {"tools": [tool]}),
        "metadata": _silent({"user_id": '{"session_id":"s"}'}),
        "thinking.type": _silent("enabled"),
        # A model that does not reason needs no bound.
        "thinking.budget_tokens": Case({"": 3}, thinks, shows=False),
        "thinking.display": Case({"": "omitted"}, thinks, shows=False),
        "chat_template_kwargs": _TEMPLATE["chat_template_kwargs"],
        "context_management.edits": _silent([{"type": "clear_tool_uses_20250919"}]),
        "output_config.format": Case({"": written}),
        "output_config.effort": _silent("low"),
        "output_config.task_budget": _silent({"type": "tokens", "total": 20_000}),
        "output_format": Case({"": written}),
        "max_tokens": Case({"": 9}),
        "stop": Case({"": ["e", "a"]}),
        # The name that this route always had.
        "stop_sequences": Case({"": ["e", "a"]}),
    }
    return Route(base, _with_names(cases))


def _responses() -> Route:
    base = {
        "model": MODEL,
        "input": "The quick brown fox",
        "seed": 7,
        "temperature": 0.9,
        "max_output_tokens": 24,
        "ignore_eos": True,
        "store": False,
    }
    scored = {"include": ["message.output_text.logprobs"]}
    tool = {"type": "function", **_FUNCTION}
    calls = {"tools": [tool], "tool_choice": "required", "max_output_tokens": 200}
    template = ("chat_template", "chat_template_kwargs", "documents", "reasoning_effort")
    cases = {
        **_GENERATION,
        **_CONSTRAINTS_OF_OTHERS,
        "lora_path": Case({"": ADAPTER}),
        "enable_thinking": _silent(True),
        "thinking": Case({"": {"type": "enabled", "budget_tokens": 3}}),
        **{name: _TEMPLATE[name] for name in template},
        "input": Case({"": [_USER, _ASSISTANT, _USER]}),
        "instructions": Case({"": "Be brief."}),
        "max_output_tokens": Case({"": 9}),
        "previous_response_id": Case({"": "resp_none"}),
        "store": Case({"": True}),
        "background": Case({"": True}),
        "include": Case({"": scored["include"]}),
        "top_logprobs": Case({"": 3}, scored),
        "include_reasoning": _silent(True),
        "thinking_token_budget": Case({"": 3}),
        "text.format": Case({"": {"type": "json_object"}}),
        "text.verbosity": _silent("medium"),
        "reasoning.effort": Case({"": "low"}),
        "reasoning.summary": Case({"": "auto"}),
        "reasoning.generate_summary": _silent("auto"),
        "truncation": Case({"": "auto"}),
        "metadata": Case({"": {"who": "somebody"}}),
        "prompt_cache_key": Case({"": "a key"}),
        "safety_identifier": Case({"": "somebody"}),
        "user": Case({"": "somebody"}),
        "client_metadata": _silent({"who": "somebody"}),
        "stream_options.include_obfuscation": Case({"": True}, {"stream": True}, shows=False),
        "service_tier": _silent("auto"),
        "tools": Case({"": [tool]}),
        "tool_choice": Case({"": "required"}, {**calls, "tool_choice": "none"}),
        "parallel_tool_calls": Case({"": False}, calls),
        "max_tool_calls": Case({"": 1}),
    }
    return Route(base, _with_names(cases))


def _tgi(changes: Cases, **more: object) -> Route:
    base = {
        "inputs": "The quick brown fox jumps over",
        "parameters": {"seed": 7, "temperature": 0.9, "max_new_tokens": 24, "details": True},
        **more,
    }
    names = (
        *("temperature", "repetition_penalty", "frequency_penalty", "top_k", "top_p", "stop"),
        "typical_p",
    )
    cases = {
        **{name: _GENERATION[name] for name in names},
        "do_sample": _silent(True),
        "max_new_tokens": Case({"": 9}),
        "truncate": Case({"": 4}),
        "details": Case({"": False}),
        "decoder_input_details": Case({"": True}),
        "seed": Case({"": 8}),
        "best_of": Case({"": 2}),
        "top_n_tokens": Case({"": 2}),
        "grammar": Case({"": {"type": "regex", "value": _WRITTEN["regex"]}}),
        "return_full_text": Case({"": True}),
        "adapter_id": Case({"": ADAPTER}),
        "watermark": _silent(False),
        "timeout": _silent(500),
    }
    inputs = Case({"inputs": "The lazy dog"})
    return Route(base, {"inputs": inputs, **_with_names(cases, "parameters."), **changes})


def _embeddings() -> Route:
    cases = {
        "model": Case({"": "of nobody"}),
        "input": Case({"": ["The lazy dog", "a cat"]}),
        "encoding_format": Case({"": "base64"}),
        "embed_dtype": Case({"": "float16"}, {"encoding_format": "base64"}),
        "endianness": Case({"": "big"}, {"encoding_format": "base64"}),
        "dimensions": Case({"": 8}),
        "normalize": Case({"": False}),
        "pooling": Case({"": "mean"}),
        "truncate_prompt_tokens": Case({"": 4}),
        "truncation_side": Case({"": "left"}, {"truncate_prompt_tokens": 4}),
        "add_special_tokens": _silent(False),
        "timeout": _silent(500),
    }
    return Route({"model": MODEL, "input": "The quick brown fox jumps over"}, _with_names(cases))


def _of_ollama() -> dict[str, Case]:
    """Fields of both its routes that generate."""
    names = (
        *("temperature", "top_k", "top_p", "min_p", "typical_p"),
        *("presence_penalty", "frequency_penalty", "seed"),
    )
    options = {
        **{name: _SAMPLING[name] for name in names},
        "repeat_penalty": _SAMPLING["repetition_penalty"],
        "num_predict": Case({"": 9}),
        "stop": Case({"": ["e", "a"]}),
        **dict.fromkeys(("num_ctx", "num_batch", "num_gpu", "main_gpu", "num_thread"), _silent(1)),
        **dict.fromkeys(("num_keep", "use_mmap", "use_mlock", "numa", "low_vram"), _silent(1)),
        **dict.fromkeys(("f16_kv", "vocab_only", "logits_all", "embedding_only"), _silent(1)),
        **dict.fromkeys(("mirostat_tau", "mirostat_eta", "draft_num_predict"), _silent(1)),
        "mirostat": _silent(0),
        "tfs_z": _silent(1.0),
        "penalize_newline": _silent(True),
        "repeat_last_n": Case({"": 2}, {"options": {"repeat_penalty": 1.7}}),
    }
    return {
        "model": Case({"": ADAPTER}),
        "stream": Case({"": True}),
        "format": Case({"": _SCHEMA}),
        "think": _silent(False),
        "truncate": _silent(False),
        "logprobs": Case({"": True}),
        "top_logprobs": Case({"": 2}, {"logprobs": True}),
        "keep_alive": _silent("5m"),
        "timeout": _silent(500),
        **_with_names(options, "options."),
    }


_DRAWN: Json = {"seed": 7, "temperature": 0.9, "num_predict": 24}


def _ollama_chat() -> Route:
    base = {"model": MODEL, "messages": [_USER], "stream": False, "options": _DRAWN}
    cases = {
        **_of_ollama(),
        "messages": Case({"": [_USER, _ASSISTANT, _USER]}),
        "tools": Case({"": [_TOOL]}),
    }
    return Route(base, _with_names(cases))


def _ollama_generate() -> Route:
    base = {"model": MODEL, "prompt": "The quick brown fox", "stream": False, "options": _DRAWN}
    cases = {
        **_of_ollama(),
        "prompt": Case({"": "The lazy dog"}),
        "system": Case({"": "Be brief."}),
        "raw": Case({"": True}),
        "context": Case({"": [325, 1229]}),
        "images": _silent([]),
    }
    return Route(base, _with_names(cases))


def _ollama_embed(name: str, **more: Case) -> Route:
    cases = {
        "model": Case({"": "of nobody"}),
        name: Case({"": "The lazy dog"}),
        "options": _silent({"num_ctx": 9}),
        "keep_alive": _silent("5m"),
        "timeout": _silent(500),
        **more,
    }
    return Route({"model": MODEL, name: "The quick brown fox jumps over"}, _with_names(cases))


def _tokens_of_chats() -> Cases:
    return _with_names(
        {
            **_TEMPLATE,
            "model": Case({"": "of nobody"}),
            "messages": Case({"": [_USER, _ASSISTANT, _USER]}),
            "add_special_tokens": _silent(True),
            "continue_final_message": Case(
                {"": True}, {"messages": [_USER, _ASSISTANT], "add_generation_prompt": False}
            ),
            "tools": Case({"": [_TOOL]}),
            "tool_choice": Case({"": "none"}, {"tools": [_TOOL]}),
        }
    )


def _tokenize() -> Route:
    cases = {
        "model": Case({"": "of nobody"}),
        "prompt": Case({"": "The lazy dog"}),
        "inputs": Case({"": "The lazy dog"}),
        "parameters": _silent({}),
        "return_token_strs": Case({"": True}),
        "messages": Case({"": [_USER]}),
    }
    base = {"prompt": "The quick brown fox jumps over"}
    # What is of chats counts beside their messages only.
    chat = {"prompt": None, "messages": [_USER]}
    of_chats = {
        name: replace(case, beside={**chat, **case.beside})
        for name, case in _tokens_of_chats().items()
    }
    return Route(base, {**of_chats, **_with_names(cases)})


def _count_tokens() -> Route:
    whole = _messages()
    silent = ["model", "tool_choice", "output_config.effort", "output_config.format"]
    silent += ["output_format", "thinking.type", "thinking.budget_tokens", "thinking.display"]
    silent += ["metadata"]
    silent += ["chat_template_kwargs", "context_management.edits", "output_config.task_budget"]
    silent += ["enable_thinking", "reasoning_effort"]
    shown = ("messages", "system", "tools")
    cases = {name: whole.cases[name] for name in shown}
    hidden = {name: replace(whole.cases[name], shows=False) for name in silent}
    return Route({"model": MODEL, "messages": [_USER]}, {**cases, **hidden})


_BY_HAND: Mapping[str, Route] = {
    "/v1/completions": _completions(),
    "/v1/chat/completions": _chats(),
    "/v1/messages": _messages(),
    "/v1/messages/count_tokens": _count_tokens(),
    "/v1/responses": _responses(),
    "/v1/embeddings": _embeddings(),
    "/api/chat": _ollama_chat(),
    "/api/generate": _ollama_generate(),
    "/api/embed": _ollama_embed(
        "input", truncate=_silent(False), dimensions=Case({"": 8}), normalize=Case({"": False})
    ),
    "/api/embeddings": _ollama_embed("prompt", normalize=Case({"": False})),
    "/api/show": Route({"model": MODEL}, _with_names({"model": Case({"": "of nobody"})})),
    "/api/pull": Route(
        {"model": MODEL},
        _with_names(
            {
                "model": Case({"": "of nobody"}),
                "stream": Case({"": False}),
                **dict.fromkeys(("insecure", "username", "password"), _silent(True)),
            }
        ),
    ),
    "/generate": _tgi({}),
    "/": _tgi(
        {
            # Here it is the default.
            "parameters.return_full_text": Case({"parameters": {"return_full_text": False}}),
            "stream": Case({"stream": True}),
        },
        stream=False,
    ),
    "/generate_stream": _tgi(_with_names({"parameters.return_full_text": _silent(True)})),
    "/chat_tokenize": Route({"messages": [_USER]}, _tokens_of_chats()),
    "/tokenize": _tokenize(),
    "/detokenize": Route(
        {"tokens": [325, 1229]},
        _with_names({"tokens": Case({"": [5, 6]}), "model": Case({"": "of nobody"})}),
    ),
}


# ---- what the tables of fields say by themselves -----------------------------------------------


def _with_words_of_table(route: Route, fields: Table) -> Route:
    """The route, with cases of fields that change nothing, and of other names of fields."""
    cases = dict(route.cases)
    for name, entry in fields.items():
        if entry.use is Use.REFUSED:
            cases[name] = Case({name: next(iter(entry.neutral), None)}, shows=False)
        elif entry.use is Use.TAKEN:
            cases[name] = Case({name: "anything"}, shows=False)
        elif entry.stands_for and name not in route.cases:
            cases[name] = _by_another_name(name, entry.stands_for, route.cases[entry.stands_for])
    return Route(route.base, cases)


def _by_another_name(name: str, ours: str, case: Case) -> Case:
    """Return a case where `name` has the value of our field `ours`. The answer must be the same."""
    asked = merge(case.beside, case.change)
    return Case({ours: None, name: asked[ours]}, asked, shows=False)


_TABLES = {route.canonical_path: route.fields for route in SERVED if route.method == "POST"}
ROUTES: Mapping[str, Route] = {
    path: _with_words_of_table(route, _TABLES[path] or {}) for path, route in _BY_HAND.items()
}
# The operator's: they take adapters from where shards are.
NOT_ASKED = {"/v1/load_lora_adapter", "/v1/unload_lora_adapter"}


def http_requests(path: str, fields: Collection[str]) -> dict[str, tuple[str, Json]]:
    """A route's requests, by the names of the fields that they show: one for each of `fields`."""
    route = ROUTES[path]
    requests = requests_of(route.base, of_fields(route.cases, fields))
    return {name: (path, body) for name, body in requests.items()}
