"""Chat templates in the style of families whose calls have JSON as arguments."""

from __future__ import annotations

_KIMI_K2 = """\
{%- if tools -%}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>{%- endif -%}
{%- set ns = namespace(number=0) -%}
{%- for message in messages -%}
  {%- if message.role == 'assistant' -%}
    <|im_assistant|>assistant<|im_middle|><think>{{ message.reasoning_content or '' -}}
    </think>{{ message.content or '' }}
    {%- if message.tool_calls -%}
      <|tool_calls_section_begin|>
      {%- for call in message.tool_calls -%}
        <|tool_call_begin|>functions.{{ call.function.name }}:{{ ns.number -}}
        <|tool_call_argument_begin|>{{ call.function.arguments | tojson }}<|tool_call_end|>
        {%- set ns.number = ns.number + 1 -%}
      {%- endfor -%}
      <|tool_calls_section_end|>
    {%- endif -%}
  {%- elif message.role == 'tool' -%}
    <|im_system|>tool<|im_middle|>## Return of {{ message.tool_call_id }}
{{ message.content }}
  {%- else -%}
    <|im_user|>{{ message.role }}<|im_middle|>{{ message.content }}
  {%- endif -%}
  <|im_end|>
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_assistant|>assistant<|im_middle|>{%- endif -%}
"""


def _template(
    calls: tuple[str, str, str, str],
    *,
    turns: tuple[str, str, str] = ("<|im_start|>%s\n", "<|im_end|>\n", "tool"),
    tools: str = "<tools>{{ tools | tojson }}</tools>",
    says: str = "{{ message.content or '' }}",
    begun: str = "",
) -> str:
    """A template.

    `calls`: what stands before all of a message's calls, a call (of `f`), what stands between two
    and behind all. `turns`: the begin of a turn with its role, its end, the role of results.
    `begun`: what the prompt ends with.
    """
    before, call, between, behind = calls
    begin, end, result = turns

    def turn(role: str) -> str:
        return "{{ " + repr(begin % role) + " }}" if "%s" in begin else "{{ " + repr(begin) + " }}"

    def text(literal: str) -> str:
        return "{{ " + repr(literal) + " }}" if literal else ""

    return (
        "{%- if tools -%}" + turn("system") + tools + text(end) + "{%- endif -%}"
        "{%- for message in messages -%}{%- if message.role == 'tool' -%}"
        + turn(result)
        + "{{ message.content }}{%- elif message.role == 'assistant' -%}"
        + turn("assistant")
        + says
        + "{%- if message.tool_calls -%}"
        + text(before)
        + "{%- for one in message.tool_calls -%}{%- set f = one.function -%}"
        + call
        + "{%- if not loop.last -%}"
        + text(between)
        + "{%- endif -%}{%- endfor -%}"
        + text(behind)
        + "{%- endif -%}{%- else -%}"
        + turn("user")
        + "{{ message.content }}{%- endif -%}"
        + text(end)
        + "{%- endfor -%}{%- if add_generation_prompt -%}"
        + turn("assistant")
        + text(begun)
        + "{%- endif -%}"
    )


_OBJECT = """{{ '{"name": "' + f.name + '", "arguments": ' + f.arguments | tojson + '}' }}"""
_LLAMA = ("<|start_header_id|>%s<|end_header_id|>\n\n", "<|eot_id|>", "ipython")
_MISTRAL = ("[INST]", "[/INST]", "tool")
_MISTRAL_TOOLS = "[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]"
_DEEPSEEK = ("<｜%s｜>", "<｜end▁of▁sentence｜>", "tool")
_COHERE = ("<|START_OF_TURN_TOKEN|><|%s_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "SYSTEM")
_GIGACHAT = ("%s<|role_sep|>\n", "<|message_sep|>\n\n", "function result")

_GLM4 = """[gMASK]<sop>{%- if tools %}<|system|>
# Functions
{%- for tool in tools %}

## {{ tool | tojson }}
{%- endfor %}{% endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}<|observation|>
{{ m.content }}
{%- elif m.tool_calls %}
{%- for call in m.tool_calls %}<|assistant|>{{ call.function.name }}
{{ call.function.arguments | tojson }}{% endfor %}
{%- elif m.role == 'assistant' %}<|assistant|>{{ m.content }}
{%- else %}<|{{ m.role }}|>
{{ m.content }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>
{% endif %}"""

TEMPLATES: dict[str, str] = {
    "glm4": _GLM4,
    "kimi_k2": _KIMI_K2,
    "hermes": _template(
        ("<tool_call>\n", _OBJECT, "\n</tool_call>\n<tool_call>\n", "\n</tool_call>")
    ),
    "deepseek_v3": _template(
        (
            "<｜tool▁calls▁begin｜>",
            "{{ '<｜tool▁call▁begin｜>' + one.type + '<｜tool▁sep｜>' + f.name + '\n```json\n' "
            "+ f.arguments | tojson + '\n```<｜tool▁call▁end｜>' }}",
            "\n",
            "<｜tool▁calls▁end｜>",
        ),
        turns=_DEEPSEEK,
        begun="<think>\n",
    ),
    "deepseek_v31": _template(
        (
            "<｜tool▁calls▁begin｜>",
            "{{ '<｜tool▁call▁begin｜>' + f.name + '<｜tool▁sep｜>' + f.arguments | tojson "
            "+ '<｜tool▁call▁end｜>' }}",
            "",
            "<｜tool▁calls▁end｜>",
        ),
        turns=_DEEPSEEK,
        begun="</think>",
    ),
    "mistral": _template(
        (
            "[TOOL_CALLS][",
            """{{ (f | tojson)[:-1] + ', "id": "' + one.id + '"}' }}""",
            ", ",
            "]",
        ),
        turns=_MISTRAL,
        tools=_MISTRAL_TOOLS,
    ),
    "mistral_named": _template(
        (
            "",
            "{{ '[TOOL_CALLS]' + f.name + '[CALL_ID]' + one.id + '[ARGS]' "
            "+ f.arguments | tojson }}",
            "",
            "",
        ),
        turns=_MISTRAL,
        tools=_MISTRAL_TOOLS,
    ),
    "cohere": _template(
        (
            "<|START_ACTION|>[\n    ",
            """{{ '{"tool_call_id": "' + loop.index0 | string + '", "tool_name": "' + f.name """
            """+ '", "parameters": ' + f.arguments | tojson + '}' }}""",
            ",\n    ",
            "\n]<|END_ACTION|>",
        ),
        turns=_COHERE,
        says="<|START_THINKING|>{{ message.reasoning_content }}<|END_THINKING|>"
        "{%- if message.content -%}<|START_RESPONSE|>{{ message.content }}<|END_RESPONSE|>"
        "{%- endif -%}",
        begun="<|START_THINKING|><|END_THINKING|>",
    ),
    "command_r": _template(
        (
            "Action:\n```json\n[\n    ",
            """{{ '{\n        "tool_name": "' + f.name + '",\n        "parameters": ' """
            """+ f.arguments | tojson + '\n    }' }}""",
            ",\n    ",
            "\n]```",
        ),
        turns=_COHERE,
    ),
    "apertus": _template(
        (
            "<|tools_prefix|>[",
            """{{ '{"' + f.name + '": ' + f.arguments | tojson + '}' }}""",
            ", ",
            "]<|tools_suffix|>",
        ),
        turns=("<|%s_start|>", "", "tool"),
        says="<|inner_prefix|>{{ message.reasoning }}<|inner_suffix|>{{ message.content }}",
    ),
    "gigachat3": _template(("<|function_call|>", _OBJECT, "", ""), turns=_GIGACHAT),
    "k2_horizon": _template(
        (
            "<ifm|tool_calls>\n<ifm|tool_call>",
            _OBJECT,
            "</ifm|tool_call>\n<ifm|tool_call>",
            "</ifm|tool_call>\n</ifm|tool_calls>",
        )
    ),
    "longcat": _template(
        (
            "<longcat_tool_call>\n",
            _OBJECT,
            "\n</longcat_tool_call>\n<longcat_tool_call>\n",
            "\n</longcat_tool_call>",
        )
    ),
    "nemotron": _template(
        ("<TOOLCALL>[", _OBJECT, ", ", "]</TOOLCALL>"),
        turns=("<SPECIAL_11>%s\n", "\n", "tool"),
        tools="<AVAILABLE_TOOLS>{{ tools | tojson }}</AVAILABLE_TOOLS>",
        begun="<think>\n",
    ),
    "nemotron_mini": _template(
        ("<toolcall> ", _OBJECT, " </toolcall>\n<toolcall> ", " </toolcall>"),
        turns=("<extra_id_1>%s\n", "\n", "Tool"),
        tools="<tool> {{ tools | tojson }} </tool>",
    ),
    "internlm": _template(
        (
            "<|action_start|><|plugin|>\n",
            _OBJECT,
            "<|action_end|><|action_start|><|plugin|>\n",
            "<|action_end|>",
        ),
        tools="name=<|plugin|>\n{{ tools | tojson }}",
    ),
    "minimax_m1": _template(
        ("<tool_calls>\n", _OBJECT, "\n", "\n</tool_calls>"),
        turns=("<beginning_of_sentence>%s name=a\n", "<end_of_sentence>\n", "tool"),
    ),
    "tool_calls": _template(
        ("\n<tool_calls>[", _OBJECT, ", ", "]</tool_calls>"),
        turns=("<|%s|>\n", "\n<|end|>\n", "tool_result"),
        tools="Return a list of objects within <tool_call></tool_call> tags: <tool_calls>[..]"
        "</tool_calls>\n{{ tools | tojson }}",
    ),
    "phi4_mini": _template(
        ("<|tool_call|>[", _OBJECT, ", ", "]<|/tool_call|>"),
        turns=("<|%s|>", "<|end|>", "tool"),
        tools="<|tool|>{{ tools | tojson }}<|/tool|>",
    ),
    "functools": _template(
        ("functools[", _OBJECT, ", ", "]"),
        turns=_LLAMA,
        tools='Calls are a list after a word: functools[{"name": ..}]\n{{ tools | tojson }}',
    ),
    "granite": _template(
        ("<|tool_call|>[", _OBJECT, ", ", "]"),
        turns=("<|start_of_role|>%s<|end_of_role|>", "<|end_of_text|>\n", "tool_response"),
    ),
    "granite_20b_fc": _template(
        ("<function_call> ", _OBJECT, "<function_call> ", ""),
        turns=("%s: ", "<|endoftext|>", "FUNCTION"),
    ),
    "functionary_v3_1": _template(
        ("", "{{ '<function=' + f.name + '>' + f.arguments | tojson + '</function>' }}", "", ""),
        turns=_LLAMA,
    ),
    "functionary_v3_2": _template(
        ("", "{{ f.name + '\n' + f.arguments | tojson }}", ">>>", ""),
        turns=("<|start_header_id|>%s<|end_header_id|>\n\n>>>", "<|eot_id|>", "tool"),
        says="{%- if message.content -%}{{ 'all\n' + message.content + '>>>' }}{%- endif -%}",
        tools="Ask for input with '>>>all'.\n{{ tools | tojson }}",
    ),
    "xlam": _template(
        ("[", _OBJECT, ", ", "]"),
        turns=_LLAMA,
        tools='Call in one list: [{"name": "tool_call_name", "arguments": {"arg1": 1}}, ..]\n'
        "{{ tools | tojson }}",
    ),
    "falcon": _template(
        ("<tool_call>\n[\n  ", _OBJECT, ",\n  ", "\n]\n</tool_call>"),
        turns=("<|%s|>\n", "\n", "assistant"),
    ),
    "exaone4": _template(
        ("<tool_call>", _OBJECT, "</tool_call>\n<tool_call>", "</tool_call>"),
        turns=("[|%s|]\n", "[|endofturn|]\n", "tool"),
        begun="<think>\n\n</think>\n\n",
    ),
    "llama_json": _template(
        (
            "",
            """{{ '{"name": "' + f.name + '", "parameters": ' + f.arguments | tojson + '}' }}""",
            "; ",
            "",
        ),
        turns=_LLAMA,
    ),
}
