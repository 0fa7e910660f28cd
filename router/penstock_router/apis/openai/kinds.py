"""Kinds for fields of completions and chats that need more than a bound."""

from __future__ import annotations

import re
from typing import Any

from penstock_proto.limits import LOGIT_BIAS_RANGE
from penstock_router.errors import BadRequest
from penstock_router.json_fields import (
    BOOLEAN,
    INT32_MAX,
    STRING,
    TOKEN_ID,
    UINT32_MAX,
    JsonObject,
    Kind,
    integer,
    or_null,
    read_array,
    read_object,
    refusal,
    shorten,
    string,
    unless,
    whole_numbers,
)
from penstock_router.request import WHOLE_VOCABULARY
from penstock_router.text.stop_strings import MAX_CHARS as MAX_STOPS_CHARS

MAX_LOGIT_BIASES = 1024
# A token id as an object's key. No vocabulary has 1,000,000,000 tokens.
_ID_KEY = re.compile("[0-9]{1,9}")


# The shard checks the real bound, which depends on the model.
NUM_LOGPROBS = integer(WHOLE_VOCABULARY, INT32_MAX)


def _read_stops(name: str, value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else read_array(name, value)
    for stop in stops:
        if not isinstance(stop, str):
            raise refusal(name, "a string or an array of strings", stop)
        if not stop:
            raise BadRequest(f"{name}: a stop string has at least 1 character", param=name)
    if (num_chars := sum(map(len, stops))) > MAX_STOPS_CHARS:
        text = f"{name}: at most {MAX_STOPS_CHARS} characters in all strings; given: {num_chars}"
        raise BadRequest(text, param=name)
    return tuple(stops)


def _read_logit_bias(name: str, value: Any) -> dict[int, float]:
    """Read biases by id, cut to -100..100. They are an object whose keys are ids as strings or, as
    in llama.cpp, pairs of id and bias, where false bans a token.
    """
    given = value if isinstance(value, list) else read_object(name, value)
    if len(given) > MAX_LOGIT_BIASES:
        text = f"{name}: at most {MAX_LOGIT_BIASES} ids; given: {len(given)}"
        raise BadRequest(text, param=name)
    pairs = _pairs(name, given) if isinstance(given, list) else given.items()
    biases: dict[int, float] = {}
    for key, bias in pairs:
        if not _ID_KEY.fullmatch(key):
            raise refusal(name, "an object whose keys are token ids, of 1 to 9 digits", key)
        if isinstance(bias, bool) or not isinstance(bias, int | float):
            raise refusal(name, "an object of token ids and numbers", bias)
        biases[int(key)] = float(max(LOGIT_BIAS_RANGE.low, min(LOGIT_BIAS_RANGE.high, bias)))
    return biases


def _pairs(name: str, given: list[Any]) -> list[tuple[str, Any]]:
    pairs = []
    for item in given:
        match item:
            case [int() as token_id, bias] if not isinstance(token_id, bool):
                pairs.append((str(token_id), -100.0 if bias is False else bias))
            case _:
                raise refusal(name, "an array of pairs of a token id and a number", item)
    return pairs


def prompts(at_most: int, empty: str) -> Kind:
    """Make a kind that reads a prompt's four forms as a tuple of strings and lists of ids; `empty`
    is the error for an empty prompt.
    """
    forms = "a string, an array of token ids, or an array of either"

    def read(name: str, value: Any) -> tuple[str | list[int], ...]:
        if not isinstance(value, str | list):
            raise refusal(name, forms, value)
        single = isinstance(value, str) or (bool(value) and _is_number(value[0]))
        given = [value] if single else value
        # Check the number first: there may be millions of prompts.
        if len(given) > at_most:
            text = f"{name}: at most {at_most} prompts; given: {len(given)}"
            raise BadRequest(text, param=name)
        if not given or any(prompt in ("", []) for prompt in given):
            raise BadRequest(empty, param=name)
        if wrong := [prompt for prompt in given if not isinstance(prompt, str | list)]:
            raise refusal(name, forms, wrong[0])
        return tuple([each if isinstance(each, str) else _prompt_ids(name, each) for each in given])

    text: JsonObject = {"type": "string", "minLength": 1}
    ids: JsonObject = {"type": "array", "minItems": 1, "items": TOKEN_ID.schema}
    several = {
        "type": "array",
        "minItems": 1,
        "maxItems": at_most,
        "items": {"anyOf": [text, ids]},
    }
    return Kind(read, {"anyOf": [text, ids, several]})


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _prompt_ids(name: str, given: list[Any]) -> list[int]:
    ids = whole_numbers(name, given)
    if min(ids) < 0 or max(ids) > UINT32_MAX:
        wrong = next(item for item in ids if not 0 <= item <= UINT32_MAX)
        raise BadRequest(f"{name}: Token id {shorten(wrong)} is out of vocabulary", param=name)
    return ids


_STOP = string(1, MAX_STOPS_CHARS)
STOPS = Kind(
    _read_stops,
    {"anyOf": [_STOP.schema, {"type": "array", "items": _STOP.schema}]},
)
LOGIT_BIAS = Kind(
    _read_logit_bias,
    {
        "anyOf": [
            {
                "type": "object",
                "maxProperties": MAX_LOGIT_BIASES,
                "propertyNames": {"pattern": f"^{_ID_KEY.pattern}$"},
                "additionalProperties": {"type": "number"},
            },
            {
                "type": "array",
                "maxItems": MAX_LOGIT_BIASES,
                "items": {
                    "type": "array",
                    "prefixItems": [
                        TOKEN_ID.schema,
                        {"anyOf": [{"type": "number"}, {"const": False}]},
                    ],
                    "minItems": 2,
                    "maxItems": 2,
                },
            },
        ]
    },
)


def length(at_least: int) -> Kind:
    """A number of tokens; -1: up to the end of the context."""
    return unless(integer(at_least, INT32_MAX), -1)


def _read_lora(name: str, value: Any) -> str | None:
    match value:
        case [only]:
            value = only
        case []:
            value = None
    return (STRING.read(name, value) or None) if value is not None else None


LORA = Kind(
    _read_lora,
    {"anyOf": [STRING.schema, {"type": "array", "items": or_null(STRING.schema), "maxItems": 1}]},
)


def _read_stream_options(name: str, value: Any) -> JsonObject:
    options = read_object(name, value)
    for key in ("include_usage", "continuous_usage_stats"):
        if options.get(key) is not None:
            BOOLEAN.read(f"{name}.{key}", options[key])
    return options


_FLAG_OR_NULL = or_null({"type": "boolean"})
STREAM_OPTIONS = Kind(
    _read_stream_options,
    {
        "type": "object",
        "properties": {"include_usage": _FLAG_OR_NULL, "continuous_usage_stats": _FLAG_OR_NULL},
    },
)
