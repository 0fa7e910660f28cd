"""Chat templates in the style of families whose calls have each argument between tags."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class _Style:
    """The parts of a family's template; parts in braces are Jinja's."""

    # Before a turn's text, by its role, and behind it.
    user: str
    assistant: str
    end: str
    # How the tools' turn ends: the example of a call.
    example: str
    # Of a turn's calls: what stands before all, one call (named `call`), what stands behind all.
    opens: str = ""
    call: str
    closes: str = ""
    # A result (of `message`), with what stands before the first and behind the last of several.
    result: str
    first_result: str = ""
    last_result: str = ""
    # Reasoning of a turn, and how the prompt begins or refuses it.
    reasoning: str = ""
    prompt: str = ""

    def source(self) -> str:
        """The template."""
        return (
            "{%- if tools %}" + self.user + "# Tools\n"
            "{% for tool in tools %}{{ tool | tojson(ensure_ascii=False) }}\n{% endfor %}"
            "{{- " + repr(self.example) + " }}" + self.end + "{%- endif %}"
            "{%- for message in messages %}"
            "{%- if message.role in ['user', 'system'] %}"
            + self.user
            + "{{- message.content }}"
            + self.end
            + "{%- elif message.role == 'assistant' %}"
            + self.assistant
            + self.reasoning
            + "{{- message.content or '' }}"
            "{%- if message.tool_calls %}" + self.opens + "{%- for call in message.tool_calls %}"
            "{%- set call = call.function %}"
            "{%- if call.arguments is not mapping %}"
            "{{- raise_exception('arguments must be a mapping') }}{%- endif %}"
            + self.call
            + "{%- endfor %}"
            + self.closes
            + "{%- endif %}"
            + self.end
            + "{%- elif message.role == 'tool' %}"
            "{%- if loop.previtem is not defined or loop.previtem.role != 'tool' %}"
            + self.first_result
            + "{%- endif %}"
            + self.result
            + "{%- if loop.nextitem is not defined or loop.nextitem.role != 'tool' %}"
            + self.last_result
            + "{%- endif %}{%- endif %}{%- endfor %}"
            "{%- if add_generation_prompt %}" + self.assistant + self.prompt + "{%- endif %}"
        )


def _said(text: str) -> str:
    """Text that a template writes as it is."""
    return "{{- " + repr(text) + " }}"


def _each(pair: str) -> str:
    """Return the part of a template that writes `pair` for each argument."""
    return "{%- for key, value in call.arguments | items %}" + pair + "{%- endfor %}"


_JSON = "value if value is string else value | tojson(ensure_ascii=False)"
_PYTHON = (
    "value if value is string else value | tojson(ensure_ascii=False)"
    " if value is mapping or value is iterable else value | string"
)
_THINKS = (
    "{%- if message.reasoning_content %}"
    "{{- '<think>' + message.reasoning_content + '</think>' }}{%- endif %}"
)
_PROMPT = "{{- '</think>' if enable_thinking is defined and not enable_thinking else '<think>' }}"


def _pairs(suffix: str = "", space: str = "", behind: str = "") -> str:
    """Arguments as pairs of tags."""
    return _each(
        f"{{{{- '<arg_key{suffix}>' + key + '</arg_key{suffix}>{space}<arg_value{suffix}>' }}}}"
        f"{{{{- {_JSON} }}}}{{{{- '</arg_value{suffix}>{behind}' }}}}"
    )


_CHATML = {
    "user": _said("<|im_start|>user\n"),
    "assistant": _said("<|im_start|>assistant\n"),
    "end": _said("<|im_end|>\n"),
    "first_result": _said("<|im_start|>user"),
    "result": "{{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}",
    "last_result": _said("<|im_end|>\n"),
}
_BARS = {
    "user": _said("<|user|>"),
    "assistant": _said("<|assistant|>"),
    "end": "",
    "first_result": _said("<|observation|>"),
    "result": "{{- '<tool_response>' + message.content + '</tool_response>' }}",
    "reasoning": _THINKS,
    "prompt": _PROMPT,
}
_DEEPSEEK = {
    "user": _said("<｜User｜>"),
    "assistant": _said("<｜Assistant｜>"),
    "end": "",
    "result": "{{- '<tool_result>' + message.content + '</tool_result>' }}",
    "reasoning": _THINKS,
    "prompt": _PROMPT,
}


def _xml(padding: str) -> str:
    """A call of `<function=..>`."""
    return (
        "{{- '<function=' + call.name + '>\n' }}"
        + _each(
            f"{{{{- '<parameter=' + key + '>{padding}' }}}}{{{{- {_PYTHON} }}}}"
            f"{{{{- '{padding}</parameter>\n' }}}}"
        )
        + _said("</function>\n")
    )


def _invokes(tag: str = "", typed: bool = False) -> str:
    """A call of `<invoke name="..">`."""
    kind = " string=\"' ~ (value is string) | lower ~ '\"" if typed else ""
    return (
        f"{{{{- '<{tag}invoke name=\"' + call.name + '\">\n' }}}}"
        + _each(
            f"{{{{- '<{tag}parameter name=\"' ~ key ~ '\"{kind}>' }}}}{{{{- {_JSON} }}}}"
            f"{{{{- '</{tag}parameter>\n' }}}}"
        )
        + _said(f"</{tag}invoke>")
    )


_STYLES = {
    "qwen_xml": _Style(
        **_CHATML,
        example="<tool_call>\n<function=name>\n<parameter=key>\nvalue\n</parameter>\n</function>",
        call=_said("\n<tool_call>\n") + _xml("\n") + _said("</tool_call>"),
    ),
    "mimo": _Style(
        **_CHATML,
        example="<tool_call>\n<function=name>\n<parameter=key>value</parameter>\n</function>",
        call=_said("\n<tool_call>\n") + _xml("") + _said("</tool_call>"),
        reasoning=_THINKS,
    ),
    "seed_oss": _Style(
        user=_said("<seed:bos>user\n"),
        assistant=_said("<seed:bos>assistant\n"),
        end=_said("<seed:eos>"),
        example="<seed:tool_call>\n<function=name>\n<parameter=key>value</parameter>",
        call=_said("\n<seed:tool_call>\n") + _xml("") + _said("</seed:tool_call>"),
        result="{{- '<seed:bos>tool\n' + message.content + '<seed:eos>' }}",
        reasoning="{%- if message.reasoning_content %}{{- '<seed:think>' + "
        "message.reasoning_content + '</seed:think>\n' }}{%- endif %}",
    ),
    "glm": _Style(
        **_BARS,
        example="<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>",
        call="{{- '<tool_call>' + call.name }}" + _pairs() + _said("</tool_call>"),
    ),
    "hy_v3": _Style(
        **_BARS,
        example="<tool_calls>, <tool_call>, <tool_sep>, <arg_key>, <arg_value>",
        opens=_said("<tool_calls>\n"),
        call="{{- '<tool_call>' + call.name + '<tool_sep>\n' }}"
        + _pairs("", "\n", "\n")
        + _said("</tool_call>\n"),
        closes=_said("</tool_calls>"),
    ),
    "deepseek_dsml": _Style(
        **_DEEPSEEK,
        example='<｜DSML｜tool_calls>\n<｜DSML｜invoke name="name">',
        opens=_said("\n\n<｜DSML｜tool_calls>\n"),
        call=_invokes("｜DSML｜", typed=True) + _said("\n"),
        closes=_said("</｜DSML｜tool_calls>"),
    ),
    "minimax_m2": _Style(
        user=_said("]~b]user\n"),
        assistant=_said("]~b]ai\n"),
        end=_said("[e~[\n"),
        example='<minimax:tool_call>\n<invoke name="name">\n<parameter name="key">value',
        opens=_said("\n<minimax:tool_call>\n"),
        call=_invokes() + _said("\n"),
        closes=_said("</minimax:tool_call>"),
        first_result=_said("]~b]tool"),
        result="{{- '\n<response>' + message.content + '</response>' }}",
        last_result=_said("[e~[\n"),
        reasoning=_THINKS,
        prompt=_said("<think>\n"),
    ),
    "minimax_m3": _Style(
        user=_said("]~b]user\n"),
        assistant=_said("]~b]ai\n"),
        end=_said("[e~[\n"),
        example=']<]minimax[>[<invoke name="name">',
        opens="{%- macro elements(value) %}{%- if value is mapping %}"
        "{%- for key, each in value | items if each is not none %}"
        "{{- ']<]minimax[>[<' + key + '>' + elements(each) + ']<]minimax[>[</' + key + '>' }}"
        "{%- endfor %}{%- elif value is string %}{{- value }}"
        "{%- elif value is iterable %}{%- for each in value %}"
        "{{- ']<]minimax[>[<item>' + elements(each) + ']<]minimax[>[</item>' }}{%- endfor %}"
        "{%- elif value is not none %}{{- value | tojson }}{%- endif %}{%- endmacro %}"
        + _said("]<]minimax[>[<tool_call>\n"),
        call="{{- ']<]minimax[>[<invoke name=\"' + call.name + '\">' }}"
        "{{- elements(call.arguments) }}" + _said("]<]minimax[>[</invoke>\n"),
        closes=_said("]<]minimax[>[</tool_call>"),
        first_result=_said("]~b]tool"),
        result="{{- '\n<response>' + message.content + '</response>' }}",
        last_result=_said("[e~[\n"),
        reasoning="{{- ('<mm:think>' + message.reasoning_content if message.reasoning_content "
        "else '') + '</mm:think>' }}",
    ),
    "dots": _Style(
        user=_said("<|userprompt|>"),
        assistant=_said("<|response|>"),
        end=_said("<|endofresponse|>"),
        example='<dots_function_call>\n<invoke name="name">',
        opens=_said("<dots_function_call>\n"),
        call=_invokes() + _said("\n"),
        closes=_said("</dots_function_call>"),
        result="{{- '<tool_response>' + message.content + '</tool_response>' }}",
    ),
    "step3": _Style(
        user=_said("<|BOT|>user\n"),
        assistant=_said("<|BOT|>assistant\n"),
        end=_said("<|EOT|>"),
        example='<steptml:invoke name="name"><steptml:parameter name="key">value',
        opens=_said("<｜tool_calls_begin｜>\n"),
        call=_said("<｜tool_call_begin｜>function<｜tool_sep｜>")
        + _invokes("steptml:")
        + _said("<｜tool_call_end｜>\n"),
        closes=_said("<｜tool_calls_end｜>"),
        result="{{- '<|BOT|>tool\n' + message.content + '<|EOT|>' }}",
    ),
    "minicpm5": _Style(
        **_CHATML,
        example='<function name="name"><param name="key">value</param></function>',
        call="{%- if not loop.first %}{{- '\n' }}{%- endif %}"
        "{{- '<function name=\"' + call.name + '\">' }}"
        + _each(
            "{{- '<param name=\"' + key + '\">' }}"
            "{%- if value is string and ('<' in value or '&' in value or '\n' in value) %}"
            "{{- '<![CDATA[' + value + ']]>' }}{%- else %}{{- " + _PYTHON + " }}{%- endif %}"
            "{{- '</param>' }}"
        )
        + _said("</function>"),
        reasoning=_THINKS,
    ),
}
TEMPLATES: dict[str, str] = {name: style.source() for name, style in _STYLES.items()}

# The same families, in whose templates the white space or marks differ.
OTHER_TEMPLATES: dict[str, tuple[str, str]] = {
    "glm, in lines": (
        "glm",
        _Style(
            **_BARS,
            example="<tool_call>name\n<arg_key>key</arg_key>\n<arg_value>value</arg_value>",
            call="{{- '\n<tool_call>' + call.name + '\n' }}"
            + _pairs("", "\n", "\n")
            + _said("</tool_call>"),
        ).source(),
    ),
    "glm, as ling writes it": (
        "glm",
        _Style(
            **_BARS,
            example="<tool_call>name\n<arg_key>key</arg_key>\n<arg_value>value</arg_value>",
            call="{{- '\n<tool_call>' + call.name + '\n' }}"
            + _pairs("", "\n")
            + _said("\n</tool_call>"),
        ).source(),
    ),
    "hy_v3, with a suffix": (
        "hy_v3",
        _Style(
            **_BARS | {"prompt": "{{- '<think{}></think{}>'.format(':abc12', ':abc12') }}"},
            example="<tool_calls:abc12>, <tool_call:abc12>, <tool_sep:abc12>, <arg_key:abc12>",
            opens=_said("<tool_calls:abc12>\n"),
            call="{{- '<tool_call:abc12>' + call.name + '<tool_sep:abc12>\n' }}"
            + _pairs(":abc12", "\n", "\n")
            + _said("</tool_call:abc12>\n"),
            closes=_said("</tool_calls:abc12>"),
        ).source(),
    ),
    "deepseek_dsml, the third version": (
        "deepseek_dsml",
        _Style(
            **_DEEPSEEK,
            example='<｜DSML｜function_calls>\n<｜DSML｜invoke name="name">',
            opens=_said("\n\n<｜DSML｜function_calls>\n"),
            call=_invokes("｜DSML｜", typed=True) + _said("\n"),
            closes=_said("</｜DSML｜function_calls>"),
        ).source(),
    ),
    "deepseek_dsml, an empty line for no arguments": (
        "deepseek_dsml",
        _Style(
            **_DEEPSEEK,
            example='<｜DSML｜tool_calls>\n<｜DSML｜invoke name="name">',
            opens=_said("\n\n<｜DSML｜tool_calls>\n"),
            call=_invokes("｜DSML｜", typed=True).replace(
                "{%- endfor %}", "{%- else %}{{- '\n' }}{%- endfor %}"
            )
            + _said("\n"),
            closes=_said("</｜DSML｜tool_calls>"),
        ).source(),
    ),
    "deepseek_dsml, with spaces": (
        "deepseek_dsml",
        _Style(
            **_DEEPSEEK,
            example='<｜DSML｜ calls>\n<｜DSML｜ invoke name="name">',
            opens=_said("\n\n<｜DSML｜ calls>\n"),
            call=_invokes("｜DSML｜ ", typed=True) + _said("\n"),
            closes=_said("</｜DSML｜ calls>"),
        ).source(),
    ),
    "qwen_xml, without lines between calls": (
        "qwen_xml",
        _Style(
            **_CHATML,
            example="<tool_call>\n<function=name>\n<parameter=key>\nvalue\n</parameter>\n",
            call=_said("<tool_call>\n") + _xml("\n") + _said("</tool_call>"),
            reasoning=_THINKS,
            prompt=_said("<think>\n"),
        ).source(),
    ),
}
