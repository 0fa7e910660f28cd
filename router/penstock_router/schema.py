"""JSON -> a frozen `CompletionRequest` or `ChatRequest`, or a `BadRequest` that names the field.

One table lists every field of both routes: its type and bounds, and whether it works yet. A known
field that does not is refused unless it asks for nothing; a field in no table is ignored, as
clients send many of their own. Knows no model: bounds that depend on one are checked where the
model is known.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from penstock_router.errors import BadRequest

logger = logging.getLogger(__name__)

MAX_CHOICES = 16384
MAX_STOPS = 4
MAX_STOP_CHARS = 1024
MAX_LOGPROBS = 20
MAX_PROMPTS = 1024
MAX_ROLE_CHARS = 64
DEFAULT_COMPLETION_TOKENS = 16
MAX_STOP_TOKEN_IDS = 1024
INT64_MAX = 2**63 - 1
INT32_MAX = 2**31 - 1

_FLOAT_MAX = sys.float_info.max

JsonObject = dict[str, Any]


# ---- What a request is once it is known to be well-formed --------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What both routes share. None means: as the model's own configuration has it."""

    model: str = ""
    n: int = 1
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] = ()
    priority: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    # None: none; 0: of the chosen token; k: of the k best besides.
    logprobs: int | None = None
    echo: bool = False
    add_special_tokens: bool = True
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    request_id: str | None = None
    # From headers: only where tokens come out the same; which requests belong together; a shard.
    exact: bool = False
    session: str = ""
    shard: str = ""
    # Of an answer that can be taken up again: what was drawn for want of a seed, and the numerics
    # that its tokens must come from.
    drawn_seed: int | None = None
    numerics: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest(Options):
    """A body of /v1/completions. `max_tokens` 0 asks for the prompt's own scores only."""

    prompts: tuple[str | list[int], ...]
    best_of: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest(Options):
    """A body of /v1/chat/completions; `messages` are as chat templates expect them."""

    messages: list[JsonObject]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template_kwargs: JsonObject = field(default_factory=dict)


# ---- Bytes -> object ---------------------------------------------------------------------------


def decode_object(body: bytes) -> JsonObject:
    """The JSON object in `body`: UTF-8, no NaN. Of a key given twice the last value counts."""
    try:
        value = msgspec.json.decode(body)
    except UnicodeDecodeError:
        raise BadRequest("the body is not valid UTF-8") from None
    except RecursionError:
        raise BadRequest("the body is nested too deeply") from None
    except msgspec.DecodeError as error:
        raise BadRequest(f"the body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise BadRequest(f"the body must be a JSON object, not {_json_type(value)}")
    return value


def _json_type(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, int | float):
        return "a number"
    if isinstance(value, str):
        return "a string"
    return "an array" if isinstance(value, list) else "an object"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


# ---- Parsers of single values: (name, value) -> value, or BadRequest ---------------------------

Parser = Callable[[str, Any], Any]


def _refuse(name: str, wanted: str, value: object) -> BadRequest:
    given = _short(value) if isinstance(value, str | int | float) else _json_type(value)
    return BadRequest(f"{name}: must be {wanted}; given: {given}", param=name)


def _integer(low: int, high: int) -> Parser:
    def parse(name: str, value: Any) -> int:
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise _refuse(name, "an integer", value)
        # The words in parentheses are what a validator of the field's peers calls the bound.
        if value < low:
            raise _refuse(name, f"at least {low} (greater_than_equal)", value)
        if value > high:
            raise _refuse(name, f"at most {high} (less_than_equal)", value)
        return value

    return parse


def _number(low: float, high: float, *, above_low: bool = False) -> Parser:
    def parse(name: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise _refuse(name, "a number", value)
        inside = low < value <= high if above_low else low <= value <= high
        if not inside:
            bounds = f"{'above' if above_low else 'at least'} {low:g} and at most {high:g}"
            raise _refuse(name, bounds, value)
        return float(value)

    return parse


def _boolean(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise _refuse(name, "true or false", value)
    return value


def _string(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise _refuse(name, "a string", value)
    return value


def _object(name: str, value: Any) -> JsonObject:
    if not isinstance(value, dict):
        raise _refuse(name, "an object", value)
    return value


def _array(name: str, value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise _refuse(name, "an array", value)
    return value


def _anything(name: str, value: Any) -> Any:
    return value


def _stops(name: str, value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else _array(name, value)
    if len(stops) > MAX_STOPS:
        raise BadRequest(f"{name}: at most {MAX_STOPS} strings; given: {len(stops)}", param=name)
    for stop in stops:
        if not isinstance(stop, str):
            raise _refuse(name, "a string or an array of strings", stop)
        if not 1 <= len(stop) <= MAX_STOP_CHARS:
            text = f"{name}: a stop string has 1 to {MAX_STOP_CHARS} characters; one has "
            raise BadRequest(f"{text}{len(stop)}", param=name)
    return tuple(stops)


def _token_ids(name: str, value: Any) -> tuple[int, ...]:
    ids = _array(name, value)
    if len(ids) > MAX_STOP_TOKEN_IDS:
        raise BadRequest(f"{name}: at most {MAX_STOP_TOKEN_IDS} ids; given: {len(ids)}", param=name)
    parse = _integer(0, 2**32 - 1)
    return tuple(parse(name, item) for item in ids)


def _some_token_ids(name: str, value: Any) -> tuple[int, ...]:
    ids = _token_ids(name, value)
    if not ids:
        raise BadRequest(f"{name}: must name at least one id", param=name)
    return ids


def _logit_bias(name: str, value: Any) -> dict[int, float]:
    """Ids come as strings, since JSON has no other keys; biases are cut to -100..100."""
    biases: dict[int, float] = {}
    for key, bias in _object(name, value).items():
        is_id = key.isascii() and key.isdecimal() and len(key) <= 10 and int(key) < 2**32
        if not is_id:
            raise _refuse(name, "an object whose keys are token ids", key)
        given = _number(-_FLOAT_MAX, _FLOAT_MAX)(f"{name}[{key}]", bias)
        biases[int(key)] = max(-100.0, min(100.0, given))
    return biases


def _prompts(name: str, value: Any) -> tuple[str | list[int], ...]:
    """The four forms of a prompt, as a tuple of strings and of lists of ids."""
    if not isinstance(value, str | list):
        raise _refuse(name, "a string, an array of token ids, or an array of either", value)
    single = isinstance(value, str) or (bool(value) and _is_integer(value[0]))
    prompts = [value] if single else value
    if not prompts or any(prompt in ("", []) for prompt in prompts):
        raise BadRequest(
            "Either prompt or prompt_embeds must be provided and non-empty.", param=name
        )
    if len(prompts) > MAX_PROMPTS:
        raise BadRequest(
            f"{name}: at most {MAX_PROMPTS} prompts; given: {len(prompts)}", param=name
        )
    for prompt in prompts:
        if isinstance(prompt, list):
            _check_prompt_ids(name, prompt)
        elif not isinstance(prompt, str):
            raise _refuse(name, "a string, an array of token ids, or an array of either", prompt)
    return tuple(prompts)


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_prompt_ids(name: str, ids: list[Any]) -> None:
    # `set(map(type, ...))` and `min` go over a hundred thousand ids in a millisecond or two.
    if set(map(type, ids)) != {int}:
        raise BadRequest(f"{name}: an array of token ids holds integers only", param=name)
    if min(ids) < 0 or max(ids) > 2**32 - 1:
        wrong = next(item for item in ids if not 0 <= item < 2**32)
        raise BadRequest(f"{name}: Token id {_short(wrong)} is out of vocabulary", param=name)


def _stream_options(name: str, value: Any) -> JsonObject:
    options = _object(name, value)
    for key in ("include_usage", "continuous_usage_stats"):
        if options.get(key) is not None:
            _boolean(f"{name}.{key}", options[key])
    return options


def _messages(name: str, value: Any) -> list[JsonObject]:
    messages = _array(name, value)
    if not messages:
        raise BadRequest(f"{name}: at least one message is needed", param=name)
    return [_message(f"{name}[{index}]", message) for index, message in enumerate(messages)]


def _message(name: str, value: Any) -> JsonObject:
    """A message as templates expect it: no nulls, text content as one string."""
    # Templates tell "no content" from its being missing, not from null.
    message = {key: item for key, item in _object(name, value).items() if item is not None}
    role = message.get("role")
    if not isinstance(role, str) or not 1 <= len(role) <= MAX_ROLE_CHARS:
        raise _refuse(f"{name}.role", f"a string of 1 to {MAX_ROLE_CHARS} characters", role)
    content = message.get("content")
    if isinstance(content, list):
        message["content"] = _joined_parts(f"{name}.content", content)
    elif content is not None and not isinstance(content, str):
        raise _refuse(f"{name}.content", "a string, null or an array of parts", content)
    if "tool_calls" in message:
        message["tool_calls"] = _tool_calls(f"{name}.tool_calls", message["tool_calls"])
    elif content is None and role != "assistant":
        raise BadRequest(f"{name}: a message of role {_short(role)} needs content", param=name)
    return message


def _joined_parts(name: str, parts: list[Any]) -> str:
    texts = []
    for index, part in enumerate(parts):
        kind = _object(f"{name}[{index}]", part).get("type")
        if kind not in ("text", "input_text", "output_text", "refusal"):
            text = f"{name}[{index}]: parts of type {_short(kind)} are not served, only text"
            raise BadRequest(text, param=name)
        key = "refusal" if kind == "refusal" else "text"
        texts.append(_string(f"{name}[{index}].{key}", part.get(key)))
    return "\n".join(texts)


def _tool_calls(name: str, value: Any) -> list[JsonObject]:
    calls = []
    for index, item in enumerate(_array(name, value)):
        call = dict(_object(f"{name}[{index}]", item))
        if "function" in call:
            call["function"] = _called_function(f"{name}[{index}].function", call["function"])
        calls.append(call)
    return calls


def _called_function(name: str, value: Any) -> JsonObject:
    function = dict(_object(name, value))
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        # On the wire they are JSON in a string; templates expect the object.
        try:
            parsed = msgspec.json.decode(arguments or "{}")
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            return function
        if isinstance(parsed, dict):
            function["arguments"] = parsed
    return function


# ---- The table ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a body: how it is read, and where it works.

    `routes` holds C for completions and H for chat. A field that does not work (`works` False) is
    checked for its type and refused unless it equals one of `neutral`.
    """

    name: str
    parse: Parser
    routes: str = "CH"
    works: bool = True
    neutral: tuple[Any, ...] = ()


def _later(name: str, parse: Parser, *neutral: Any, routes: str = "CH") -> Field:
    return Field(name, parse, routes, works=False, neutral=neutral)


_POSITIVE = _integer(1, INT32_MAX)
_INT64 = _integer(-INT64_MAX - 1, INT64_MAX)
_ANY_FLOAT = _number(-_FLOAT_MAX, _FLOAT_MAX)

FIELDS: tuple[Field, ...] = (
    Field("model", _string),
    Field("prompt", _prompts, "C"),
    Field("messages", _messages, "H"),
    Field("max_tokens", _integer(0, INT32_MAX), "C"),
    Field("max_tokens", _POSITIVE, "H"),
    Field("max_completion_tokens", _POSITIVE, "H"),
    Field("n", _integer(1, MAX_CHOICES)),
    Field("best_of", _integer(1, MAX_CHOICES), "C"),
    Field("temperature", _number(0, 2)),
    Field("top_p", _number(0, 1, above_low=True)),
    Field("top_k", _integer(-1, INT32_MAX)),
    Field("min_p", _number(0, 1)),
    Field("repetition_penalty", _number(0, _FLOAT_MAX, above_low=True)),
    Field("presence_penalty", _number(-2, 2)),
    Field("frequency_penalty", _number(-2, 2)),
    Field("logit_bias", _logit_bias),
    Field("allowed_token_ids", _some_token_ids),
    # Lower runs first, and who speaks HTTP may only stand back: else anybody could put all others
    # down.
    Field("priority", _integer(0, 1000)),
    Field("seed", _INT64),
    Field("stop", _stops),
    Field("stop_token_ids", _token_ids),
    Field("include_stop_str_in_output", _boolean),
    Field("ignore_eos", _boolean),
    Field("skip_special_tokens", _boolean),
    Field("logprobs", _integer(0, MAX_LOGPROBS), "C"),
    Field("logprobs", _boolean, "H"),
    Field("top_logprobs", _integer(0, MAX_LOGPROBS), "H"),
    Field("echo", _boolean),
    Field("stream", _boolean),
    Field("stream_options", _stream_options),
    Field("add_special_tokens", _boolean),
    Field("add_generation_prompt", _boolean, "H"),
    Field("continue_final_message", _boolean, "H"),
    Field("chat_template_kwargs", _object, "H"),
    Field("reasoning_effort", _string, "H"),
    Field("include_reasoning", _boolean, "H"),
    Field("return_token_ids", _boolean),
    Field("return_tokens_as_token_ids", _boolean),
    Field("request_id", _string),
    Field("user", _string),
    # Known, and not served yet.
    _later("suffix", _string, "", routes="C"),
    _later("response_format", _object, {"type": "text"}),
    _later("tools", _array, routes="H"),
    _later("tool_choice", _anything, "none", routes="H"),
    _later("functions", _array, [], routes="H"),
    _later("function_call", _anything, "none", routes="H"),
    _later("parallel_tool_calls", _boolean, True, False, routes="H"),
    _later("thinking_token_budget", _INT64, routes="H"),
    _later("modalities", _array, ["text"], routes="H"),
    _later("length_penalty", _ANY_FLOAT, 1.0),
    _later("use_beam_search", _boolean, False),
    _later("min_tokens", _integer(0, INT32_MAX), 0),
    _later("spaces_between_special_tokens", _boolean, True),
    _later("truncate_prompt_tokens", _integer(-1, INT32_MAX)),
    _later("truncation_side", _string),
    _later("bad_words", _array, []),
    _later("prompt_logprobs", _integer(-1, INT32_MAX)),
    _later("logprob_token_ids", _token_ids),
    _later("structured_outputs", _object),
    _later("guided_json", _anything),
    _later("guided_regex", _string),
    _later("guided_choice", _array),
    _later("guided_grammar", _string),
    _later("guided_decoding_backend", _string),
    _later("chat_template", _string, routes="H"),
    _later("documents", _array, [], routes="H"),
    _later("session_id", _string),
    _later("cache_salt", _string),
    _later("stream_interval", _POSITIVE, 1),
    _later("prompt_embeds", _anything, routes="C"),
    _later("kv_transfer_params", _object),
    _later("vllm_xargs", _object),
)

_BY_ROUTE: dict[str, dict[str, Field]] = {
    route: {entry.name: entry for entry in FIELDS if route in entry.routes} for route in "CH"
}
# Fields of the other route that would change the answer: to ignore them would be a lie.
_WRONG_ROUTE = {
    "C": frozenset({"max_completion_tokens", "top_logprobs", "tools"}),
    "H": frozenset({"best_of"}),
}
_OPTION_NAMES = frozenset(Options.__dataclass_fields__)


def _read_fields(route: str, body: JsonObject) -> JsonObject:
    """Every given field that works, parsed. null is the same as not given."""
    known = _BY_ROUTE[route]
    values: JsonObject = {}
    for name, value in body.items():
        entry = known.get(name)
        if entry is None and name in _WRONG_ROUTE[route] and value is not None:
            raise BadRequest(f"{name}: not a field of this route; leave it out", param=name)
        if entry is None:
            logger.debug("ignored unknown field %s", _short(name))
        elif value is not None:
            parsed = entry.parse(name, value)
            if entry.works:
                values[name] = parsed
            elif parsed not in entry.neutral:
                raise _not_served(name, parsed)
    return values


def _not_served(name: str, value: object) -> BadRequest:
    if name == "tools" and not value:
        return BadRequest("tools: must not be an empty array; leave it out instead", param=name)
    if name == "tool_choice":
        text = "tool_choice: only allowed with tools, which this server does not serve yet"
        return BadRequest(text, param=name)
    return BadRequest(f"{name}: not served by this server yet; leave it out", param=name)


# ---- The two bodies ----------------------------------------------------------------------------


def parse_completion(body: JsonObject) -> CompletionRequest:
    """A body of /v1/completions."""
    values = _read_fields("C", body)
    if "prompt" not in values:
        raise BadRequest(
            "Either prompt or prompt_embeds must be provided and non-empty.", param="prompt"
        )
    common = _common(values)
    common.setdefault("max_tokens", None)
    request = CompletionRequest(
        prompts=values["prompt"],
        best_of=values.get("best_of") or common.get("n", 1),
        **common,
    )
    if request.best_of < request.n:
        raise BadRequest(f"best_of: must be at least n ({request.n})", param="best_of")
    if request.stream and request.best_of > request.n:
        raise BadRequest("best_of: must equal n when streaming", param="best_of")
    if request.max_tokens == 0 and not request.echo:
        raise _refuse("max_tokens", "at least 1 without echo", 0)
    return request


def parse_chat(body: JsonObject) -> ChatRequest:
    """A body of /v1/chat/completions."""
    values = _read_fields("H", body)
    if "messages" not in values:
        raise BadRequest("messages: required", param="messages")
    common = _common(values)
    common["max_tokens"] = values.get("max_completion_tokens", values.get("max_tokens"))
    common["logprobs"] = _chat_logprobs(values)
    common.setdefault("add_special_tokens", False)
    request = ChatRequest(
        messages=values["messages"],
        add_generation_prompt=values.get(
            "add_generation_prompt", not values.get("continue_final_message", False)
        ),
        continue_final_message=values.get("continue_final_message", False),
        template_kwargs=_template_kwargs(values),
        **common,
    )
    if request.continue_final_message and request.add_generation_prompt:
        text = "continue_final_message: not together with add_generation_prompt"
        raise BadRequest(text, param="continue_final_message")
    return request


def _common(values: JsonObject) -> JsonObject:
    """The fields of `Options`, as its constructor takes them."""
    common = {name: value for name, value in values.items() if name in _OPTION_NAMES}
    stream_options = values.get("stream_options")
    if stream_options and not common.get("stream"):
        text = "stream_options: only allowed when stream is true"
        raise BadRequest(text, param="stream_options")
    if stream_options and stream_options.get("include_usage"):
        common["include_usage"] = True
        common["continuous_usage"] = bool(stream_options.get("continuous_usage_stats"))
    return common


def _chat_logprobs(values: JsonObject) -> int | None:
    top: int = values.get("top_logprobs", 0)
    if values.get("logprobs"):
        return top
    if top:
        raise BadRequest("top_logprobs: needs logprobs to be true", param="top_logprobs")
    return None


# Set by the router itself; a template must not see a request's idea of them.
_RESERVED_KWARGS = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "chat_template", "tokenize"}
)


def _template_kwargs(values: Mapping[str, Any]) -> JsonObject:
    kwargs: JsonObject = dict(values.get("chat_template_kwargs", {}))
    reserved = sorted(_RESERVED_KWARGS & kwargs.keys())
    if reserved:
        text = f"chat_template_kwargs: {reserved[0]} is a field of its own"
        raise BadRequest(text, param="chat_template_kwargs")
    if "reasoning_effort" in values:
        kwargs.setdefault("reasoning_effort", values["reasoning_effort"])
    return kwargs
