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

_MUSE_GLIMMER = """\
{{- "<|start|>system<|message|>You are a model.\\n\\n" }}
{%- if tools %}
    {{- 'Call functions by "<atem:function_calls>":\\n' }}
    {%- for tool in tools %}{{- (tool.function | tojson) + "\\n" }}{%- endfor %}
{%- endif %}
{{- '# Valid recipients: "self", "user".<|eot|>' }}
{%- for message in messages %}
    {%- if message.role == "tool" %}
        {{- "<|start|>tool<|message|><tool_output>\\n" + message.content + "\\n</tool_output>" }}
        {{- "<|eot|>" }}
    {%- elif message.role == "assistant" %}
        {%- if message.reasoning_content %}
            {{- "<|start|>assistant to=self<|message|>" + message.reasoning_content + "<|eom|>" }}
        {%- endif %}
        {%- for call in message.tool_calls or [] %}
            {{- "<|start|>assistant to=" + call.function.name + "<|message|>" }}
            {{- '<atem:function_calls>\\n<atem:invoke name="' + call.function.name + '">\\n' }}
            {%- for key, value in call.function.arguments.items() %}
                {{- '<atem:parameter name="' + key + '">' }}
                {{- (value if value is string else value | tojson) + "</atem:parameter>\\n" }}
            {%- endfor %}
            {{- "</atem:invoke>\\n</atem:function_calls>" }}
            {{- "<|eot|>" if loop.last else "<|eom|>" }}
        {%- else %}
            {{- "<|start|>assistant to=user<|message|>" + message.content + "<|eot|>" }}
        {%- endfor %}
    {%- else %}
        {{- "<|start|>" + message.role + "<|message|>" + message.content + "<|eot|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- "<|start|>assistant" }}{%- endif %}
"""

_SOLAR_OPEN = """\
{%- if tools %}
    {{- "<|begin|>system<|content|>Call by <|tool_call:begin|>id<|tool_call:name|>..\\n" }}
    {{- (tools | tojson) + "<|end|>" }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == "tool" %}
        {{- "<|begin|>tool<|tool_response|><|tool_response:begin|>" + message.tool_call_id }}
        {{- "<|tool_response:result|>" + message.content + "<|tool_response:end|><|end|>" }}
    {%- elif message.role == "assistant" %}
        {%- if message.reasoning %}
            {{- "<|begin|>assistant<|think|>" + message.reasoning + "<|end|>" }}
        {%- endif %}
        {%- if message.tool_calls %}
            {{- "<|begin|>assistant<|tool_calls|>" }}
            {%- for call in message.tool_calls %}
                {{- "<|tool_call:begin|>" + call.id + "<|tool_call:name|>" + call.function.name }}
                {{- "<|tool_call:args|>" + (call.function.arguments | tojson) }}
                {{- "<|tool_call:end|>" }}
            {%- endfor %}
            {{- "<|calls|>" }}
        {%- else %}
            {{- "<|begin|>assistant<|content|>" + message.content + "<|end|>" }}
        {%- endif %}
    {%- else %}
        {{- "<|begin|>" + message.role + "<|content|>" + message.content + "<|end|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {%- if reasoning_effort is defined and reasoning_effort == "low" %}
        {{- "<|begin|>assistant<|think|><|end|>" }}
    {%- endif %}
    {{- "<|begin|>assistant" }}
{%- endif %}
"""

TEMPLATES: dict[str, str] = {
    "harmony": _HARMONY,
    "kimi_k3": _KIMI_K3,
    "muse_glimmer": _MUSE_GLIMMER,
    "solar_open": _SOLAR_OPEN,
}
