"""Chooses a model's format of tool calls, by name or by its chat template."""

from __future__ import annotations

from collections.abc import Mapping

from penstock_router.text.formats.base import CallFormat
from penstock_router.text.formats.channel_formats.harmony import HARMONY
from penstock_router.text.formats.channel_formats.kimi_k3 import KIMI_K3
from penstock_router.text.formats.channel_formats.muse_glimmer import MUSE_GLIMMER
from penstock_router.text.formats.channel_formats.solar_open import SOLAR_OPEN
from penstock_router.text.formats.channels import ChannelFormat
from penstock_router.text.formats.json_formats.apertus import APERTUS
from penstock_router.text.formats.json_formats.cohere import COHERE, CommandRFormat
from penstock_router.text.formats.json_formats.deepseek import DEEPSEEK_V3, DEEPSEEK_V31
from penstock_router.text.formats.json_formats.functionary import (
    FunctionaryFormat,
    FunctionaryTagFormat,
)
from penstock_router.text.formats.json_formats.gigachat import GIGACHAT
from penstock_router.text.formats.json_formats.glm4 import Glm4Format
from penstock_router.text.formats.json_formats.hermes import HERMES
from penstock_router.text.formats.json_formats.kimi_k2 import KIMI_K2
from penstock_router.text.formats.json_formats.llama_json import LlamaJsonFormat
from penstock_router.text.formats.json_formats.marked_lists import (
    FALCON,
    FUNCTOOLS,
    GRANITE,
    NEMOTRON,
    PHI4_MINI,
    TOOL_CALLS,
)
from penstock_router.text.formats.json_formats.marked_objects import (
    EXAONE,
    GRANITE_20B,
    INTERNLM,
    K2_HORIZON,
    LONGCAT,
    MINIMAX_M1,
    NEMOTRON_MINI,
)
from penstock_router.text.formats.json_formats.mistral import MistralFormat, MistralNamedFormat
from penstock_router.text.formats.json_formats.plain_json import PlainJsonFormat
from penstock_router.text.formats.json_formats.xlam import XLAM
from penstock_router.text.formats.python_formats.gemma import FUNCTION_GEMMA, GEMMA4
from penstock_router.text.formats.python_formats.lfm import LfmFormat
from penstock_router.text.formats.python_formats.olmo import OlmoFormat
from penstock_router.text.formats.python_formats.pythonic import PythonicFormat
from penstock_router.text.formats.tagged_formats.deepseek_dsml import DEEPSEEK_DSML
from penstock_router.text.formats.tagged_formats.dots import DOTS
from penstock_router.text.formats.tagged_formats.glm import GLM
from penstock_router.text.formats.tagged_formats.hunyuan import HUNYUAN
from penstock_router.text.formats.tagged_formats.minicpm5 import MINICPM5
from penstock_router.text.formats.tagged_formats.minimax_m2 import MINIMAX_M2
from penstock_router.text.formats.tagged_formats.minimax_m3 import MINIMAX_M3
from penstock_router.text.formats.tagged_formats.qwen_xml import MIMO, QWEN_XML
from penstock_router.text.formats.tagged_formats.seed_oss import SEED_OSS
from penstock_router.text.formats.tagged_formats.step3 import STEP3
from penstock_router.text.reasoning import AUTO, NONE

# Each format with its names in other servers. Templates are tested in this order: formats with
# marks before formats with words.
_ROWS: tuple[tuple[CallFormat, tuple[str, ...]], ...] = (
    (HARMONY, ("openai", "gpt_oss", "openai_gptoss")),
    (KIMI_K3, ()),
    (MUSE_GLIMMER, ("muse",)),
    (SOLAR_OPEN, ()),
    (KIMI_K2, ()),
    (DEEPSEEK_V3, ("deepseek", "deepseekv3")),
    (DEEPSEEK_V31, ("deepseekv31",)),
    (MistralFormat(), ()),
    (MistralNamedFormat(), ()),
    (
        DEEPSEEK_DSML,
        ("deepseek_v32", "deepseekv32", "deepseek_v4", "deepseekv4", "deepseek_v41"),
    ),
    (MINIMAX_M2, ("minimax-m2",)),
    (MINIMAX_M3, ("minimax-m3",)),
    (SEED_OSS, ()),
    (STEP3, ()),
    (DOTS, ()),
    (HUNYUAN, ("hy_v4", "hunyuan")),
    (GLM, ("glm45", "glm47", "laguna", "poolside_v1", "spark25", "ling3")),
    (MIMO, ()),
    (MINICPM5, ()),
    (COHERE, ("cohere_command3", "cohere_command4")),
    (CommandRFormat(), ()),
    (APERTUS, ("apertus2509",)),
    (GIGACHAT, ()),
    (K2_HORIZON, ()),
    (LONGCAT, ()),
    (NEMOTRON, ()),
    (NEMOTRON_MINI, ()),
    (INTERNLM, ()),
    (MINIMAX_M1, ("minimax",)),
    (TOOL_CALLS, ("jamba", "hunyuan_a13b", "apriel")),
    (PHI4_MINI, ("phi4_mini_json",)),
    (FUNCTOOLS, ("firefunction_v2",)),
    (GRANITE, ()),
    (GRANITE_20B, ("granite-20b-fc",)),
    (FunctionaryTagFormat(), ()),
    (FunctionaryFormat(), ("functionary",)),
    (Glm4Format(), ()),
    (XLAM, ()),
    (FALCON, ()),
    (EXAONE, ()),
    (QWEN_XML, ("qwen3_coder", "qwen3_xml", "step3p5")),
    (HERMES, ("qwen", "qwen25", "qwen3", "qwen3_json", "granite4", "ernie45", "trinity")),
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
# Formats that also read reasoning, by name.
CHANNELS: Mapping[str, ChannelFormat] = {
    name: each
    for name, each in FORMATS.items()
    if isinstance(each, ChannelFormat) and each.style is not None
}


def tool_format_of(template: str, name: str = AUTO) -> CallFormat | None:
    """Return the format of this name or, for "auto", the one that the template uses.

    Return None for the name "none", or if the template uses tools in an unknown format. Raises
    `KeyError` for an unknown name.
    """
    if name == NONE:
        return None
    if name != AUTO:
        return FORMATS[name].for_template(template)
    found = (each.for_template(template) for each, _ in _ROWS if each.is_of(template))
    return next(found, None)
