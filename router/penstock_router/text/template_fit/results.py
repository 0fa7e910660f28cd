"""Fits results that do not follow their tool calls, and tool calls without results."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from penstock_router.request import Message
from penstock_router.text.template_fit.calls import result_in_words

_NO_RESULT = "(no result)"
# An assistant message and all messages up to the next; the first group begins without one.
_Group = list[Message]


def match_results(messages: list[Message]) -> list[Message]:
    """Put results after the messages with their tool calls. Results that name no call of the chat
    get the ids of calls that lack a result.
    """
    groups = _with_late_results([_without_empty_ids(message) for message in messages])
    return [message for group in groups for message in _matched(group)]


def orphans_in_words(messages: list[Message]) -> list[Message]:
    """Turn results that belong to no call into messages of the user."""
    return _in_groups(messages, _without_orphans)


def fill_results(messages: list[Message]) -> list[Message]:
    """Give a result to calls without results, if other messages follow them."""
    return _in_groups(messages, _filled)


def _in_groups(
    messages: list[Message], change: Callable[[_Group], Iterator[Message]]
) -> list[Message]:
    return [message for group in _groups(messages) for message in change(group)]


def _groups(messages: list[Message]) -> list[_Group]:
    groups: list[_Group] = [[]]
    for message in messages:
        if message["role"] == "assistant":
            groups.append([])
        groups[-1].append(message)
    return groups


def _calls(group: _Group) -> list[Any]:
    return (group[0].get("tool_calls") or []) if group else []


def _ids(group: _Group) -> list[object]:
    return [call["id"] for call in _calls(group) if call.get("id")]


# ---- The call that a result belongs to ----------------------------------------------------------


def _without_empty_ids(message: Message) -> Message:
    if message.get("tool_call_id") == "":
        return {key: value for key, value in message.items() if key != "tool_call_id"}
    calls = message.get("tool_calls") or ()
    if all(call.get("id") != "" for call in calls):
        return message
    named = [{key: each for key, each in call.items() if key != "id" or each} for call in calls]
    return {**message, "tool_calls": named}


def _with_late_results(messages: list[Message]) -> list[_Group]:
    """Group messages. A result that comes later joins its call's group, after the results already
    there.
    """
    # The group of each call that has no result yet, by the call's id.
    owners: dict[object, int] = {}
    groups: list[_Group] = []
    # The results that each group gets from later groups.
    late: list[_Group] = []
    for number, group in enumerate(_groups(messages)):
        groups.append([])
        late.append([])
        owners |= dict.fromkeys(_ids(group), number)
        for message in group:
            is_result = message["role"] == "tool"
            owner = owners.pop(message.get("tool_call_id"), number) if is_result else number
            (groups if owner == number else late)[owner].append(message)
    for group, results in zip(groups, late, strict=True):
        end = _end_of_results(group)
        group[end:end] = results
    return groups


def _end_of_results(group: _Group) -> int:
    others = (at for at, each in enumerate(group) if at and each["role"] != "tool")
    return next(others, len(group))


def _matched(group: _Group) -> Iterator[Message]:
    ids = _ids(group)
    known, answered = set(ids), {each.get("tool_call_id") for each in group}
    waiting = (call_id for call_id in ids if call_id not in answered)
    for message in group:
        if message["role"] == "tool" and message.get("tool_call_id") not in known:
            call_id = next(waiting, None)
            message = {**message, "tool_call_id": call_id} if call_id else message
        yield message


# ---- Results without calls, calls without results ----------------------------------------------


def _without_orphans(group: _Group) -> Iterator[Message]:
    ids, calls = _ids(group), _calls(group)
    known, nameless = set(ids), len(calls) - len(ids)
    for message in group:
        if message["role"] == "tool" and message.get("tool_call_id") not in known:
            nameless -= 1
            if nameless < 0:
                message = {"role": "user", "content": result_in_words(message)}
        yield message


def _filled(group: _Group) -> Iterator[Message]:
    answered = {each.get("tool_call_id") for each in group}
    end = _end_of_results(group)
    yield from group[:end]
    if end < len(group):
        for call_id in _ids(group):
            if call_id not in answered:
                yield {"role": "tool", "tool_call_id": call_id, "content": _NO_RESULT}
    yield from group[end:]
