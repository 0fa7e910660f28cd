"""Chat templates in the style of families whose calls are as in Python, or have bare keys."""

from __future__ import annotations

_PYTHONIC = """\
{{- bos_token }}
{%- if tools %}
  {{- '<|start_header_id|>system<|end_header_id|>\\n\\nThese functions can be called: ' }}
  {{- tools | tojson }}
  {{- '\\nTo call some, answer with [func_name1(params_name1=params_value1), func_name2()]' }}
  {{- '<|eot_id|>' }}
{%- endif %}
{%- for message in messages %}
  {%- set role = 'ipython' if message.role == 'tool' else message.role %}
  {{- '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' }}
  {%- if message.tool_calls %}
    {{- '[' }}
    {%- for call in message.tool_calls %}
      {{- call.function.name + '(' }}
      {%- for key, value in call.function.arguments.items() %}
        {{- key + '=' }}{{ value | tojson }}{{ ', ' if not loop.last }}
      {%- endfor %}
      {{- ')' }}{{ ', ' if not loop.last }}
    {%- endfor %}
    {{- ']' }}
  {%- else %}
    {{- message.content }}
  {%- endif %}
  {{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
  {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

_LFM2 = """\
{{- bos_token }}
{%- macro value_of(value) %}
  {%- if value is string %}{{ "'" + value + "'" }}
  {%- elif value is mapping %}{{ value | tojson }}
  {%- else %}{{ value | string }}{% endif %}
{%- endmacro %}
{%- if tools %}
  {{- '<|im_start|>system\\nList of tools: [' }}
  {%- for tool in tools %}{{ tool | tojson }}{{ ', ' if not loop.last }}{% endfor %}
  {{- ']<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
  {{- '<|im_start|>' + message.role + '\\n' }}
  {%- if message.thinking %}{{ '<think>' + message.thinking + '</think>' }}{% endif %}
  {{- message.content }}
  {%- if message.tool_calls %}
    {{- '<|tool_call_start|>[' }}
    {%- for call in message.tool_calls %}
      {{- call.function.name + '(' }}
      {%- for key, value in call.function.arguments.items() %}
        {{- key + '=' + value_of(value) }}{{ ', ' if not loop.last }}
      {%- endfor %}
      {{- ')' }}{{ ', ' if not loop.last }}
    {%- endfor %}
    {{- ']<|tool_call_end|>' }}
  {%- endif %}
  {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""

_OLMO3 = """\
{{- bos_token }}
{{- '<|im_start|>system\\nYou help where you can.' }}
{%- if tools %} You may call these functions: <functions>{{ tools | tojson }}</functions>
{%- else %} There are no functions that you may call. <functions></functions>{% endif %}
{{- '<|im_end|>\\n' }}
{%- for message in messages %}
  {%- set role = 'environment' if message.role == 'tool' else message.role %}
  {{- '<|im_start|>' + role + '\\n' }}
  {%- if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}
  {{- message.content or '' }}
  {%- if message.tool_calls %}
    {{- '<function_calls>' }}
    {%- for call in message.tool_calls %}
      {{- call.function.name + '(' }}
      {%- for key, value in call.function.arguments.items() %}
        {{- key + '=' }}{{ value | tojson }}{{ ', ' if not loop.last }}
      {%- endfor %}
      {{- ')' }}{{ '\\n' if not loop.last }}
    {%- endfor %}
    {{- '</function_calls>' }}
  {%- endif %}
  {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>' }}{% endif %}
"""

# The marks of calls, of strings, of results and of declared tools, and what begins and ends turns.
_GEMMA = """\
{%- macro value_of(value) %}
  {%- if value is string %}{{ 'QUOTE' + value + 'QUOTE' }}
  {%- elif value is boolean %}{{ 'true' if value else 'false' }}
  {%- elif value is none %}{{ 'null' }}
  {%- elif value is mapping %}
    {{- '{' }}
    {%- for key, each in value | dictsort %}
      {{- key + ':' + value_of(each) }}{{ ',' if not loop.last }}
    {%- endfor %}
    {{- '}' }}
  {%- elif value is sequence %}
    {{- '[' }}
    {%- for each in value %}{{ value_of(each) }}{{ ',' if not loop.last }}{% endfor %}
    {{- ']' }}
  {%- else %}{{ value }}{% endif %}
{%- endmacro %}
{{- bos_token }}
{%- if tools %}
  {{- 'TURNsystem\\n' + ('<|think|>\\n' if enable_thinking else '') }}
  {%- for tool in tools %}
    {{- 'TOOLdeclaration:' + tool.function.name + value_of(tool.function.parameters) + 'LOOT' }}
  {%- endfor %}
  {{- 'OVER\\n' }}
{%- endif %}
{%- set ns = namespace(after_calls=false) %}
{%- for message in messages %}
  {%- if message.role == 'tool' %}
    {{- 'RESULTresponse:' + message.name + '{value:' + value_of(message.content) + '}TLUSER' }}
  {%- else %}
    {%- set role = 'model' if message.role == 'assistant' else message.role %}
    {%- if not (ns.after_calls and role == 'model') %}{{ 'TURN' + role + '\\n' }}{% endif %}
    {%- if message.reasoning_content %}
      {{- '<|channel>thought\\n' + message.reasoning_content + '<channel|>' }}
    {%- endif %}
    {{- message.content | trim }}
    {%- for call in message.tool_calls or () %}
      {{- 'CALLcall:' + call.function.name + value_of(call.function.arguments) + 'LLAC' }}
    {%- endfor %}
    {%- set ns.after_calls = message.tool_calls is defined and message.tool_calls %}
    {{- '' if ns.after_calls else 'OVER\\n' }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt and not ns.after_calls %}
  {{- 'TURNmodel\\n' + ('' if enable_thinking else '<|channel>thought\\n<channel|>') }}
{%- endif %}
"""


def _gemma(**marks: str) -> str:
    template = _GEMMA
    for word, mark in marks.items():
        template = template.replace(word, mark)
    return template


TEMPLATES: dict[str, str] = {
    "pythonic": _PYTHONIC,
    "lfm2": _LFM2,
    "olmo3": _OLMO3,
    "gemma4": _gemma(
        QUOTE='<|"|>',
        TURN="<|turn>",
        OVER="<turn|>",
        TOOL="<|tool>",
        LOOT="<tool|>",
        RESULT="<|tool_response>",
        TLUSER="<tool_response|>",
        CALL="<|tool_call>",
        LLAC="<tool_call|>",
    ),
    "functiongemma": _gemma(
        QUOTE="<escape>",
        TURN="<start_of_turn>",
        OVER="<end_of_turn>",
        TOOL="<start_function_declaration>",
        LOOT="<end_function_declaration>",
        RESULT="<start_function_response>",
        TLUSER="<end_function_response>",
        CALL="<start_function_call>",
        LLAC="<end_function_call>",
    )
    .replace("('' if enable_thinking else '<|channel>thought\\\\n<channel|>')", "''")
    .replace("<|channel>thought\\\\n", "")
    .replace("<channel|>", "")
    .replace("<start_of_turn>system", "<start_of_turn>developer"),
}
