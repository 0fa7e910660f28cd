"""Turns items into messages for a chat template.

A run of the assistant's text, reasoning and calls is one message; each tool output is a separate
message. Calls of all kinds become calls of the functions that stand for the tools.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from penstock_router.apis.chat_messages import FunctionCall, assistant_message, tool_message
from penstock_router.apis.responses.items.parts import content_of, text_of
from penstock_router.apis.responses.items.types import AnyCallItem, AnyOutputItem, Item
from penstock_router.apis.responses.tools.functions import (
    APPLY_PATCH,
    CUSTOM,
    FUNCTION,
    INPUT,
    LOCAL_SHELL,
    SHELL,
    TOOL_SEARCH,
    ParsedTools,
    ServedTool,
    ToolKey,
    flat_name,
)
from penstock_router.request import Message
from penstock_router.text.contents import Content

CALLS = (
    *("function_call", "custom_tool_call", "local_shell_call", "shell_call", "apply_patch_call"),
    "tool_search_call",
)
OUTPUTS = (
    *("function_call_output", "custom_tool_call_output", "local_shell_call_output"),
    *("shell_call_output", "apply_patch_call_output", "tool_search_output"),
)


_FOUND = "Found, and can be called now:"


def messages_of(
    instructions: str | None,
    items: Sequence[Item],
    served: Mapping[str, ServedTool],
    places: Sequence[int] = (),
) -> list[Message]:
    """Make the messages for the chat template. `served` has tools by function name. `places` has
    each item's index in the request, if the items are from the request.
    """
    messages: list[Message] = []
    if instructions is not None:
        messages.append({"role": "system", "content": instructions})
    names = {tool.key: name for name, tool in served.items()}
    called: dict[str, str] = {}
    said = _AssistantTurn()
    for index, item in enumerate(items):
        if item["type"] == "item_reference":
            continue
        if _is_given(item):
            messages += said.message()
            said = _AssistantTurn()
            place = places[index] if places else index
            messages.append(_read_given(f"input[{place}]", item, called, names))
            continue
        if not said.takes(item):
            messages += said.message()
            said = _AssistantTurn()
        call = _call_of(item, names)
        if call is not None:
            called[call.call_id] = call.name
        said.add(item, call)
    return messages + said.message()


@dataclass(slots=True)
class _AssistantTurn:
    """An assistant message, collected from items."""

    reasoning: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    calls: list[FunctionCall] = field(default_factory=list)

    def takes(self, item: Item) -> bool:
        """True if the item belongs to this message, not to another. Outputs must follow the message
        with their calls, so a message with calls takes all items before the outputs.
        """
        return item["type"] in CALLS or bool(self.calls) or not self.texts

    def add(self, item: Item, call: FunctionCall | None) -> None:
        if call is not None:
            self.calls.append(call)
        elif item["type"] == "reasoning":
            if item["content"]:
                self.reasoning.append(text_of(item["content"]))
        elif item["type"] == "message":
            self.texts.append(text_of(item["content"]))

    def message(self) -> list[Message]:
        """Return the message; none if there was only unreadable reasoning."""
        if not (self.reasoning or self.texts or self.calls):
            return []
        text = "\n".join(self.texts) if self.texts else None
        return [assistant_message(text, "\n".join(self.reasoning), self.calls)]


def _call_of(item: Item, names: Mapping[ToolKey, str]) -> FunctionCall | None:
    if item["type"] not in CALLS:
        return None
    called: AnyCallItem = item  # type: ignore[assignment]
    key = _key_of(called)
    name = names.get(key) or flat_name(key)
    return FunctionCall(called["call_id"], name, _arguments_of(called))


def _key_of(item: AnyCallItem) -> ToolKey:
    match item["type"]:
        case "function_call":
            return FUNCTION, item.get("namespace", ""), item["name"]
        case "custom_tool_call":
            return CUSTOM, item.get("namespace", ""), item["name"]
        case "local_shell_call":
            return LOCAL_SHELL, "", LOCAL_SHELL
        case "shell_call":
            return SHELL, "", SHELL
        case "apply_patch_call":
            return APPLY_PATCH, "", APPLY_PATCH
        case "tool_search_call":
            return TOOL_SEARCH, "", TOOL_SEARCH


def _arguments_of(item: AnyCallItem) -> str | dict[str, object]:
    match item["type"]:
        case "function_call":
            return item["arguments"]
        case "custom_tool_call":
            return {INPUT: item["input"]}
        case "local_shell_call" | "shell_call":
            return {
                key: value
                for key, value in item["action"].items()
                if key != "type" and value is not None and value != {}
            }
        case "apply_patch_call":
            return {key: value for key, value in item["operation"].items() if value is not None}
        case "tool_search_call":
            arguments = item["arguments"]
            return arguments if isinstance(arguments, str | dict) else {}


def _is_given(item: Item) -> bool:
    if item["type"] == "message":
        return item["role"] != "assistant"
    return item["type"] in OUTPUTS


def _read_given(
    name: str, item: Item, called: Mapping[str, str], names: Mapping[ToolKey, str]
) -> Message:
    if item["type"] == "message":
        return {"role": item["role"], "content": content_of(f"{name}.content", item["content"])}
    output: AnyOutputItem = item  # type: ignore[assignment]
    call_id = output["call_id"]
    return tool_message(call_id, _content_of(name, output, names), called.get(call_id, ""))


def _content_of(name: str, item: AnyOutputItem, names: Mapping[ToolKey, str]) -> Content:
    match item["type"]:
        case "function_call_output" | "custom_tool_call_output":
            output = item["output"]
            return output if isinstance(output, str) else content_of(f"{name}.output", output)
        case "shell_call_output":
            return msgspec.json.encode(item["output"]).decode()
        case "tool_search_output":
            found = ParsedTools()
            found.add("tools", item["tools"])
            lines = found.definitions(names)
            return "\n".join([_FOUND, *lines]) if lines else "Found nothing."
        case "local_shell_call_output" | "apply_patch_call_output":
            return item["output"]
