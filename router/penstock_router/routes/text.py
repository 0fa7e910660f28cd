"""Tokens of texts and texts of tokens, without a shard: /tokenize, /detokenize and their like."""

from __future__ import annotations

import asyncio
import functools
from typing import Any, TypedDict

from aiohttp import web

from penstock_router.apis.chat_messages import MESSAGES
from penstock_router.apis.messages import TokenCount, parse_count
from penstock_router.apis.openai import template_kwargs
from penstock_router.apis.tgi import INPUTS
from penstock_router.apis.tgi_answers import ERRORS as TGI_ERRORS
from penstock_router.errors import BadRequest
from penstock_router.fields import (
    BOOLEAN,
    INT32_MAX,
    OBJECT,
    STRING,
    Field,
    JsonObject,
    read_fields,
    string,
    table,
    token_ids,
)
from penstock_router.job import chat_prompt
from penstock_router.models import ServedModel
from penstock_router.request import ChatRequest
from penstock_router.routes.base import (
    ERROR_FORM,
    ROUTER,
    json_response,
    read_object,
    using_model,
)

# More ids than any context has, and as many as a thread decodes in a second or so.
_MAX_IDS = 4_000_000

_MODEL = Field("model", STRING, "One of /v1/models; the served one where there is only one.")
_MESSAGES_HELP = "A chat, rendered by the model's template first."
_CHAT = (
    Field("add_special_tokens", BOOLEAN, "Default true, for messages false."),
    Field("add_generation_prompt", BOOLEAN, "Of messages; default true."),
    Field("continue_final_message", BOOLEAN, "Of messages."),
    Field("chat_template", STRING, "Only where the operator trusts those of requests."),
    Field("chat_template_kwargs", OBJECT, "More variables of the template."),
)

TOKENIZE_FIELDS = table(
    [
        _MODEL,
        Field("prompt", string(1), "A text: this, messages or inputs."),
        Field("inputs", INPUTS, "A text, as text-generation-inference has it."),
        Field("parameters", OBJECT, "Accepted beside inputs, and nothing comes of it."),
        Field("return_token_strs", BOOLEAN, "Show each token's text too."),
        *_CHAT,
        Field("messages", MESSAGES, _MESSAGES_HELP),
    ]
)
CHAT_TO_TOKENIZE_FIELDS = table(
    [_MODEL, Field("messages", MESSAGES, _MESSAGES_HELP, required=True), *_CHAT]
)
DETOKENIZE_FIELDS = table(
    [
        _MODEL,
        Field("tokens", token_ids(at_most=_MAX_IDS), "Ids.", required=True),
    ]
)
TOKENIZER_INFO_QUERY = table([_MODEL])


class PromptTokens(TypedDict):
    """The ids of a prompt, and how many fit."""

    tokens: list[int]
    count: int
    max_model_len: int
    token_strs: list[str] | None


class TextToken(TypedDict):
    """A token and where it stands, in bytes of the text."""

    id: int
    text: str
    start: int
    stop: int


# Which, depends on whether `inputs` was given.
TokenizeAnswer = PromptTokens | list[TextToken]


class DetokenizeAnswer(TypedDict):
    """The text."""

    prompt: str


async def tokenize(request: web.Request) -> web.Response:
    """POST /tokenize"""
    given = await read_object(request)
    if given.get("inputs") is not None:
        request[ERROR_FORM] = TGI_ERRORS
    values = read_fields(TOKENIZE_FIELDS, given)
    async with using_model(request, values.get("model", "")) as model:
        if "inputs" in values:
            add_special_tokens = values.get("add_special_tokens", True)
            tokens = await text_tokens(model, values["inputs"], add_special_tokens)
            return json_response(tokens)
        answer = await _prompt_tokens(request, model, values)
        return json_response(answer)


async def _prompt_tokens(
    request: web.Request, model: ServedModel, values: JsonObject
) -> PromptTokens:
    if "messages" in values:
        chat = chat_to_tokenize(values)
        tokens = (await chat_prompt(chat, model, request.app[ROUTER].models)).token_ids
    elif "prompt" in values:
        [tokens] = await model.tokenizer.encode(
            [values["prompt"]],
            add_special_tokens=values.get("add_special_tokens", True),
            max_tokens=INT32_MAX,
        )
    else:
        raise BadRequest("prompt: needed, or messages or inputs", param="prompt")
    texts = None
    if values.get("return_token_strs"):
        texts = [model.tokenizer.token_text(token_id) for token_id in tokens]
    return {
        "tokens": tokens,
        "count": len(tokens),
        "max_model_len": model.info.max_model_len,
        "token_strs": texts,
    }


def chat_to_tokenize(values: JsonObject) -> ChatRequest:
    """A chat that nothing is to be generated for."""
    continues = values.get("continue_final_message", False)
    return ChatRequest(
        messages=values["messages"],
        add_special_tokens=values.get("add_special_tokens", False),
        add_generation_prompt=values.get("add_generation_prompt", not continues),
        continue_final_message=continues,
        chat_template=values.get("chat_template"),
        template_kwargs=template_kwargs(values),
    )


async def text_tokens(model: ServedModel, text: str, add_special_tokens: bool) -> list[TextToken]:
    """The tokens of a text, and where each stands in it."""
    places = await model.tokenizer.places(text, add_special_tokens=add_special_tokens)
    # Where each character begins, in bytes.
    begins = [0]
    for character in text:
        begins.append(begins[-1] + len(character.encode("utf-8", "surrogatepass")))
    return [
        {"id": token_id, "text": text[start:stop], "start": begins[start], "stop": begins[stop]}
        for token_id, start, stop in places
    ]


async def detokenize(request: web.Request) -> web.Response:
    """POST /detokenize"""
    values = read_fields(DETOKENIZE_FIELDS, await read_object(request))
    async with using_model(request, values.get("model", "")) as model:
        tokens = list(values["tokens"])
        largest = max(tokens, default=0)
        if largest >= model.info.vocab_size:
            raise BadRequest(f"Token id {largest} is out of vocabulary", param="tokens")
        decode = functools.partial(model.tokenizer.decode, tokens, skip_special_tokens=False)
        executor = request.app[ROUTER].models.executor
        text = await asyncio.get_running_loop().run_in_executor(executor, decode)
        answer: DetokenizeAnswer = {"prompt": text}
        return json_response(answer)


async def count_message_tokens(request: web.Request) -> web.Response:
    """POST /v1/messages/count_tokens"""
    chat = parse_count(await read_object(request))
    async with using_model(request, chat.model) as model:
        prompt = await chat_prompt(chat, model, request.app[ROUTER].models)
        answer: TokenCount = {"input_tokens": len(prompt.token_ids)}
        return json_response(answer)


async def tokenizer_info(request: web.Request) -> web.Response:
    """GET /tokenizer_info"""
    router = request.app[ROUTER]
    model = await router.models.get(request.query.get("model", ""))
    template = model.chat_template
    answer: dict[str, Any] = {**model.tokenizer.config}
    answer["chat_template"] = None if template is None else template.source
    answer.setdefault("tokenizer_class", "PreTrainedTokenizerFast")
    answer["vocab_size"] = model.info.vocab_size
    answer["model_max_length"] = model.info.max_model_len
    return json_response(answer)
