"""/tokenize, /detokenize and similar routes: parses bodies, and renders answers.

/tokenize accepts vLLM's form and text-generation-inference's. Their fields distinguish them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Self, TypedDict

from penstock_router.apis.base import ERRORS, BodyKind, SeveralKinds
from penstock_router.apis.chat_messages import MESSAGES
from penstock_router.apis.images import split_markdown, take_images
from penstock_router.apis.openai.fields import CHAT_FIELDS
from penstock_router.apis.openai.requests import template_options
from penstock_router.apis.tgi.answers import ERRORS as TGI_ERRORS
from penstock_router.apis.tgi.requests import INPUTS
from penstock_router.apis.tools import tool_options
from penstock_router.errors import BadRequest
from penstock_router.json_fields import (
    BOOLEAN,
    INT32_MAX,
    OBJECT,
    STRING,
    Field,
    JsonObject,
    Table,
    read_fields,
    string,
    table,
    token_ids,
)
from penstock_router.request import (
    ChatRequest,
    CompletionRequest,
    ImageSizes,
    ImageSource,
    TextWithImages,
)
from penstock_router.text.prompts import TextModel, chat_prompt, completion_prompts
from penstock_router.text.token_places import Bounds, chat_places, completion_places
from penstock_router.text.tokenizer import TokenPlace

# More ids than any context has. A thread decodes them in about a second.
_MAX_IDS = 4_000_000
# Tokenizing a text takes about 100 bytes of memory per character.
MAX_CHARS = 4_000_000
# Tokens shown with their places in a text take about 500 bytes of memory each.
MAX_PLACES = 1_000_000

_MODEL = Field("model", STRING, "One of /v1/models; may be left out if there is only one.")
_MESSAGES_HELP = "A chat, rendered by the model's template first."
# Fields that a chat's prompt depends on, with the same meaning and refusals as in chats.
_CHAT = (
    Field("add_special_tokens", BOOLEAN, "The tokenizer's own; default true, for messages false."),
    *(
        CHAT_FIELDS[name]
        for name in (
            *("add_generation_prompt", "continue_final_message", "chat_template"),
            *("chat_template_kwargs", "documents", "reasoning_effort", "tools"),
            "tool_choice",
        )
    ),
)

TOKENIZE_FIELDS = table(
    [
        _MODEL,
        Field("prompt", string(1, MAX_CHARS), "A text: this, messages or inputs."),
        Field("inputs", INPUTS, "A text, as text-generation-inference has it."),
        Field("parameters", OBJECT, "Accepted beside inputs, without effect."),
        Field("return_token_strs", BOOLEAN, "Show each token's text too."),
        *_CHAT,
        Field("messages", MESSAGES, _MESSAGES_HELP),
    ]
)
CHAT_TOKENIZE_FIELDS = table(
    [_MODEL, Field("messages", MESSAGES, _MESSAGES_HELP, required=True), *_CHAT]
)
DETOKENIZE_FIELDS = table(
    [
        _MODEL,
        Field("tokens", token_ids(at_most=_MAX_IDS), "Ids.", required=True),
    ]
)
TOKENIZER_INFO_QUERY = table([_MODEL])


@dataclass(frozen=True, slots=True, kw_only=True)
class TokensRequest:
    model: str
    values: JsonObject
    # The same fields as in requests that generate.
    images: tuple[ImageSource, ...] = ()
    image_sizes: ImageSizes = ()

    @property
    def brings_template(self) -> bool:
        """True if the body brings a chat template, which is a program."""
        return "chat_template" in self.values

    def without_text(self) -> Self:
        values = {"chat_template": ""} if self.brings_template else {}
        return dataclasses.replace(self, values=values)


def parse_with(fields: Table) -> Callable[[JsonObject], TokensRequest]:
    """Make a parser of bodies with these fields, which raises `BadRequest`."""

    def parse(body: JsonObject) -> TokensRequest:
        values = read_fields(fields, body)
        images = take_images(values.get("messages", ()))
        if "inputs" in values:
            texts, images = split_markdown("inputs", values["inputs"])
            values["inputs"] = TextWithImages(tuple(texts)) if images else values["inputs"]
        return TokensRequest(model=values.get("model", ""), values=values, images=images)

    return parse


class PromptTokens(TypedDict):
    """The token ids of a prompt; `max_model_len` is the context's length in tokens."""

    tokens: list[int]
    count: int
    max_model_len: int
    token_strs: list[str] | None


class TextToken(TypedDict):
    """A token and its position, in bytes of the text. An image's tokens all have the position of
    its text.
    """

    id: int
    text: str
    start: int
    stop: int


# The second form if `inputs` was given.
TokenizeAnswer = PromptTokens | list[TextToken]


class ChatTokens(TypedDict):
    """A chat as the model's template renders it, and its tokens."""

    tokenize_response: list[TextToken]
    templated_text: str


class DetokenizeAnswer(TypedDict):
    """The text of the tokens."""

    prompt: str


def chat_to_tokenize(asked: TokensRequest) -> ChatRequest:
    values = asked.values
    return ChatRequest(
        messages=values["messages"],
        image_sizes=asked.image_sizes,
        add_special_tokens=values.get("add_special_tokens", False),
        **template_options(values),
        **tool_options(values),
    )


def text_tokens(text: str, places: Iterable[TokenPlace]) -> list[TextToken]:
    """Describe a text's tokens; `places` has each one's range of characters."""
    # The byte at which each character begins.
    begins = [0]
    for character in text:
        begins.append(begins[-1] + len(character.encode("utf-8", "surrogatepass")))
    return [
        {"id": token_id, "text": text[start:stop], "start": begins[start], "stop": begins[stop]}
        for token_id, start, stop in places
    ]


# ---- Text work ---------------------------------------------------------------------------------


def _tokenize_prompt(asked: TokensRequest, model: TextModel) -> PromptTokens:
    values = asked.values
    if "messages" in values:
        prompt = chat_prompt(chat_to_tokenize(asked), model, INT32_MAX)
        token_ids = list(prompt.token_ids)
    elif "prompt" in values:
        text = CompletionRequest(
            prompts=(values["prompt"],),
            add_special_tokens=values.get("add_special_tokens", True),
        )
        unbounded = dataclasses.replace(model, max_model_len=INT32_MAX)
        [prompt] = completion_prompts(text, unbounded)
        token_ids = list(prompt.token_ids)
    else:
        raise BadRequest("prompt: needed, or messages or inputs", param="prompt")
    texts = None
    if values.get("return_token_strs"):
        texts = [model.tokenizer.token_text(token_id) for token_id in token_ids]
    return {
        "tokens": token_ids,
        "count": len(token_ids),
        "max_model_len": model.max_model_len,
        "token_strs": texts,
    }


def _tokenize_inputs(asked: TokensRequest, model: TextModel) -> list[TextToken]:
    values = asked.values
    text = CompletionRequest(
        prompts=(values["inputs"],),
        image_sizes=asked.image_sizes,
        add_special_tokens=values.get("add_special_tokens", True),
    )
    return text_tokens(*completion_places(text, model, Bounds(MAX_CHARS, MAX_PLACES)))


def _chat_tokenize(asked: TokensRequest, model: TextModel) -> ChatTokens:
    bounds = Bounds(MAX_CHARS, MAX_PLACES)
    text, places = chat_places(chat_to_tokenize(asked), model, bounds)
    return {"tokenize_response": text_tokens(text, places), "templated_text": text}


def _detokenize(asked: TokensRequest, model: TextModel) -> DetokenizeAnswer:
    token_ids = asked.values["tokens"]
    largest = max(token_ids, default=0)
    if largest >= model.vocab_size:
        raise BadRequest(f"Token id {largest} is out of vocabulary", param="tokens")
    return {"prompt": model.tokenizer.decode(token_ids, skip_special_tokens=False)}


TOKENIZE_PROMPT = BodyKind(
    name="tokenize_prompt",
    request_type=TokensRequest,
    parse=parse_with(TOKENIZE_FIELDS),
    work=_tokenize_prompt,
    errors=ERRORS,
)
TOKENIZE_INPUTS = dataclasses.replace(
    TOKENIZE_PROMPT, name="tokenize_inputs", work=_tokenize_inputs, errors=TGI_ERRORS
)
TOKENIZE = SeveralKinds(
    "tokenize",
    lambda given: TOKENIZE_PROMPT if given.get("inputs") is None else TOKENIZE_INPUTS,
)
CHAT_TOKENIZE = BodyKind(
    name="chat_tokenize",
    request_type=TokensRequest,
    parse=parse_with(CHAT_TOKENIZE_FIELDS),
    work=_chat_tokenize,
    errors=TGI_ERRORS,
)
DETOKENIZE = BodyKind(
    name="detokenize",
    request_type=TokensRequest,
    parse=parse_with(DETOKENIZE_FIELDS),
    work=_detokenize,
    errors=ERRORS,
)
