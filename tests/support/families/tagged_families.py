"""Families whose calls have each argument between tags of its own."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from support.families.family import Call, Family


def value_text(value: object) -> str:
    """A value as most such families write it: strings as they are, all else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _as_xml(padding: str, opens: str, closes: str) -> Callable[[Sequence[Call]], str]:
    """`<function=f>` with `<parameter=k>` within."""

    def write(calls: Sequence[Call]) -> str:
        written = []
        for name, arguments in calls:
            parameters = "".join(
                f"<parameter={key}>{padding}{_python_text(value)}{padding}</parameter>\n"
                for key, value in arguments.items()
            )
            written.append(f"{opens}\n<function={name}>\n{parameters}</function>\n{closes}")
        return "\n".join(written)

    return write


def _python_text(value: Any) -> str:
    """A value as Python prints it, but for objects and lists."""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, (dict, list)) else str(value)


def _glm(calls: Sequence[Call]) -> str:
    written = []
    for name, arguments in calls:
        pairs = "".join(
            f"<arg_key>{key}</arg_key><arg_value>{value_text(value)}</arg_value>"
            for key, value in arguments.items()
        )
        written.append(f"<tool_call>{name}{pairs}</tool_call>")
    return "".join(written)


def _hunyuan(calls: Sequence[Call]) -> str:
    written = []
    for name, arguments in calls:
        pairs = "".join(
            f"<arg_key>{key}</arg_key>\n<arg_value>{value_text(value)}</arg_value>\n"
            for key, value in arguments.items()
        )
        written.append(f"<tool_call>{name}<tool_sep>\n{pairs}</tool_call>\n")
    return f"<tool_calls>\n{''.join(written)}</tool_calls>"


def _dsml(calls: Sequence[Call]) -> str:
    written = []
    for name, arguments in calls:
        parameters = "".join(
            f'<｜DSML｜parameter name="{key}" string="{str(isinstance(value, str)).lower()}">'
            f"{value_text(value)}</｜DSML｜parameter>\n"
            for key, value in arguments.items()
        )
        written.append(f'<｜DSML｜invoke name="{name}">\n{parameters}</｜DSML｜invoke>\n')
    return f"<｜DSML｜tool_calls>\n{''.join(written)}</｜DSML｜tool_calls>"


def _as_invokes(opens: str, closes: str) -> Callable[[Sequence[Call]], str]:
    """`<invoke name="f">` with `<parameter name="k">` within, all in one block."""

    def write(calls: Sequence[Call]) -> str:
        written = []
        for name, arguments in calls:
            parameters = "".join(
                f'<parameter name="{key}">{value_text(value)}</parameter>\n'
                for key, value in arguments.items()
            )
            written.append(f'<invoke name="{name}">\n{parameters}</invoke>\n')
        return f"{opens}\n{''.join(written)}{closes}"

    return write


def _step3(calls: Sequence[Call]) -> str:
    written = []
    for name, arguments in calls:
        parameters = "".join(
            f'<steptml:parameter name="{key}">{value_text(value)}</steptml:parameter>\n'
            for key, value in arguments.items()
        )
        written.append(
            f'<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="{name}">\n'
            f"{parameters}</steptml:invoke><｜tool_call_end｜>\n"
        )
    return f"<｜tool_calls_begin｜>\n{''.join(written)}<｜tool_calls_end｜>"


def _minicpm5(calls: Sequence[Call]) -> str:
    def value_in_tags(value: Any) -> str:
        if isinstance(value, str) and set(value) & set("<&\n"):
            return f"<![CDATA[{value}]]>"
        return _python_text(value)

    written = []
    for name, arguments in calls:
        parameters = "".join(
            f'<param name="{key}">{value_in_tags(value)}</param>'
            for key, value in arguments.items()
        )
        written.append(f'<function name="{name}">{parameters}</function>')
    return "\n".join(written)


_NS = "]<]minimax[>["


def _minimax_m3(calls: Sequence[Call]) -> str:
    written = []
    for name, arguments in calls:
        written.append(f'{_NS}<invoke name="{name}">{_elements(arguments)}{_NS}</invoke>\n')
    return f"{_NS}<tool_call>\n{''.join(written)}{_NS}</tool_call>"


def _elements(value: Any) -> str:
    """A value as elements within each other; members that are None are left out."""
    if isinstance(value, dict):
        members = [(key, each) for key, each in value.items() if each is not None]
    elif isinstance(value, list):
        members = [("item", each) for each in value]
    else:
        return "" if value is None else value_text(value)
    return "".join(f"{_NS}<{key}>{_elements(each)}{_NS}</{key}>" for key, each in members)


FAMILIES = (
    Family(
        "qwen_xml",
        _as_xml("\n", "<tool_call>", "</tool_call>"),
        has_quotes=False,
        begin="<tool_call>\n",
        end="\n</tool_call>",
    ),
    Family(
        "mimo",
        _as_xml("", "<tool_call>", "</tool_call>"),
        has_quotes=False,
        begin="<tool_call>\n",
        end="\n</tool_call>",
    ),
    Family(
        "seed_oss",
        _as_xml("", "<seed:tool_call>", "</seed:tool_call>"),
        reasons=lambda text: f"<seed:think>{text}</seed:think>\n",
        has_quotes=False,
        begin="<seed:tool_call>\n",
        end="\n</seed:tool_call>",
    ),
    Family("glm", _glm, has_quotes=False, begin="<tool_call>", end="</tool_call>"),
    Family("hy_v3", _hunyuan, has_quotes=False, begin="<tool_calls>\n", end="</tool_calls>"),
    Family(
        "deepseek_dsml",
        _dsml,
        has_quotes=False,
        begin="<｜DSML｜tool_calls>\n",
        end="</｜DSML｜tool_calls>",
    ),
    Family(
        "minimax_m2",
        _as_invokes("<minimax:tool_call>", "</minimax:tool_call>"),
        has_quotes=False,
        begin="<minimax:tool_call>\n",
        end="</minimax:tool_call>",
    ),
    Family(
        "minimax_m3",
        _minimax_m3,
        reasons=lambda text: f"<mm:think>{text}</mm:think>",
        has_quotes=False,
        begin="]<]minimax[>[<tool_call>\n",
        end="]<]minimax[>[</tool_call>",
    ),
    Family(
        "dots",
        _as_invokes("<dots_function_call>", "</dots_function_call>"),
        has_quotes=False,
        begin="<dots_function_call>\n",
        end="</dots_function_call>",
    ),
    Family(
        "step3",
        _step3,
        has_quotes=False,
        begin="<｜tool_calls_begin｜>\n",
        end="<｜tool_calls_end｜>",
    ),
    Family("minicpm5", _minicpm5, has_quotes=False, begin="", end="</function>"),
)
