"""Hermes, Qwen 2.5 and 3, Granite 4, ERNIE 4.5 and others: an object between marks for each
call.
"""

from __future__ import annotations

from penstock_router.text.formats.reading.marked_json import MarkedJson

HERMES = MarkedJson(
    name="hermes",
    begin="<tool_call>",
    end="</tool_call>",
    padding="\n",
    # Other families write these texts after the same mark.
    strange=("<function=", "<arg_key>"),
)
