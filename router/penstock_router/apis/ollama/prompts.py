"""Makes prompts of Ollama's requests, shortened to the model's context as Ollama does.

The oldest messages are left out, but never a system message, and never a call without its results.
If the prompt is still too long, or is one text, its first tokens are cut off.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_left
from dataclasses import dataclass
from typing import Self

from penstock_router.errors import BadRequest, ContextExceeded
from penstock_router.request import ChatRequest, CompletionRequest, Message
from penstock_router.text.prompts import (
    PreparedPrompts,
    Prompt,
    TextModel,
    chat_prompt,
    prepare_prompts,
)
from penstock_router.text.tokenizer import prompt_too_long


@dataclass(frozen=True, slots=True, kw_only=True)
class OllamaChat(ChatRequest):
    """A chat, or a request only to load a model."""

    only_loads: bool = False
    unloads: bool = False
    # True if a long prompt is shortened, not refused.
    truncates: bool = True
    # True if the answer is to begin with thinking.
    thinks: bool = False
    # Token ids of an earlier prompt and its answer, put before the prompt.
    context: tuple[int, ...] = ()
    # The whole prompt, if it is one text. A model without a chat template completes it.
    text: str = ""

    def without_text(self) -> Self:
        return dataclasses.replace(ChatRequest.without_text(self), context=(), text="")


@dataclass(frozen=True, slots=True, kw_only=True)
class OllamaRaw(CompletionRequest):
    """A prompt that is completed as it is."""

    truncates: bool = True


OllamaRequest = OllamaChat | OllamaRaw


def prepare(request: OllamaRequest, model: TextModel) -> PreparedPrompts:
    """Make the prompt of a request, shortened if necessary and allowed."""
    if isinstance(request, OllamaChat):
        _check(request, model)
        if request.text and model.chat_template is None:
            return prepare(_raw(request), model)
        if request.context:
            return _after_context(request, model, prepare_prompts(request, model))
    made = _fitting(request, model)
    if made is not None:
        return made
    request, warning = _shortened(request, model)
    made = prepare_prompts(request, model)
    return dataclasses.replace(made, warnings=(*made.warnings, warning))


def _raw(request: OllamaChat) -> OllamaRaw:
    names = {each.name for each in dataclasses.fields(OllamaRaw)} - {"add_special_tokens"}
    known = {each.name for each in dataclasses.fields(request)} & names
    return OllamaRaw(prompts=(request.text,), **{name: getattr(request, name) for name in known})


def _check(request: OllamaChat, model: TextModel) -> None:
    if request.thinks and model.conventions.reasoning is None:
        raise BadRequest(f'think: "{model.name}" does not support thinking', param="think")
    largest = max(request.context, default=0)
    if largest >= model.vocab_size:
        text = f"context: Token id {largest} is out of vocabulary"
        raise BadRequest(text, param="context")


def _fitting(request: OllamaRequest, model: TextModel) -> PreparedPrompts | None:
    """Make the prompt; None if it leaves no room for a token and must be shortened."""
    try:
        made = prepare_prompts(request, model)
    except ContextExceeded:
        if not request.truncates:
            raise
        return None
    [prompt] = made.prompts
    is_full = len(prompt.token_ids) >= model.max_model_len
    return None if is_full and request.truncates else made


def _after_context(request: OllamaChat, model: TextModel, made: PreparedPrompts) -> PreparedPrompts:
    """Put the ids of `request.context` before the prompt, and cut off the beginning of a result
    that is too long.
    """
    [prompt] = made.prompts
    if prompt.images:
        raise BadRequest("context: not together with images", param="context")
    own, template = list(prompt.token_ids), model.chat_template
    begin = "" if template is None else template.special_tokens.get("bos_token", "")
    if own and begin and own[0] == model.tokenizer.token_id(begin):
        # The context already begins with this token.
        del own[0]
    ids, warnings = [*request.context, *own], made.warnings
    if len(ids) >= model.max_model_len:
        if not request.truncates:
            raise prompt_too_long(len(ids), model.max_model_len)
        ids = ids[-_kept_tokens(request, model) :]
        warnings = (*warnings, "context: its first ids are left out, as the prompt was too long")
    return dataclasses.replace(made, prompts=(Prompt(ids),), warnings=warnings)


# ---- Shortening --------------------------------------------------------------------------------


def _shortened(request: OllamaRequest, model: TextModel) -> tuple[OllamaRequest, str]:
    """Shorten the request; return it, and a warning that says what is left out."""
    max_tokens = _kept_tokens(request, model)
    if isinstance(request, OllamaChat):
        request, fits = _without_oldest(request, model, max_tokens)
        if fits:
            return request, "messages: the oldest are left out, as the prompt was too long"
    cut = dataclasses.replace(request, truncate_prompt_tokens=max_tokens, truncation_side="left")
    return cut, "the beginning of the prompt is cut off, as it was too long"


def _without_oldest(chat: OllamaChat, model: TextModel, max_tokens: int) -> tuple[OllamaChat, bool]:
    """Leave out as few messages as possible. The second result is false if the chat still does not
    fit.
    """
    starts = _starts(chat.messages)

    def fits(start: int) -> bool:
        try:
            chat_prompt(_begun_at(chat, start), model, max_tokens)
        except ContextExceeded:
            return False
        return True

    place = bisect_left(starts, True, key=fits)
    return _begun_at(chat, starts[min(place, len(starts) - 1)]), place < len(starts)


def _kept_tokens(request: OllamaRequest, model: TextModel) -> int:
    """Return the length to which a long prompt is cut. It leaves room for the answer, at most half
    the context.
    """
    limit, wanted = model.max_model_len, request.max_tokens
    room = limit // 4 if wanted is None else min(wanted, limit // 2)
    return limit - max(1, room)


def _starts(messages: list[Message]) -> list[int]:
    """Return where a shortened chat may begin after the system messages: not at a tool result, nor
    after an image, because the request has the pixels of all images.
    """
    starts = []
    for index, message in enumerate(messages):
        if index == 0 or message["role"] != "tool":
            starts.append(index)
        content = message.get("content")
        if isinstance(content, list) and any(part["type"] == "image" for part in content):
            break
    return starts


def _begun_at(request: OllamaChat, start: int) -> OllamaChat:
    systems = [message for message in request.messages[:start] if message["role"] == "system"]
    return dataclasses.replace(request, messages=[*systems, *request.messages[start:]])
