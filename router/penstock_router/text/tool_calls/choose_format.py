"""Choosing the tool-call format of a model: by name, or by its chat template."""

from __future__ import annotations

from collections.abc import Mapping

from penstock_router.text.reasoning import AUTO, NONE
from penstock_router.text.tool_calls.base import ToolFormat
from penstock_router.text.tool_calls.deepseek import DEEPSEEK_V3, DEEPSEEK_V31
from penstock_router.text.tool_calls.hermes import HermesFormat
from penstock_router.text.tool_calls.llama_json import LlamaJsonFormat
from penstock_router.text.tool_calls.mistral import MistralFormat, MistralNamedFormat
from penstock_router.text.tool_calls.plain_json import PlainJsonFormat
from penstock_router.text.tool_calls.pythonic import PythonicFormat

# In the order in which templates are tested: formats with markers before those with words.
_FORMATS: tuple[ToolFormat, ...] = (
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    MistralFormat(),
    MistralNamedFormat(),
    HermesFormat(),
    PythonicFormat(),
    LlamaJsonFormat(),
    PlainJsonFormat(),
)
# Names that other servers use.
_ALIASES = {
    "deepseek": "deepseek_v3",
    "gemma": "pythonic",
    "json": "plain_json",
    "llama": "llama_json",
    "llama3_json": "llama_json",
    "llama4_json": "llama_json",
    "llama4_pythonic": "pythonic",
    "qwen": "hermes",
    "qwen25": "hermes",
    "qwen3": "hermes",
}
_BY_NAME = {each.name: each for each in _FORMATS}
FORMATS: Mapping[str, ToolFormat] = _BY_NAME | {
    alias: _BY_NAME[name] for alias, name in _ALIASES.items()
}


def tool_format_of(template: str, name: str = AUTO) -> ToolFormat | None:
    """The format of this name; "auto": the one that the template uses.

    None: for the name "none", or if the template uses tools in a format that is not known here.
    Raises `KeyError` for an unknown name.
    """
    if name == NONE:
        return None
    if name != AUTO:
        return FORMATS[name]
    return next((each for each in _FORMATS if each.is_of(template)), None)
