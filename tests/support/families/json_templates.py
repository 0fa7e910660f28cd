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

TEMPLATES: dict[str, str] = {
    "kimi_k2": _KIMI_K2,
}
