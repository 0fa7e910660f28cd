"""Answers in channels: the text, and what is meant by it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from penstock_router.request import Tool

TOOLS = (
    Tool(
        "get_weather",
        {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        },
    ),
    Tool("now"),
    Tool("python", {"type": "object", "properties": {"code": {"type": "string"}}}),
)
_OSLO: tuple[str, Any] = ("get_weather", {"city": "Oslo"})
_NOW: tuple[str, Any] = ("now", {})


class Case(NamedTuple):
    """An answer of a model of a family."""

    format: str
    text: str
    reasoning: str = ""
    content: str = ""
    # Each call's name, and its arguments: a text where they are not whole.
    calls: Sequence[tuple[str, Any]] = ()
    # None: those above.
    tools: tuple[Tool, ...] | None = None
    begun: bool = False
    was_cut: bool = False
    # Whether marks stand in it that are none: as tokens they would be.
    has_mentions: bool = False


def _harmony(text: str, *read: Any, **options: Any) -> Case:
    """Written with `[a]` and the like for marks."""
    marks = {
        "[s]": "<|start|>assistant",
        "[a]": "<|channel|>analysis<|message|>",
        "[c]": "<|channel|>commentary",
        "[f]": "<|channel|>final<|message|>",
        "[j]": " <|constrain|>json<|message|>",
        "[m]": "<|message|>",
        "[e]": "<|end|>",
        "[call]": "<|call|>",
    }
    for short, mark in marks.items():
        text = text.replace(short, mark)
    return Case("harmony", text, *read, **options)


_GET = " to=functions.get_weather"
_CITY = '{"city": "Oslo"}'

HARMONY = [
    _harmony("[a]Hm. Simple.[e][s][f]It is 4.", "Hm. Simple.", "It is 4."),
    _harmony("[a]Hm.[e][s][f]It is 4.<|return|>", "Hm.", "It is 4."),
    _harmony("[f] It is 4. \n", "", " It is 4. \n"),
    _harmony(f"[a]Hm.[e][s][c]{_GET}[j]{_CITY}[call]", "Hm.", "", [_OSLO]),
    _harmony(f"[a]Hm.[e][s][c]{_GET}[j]{_CITY}", "Hm.", "", [_OSLO]),
    # The recipient behind the role, no <|constrain|>, in the channel of reasoning.
    _harmony(f"[a]Hm.[e][s]{_GET}[c] json[m]{_CITY}[call]", "Hm.", "", [_OSLO]),
    _harmony(f"{_GET}[c] json[m]{_CITY}[call]", "", "", [_OSLO]),
    _harmony(f"<|channel|>analysis{_GET} code[m]{_CITY}[call]", "", "", [_OSLO]),
    _harmony(f"[c]{_GET}[m]{_CITY}[call]", "", "", [_OSLO]),
    # A preamble; several messages of each kind; several calls.
    _harmony(f"[c][m]I look.[e][s][c]{_GET}[j]{_CITY}[call]", "", "I look.", [_OSLO]),
    _harmony("[a]a[e][s][a]b[e][s][c][m]c[e][s][f]d[e]", "a\nb", "c\nd"),
    _harmony(
        f"[c]{_GET}[j]{_CITY}[call][s][a]Hm.[e][s][c] to=functions.now[j]{{}}[call]",
        "Hm.",
        "",
        [_OSLO, _NOW],
    ),
    # No marks at all.
    _harmony("It is 4, a < b.", "", "It is 4, a < b."),
    _harmony("  assistant to=functions.now is it", "", "  assistant to=functions.now is it"),
    # Headers that are malformed.
    _harmony(f"<|start|>assistant<|channel|>final{_GET}[j]{_CITY}[call]", "", "", [_OSLO]),
    _harmony(f"[c]{_GET}<|constrain|>response[m]{_CITY}[call]", "", "", [_OSLO]),
    _harmony(f"[c]{_GET} commentary <|constrain|>json[m]{_CITY}[call]", "", "", [_OSLO]),
    _harmony(f"[c][c]{_GET}[j]{_CITY}[call]", "", "", [_OSLO]),
    _harmony(f"[c]to=functions.get_weather[c]json[m]{_CITY}[call]", "", "", [_OSLO]),
    _harmony(f"[c]{_GET} <|constrain|>json{_CITY}[call]", "", "", [_OSLO]),
    _harmony(f"[c] to=get_weather[j]{_CITY}[call]", "", "", [_OSLO]),
    _harmony("[a]a[e]assistant[f]b", "a", "b"),
    _harmony("[a]a[e][f]b", "a", "b"),
    _harmony("[a]a[s][f]b", "a", "b"),
    _harmony("[a]a[f]b", "a", "b"),
    _harmony("[s][f]b", "", "b"),
    _harmony("[m]b[e]", "", "b"),
    _harmony("[s][m]b[e]", "", "b"),
    _harmony("<|channel|>analysis We[e][s]<|channel|>finalThe end", " We", "The end"),
    _harmony("<|channel|>thoughts[m]a[e][s][f]b", "", "a\nb"),
    _harmony("[a]a[e][e]\n[s][f][m]b[e][e]\n", "a", "b"),
    _harmony(f"[c]{_GET}[j]{_CITY}[call][call]\n", "", "", [_OSLO]),
    # Arguments that are nearly right, in quotes, or none.
    _harmony(
        f'[c]{_GET}[j]{{"city": "a\nb", "days": None,}}}}[call]',
        "",
        "",
        [("get_weather", {"city": "a\nb", "days": None})],
    ),
    _harmony(f'[c]{_GET}[j]{{"city": "Oslo"[call]', "", "", [_OSLO]),
    _harmony(f'[c]{_GET}[j]{{"city": "Oslo"', "", "", [_OSLO]),
    _harmony(f'[c]{_GET}[j]"{{\\"city\\": \\"Oslo\\"}}"[call]', "", "", [_OSLO]),
    _harmony("[c] to=functions.now[j]null[call]", "", "", [_NOW]),
    _harmony("[c] to=functions.now[j][call]", "", "", [_NOW]),
    _harmony("[c] to=functions.now[j]", "", "", [_NOW]),
    _harmony(f"[c]{_GET}[j]in Oslo[call][s][f]b", "", "in Oslo\nb"),
    # Functions that the request has not, and OpenAI's own tools.
    _harmony("[c] to=functions.launch[j]{}[call]", "", "", [("launch", {})]),
    _harmony(f"[c]{_GET}[j]{_CITY}[call]", "", _CITY, tools=()),
    _harmony(f"<|channel|>analysis{_GET}[j]{_CITY}[call]", "", _CITY, tools=()),
    _harmony("[c] to=python code[m]a = '\n'[call]", "", "", [("python", {"code": "a = '\n'"})]),
    _harmony("[c] to=python code[m]{1: 2}", "", "", [("python", {"code": "{1: 2}"})]),
    _harmony('[c] to=python code[m]{ "code" : "1"}[call]', "", "", [("python", {"code": "1"})]),
    _harmony('[c] to=python code[m]{"cod": 1}', "", "", [("python", {"code": '{"cod": 1}'})]),
    _harmony('[c] to=python[m]{"code": "1"}[call]', "", "", [("python", {"code": "1"})]),
    _harmony("[c] to=python code[m]print(1)[call]", "", "print(1)", tools=TOOLS[:2]),
    _harmony('<|channel|>analysis to=browser.search code[m]{"q": 1}[call]', '{"q": 1}'),
    _harmony(
        '[c] to=container.exec code[m]{"cmd": "ls"}[call]',
        "",
        "",
        [("container.exec", {"cmd": "ls"})],
        tools=(Tool("container.exec"),),
    ),
    # Answers that are cut off.
    _harmony("[a]We ne", "We ne", was_cut=True),
    _harmony("<|channel|>analy", was_cut=True),
    _harmony("[a]a[e]<|start|>assis", "a", was_cut=True),
    _harmony("[c] to=functions.get_wea", was_cut=True),
    _harmony(f"[c]{_GET}[j]", was_cut=True),
    _harmony(f'[c]{_GET}[j]{{"city": "Os', "", "", [("get_weather", '{"city": "Os')]),
    _harmony(
        f'[c]{_GET}[j]{{"city": "Os"',
        "",
        "",
        [("get_weather", '{"city": "Os"')],
        was_cut=True,
    ),
    _harmony("[c] to=python code[m]print(", "", "", [("python", '{"code": "print(')], was_cut=True),
    _harmony(
        f'[c]{_GET}[j]{{"city": {{"a": 1',
        "",
        "",
        [("get_weather", '{"city": {"a": 1')],
    ),
    _harmony(f'[c]{_GET}[j]{{"city": "Oslo"', "", "", [_OSLO]),
    # Marks that are spoken of.
    _harmony(
        "[f]The <|end|> of <|channel|>analysis is <|start|>assistant, [m] or [call].",
        "",
        "The <|end|> of <|channel|>analysis is <|start|>assistant, <|message|> or <|call|>.",
        has_mentions=True,
    ),
    _harmony("A <|channel|> is one.", "", "A <|channel|> is one.", has_mentions=True),
    # The prompt ends within reasoning, or within an answer that goes on.
    _harmony("Hm.[e][s][f]b", "Hm.", "b", begun=True),
    _harmony("and so on.[e]", "", "and so on."),
]


def _kimi(text: str, *read: Any, **options: Any) -> Case:
    """Written with `[think]`, `[/think]` and the like for marks."""
    text = re.sub(r"\[/(\w+)\]", r"<|close|>\1<|sep|>", text)
    return Case("kimi_k3", re.sub(r"\[(\w[^]]*)\]", r"<|open|>\1<|sep|>", text), *read, **options)


_CITY_K3 = '[argument key="city" type="string"]Oslo[/argument]'
_GET_K3 = f'[call tool="get_weather" index="1"]{_CITY_K3}[/call]'
_ENDS_K3 = "[/message]<|end_of_msg|>"

KIMI_K3 = [
    _kimi(f"Hm.[/think][response]It is 4.[/response]{_ENDS_K3}", "Hm.", "It is 4.", begun=True),
    _kimi("Hm.[/think][response]It is 4.", "Hm.", "It is 4.", begun=True),
    _kimi(f"It is 4. \n[/response]{_ENDS_K3}", "", "It is 4. \n"),
    _kimi("[think]Hm.[/think][response]4[/response]", "Hm.", "4"),
    _kimi("[think][think]Hm.[/think][/think]\n[response][response]4[/response]", "Hm.", "4"),
    _kimi('[message role="assistant"][think]Hm.[/think][response]4', "Hm.", "4"),
    _kimi("Hm.[/think]4", "Hm.", "4", begun=True),
    _kimi("Hm.[response]4[/response]", "Hm.", "4", begun=True),
    _kimi("[think]a[/think][think]b[/think][response]c", "a\nb", "c"),
    _kimi(
        f"Hm.[/think][response]I look.[/response][tools]{_GET_K3}[/tools]{_ENDS_K3}",
        "Hm.",
        "I look.",
        [_OSLO],
        begun=True,
    ),
    _kimi(
        f'[response][/response][tools]{_GET_K3}[call tool="now" index="2"][/call][/tools]',
        "",
        "",
        [_OSLO, _NOW],
    ),
    # A call in reasoning that was not ended, without its block, with white space around tags.
    _kimi(f"Hm.[tools]{_GET_K3}[/tools]", "Hm.", "", [_OSLO], begun=True),
    _kimi(f"{_GET_K3}{_ENDS_K3}", "", "", [_OSLO]),
    _kimi(f"[tools]\n{_GET_K3}\n[/tools]\n{_ENDS_K3}\n", "", "", [_OSLO]),
    _kimi(f"[tools][tools]{_GET_K3}[/tools][/tools]", "", "", [_OSLO]),
    _kimi(f"[tools]{_GET_K3}", "", "", [_OSLO]),
    _kimi(f"[tools]{_GET_K3.removesuffix('[/call]')}[/tools]", "", "", [_OSLO]),
    _kimi(f"[tools]{_GET_K3.removesuffix('[/call]')}", "", "", [_OSLO]),
    _kimi(f"[tools]{_GET_K3}[/tools]more", "", "more", [_OSLO]),
    # Values of each type, and names with quotes.
    _kimi(
        '[tools][call tool="now" index="1"][argument key="a" type="number"]1.5[/argument]'
        '[argument key="b" type="boolean"]True[/argument][argument key="c" type="null"]null'
        '[/argument][argument key="d" type="object"]{"x": {},}[/argument][argument key="e" '
        'type="array"]["x]"][/argument][argument key="f" type="string"] 1\n"2"[/argument]'
        '[argument key="g &quot;&amp;quot;" type="string"][/argument][/call][/tools]',
        "",
        "",
        [
            (
                "now",
                {"a": 1.5, "b": True, "c": None, "d": {"x": {}}, "e": ["x]"], "f": ' 1\n"2"'}
                | {'g "&quot;': ""},
            )
        ],
    ),
    _kimi(
        "[call tool='get_weather' index='1'][argument key='days']3[/argument][/call]",
        "",
        "",
        [("get_weather", {"days": 3})],
    ),
    # All arguments as one object.
    _kimi(
        '[tools][call tool="get_weather" index="1"][json type="object"]{"city": "Oslo"}[/json]'
        "[/call][/tools]",
        "",
        "",
        [_OSLO],
    ),
    _kimi(
        '[tools][call tool="now" index="1"][json type="object"]{"a": "x\ny",}[/json][/call]'
        f"{_GET_K3}[/tools]",
        "",
        "",
        [("now", {"a": "x\ny"}), _OSLO],
    ),
    _kimi('[tools][call tool="launch" index="1"][/call][/tools]', "", "", [("launch", {})]),
    # Answers that are cut off.
    _kimi("Hm, so", "Hm, so", begun=True, was_cut=True),
    _kimi(
        "[tools]" + _GET_K3[: _GET_K3.index("lo[/")],
        "",
        "",
        [("get_weather", '{"city": "Os')],
        was_cut=True,
    ),
    # Marks that are spoken of.
    _kimi(
        "The <|open|> and <|close|>x of [tools] and <|sep|>.",
        "",
        "The <|open|> and <|close|>x of <|open|>tools<|sep|> and <|sep|>.",
        has_mentions=True,
    ),
    # Attributes that are no words.
    _kimi(
        f"[tools]{_GET_K3.replace('string', 'a b')}[/tools]",
        "",
        "",
        [("get_weather", {'city" type="a b': "Oslo"})],
    ),
    _kimi(
        f"[tools]{_GET_K3.replace('1', 'a b')}",
        "",
        _kimi(f"[tools]{_GET_K3.replace('1', 'a b')}").text,
        has_mentions=True,
    ),
    _kimi(
        f"[tools]{_GET_K3}[/tools]",
        "",
        _kimi(f"[tools]{_GET_K3}").text,
        tools=(),
        has_mentions=True,
    ),
]


def _muse(text: str, *read: Any, **options: Any) -> Case:
    """Written with `[self]` and the like for what begins a message."""
    text = text.replace("[m]", "<|message|>").replace("[s]", "<|start|>assistant")
    text = text.replace("[eom]", "<|eom|>").replace("[eot]", "<|eot|>")
    for name in ("self", "user", "get_weather", "now"):
        text = text.replace(f"[{name}]", f" to={name}<|message|>")
    return Case("muse_glimmer", text, *read, **options)


_INVOKE = '<atem:invoke name="get_weather">\n<atem:parameter name="city">Oslo</atem:parameter>\n'
_GET_ATEM = f"<atem:function_calls>\n{_INVOKE}</atem:invoke>\n</atem:function_calls>"
_NOW_ATEM = (
    '<atem:function_calls>\n<atem:invoke name="now">\n</atem:invoke>\n</atem:function_calls>'
)

MUSE_GLIMMER = [
    _muse("[self]Hm. Simple.[eom][s][user]It is 4.[eot]", "Hm. Simple.", "It is 4."),
    _muse("[self]Hm.[eom][s][user]It is 4.", "Hm.", "It is 4."),
    _muse("[user] It is 4. \n", "", " It is 4. \n"),
    _muse(f"[self]Hm.[eom][s][get_weather]{_GET_ATEM}[eot]", "Hm.", "", [_OSLO]),
    _muse(
        f"[self]a[eom][s][user]I look.[eom][s][get_weather]{_GET_ATEM}[eom][s][self]b[eom]"
        f"[s][now]{_NOW_ATEM}",
        "ab",
        "I look.",
        [_OSLO, _NOW],
    ),
    # Several in one message, in one to the user, without the mark, with white space.
    _muse(f"[get_weather]{_GET_ATEM}\n{_NOW_ATEM}[eot]", "", "", [_OSLO, _NOW]),
    _muse(f"[user]Well {_GET_ATEM}[eot]", "", "Well ", [_OSLO]),
    _muse(f"[self]a[eom][s] to=get_weather\n\n{_GET_ATEM}[eot]", "a", "", [_OSLO]),
    _muse(f"[get_weather]\n{_GET_ATEM}\n[eot]\n", "", "", [_OSLO]),
    _muse(f"[get_weather][m]{_GET_ATEM}[eot][eot]", "", "", [_OSLO]),
    _muse(f"[get_weather]<atem:function_calls>\n{_INVOKE}[eot]", "", "", [_OSLO]),
    _muse(f"[get_weather]<atem:function_calls>\n{_INVOKE}", "", "", [_OSLO]),
    # No marks, headers that are malformed.
    _muse("It is 4, a < b.", "", "It is 4, a < b."),
    _muse("to=self is it", "", "to=self is it"),
    _muse("[s][self]a[s][user]b", "a", "b"),
    _muse("[self]a[eom]assistant to=user[m]b", "a", "b"),
    _muse("[self]a[eom][eom]\n[s][m]b[eot]", "a", "b"),
    # Values by the function's schema.
    _muse(
        '[get_weather]<atem:function_calls>\n<atem:invoke name="get_weather">\n<atem:parameter '
        'name="days">3</atem:parameter>\n<atem:parameter name="city"> 4\n</atem:parameter>\n'
        "</atem:invoke>\n</atem:function_calls>[eot]",
        "",
        "",
        [("get_weather", {"days": 3, "city": " 4\n"})],
    ),
    _muse(f"[get_weather]{_GET_ATEM}[eot]", "", _GET_ATEM, tools=(), has_mentions=True),
    _muse("[get_weather]I cannot.[eot]", "", "I cannot."),
    # Answers that are cut off.
    _muse("[self]We ne", "We ne", was_cut=True),
    _muse(
        f"[get_weather]<atem:function_calls>\n{_INVOKE[: _INVOKE.index('lo</')]}",
        "",
        "",
        [("get_weather", '{"city": "Os')],
        was_cut=True,
    ),
    _muse("Hm.[eom][s][user]b", "Hm.", "b", begun=True),
    # Marks that are spoken of.
    _muse(
        "[user]The <|eom|> and [s] of <atem:function_calls> and <|message|>.",
        "",
        "The <|eom|> and <|start|>assistant of <atem:function_calls> and <|message|>.",
        has_mentions=True,
    ),
]


def _solar(text: str, *read: Any, **options: Any) -> Case:
    """Written with `[a]` for what begins another message, and `[think]` and the like."""
    text = text.replace("[a]", "<|begin|>assistant")
    return Case("solar_open", re.sub(r"\[([a-z_:]+)\]", r"<|\1|>", text), *read, **options)


def _solar_call(name: str, arguments: str) -> str:
    begin = f"[tool_call:begin]a1b2c3d4e5[tool_call:name]{name}"
    return f"{begin}[tool_call:args]{arguments}[tool_call:end]"


_GET_SOLAR = _solar_call("get_weather", _CITY)

SOLAR_OPEN = [
    _solar("[think]Hm. Simple.[end][a][content]It is 4.[end]", "Hm. Simple.", "It is 4."),
    _solar("[think]Hm.[end][a][content]It is 4.", "Hm.", "It is 4."),
    _solar("[content] It is 4. \n", "", " It is 4. \n"),
    _solar(f"[think]Hm.[end][a][tool_calls]{_GET_SOLAR}[calls]", "Hm.", "", [_OSLO]),
    _solar(
        f"[content]I look.[end][a][tool_calls]{_GET_SOLAR}{_solar_call('now', '{}')}[calls]",
        "",
        "I look.",
        [_OSLO, _NOW],
    ),
    _solar(f"[tool_calls]\n{_GET_SOLAR}\n{_GET_SOLAR}\n[calls]\n", "", "", [_OSLO, _OSLO]),
    _solar(f"[tool_calls][tool_calls]{_GET_SOLAR}[calls][calls]", "", "", [_OSLO]),
    _solar(f"[tool_calls]{_GET_SOLAR}", "", "", [_OSLO]),
    _solar(f"{_GET_SOLAR}[calls]", "", "", [_OSLO]),
    _solar(f"[think]a[tool_calls]{_GET_SOLAR}[calls]", "a", "", [_OSLO]),
    _solar(f"[tool_calls]{_solar_call('now', '')}[calls]", "", "", [_NOW]),
    _solar(
        f"[tool_calls]{_GET_SOLAR.removesuffix('}[tool_call:end]')}[tool_call:end][calls]",
        "",
        "",
        [_OSLO],
    ),
    _solar(f"[tool_calls]{_GET_SOLAR.removesuffix('}[tool_call:end]')}", "", "", [_OSLO]),
    _solar(f"[tool_calls]{_solar_call('launch', '{}')}[calls]", "", "", [("launch", {})]),
    _solar(f"[tool_calls]{_GET_SOLAR.replace('a1b2c3d4e5', '')}[calls]", "", "", [_OSLO]),
    # No marks, headers that are malformed.
    _solar("It is 4, a < b.", "", "It is 4, a < b."),
    _solar("[a][think]a[a][content]b", "a", "b"),
    _solar("[think]a[end]assistant[content]b", "a", "b"),
    _solar("[think]a[end][content]b", "a", "b"),
    _solar("[think][think]a[end][end]\n[a][content]b[end]\n", "a", "b"),
    _solar("[think]a[end][a][think]b[end][a][content]c", "a\nb", "c"),
    # Answers that are cut off.
    _solar("[think]We ne", "We ne", was_cut=True),
    _solar(
        "[tool_calls]" + _GET_SOLAR[: _GET_SOLAR.index('lo"')],
        "",
        "",
        [("get_weather", '{"city": "Os')],
        was_cut=True,
    ),
    _solar("Hm.[end][a][content]b", "Hm.", "b", begun=True),
    # Marks that are spoken of.
    _solar(
        "[content]The [think] and [end] and [a] of [tool_calls].",
        "",
        "The <|think|> and <|end|> and <|begin|>assistant of <|tool_calls|>.",
        has_mentions=True,
    ),
    _solar("A [tool_call:begin] is one.", "", "A <|tool_call:begin|> is one.", has_mentions=True),
]

CASES = [*HARMONY, *KIMI_K3, *MUSE_GLIMMER, *SOLAR_OPEN]
