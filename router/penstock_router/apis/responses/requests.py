"""OpenAI's Responses API: parses bodies to requests.

The previous response's conversation is added later, where the store is available.
"""

from __future__ import annotations

import dataclasses
import uuid
from dataclasses import dataclass
from typing import Any, cast

import msgspec

from penstock_router.apis.base import Api
from penstock_router.apis.images import take_images
from penstock_router.apis.openai.elsewhere import with_fields_of_chats
from penstock_router.apis.openai.fields import (
    CHAT_FIELDS,
    MAX_LOGPROBS,
    SAMPLING,
)
from penstock_router.apis.openai.requests import common_options, template_options
from penstock_router.apis.openai.thinking import spread_thinking
from penstock_router.apis.responses.answers import ResponseAnswer, ResponseEvent, ResponseShape
from penstock_router.apis.responses.errors import ERRORS
from penstock_router.apis.responses.items.conversation import messages_of
from penstock_router.apis.responses.items.reading import INPUT, ParsedInput
from penstock_router.apis.responses.request_type import EchoedFields, ResponsesRequest, TextFormat
from penstock_router.apis.responses.tools.choice import AUTO, CHOICE, AskedChoice, tool_options
from penstock_router.apis.responses.tools.functions import (
    TOOLS,
    ParsedTools,
    Source,
    hold_to_grammars,
)
from penstock_router.apis.structured_output import Wish, wish_of_format
from penstock_router.apis.tools import check_one_form
from penstock_router.errors import BadRequest
from penstock_router.json_fields import (
    ANYTHING,
    BOOLEAN,
    OBJECT,
    POSITIVE,
    STRING,
    WARNINGS,
    Field,
    JsonObject,
    Kind,
    add_warning,
    array_of,
    integer,
    not_served,
    object_of,
    one_of,
    or_null,
    read_fields,
    read_object,
    shorten,
    string,
    taken,
    without_effect,
)
from penstock_router.request import MAX_SESSION_CHARS
from penstock_router.text.prompts import PreparedPrompts, TextModel, prepare_prompts

MAX_METADATA = 16
MAX_METADATA_KEY_CHARS = 64
MAX_METADATA_CHARS = 512
MAX_FORMAT_NAME_CHARS = 64
_ENTRIES = {
    "reasoning": ("effort", "summary", "generate_summary"),
    "text": ("format", "verbosity"),
}
# Maximum of unknown entries that a warning names.
_NAMED_ENTRIES = 16
LOGPROBS = "message.output_text.logprobs"
SEALED_REASONING = "reasoning.encrypted_content"
# Details of OpenAI's own tools and of images, which answers here never have.
_NOTHING_TO_INCLUDE = (
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
)


_METADATA_KEY = string(0, MAX_METADATA_KEY_CHARS)
_METADATA_VALUE = string(0, MAX_METADATA_CHARS)


def _read_metadata(name: str, value: Any) -> dict[str, str]:
    pairs = read_object(name, value)
    if len(pairs) > MAX_METADATA:
        text = f"{name}: at most {MAX_METADATA} pairs; given: {len(pairs)}"
        raise BadRequest(text, param=name)
    for key, entry in pairs.items():
        _METADATA_KEY.read(name, key)
        _METADATA_VALUE.read(f"{name}[{key[:MAX_METADATA_KEY_CHARS]}]", entry)
    return pairs


_METADATA = Kind(
    _read_metadata,
    {
        "type": "object",
        "maxProperties": MAX_METADATA,
        "propertyNames": _METADATA_KEY.schema,
        "additionalProperties": _METADATA_VALUE.schema,
    },
)


@dataclass(frozen=True, slots=True)
class _ParsedFormat:
    """The requested format, as answers repeat it, and its constraint."""

    shown: TextFormat
    wish: Wish | None = None


_FORMAT_TYPES = one_of("text", "json_object", "json_schema")
_FORMAT_NAME = string(1, MAX_FORMAT_NAME_CHARS)
_ANY_TEXT = _ParsedFormat({"type": "text"})


def _read_format(name: str, value: Any) -> _ParsedFormat:
    given = read_object(name, value)
    kind = _FORMAT_TYPES.read(f"{name}.type", given.get("type"))
    if kind == "json_schema":
        _FORMAT_NAME.read(f"{name}.name", given.get("name"))
        read_object(f"{name}.schema", given.get("schema"))
    wish = wish_of_format(name, given)
    keys = _FORMAT_KEYS if kind == "json_schema" else ()
    shown = {key: given[key] for key in keys if given.get(key) is not None}
    return _ParsedFormat(cast(TextFormat, {"type": kind, **shown}), wish)


_FORMAT_KEYS = ("name", "description", "schema", "strict")
_TEXT_FORMAT = Kind(
    _read_format,
    {
        "anyOf": [
            {
                "type": "object",
                "properties": {"type": {"enum": ["text", "json_object"]}},
                "required": ["type"],
            },
            {
                "type": "object",
                "properties": {
                    "type": {"enum": ["json_schema"]},
                    "name": _FORMAT_NAME.schema,
                    "description": or_null(STRING.schema),
                    "schema": OBJECT.schema,
                    "strict": or_null(BOOLEAN.schema),
                },
                "required": ["type", "name", "schema"],
            },
        ]
    },
)


_SUMMARY = one_of("auto", "concise", "detailed")


_AS_IN_CHATS = (
    *("model", "stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "min_tokens"),
    *("logit_bias", "allowed_token_ids", "bad_words", "skip_special_tokens"),
    *("spaces_between_special_tokens", "stream", "stream_interval", "chat_template"),
    *("chat_template_kwargs", "priority", "slo", "is_latency_sensitive", "cache_salt"),
    *("request_id", "session_id", "timeout", "kv_hints"),
    *("include_reasoning", "thinking_token_budget", "enable_thinking", "thinking"),
    *("reasoning_effort", "lora_path", "documents", "structured_outputs"),
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar"),
    *("json_schema", "regex", "ebnf", "grammar"),
    *("guided_whitespace_pattern", "guided_decoding_backend"),
)

# Fields that cannot change an answer here.
_TAKEN = (
    *("prompt_cache_retention", "prompt_cache_options", "access_programs"),
    *("background_options", "image", "request_country"),
)

RESPONSES_FIELDS = with_fields_of_chats(
    [
        Field(
            "input",
            INPUT,
            "A text, or items: messages, calls and their outputs, reasoning, references to stored "
            "items. What no model here can be shown is left out, and named in a header.",
            required=True,
        ),
        *(CHAT_FIELDS[name] for name in _AS_IN_CHATS),
        *SAMPLING,
        Field("instructions", STRING, "A system message before all others, for this answer only."),
        Field("max_output_tokens", POSITIVE, "Default: up to the end of the context."),
        Field("previous_response_id", string(1), "Go on from this one, which must be stored."),
        Field("store", BOOLEAN, "Keep the response for a while; default true."),
        Field("background", BOOLEAN, "Answer at once, to be asked later; needs store."),
        Field(
            "include",
            array_of(
                one_of(LOGPROBS, SEALED_REASONING, *_NOTHING_TO_INCLUDE),
                at_most=32,
                unit="things to include",
            ),
            f"{LOGPROBS} acts, but not beside tools: those of all tokens up to the text's end. "
            f"{SEALED_REASONING}: reasoning in a form to be sent back. Of the others there is "
            "nothing.",
        ),
        Field("top_logprobs", integer(0, MAX_LOGPROBS), f"Needs include: {LOGPROBS}."),
        Field(
            "text",
            object_of(format=_TEXT_FORMAT, verbosity=one_of("low", "medium", "high")),
            "format: text, json_object, or json_schema, which is kept to with or without strict. "
            "verbosity has no effect.",
        ),
        Field(
            "reasoning",
            object_of(effort=STRING, summary=_SUMMARY, generate_summary=_SUMMARY),
            "effort is for the template; no summary is made.",
        ),
        Field(
            "truncation",
            one_of("disabled", "auto"),
            "auto: cut a long prompt at its beginning, to what leaves room for max_output_tokens.",
        ),
        Field("metadata", _METADATA, "Shown in the answer."),
        Field("client_metadata", ANYTHING, "The client's own; nothing comes of it."),
        Field(
            "prompt_cache_key",
            string(0, MAX_SESSION_CHARS),
            "Requests that should meet the same shard's cache; session_id goes before it.",
        ),
        *(
            Field(name, STRING, "Shown in the answer, and nothing else comes of it.")
            for name in ("user", "safety_identifier")
        ),
        Field(
            "service_tier",
            STRING,
            "Any word: there is one tier, default.",
        ),
        Field(
            "stream_options",
            object_of(include_obfuscation=BOOLEAN),
            "include_obfuscation: taken; events are not padded.",
        ),
        Field(
            "tools",
            TOOLS,
            "What the answer may call: function, custom, namespace, and local_shell, shell, "
            "apply_patch and tool_search where the client runs them. Others are left out.",
        ),
        Field(
            "tool_choice",
            CHOICE,
            "auto, none, required, a tool, or some that are allowed; default auto.",
        ),
        Field("parallel_tool_calls", BOOLEAN, "Whether there may be several calls; default true."),
        Field(
            "max_tool_calls",
            POSITIVE,
            "Of tools that a server runs itself, of which there are none: others do not count.",
        ),
        not_served("conversation", ANYTHING),
        not_served("prompt", OBJECT),
        not_served("moderation", OBJECT),
        not_served("generate", BOOLEAN, True),
        taken("context_management", []),
        *map(taken, _TAKEN),
    ]
)


def parse_response(body: JsonObject) -> ResponsesRequest:
    values = read_fields(RESPONSES_FIELDS, body)
    _name_unknown_entries(values, body)
    spread_thinking(values, ["thinking"])
    effort = values.get("reasoning", {}).get("effort")
    if effort is not None:
        values["reasoning_effort"] = effort
    truncates = values.get("truncation") == "auto"
    renamed = {
        "max_tokens": values.get("max_output_tokens"),
        "max_tokens_field": "max_output_tokens",
        "logprobs": _logprobs(values),
        "session_id": values.get("session_id") or values.get("prompt_cache_key", ""),
        "truncate_prompt_tokens": -1 if truncates else None,
        # Keep the last turns, because the answer must answer them.
        "truncation_side": "left",
    }
    given: ParsedInput = values["input"]
    tools = _all_tools(values, given)
    repeated = _repeat_fields(values, tools)
    options = tool_options(tools, values.get("tool_choice", AUTO), repeated["parallel_tool_calls"])
    messages = messages_of(
        repeated["instructions"], given.items, options.get("served", {}), given.places
    )
    images = take_images(messages)
    # Each response is stored with its whole conversation, so each would store the images again.
    repeated["store"] = repeated["store"] and not images
    asked: _ParsedFormat = values.get("text", {}).get("format", _ANY_TEXT)
    renamed["text.format"] = asked.wish
    common = common_options({**values, **renamed, **_warnings(values, given, tools)})
    request = ResponsesRequest(
        messages=messages,
        images=images,
        items=given.items,
        references=given.references,
        repeated={**repeated},
        previous_response_id=repeated["previous_response_id"],
        background=repeated["background"],
        store=repeated["store"],
        add_special_tokens=False,
        include_reasoning=values.get("include_reasoning", True),
        seals_reasoning=SEALED_REASONING in values.get("include", ()),
        thinking_tokens=values.get("thinking_token_budget"),
        **template_options(values),
        **options,
        **common,
    )
    _check(request)
    return request


def _name_unknown_entries(values: JsonObject, body: JsonObject) -> None:
    """Warn about entries of `reasoning` and `text` that have no effect."""
    for name, known in _ENTRIES.items():
        given = [key for key, entry in (body.get(name) or {}).items() if entry is not None]
        if others := [key for key in given if key not in known]:
            named = ", ".join(map(shorten, others[:_NAMED_ENTRIES]))
            add_warning(values, f"{name}: entries without effect: {named}")


def _all_tools(values: JsonObject, given: ParsedInput) -> ParsedTools:
    tools: ParsedTools = values.get("tools") or ParsedTools()
    for name, more in given.tools:
        tools.add(name, more, source=Source.ITEM)
    for name, more in given.found_tools:
        tools.add(name, more, source=Source.SEARCH)
    tools.warn_of_namesakes()
    return tools


def _warnings(values: JsonObject, given: ParsedInput, tools: ParsedTools) -> JsonObject:
    lines = [*values.get(WARNINGS, ()), *given.warnings, *tools.warnings]
    if values.get("text", {}).get("verbosity", "medium") != "medium":
        lines.append(without_effect("text.verbosity"))
    return {WARNINGS: tuple(lines)}


def _logprobs(values: JsonObject) -> int | None:
    top: int = values.get("top_logprobs", 0)
    if LOGPROBS in values.get("include", ()):
        return top
    if top:
        raise BadRequest(f"top_logprobs: needs include: {LOGPROBS}", param="top_logprobs")
    return None


def _check(request: ResponsesRequest) -> None:
    check_one_form(request)
    # The router does not know which tokens belong to the text and which to a call.
    if request.logprobs is not None and request.tools and request.tool_choice.mode != "none":
        text = f"include: {LOGPROBS} is not served beside tools; leave one of them out"
        raise BadRequest(text, param="include")
    if request.background:
        _check_background(request)


def _check_background(request: ResponsesRequest) -> None:
    if request.images:
        text = "background: not with images, as responses about these are not stored"
        raise BadRequest(text, param="background")
    if not request.store:
        raise BadRequest("background: needs store, as it is asked for later", param="background")
    if request.stream:
        raise BadRequest("background: not in streams on this server", param="background")


def _repeat_fields(values: JsonObject, tools: ParsedTools) -> EchoedFields:
    reasoning, text = values.get("reasoning", {}), values.get("text", {})
    asked: AskedChoice = values.get("tool_choice", AUTO)
    return {
        "background": values.get("background", False),
        "instructions": values.get("instructions"),
        "max_output_tokens": values.get("max_output_tokens"),
        "max_tool_calls": values.get("max_tool_calls"),
        "metadata": values.get("metadata", {}),
        "parallel_tool_calls": values.get("parallel_tool_calls", True),
        "previous_response_id": values.get("previous_response_id"),
        "prompt_cache_key": values.get("prompt_cache_key"),
        "reasoning": {"effort": reasoning.get("effort"), "summary": reasoning.get("summary")},
        "safety_identifier": values.get("safety_identifier"),
        "service_tier": "default",
        "store": values.get("store", True),
        "text": {
            "format": text.get("format", _ANY_TEXT).shown,
            "verbosity": text.get("verbosity", "medium"),
        },
        "tool_choice": asked.shown,
        "tools": tools.shown(),
        "top_logprobs": values.get("top_logprobs", 0),
        "truncation": values.get("truncation", "disabled"),
        "user": values.get("user"),
    }


def _prepare(asked: ResponsesRequest, model: TextModel) -> PreparedPrompts:
    tools, unenforced = hold_to_grammars(asked.tools, asked.served, model.conventions.tool_format)
    prepared = prepare_prompts(dataclasses.replace(asked, tools=tools), model)
    return dataclasses.replace(
        prepared,
        conversation=msgspec.json.encode(asked.items) if asked.store else b"",
        repeated={name: msgspec.json.encode(value) for name, value in asked.repeated.items()},
        unenforced=unenforced,
        warnings=(
            *prepared.warnings,
            *(f"tools: the grammar of {name} is shown, not enforced" for name in unenforced),
        ),
    )


RESPONSES = Api(
    name="responses",
    request_type=ResponsesRequest,
    fields=RESPONSES_FIELDS,
    parse=parse_response,
    work=_prepare,
    make_shape=ResponseShape,
    # The id is random: with the request's id, a client that reuses an id would overwrite a
    # response.
    name_answer=lambda request_id, named_by_client: f"resp_{uuid.uuid4().hex}",
    errors=ERRORS,
    answer=ResponseAnswer,
    event=ResponseEvent,
    repeats_answer=True,
)
