"""The items of OpenAI's Responses API in stored conversations and in answers.

Each has an id and a type; text is in arrays of parts.
"""

from __future__ import annotations

from typing import Any, Literal, NotRequired, TypedDict

from penstock_router.json_fields import JsonObject

ItemStatus = Literal["completed", "incomplete", "in_progress"]


class Part(TypedDict):
    """A part of an item; its fields depend on its type."""

    type: Literal[
        "input_text", "input_image", "output_text", "refusal", "reasoning_text", "summary_text"
    ]
    text: NotRequired[str]
    image_url: NotRequired[str]
    refusal: NotRequired[str]
    annotations: NotRequired[list[Any]]
    logprobs: NotRequired[list[Any]]


class MessageItem(TypedDict):
    """A message of the input or of an answer."""

    type: Literal["message"]
    id: str
    role: str
    status: ItemStatus
    content: list[Part]


class ReasoningItem(TypedDict):
    """The model's reasoning before the next item."""

    type: Literal["reasoning"]
    id: str
    summary: list[Part]
    content: list[Part]
    # The same text, if the client asks for it: some clients keep no other form.
    encrypted_content: NotRequired[str]
    status: ItemStatus


class CallItem(TypedDict):
    """A call of a function."""

    type: Literal["function_call"]
    id: str
    call_id: str
    name: str
    namespace: NotRequired[str]
    # JSON; incomplete if the call was cut off.
    arguments: str
    status: ItemStatus


class CustomCallItem(TypedDict):
    """A call of a tool that takes text."""

    type: Literal["custom_tool_call"]
    id: str
    call_id: str
    name: str
    namespace: NotRequired[str]
    input: str
    status: ItemStatus


class LocalShellCallItem(TypedDict):
    """A command for the client to run."""

    type: Literal["local_shell_call"]
    id: str
    call_id: str
    action: JsonObject
    status: ItemStatus


class ShellCallItem(TypedDict):
    """Commands for the client to run."""

    type: Literal["shell_call"]
    id: str
    call_id: str
    action: JsonObject
    status: ItemStatus


class ApplyPatchCallItem(TypedDict):
    """A file change for the client to make."""

    type: Literal["apply_patch_call"]
    id: str
    call_id: str
    operation: JsonObject
    status: ItemStatus


class ToolSearchCallItem(TypedDict):
    """A tool search for the client to make."""

    type: Literal["tool_search_call"]
    id: str
    call_id: str
    execution: Literal["client"]
    arguments: Any
    status: ItemStatus


class CallOutputItem(TypedDict):
    """The output of a function or of a tool that takes text."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    id: str
    call_id: str
    output: str | list[Part]
    status: ItemStatus


class LocalShellOutputItem(TypedDict):
    """The output of a command."""

    type: Literal["local_shell_call_output"]
    id: str
    call_id: str
    output: str
    status: ItemStatus


class ShellOutputItem(TypedDict):
    """The outputs of commands."""

    type: Literal["shell_call_output"]
    id: str
    call_id: str
    output: list[JsonObject]
    status: ItemStatus


class ApplyPatchOutputItem(TypedDict):
    """The result of a file change."""

    type: Literal["apply_patch_call_output"]
    id: str
    call_id: str
    output: str
    status: Literal["completed", "failed"]


class ToolSearchOutputItem(TypedDict):
    """Tools that a search found."""

    type: Literal["tool_search_output"]
    id: str
    call_id: str
    execution: Literal["client"]
    tools: list[JsonObject]
    status: ItemStatus


class ReferenceItem(TypedDict):
    """A reference to a stored item."""

    type: Literal["item_reference"]
    id: str


AnyCallItem = (
    CallItem
    | CustomCallItem
    | LocalShellCallItem
    | ShellCallItem
    | ApplyPatchCallItem
    | ToolSearchCallItem
)
AnyOutputItem = (
    CallOutputItem
    | LocalShellOutputItem
    | ShellOutputItem
    | ApplyPatchOutputItem
    | ToolSearchOutputItem
)
Item = MessageItem | ReasoningItem | AnyCallItem | AnyOutputItem | ReferenceItem
