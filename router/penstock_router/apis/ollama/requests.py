"""Ollama's API: parses bodies to requests. Turns and answers have their own modules."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec

from penstock_proto.limits import SAMPLING_RANGES
from penstock_router.apis.base import LINES, TIMEOUT, Api, BodyKind, SeveralKinds
from penstock_router.apis.embeddings import MAX_INPUTS, NORMALIZE, EmbedRequest
from penstock_router.apis.images import take_images
from penstock_router.apis.ollama.answers import (
    ERRORS,
    ChatShape,
    GenerateShape,
    OllamaChatAnswer,
    OllamaGenerateAnswer,
)
from penstock_router.apis.ollama.chat_turns import IMAGES, TURNS, with_images
from penstock_router.apis.ollama.prompts import OllamaChat, OllamaRaw, prepare
from penstock_router.apis.openai.fields import COMPLETION_FIELDS
from penstock_router.apis.structured_output import (
    ANY_OBJECT,
    OfSchema,
    constraint_options,
    wish_of_schema,
)
from penstock_router.apis.tools import TOOLS, tool_options
from penstock_router.errors import BadRequest
from penstock_router.json_fields import (
    ANY_NUMBER,
    ANYTHING,
    BOOLEAN,
    INT32_MAX,
    OBJECT,
    STRING,
    WARNINGS,
    Field,
    JsonObject,
    Kind,
    another_name,
    array_of,
    body_schema,
    decode_json,
    integer,
    json_type,
    not_served,
    number,
    one_of,
    read_array,
    read_fields,
    read_object,
    renamed,
    string,
    table,
    taken,
    token_ids,
    within,
)
from penstock_router.text.prompts import embedding_prompts

_MAX_TOP_LOGPROBS = 20
# No context has more tokens.
_MAX_CONTEXT_IDS = 10_000_000
# With this `top_p`, only the likeliest token is kept.
_LEAST_SHARE = 1e-9


# ---- Options -----------------------------------------------------------------------------------


def _of_loading(name: str) -> Field:
    return taken(name, help="Decided when a shard starts: taken without effect.")


def _read_share(name: str, value: Any) -> float:
    share: float = _SHARE.read(name, value)
    return max(_LEAST_SHARE, share)


_SHARE = number(0, 1)
OPTIONS = table(
    [
        Field("temperature", within(SAMPLING_RANGES["temperature"]), "Randomness; 0: none."),
        Field("top_p", Kind(_read_share, _SHARE.schema), "The likeliest up to this sum."),
        Field("typical_p", Kind(_read_share, _SHARE.schema), "The most typical up to this sum."),
        *(COMPLETION_FIELDS[name] for name in ("seed", "top_k", "min_p", "stop")),
        renamed("repeat_penalty", COMPLETION_FIELDS["repetition_penalty"]),
        *(COMPLETION_FIELDS[name] for name in ("presence_penalty", "frequency_penalty")),
        COMPLETION_FIELDS["repeat_last_n"],
        Field(
            "num_predict",
            integer(-2, INT32_MAX),
            "At most so many tokens; default, 0, -1 and -2: up to the end of the context.",
        ),
        not_served("mirostat", integer(0, 2), 0),
        not_served("tfs_z", ANY_NUMBER, 1.0),
        not_served("penalize_newline", BOOLEAN, True),
        taken("mirostat_tau", help="Of mirostat."),
        taken("mirostat_eta", help="Of mirostat."),
        *map(_of_loading, ("num_ctx", "num_batch", "num_gpu", "main_gpu", "num_thread")),
        *map(_of_loading, ("num_keep", "use_mmap", "use_mlock", "numa", "low_vram", "f16_kv")),
        *map(_of_loading, ("vocab_only", "logits_all", "embedding_only", "draft_num_predict")),
    ]
)


def _read_options(name: str, value: Any) -> JsonObject:
    values = read_fields(OPTIONS, read_object(name, value))
    length = values.get("num_predict", -1)
    return {
        **{key: values[key] for key in values if key in {*_SAMPLING, WARNINGS}},
        "max_tokens": length if length > 0 else None,
        "penalty_window_tokens": values.get("repeat_last_n"),
    }


_SAMPLING = {
    *("seed", "temperature", "top_k", "top_p", "min_p", "typical_p", "stop"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
}


# ---- Other fields ------------------------------------------------------------------------------


def _read_format(name: str, value: Any) -> OfSchema | None:
    if value == "":
        return None
    if value == "json":
        return ANY_OBJECT
    if isinstance(value, str) and value.lstrip().startswith("{"):
        value = _schema_in(name, value)
    if isinstance(value, dict):
        return wish_of_schema(name, value)
    text = f'{name}: must be "json" or a JSON schema, not {json_type(value)}'
    raise BadRequest(text, param=name)


def _schema_in(name: str, text: str) -> Any:
    try:
        return decode_json(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        raise BadRequest(f"{name}: the text is no JSON", param=name) from None


_TEXT_FORMAT: JsonObject = {"type": "string", "pattern": r"^(json$|\s*\{|$)"}
_FORMAT = Kind(_read_format, {"anyOf": [_TEXT_FORMAT, {"type": "object"}]})
_EFFORT = one_of("none", "minimal", "low", "medium", "high", "xhigh", "max")


def _read_think(name: str, value: Any) -> JsonObject:
    if isinstance(value, bool):
        return {"enable_thinking": value}
    effort = _EFFORT.read(name, value)
    if effort == "none":
        return {"enable_thinking": False}
    return {"enable_thinking": True, "reasoning_effort": effort}


_THINK = Kind(_read_think, {"anyOf": [BOOLEAN.schema, _EFFORT.schema]})


def _read_tools(name: str, value: Any) -> Any:
    """Read the tools; like Ollama, accept tools without a type."""
    given = [
        {**tool, "type": "function"} if isinstance(tool, dict) and not tool.get("type") else tool
        for tool in read_array(name, value)
    ]
    return TOOLS.read(name, given)


_TOOLS = Kind(_read_tools, TOOLS.schema)
_MODEL = Field("model", string(1), "One of /api/tags, with or without :latest.", required=True)
# Either field names the model.
NAMES = (_MODEL, dataclasses.replace(another_name("name", of=_MODEL), required=False))
_KEEP_ALIVE = Field("keep_alive", ANYTHING, "A shard keeps its model: accepted without effect.")
_CONTEXT = token_ids(at_most=_MAX_CONTEXT_IDS)
_SHARED_FIELDS = (
    Field("stream", BOOLEAN, "Answer with lines as tokens come; default true."),
    Field("format", _FORMAT, "json, or the JSON schema of the answer."),
    Field("options", Kind(_read_options, body_schema(OPTIONS)), "How to sample, and how much."),
    Field("think", _THINK, "Whether to reason, or how much effort to make."),
    Field("logprobs", BOOLEAN, "Show the log-probability of each token."),
    Field("top_logprobs", integer(0, _MAX_TOP_LOGPROBS), "And of so many of the likeliest."),
    Field("truncate", BOOLEAN, "Make a prompt fit the context; default true. false: refuse it."),
    taken("shift", False, help="An answer ends with the context, as with false."),
    _KEEP_ALIVE,
    TIMEOUT,
)
CHAT_FIELDS = table(
    [
        *NAMES,
        Field("messages", TURNS, "The chat so far; none: only have the model loaded."),
        Field("tools", _TOOLS, "Functions that the answer may call."),
        *_SHARED_FIELDS,
    ]
)
GENERATE_FIELDS = table(
    [
        *NAMES,
        Field("prompt", STRING, "What to answer; none: only have the model loaded."),
        Field("system", STRING, "What comes before the prompt."),
        Field("raw", BOOLEAN, "Complete the prompt as it is, without the model's template."),
        Field("images", IMAGES, "Images before the prompt, each as base64."),
        not_served("suffix", STRING, ""),
        not_served("template", STRING, ""),
        Field("context", _CONTEXT, "What an answer before gave as its context: comes first."),
        *_SHARED_FIELDS,
    ]
)


# ---- The bodies that generate ------------------------------------------------------------------


def parse_chat(body: JsonObject) -> OllamaChat:
    values = read_fields(CHAT_FIELDS, body)
    return _chat(values, values.get("messages", []), "messages" in values)


def parse_generate(body: JsonObject) -> OllamaChat:
    """Parse a body of /api/generate whose prompt goes into the model's template."""
    values = read_fields(GENERATE_FIELDS, body)
    system = [{"role": "system", "content": values["system"]}] if values.get("system") else []
    prompt = values.get("prompt", "")
    content = with_images(values.get("images", []), prompt)
    asked = _chat(values, [*system, {"role": "user", "content": content}], bool(prompt))
    is_text = content == prompt and not (system or asked.context)
    return dataclasses.replace(asked, text=prompt) if is_text else asked


def parse_raw(body: JsonObject) -> OllamaRaw:
    """Parse a body of /api/generate whose prompt is completed as it is."""
    values = read_fields(GENERATE_FIELDS, body)
    for name in ("system", "images", "context"):
        if values.get(name):
            raise BadRequest(f"{name}: not together with raw", param=name)
    if _thinks(values):
        raise BadRequest("think: not together with raw", param="think")
    return OllamaRaw(prompts=(values["prompt"],), **_options(values))


def _chat(values: JsonObject, messages: list[Any], has_prompt: bool) -> OllamaChat:
    # If the last message is the assistant's, the answer continues it.
    continues = bool(messages) and messages[-1]["role"] == "assistant"
    return OllamaChat(
        messages=messages,
        images=take_images(messages),
        only_loads=not (messages and has_prompt),
        unloads=values.get("keep_alive") in (0, "0", "0s", "0m"),
        context=values.get("context", ()),
        thinks=_thinks(values),
        add_special_tokens=False,
        add_generation_prompt=not continues,
        continue_final_message=continues,
        template_kwargs=values.get("think", {}),
        **tool_options(values),
        **_options(values),
    )


def _thinks(values: JsonObject) -> bool:
    return bool(values.get("think", {}).get("enable_thinking"))


def _options(values: JsonObject) -> JsonObject:
    options = values.get("options", {})
    top_logprobs = values.get("top_logprobs", 0)
    constraint = constraint_options(values)
    return {
        "model": values["model"],
        "stream": values.get("stream", True),
        "truncates": values.get("truncate", True),
        "bounds_max_tokens": True,
        "logprobs": top_logprobs if values.get("logprobs") else None,
        "max_tokens_field": "options.num_predict",
        "timeout_s": values.get("timeout"),
        **constraint,
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
        work=prepare,
        make_shape=shape,
        name_answer=lambda request_id, named_by_client: request_id,
        errors=ERRORS,
        answer=answer,
        event=answer,
        framing=LINES,
        any_type=True,
        # The last event's `context` covers the whole answer.
        repeats_answer=shape is GenerateShape,
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
RAW = _api("ollama_raw", GENERATE_FIELDS, parse_raw, OllamaRaw, GenerateShape, OllamaGenerateAnswer)


def _choose(given: JsonObject) -> Api[Any]:
    return RAW if given.get("raw") is True and given.get("prompt") else TEMPLATED


GENERATE = SeveralKinds("ollama_generate_or_raw", _choose, any_type=True)


# ---- The bodies that embed ---------------------------------------------------------------------


def _read_inputs(name: str, value: Any) -> tuple[str, ...]:
    """Read the texts; an empty string asks for no vectors."""
    inputs: tuple[str, ...] = _TEXTS.read(name, [value] if isinstance(value, str) else value)
    return () if value == "" else inputs


_TEXTS = array_of(STRING, at_most=MAX_INPUTS, unit="texts")
_INPUTS = Kind(_read_inputs, {"anyOf": [STRING.schema, _TEXTS.schema]})
EMBED_FIELDS = table(
    [
        *NAMES,
        Field("input", _INPUTS, "A text, or several; none: only have the model loaded."),
        Field("truncate", BOOLEAN, "Cut what is longer than the context; default true."),
        Field("dimensions", integer(0, INT32_MAX), "Keep the first so many values; 0: all."),
        NORMALIZE,
        Field("options", OBJECT, "Nothing is sampled here: accepted without effect."),
        _KEEP_ALIVE,
        TIMEOUT,
    ]
)
EMBEDDINGS_FIELDS = table(
    [
        *NAMES,
        Field("prompt", STRING, "A text; none: only have the model loaded."),
        Field("normalize", BOOLEAN, "Scale the vector to length 1; default: as the model has it."),
        *(EMBED_FIELDS[name] for name in ("options", "keep_alive", "timeout")),
    ]
)


def parse_embed(body: JsonObject) -> EmbedRequest:
    values: JsonObject = {"normalize": True} | read_fields(EMBED_FIELDS, body)
    return _embed(values, values.get("input", ()), cuts=values.get("truncate", True))


def parse_embeddings(body: JsonObject) -> EmbedRequest:
    values = read_fields(EMBEDDINGS_FIELDS, body)
    prompt = values.get("prompt")
    return _embed(values, (prompt,) if prompt else (), cuts=True)


def _embed(values: JsonObject, inputs: tuple[str, ...], *, cuts: bool) -> EmbedRequest:
    return EmbedRequest(
        model=values["model"],
        prompts=inputs,
        max_tokens=0,
        dimensions=values.get("dimensions") or None,
        normalize=values.get("normalize"),
        truncate_prompt_tokens=-1 if cuts else None,
        truncation_side="right",
        timeout_s=values.get("timeout"),
        warnings=values.get(WARNINGS, ()),
    )


def _embedding(name: str, parse: Any) -> BodyKind:
    return BodyKind(
        name=name,
        request_type=EmbedRequest,
        parse=parse,
        work=embedding_prompts,
        errors=ERRORS,
        any_type=True,
    )


EMBED = _embedding("ollama_embed", parse_embed)
EMBEDDINGS = _embedding("ollama_embeddings", parse_embeddings)
