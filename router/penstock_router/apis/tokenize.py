"""/tokenize, /detokenize and their like: bodies -> what is asked, and the JSON of the answers.

/tokenize takes two forms, vLLM's and text-generation-inference's, told apart by their fields.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Self, TypedDict

from penstock_router.apis.chat_messages import MESSAGES
from penstock_router.apis.openai.requests import CHAT_FIELDS, template_options
from penstock_router.apis.tgi.requests import INPUTS
from penstock_router.apis.tools import tool_options
from penstock_router.json_fields import (
    BOOLEAN,
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
from penstock_router.request import ChatRequest

# More ids than any context has, and as many as a thread decodes in a second or so.
_MAX_IDS = 4_000_000
# Tokenizing a text takes a hundred times its length in memory.
MAX_CHARS = 4_000_000

_MODEL = Field("model", STRING, "One of /v1/models; may be left out if there is only one.")
_MESSAGES_HELP = "A chat, rendered by the model's template first."
# Fields that a chat's prompt depends on, with the same meaning and the same refusals as in chats.
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
    """A body of one of these routes."""

    model: str
    values: JsonObject

    @property
    def brings_template(self) -> bool:
        """Whether it brings its own chat template, which is a program."""
        return "chat_template" in self.values

    def without_text(self) -> Self:
        """A copy without the fields that may be long; that it brings a template is still known."""
        values = {"chat_template": ""} if self.brings_template else {}
        return dataclasses.replace(self, values=values)


def parse_with(fields: Table) -> Callable[[JsonObject], TokensRequest]:
    """Reads bodies with these fields; raises `BadRequest`."""

    def parse(body: JsonObject) -> TokensRequest:
        values = read_fields(fields, body)
        return TokensRequest(model=values.get("model", ""), values=values)

    return parse


class PromptTokens(TypedDict):
    """The token ids of a prompt; `max_model_len` is how many fit."""

    tokens: list[int]
    count: int
    max_model_len: int
    token_strs: list[str] | None


class TextToken(TypedDict):
    """A token and its position, in bytes of the text."""

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


def chat_to_tokenize(values: JsonObject) -> ChatRequest:
    """A chat that is tokenized without generating."""
    return ChatRequest(
        messages=values["messages"],
        add_special_tokens=values.get("add_special_tokens", False),
        **template_options(values),
        **tool_options(values),
    )


def text_tokens(text: str, places: Iterable[tuple[int, int, int]]) -> list[TextToken]:
    """Tokens of a text; `places` has (id, first character, character after the last) of each."""
    # The byte at which each character begins.
    begins = [0]
    for character in text:
        begins.append(begins[-1] + len(character.encode("utf-8", "surrogatepass")))
    return [
        {"id": token_id, "text": text[start:stop], "start": begins[start], "stop": begins[stop]}
        for token_id, start, stop in places
    ]
