"""Choosing the tool-call format of a model: by name, or by its chat template."""

from __future__ import annotations

from collections.abc import Mapping

from penstock_router.text.formats.base import CallFormat
from penstock_router.text.formats.json_formats.deepseek import DEEPSEEK_V3, DEEPSEEK_V31
from penstock_router.text.formats.json_formats.hermes import HERMES
from penstock_router.text.formats.json_formats.llama_json import LlamaJsonFormat
from penstock_router.text.formats.json_formats.mistral import MistralFormat, MistralNamedFormat
from penstock_router.text.formats.json_formats.plain_json import PlainJsonFormat
from penstock_router.text.formats.python_formats.gemma import FUNCTION_GEMMA, GEMMA4
from penstock_router.text.formats.python_formats.lfm import LfmFormat
from penstock_router.text.formats.python_formats.olmo import OlmoFormat
from penstock_router.text.formats.python_formats.pythonic import PythonicFormat
from penstock_router.text.formats.tagged_formats.qwen_xml import QWEN_XML
from penstock_router.text.reasoning import AUTO, NONE

# A row a format, with the names that other servers use for it; in the order in which templates are
# tested: formats with marks before those with words.
_ROWS: tuple[tuple[CallFormat, tuple[str, ...]], ...] = (
    (DEEPSEEK_V3, ("deepseek",)),
    (DEEPSEEK_V31, ()),
    (MistralFormat(), ()),
    (MistralNamedFormat(), ()),
    (QWEN_XML, ("qwen3_coder", "qwen3_xml", "step3p5")),
    (HERMES, ("qwen", "qwen25", "qwen3")),
    (GEMMA4, ()),
    (FUNCTION_GEMMA, ()),
    (LfmFormat(), ("lfm", "lfm2_5", "lfm3")),
    (OlmoFormat(), ()),
    (PythonicFormat(), ("gemma", "llama4_pythonic")),
    (LlamaJsonFormat(), ("llama", "llama3_json", "llama4_json")),
    (PlainJsonFormat(), ("json",)),
)
FORMATS: Mapping[str, CallFormat] = {
    name: each for each, others in _ROWS for name in (each.name, *others)
}


def tool_format_of(template: str, name: str = AUTO) -> CallFormat | None:
    """The format of this name; "auto": the one that the template uses.

    None: for the name "none", or if the template uses tools in a format that is not known here.
    Raises `KeyError` for an unknown name.
    """
    if name == NONE:
        return None
    if name != AUTO:
        return FORMATS[name].for_template(template)
    found = (each.for_template(template) for each, _ in _ROWS if each.is_of(template))
    return next(found, None)
