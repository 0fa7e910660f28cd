"""Chat templates in the style of families whose whole answer is channels."""

from __future__ import annotations

_HARMONY = """\
{{- "<|start|>system<|message|>You are a model.\\n\\nReasoning: " + (reasoning_effort or "medium")
    if reasoning_effort is defined else "<|start|>system<|message|>You are a model." }}
{{- "\\n\\n# Valid channels: analysis, commentary, final.<|end|>" }}
{%- set system = messages[0].content if messages[0].role in ("system", "developer") else "" %}
{%- if system or tools %}
    {{- "<|start|>developer<|message|>" + system }}
    {%- for tool in tools or [] %}
        {{- "\\ntype " + tool.function.name + " = (_: " + (tool.function.parameters | tojson)
            + ") => any;" }}
    {%- endfor %}
    {{- "<|end|>" }}
{%- endif %}
{%- set last = namespace(name="") %}
{%- for message in messages %}
    {%- if message.role == "user" %}
        {{- "<|start|>user<|message|>" + message.content + "<|end|>" }}
    {%- elif message.role == "tool" %}
        {{- "<|start|>functions." + last.name + " to=assistant<|channel|>commentary<|message|>"
            + (message.content | tojson) + "<|end|>" }}
    {%- elif message.role == "assistant" and message.tool_calls %}
        {%- set call = message.tool_calls[0].function %}
        {%- set last.name = call.name %}
        {%- if message.thinking %}
            {{- "<|start|>assistant<|channel|>analysis<|message|>" + message.thinking + "<|end|>" }}
        {%- endif %}
        {{- "<|start|>assistant to=functions." + call.name + "<|channel|>commentary json<|message|>"
            + (call.arguments | tojson) + "<|call|>" }}
    {%- elif message.role == "assistant" %}
        {{- "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|end|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- "<|start|>assistant" }}{%- endif %}
"""

_KIMI_K3 = """\
{%- macro attribute(value) -%}
    {{- value | replace("&", "&amp;") | replace('"', "&quot;") -}}
{%- endmacro %}
{%- macro type(value) -%}
    {%- if value is boolean %}boolean{% elif value is none %}null{% elif value is number %}number
    {%- elif value is string %}string{% elif value is mapping %}object{% else %}array{% endif %}
{%- endmacro %}
{%- set thinking = thinking if thinking is defined else true %}
{%- if tools %}
    {{- '<|open|>message role="system" type="tool-declare"<|sep|>' + (tools | tojson) }}
    {{- "<|close|>message<|sep|><|end_of_msg|>" }}
{%- endif %}
{%- for message in messages %}
    {{- '<|open|>message role="' + message.role + '"<|sep|>' }}
    {%- if message.role == "assistant" %}
        {%- if thinking %}
            {{- "<|open|>think<|sep|>" + (message.reasoning_content or "") }}
            {{- "<|close|>think<|sep|>" }}
        {%- endif %}
        {{- "<|open|>response<|sep|>" + (message.content or "") + "<|close|>response<|sep|>" }}
        {%- if message.tool_calls %}
            {{- "<|open|>tools<|sep|>" }}
            {%- for call in message.tool_calls %}
                {{- '<|open|>call tool="' + attribute(call.function.name) + '" index="' }}
                {{- loop.index ~ '"<|sep|>' }}
                {%- for key, value in call.function.arguments.items() %}
                    {{- '<|open|>argument key="' + attribute(key) + '" type="' + type(value) }}
                    {{- '"<|sep|>' + (value if value is string else value | tojson) }}
                    {{- "<|close|>argument<|sep|>" }}
                {%- endfor %}
                {{- "<|close|>call<|sep|>" }}
            {%- endfor %}
            {{- "<|close|>tools<|sep|>" }}
        {%- endif %}
    {%- else %}
        {{- message.content }}
    {%- endif %}
    {{- "<|close|>message<|sep|><|end_of_msg|>" }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|open|>message role="assistant"<|sep|>' }}
    {{- "<|open|>think<|sep|>" if thinking else "<|open|>response<|sep|>" }}
{%- endif %}
"""

TEMPLATES: dict[str, str] = {"harmony": _HARMONY, "kimi_k3": _KIMI_K3}
