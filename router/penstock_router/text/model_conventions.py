"""A model's formats of tool calls and reasoning, chosen by its chat template or by the operator."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock_router.text.chat_template import ChatTemplate
from penstock_router.text.formats.base import CallFormat
from penstock_router.text.formats.channels import ChannelFormat
from penstock_router.text.formats.registry import CHANNELS, tool_format_of
from penstock_router.text.reasoning import AUTO, NONE, ReasoningStyle, style_of

# The format of tool calls for models whose templates take no tools.
_WITHOUT_TEMPLATE = "plain_json"


@dataclass(frozen=True, slots=True)
class Conventions:
    """A model's formats. None: tool calls or reasoning are not separated from content."""

    tool_format: CallFormat | None = None
    reasoning: ReasoningStyle | None = None
    # The requested names, to choose the same conventions again.
    asked: tuple[str, str] = field(default=(AUTO, AUTO), compare=False)

    @property
    def names(self) -> tuple[str, str]:
        calls = "" if self.tool_format is None else self.tool_format.name
        return calls, "" if self.reasoning is None else self.reasoning.name


def _can_be_asked_for(tool_format: CallFormat | None) -> bool:
    """Tell whether models without tools in their templates can be told to write this format."""
    if tool_format is None or isinstance(tool_format, ChannelFormat):
        return tool_format is not None
    return tool_format.calls_in_words([("f", "{}")]) is not None


def conventions_of(
    template: ChatTemplate | None, tool_call_parser: str, reasoning_parser: str
) -> Conventions:
    """Choose a model's conventions. Each parser argument is a known name, "auto" or "none"."""
    asked = tool_call_parser, reasoning_parser
    source = "" if template is None else template.source
    tools_source = "" if template is None else template.tools_source
    if reasoning_parser in CHANNELS:
        tool_call_parser, reasoning_parser = reasoning_parser, NONE
    tool_format = tool_format_of(tools_source, tool_call_parser)
    takes_tools = template is not None and template.takes_tools
    if tool_call_parser == AUTO and not (takes_tools or _can_be_asked_for(tool_format)):
        tool_format = tool_format_of(tools_source, _WITHOUT_TEMPLATE)
    style = style_of(source, reasoning_parser)
    if isinstance(tool_format, ChannelFormat):
        style = tool_format.style
    return Conventions(tool_format, style, asked)
