"""Recorded texts that models write when they call tools, with the meaning of each.

The texts are in the form of each family: one is right and many are nearly right. Each record is an
answer to a request with the tools in `TOOLS`. `content` is the text that is left; where it comes in
several parts, they are joined.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from penstock_router.request import Tool

TOOLS: tuple[str, ...] = ("get_weather", "search", "now", "write_file", "add-up")
OFFERED = tuple(map(Tool, TOOLS))


class Recorded(NamedTuple):
    """One answer of a model of a family."""

    family: str
    text: str
    content: str
    # Each call's name and arguments; None: cut off, what there is of them is no JSON yet.
    calls: list[tuple[str, dict[str, Any] | None]]


def _text(family: str, text: str) -> Recorded:
    """Return a text without calls: all of it is content."""
    return Recorded(family, text, text, [])


_PARIS: tuple[str, dict[str, Any]] = ("get_weather", {"city": "Paris"})
_OSLO: tuple[str, dict[str, Any]] = ("get_weather", {"city": "Oslo"})
# Of a function that was not offered.
_LAUNCH: tuple[str, dict[str, Any]] = ("launch", {"city": "Paris"})
_NESTED: tuple[str, dict[str, Any]] = (
    "search",
    {"query": "a", "filter": {"tags": ["x", {"y": None}], "from": -1.5e3}, "deep": [[], {}]},
)
_NESTED_JSON = (
    '{"query": "a", "filter": {"tags": ["x", {"y": null}], "from": -1.5e3}, "deep": [[], {}]}'
)
_UNICODE: tuple[str, dict[str, Any]] = ("get_weather", {"city": "Zürich 東京 🌧", "x": "é\u2028😀"})
_UNICODE_JSON = '{"city": "Zürich 東京 🌧", "x": "\\u00e9\\u2028\\ud83d\\ude00"}'
_ESCAPED: tuple[str, dict[str, Any]] = (
    "write_file",
    {"path": 'C:\\dir\\"a"', "text": 'if (x) { print("}]") }\n\t</end>[/'},
)
_ESCAPED_JSON = r'{"path": "C:\\dir\\\"a\"", "text": "if (x) { print(\"}]\") }\n\t<\/end>[\/"}'

HERMES = [
    Recorded(
        "hermes",
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>',
        "",
        [_PARIS],
    ),
    Recorded(
        "hermes",
        'I will look at both.\n\n<tool_call>\n{"name": "get_weather", "arguments": {"city": '
        '"Paris"}}\n</tool_call>\n<tool_call>\n{"name": "get_weather", "arguments": {"city": '
        '"Oslo"}}\n</tool_call>',
        "I will look at both.",
        [_PARIS, _OSLO],
    ),
    Recorded("hermes", '<tool_call>\n{"name": "now"}\n</tool_call>', "", [("now", {})]),
    Recorded("hermes", '<tool_call>{"name":"now","arguments":{}}</tool_call>\n', "", [("now", {})]),
    Recorded("hermes", '<tool_call>{"name":"now","arguments":null}</tool_call>', "", [("now", {})]),
    Recorded(
        "hermes",
        f'<tool_call>\n{{"name": "search", "arguments": {_NESTED_JSON}}}\n</tool_call>',
        "",
        [_NESTED],
    ),
    Recorded(
        "hermes",
        f'<tool_call>\n{{"name": "get_weather", "arguments": {_UNICODE_JSON}}}\n</tool_call>',
        "",
        [_UNICODE],
    ),
    Recorded(
        "hermes",
        f'<tool_call>\n{{"name": "write_file", "arguments": {_ESCAPED_JSON}}}\n</tool_call>',
        "",
        [_ESCAPED],
    ),
    Recorded(
        "hermes",
        '<tool_call>\n{"name": "write_file", "arguments": {"text": "</tool_call>\\n<tool_call>"}}'
        "\n</tool_call>",
        "",
        [("write_file", {"text": "</tool_call>\n<tool_call>"})],
    ),
    Recorded(
        "hermes",
        '<tool_call>\n{"arguments": {"city": "Paris"}, "name": "get_weather"}\n</tool_call>',
        "",
        [_PARIS],
    ),
    Recorded(
        "hermes",
        ' \n<tool_call> { "id" : "c-1" ,\n"type": "function", "name"\t: "get_weather",\r\n'
        '"arguments" :\n{ "city" : "Paris" } , "index": 0 }\n\n </tool_call> \n',
        "",
        [_PARIS],
    ),
    Recorded(
        "hermes",
        '<tool_call>\n{"name": "get_weather", "arguments": "{\\"city\\": \\"Paris\\"}"}\n'
        "</tool_call>",
        "",
        [_PARIS],
    ),
    Recorded(
        "hermes",
        '<tool_call>{"name": "get\\u005fweather", "arguments": {"city": "Paris"}}</tool_call>',
        "",
        [_PARIS],
    ),
    Recorded(
        "hermes",
        'One: <tool_call>{"name": "now"}</tool_call> two: <tool_call>{"name": "get_weather", '
        '"arguments": {"city": "Oslo"}}</tool_call> done.',
        "One:two:done.",
        [("now", {}), _OSLO],
    ),
    Recorded(
        "hermes",
        '<tool_call>\n{"name": "now"}\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n'
        "</tool_call>",
        "",
        [("now", {}), _OSLO],
    ),
    _text("hermes", "The tag <tool_call> begins a call, </tool_call> ends it: a < b, <tool_cal"),
    Recorded(
        "hermes",
        '<tool_call>\n{"name": "launch", "arguments": {"city": "Paris"}}\n</tool_call>',
        "",
        [_LAUNCH],
    ),
    Recorded(
        "hermes",
        '<tool_call>\n{"name": "write_file", "arguments": {"path": "a", "text": "if x:\n\treturn"'
        ", 'mode': None, \"new\": True,}}\n</tool_call>",
        "",
        [("write_file", {"path": "a", "text": "if x:\n\treturn", "mode": None, "new": True})],
    ),
    Recorded(
        "hermes",
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}\n</tool_call>',
        "",
        [_PARIS],
    ),
    Recorded(
        "hermes",
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}}\n</tool_call>',
        "",
        [_PARIS],
    ),
    Recorded(
        "hermes",
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}',
        "",
        [_PARIS],
    ),
    _text("hermes", '```json\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n```\n'),
    _text("hermes", '<tool_call>\n{"name": "get_weath'),
    _text("hermes", '<tool_call>\n{"name": "get_weather", "arguments": ["Paris"]}\n</tool_call>'),
    _text("hermes", "<tool_call>\nget_weather(city='Paris')\n</tool_call>  "),
    _text("hermes", '<tool_call>{"name": "get_weather", "arguemnts": {"a": 1}}</tool_call>'),
    Recorded(
        "hermes",
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Par',
        "",
        [("get_weather", None)],
    ),
    Recorded(
        "hermes",
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_ca',
        "",
        [_PARIS],
    ),
    Recorded(
        "hermes",
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "get_w',
        '<tool_call>\n{"name": "get_w',
        [_PARIS],
    ),
    Recorded(
        "hermes",
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": Paris}}\n</tool_call>',
        "Paris}}\n</tool_call>",
        [("get_weather", None)],
    ),
    Recorded(
        "hermes",
        '<tool_call><tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
        "",
        [("now", {})],
    ),
]

LLAMA_JSON = [
    Recorded(
        "llama_json",
        '{"name": "get_weather", "parameters": {"city": "Paris"}}',
        "",
        [_PARIS],
    ),
    Recorded(
        "llama_json",
        '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris"}}',
        "",
        [_PARIS],
    ),
    Recorded(
        "llama_json",
        '{"name": "get_weather", "parameters": {"city": "Paris"}}; '
        '{"name": "get_weather", "parameters": {"city": "Oslo"}}',
        "",
        [_PARIS, _OSLO],
    ),
    Recorded(
        "llama_json",
        '{"name": "get_weather", "parameters": {"city": "Paris"}}\n'
        '{"name": "get_weather", "parameters": {"city": "Oslo"}}\n{"name": "now"}',
        "",
        [_PARIS, _OSLO, ("now", {})],
    ),
    Recorded(
        "llama_json",
        '<|python_tag|>{"name": "now", "parameters": {}}<|python_tag|>{"name": "now"};',
        "",
        [("now", {}), ("now", {})],
    ),
    Recorded(
        "llama_json",
        'Let me see.\n<|python_tag|>{"type": "function", "name": "get_weather", '
        '"parameters": {"city": "Oslo"}}',
        "Let me see.",
        [_OSLO],
    ),
    Recorded("llama_json", f'{{"name": "search", "parameters": {_NESTED_JSON}}}', "", [_NESTED]),
    Recorded(
        "llama_json",
        f'\n\n{{"name": "get_weather", "parameters": {_UNICODE_JSON}}}',
        "",
        [_UNICODE],
    ),
    Recorded(
        "llama_json", f'{{"name": "write_file", "parameters": {_ESCAPED_JSON}}}', "", [_ESCAPED]
    ),
    Recorded(
        "llama_json",
        '{"parameters": {"city": "Paris"}, "type": "function", "name": "get_weather"}',
        "",
        [_PARIS],
    ),
    Recorded(
        "llama_json",
        '{"name": "get_weather", "parameters": "{\\"city\\":\\"Oslo\\"}"}\n\nThat is all.',
        "That is all.",
        [_OSLO],
    ),
    Recorded(
        "llama_json",
        '[{"name": "now", "parameters": {}}, {"name": "get_weather", "arguments": '
        '{"city": "Oslo"}}]',
        "",
        [("now", {}), _OSLO],
    ),
    Recorded(
        "llama_json",
        '{"name": "now", "parameters": {}}; {"name": "launch", "parameters": {}}; {"name": "now"}',
        '; {"name": "launch", "parameters": {}}',
        [("now", {}), ("now", {})],
    ),
    _text("llama_json", '{"name": "launch", "parameters": {"city": "Paris"}}'),
    _text("llama_json", '{"name": "Alice", "age": 7}'),
    _text("llama_json", '{"name": "get_weather'),
    _text("llama_json", 'Call {"name": "now", "parameters": {}} and wait.'),
    _text("llama_json", 'So:\n```json\n{"name": "now", "parameters": {}}\n```\n'),
    Recorded(
        "llama_json",
        '<|python_tag|>brave_search.call(query="x")',
        "",
        [("brave_search", {"query": "x"})],
    ),
    _text("llama_json", "<|python_tag|>"),
    _text("llama_json", "  {} or {not JSON}"),
    Recorded(
        "llama_json",
        '{"name": "get_weather", "parameters": {"city": "Par\\',
        "",
        [("get_weather", None)],
    ),
    Recorded(
        "llama_json",
        '{"name": "now", "parameters": {}}; {"name": "get_weather", "para',
        '; {"name": "get_weather", "para',
        [("now", {})],
    ),
    Recorded(
        "llama_json",
        '{"name": "get_weather", "parameters": {\'city\': \'Paris\'}}',
        "",
        [_PARIS],
    ),
]

PYTHONIC = [
    Recorded("pythonic", '[get_weather(city="Paris")]', "", [_PARIS]),
    Recorded(
        "pythonic",
        "[get_weather(city='Paris'), get_weather(city='Oslo')]",
        "",
        [_PARIS, _OSLO],
    ),
    Recorded("pythonic", "[now()]", "", [("now", {})]),
    Recorded("pythonic", "\n[ now ( ) , now() , ]\n", "", [("now", {}), ("now", {})]),
    Recorded(
        "pythonic",
        '<|python_start|>[get_weather(city="Paris")]<|python_end|>',
        "",
        [_PARIS],
    ),
    Recorded(
        "pythonic",
        'I look.\n<|python_tag|>[get_weather(city="Oslo",)] Done.',
        "I look.Done.",
        [_OSLO],
    ),
    Recorded(
        "pythonic",
        "[search(a=1, b=-2.5, c=True, d=False, e=None, f=true, g=false, h=null, i=1_000, "
        "j=0x1F, k=.5, l=1., m=1e-3, n=+7)]",
        "",
        [
            (
                "search",
                {
                    **{"a": 1, "b": -2.5, "c": True, "d": False, "e": None, "f": True},
                    **{"g": False, "h": None, "i": 1000, "j": 31, "k": 0.5, "l": 1.0},
                    **{"m": 1e-3, "n": 7},
                },
            )
        ],
    ),
    Recorded(
        "pythonic",
        "[search(query='a', filter={'tags': ['x', {'y': None}], \"from\": -1.5e3}, deep=[[], {}])]",
        "",
        [_NESTED],
    ),
    Recorded(
        "pythonic",
        "[search(pair=(1, 'two',), keys={1: 'a', 2.5: 'b',}, empty=())]",
        "",
        [("search", {"pair": [1, "two"], "keys": {"1": "a", "2.5": "b"}, "empty": []})],
    ),
    Recorded(
        "pythonic",
        '[get_weather(city="Zürich 東京 🌧", x="\\u00e9\\u2028\\ud83d\\ude00")]',
        "",
        [_UNICODE],
    ),
    Recorded(
        "pythonic",
        r"""[write_file(path='C:\\dir\\"a"', text="if (x) { print(\"}]\") }\n\t</end>[/")]""",
        "",
        [_ESCAPED],
    ),
    Recorded(
        "pythonic",
        '[write_file(text="""one "two" \\"""three\nfour""", path=r\'a\\b\', n='
        "'\\x41\\101\\N{BULLET}\\U0001F600')]",
        "",
        [
            (
                "write_file",
                {"text": 'one "two" """three\nfour', "path": "a\\b", "n": "AA•😀"},
            )
        ],
    ),
    Recorded(
        "pythonic",
        "[write_file(text='it\\'s \"]\", not (', path='', q='a\nb')]",
        "",
        [("write_file", {"text": 'it\'s "]", not (', "path": "", "q": "a\nb"})],
    ),
    Recorded("pythonic", "[add-up(a=[1,2,])]", "", [("add-up", {"a": [1, 2]})]),
    _text("pythonic", '[launch(city="Paris")]'),
    _text("pythonic", "[1] says so, and [2]."),
    _text("pythonic", 'Write [get_weather(city="Paris")] to call it.'),
    _text("pythonic", '```python\n[get_weather(city="Paris")]\n```'),
    _text("pythonic", '[get_weather("Paris")]'),
    _text("pythonic", "[get_weather(city"),
    _text("pythonic", "[get_weath"),
    _text("pythonic", '```json\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n```'),
    Recorded("pythonic", "[get_weather(city='Par", "", [("get_weather", None)]),
    Recorded("pythonic", "[get_weather(city='Paris'), now(", ", now(", [_PARIS]),
    Recorded(
        "pythonic",
        "[now(), launch(a=1), now()]",
        ", launch(a=1), now()]",
        [("now", {})],
    ),
    Recorded(
        "pythonic",
        "[get_weather(city=capital(of='France'))]",
        "[get_weather(city=capital(of='France'))]",
        [],
    ),
    Recorded(
        "pythonic",
        "[get_weather(city='Paris', city='Oslo')]",
        ", city='Oslo')]",
        [("get_weather", None)],
    ),
]

MISTRAL = [
    Recorded(
        "mistral",
        '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris"}}]',
        "",
        [_PARIS],
    ),
    Recorded(
        "mistral",
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris"}}, {"name": '
        '"get_weather", "arguments": {"city": "Oslo"}, "id": "VvvODy9mT"}]',
        "",
        [_PARIS, _OSLO],
    ),
    Recorded("mistral", '[TOOL_CALLS]get_weather{"city": "Paris"}', "", [_PARIS]),
    Recorded("mistral", '[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}', "", [_PARIS]),
    Recorded(
        "mistral",
        '[TOOL_CALLS]get_weather[CALL_ID]VvvODy9mT[ARGS]{"city": "Paris"}'
        '[TOOL_CALLS]get_weather[CALL_ID]0a1B2c3D4[ARGS]{"city": "Oslo"}',
        "",
        [_PARIS, _OSLO],
    ),
    Recorded(
        "mistral",
        'Both, then.\n[TOOL_CALLS]add-up[ARGS]{"a": [1, 2]}\n[TOOL_CALLS]now{}',
        "Both, then.",
        [("add-up", {"a": [1, 2]}), ("now", {})],
    ),
    Recorded(
        "mistral",
        '[TOOL_CALLS][{"name": "now"}, {"name": "now", "arguments": {}}]',
        "",
        [("now", {}), ("now", {})],
    ),
    Recorded(
        "mistral",
        f'[TOOL_CALLS][{{"name": "search", "arguments": {_NESTED_JSON}}}]',
        "",
        [_NESTED],
    ),
    Recorded("mistral", f"[TOOL_CALLS]search[ARGS]{_NESTED_JSON}", "", [_NESTED]),
    Recorded("mistral", f"[TOOL_CALLS]get_weather{_UNICODE_JSON}", "", [_UNICODE]),
    Recorded("mistral", f"[TOOL_CALLS]write_file[ARGS]{_ESCAPED_JSON}", "", [_ESCAPED]),
    Recorded(
        "mistral",
        f'[TOOL_CALLS][{{"arguments": {_ESCAPED_JSON}, "name": "write_file"}}]',
        "",
        [_ESCAPED],
    ),
    Recorded(
        "mistral",
        '[TOOL_CALLS][{"name": "write_file", "arguments": {"text": "[TOOL_CALLS]now{}"}}]',
        "",
        [("write_file", {"text": "[TOOL_CALLS]now{}"})],
    ),
    Recorded(
        "mistral",
        '[TOOL_CALLS][{"name": "get_weather", "arguments": "{\\"city\\": \\"Oslo\\"}"}]',
        "",
        [_OSLO],
    ),
    Recorded(
        "mistral",
        '[TOOL_CALLS][{"name": "now"}, {"name": "launch", "arguments": {"a": [1]}}, '
        '{"name": "get_weather", "arguments": {"city": "Oslo"}}]',
        "",
        [("now", {}), ("launch", {"a": [1]}), _OSLO],
    ),
    Recorded("mistral", "[TOOL_CALLS][TOOL_CALLS]now{} and so on", "and so on", [("now", {})]),
    Recorded("mistral", '[TOOL_CALLS]launch{"city": "Paris"}', "", [_LAUNCH]),
    Recorded("mistral", '[TOOL_CALLS][{"name": "launch", "arguments": {}}]', "", [("launch", {})]),
    _text("mistral", "[TOOL_CALLS][] then"),
    _text("mistral", "A list [1], [TOOL, [TOOL_CALLS"),
    _text("mistral", '```json\n[{"name": "get_weather", "arguments": {"city": "Paris"}}]\n```'),
    _text("mistral", "[TOOL_CALLS]get_weather[ARGS]"),
    _text("mistral", '[TOOL_CALLS][{"name": "get_weather", "argu'),
    Recorded("mistral", '[TOOL_CALLS]get_weather[ARGS]{"city": "P', "", [("get_weather", None)]),
    Recorded(
        "mistral",
        '[TOOL_CALLS][{"name": "now", "arguments": {}}, {"name": "get',
        ', {"name": "get',
        [("now", {})],
    ),
    Recorded(
        "mistral",
        '[TOOL_CALLS]get_weather{"city": "Paris",}',
        "",
        [_PARIS],
    ),
]

_B, _E = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_C, _D = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_S = "<｜tool▁sep｜>"

DEEPSEEK_V3 = [
    Recorded(
        "deepseek_v3",
        f'{_B}{_C}function{_S}get_weather\n```json\n{{"city": "Paris"}}\n```{_D}{_E}',
        "",
        [_PARIS],
    ),
    Recorded(
        "deepseek_v3",
        f'I look.\n\n{_B}{_C}function{_S}get_weather\n```json\n{{"city": "Paris"}}\n```{_D}\n'
        f'{_C}function{_S}get_weather\n```json\n{{"city": "Oslo"}}\n```{_D}{_E}',
        "I look.",
        [_PARIS, _OSLO],
    ),
    Recorded(
        "deepseek_v3", f"{_B}{_C}function{_S}now\n```json\n{{}}\n```{_D}{_E}", "", [("now", {})]
    ),
    Recorded("deepseek_v3", f"{_B}{_C}function{_S}now\n```json\n```{_D}{_E}", "", [("now", {})]),
    Recorded(
        "deepseek_v3",
        f"{_B}{_C}function{_S}search\n```json\n{_NESTED_JSON}\n```{_D}{_E}",
        "",
        [_NESTED],
    ),
    Recorded(
        "deepseek_v3",
        f"{_B}{_C}function{_S}get_weather\n```json\n{_UNICODE_JSON}\n```{_D}{_E}",
        "",
        [_UNICODE],
    ),
    Recorded(
        "deepseek_v3",
        f"{_B}{_C}function{_S}write_file\n```json\n{_ESCAPED_JSON}\n```{_D}{_E}",
        "",
        [_ESCAPED],
    ),
    Recorded(
        "deepseek_v3",
        f'{_B}{_C}function{_S}write_file\n```json\n{{"text": "```{_D}{_E}"}}\n```{_D}{_E}',
        "",
        [("write_file", {"text": f"```{_D}{_E}"})],
    ),
    Recorded(
        "deepseek_v3",
        f'{_B} \n{_C} function {_S} get_weather \n\n```json\n\n{{ "city":\n"Paris" }}\n ``` \n{_D}'
        f" \n{_E}\n",
        "",
        [_PARIS],
    ),
    Recorded(
        "deepseek_v3",
        f'{_C}function{_S}get_weather\n```json\n{{"city": "Oslo"}}\n```{_D} Well.',
        "Well.",
        [_OSLO],
    ),
    Recorded(
        "deepseek_v3",
        f'{_B}{_C}function{_S}get_weather\n{{"city": "Oslo"}}{_D}{_E}',
        "",
        [_OSLO],
    ),
    Recorded(
        "deepseek_v3",
        f"{_B}{_C}function{_S}launch\n```json\n{{}}\n```{_D}{_E}",
        "",
        [("launch", {})],
    ),
    _text("deepseek_v3", f"The markers are {_B} and {_C}, and {_S}. <｜tool▁calls"),
    _text("deepseek_v3", '```json\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n```'),
    _text("deepseek_v3", f"{_B}{_C}function{_S}get_weather\n```js"),
    _text("deepseek_v3", f"{_B}{_C}function{_S}get_weather\n```json\n[1]\n```{_D}{_E}"),
    Recorded(
        "deepseek_v3",
        f'{_B}{_C}function{_S}get_weather\n```json\n{{"city": "Par',
        "",
        [("get_weather", None)],
    ),
    Recorded(
        "deepseek_v3",
        f'{_B}{_C}function{_S}get_weather\n```json\n{{"city": "Paris"}}\n``',
        "",
        [_PARIS],
    ),
    Recorded(
        "deepseek_v3",
        f"{_B}{_C}function{_S}now\n```json\n{{}}\n```{_D}\n{_C}function{_S}launch\n",
        f"{_C}function{_S}launch\n",
        [("now", {})],
    ),
]

DEEPSEEK_V31 = [
    Recorded("deepseek_v31", f'{_B}{_C}get_weather{_S}{{"city": "Paris"}}{_D}{_E}', "", [_PARIS]),
    Recorded(
        "deepseek_v31",
        f'I look.{_B}{_C}get_weather{_S}{{"city": "Paris"}}{_D}{_C}get_weather{_S}'
        f'{{"city": "Oslo"}}{_D}{_E}',
        "I look.",
        [_PARIS, _OSLO],
    ),
    Recorded("deepseek_v31", f"{_B}{_C}now{_S}{{}}{_D}{_E}", "", [("now", {})]),
    Recorded("deepseek_v31", f"{_B}{_C}now{_S}{_D}{_E}", "", [("now", {})]),
    Recorded("deepseek_v31", f"{_B}{_C}search{_S}{_NESTED_JSON}{_D}{_E}", "", [_NESTED]),
    Recorded("deepseek_v31", f"{_B}{_C}get_weather{_S}{_UNICODE_JSON}{_D}{_E}", "", [_UNICODE]),
    Recorded("deepseek_v31", f"{_B}{_C}write_file{_S}{_ESCAPED_JSON}{_D}{_E}", "", [_ESCAPED]),
    Recorded(
        "deepseek_v31",
        f'{_B}\n{_C}\nget_weather\n{_S}\n{{"city":"Oslo"}}\n{_D}\n{_E}\n',
        "",
        [_OSLO],
    ),
    Recorded(
        "deepseek_v31",
        f'{_B}{_C}get_weather{_S}{{"city": "Oslo"}}{_D}{_E}\nSo be it.',
        "So be it.",
        [_OSLO],
    ),
    Recorded(
        "deepseek_v31",
        f'{_B}{_C}launch{_S}{{"city": "Paris"}}{_D}{_E}',
        "",
        [_LAUNCH],
    ),
    _text("deepseek_v31", f'{_B}{_C}get_weather{{"city": "Oslo"}}{_D}{_E}'),
    _text("deepseek_v31", f"{_B} and then nothing {_E}"),
    _text("deepseek_v31", f"{_B}{_C}get_wea"),
    _text("deepseek_v31", '```json\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n```'),
    Recorded(
        "deepseek_v31",
        f'{_B}{_C}get_weather{_S}{{"city": "Par',
        "",
        [("get_weather", None)],
    ),
    Recorded(
        "deepseek_v31",
        f"{_B}{_C}get_weather{_S}{{city: 1}}{_D}{_E}",
        "",
        [("get_weather", {"city": 1})],
    ),
]

PLAIN_JSON = [
    Recorded("plain_json", '{"name": "get_weather", "arguments": {"city": "Paris"}}', "", [_PARIS]),
    Recorded(
        "plain_json", '{"name": "get_weather", "parameters": {"city": "Paris"}}', "", [_PARIS]
    ),
    Recorded(
        "plain_json",
        '[{"name": "get_weather", "arguments": {"city": "Paris"}}, '
        '{"name": "get_weather", "arguments": {"city": "Oslo"}}]',
        "",
        [_PARIS, _OSLO],
    ),
    Recorded(
        "plain_json",
        '```json\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n```\n',
        "",
        [_PARIS],
    ),
    Recorded(
        "plain_json",
        '```\n[\n  {"name": "now"},\n  {"name": "now", "arguments": {}}\n]\n```\nDone.',
        "Done.",
        [("now", {}), ("now", {})],
    ),
    Recorded(
        "plain_json",
        '{"name": "now", "arguments": {}}\n{"name": "now", "arguments": ""}',
        "",
        [("now", {}), ("now", {})],
    ),
    Recorded("plain_json", f'{{"name": "search", "arguments": {_NESTED_JSON}}}', "", [_NESTED]),
    Recorded(
        "plain_json", f'{{"name": "get_weather", "arguments": {_UNICODE_JSON}}}', "", [_UNICODE]
    ),
    Recorded(
        "plain_json", f' {{"name": "write_file", "arguments": {_ESCAPED_JSON}}} ', "", [_ESCAPED]
    ),
    Recorded(
        "plain_json",
        '{"id": 1, "arguments": "{\\"city\\": \\"Paris\\"}", "type": "function", "name": '
        '"get_weather"}',
        "",
        [_PARIS],
    ),
    Recorded(
        "plain_json",
        '{"name": "now", "arguments": {}}\n\nI asked for {"name": "now"}.',
        'I asked for {"name": "now"}.',
        [("now", {})],
    ),
    Recorded(
        "plain_json",
        '[{"name": "launch", "arguments": {}}, {"name": "now"}]',
        '[{"name": "launch", "arguments": {}}',
        [("now", {})],
    ),
    _text("plain_json", '{"name": "launch", "arguments": {"city": "Paris"}}'),
    _text("plain_json", '{"city": "Paris", "name": "get_weather", "notes": "none"}'),
    _text("plain_json", '{"name": "get_weather", "description": "x", "parameters": [1]}\n'),
    _text("plain_json", 'Use this:\n```json\n{"name": "now", "arguments": {}}\n```'),
    _text("plain_json", '```python\nprint({"name": "now"})\n```\n'),
    _text("plain_json", '```json\n{"name": "launch"}\n```'),
    _text("plain_json", " \n [1, 2] and [ ]  "),
    _text("plain_json", '{"name": "get_weather"'),
    _text("plain_json", ""),
    Recorded(
        "plain_json",
        '{"name": "get_weather", "arguments": {"city": ["Par',
        "",
        [("get_weather", None)],
    ),
    Recorded(
        "plain_json",
        '{"name": "now", "arguments": {}, "arguments": {"a": 1}}',
        ', "arguments": {"a": 1}}',
        [("now", {})],
    ),
]

RECORDED: list[Recorded] = [
    *HERMES,
    *LLAMA_JSON,
    *PYTHONIC,
    *MISTRAL,
    *DEEPSEEK_V3,
    *DEEPSEEK_V31,
    *PLAIN_JSON,
]
