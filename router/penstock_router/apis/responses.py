"""OpenAI's Responses API: bodies -> requests. The shapes are in `responses_answers`.

What a previous response said is added where the store is known. Tools are not served yet, so that
no conversation holds calls of them.
"""

from __future__ import annotations

import uuid
from typing import Any

from penstock_router.apis.base import ERRORS, Api
from penstock_router.apis.openai import (
    CHAT_FIELDS,
    MAX_CHOICES,
    MAX_LOGPROBS,
    OF_CHATS,
    SAMPLING,
    common_options,
    template_options,
)
from penstock_router.apis.responses_answers import ResponseAnswer, ResponseEvent, ResponseShape
from penstock_router.apis.responses_request import (
    INPUT,
    Repeated,
    ResponsesRequest,
    messages_of,
)
from penstock_router.errors import BadRequest
from penstock_router.fields import (
    ANYTHING,
    ARRAY,
    BOOLEAN,
    OBJECT,
    POSITIVE,
    STRING,
    Field,
    JsonObject,
    Kind,
    array_of,
    integer,
    not_served,
    one_of,
    read_fields,
    read_object,
    string,
    table,
)
from penstock_router.request import MAX_SESSION_CHARS

MAX_METADATA = 16
MAX_METADATA_KEY_CHARS = 64
MAX_METADATA_CHARS = 512
LOGPROBS = "message.output_text.logprobs"
# Of tools, pictures and reasoning: without these there is nothing to include.
_NOTHING_TO_INCLUDE = (
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
)


# ---- Kinds of this route -----------------------------------------------------------------------

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


def _parts_of(**fields: Kind) -> Kind:
    """An object with some known entries, each of which may be missing or null."""

    def read(name: str, value: Any) -> JsonObject:
        given = read_object(name, value)
        return {
            key: kind.read(f"{name}.{key}", given[key])
            for key, kind in fields.items()
            if given.get(key) is not None
        }

    entries = {key: {"anyOf": [kind.schema, {"type": "null"}]} for key, kind in fields.items()}
    return Kind(read, {"type": "object", "properties": entries})


def _read_format(name: str, value: Any) -> JsonObject:
    if read_object(name, value).get("type") != "text":
        raise BadRequest(f"{name}: this server writes text only; leave it out", param=name)
    return {"type": "text"}


def _read_obfuscation(name: str, value: Any) -> bool:
    if BOOLEAN.read(name, value):
        raise BadRequest(f"{name}: not served by this server; leave it out", param=name)
    return False


_TEXT_FORMAT = Kind(
    _read_format,
    {"type": "object", "properties": {"type": {"enum": ["text"]}}, "required": ["type"]},
)
_NO_OBFUSCATION = Kind(_read_obfuscation, {"enum": [False]})


# ---- The table ---------------------------------------------------------------------------------

# Of chats, with the same names and the same meaning.
_AS_IN_CHATS = (
    *("model", "stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "min_tokens"),
    *("logit_bias", "allowed_token_ids", "bad_words", "skip_special_tokens"),
    *("spaces_between_special_tokens", "stream", "stream_interval", "chat_template"),
    *("chat_template_kwargs", "priority", "slo", "is_latency_sensitive", "cache_salt"),
    *("request_id", "session_id", "timeout", "user"),
)

RESPONSES_FIELDS = table(
    [
        Field(
            "input",
            INPUT,
            "A text, or messages with text. Items of reasoning are left out.",
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
            array_of(one_of(LOGPROBS, *_NOTHING_TO_INCLUDE), at_most=32, unit="things to include"),
            f"{LOGPROBS} acts; of the others there is nothing.",
        ),
        Field("top_logprobs", integer(0, MAX_LOGPROBS), f"Needs include: {LOGPROBS}."),
        Field(
            "text",
            _parts_of(format=_TEXT_FORMAT, verbosity=one_of("medium")),
            "Plain text, no other form is served.",
        ),
        Field(
            "reasoning",
            _parts_of(effort=STRING, summary=one_of("auto", "concise", "detailed")),
            "effort is for the template; no summary is made.",
        ),
        Field(
            "truncation",
            one_of("disabled", "auto"),
            "auto: cut a long prompt at its beginning, to what leaves room for max_output_tokens.",
        ),
        Field("metadata", _METADATA, "Shown in the answer."),
        Field(
            "prompt_cache_key",
            string(0, MAX_SESSION_CHARS),
            "Requests that should meet the same shard's cache; session_id goes before it.",
        ),
        Field("safety_identifier", STRING, "Shown in the answer, and nothing else comes of it."),
        Field(
            "service_tier",
            one_of("auto", "default", "flex", "scale", "priority"),
            "Accepted: there is one tier, default.",
        ),
        Field(
            "stream_options",
            _parts_of(include_obfuscation=_NO_OBFUSCATION),
            "Only in streams.",
        ),
        Field("parallel_tool_calls", BOOLEAN, "Accepted: there are no tools."),
        Field("max_tool_calls", POSITIVE, "Accepted: there are no tools."),
        Field("tool_choice", one_of("auto", "none"), "Accepted: there are no tools."),
        not_served("tools", ARRAY, []),
        not_served("conversation", ANYTHING),
        not_served("prompt", OBJECT),
        not_served("context_management", ARRAY, []),
        not_served("moderation", OBJECT),
        not_served("n", integer(1, MAX_CHOICES), 1),
        # Of chats, and would change the answer: to ignore them would be a lie.
        not_served("max_tokens", POSITIVE, help=OF_CHATS),
        not_served("max_completion_tokens", POSITIVE, help=OF_CHATS),
        not_served("messages", ARRAY, help=OF_CHATS),
        not_served("response_format", OBJECT, {"type": "text"}, help=OF_CHATS),
    ]
)


# ---- The body ----------------------------------------------------------------------------------


def parse_response(body: JsonObject) -> ResponsesRequest:
    """A body of /v1/responses, without what a previous response said."""
    values = read_fields(RESPONSES_FIELDS, body)
    effort = values.get("reasoning", {}).get("effort")
    if effort is not None:
        values["reasoning_effort"] = effort
    truncates = values.get("truncation") == "auto"
    renamed = {
        "max_tokens": values.get("max_output_tokens"),
        "max_tokens_field": "max_output_tokens",
        "logprobs": _logprobs(values),
        "session_id": values.get("session_id", values.get("prompt_cache_key", "")),
        "truncate_prompt_tokens": -1 if truncates else None,
        # The last turns are what is to be answered.
        "truncation_side": "left",
    }
    request = ResponsesRequest(
        messages=messages_of(values.get("instructions"), values["input"]),
        **template_options(values),
        items=values["input"],
        repeated=_repeated(values),
        add_special_tokens=False,
        **common_options({**values, **renamed}),
    )
    if request.repeated["background"]:
        _check_background(request)
    return request


def _logprobs(values: JsonObject) -> int | None:
    top: int = values.get("top_logprobs", 0)
    if LOGPROBS in values.get("include", ()):
        return top
    if top:
        raise BadRequest(f"top_logprobs: needs include: {LOGPROBS}", param="top_logprobs")
    return None


def _check_background(request: ResponsesRequest) -> None:
    if not request.repeated["store"]:
        raise BadRequest("background: needs store, as it is asked for later", param="background")
    if request.stream:
        raise BadRequest("background: not in streams on this server", param="background")


def _repeated(values: JsonObject) -> Repeated:
    reasoning, text = values.get("reasoning", {}), values.get("text", {})
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
        "text": {"format": {"type": "text"}, "verbosity": text.get("verbosity", "medium")},
        "tool_choice": values.get("tool_choice", "auto"),
        "tools": [],
        "top_logprobs": values.get("top_logprobs", 0),
        "truncation": values.get("truncation", "disabled"),
        "user": values.get("user"),
    }


RESPONSES = Api(
    name="responses",
    request_type=ResponsesRequest,
    fields=RESPONSES_FIELDS,
    parse=parse_response,
    make_shape=ResponseShape,
    # Not of the request's id: a client that sends one twice would overwrite what is stored.
    name_answer=lambda request_id, named_by_client: f"resp_{uuid.uuid4().hex}",
    errors=ERRORS,
    answer=ResponseAnswer,
    event=ResponseEvent,
    repeats_answer=True,
)
