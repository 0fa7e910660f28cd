"""Converts Anthropic's turns, made of content blocks, into messages of a chat.

A turn may become several messages, in order. Each tool result is a separate message, also one that
Anthropic's servers added to an answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock_router.apis.chat_messages import (
    FunctionCall,
    assistant_message,
    check_size,
    joined,
    tool_message,
)
from penstock_router.apis.messages.billing import without_billing
from penstock_router.apis.messages.parts import (
    OF_RESULTS,
    OF_SYSTEMS,
    Context,
    json_text,
    read_blocks,
    reader_of,
    resolved,
)
from penstock_router.apis.messages.tools import OfferedTools
from penstock_router.apis.messages.turn_schemas import TURNS_SCHEMA
from penstock_router.errors import BadRequest
from penstock_router.json_fields import (
    BOOLEAN,
    STRING,
    JsonObject,
    Kind,
    one_of,
    read_array,
    read_object,
    refusal,
    string,
)
from penstock_router.request import Message
from penstock_router.text.contents import Content, Part, as_text, join_contents, text_part

# Roles that clients send. Only Claude Code sends the last two, for the user.
_ROLES: Mapping[str, str] = {
    "user": "user",
    "assistant": "assistant",
    "system": "system",
    "developer": "system",
    "ctx": "user",
    "msg": "user",
}
# Names of tools and ids of calls.
NAME = string(1, 256)
# The mark of a failed tool call, for which chat messages have no flag.
_ERROR_PREFIX = "Error: "
# How long a system message is shown.
_CLEAR_AT = one_of("next_user_message", "never")


@dataclass(slots=True)
class Turns:
    """The turns while they are read: messages, and settings found in them."""

    context: Context = field(default_factory=Context)
    # Contents are parts; some are placeholders for definitions of tools.
    messages: list[Message] = field(default_factory=list)
    # Templates expect the tool's name in a result; Anthropic's results have only the call's id.
    tools_by_id: dict[str, str] = field(default_factory=dict)
    # The next answer's effort, if a turn sets it.
    effort: str | None = None

    def chat(self, tools: OfferedTools) -> list[Message]:
        """Return the messages, with these tools where turns refer to them."""
        told: set[str] = set()
        return [_finished(message, tools, told) for message in self.messages]


def _finished(message: Message, tools: OfferedTools, told: set[str]) -> Message:
    parts = message.get("content")
    if not isinstance(parts, list):
        return message
    content = joined(resolved(parts, tools, told))
    if message["role"] == "system":
        content = as_text(content, "")
    return {**message, "content": content}


def _read_turns(name: str, value: Any) -> Turns:
    """Read and check every block. The last message may be an answer to continue."""
    given = read_array(name, value)
    if not given:
        raise BadRequest(f"{name}: at least one message is needed", param=name)
    check_size(name, given)
    check_size(name, list(_blocks_of(given)))
    turns, last_user = Turns(), _last_user(given)
    for index, turn in enumerate(given):
        _read_turn(f"{name}[{index}]", turn, turns, is_past=index < last_user)
    if not turns.messages:
        turns.messages.append({"role": "user", "content": ""})
    if turns.messages[-1].get("tool_calls"):
        text = f"{name}: the last turn calls tools; a turn with their results must follow"
        raise BadRequest(text, param=name)
    return turns


def _blocks_of(turns: Sequence[Any]) -> Iterator[Any]:
    for turn in turns:
        content = turn.get("content") if isinstance(turn, dict) else None
        yield from content if isinstance(content, list) else ()


def _last_user(turns: Sequence[Any]) -> int:
    return max((at for at, turn in enumerate(turns) if _role_of(turn) == "user"), default=-1)


def _role_of(turn: Any) -> str | None:
    role = turn.get("role") if isinstance(turn, dict) else None
    return _ROLES.get(role) if isinstance(role, str) else None


def _read_turn(name: str, value: Any, turns: Turns, *, is_past: bool) -> None:
    turn = read_object(name, value)
    role, content = _role_of(turn), turn.get("content")
    if role is None:
        raise refusal(f"{name}.role", "user, assistant or system", turn.get("role"))
    if role == "system":
        _read_system(name, turn, turns, is_past=is_past)
        return
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise refusal(f"{name}.content", "a string or an array of blocks", content)
    if role == "user":
        _read_user(f"{name}.content", content, turns)
    else:
        _read_assistant(f"{name}.content", content, turns)
        turns.effort = None


# ---- System messages ---------------------------------------------------------------------------


def _read_system(name: str, turn: JsonObject, turns: Turns, *, is_past: bool) -> None:
    """Add a system message, unless it was only for a past turn of the user."""
    parts = _system_parts(name, turn, turns.context)
    _read_effort(f"{name}.output_config", turn, turns)
    clear_at = turn.get("clear_at")
    if clear_at is not None:
        _CLEAR_AT.read(f"{name}.clear_at", clear_at)
    kept = without_billing(parts)
    if kept and not (is_past and clear_at == "next_user_message"):
        turns.messages.append({"role": "system", "content": kept})


def _system_parts(name: str, turn: JsonObject, context: Context) -> list[Part]:
    content = turn.get("content")
    if isinstance(content, str):
        return [text_part(content)]
    if content is None and turn.get("output_config") is not None:
        return []
    if not isinstance(content, list):
        raise refusal(f"{name}.content", "a string or an array of blocks", content)
    parts = read_blocks(f"{name}.content", content, context, OF_SYSTEMS)
    if any(part["type"] == "image" for part in parts):
        text = f"{name}.content: systems have text only, no images"
        raise BadRequest(text, param=f"{name}.content")
    return parts


def _read_effort(name: str, turn: JsonObject, turns: Turns) -> None:
    if (config := turn.get("output_config")) is not None:
        effort = read_object(name, config).get("effort")
        turns.effort = None if effort is None else STRING.read(f"{name}.effort", effort)


# ---- Users -------------------------------------------------------------------------------------


def _read_user(name: str, blocks: list[Any], turns: Turns) -> None:
    """Add tool results as messages of role tool, and other blocks as messages of the user."""
    begin = len(turns.messages)
    parts: list[Part] = []

    def end_text() -> None:
        if parts:
            turns.messages.append({"role": "user", "content": parts.copy()})
            parts.clear()

    for index, value in enumerate(blocks):
        at = f"{name}[{index}]"
        block = read_object(at, value)
        if block.get("type") == "tool_result":
            end_text()
            turns.messages.append(_read_result(at, block, turns))
        else:
            parts += reader_of(at, block, OF_RESULTS)(at, block, turns.context)
    end_text()
    if len(turns.messages) == begin:
        turns.messages.append({"role": "user", "content": ""})


def _read_result(name: str, block: JsonObject, turns: Turns) -> Message:
    call_id = NAME.read(f"{name}.tool_use_id", block.get("tool_use_id"))
    is_error = block.get("is_error")
    content = _read_content(f"{name}.content", block.get("content"), turns.context)
    if is_error is not None and BOOLEAN.read(f"{name}.is_error", is_error):
        content = join_contents(_ERROR_PREFIX, content, "")
    return tool_message(call_id, content, turns.tools_by_id.get(call_id, ""))


def _read_content(name: str, value: Any, context: Context) -> Content:
    if not isinstance(value, list):
        return "" if value is None else STRING.read(name, value)
    return read_blocks(name, value, context, OF_RESULTS)


# ---- Assistants --------------------------------------------------------------------------------


@dataclass(slots=True)
class _Said:
    """An assistant message, collected from blocks."""

    turns: Turns
    texts: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[FunctionCall] = field(default_factory=list)

    def end_message(self) -> None:
        if self.texts or self.reasoning or self.calls:
            text = "\n".join(self.texts) if self.texts else None
            message = assistant_message(text, "\n".join(self.reasoning), self.calls)
            self.turns.messages.append(message)
        self.texts, self.reasoning, self.calls = [], [], []


def _read_assistant(name: str, blocks: list[Any], turns: Turns) -> None:
    begin, said = len(turns.messages), _Said(turns)
    for index, value in enumerate(blocks):
        at = f"{name}[{index}]"
        block = read_object(at, value)
        reader_of(at, block, _OF_ASSISTANTS)(at, block, said)
    said.end_message()
    if len(turns.messages) == begin:
        turns.messages.append(assistant_message(""))


def _read_text(name: str, block: JsonObject, said: _Said) -> None:
    said.texts.append(STRING.read(f"{name}.text", block.get("text")))


def _read_thinking(name: str, block: JsonObject, said: _Said) -> None:
    thinking = block.get("thinking")
    if thinking is not None and STRING.read(f"{name}.thinking", thinking):
        said.reasoning.append(thinking)


def _leave_out(name: str, block: JsonObject, said: _Said) -> None:
    """Drop a block that only its creator can read, or that is never shown to models."""


def _read_call(name: str, block: JsonObject, said: _Said) -> None:
    given = block.get("input")
    call = FunctionCall(
        call_id=NAME.read(f"{name}.id", block.get("id")),
        name=NAME.read(f"{name}.name", block.get("name")),
        arguments={} if given is None else read_object(f"{name}.input", given),
    )
    said.calls.append(call)
    said.turns.tools_by_id[call.call_id] = call.name


def _read_servers_result(name: str, block: JsonObject, said: _Said) -> None:
    """Read the result of a call that Anthropic's servers ran, as if a client had run it."""
    said.end_message()
    value = block.get("content")
    if isinstance(value, dict) and isinstance(value.get("tool_references"), list):
        value = value["tool_references"]
    if isinstance(value, dict) or (isinstance(value, list) and not _is_readable(value)):
        block = {**block, "content": json_text(f"{name}.content", value)}
    else:
        block = {**block, "content": value}
    said.turns.messages.append(_read_result(name, block, said.turns))


def _is_readable(blocks: list[Any]) -> bool:
    return all(isinstance(block, dict) and block.get("type") in OF_RESULTS for block in blocks)


def _read_summary(name: str, block: JsonObject, said: _Said) -> None:
    """Replace the whole earlier conversation by a server's summary."""
    content = block.get("content")
    if content is None or not STRING.read(f"{name}.content", content):
        return
    said.end_message()
    said.turns.messages[:] = [{"role": "user", "content": content}]


_OF_ASSISTANTS: Mapping[str, Callable[[str, JsonObject, _Said], None]] = {
    "text": _read_text,
    "thinking": _read_thinking,
    "redacted_thinking": _leave_out,
    "tool_use": _read_call,
    "server_tool_use": _read_call,
    "mcp_tool_use": _read_call,
    **dict.fromkeys(
        (
            *("web_search_tool_result", "web_fetch_tool_result", "code_execution_tool_result"),
            *("bash_code_execution_tool_result", "text_editor_code_execution_tool_result"),
            *("tool_search_tool_result", "advisor_tool_result", "mcp_tool_result"),
        ),
        _read_servers_result,
    ),
    "compaction": _read_summary,
    "fallback": _leave_out,
    "mcp_tool_listing": _leave_out,
}
TURNS = Kind(_read_turns, TURNS_SCHEMA)
