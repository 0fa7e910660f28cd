"""Families whose tool calls are objects between marks."""

from __future__ import annotations

from penstock_router.text.formats.reading.marked_json import MarkedJson

# LongCat-Flash; later models of the family write arguments between tags.
LONGCAT = MarkedJson(
    name="longcat",
    begin="<longcat_tool_call>",
    end="</longcat_tool_call>",
    padding="\n",
    strange=("<longcat_arg_key>",),
)
# K2 Horizon when asked for JSON: marks around all calls and around each.
K2_HORIZON = MarkedJson(
    name="k2_horizon",
    begin="<ifm|tool_calls>",
    end="</ifm|tool_calls>",
    other_begins=("<ifm|tool_call>",),
    other_ends=("</ifm|tool_call>",),
    padding="\n",
    is_list=True,
    listed=("<ifm|tool_call>", "</ifm|tool_call>\n<ifm|tool_call>", "</ifm|tool_call>"),
)
NEMOTRON_MINI = MarkedJson(
    name="nemotron_mini", begin="<toolcall>", end="</toolcall>", padding=" ", between="\n"
)
# Like Hermes, without whitespace inside the marks.
EXAONE = MarkedJson(
    name="exaone4",
    begin="<tool_call>",
    end="</tool_call>",
    signs=("<tool_call>", "[|assistant|]"),
)
# InternLM 2.5: the recipient, here a function, follows the begin mark.
INTERNLM = MarkedJson(
    name="internlm",
    begin="<|action_start|>",
    end="<|action_end|>",
    other_begins=("<|plugin|>",),
    is_list=True,
    listed=("<|plugin|>\n", "<|action_end|><|action_start|><|plugin|>\n", ""),
    signs=("<|plugin|>",),
)
# Granite 20B for function calls: it writes no end mark.
GRANITE_20B = MarkedJson(
    name="granite_20b_fc",
    begin="<function_call>",
    end="",
    other_ends=("</function_call>",),
    is_list=True,
    listed=(" ", "<function_call> ", ""),
)
MINIMAX_M1 = MarkedJson(
    name="minimax_m1",
    begin="<tool_calls>",
    end="</tool_calls>",
    padding="\n",
    is_list=True,
    listed=("", "\n", ""),
    signs=("<tool_calls>", "<beginning_of_sentence>"),
)
