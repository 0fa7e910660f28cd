"""How a model writes tool calls and reasoning.

Chosen once for a model, by its chat template or as the operator says.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock_router.text.chat_template import ChatTemplate
from penstock_router.text.reasoning import AUTO, NONE, ReasoningStyle, style_of
from penstock_router.text.tool_calls.base import ToolFormat
from penstock_router.text.tool_calls.choose_format import tool_format_of

# The format of calls for models whose templates take no tools.
_WITHOUT_TEMPLATE = "plain_json"


@dataclass(frozen=True, slots=True)
class Conventions:
    """A model's formats; None: calls, or reasoning, are not separated from content."""

    tool_format: ToolFormat | None = None
    reasoning: ReasoningStyle | None = None

    @property
    def names(self) -> tuple[str, str]:
        """The names from which `conventions_named` makes the same conventions again."""
        calls = "" if self.tool_format is None else self.tool_format.name
        return calls, "" if self.reasoning is None else self.reasoning.name


def conventions_of(
    template: ChatTemplate | None, tool_call_parser: str, reasoning_parser: str
) -> Conventions:
    """What goes for a model with this chat template; the names are known ones, "auto" or "none"."""
    if tool_call_parser == AUTO and (template is None or not template.takes_tools):
        tool_call_parser = _WITHOUT_TEMPLATE
    source = "" if template is None else template.source
    tools_source = "" if template is None else template.tools_source
    return Conventions(
        tool_format_of(tools_source, tool_call_parser), style_of(source, reasoning_parser)
    )


def conventions_named(tool_format: str, reasoning: str) -> Conventions:
    """The conventions with these names; "" for none."""
    return conventions_of(None, tool_format or NONE, reasoning or NONE)
