"""Builds the constraint that shards enforce on an answer.

A request's own constraint is sent unchanged if there is nothing to combine it with. Otherwise one
structural tag is sent: reasoning up to its end mark, then tool calls or the requested format.
"""

from __future__ import annotations

from typing import Any

import msgspec

from penstock_proto.limits import MAX_BUILT_CONSTRAINT_BYTES
from penstock_proto.types import Constraint, ConstraintKind
from penstock_router.errors import BadRequest
from penstock_router.json_fields import JsonObject
from penstock_router.request import ChatRequest, Options, Tool
from penstock_router.text.formats.base import CallFormat, CallRule
from penstock_router.text.formats.channels import ChannelFormat
from penstock_router.text.reasoning import ReasoningStyle
from penstock_router.text.structural_tag_builder import (
    ANY_TEXT,
    TooLong,
    either,
    encoded,
    json_format,
    literal,
    regex,
    sequence,
    tag,
)

# Whitespace that models write after reasoning. It has a bound, or a model might never stop.
_SPACE = regex("[ \\n]{0,2}")

# The number of tools that an error names.
_NAMED_TOOLS = 4


def tools_of(request: ChatRequest) -> tuple[Tool, ...]:
    """The tools that the answer may call."""
    return () if request.tool_choice.mode == "none" else request.tools


def answer_constraint(
    request: Options,
    tool_format: CallFormat | None,
    style: ReasoningStyle | None,
    *,
    begun: bool = False,
    separators: tuple[str, str] | None = None,
) -> Constraint | None:
    """Build the constraint on the request's answers; None allows any text.

    `style` is None if no reasoning can come. With `begun`, the prompt ends within reasoning.
    `separators` stand between items and after keys in tool arguments. Raises `BadRequest` if the
    request demands tool calls but the model's call format is unknown.
    """
    if not isinstance(request, ChatRequest):
        return request.constraint
    try:
        return _constraint_of_chat(request, tool_format, style, begun, separators)
    except TooLong:
        raise _too_long(request, tool_format) from None


def _constraint_of_chat(
    request: ChatRequest,
    tool_format: CallFormat | None,
    style: ReasoningStyle | None,
    begun: bool,
    separators: tuple[str, str] | None,
) -> Constraint | None:
    answer = _with_calls(request, tool_format, separators)
    has_channels = isinstance(tool_format, ChannelFormat)
    if answer is None:
        if request.constraint is None or (style is None and not has_channels):
            return request.constraint
        answer = _text_of(request.constraint, tool_format)
    if style is not None and isinstance(tool_format, ChannelFormat):
        answer = tool_format.reasoned(answer, begun=begun)
    elif style is not None:
        answer = sequence(*_reasoning(style, begun), answer)
    return Constraint(ConstraintKind.STRUCTURAL_TAG, encoded(answer))


def _too_long(request: ChatRequest, tool_format: CallFormat | None) -> BadRequest:
    names = [tool.name for tool in tools_held_to(request, tool_format)]
    field = "tools" if names else request.constraint_field
    more = f" and {len(names) - _NAMED_TOOLS} more" if len(names) > _NAMED_TOOLS else ""
    of_tools = f" with the schemas of {', '.join(names[:_NAMED_TOOLS])}{more}" if names else ""
    return BadRequest(
        f"{field}: the constraint{of_tools} has over {MAX_BUILT_CONSTRAINT_BYTES} bytes, which is "
        "the most",
        param=field,
    )


# ---- Calls -------------------------------------------------------------------------------------


def tools_held_to(request: ChatRequest, tool_format: CallFormat | None) -> tuple[Tool, ...]:
    """The tools whose schemas are enforced."""
    tools, choice = tools_of(request), request.tool_choice
    if tool_format is None:
        return ()
    if choice.mode == "named":
        return tuple(tool for tool in tools if tool.name == choice.name)
    if choice.forces or request.constraint is not None:
        return tools
    return tuple(tool for tool in tools if tool.strict)


def _with_calls(
    request: ChatRequest, tool_format: CallFormat | None, separators: tuple[str, str] | None
) -> JsonObject | None:
    """Match the text after reasoning; return None if no tools constrain it."""
    tools, choice = tools_of(request), request.tool_choice
    parallel = request.parallel_tool_calls
    if not tools:
        return None
    if tool_format is None:
        if choice.forces:
            raise BadRequest(
                f"tool_choice: {choice.mode} is not served, as it is not known how the model "
                "writes calls (--tool-call-parser)",
                param="tool_choice",
            )
        return None
    if choice.mode == "named":
        tools, parallel = tools_held_to(request, tool_format), False
    if choice.forces:
        # The answer has only tool calls, so no content is left for the request's own constraint.
        return tool_format.calls(tools, CallRule(True, parallel, separators))
    if request.constraint is not None:
        calls = tool_format.calls(tools, CallRule(True, parallel, separators))
        return either([calls, _text_of(request.constraint, tool_format)])
    if parallel and not any(tool.strict for tool in tools):
        return None
    return tool_format.calls(tools, CallRule(False, parallel, separators))


def _text_of(constraint: Constraint, tool_format: CallFormat | None) -> Any:
    text = format_of(constraint)
    return tool_format.said(text) if isinstance(tool_format, ChannelFormat) else text


# ---- Reasoning ---------------------------------------------------------------------------------


def _reasoning(style: ReasoningStyle, begun: bool) -> list[JsonObject]:
    """Match the reasoning, which is optional unless the prompt has begun it."""
    mark = "" if begun else style.begin
    parts = [tag(mark, ANY_TEXT, style.end), _SPACE]
    return parts if begun else [either([sequence(*parts), literal("")])]


# ---- Constraints as part of a structural tag ---------------------------------------------------


class _Structure(msgspec.Struct, forbid_unknown_fields=True):
    begin: str
    end: str | list[str]
    content: msgspec.Raw = msgspec.field(name="schema", default=msgspec.Raw(b"true"))


class _StructuralTag(msgspec.Struct, forbid_unknown_fields=True):
    """A request's structural tag, in one of two forms: a format, or structures and triggers."""

    type: str = "structural_tag"
    format: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    structures: list[_Structure] = []
    triggers: list[str] = []


_STRUCTURAL_TAGS = msgspec.json.Decoder(_StructuralTag)


def format_of(constraint: Constraint) -> Any:
    """Return the constraint as a structural tag's format; its JSON stays unchanged."""
    match constraint.kind:
        case ConstraintKind.JSON_SCHEMA:
            return json_format(msgspec.Raw(constraint.value.encode()))
        case ConstraintKind.JSON_OBJECT:
            return json_format({"type": "object"})
        case ConstraintKind.REGEX:
            return regex(constraint.value)
        case ConstraintKind.GRAMMAR:
            return {"type": "grammar", "grammar": constraint.value}
        case ConstraintKind.CHOICE:
            return either(map(literal, constraint.options))
        case ConstraintKind.STRUCTURAL_TAG:
            return _tagged(constraint.value)


def _tagged(value: str) -> Any:
    try:
        given = _STRUCTURAL_TAGS.decode(value)
    except msgspec.DecodeError as error:
        raise BadRequest(f"structural_tag: {error}", param="structural_tag") from None
    if isinstance(given.format, msgspec.Raw):
        return given.format
    tags = [
        tag(structure.begin, json_format(structure.content), structure.end)
        for structure in given.structures
    ]
    return {"type": "triggered_tags", "triggers": given.triggers, "tags": tags}
