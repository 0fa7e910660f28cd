"""Chat templates in the styles of fifteen model families, written for these tests.

Each uses what its family's templates use: whitespace control, loops with `loop.first`, namespaces,
macros, `break`, tool schemas as JSON, dates, `generation` blocks, exceptions.
"""

STYLES: dict[str, str] = {
    "chatml": """{% for m in messages %}<|im_start|>{{ m['role'] }}
{{ m['content'] }}<|im_end|>
{% endfor %}
{% if add_generation_prompt %}
<|im_start|>assistant
{% endif %}""",
    "llama-2": """{%- if messages[0].role == 'system' -%}
  {%- set system = '<<SYS>>\\n' ~ messages[0].content ~ '\\n<</SYS>>\\n\\n' -%}
  {%- set rest = messages[1:] -%}
{%- else -%}
  {%- set system = '' -%}{%- set rest = messages -%}
{%- endif -%}
{%- for m in rest -%}
  {%- if (m.role == 'user') != (loop.index0 % 2 == 0) -%}
    {{- raise_exception('Roles must alternate user/assistant/user/assistant') -}}
  {%- endif -%}
  {%- set text = system ~ m.content if loop.first else m.content -%}
  {%- if m.role == 'user' -%}
    {{- bos_token ~ '[INST] ' ~ text | trim ~ ' [/INST]' -}}
  {%- else -%}
    {{- ' ' ~ text | trim ~ ' ' ~ eos_token -}}
  {%- endif -%}
{%- endfor -%}""",
    "llama-3": """{%- set ns = namespace(first=true) %}
{%- if date_string is not defined %}{% set date_string = '26 Jul 2024' %}{% endif %}
{%- for message in messages %}
    {%- set block = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' %}
    {%- if message['role'] == 'system' %}
        {%- set block = block + 'Today: ' + date_string + '\\n' %}
    {%- endif %}
    {{- (bos_token if ns.first else '') + block + message['content'] | trim + '<|eot_id|>' }}
    {%- set ns.first = false %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}""",
    "mistral": """{{ bos_token }}
{%- if tools %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif -%}
{%- set system = messages | selectattr('role', 'equalto', 'system') | list -%}
{%- for m in messages if m.role != 'system' -%}
{%- if m.role == 'user' -%}
[INST] {% if loop.last and system %}{{ system[0].content }}

{% endif %}{{ m.content }}[/INST]
{%- elif m.tool_calls is defined -%}
[TOOL_CALLS] {{ m.tool_calls | map(attribute='function') | list | tojson }}{{ eos_token }}
{%- else -%}
 {{ m.content }}{{ eos_token }}
{%- endif -%}
{%- endfor -%}""",
    "gemma": """{{ bos_token }}{% for message in messages -%}
{%- if message.role == 'system' -%}{{ raise_exception('System role not supported') }}{%- endif -%}
{%- set role = 'model' if message.role == 'assistant' else message.role -%}
<start_of_turn>{{ role }}
{{ message.content | trim }}<end_of_turn>
{% endfor -%}
{% if add_generation_prompt %}<start_of_turn>model
{% endif %}""",
    "phi": """{% for message in messages %}{% if message['role'] in ['system', 'user'] %}
{{ '<|' + message['role'] + '|>\\n' + message['content'] + '<|end|>\\n' }}
{% else %}
{{ '<|assistant|>\\n' + message['content'] + '<|end|>\\n' }}
{% endif %}{% endfor %}
{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}""",
    "zephyr": """{% for message in messages %}
{% if message['role'] == 'user' %}
{{ '<|user|>\\n' + message['content'] + eos_token }}
{% elif message['role'] == 'system' %}
{{ '<|system|>\\n' + message['content'] + eos_token }}
{% elif message['role'] == 'assistant' %}
{{ '<|assistant|>\\n'  + message['content'] + eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}""",
    "command-r": """{%- macro turn(role, text) -%}
<|START_OF_TURN_TOKEN|><|{{ role | upper }}_TOKEN|>{{ text.strip() }}<|END_OF_TURN_TOKEN|>
{%- endmacro -%}
{{ bos_token }}
{%- if documents %}{% for d in documents %}Document: {{ d.title }}{% endfor %}{% endif -%}
{%- for m in messages -%}
{{ turn('chatbot' if m.role == 'assistant' else m.role, m.content) }}
{%- endfor -%}
{%- if add_generation_prompt %}<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>{% endif -%}""",
    "deepseek": """{%- if not thinking is defined %}{% set thinking = false %}{% endif %}
{%- set ns = namespace(system='', is_last_user=false) %}
{%- for m in messages if m.role == 'system' %}
{%- set ns.system = ns.system + ('\\n\\n' if ns.system else '') + m.content %}
{%- endfor %}
{{- bos_token ~ ns.system }}
{%- for m in messages %}
{%- if m.role == 'user' %}{% set ns.is_last_user = true %}{{ '<｜User｜>' ~ m.content }}{% endif %}
{%- if m.role == 'assistant' %}
{%- set parts = m.content.split('</think>') %}
{%- set ns.is_last_user = false %}
{{- '<｜Assistant｜>' ~ parts[-1] ~ '<｜end▁of▁sentence｜>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt and ns.is_last_user %}
{{- '<｜Assistant｜>' ~ ('<think>' if thinking else '</think>') }}
{%- endif %}""",
    "qwen-tools": """{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
{{- "# Tools\\n<tools>" }}
{%- for tool in tools %}
{{- "\\n" }}
{{- tool | tojson }}
{%- endfor %}
{{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == "user" or (message.role == "system" and not loop.first) %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- elif message.role == "assistant" %}
{{- '<|im_start|>assistant' }}
{%- if message.reasoning_content is string %}
{{- '\\n<think>\\n' + message.reasoning_content.strip('\\n') + '\\n</think>\\n' }}
{%- endif %}
{%- if message.content %}{{- '\\n' + message.content }}{%- endif %}
{%- for call in message.tool_calls or [] %}
{%- if call.function is defined %}{%- set call = call.function %}{%- endif %}
{{- '\\n<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
{{- call.arguments | tojson }}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif message.role == "tool" %}
{%- if loop.first or messages[loop.index0 - 1].role != "tool" %}
{{- '<|im_start|>user' }}
{%- endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != "tool" %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}
{{- '<think>\\n\\n</think>\\n\\n' }}
{%- endif %}
{%- endif %}""",
    "hermes": """{%- macro described(spec) -%}
{%- if spec.type == 'object' -%}{ {% for k, v in spec.properties.items() -%}
{{ k }}: {{ described(v) }}{% if not loop.last %}, {% endif %}{%- endfor %} }
{%- elif spec.type == 'array' -%}list[{{ described(spec['items']) }}]
{%- else -%}{{ spec.type }}{%- endif -%}
{%- endmacro -%}
{{ bos_token }}
{%- if tools %}<|im_start|>system
You may call: {% for t in tools %}{{ t.function.name }}({{ described(t.function.parameters) }})
{{ t | tojson(indent=2) }}
{% endfor %}<|im_end|>
{% endif -%}
{%- for m in messages -%}
{% if m.role == 'assistant' %}{% generation %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endgeneration %}{% else %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endif %}
{%- endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif -%}""",
    "vicuna": """{%- set ns = namespace(turns=0) -%}
A chat between a curious user and an assistant.
{%- for m in messages -%}
{%- if m.role == 'system' %}{% continue %}{% endif -%}
{%- set ns.turns = ns.turns + 1 -%}
{{ ' USER: ' if m.role == 'user' else ' ASSISTANT: ' }}{{ m.content }}
{%- if m.role == 'assistant' %}{{ eos_token }}{% endif -%}
{%- if ns.turns >= 40 %}{% break %}{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt %} ASSISTANT:{% endif -%}""",
    "alpaca": """{% for m in messages %}
{%- if m.role == 'system' -%}
{{ m.content }}

{% elif m.role == 'user' -%}
### Instruction:
{{ m.content }}

{% else -%}
### Response:
{{ m.content }}

{% endif -%}
{% endfor -%}
{% if add_generation_prompt %}
### Response:
{% endif %}""",
    "falcon": """{% for message in messages %}{% if not loop.first %}{{ '\\n' }}{% endif %}
{{- message['role'].capitalize() + ': ' + message['content'].strip() | replace('\\n\\n', '\\n') }}
{%- if message.name is defined %} ({{ message.name }}){% endif %}
{%- endfor %}{% if add_generation_prompt %}{{ '\\nAssistant:' }}{% endif %}""",
    "granite": """{%- set defaults = dict(system='Knowledge cutoff: 2024.', style='plain') -%}
{%- if messages[0].role == 'system' -%}
{%- set text, loop_messages = messages[0].content, messages[1:] -%}
{%- else -%}
{%- set text, loop_messages = defaults.system ~ ' Year: ' ~ strftime_now('%Y'), messages -%}
{%- endif -%}
<|start_of_role|>system<|end_of_role|>{{ text }}<|end_of_text|>
{% for m in loop_messages -%}
<|start_of_role|>{{ m.role }}<|end_of_role|>{{ m.content }}
{%- if not (loop.last and m.role == 'assistant') %}<|end_of_text|>
{% endif -%}
{%- endfor -%}
{% if add_generation_prompt %}<|start_of_role|>assistant
{%- if controls %} {{ controls | tojson(sort_keys=true) }}{% endif %}<|end_of_role|>{% endif %}""",
}
