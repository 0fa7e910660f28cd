"""Families whose tool calls are one list between marks."""

from __future__ import annotations

import re
from dataclasses import dataclass

from penstock_router.text.formats.reading.marked_json import MarkedJson

_LIST_IN_MARKS = re.compile(r"<tool_call>(\\n|\s)*\[")

# Granite 3: the list reaches the answer's end. Its mark has two spellings.
GRANITE = MarkedJson(
    name="granite",
    begin="<|tool_call|>",
    end="",
    other_begins=("<tool_call>",),
    other_ends=("</tool_call>", "<|/tool_call|>"),
    is_list=True,
    strange=("<|/tool_call|>", "<|/tool|>"),
)
# Phi-4-mini with its own template; with other templates it writes `functools`.
PHI4_MINI = MarkedJson(
    name="phi4_mini",
    begin="<|tool_call|>",
    end="<|/tool_call|>",
    other_begins=("functools",),
    is_list=True,
    signs=("<|/tool|>",),
)
# Firefunction 2 and Phi-4-mini: the mark is a word, and no end mark exists.
FUNCTOOLS = MarkedJson(
    name="functools",
    begin="functools",
    end="",
    other_begins=("<|tool_call|>",),
    other_ends=("<|/tool_call|>",),
    is_list=True,
    signs=("functools[",),
)
# Nemotron: H, Nano 2, and the first Nano and Super.
NEMOTRON = MarkedJson(name="nemotron", begin="<TOOLCALL>", end="</TOOLCALL>", is_list=True)
# Jamba, Hunyuan A13B and Apriel.
TOOL_CALLS = MarkedJson(name="tool_calls", begin="<tool_calls>", end="</tool_calls>", is_list=True)


@dataclass(frozen=True, kw_only=True)
class _FalconFormat(MarkedJson):
    def is_of(self, template: str) -> bool:
        return super().is_of(template) and _LIST_IN_MARKS.search(template) is not None


# Falcon 3 and H1: the marks of Hermes, around a list.
FALCON = _FalconFormat(
    name="falcon",
    begin="<tool_call>",
    end="</tool_call>",
    padding="\n",
    is_list=True,
    listed=("[\n  ", ",\n  ", "\n]"),
    strange=("<|tool_call|>",),
)
