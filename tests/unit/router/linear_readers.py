"""Readers of text in the router, each with inputs that are hard for it, of any size.

A list that grows with the router: `tests/contract/test_linear_readers.py` finds every pattern and
every kind of body, and asks that each be here.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from support.budget import budget
from support.families import FAMILIES
from support.router_doubles import INFO, byte_level_tokenizer, model_files

from penstock_router.apis import embeddings, tokenize
from penstock_router.apis.messages.requests import FIELDS as MESSAGES_FIELDS
from penstock_router.apis.ollama.requests import EMBED_FIELDS, EMBEDDINGS_FIELDS
from penstock_router.json_fields import JsonObject, Table
from penstock_router.request import Tool
from penstock_router.text.chat_template import ChatTemplate
from penstock_router.text.formats.base import CallFormat
from penstock_router.text.formats.registry import FORMATS
from penstock_router.text.model_conventions import Conventions
from penstock_router.text.prompts import TextModel
from penstock_router.text.reasoning import STYLES
from penstock_router.text.tokenizer import load_tokenizer

# ---- How time is compared ----------------------------------------------------------------------

# How many times as long as its size says work may take. The sizes differ by 4 at least: what grows
# with the square of its input takes 4 times as long as its size says.
_MAX_RATIO = 2.5
# Below this time nothing is meant that grows with the square: of all sizes this is the largest.
_SHORT_S = 0.004
# So long, work is measured well enough.
_MEASURED_S = 0.002
# What a measurement is off by.
_NOISE_S = 0.001
_TRIES = 12
# How far below the largest size the comparison begins.
_SMALLEST = 16


def thread_s(work: Callable[[], object]) -> float:
    """The processor's time of this thread that some work takes, without the garbage collector's,
    which depends on what else there is.
    """
    gc.collect(0)
    gc.disable()
    try:
        begun_s = time.thread_time()
        work()
        return time.thread_time() - begun_s
    finally:
        gc.enable()


def is_linear(work_of: Callable[[int], Callable[[], object]], size: int, *, least: int = 2) -> bool:
    """Tell whether work takes as long as its input is large, from a size that takes some 2 ms,
    or from `least`, up to this one: each by the least of several tries.
    """
    size = budget(size, 4 * size)
    large = work_of(size)
    most_s = thread_s(large)
    if most_s <= _SHORT_S:
        return True
    at = max(least, size // _SMALLEST)
    small = work_of(at)
    while (least_s := thread_s(small)) < _MEASURED_S and 8 * at <= size:
        at *= 2
        small = work_of(at)
    for _ in range(_TRIES):
        if most_s <= _MAX_RATIO * size / at * least_s + _NOISE_S:
            return True
        least_s, most_s = min(least_s, thread_s(small)), min(most_s, thread_s(large))
    return False


# ---- Patterns ----------------------------------------------------------------------------------

# How each compiled pattern is used, and texts that lead it far, beside those that are for all.
PATTERNS: Mapping[str, tuple[str, ...]] = {
    "penstock_common.key_file_format:_HASH": ("fullmatch",),
    "penstock_common.key_file_format:_HEADER": ("match", "[[", " keys "),
    "penstock_common.key_file_format:_NAME": ("fullmatch",),
    "penstock_common.logs:_CONTROLS": ("search",),
    "penstock_common.tracing.spans:_TRACEPARENT": ("fullmatch", "00-"),
    "penstock_router.apis.openai.kinds:_ID_KEY": ("fullmatch",),
    "penstock_router.apis.responses.output.encoded_text:_OPENS": ("match", '{"input"', ' { "'),
    "penstock_router.apis.responses.output.encoded_text:_PLAIN": ("match",),
    "penstock_router.apis.responses.output.encoded_text:_UNIT": ("fullmatch",),
    "penstock_router.apis.tools:_NAME": ("match",),
    "penstock_router.flag_values:_DOMAIN": ("fullmatch", "a.", "a-."),
    "penstock_router.flag_values:_ORIGIN": ("fullmatch", "http://"),
    "penstock_router.text.formats.channel_formats.harmony:_WORD": ("match",),
    "penstock_router.text.formats.channel_formats.kimi_k3:_ATTRIBUTE": (
        *("search", ' type="', "' index = a", '" '),
    ),
    "penstock_router.text.formats.json_formats.kimi_k2:_NUMBER": ("search", ":1", ":12a"),
    "penstock_router.text.formats.json_formats.marked_lists:_LIST_IN_MARKS": (
        *("search", "<tool_call>", "<tool_call> ", "\\n"),
    ),
    "penstock_router.text.formats.python_formats.pythonic:_DESCRIBED": ("search", "[a(", "[a(b"),
    "penstock_router.text.formats.reading.bare_keys:_KEY": ("match",),
    "penstock_router.text.formats.reading.json_calls:_BRACKETS": ("match",),
    "penstock_router.text.formats.reading.json_mender:_NAME": ("match",),
    "penstock_router.text.formats.reading.json_mender:_NAME_REST": ("match",),
    "penstock_router.text.formats.reading.json_mender:_NUMBER": ("match", "1e", "0."),
    "penstock_router.text.formats.reading.json_mender:_ORDINARY": ("match",),
    "penstock_router.text.formats.reading.json_mender:_SPACES": ("match",),
    "penstock_router.text.formats.reading.json_mender:_WORD": ("match",),
    "penstock_router.text.formats.reading.keyed_calls:_TEXT": ("match",),
    "penstock_router.text.formats.reading.named_arguments:_WHOLE": ("fullmatch", "^", "^a$"),
    "penstock_router.text.formats.reading.offered_tools:_NAME": ("match",),
    "penstock_router.text.formats.reading.python_calls:_IDENTIFIER": ("match",),
    "penstock_router.text.formats.reading.python_literals:ARGUMENT_BEGUN": ("match", "a =="),
    "penstock_router.text.formats.reading.python_literals:CALL_BEGUN": ("match", "a."),
    "penstock_router.text.formats.reading.python_literals:_BRACKETS": ("match",),
    "penstock_router.text.formats.reading.python_literals:_ELEMENT": ("match",),
    "penstock_router.text.formats.reading.python_literals:_ESCAPE": ("match", "\\N{", "\\u1"),
    "penstock_router.text.formats.reading.python_literals:_JSON_NUMBER": ("match", "1e", "0."),
    "penstock_router.text.formats.reading.python_literals:_NUMBER_BEGUN": ("match",),
    "penstock_router.text.formats.reading.python_literals:_ORDINARY": ("match",),
    "penstock_router.text.formats.reading.python_literals:_WORD": ("match",),
    "penstock_router.text.formats.reading.reader:_NAME": ("match",),
    "penstock_router.text.formats.reading.reader:_SPACES": ("match",),
    "penstock_router.text.formats.reading.tagged_calls:_BRACKETS": ("match",),
    "penstock_router.text.formats.reading.tagged_calls:_KEY": ("match",),
    "penstock_router.text.formats.reading.tagged_calls:_NAME": ("match", "./", "a/."),
    "penstock_router.text.formats.tagged_formats.deepseek_dsml:_NAMED": (
        *("fullmatch", ' string="', "' string = true", '" '),
    ),
    "penstock_router.text.formats.tagged_formats.hunyuan:_SUFFIX": (
        *("search", "<tool_calls", "<tool_calls:a", "<tool_calls:a> "),
    ),
    "penstock_router.text.reasoning:_SUFFIX": ("search", "':a", '":'),
    "penstock_router.text.reasoning:_SUFFIXED": ("search", "</think", "</think:a"),
    "penstock_router.text.text_parts:_BETWEEN_WORDS": ("split", "a", " ", "_ ", "  a"),
    "penstock_router.text.text_parts:_PLACE": ("match", "a", " ", " a", "\n a"),
}
# Patterns that are made where they are used, and what bounds or shows their work.
OTHER_PATTERNS: Mapping[str, str] = {
    "penstock_common.tracing.trace_export:read_tracing": "a flag",
    "penstock_router.apis.ollama.model_facts:_HEAD": "the name of a model's architecture",
    "penstock_router.openapi.document:_name": "routes of our own",
    "penstock_router.openapi.document:_parameters": "routes of our own",
    "penstock_router.routes.base:Route.canonical_path": "routes of our own",
    "penstock_router.routes.docs:_policy": "pages of our own",
    "penstock_router.text.formats.channel_formats.channel_reader:ChannelReader.__init__": "FORMATS",
    "penstock_router.text.formats.reading.bare_keys:BareKeyParser.__init__": "FORMATS",
    "penstock_router.text.formats.reading.bare_keys:BareKeyParser._may_begin_element": "FORMATS",
    "penstock_router.text.formats.reading.json_mender:JsonMender._end_escape": "FORMATS",
    "penstock_router.text.formats.reading.python_calls:PythonCallParser._may_follow": "FORMATS",
    "penstock_router.text.formats.reading.python_literals:LiteralParser._may_begin_element": (
        "FORMATS"
    ),
    "penstock_router.text.formats.reading.reader:one_of": "FORMATS",
    "penstock_router.text.formats.reading.tags:_pattern": "templates, words of our own",
    "penstock_router.text.formats.reading.tags:is_python_rendered": "templates, a word",
    "penstock_router.text.marks:_in_parts": "marks of our own",
    "penstock_router.text.stop_strings:_Automaton.__init__": "characters in brackets",
    "penstock_router.text.template_fit.asking:Asker.names": "templates, a word",
    "penstock_router.text.template_fit.asking:Asker.reads": "templates, a word",
    "penstock_router.text.template_fit.probes:_json": "texts of our own",
}
# Repeated, they are hard for readers of all kinds.
UNITS = (
    *(" ", "\n", "a", "a ", "1", "-", ".", ",", ":", "=", "é", "\\", "\\u", '\\"', '"', "'", "`"),
    *("[", "]", "{", "}", "(", ")", "<", "</", ">", "![](", "![]()", '{"a":', "[[],", "<think>"),
    *("a=", 'a="', "a:", "data:;base64,", "http://", "http://a.", "%", "&", "%{", "{%"),
)


# ---- Bodies ------------------------------------------------------------------------------------

_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}{{ call.function.name }}{{ call.id }}{% endfor %}"
    "<|im_end|>\n{% endfor %}"
)


def text_model(format_: CallFormat) -> TextModel:
    """A model that writes calls in a format, and takes any length."""
    return TextModel(
        "m",
        10_000_000,
        INFO.vocab_size,
        load_tokenizer(model_files(byte_level_tokenizer())),
        ChatTemplate({"default": _TEMPLATE}, {}),
        False,
        Conventions(format_, STYLES["think"]),
    )


_USER = {"role": "user", "content": "x"}
# Of each kind the field of its text, and what else it needs.
TEXTS: Mapping[str, tuple[str, JsonObject]] = {
    "completions": ("prompt", {}),
    "chats": ("messages", {}),
    "messages": ("messages", {"model": "m", "max_tokens": 5}),
    "responses": ("input", {}),
    "generate": ("inputs", {}),
    "generate_stream": ("inputs", {}),
    "compat": ("inputs", {}),
    "embeddings": ("input", {}),
    "invocations": ("inputs", {}),
    "count_tokens": ("messages", {"model": "m"}),
    "tokenize": ("prompt", {}),
    "tokenize_prompt": ("prompt", {}),
    "tokenize_inputs": ("inputs", {}),
    "chat_tokenize": ("messages", {}),
    "detokenize": ("tokens", {}),
    "ollama_chat": ("messages", {"model": "m"}),
    "ollama_generate": ("prompt", {"model": "m"}),
    "ollama_raw": ("prompt", {"model": "m", "raw": True}),
    "ollama_generate_or_raw": ("prompt", {"model": "m"}),
    "ollama_embed": ("input", {"model": "m"}),
    "ollama_embeddings": ("prompt", {"model": "m"}),
}
# The fields of kinds that are no `Api`s.
FIELDS: Mapping[str, Table] = {
    "embeddings": embeddings.FIELDS,
    "count_tokens": MESSAGES_FIELDS,
    **dict.fromkeys(("tokenize_prompt", "tokenize_inputs"), tokenize.TOKENIZE_FIELDS),
    "chat_tokenize": tokenize.CHAT_TOKENIZE_FIELDS,
    "detokenize": tokenize.DETOKENIZE_FIELDS,
    "ollama_embed": EMBED_FIELDS,
    "ollama_embeddings": EMBEDDINGS_FIELDS,
}


def body(kind: str, text: Any = "x", **more: Any) -> JsonObject:
    """A body of a kind, with this text and these fields."""
    name, needed = TEXTS[kind]
    if kind == "detokenize":
        text = [1]
    value = [{"role": "user", "content": text}] if name == "messages" else text
    return {name: value, **needed, **more}


def values(size: int) -> Iterator[Any]:
    """Values that a field may be given, of some thousand bytes each."""
    yield from ("[" * size, " " * size, "![](" * size, '{"a":' * size, "x " * size)
    yield from ([], ["x"] * size, [f"x{at}" for at in range(size)], list(range(size)))
    yield from ([[]] * size, [[1, 2]] * size, [1.5] * size, [None] * size)
    yield {f"x{at}": at for at in range(size)}
    yield {str(at): 1 for at in range(size)}
    yield [{"type": "text", "text": "x"}] * size
    yield [{"role": "user", "content": "x"}] * size
    yield [{"role": role, "content": "x"} for role in ("user", "assistant") * (size // 2)]
    yield [{"type": "function", "function": {"name": "f"}}] * size
    yield [{"type": "function", "name": f"f{at}", "function": None} for at in range(size)]
    yield {"type": "json_schema", "json_schema": {"name": "x", "schema": wide_schema(size)}}
    yield {"type": "json_schema", "name": "x", "schema": wide_schema(size)}
    yield {"choice": [f"x{at}" for at in range(size)]}
    yield wide_schema(size)


def wide_schema(size: int) -> JsonObject:
    """A schema of many properties."""
    return {"type": "object", "properties": {f"p{at}": {"type": "string"} for at in range(size)}}


def _function(at: int, **more: Any) -> JsonObject:
    return {"type": "function", "function": {"name": f"f{at}", **more}}


def _calls(size: int) -> list[JsonObject]:
    return [
        {"id": f"c{at}", "type": "function", "function": {"name": f"f{at}", "arguments": "{}"}}
        for at in range(size)
    ]


def _results(size: int, prefix: str) -> list[JsonObject]:
    return [{"role": "tool", "tool_call_id": f"{prefix}{at}", "content": "r"} for at in range(size)]


def _chat(*messages: JsonObject, **more: Any) -> JsonObject:
    return {"messages": [_USER, *messages], **more}


def _asking(size: int) -> JsonObject:
    return {"role": "assistant", "content": "", "tool_calls": _calls(size)}


def _ollama(size: int, **named: str) -> JsonObject:
    calls = [{"function": {"name": f"f{at}", "arguments": {}}} for at in range(size)]
    results = [
        {"role": "tool", "content": "r", **{key: f"{value}{at}" for key, value in named.items()}}
        for at in reversed(range(size))
    ]
    asking = {"role": "assistant", "content": "", "tool_calls": calls}
    return {"model": "m", "messages": [asking, *results]}


def _allowed(tools: list[JsonObject]) -> JsonObject:
    return {"type": "allowed_tools", "mode": "auto", "tools": tools}


_NAMESPACE = {"type": "namespace", "name": "ns"}


def _blocks(size: int, **more: Any) -> JsonObject:
    calls = [{"type": "tool_use", "id": f"c{at}", "name": "f", "input": {}} for at in range(size)]
    results = [{"type": "tool_result", "tool_use_id": f"c{at}"} for at in range(size)]
    turns = [{"role": "assistant", "content": calls}, {"role": "user", "content": results}]
    return {"model": "m", "max_tokens": 5, "messages": [_USER, *turns], **more}


def _items(size: int, *kinds: str) -> JsonObject:
    items: list[JsonObject] = [{"role": "user", "content": "x"}]
    for at in range(size):
        items += [
            {"type": kind, "call_id": f"c{at}", "name": "f", "arguments": "{}", "output": "r"}
            for kind in kinds
        ]
    return {"input": items}


# Whole bodies that are hard for what lies beyond their fields, by kind.
BODIES: Sequence[tuple[str, Callable[[int], JsonObject]]] = (
    ("chats", lambda size: _chat(_asking(size), *_results(size, "c"))),
    ("chats", lambda size: _chat(_asking(size), *_results(size, "stranger"))),
    (
        "chats",
        lambda size: _chat(
            _asking(size), _USER, {"role": "assistant", "content": "a"}, *_results(size, "c")
        ),
    ),
    ("chats", lambda size: _chat(*[_asking(1)] * size, *_results(size, "c"))),
    ("chats", lambda size: _chat(*[_USER] * size)),
    ("chats", lambda size: _chat(*[{"role": "system", "content": "x"}] * size)),
    (
        "chats",
        lambda size: _chat(
            tools=[_function(at) for at in range(size)],
            tool_choice=_allowed([_function(at) for at in range(size)]),
        ),
    ),
    (
        "chats",
        lambda size: _chat(tools=[_function(0)] * size, tool_choice=_allowed([_function(0)])),
    ),
    ("chats", lambda size: _chat(stop=[f"{at:x}" for at in range(size)][:1000])),
    ("chats", lambda size: _chat(response_format={"type": "regex", "value": "(a|" * size})),
    ("ollama_chat", _ollama),
    ("ollama_chat", lambda size: _ollama(size, tool_name="f")),
    ("ollama_chat", lambda size: _ollama(size, tool_call_id="call_")),
    ("ollama_chat", lambda size: _ollama(size, tool_name="none")),
    (
        "responses",
        lambda size: {
            "input": "x",
            "tools": [
                {
                    **_NAMESPACE,
                    "tools": [{"type": "function", "name": f"f{at}"} for at in range(size)],
                }
            ],
            "tool_choice": _allowed([_NAMESPACE] * size),
        },
    ),
    ("responses", lambda size: _items(size, "function_call", "function_call_output")),
    ("responses", lambda size: _items(size, "function_call")),
    ("responses", lambda size: _items(size, "function_call_output")),
    ("messages", _blocks),
    (
        "messages",
        lambda size: _blocks(
            size,
            tools=[
                {"name": "f"},
                *({"name": f"g{at}", "defer_loading": True} for at in range(size)),
            ],
        ),
    ),
)


# ---- Formats of calls --------------------------------------------------------------------------

OWN_FORMATS: Mapping[str, CallFormat] = {each.name: each for each in FORMATS.values()}
_OF_LISTS = {"type": "array", "items": {"type": "string"}}
OFFERED = (
    Tool("now"),
    Tool("search", {"type": "object", "properties": {"q": {"type": "string"}, "l": _OF_LISTS}}),
)


def answers(format_: CallFormat) -> list[tuple[str, str]]:
    """Return beginnings of answers that are hard to read in a format, each with what it repeats."""
    begins = ("", *format_.begins())
    heads = [f"{begin}{call}" for begin in begins for call in ("", "search", '{"name": "now", ')]
    units = (*(" ", "a", "[", '{"a":', '"', "<", "\\"), *format_.marks)
    return [(head, unit) for head in dict.fromkeys(heads) for unit in dict.fromkeys(units)]


# Tools and an answer, by what they have many of.
Answer = tuple[list[Tool], str]


def many(format_: CallFormat) -> Mapping[str, Callable[[int], Answer]]:
    """Answers of many calls, arguments and marks, to many tools, as the format's family writes
    them.
    """
    family = next(each for each in FAMILIES if each.format == format_.name)

    def arguments(size: int) -> str:
        return family.write([("f0", {f"p{at}": "x" for at in range(size)})])

    def marks(mark: str) -> Callable[[int], Answer]:
        return lambda size: (
            TOOLS["optional"](size),
            family.write([("f0", {"p0": "VALUE"})]).replace("VALUE", f"{mark}z " * size),
        )

    return {
        "arguments": lambda size: (TOOLS["optional"](size), arguments(size)),
        "references": lambda size: (TOOLS["unions"](size), arguments(size)),
        "calls": lambda size: (TOOLS["optional"](size), family.write([("f0", {"p0": "x"})]) * size),
        "tools": lambda size: (
            TOOLS["tools"](size),
            "".join([family.write([(f"f{at}", {})]) for at in range(size)]),
        ),
        "names without arguments": lambda size: (
            TOOLS["tools"](size),
            "".join([f"{(*format_.begins(), '')[0]}z{at}</arg_key>" for at in range(size)]),
        ),
        **{f"{mark} within values": marks(mark) for mark in format_.marks},
    }


def marks_in_reasoning(format_: CallFormat) -> Mapping[str, Callable[[int], Answer]]:
    """Reasoning in which calls begin again and again."""
    return {
        begin: lambda size, begin=begin: (TOOLS["tools"](size), f"{begin}x\n" * size)  # type: ignore[misc]
        for begin in format_.begins()
    }


def _tool(at: int, size: int, *, needed: bool, schema: JsonObject, **more: Any) -> Tool:
    names = [f"p{number}" for number in range(size)]
    parameters: JsonObject = {"type": "object", "properties": dict.fromkeys(names, schema), **more}
    return Tool(f"f{at}", parameters | ({"required": names} if needed else {}))


def _nested(depth: int) -> JsonObject:
    schema: JsonObject = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema, "b": schema}}
    return schema


_TEXT = {"type": "string"}
_LISTED = {"$ref": "#/$defs/d0"}


def _object(properties: JsonObject) -> JsonObject:
    return {"type": "object", "properties": properties, "required": list(properties)}


def _definitions(size: int) -> JsonObject:
    return {f"d{at}": {"anyOf": [{"title": "x"}, {"type": "integer"}]} for at in range(size)}


def _union(size: int) -> JsonObject:
    return {"u": {"anyOf": [{"title": "x"} for _ in range(size)]}}


# Tools that make long constraints, by what they have many of.
TOOLS: Mapping[str, Callable[[int], list[Tool]]] = {
    "optional": lambda size: [_tool(0, size, needed=False, schema=_TEXT)],
    "required": lambda size: [_tool(0, size, needed=True, schema=_TEXT)],
    "lists": lambda size: [_tool(0, size, needed=False, schema=_OF_LISTS)],
    "nested": lambda size: [_tool(0, size // 16, needed=False, schema=_nested(4))],
    "tools": lambda size: [_tool(at, 1, needed=False, schema=_TEXT) for at in range(size)],
    "definitions": lambda size: [
        _tool(0, size, needed=False, schema=_LISTED, **{"$defs": _definitions(size)})
    ],
    "definitions of tools": lambda size: [
        _tool(at, 4, needed=False, schema=_LISTED, **{"$defs": _definitions(32)})
        for at in range(size // 16)
    ],
    "unions": lambda size: [
        _tool(0, size, needed=False, schema={"$ref": "#/$defs/u"}, **{"$defs": _union(size)})
    ],
    "definitions of each": lambda size: [
        Tool(
            "f",
            {
                **_object({f"p{at}": {"$ref": f"#/$defs/d{at}"} for at in range(size)}),
                "$defs": {f"d{at}": _object({"a": _TEXT}) for at in range(size)},
            },
        )
    ],
    "space in names": lambda size: [
        Tool("f", {"type": "object", "properties": {" " * size + "a": _TEXT}})
    ],
    "values": lambda size: [
        _tool(0, 1, needed=False, schema={"enum": [f"v{at}" for at in range(size)]})
    ],
}
