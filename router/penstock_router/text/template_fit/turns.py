"""Whose turn it is: roles that a template lacks, and the order in which turns may follow."""

from __future__ import annotations

from collections.abc import Callable

from penstock_router.request import Message
from penstock_router.text.template_fit.contents import reasoning_of, with_more
from penstock_router.text.template_fit.traits import TemplateTraits

_INSTRUCTIONS = ("system", "developer")


# ---- Instructions ------------------------------------------------------------------------------


def name_developers(messages: list[Message], traits: TemplateTraits) -> list[Message]:
    """Make developers systems, but where the template has a place for them."""
    end = {"leading": _num_leading(messages), "first": 1}.get(traits.developer, 0)
    return [
        {**message, "role": "system"} if message["role"] == "developer" and at >= end else message
        for at, message in enumerate(messages)
    ]


def _num_leading(messages: list[Message]) -> int:
    """How many instructions come before all else."""
    others = (at for at, each in enumerate(messages) if each["role"] not in _INSTRUCTIONS)
    return next(others, len(messages))


def place_systems(messages: list[Message], traits: TemplateTraits) -> list[Message]:
    """Give systems places in which the template shows them.

    A later one stays in its place, as the user's: moved to the front it would change how every
    turn after it begins.
    """
    begin = _num_leading(messages)
    first, rest = messages[:begin], messages[begin:]
    if traits.later_system_as_user:
        rest = [_as_user(each) if each["role"] == "system" else each for each in rest]
    if traits.one_first_system or traits.refuses_system:
        first = _merged(first, lambda one, next_: next_["role"] in ("system", one["role"]))
    if traits.refuses_system:
        first = [_as_user(each) if each["role"] == "system" else each for each in first]
        rest = rest or [{"role": "user", "content": ""}]
        if first and rest[0]["role"] == "user":
            return [*first[:-1], {**rest[0], **with_more(first[-1], rest[0].get("content"))},
                    *rest[1:]]  # fmt: skip
    return first + rest


def _as_user(message: Message) -> Message:
    return {"role": "user", "content": message.get("content", "")}


# ---- Neighbours --------------------------------------------------------------------------------


def merge_users(messages: list[Message]) -> list[Message]:
    """Make the user's messages in a row one."""
    return _merged(messages, lambda one, next_: one["role"] == next_["role"] == "user")


def merge_assistants(messages: list[Message]) -> list[Message]:
    """Make the assistant's messages in a row one, but for those with calls."""
    return _merged(messages, _are_answers)


def _are_answers(one: Message, next_: Message) -> bool:
    return all(
        each["role"] == "assistant" and not each.get("tool_calls") and reasoning_of(each) is None
        for each in (one, next_)
    )


def join_users_to_results(messages: list[Message]) -> list[Message]:
    """Add to a result what the user says right after it."""
    return _merged(messages, lambda one, next_: one["role"] == "tool" and next_["role"] == "user")


def _merged(messages: list[Message], belongs: Callable[[Message, Message], bool]) -> list[Message]:
    merged = messages[:1]
    for message in messages[1:]:
        if belongs(merged[-1], message):
            merged[-1] = with_more(merged[-1], message.get("content"))
        else:
            merged.append(message)
    return merged
