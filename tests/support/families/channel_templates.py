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

TEMPLATES: dict[str, str] = {"harmony": _HARMONY}
