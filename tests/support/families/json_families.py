"""Families whose calls have JSON as arguments."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from support.families.family import Call, Family


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _object(call: Call, arguments: str = "arguments") -> str:
    return _json({"name": call[0], arguments: call[1]})


def _each(
    begin: str, end: str, between: str = "", one: Callable[[Call], str] = _object
) -> Callable[[Sequence[Call]], str]:
    """A writer: each call between two texts, and a text between two calls."""
    return lambda calls: between.join(f"{begin}{one(call)}{end}" for call in calls)


def _all(
    begin: str, between: str, end: str, one: Callable[[Call], str] = _object
) -> Callable[[Sequence[Call]], str]:
    """A writer: all calls between two texts, and a text between two calls."""
    return lambda calls: begin + between.join(map(one, calls)) + end


def _numbered(
    begin: str, between: str, end: str, one: Callable[[Call, int], str]
) -> Callable[[Sequence[Call]], str]:
    """A writer of calls that have numbers."""
    return lambda calls: (
        begin + between.join(one(call, number) for number, call in enumerate(calls)) + end
    )


def _kimi_k2(call: Call, number: int) -> str:
    header = f"<|tool_call_begin|>functions.{call[0]}:{number}"
    return f"{header}<|tool_call_argument_begin|>{_json(call[1])}<|tool_call_end|>"


def _deepseek_v3(call: Call) -> str:
    head = f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{call[0]}"
    return f"{head}\n```json\n{_json(call[1])}\n```<｜tool▁call▁end｜>"


def _deepseek_v31(call: Call) -> str:
    return f"<｜tool▁call▁begin｜>{call[0]}<｜tool▁sep｜>{_json(call[1])}<｜tool▁call▁end｜>"


def _cohere(call: Call, number: int) -> str:
    return _json({"tool_call_id": f"{number}", "tool_name": call[0], "parameters": call[1]})


def _command_r(call: Call) -> str:
    head = f'{{\n        "tool_name": {_json(call[0])},\n        "parameters": '
    return f"{head}{_json(call[1])}\n    }}"


FAMILIES = (
    Family(
        "hermes",
        _each("<tool_call>\n", "\n</tool_call>", "\n"),
        begin="<tool_call>",
        end="\n</tool_call>",
    ),
    Family(
        "glm4",
        _all("", "<|assistant|>", "", lambda call: f"{call[0]}\n{_json(call[1])}"),
        says_before=None,
        has_marks=False,
    ),
    Family(
        "kimi_k2",
        _numbered("<|tool_calls_section_begin|>", "", "<|tool_calls_section_end|>", _kimi_k2),
        begin="<|tool_calls_section_begin|>",
        end="<|tool_calls_section_end|>",
    ),
    Family(
        "deepseek_v3",
        _all("<｜tool▁calls▁begin｜>", "\n", "<｜tool▁calls▁end｜>", _deepseek_v3),
        begin="<｜tool▁calls▁begin｜>",
        end="<｜tool▁calls▁end｜>",
    ),
    Family(
        "deepseek_v31",
        _all("<｜tool▁calls▁begin｜>", "", "<｜tool▁calls▁end｜>", _deepseek_v31),
        begin="<｜tool▁calls▁begin｜>",
        end="<｜tool▁calls▁end｜>",
    ),
    Family("mistral", _all("[TOOL_CALLS][", ", ", "]"), begin="[TOOL_CALLS]", end="]"),
    Family(
        "mistral_named",
        _each("", "", "", lambda call: f"[TOOL_CALLS]{call[0]}[ARGS]{_json(call[1])}"),
        begin="[TOOL_CALLS]",
    ),
    Family(
        "cohere",
        _numbered("<|START_ACTION|>[\n    ", ",\n    ", "\n]<|END_ACTION|>", _cohere),
        says_before=None,
        reasons=lambda text: f"<|START_THINKING|>{text}<|END_THINKING|>",
        begin="<|START_ACTION|>",
        end="<|END_ACTION|>",
        besides=r'"tool_call_id": "[^"]*"',
    ),
    Family(
        "command_r",
        _all("Action:\n```json\n[\n    ", ",\n    ", "\n]```", _command_r),
        has_marks=False,
        end="```",
    ),
    Family(
        "apertus",
        _all(
            "<|tools_prefix|>[",
            ", ",
            "]<|tools_suffix|>",
            lambda call: _json({call[0]: call[1]}),
        ),
        reasons=lambda text: f"<|inner_prefix|>{text}<|inner_suffix|>",
        begin="<|tools_prefix|>",
        end="<|tools_suffix|>",
    ),
    Family("gigachat3", _all("<|function_call|>", "", ""), is_parallel=False),
    Family(
        "k2_horizon",
        _all(
            "<ifm|tool_calls>\n",
            "\n",
            "\n</ifm|tool_calls>",
            lambda call: f"<ifm|tool_call>{_object(call)}</ifm|tool_call>",
        ),
        begin="<ifm|tool_calls>",
        end="\n</ifm|tool_calls>",
    ),
    Family(
        "longcat",
        _each("<longcat_tool_call>\n", "\n</longcat_tool_call>", "\n"),
        begin="<longcat_tool_call>",
        end="\n</longcat_tool_call>",
    ),
    Family(
        "nemotron",
        _all("<TOOLCALL>[", ", ", "]</TOOLCALL>"),
        begin="<TOOLCALL>",
        end="</TOOLCALL>",
    ),
    Family(
        "nemotron_mini",
        _each("<toolcall> ", " </toolcall>", "\n"),
        begin="<toolcall>",
        end=" </toolcall>",
    ),
    Family(
        "internlm",
        _each("<|action_start|><|plugin|>\n", "<|action_end|>"),
        begin="<|action_start|>",
        end="<|action_end|>",
    ),
    Family(
        "minimax_m1",
        _all("<tool_calls>\n", "\n", "\n</tool_calls>"),
        begin="<tool_calls>",
        end="\n</tool_calls>",
    ),
    Family(
        "tool_calls",
        _all("<tool_calls>[", ", ", "]</tool_calls>"),
        begin="<tool_calls>",
        end="</tool_calls>",
    ),
    Family(
        "phi4_mini",
        _all("<|tool_call|>[", ", ", "]<|/tool_call|>"),
        begin="<|tool_call|>",
        end="<|/tool_call|>",
    ),
    Family("functools", _all("functools[", ", ", "]"), begin="functools", end="]"),
    Family("granite", _all("<|tool_call|>[", ", ", "]"), begin="<|tool_call|>", end="]"),
    Family("granite_20b_fc", _each("<function_call> ", ""), begin="<function_call>"),
    Family(
        "functionary_v3_1",
        _each("", "", "", lambda call: f"<function={call[0]}>{_json(call[1])}</function>"),
        end="</function>",
    ),
    Family(
        "functionary_v3_2",
        _each("", "", ">>>", lambda call: f"{call[0]}\n{_json(call[1])}"),
        says_before=lambda text: f"all\n{text}>>>",
        says_alone=lambda text: f"all\n{text}",
        has_marks=False,
    ),
    Family("xlam", _all("[", ", ", "]"), says_before=None, has_marks=False, end="]"),
    Family(
        "falcon",
        _all("<tool_call>\n[\n  ", ",\n  ", "\n]\n</tool_call>"),
        begin="<tool_call>",
        end="\n</tool_call>",
    ),
    Family(
        "exaone4",
        _each("<tool_call>", "</tool_call>", "\n"),
        begin="<tool_call>",
        end="</tool_call>",
    ),
    Family(
        "llama_json",
        _each("", "", "; ", lambda call: _object(call, "parameters")),
        says_before=None,
        has_marks=False,
    ),
    Family(
        "plain_json",
        # As the instructions ask for it.
        lambda calls: _object(calls[0]) if len(calls) == 1 else _all("[", ", ", "]")(calls),
        says_before=None,
        has_marks=False,
    ),
)
