"""GLM 4.5 and later, Laguna, Spark 2.5, Ling 3: pairs of tags within `<tool_call>`.

The whitespace between tags differs; templates show it.
"""

from __future__ import annotations

from penstock_router.text.formats.reading.keyed_calls import KeyedFormat
from penstock_router.text.formats.reading.tags import Spaces, Tags

GLM = KeyedFormat(
    name="glm",
    tags=Tags(
        wrap=("", ""),
        function=("<tool_call>", "", "</tool_call>"),
        argument=("<arg_key>", "</arg_key>", "</arg_value>"),
        value="<arg_value>",
    ),
    spaces=Spaces(name="", argument="", between=""),
    signs=("<tool_call>", "<arg_key>", "<arg_value>"),
)
