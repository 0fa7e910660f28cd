"""Ollama's API: bodies -> requests. Turns and answers have modules of their own."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from penstock_client.types import Constraint, ConstraintKind
from penstock_router.apis.base import LINES, TIMEOUT, Api, BodyKind, SeveralKinds
from penstock_router.apis.embeddings import MAX_INPUTS, EmbedRequest
from penstock_router.apis.images import take_images
from penstock_router.apis.ollama.answers import (
    ERRORS,
    ChatShape,
    GenerateShape,
    OllamaChatAnswer,
    OllamaGenerateAnswer,
)
from penstock_router.apis.ollama.chat_turns import IMAGES, TURNS, with_images
from penstock_router.apis.openai.fields import COMPLETION_FIELDS
from penstock_router.apis.structured_output import constraint_of_schema, only_constraint
from penstock_router.apis.tools import TOOLS, tool_options
from penstock_router.errors import BadRequest
from penstock_router.json_fields import (
    ANY_NUMBER,
    ANYTHING,
    BOOLEAN,
    INT32_MAX,
    OBJECT,
    POSITIVE,
    STRING,
    WARNINGS,
    Field,
    JsonObject,
    Kind,
    array_of,
    body_schema,
    integer,
    json_type,
    not_served,
    one_of,
    read_fields,
    read_object,
    string,
    table,
)
from penstock_router.request import ChatRequest, CompletionRequest
from penstock_router.text.prompts import embedding_prompts

# As it names a model's default version.
LATEST = ":latest"
_MAX_TOP_LOGPROBS = 20
# Templates decide whether a model reasons, by a variable with one of these names.
_THINKING_KWARGS = ("enable_thinking", "thinking")


# ---- Options -----------------------------------------------------------------------------------


def _as(name: str, known: str) -> Field:
    """A field of completions, by the name that it has here."""
    return dataclasses.replace(COMPLETION_FIELDS[known], name=name)


def _of_loading(name: str) -> Field:
    return Field(name, ANYTHING, "Decided when a shard starts: accepted without effect.")


# What ends an answer's length: -1 and -2 are the end of the context.
_LENGTH = integer(-2, INT32_MAX)
OPTIONS = table(
    [
        *(
            COMPLETION_FIELDS[name]
            for name in ("seed", "temperature", "top_k", "top_p", "min_p", "stop")
        ),
        _as("repeat_penalty", "repetition_penalty"),
        *(COMPLETION_FIELDS[name] for name in ("presence_penalty", "frequency_penalty")),
        Field("typical_p", COMPLETION_FIELDS["min_p"].kind, "The most typical up to this sum."),
        Field("num_predict", _LENGTH, "At most so many tokens; default, -1 and -2: no bound."),
        not_served("repeat_last_n", integer(-1, INT32_MAX), -1, help="All tokens count: -1."),
        not_served("mirostat", integer(0, 2), 0),
        not_served("penalize_newline", BOOLEAN, True),
        not_served("tfs_z", ANY_NUMBER, 1.0),
        *map(_of_loading, ("num_ctx", "num_batch", "num_gpu", "main_gpu", "num_thread")),
        *map(_of_loading, ("num_keep", "use_mmap", "use_mlock", "numa", "low_vram", "f16_kv")),
    ]
)


def _read_options(name: str, value: Any) -> JsonObject:
    """The sampling fields of a request, and `max_tokens`."""
    values = read_fields(OPTIONS, read_object(name, value))
    length = values.pop("num_predict", -1)
    if length == 0:
        raise BadRequest(f"{name}.num_predict: must not be 0; -1 is no bound", param=name)
    if "repeat_penalty" in values:
        values["repetition_penalty"] = values.pop("repeat_penalty")
    served = {key: values[key] for key in values if key in {*_SAMPLING, WARNINGS}}
    return {**served, "max_tokens": length if length > 0 else None}


_SAMPLING = {
    *("seed", "temperature", "top_k", "top_p", "min_p", "typical_p", "stop"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
}


# ---- Other fields ------------------------------------------------------------------------------


def _read_format(name: str, value: Any) -> Constraint | None:
    if value == "":
        return None
    if value == "json":
        return Constraint(ConstraintKind.JSON_OBJECT)
    if isinstance(value, dict):
        return constraint_of_schema(name, value)
    text = f'{name}: must be "json" or a JSON schema, not {json_type(value)}'
    raise BadRequest(text, param=name)


_FORMAT = Kind(_read_format, {"anyOf": [{"enum": ["", "json"]}, {"type": "object"}]})
_EFFORT = one_of("low", "medium", "high", "max")


def _read_think(name: str, value: Any) -> JsonObject:
    """Variables of a template."""
    if isinstance(value, bool):
        return dict.fromkeys(_THINKING_KWARGS, value)
    effort = _EFFORT.read(name, value)
    return {**dict.fromkeys(_THINKING_KWARGS, True), "reasoning_effort": effort}


_THINK = Kind(_read_think, {"anyOf": [BOOLEAN.schema, _EFFORT.schema]})


_MODEL = Field("model", STRING, "One of /api/tags, with or without :latest.", required=True)
_KEEP_ALIVE = Field("keep_alive", ANYTHING, "A shard keeps its model: accepted without effect.")
_SHARED_FIELDS = (
    Field("stream", BOOLEAN, "Answer with lines as tokens come; default true."),
    Field("format", _FORMAT, "json, or the JSON schema of the answer."),
    Field("options", Kind(_read_options, body_schema(OPTIONS)), "How to sample, and how much."),
    Field("think", _THINK, "Whether to reason, or how much effort to make."),
    Field("logprobs", BOOLEAN, "Show the log-probability of each token."),
    Field("top_logprobs", integer(0, _MAX_TOP_LOGPROBS), "And of so many of the likeliest."),
    _KEEP_ALIVE,
    TIMEOUT,
)
CHAT_FIELDS = table(
    [
        _MODEL,
        Field("messages", TURNS, "The chat so far; none: only have the model loaded."),
        Field("tools", TOOLS, "Functions that the answer may call."),
        *_SHARED_FIELDS,
    ]
)
GENERATE_FIELDS = table(
    [
        _MODEL,
        Field("prompt", STRING, "What to answer; none: only have the model loaded."),
        Field("system", STRING, "What comes before the prompt."),
        Field("raw", BOOLEAN, "Complete the prompt as it is, without the model's template."),
        Field("images", IMAGES, "Images before the prompt, each as base64."),
        not_served("suffix", STRING, ""),
        not_served("template", STRING, ""),
        not_served("context", ANYTHING, [], help="Not served: send the messages to /api/chat."),
        *_SHARED_FIELDS,
    ]
)


# ---- The bodies that generate ------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class OllamaChat(ChatRequest):
    """A chat, or nothing but a model that is to be there."""

    only_loads: bool = False
    unloads: bool = False


def parse_chat(body: JsonObject) -> OllamaChat:
    """A body of /api/chat."""
    values = read_fields(CHAT_FIELDS, body)
    return _chat(values, values.get("messages", []), "messages" in values)


def parse_generate(body: JsonObject) -> OllamaChat:
    """A body of /api/generate whose prompt goes into the model's template."""
    values = read_fields(GENERATE_FIELDS, body)
    system = [{"role": "system", "content": values["system"]}] if values.get("system") else []
    prompt = values.get("prompt", "")
    content = with_images(values.get("images", []), prompt)
    return _chat(values, [*system, {"role": "user", "content": content}], bool(prompt))


def parse_raw(body: JsonObject) -> CompletionRequest:
    """A body of /api/generate whose prompt is completed as it is."""
    values = read_fields(GENERATE_FIELDS, body)
    for name in ("system", "think", "images"):
        if values.get(name):
            raise BadRequest(f"{name}: not together with raw", param=name)
    return CompletionRequest(prompts=(values["prompt"],), **_options(values))


def _chat(values: JsonObject, messages: list[Any], has_prompt: bool) -> OllamaChat:
    # If the last message is the assistant's, the answer continues it.
    continues = bool(messages) and messages[-1]["role"] == "assistant"
    return OllamaChat(
        messages=messages,
        images=take_images(messages),
        only_loads=not (messages and has_prompt),
        unloads=values.get("keep_alive") in (0, "0", "0s", "0m"),
        add_special_tokens=False,
        add_generation_prompt=not continues,
        continue_final_message=continues,
        template_kwargs=values.get("think", {}),
        **tool_options(values),
        **_options(values),
    )


def _options(values: JsonObject) -> JsonObject:
    options = values.get("options", {})
    top_logprobs = values.get("top_logprobs", 0)
    return {
        "model": values["model"].removesuffix(LATEST),
        "stream": values.get("stream", True),
        "logprobs": top_logprobs if values.get("logprobs") else None,
        "max_tokens_field": "options.num_predict",
        "timeout_s": values.get("timeout"),
        **only_constraint({"format": values.get("format")}),
        **options,
        WARNINGS: (*values.get(WARNINGS, ()), *options.get(WARNINGS, ())),
    }


def _api(
    name: str, fields: Any, parse: Any, request_type: type[Any], shape: Any, answer: Any
) -> Api[Any]:
    return Api(
        name=name,
        request_type=request_type,
        fields=fields,
        parse=parse,
        make_shape=shape,
        name_answer=lambda request_id, named_by_client: request_id,
        errors=ERRORS,
        answer=answer,
        event=answer,
        framing=LINES,
    )


CHAT = _api("ollama_chat", CHAT_FIELDS, parse_chat, OllamaChat, ChatShape, OllamaChatAnswer)
TEMPLATED = _api(
    "ollama_generate",
    GENERATE_FIELDS,
    parse_generate,
    OllamaChat,
    GenerateShape,
    OllamaGenerateAnswer,
)
RAW = _api(
    "ollama_raw", GENERATE_FIELDS, parse_raw, CompletionRequest, GenerateShape, OllamaGenerateAnswer
)


def _choose(given: JsonObject) -> Api[Any]:
    return RAW if given.get("raw") is True and given.get("prompt") else TEMPLATED


GENERATE = SeveralKinds("ollama_generate_or_raw", _choose)


# ---- The bodies that embed ---------------------------------------------------------------------


def _read_inputs(name: str, value: Any) -> tuple[str, ...]:
    inputs: tuple[str, ...] = _TEXTS.read(name, [value] if isinstance(value, str) else value)
    return inputs


_TEXT = string(1)
_TEXTS = array_of(_TEXT, at_least=1, at_most=MAX_INPUTS, unit="texts")
_INPUTS = Kind(_read_inputs, {"anyOf": [_TEXT.schema, _TEXTS.schema]})
EMBED_FIELDS = table(
    [
        _MODEL,
        Field("input", _INPUTS, "A text, or several.", required=True),
        Field("truncate", BOOLEAN, "Cut what is longer than the context; default true."),
        Field("dimensions", POSITIVE, "Keep the first so many values; default: all."),
        Field("options", OBJECT, "Nothing is sampled here: accepted without effect."),
        _KEEP_ALIVE,
        TIMEOUT,
    ]
)
EMBEDDINGS_FIELDS = table(
    [
        _MODEL,
        Field("prompt", _TEXT, "A text.", required=True),
        *(EMBED_FIELDS[name] for name in ("options", "keep_alive", "timeout")),
    ]
)


def parse_embed(body: JsonObject) -> EmbedRequest:
    """A body of /api/embed."""
    values = read_fields(EMBED_FIELDS, body)
    return _embed(values, values["input"], cuts=values.get("truncate", True))


def parse_embeddings(body: JsonObject) -> EmbedRequest:
    """A body of /api/embeddings."""
    values = read_fields(EMBEDDINGS_FIELDS, body)
    return _embed(values, (values["prompt"],), cuts=True)


def _embed(values: JsonObject, inputs: tuple[str, ...], *, cuts: bool) -> EmbedRequest:
    return EmbedRequest(
        model=values["model"].removesuffix(LATEST),
        prompts=inputs,
        max_tokens=0,
        dimensions=values.get("dimensions"),
        truncate_prompt_tokens=-1 if cuts else None,
        truncation_side="right",
        timeout_s=values.get("timeout"),
        warnings=values.get(WARNINGS, ()),
    )


def _embedding(name: str, parse: Any) -> BodyKind:
    return BodyKind(
        name=name, request_type=EmbedRequest, parse=parse, work=embedding_prompts, errors=ERRORS
    )


EMBED = _embedding("ollama_embed", parse_embed)
EMBEDDINGS = _embedding("ollama_embeddings", parse_embeddings)
