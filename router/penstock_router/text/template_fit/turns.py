"""Whose turn it is: roles that a template lacks, and the order in which turns may follow."""

from __future__ import annotations

from collections.abc import Callable

from penstock_router.request import Message
from penstock_router.text.template_fit.contents import reasoning_of, with_more
from penstock_router.text.template_fit.traits import REASONING_NAMES, TemplateTraits

_INSTRUCTIONS = ("system", "developer")


# ---- Instructions ------------------------------------------------------------------------------


def name_developers(messages: list[Message], traits: TemplateTraits) -> list[Message]:
    """Make developers systems, but where the template has a place for them."""
    begin = _num_leading(messages)
    roles = [message["role"] for message in messages[:begin]]
    # Behind a developer the template looks for no system.
    in_order = roles == sorted(roles, reverse=True)
    places = {"kept": begin, "leading": begin, "first": 1}
    end = places.get(traits.developer, 0) if in_order else 0
    return [
        {**message, "role": "system"}
        if message["role"] == "developer"
        and (end <= at < begin or (at >= begin and traits.developer != "kept"))
        else message
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
    """Make the assistant's messages in a row one, up to the first with calls."""
    return _merged(messages, _are_one_answer)


def _are_one_answer(one: Message, next_: Message) -> bool:
    return one["role"] == next_["role"] == "assistant" and not one.get("tool_calls")


def join_users_to_results(messages: list[Message]) -> list[Message]:
    """Add to a result what the user says right after it."""
    return _merged(messages, lambda one, next_: one["role"] == "tool" and next_["role"] == "user")


def _merged(messages: list[Message], belongs: Callable[[Message, Message], bool]) -> list[Message]:
    merged = messages[:1]
    for message in messages[1:]:
        if belongs(merged[-1], message):
            merged[-1] = _one_of_two(merged[-1], message)
        else:
            merged.append(message)
    return merged


def _one_of_two(one: Message, next_: Message) -> Message:
    both = with_more(one, next_.get("content"))
    if next_.get("tool_calls"):
        both = {**both, "tool_calls": next_["tool_calls"]}
    if reasoning := reasoning_of(next_):
        before = reasoning_of(one)
        both = {key: value for key, value in both.items() if key not in REASONING_NAMES}
        both[REASONING_NAMES[0]] = f"{before}\n\n{reasoning}" if before else reasoning
    return both
