"""Makes tool calls and their results fit a template, or turns them into text."""

from __future__ import annotations

import hashlib
import itertools
import json
import string
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from penstock_router.json_fields import JsonObject, object_in
from penstock_router.request import Message
from penstock_router.text.contents import Content, join_all, join_contents
from penstock_router.text.template_fit.traits import (
    BLANK_LINE,
    REASONING_NAMES,
    EmptyContent,
    TemplateTraits,
)

# (function, arguments as JSON) of each call -> the text with which the model makes the calls; None
# if the model has no form of its own.
CallsInWords = Callable[[Sequence[tuple[str, str]]], str | None]
# (function, number of the call in the conversation from 0) -> the model's own id for the call; None
# if it gives none.
NativeCallId = Callable[[str, int], str | None]

_CHARACTERS = string.ascii_letters + string.digits
_NINE = 9


def _with_calls(message: Message, change: Callable[[JsonObject], JsonObject]) -> Message:
    calls = message.get("tool_calls")
    if not calls:
        return message
    changed = [change(call) for call in calls]
    same = all(new is old for new, old in zip(changed, calls, strict=True))
    return message if same else {**message, "tool_calls": changed}


def _function(call: JsonObject) -> JsonObject:
    function: JsonObject = call.get("function") or {}
    return function


def _with_arguments(call: JsonObject, arguments: object) -> JsonObject:
    return {**call, "function": {**call["function"], "arguments": arguments}}


# ---- Arguments ---------------------------------------------------------------------------------


def read_arguments(messages: list[Message]) -> list[Message]:
    """Make all arguments objects; text that is not a JSON object becomes an empty object."""
    return [_with_calls(message, _read) for message in messages]


def _read(call: JsonObject) -> JsonObject:
    arguments = _function(call).get("arguments")
    if not isinstance(arguments, str):
        return call
    return _with_arguments(call, object_in(arguments) or {})


def arguments_as_text(messages: list[Message]) -> list[Message]:
    return [_with_calls(message, _written) for message in messages]


def _written(call: JsonObject) -> JsonObject:
    return _with_arguments(call, _json_of(call)) if call.get("function") else call


def _json_of(call: JsonObject) -> str:
    return json.dumps(_function(call).get("arguments") or {}, ensure_ascii=False)


# ---- Results -----------------------------------------------------------------------------------


def order_results(messages: list[Message]) -> list[Message]:
    """Put results directly after the message with their tool calls, in the calls' order."""
    if not any(message["role"] == "tool" for message in messages):
        return messages
    ordered: list[Message] = []
    run: list[Message] = []
    for message in messages:
        if message["role"] == "assistant":
            ordered += _ordered(run)
            run = []
        run.append(message)
    return ordered + _ordered(run)


def _ordered(run: list[Message]) -> list[Message]:
    """Order an assistant message and all messages up to the next one."""
    if not run or not (calls := run[0].get("tool_calls")):
        return run
    places = {call["id"]: place for place, call in enumerate(calls) if call.get("id")}
    results = [message for message in run[1:] if message["role"] == "tool"]
    others = [message for message in run[1:] if message["role"] != "tool"]
    known = [each for each in results if each.get("tool_call_id") in places]
    sorted_ = iter(sorted(known, key=lambda each: places[each["tool_call_id"]]))
    # A result that belongs to no call here keeps its place.
    results = [next(sorted_) if each.get("tool_call_id") in places else each for each in results]
    return [run[0], *results, *others]


def name_results(messages: list[Message]) -> list[Message]:
    names: dict[object, object] = {}
    # Functions' names of the latest calls without ids; results without ids take them in order.
    nameless: deque[object] = deque()
    named = []
    for message in messages:
        if calls := message.get("tool_calls"):
            names |= {call.get("id"): _function(call).get("name") for call in calls}
            nameless = deque(_function(call).get("name") for call in calls if not call.get("id"))
        if message["role"] == "tool":
            call_id = message.get("tool_call_id")
            name = names.get(call_id) if call_id else nameless.popleft() if nameless else None
            message = {"name": name, **message} if name else message
        named.append(message)
    return named


# ---- Ids ---------------------------------------------------------------------------------------


def fit_ids(
    messages: list[Message], traits: TemplateTraits, native: NativeCallId | None
) -> list[Message]:
    """Give tool calls ids that the template accepts, and their results the same ids."""
    ids = _Ids(traits, native)
    return [
        ids.of_result(message) if message["role"] == "tool" else ids.of_calls(message)
        for message in messages
    ]


class _Ids:
    """New ids for one conversation. An id depends only on earlier messages."""

    def __init__(self, traits: TemplateTraits, native: NativeCallId | None) -> None:
        self._nine = traits.call_ids == "nine"
        self._fills = traits.fills_ids
        self._native = native
        self._num_calls = 0
        # `_new` has new ids by old ids, `_nameless` the new ids of calls that had none and still
        # lack a result.
        self._new: dict[object, str] = {}
        self._nameless: deque[str] = deque()
        self._taken: set[str] = set()

    def of_calls(self, message: Message) -> Message:
        if message.get("tool_calls"):
            self._nameless = deque()
        return _with_calls(message, self._of_call)

    def _of_call(self, call: JsonObject) -> JsonObject:
        old = call.get("id")
        new = self._next(old, str(_function(call).get("name", "")))
        self._num_calls += 1
        if old:
            self._new[old] = new
        else:
            self._nameless.append(new)
        return call if new == (old or "") else {**call, "id": new}

    def _next(self, old: object, name: str) -> str:
        if self._native is not None and (own := self._native(name, self._num_calls)) is not None:
            return own
        if self._nine:
            return self._of_nine(str(old or f"call_{self._num_calls}"))
        return str(old) if old or not self._fills else f"call_{self._num_calls}"

    def of_result(self, message: Message) -> Message:
        old = message.get("tool_call_id")
        if not old:
            new = self._nameless.popleft() if self._nameless else self._of_stranger()
        elif old not in self._new and self._nine:
            new = self._of_nine(str(old))
        else:
            new = self._new.get(old, str(old))
        return message if new == (old or "") else {**message, "tool_call_id": new}

    def _of_stranger(self) -> str:
        """Return the id of a result that belongs to no call."""
        has_native = self._native is not None and self._native("", self._num_calls) is not None
        if has_native or not (self._nine or self._fills):
            return ""
        self._num_calls += 1
        return self._next("", "")

    def _of_nine(self, old: str) -> str:
        if old in self._new:
            return self._new[old]
        fits = len(old) == _NINE and old.isascii() and old.isalnum()
        likely = itertools.chain([old] if fits else [], _nines(old))
        new = next(each for each in likely if each not in self._taken)
        self._taken.add(new)
        self._new[old] = new
        return new


def _nines(text: str) -> Iterator[str]:
    """Yield ids of nine letters and digits, derived from a text."""
    for attempt in itertools.count():
        digest = hashlib.blake2b(f"{attempt}:{text}".encode("utf-8", "replace")).digest()
        yield "".join(_CHARACTERS[byte % len(_CHARACTERS)] for byte in digest[:_NINE])


# ---- Messages with calls -----------------------------------------------------------------------


def one_call_each(messages: list[Message]) -> list[Message]:
    """Put each tool call in its own message, followed by its result."""
    single: list[Message] = []
    results: list[Message] = []
    several: Message | None = None
    for message in messages:
        if several is not None and message["role"] == "tool":
            results.append(message)
            continue
        if several is not None:
            single += _pairs(several, results)
        several, results = None, []
        if len(message.get("tool_calls") or ()) > 1:
            several = message
        else:
            single.append(message)
    return single if several is None else [*single, *_pairs(several, results)]


def _pairs(message: Message, results: list[Message]) -> Iterator[Message]:
    """Yield each tool call in its own message, followed by its results; other results come last."""
    calls = message["tool_calls"]
    of_calls: dict[object, list[Message]] = {call["id"]: [] for call in calls if call.get("id")}
    nameless: deque[Message] = deque()
    others: list[Message] = []
    for result in results:
        call_id = result.get("tool_call_id")
        (of_calls.get(call_id, others) if call_id else nameless).append(result)
    alone = {"role": message["role"]}
    for number, call in enumerate(calls):
        yield {**(alone if number else message), "tool_calls": [call]}
        if call.get("id"):
            yield from of_calls.pop(call["id"], ())
        elif nameless:
            yield nameless.popleft()
    yield from others
    yield from nameless


def text_before_calls(messages: list[Message]) -> list[Message]:
    apart: list[Message] = []
    for message in messages:
        if message.get("tool_calls") and message.get("content"):
            apart.append({key: value for key, value in message.items() if key != "tool_calls"})
            dropped = ("content", *REASONING_NAMES)
            message = {key: value for key, value in message.items() if key not in dropped}
        apart.append(message)
    return apart


def empty_contents(messages: list[Message], form: EmptyContent) -> list[Message]:
    """Give messages that have tool calls but no text the empty content that the template
    accepts.
    """
    return [
        _emptied(message, form)
        if message.get("tool_calls") and not message.get("content")
        else message
        for message in messages
    ]


def _emptied(message: Message, form: EmptyContent) -> Message:
    if form == "absent":
        return {key: value for key, value in message.items() if key != "content"}
    return {**message, "content": "" if form == "empty" else None}


# ---- In words ----------------------------------------------------------------------------------


def calls_in_words(messages: list[Message], in_words: CallsInWords | None) -> list[Message]:
    return [
        _told(message, in_words) if message.get("tool_calls") else message for message in messages
    ]


def _told(message: Message, in_words: CallsInWords | None) -> Message:
    calls = [(str(_function(call).get("name", "")), _json_of(call)) for call in
             message["tool_calls"]]  # fmt: skip
    functions = [_function(call) for call in message["tool_calls"]]
    said: Any = functions[0] if len(functions) == 1 else functions
    text = (in_words and in_words(calls)) or json.dumps(said, ensure_ascii=False)
    content = message.get("content")
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**rest, "content": join_contents(content, text, BLANK_LINE) if content else text}


def results_in_words(messages: list[Message]) -> list[Message]:
    """Turn results into user messages.

    Consecutive results and the user's next message become one, because many templates require user
    and assistant to alternate.
    """
    told: list[Message] = []
    results: list[Content] = []
    for message in messages:
        if message["role"] == "tool":
            results.append(result_in_words(message))
            continue
        if results and message["role"] == "user":
            results.append(message.get("content", ""))
            message = {**message, "content": join_all(results, BLANK_LINE)}
        elif results:
            told.append(_of_user(results))
        results = []
        told.append(message)
    return [*told, _of_user(results)] if results else told


def _of_user(results: list[Content]) -> Message:
    return {"role": "user", "content": join_all(results, BLANK_LINE)}


def result_in_words(message: Message) -> Content:
    name = message.get("name")
    said = f"Result of {name}:" if name else "Result:"
    return join_contents(said, message.get("content", ""), "\n")
