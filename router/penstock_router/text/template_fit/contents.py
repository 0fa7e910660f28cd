"""Puts contents and reasoning of messages into the form and place that a template reads."""

from __future__ import annotations

from penstock_router.request import Message
from penstock_router.text.contents import Content, as_parts
from penstock_router.text.template_fit.traits import LINE, REASONING_NAMES, TemplateTraits

_BEGIN, _END = "<think>", "</think>"


def join_texts(messages: list[Message], traits: TemplateTraits) -> list[Message]:
    """Join a content's texts with the template's own joint."""
    return [
        {**message, "content": joined(message["content"], traits.joints.get(message["role"], LINE))}
        if isinstance(message.get("content"), list)
        else message
        for message in messages
    ]


def joined(content: Content, joint: str) -> Content:
    """Join the content to one text, unless it has images."""
    if isinstance(content, str) or any("text" not in part for part in content):
        return content
    return joint.join([str(part["text"]) for part in content])


def fill_silence(messages: list[Message]) -> list[Message]:
    """Give messages with neither content nor tool calls an empty text."""
    return [
        {**message, "content": ""}
        if message.get("content") is None and "tool_calls" not in message
        else message
        for message in messages
    ]


def fill_answers(messages: list[Message], *, keep_last: bool) -> list[Message]:
    end = len(messages) - keep_last
    return [
        {**message, "content": " "}
        if at < end and message["role"] == "assistant" and _is_empty(message)
        else message
        for at, message in enumerate(messages)
    ]


def _is_empty(message: Message) -> bool:
    return not message.get("content") and not message.get("tool_calls")


def in_parts(messages: list[Message], traits: TemplateTraits) -> list[Message]:
    """Turn texts into lists of one part, for roles that accept only lists."""
    return [
        {**message, "content": as_parts(message["content"])}
        if message["role"] in traits.parts_only and isinstance(message.get("content"), str)
        else message
        for message in messages
    ]


# ---- Reasoning ---------------------------------------------------------------------------------


def split_reasoning(messages: list[Message], *, keep_last: bool) -> list[Message]:
    """Move marked reasoning at the beginning of an assistant's text to a field of its own."""
    end = len(messages) - keep_last
    return [
        _split(message)
        if message["role"] == "assistant" and at < end and reasoning_of(message) is None
        else message
        for at, message in enumerate(messages)
    ]


def _split(message: Message) -> Message:
    content = message.get("content")
    if not isinstance(content, str) or not (text := content.lstrip()).startswith(_BEGIN):
        return message
    reasoning, end, rest = text.removeprefix(_BEGIN).partition(_END)
    if not end:
        return message
    split = {**message, "content": rest.lstrip()}
    return {**split, "reasoning_content": reasoning.strip()} if reasoning.strip() else split


def has_reasoning(message: Message) -> bool:
    """Tell whether the message has reasoning, in a field or between marks."""
    content = message.get("content")
    if isinstance(content, str) and content.lstrip().startswith(_BEGIN):
        return True
    return len(message) > 2 and reasoning_of(message) is not None


def reasoning_of(message: Message) -> str | None:
    values = (message[name] for name in REASONING_NAMES if message.get(name) is not None)
    return next(values, None)


def place_reasoning(messages: list[Message], traits: TemplateTraits) -> list[Message]:
    """Put reasoning only where the template reads it."""
    return [
        message
        if message["role"] != "assistant" or (reasoning := reasoning_of(message)) is None
        else _placed(message, reasoning, traits)
        for message in messages
    ]


def _placed(message: Message, reasoning: str, traits: TemplateTraits) -> Message:
    rest = {key: value for key, value in message.items() if key not in REASONING_NAMES}
    if traits.text_into_reasoning and rest.get("tool_calls") and rest.get("content"):
        reasoning = f"{reasoning}\n\n{rest.pop('content')}"
    if traits.reasoning_as_part:
        return {**rest, "content": _with_thinking(reasoning, rest.get("content"))}
    return rest | dict.fromkeys(traits.reasoning_names, reasoning)


def _with_thinking(reasoning: str, content: Content | None) -> Content:
    thinking = {"type": "thinking", "thinking": reasoning}
    return [thinking, *(as_parts(content) if content else ())]
