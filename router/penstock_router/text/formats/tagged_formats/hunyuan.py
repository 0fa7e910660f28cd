"""Formats of HY3 and HY4: a key and a value in tags for each argument, after the function's name
and a tag that separates them. All tags of a checkpoint may have a suffix in their names.
"""

from __future__ import annotations

import re
from dataclasses import replace

from penstock_router.text.formats.base import CallFormat
from penstock_router.text.formats.reading.keyed_calls import KeyedFormat
from penstock_router.text.formats.reading.tags import Spaces, Tags, rendered_calls

# A checkpoint's suffix, in the text of a tool call.
_SUFFIX = re.compile(r"<tool_calls(:[\w.-]+)?>\s*<tool_call(?(1)\1)>")


class _HunyuanFormat(KeyedFormat):
    def for_template(self, template: str) -> CallFormat:
        found = _SUFFIX.search(rendered_calls(template))
        suffix = (found and found.group(1)) or ""
        return replace(self, tags=_tags(suffix))._spaced(template)

    def _spaced(self, template: str) -> CallFormat:
        return super().for_template(template)


def _tags(suffix: str) -> Tags:
    def opens(name: str) -> str:
        return f"<{name}{suffix}>"

    def closes(name: str) -> str:
        return f"</{name}{suffix}>"

    return Tags(
        wrap=(opens("tool_calls"), closes("tool_calls")),
        is_one_block=True,
        function=(opens("tool_call"), opens("tool_sep"), closes("tool_call")),
        argument=(opens("arg_key"), closes("arg_key"), closes("arg_value")),
        value=opens("arg_value"),
    )


HUNYUAN = _HunyuanFormat(
    name="hy_v3",
    tags=_tags(""),
    spaces=Spaces(key="\n"),
    # A template may lack whole marks, because it adds the suffix when it writes them.
    signs=("<tool_calls", "<tool_sep", "<arg_key"),
)
