"""Fits the turns of a chat: replaces roles that a template lacks, and orders turns."""

from __future__ import annotations

from collections.abc import Callable

from penstock_router.request import Message
from penstock_router.text.contents import join_all
from penstock_router.text.template_fit.contents import reasoning_of
from penstock_router.text.template_fit.traits import BLANK_LINE, REASONING_NAMES, TemplateTraits

_INSTRUCTIONS = ("system", "developer")


# ---- Instructions ------------------------------------------------------------------------------


def name_developers(messages: list[Message], traits: TemplateTraits) -> list[Message]:
    """Turn developer messages into system messages, except where the template takes developer
    messages.
    """
    begin = _num_leading(messages)
    roles = [message["role"] for message in messages[:begin]]
    # After a developer message the template does not look for a system message.
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
    others = (at for at, each in enumerate(messages) if each["role"] not in _INSTRUCTIONS)
    return next(others, len(messages))


def place_systems(messages: list[Message], traits: TemplateTraits) -> list[Message]:
    """Move system messages to places where the template shows them.

    A later system message stays in place, as a user message: at the front it would change the
    beginning of all later prompts.
    """
    begin = _num_leading(messages)
    first, rest = messages[:begin], messages[begin:]
    if traits.later_system_as_user:
        rest = [_as_user(each) if each["role"] == "system" else each for each in rest]
    if traits.one_first_system or traits.first_system != "kept":
        first = _merged(first, lambda group, next_: next_["role"] in ("system", group[0]["role"]))
    if traits.first_system == "kept" or not first:
        return first + rest
    at = _last_turn(rest, traits) if traits.first_system == "in_last_turn" else 0
    told = [_as_user(each) if each["role"] == "system" else each for each in first]
    return [*rest[:at], *_merged(told + rest[at : at + 1], _are_of_user), *rest[at + 1 :]]


def _last_turn(messages: list[Message], traits: TemplateTraits) -> int:
    """Find the beginning of the user's last turn, which may be several messages."""
    apart = {"user": traits.merges_users, "tool": traits.joins_user_to_result}
    begins = [
        at
        for at, message in enumerate(messages)
        if message["role"] == "user" and not (at and apart.get(messages[at - 1]["role"]))
    ]
    return begins[-1] if begins else 0


def _as_user(message: Message) -> Message:
    return {"role": "user", "content": message.get("content", "")}


def let_user_speak(messages: list[Message], traits: TemplateTraits) -> list[Message]:
    """Insert an empty user message if the template requires one."""
    begin = _num_leading(messages)
    roles = [message["role"] for message in messages[begin:]]
    spoken = "user" in (roles[:1] if traits.user_speaks == "first" else roles)
    silent = {"role": "user", "content": ""}
    return messages if spoken else [*messages[:begin], silent, *messages[begin:]]


# ---- Neighbours --------------------------------------------------------------------------------

# (messages that become one, next message) -> true if the next message joins them.
_Belongs = Callable[[list[Message], Message], bool]


def merge_users(messages: list[Message]) -> list[Message]:
    return _merged(messages, _are_of_user)


def merge_assistants(messages: list[Message]) -> list[Message]:
    """Merge consecutive assistant messages, up to the first with tool calls."""
    return _merged(messages, _are_one_answer)


def join_users_to_results(messages: list[Message]) -> list[Message]:
    """Merge a user message into a result directly before it."""
    return _merged(messages, _follow_result)


def _are_of_user(group: list[Message], next_: Message) -> bool:
    return _roles(group, next_) == ("user", "user")


def _are_one_answer(group: list[Message], next_: Message) -> bool:
    has_calls = bool(group[-1].get("tool_calls"))
    return _roles(group, next_) == ("assistant", "assistant") and not has_calls


def _follow_result(group: list[Message], next_: Message) -> bool:
    return _roles(group, next_) == ("tool", "user")


def _roles(group: list[Message], next_: Message) -> tuple[str, str]:
    return group[0]["role"], next_["role"]


def _merged(messages: list[Message], belongs: _Belongs) -> list[Message]:
    groups: list[list[Message]] = []
    for message in messages:
        if groups and belongs(groups[-1], message):
            groups[-1].append(message)
        else:
            groups.append([message])
    return [_as_one(group) if len(group) > 1 else group[0] for group in groups]


def _as_one(group: list[Message]) -> Message:
    contents = [content for each in group if (content := each.get("content"))]
    one = {**group[0], "content": join_all(contents, BLANK_LINE)}
    if calls := group[-1].get("tool_calls"):
        one["tool_calls"] = calls
    reasons = [str(reason) for each in group if (reason := reasoning_of(each))]
    if reasons:
        one = {key: value for key, value in one.items() if key not in REASONING_NAMES}
        one[REASONING_NAMES[0]] = BLANK_LINE.join(reasons)
    return one
