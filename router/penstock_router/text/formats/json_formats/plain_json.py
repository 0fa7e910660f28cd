"""Models whose template has no tools: a system message asks for an answer that is JSON.

An object or a list of them, in a code fence or not. JSON later in the text is not a call.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from penstock_router.json_fields import JsonObject
from penstock_router.request import Message, Tool
from penstock_router.text.contents import join_contents
from penstock_router.text.formats.base import FREE_WRITING, CallFormat, ToolParser, Writing
from penstock_router.text.formats.reading.json_calls import BareJsonParser, call_tag, calls_or_text
from penstock_router.text.formats.reading.reader import Misfit, Reading
from penstock_router.text.marks import NO_MARKS, Marks
from penstock_router.text.structural_tag_builder import literal, one_or_more, sequence

_FENCE = "```"


@dataclass(frozen=True)
class PlainJsonFormat(CallFormat):
    """The answer is JSON."""

    name: str = "plain_json"
    marks: tuple[str, ...] = ()

    def is_of(self, template: str) -> bool:
        """The template does not use tools."""
        return "tools" not in template

    def parser(self, tools: Sequence[Tool], marks: Marks = NO_MARKS) -> ToolParser:
        """A parser for one answer."""
        return _CallParser(tools, marks)

    def calls(
        self,
        tools: Sequence[Tool],
        *,
        required: bool,
        parallel: bool,
        writing: Writing = FREE_WRITING,
    ) -> JsonObject:
        """One object; a list of them where there may be several."""
        tags = [
            call_tag(tool, '{"name": ', ', "arguments": ', "}", required=required, writing=writing)
            for tool in tools
        ]
        calls = one_or_more(tags, ", ", parallel=parallel)
        if parallel:
            calls = sequence(literal("["), calls, literal("]"))
        return calls if required else calls_or_text(calls, "[{`")


def instructions(tools: Iterable[Tool]) -> str:
    """A system message that describes the tools to a model whose template cannot."""
    described = "\n".join([json.dumps(_described(tool), ensure_ascii=False) for tool in tools])
    return (
        "You can call these functions. Each line describes one, with a JSON schema of its "
        f"arguments:\n\n{described}\n\n"
        'To call one, answer with {"name": its name, "arguments": an object with its arguments} '
        "and nothing else. To call several, answer with a JSON list of such objects. "
        "Where no call helps, answer in plain words."
    )


def in_words(messages: Sequence[Message]) -> list[Message]:
    """The messages, with calls in the form that `instructions` ask for, and results as the user's.

    Results in a row, and a user's message right after them, become one message: many templates
    require the user and the assistant to alternate.
    """
    told: list[Message] = []
    names: dict[object, str] = {}
    follows_result = False
    for message in messages:
        is_result = message["role"] == "tool"
        if is_result:
            message = _result_in_words(message, names)
        elif message.get("tool_calls"):
            message = _calls_in_words(message, names)
        if follows_result and message["role"] == "user":
            content = join_contents(told[-1]["content"], message.get("content", ""), "\n\n")
            told[-1] = {**told[-1], "content": content}
        else:
            told.append(message)
        follows_result = is_result
    return told


def _calls_in_words(message: Message, names: dict[object, str]) -> Message:
    functions = []
    for call in message["tool_calls"]:
        function = call.get("function", {})
        names[call.get("id")] = function.get("name", "")
        functions.append(function)
    said = functions[0] if len(functions) == 1 else functions
    texts = [message.get("content"), json.dumps(said, ensure_ascii=False)]
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**rest, "content": "\n\n".join([text for text in texts if text])}


def _result_in_words(message: Message, names: dict[object, str]) -> Message:
    name = message.get("name") or names.get(message.get("tool_call_id"))
    said = f"Result of {name}:" if name else "Result:"
    return {"role": "user", "content": join_contents(said, message.get("content", ""), "\n")}


def _described(tool: Tool) -> JsonObject:
    function = tool.shown.get("function", {})
    described = {"name": tool.name}
    if function.get("description"):
        described["description"] = function["description"]
    return described | {"parameters": tool.parameters or {"type": "object"}}


class _CallParser(BareJsonParser):
    def _read(self) -> Reading[None]:
        if not self._at_beginning:
            yield from self._rest()
        self._at_beginning = self._is_marked = False
        yield from self._space()
        fenced = (yield from self._any_of(_FENCE)) is not None
        if fenced:
            yield from self._name()
        if (yield from self._space()) not in "{[":
            raise Misfit
        if (yield from self._several()) and fenced:
            yield from self._any_of(_FENCE)
            yield from self._after_call()

    def _rest(self) -> Reading[None]:
        """All of the remaining text is content."""
        self._fits = False
        while True:
            self._take(len(self._text))
            self._give_back()
            yield from self._more()
