"""Fields of OpenAI's completions and chats: its own, those that vLLM added, and other servers'.

One table for each route. Bounds that depend on a model are checked where the model is known.
"""

from __future__ import annotations

import re
from typing import Any

from penstock_router.apis.base import TIMEOUT
from penstock_router.apis.chat_messages import MESSAGES
from penstock_router.apis.openai.other_servers import with_other_servers
from penstock_router.apis.openai.thinking import THINKING_FIELDS
from penstock_router.apis.structured_output import CONSTRAINT_FIELDS
from penstock_router.apis.tools import CHOICE, TOOLS
from penstock_router.errors import BadRequest
from penstock_router.json_fields import (
    ANY_NUMBER,
    ANYTHING,
    ARRAY,
    BOOLEAN,
    FLOAT32_MAX,
    INT32_MAX,
    INT64,
    OBJECT,
    POSITIVE,
    STRING,
    TOKEN_ID,
    UINT32_MAX,
    WORD_OR_BOOLEAN,
    Field,
    JsonObject,
    Kind,
    Table,
    array_of,
    integer,
    label,
    not_served,
    number,
    one_of,
    or_null,
    read_array,
    read_object,
    refusal,
    shorten,
    string,
    taken,
    token_ids,
    unless,
    whole_numbers,
)
from penstock_router.request import MAX_SESSION_CHARS, WHOLE_VOCABULARY
from penstock_router.text.stop_strings import MAX_CHARS as MAX_STOPS_CHARS

MAX_CHOICES = 16384
MAX_WORD_CHARS = 1024
MAX_LOGPROBS = 20
MAX_PROMPTS = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_BAD_WORDS = 128
# More than any vocabulary has.
MAX_ALLOWED_TOKEN_IDS = 1_000_000
MAX_LOGIT_BIASES = 1024
# The id of a token as a key of an object: no vocabulary has a thousand million.
_ID_KEY = re.compile("[0-9]{1,9}")
DEFAULT_COMPLETION_TOKENS = 16
NO_PROMPT = "Either prompt or prompt_embeds must be provided and non-empty."


# ---- Kinds of these routes ---------------------------------------------------------------------

# The bound is the shards' own, which is known once a request has its model.
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
    """Biases by id, cut to -100..100. Ids come as strings, since JSON has no other keys, or, as
    llama.cpp has them, in pairs of id and bias, where false bans a token.
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
        biases[int(key)] = float(max(-100.0, min(100.0, bias)))
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
    """The four forms of a prompt, as a tuple of strings and of lists of ids; `empty` is the refusal
    of a prompt with nothing in it.
    """
    forms = "a string, an array of token ids, or an array of either"

    def read(name: str, value: Any) -> tuple[str | list[int], ...]:
        if not isinstance(value, str | list):
            raise refusal(name, forms, value)
        single = isinstance(value, str) or (bool(value) and _is_number(value[0]))
        given = [value] if single else value
        # Checked first: there may be millions of prompts to look at.
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
_LOGIT_BIAS = Kind(
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
    """The name of an adapter, alone or in an array of one."""
    match value:
        case [only]:
            value = only
        case []:
            value = None
    return (STRING.read(name, value) or None) if value is not None else None


_LORA = Kind(
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
_STREAM_OPTIONS = Kind(
    _read_stream_options,
    {
        "type": "object",
        "properties": {"include_usage": _FLAG_OR_NULL, "continuous_usage_stats": _FLAG_OR_NULL},
    },
)


# -1 asks for no bound.
_WINDOW = integer(-1, INT32_MAX)


# ---- The tables --------------------------------------------------------------------------------

# Fields of completions, chats and responses alike.
SAMPLING = (
    Field("temperature", number(0, 2), "Randomness; below 1e-5 always the likeliest token."),
    Field("top_p", number(0, 1, above_low=True), "Nucleus sampling: likeliest up to this sum."),
    Field("top_k", integer(-1, INT32_MAX), "Sample among so many of the likeliest; 0 and -1: all."),
    Field("min_p", number(0, 1), "Drop tokens less likely than this times the likeliest."),
    Field(
        "repetition_penalty",
        number(0, FLOAT32_MAX, above_low=True),
        "Above 1 makes tokens less likely that occurred; 1: none.",
    ),
    Field("presence_penalty", number(-2, 2), "Subtracted for tokens that the answer has already."),
    Field("frequency_penalty", number(-2, 2), "The same for each time that the answer has them."),
    Field(
        "repeat_last_n",
        Kind(unless(_WINDOW, -1).read, _WINDOW.schema),
        "The penalties count the last so many tokens, as in llama.cpp; 0: none, -1: all.",
    ),
    Field(
        "seed",
        unless(INT64, -1),
        "The same request with the same seed gets the same answer; -1: any seed.",
    ),
    Field(
        "typical_p",
        number(0, 1, above_low=True),
        "Sample among the most typical tokens that add up to this.",
    ),
)

_COMMON = (
    Field("model", STRING, "One of /v1/models; may be left out if there is only one."),
    Field("lora_path", _LORA, "SGLang's name of an adapter, which is asked for like a model."),
    Field("n", integer(1, MAX_CHOICES), "How many choices; the first has the seed itself."),
    *SAMPLING,
    Field("logit_bias", _LOGIT_BIAS, "Added to the logits of tokens by id, cut to -100..100."),
    Field(
        "allowed_token_ids",
        token_ids(at_least=1, at_most=MAX_ALLOWED_TOKEN_IDS),
        "Sample among these only.",
    ),
    Field(
        "bad_words",
        array_of(string(1, MAX_WORD_CHARS), at_most=MAX_BAD_WORDS, unit="words"),
        "Token sequences that are never completed.",
    ),
    Field("stop", STOPS, "Strings that end a choice; they are cut off."),
    Field(
        "stop_token_ids",
        token_ids(at_most=MAX_STOP_TOKEN_IDS),
        "Tokens that end a choice.",
    ),
    Field("include_stop_str_in_output", BOOLEAN, "Keep the stop string in the text."),
    Field("ignore_eos", BOOLEAN, "Continue after the model's end-of-sequence tokens."),
    Field(
        "min_tokens",
        integer(0, INT32_MAX),
        "Nothing but a constraint that leaves no more ends a choice before so many tokens.",
    ),
    Field("skip_special_tokens", BOOLEAN, "Leave special tokens out of the text; default true."),
    Field("spaces_between_special_tokens", BOOLEAN, "If they are shown; default true."),
    Field("echo", BOOLEAN, "Begin with the prompt; a chat: with a last message of the assistant."),
    Field(
        "prompt_logprobs",
        NUM_LOGPROBS,
        "Log-probabilities of the prompt's tokens, at most the shards' --max-logprobs; -1: of the "
        "whole vocabulary; of streams only a completion's has any, of 0.",
    ),
    Field(
        "logprob_token_ids",
        token_ids(at_least=1, at_most=MAX_STOP_TOKEN_IDS),
        "Report these in place of the likeliest; needs logprobs.",
    ),
    Field(
        "truncate_prompt_tokens",
        integer(-1, INT32_MAX),
        "Keep so many tokens of a prompt; -1: as many as fit.",
    ),
    Field(
        "truncation_side",
        one_of("left", "right"),
        "Which end is cut off; default: the tokenizer's.",
    ),
    Field("add_special_tokens", BOOLEAN, "Add the tokenizer's own; default true, in chats false."),
    Field("return_token_ids", BOOLEAN, "Return the token ids of prompt and answer."),
    Field("return_tokens_as_token_ids", BOOLEAN, "Name tokens of log-probabilities by their ids."),
    Field("stream", BOOLEAN, "Answer with events as tokens come."),
    Field("stream_options", _STREAM_OPTIONS, "Only in streams: whether events contain the usage."),
    Field("stream_interval", POSITIVE, "Least number of tokens in an event of a stream."),
    # Lower values run first. HTTP clients cannot go below the default of 0: otherwise anybody could
    # overtake all others.
    Field("priority", integer(0, 1000), "Lower runs first."),
    Field("slo", number(1e-6, 86_400), "Seconds between tokens to aim for."),
    Field("is_latency_sensitive", WORD_OR_BOOLEAN, "Prefer it to requests that are not."),
    Field(
        "cache_salt",
        string(1, 128, without="@/\\\0"),
        "Share cached prefixes with requests of the same salt only.",
    ),
    Field("request_id", STRING, "The request's id, if there is no X-Request-Id."),
    Field(
        "session_id",
        string(0, MAX_SESSION_CHARS),
        "Requests with the same value go to the same shard, and its prefix cache.",
    ),
    TIMEOUT,
    label("user"),
    label("metadata"),
    label("safety_identifier"),
    taken("store", False, help="Answers are kept by /v1/responses only."),
    taken("service_tier", "auto", "default", help="There is one tier."),
    taken("prompt_cache_retention", help="Cached prefixes stay as long as there is room."),
    taken("prediction", help="It would change the speed, never the answer."),
    *CONSTRAINT_FIELDS,
    not_served("length_penalty", ANY_NUMBER, 1.0, help="For beam search, which is not served."),
    not_served("use_beam_search", BOOLEAN, False),
    not_served("kv_transfer_params", OBJECT),
    not_served("ec_transfer_params", OBJECT),
    not_served("vllm_xargs", OBJECT, {}),
    not_served("logits_processors", ANYTHING, []),
    not_served("repetition_detection", OBJECT),
    not_served("watermarking", BOOLEAN, False),
    not_served("return_prompt_text", BOOLEAN, False),
)

OF_CHATS = "A field of chats, refused here."
OF_IMAGES = "How images are resized is the model's, not a request's."
OF_TOOLS = "The older format of tools; not served."

COMPLETION_FIELDS: Table = with_other_servers(
    [
        Field(
            "prompt",
            prompts(MAX_PROMPTS, NO_PROMPT),
            "A text, token ids, or an array of either.",
            required=True,
        ),
        *_COMMON,
        Field(
            "max_tokens",
            length(0),
            "Default 16; 0 with echo: scores only; -1: up to the end of the context.",
        ),
        Field("best_of", integer(1, MAX_CHOICES), "Generate so many, return the n likeliest."),
        Field(
            "logprobs",
            NUM_LOGPROBS,
            "Return those of each token, and of so many alternatives, at most the shards' "
            "--max-logprobs; -1: of the whole vocabulary.",
        ),
        not_served("suffix", STRING, ""),
        not_served("prompt_embeds", ANYTHING),
        # Fields of chats that would change the answer: refused, as ignoring them would mislead.
        not_served("max_completion_tokens", POSITIVE, help=OF_CHATS),
        not_served("top_logprobs", NUM_LOGPROBS, help=OF_CHATS),
        not_served("tools", ARRAY, help=OF_CHATS),
        not_served("tool_choice", ANYTHING, "none", help=OF_CHATS),
        not_served("thinking_token_budget", ANYTHING, help=OF_CHATS),
    ]
)

CHAT_FIELDS: Table = with_other_servers(
    [
        Field("messages", MESSAGES, "The chat so far; text only.", required=True),
        *_COMMON,
        Field("max_tokens", length(1), "Default, and -1: up to the end of the context."),
        Field("max_completion_tokens", length(1), "Newer name of max_tokens; counts before it."),
        Field("logprobs", BOOLEAN, "Return the log-probability of each token."),
        Field(
            "top_logprobs",
            NUM_LOGPROBS,
            "Alternatives to return for each token, at most --max-logprobs of the shards; -1: the "
            "whole vocabulary; needs logprobs.",
        ),
        Field("add_generation_prompt", BOOLEAN, "Let the template begin the answer; default true."),
        Field("continue_final_message", BOOLEAN, "Continue the last message."),
        Field("chat_template", STRING, "Refused unless the operator allows it."),
        Field("chat_template_kwargs", OBJECT, "More variables of the template."),
        Field(
            "documents", array_of(OBJECT, at_most=1000, unit="documents"), "Passed to the template."
        ),
        *THINKING_FIELDS,
        Field("include_reasoning", BOOLEAN, "Return the reasoning; default true."),
        Field(
            "thinking_token_budget",
            integer(0, INT32_MAX),
            "End the reasoning after so many tokens; the answer follows.",
        ),
        Field("tools", TOOLS, "Functions that the answer may call."),
        Field(
            "tool_choice",
            CHOICE,
            "none, auto (the default with tools), required, a function, or those allowed.",
        ),
        Field("parallel_tool_calls", BOOLEAN, "Several calls in one answer; default true."),
        not_served("best_of", integer(1, MAX_CHOICES), 1),
        not_served("functions", ARRAY, [], help=OF_TOOLS),
        not_served("function_call", ANYTHING, "none", help=OF_TOOLS),
        not_served("modalities", ARRAY, ["text"]),
        not_served("audio", ANYTHING, {}),
        taken("verbosity", "medium", help="No template reads it."),
        not_served("web_search_options", ANYTHING),
        not_served("mm_processor_kwargs", OBJECT, {}, help=OF_IMAGES),
        not_served("media_io_kwargs", OBJECT, {}, help=OF_IMAGES),
    ]
)
