"""OpenAI's completions and chats: bodies -> requests. The shapes are in `answers.py`.

One table for each route lists its fields: OpenAI's own and those that vLLM added. Bounds that
depend on a model are checked where the model is known.
"""

from __future__ import annotations

import re
from typing import Any

from penstock_router.apis.base import ERRORS, TIMEOUT, Api
from penstock_router.apis.chat_messages import MESSAGES
from penstock_router.apis.images import take_images
from penstock_router.apis.openai.answers import (
    ChatAnswer,
    ChatChunk,
    ChatShape,
    CompletionAnswer,
    CompletionShape,
)
from penstock_router.apis.structured_output import CONSTRAINT_FIELDS, constraint_options
from penstock_router.apis.tools import CHOICE, TOOLS, check_one_form, tool_options
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
    array_of,
    integer,
    not_served,
    number,
    one_of,
    or_null,
    read_array,
    read_fields,
    read_object,
    refusal,
    shorten,
    string,
    table,
    token_ids,
    whole_numbers,
)
from penstock_router.request import (
    MAX_SESSION_CHARS,
    WHOLE_VOCABULARY,
    ChatRequest,
    CompletionRequest,
    Options,
)

MAX_CHOICES = 16384
MAX_STOPS = 4
MAX_STOP_CHARS = 1024
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
    if len(stops) > MAX_STOPS:
        raise BadRequest(f"{name}: at most {MAX_STOPS} strings; given: {len(stops)}", param=name)
    for stop in stops:
        if not isinstance(stop, str):
            raise refusal(name, "a string or an array of strings", stop)
        if not 1 <= len(stop) <= MAX_STOP_CHARS:
            text = f"{name}: a stop string has 1 to {MAX_STOP_CHARS} characters; one has "
            raise BadRequest(f"{text}{len(stop)}", param=name)
    return tuple(stops)


def _read_logit_bias(name: str, value: Any) -> dict[int, float]:
    """Ids come as strings, since JSON has no other keys; biases are cut to -100..100."""
    given = read_object(name, value)
    if len(given) > MAX_LOGIT_BIASES:
        text = f"{name}: at most {MAX_LOGIT_BIASES} ids; given: {len(given)}"
        raise BadRequest(text, param=name)
    biases: dict[int, float] = {}
    for key, bias in given.items():
        if not _ID_KEY.fullmatch(key):
            raise refusal(name, "an object whose keys are token ids, of 1 to 9 digits", key)
        if isinstance(bias, bool) or not isinstance(bias, int | float):
            raise refusal(name, "an object of token ids and numbers", bias)
        biases[int(key)] = float(max(-100.0, min(100.0, bias)))
    return biases


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


_STOP = string(1, MAX_STOP_CHARS)
STOPS = Kind(
    _read_stops,
    {"anyOf": [_STOP.schema, {"type": "array", "maxItems": MAX_STOPS, "items": _STOP.schema}]},
)
_LOGIT_BIAS = Kind(
    _read_logit_bias,
    {
        "type": "object",
        "maxProperties": MAX_LOGIT_BIASES,
        "propertyNames": {"pattern": f"^{_ID_KEY.pattern}$"},
        "additionalProperties": {"type": "number"},
    },
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
    Field("seed", INT64, "The same request with the same seed gets the same answer."),
)

_COMMON = (
    Field("model", STRING, "One of /v1/models; may be left out if there is only one."),
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
        array_of(string(1, MAX_STOP_CHARS), at_most=MAX_BAD_WORDS, unit="words"),
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
    Field("user", STRING, "Accepted without effect."),
    *CONSTRAINT_FIELDS,
    not_served("length_penalty", ANY_NUMBER, 1.0, help="For beam search, which is not served."),
    not_served("use_beam_search", BOOLEAN, False),
    not_served("kv_transfer_params", OBJECT),
    not_served("vllm_xargs", OBJECT, {}),
    not_served("logits_processors", ANYTHING, []),
)

OF_CHATS = "A field of chats, refused here."
OF_IMAGES = "How images are resized is the model's, not a request's."
OF_TOOLS = "The older format of tools; not served."

COMPLETION_FIELDS = table(
    [
        Field(
            "prompt",
            prompts(MAX_PROMPTS, NO_PROMPT),
            "A text, token ids, or an array of either.",
            required=True,
        ),
        *_COMMON,
        Field("max_tokens", integer(0, INT32_MAX), "Default 16; 0 with echo: scores only."),
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

CHAT_FIELDS = table(
    [
        Field("messages", MESSAGES, "The chat so far; text only.", required=True),
        *_COMMON,
        Field("max_tokens", POSITIVE, "Default: up to the end of the context."),
        Field("max_completion_tokens", POSITIVE, "Newer name of max_tokens; counts before it."),
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
        Field("reasoning_effort", STRING, "Passed to the template."),
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
        not_served("verbosity", ANYTHING, "medium"),
        not_served("web_search_options", ANYTHING),
        not_served("mm_processor_kwargs", OBJECT, {}, help=OF_IMAGES),
        not_served("media_io_kwargs", OBJECT, {}, help=OF_IMAGES),
    ]
)
_OPTION_NAMES = frozenset(Options.__dataclass_fields__)
# Fields that `Options` names differently.
_RENAMED = {
    "slo": "seconds_between_tokens",
    "is_latency_sensitive": "latency_sensitive",
    "session_id": "session",
    "timeout": "timeout_s",
}


# ---- The two bodies ----------------------------------------------------------------------------


def parse_completion(body: JsonObject) -> CompletionRequest:
    """A body of /v1/completions."""
    if body.get("prompt") is None and body.get("prompt_embeds") is None:
        raise BadRequest(NO_PROMPT, param="prompt")
    values = read_fields(COMPLETION_FIELDS, body)
    common = common_options(values)
    request = CompletionRequest(
        prompts=values["prompt"],
        best_of=values.get("best_of") or common.get("n", 1),
        default_max_tokens=DEFAULT_COMPLETION_TOKENS,
        **common,
    )
    if request.best_of < request.n:
        raise BadRequest(f"best_of: must be at least n ({request.n})", param="best_of")
    if request.stream and request.best_of > request.n:
        raise BadRequest("best_of: must equal n when streaming", param="best_of")
    if request.max_tokens == 0 and not request.echo:
        raise refusal("max_tokens", "at least 1 without echo", 0)
    return request


def parse_chat(body: JsonObject) -> ChatRequest:
    """A body of /v1/chat/completions."""
    values = read_fields(CHAT_FIELDS, body)
    values["max_tokens"] = values.get("max_completion_tokens", values.get("max_tokens"))
    if "max_completion_tokens" in values:
        values["max_tokens_field"] = "max_completion_tokens"
    values["logprobs"] = _chat_logprobs(values)
    common = common_options(values)
    if common.get("stream") and "prompt_logprobs" in common:
        raise BadRequest("prompt_logprobs: not in streams", param="prompt_logprobs")
    common.setdefault("add_special_tokens", False)
    request = ChatRequest(
        messages=values["messages"],
        images=take_images(values["messages"]),
        include_reasoning=values.get("include_reasoning", True),
        thinking_tokens=values.get("thinking_token_budget"),
        **template_options(values),
        **tool_options(values),
        **common,
    )
    check_one_form(request)
    return request


def common_options(values: JsonObject) -> JsonObject:
    """The fields of `Options`, as its constructor takes them."""
    named = {_RENAMED.get(name, name): value for name, value in values.items()}
    common = {name: value for name, value in named.items() if name in _OPTION_NAMES}
    common |= constraint_options(values)
    stream = common.get("stream", False)
    stream_options = values.get("stream_options")
    if stream_options and not stream:
        text = "stream_options: only allowed when stream is true"
        raise BadRequest(text, param="stream_options")
    if stream_options and stream_options.get("include_usage"):
        common["include_usage"] = True
        common["continuous_usage"] = bool(stream_options.get("continuous_usage_stats"))
    if stream and common.get("prompt_logprobs"):
        raise BadRequest("prompt_logprobs: not in streams", param="prompt_logprobs")
    if requested := common.get("logprob_token_ids"):
        if common.get("logprobs") is None:
            raise BadRequest("logprob_token_ids: needs logprobs", param="logprob_token_ids")
        # Each position reports an id once.
        common["logprob_token_ids"] = tuple(dict.fromkeys(requested))
    return common


def _chat_logprobs(values: JsonObject) -> int | None:
    top: int = values.get("top_logprobs", 0)
    if values.get("logprobs"):
        return top
    if top:
        raise BadRequest("top_logprobs: needs logprobs to be true", param="top_logprobs")
    return None


def template_options(values: JsonObject) -> JsonObject:
    """What a chat's prompt depends on besides its messages, as `ChatRequest` takes it."""
    continues = values.get("continue_final_message", False)
    begins = values.get("add_generation_prompt", not continues)
    if continues and begins:
        text = "continue_final_message: not together with add_generation_prompt"
        raise BadRequest(text, param="continue_final_message")
    return {
        "add_generation_prompt": begins,
        "continue_final_message": continues,
        "documents": list(values["documents"]) if values.get("documents") else None,
        "chat_template": values.get("chat_template"),
        "template_kwargs": _template_kwargs(values),
    }


# Template variables that the router sets itself; a request must not override them.
_RESERVED_KWARGS = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "chat_template", "tokenize"}
)


def _template_kwargs(values: JsonObject) -> JsonObject:
    """What a request adds to the variables of its template."""
    kwargs: JsonObject = dict(values.get("chat_template_kwargs", {}))
    reserved = sorted(_RESERVED_KWARGS & kwargs.keys())
    if reserved:
        text = f"chat_template_kwargs: {reserved[0]} is a field of its own"
        raise BadRequest(text, param="chat_template_kwargs")
    if "reasoning_effort" in values:
        kwargs.setdefault("reasoning_effort", values["reasoning_effort"])
    return kwargs


# ---- The two APIs ------------------------------------------------------------------------------


def _name_completion(request_id: str, named_by_client: bool) -> str:
    # Each choice of a completion is a numbered request; clients expect the id of the first.
    return f"cmpl-{request_id}-0" if named_by_client else f"cmpl-{request_id}"


COMPLETIONS = Api(
    name="completions",
    request_type=CompletionRequest,
    fields=COMPLETION_FIELDS,
    parse=parse_completion,
    make_shape=CompletionShape,
    name_answer=_name_completion,
    errors=ERRORS,
    answer=CompletionAnswer,
    event=CompletionAnswer,
    resumable=True,
)
CHATS = Api(
    name="chats",
    request_type=ChatRequest,
    fields=CHAT_FIELDS,
    parse=parse_chat,
    make_shape=ChatShape,
    name_answer=lambda request_id, named_by_client: f"chatcmpl-{request_id}",
    errors=ERRORS,
    answer=ChatAnswer,
    event=ChatChunk,
    resumable=True,
)
