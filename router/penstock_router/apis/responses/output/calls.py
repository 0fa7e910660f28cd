"""Builds calls in a response in progress: of functions, tools that take text, and client tools."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import msgspec

from penstock_router.apis.responses.items.types import (
    AnyCallItem,
    CallItem,
    CustomCallItem,
    Item,
    ItemStatus,
)
from penstock_router.apis.responses.output.encoded_text import EncodedText
from penstock_router.apis.responses.output.items import Event, ItemBuilder
from penstock_router.apis.responses.tools.functions import (
    APPLY_PATCH,
    CUSTOM,
    FUNCTION,
    LOCAL_SHELL,
    SHELL,
    TOOL_SEARCH,
    ServedTool,
)
from penstock_router.json_fields import JsonObject, object_in
from penstock_router.text.answer_pieces import PieceKind


class _CallOf(ItemBuilder):
    grows_by = PieceKind.ARGUMENTS

    def __init__(self, stem: str, index: int, call_id: str, tool: ServedTool) -> None:
        super().__init__(stem, index)
        self._call_id = call_id
        self._tool = tool

    def _place(self) -> dict[str, Any]:
        return {"output_index": self._index, "item_id": self.id}

    def opening(self) -> list[Event]:
        return [self._added()]

    def _in_namespace(self) -> dict[str, str]:
        return {"namespace": self._tool.namespace} if self._tool.namespace else {}


class _FunctionCall(_CallOf):
    _prefix = "fc"
    _delta_type = "response.function_call_arguments.delta"

    def as_item(self, status: ItemStatus) -> CallItem:
        return {
            "type": "function_call",
            "id": self.id,
            "call_id": self._call_id,
            "name": self._tool.name,
            **self._in_namespace(),  # type: ignore[typeddict-item]
            "arguments": "".join(self._texts),
            "status": status,
        }

    def closing(self, shown: Item) -> list[Event]:
        assert shown["type"] == "function_call"
        done = {**self._place(), "name": self._tool.name, "arguments": shown["arguments"]}
        return [("response.function_call_arguments.done", done), self._done(shown)]


class _CustomCall(_CallOf):
    """A call of a tool that takes text, which is read from the arguments."""

    _prefix = "ctc"
    _delta_type = "response.custom_tool_call_input.delta"

    def __init__(self, stem: str, index: int, call_id: str, tool: ServedTool) -> None:
        super().__init__(stem, index, call_id, tool)
        self._input = EncodedText()
        # Text known only at the end, which no event has shown yet.
        self._late = ""

    def grow(self, text: str, logprobs: Sequence[msgspec.Raw]) -> str:
        return self._input.feed(text)

    def as_item(self, status: ItemStatus) -> CustomCallItem:
        if status != "in_progress":
            self._late += self._input.end(was_cut=status == "incomplete")
        return {
            "type": "custom_tool_call",
            "id": self.id,
            "call_id": self._call_id,
            "name": self._tool.name,
            **self._in_namespace(),  # type: ignore[typeddict-item]
            "input": self._input.text,
            "status": status,
        }

    def closing(self, shown: Item) -> list[Event]:
        assert shown["type"] == "custom_tool_call"
        late: list[Event] = []
        if self._late:
            late.append((self._delta_type, {**self._place(), "delta": self._late}))
        done = {**self._place(), "input": shown["input"]}
        return [*late, ("response.custom_tool_call_input.done", done), self._done(shown)]


class _ClientsCall(_CallOf):
    """A client tool's call, shown whole at its end."""

    _delta_type = ""

    def __init__(self, stem: str, index: int, call_id: str, tool: ServedTool) -> None:
        self._prefix, self._shown = _CLIENTS[tool.type]  # type: ignore[misc]
        super().__init__(stem, index, call_id, tool)

    def grow(self, text: str, logprobs: Sequence[msgspec.Raw]) -> str:
        self._texts.append(text)
        return ""

    def as_item(self, status: ItemStatus) -> AnyCallItem:
        shown = {"type": f"{self._tool.type}_call", "id": self.id, "call_id": self._call_id}
        # Arguments that were cut off are not an object.
        fields = self._shown(object_in("".join(self._texts)) or {})
        if self._tool.type == APPLY_PATCH and status == "incomplete":
            # The published type of this item has no status "incomplete".
            status = "completed"
        return cast(AnyCallItem, {**shown, **fields, "status": status})

    def closing(self, shown: Item) -> list[Event]:
        return [self._done(shown)]


def _local_shell(given: JsonObject) -> JsonObject:
    action: JsonObject = {"type": "exec", "command": _texts(given.get("command"), ("bash", "-lc"))}
    env = given.get("env")
    action["env"] = {
        name: value
        for name, value in (env.items() if isinstance(env, dict) else ())
        if isinstance(value, str)
    }
    texts = {key: given.get(key) for key in ("working_directory", "user")}
    action |= {key: text for key, text in texts.items() if isinstance(text, str)}
    return {"action": action | _whole(given, "timeout_ms")}


def _shell(given: JsonObject) -> JsonObject:
    action: JsonObject = {"commands": _texts(given.get("commands"), ())}
    return {"action": action | _whole(given, "timeout_ms", "max_output_length")}


def _texts(value: Any, shell: Sequence[str]) -> list[str]:
    """Return a command's words; `shell` runs a command that is one string."""
    if isinstance(value, str):
        return [*shell, value]
    return [each for each in value if isinstance(each, str)] if isinstance(value, list) else []


def _whole(given: JsonObject, *keys: str) -> JsonObject:
    values = {key: given.get(key) for key in keys}
    return {key: value for key, value in values.items() if type(value) is int}


def _apply_patch(given: JsonObject) -> JsonObject:
    kind = given.get("type")
    operation = {"type": kind if kind in ("create_file", "delete_file") else "update_file"}
    for key in ("path",) if kind == "delete_file" else ("path", "diff"):
        text = given.get(key)
        operation[key] = text if isinstance(text, str) else ""
    return {"operation": operation}


def _tool_search(given: JsonObject) -> JsonObject:
    return {"execution": "client", "arguments": given}


# The prefix of a call's id, and the function that makes its fields.
_CLIENTS: Mapping[str, tuple[str, Callable[[JsonObject], JsonObject]]] = {
    LOCAL_SHELL: ("lsh", _local_shell),
    SHELL: ("sh", _shell),
    APPLY_PATCH: ("apc", _apply_patch),
    TOOL_SEARCH: ("tsc", _tool_search),
}


def call_builder(
    stem: str, index: int, call_id: str, function: str, served: Mapping[str, ServedTool]
) -> ItemBuilder:
    """Return the builder for a call of `function`, in the form of the tool that it stands for."""
    tool = served.get(function) or ServedTool(FUNCTION, function)
    if tool.type == FUNCTION:
        return _FunctionCall(stem, index, call_id, tool)
    if tool.type == CUSTOM:
        return _CustomCall(stem, index, call_id, tool)
    return _ClientsCall(stem, index, call_id, tool)
