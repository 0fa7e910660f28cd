"""The calls of an answer come back from a client and render as the family writes them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.families import FAMILIES
from support.families.family import Call
from support.families.templates import TEMPLATES
from support.router_doubles import byte_level_tokenizer, model_files

from penstock_router.apis.chat_messages import MESSAGES
from penstock_router.request import ChatRequest, Tool, ToolChoice
from penstock_router.text.answer_pieces import PieceKind, join_pieces
from penstock_router.text.answer_reader import make_reader
from penstock_router.text.chat_template import ChatTemplate
from penstock_router.text.marks import NO_MARKS
from penstock_router.text.model_conventions import conventions_of
from penstock_router.text.prompts import TextModel, render
from penstock_router.text.tokenizer import load_tokenizer

_CITY = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOLS = tuple(
    Tool(
        name,
        _CITY,
        shown={
            "type": "function",
            "function": {"name": name, "description": "Looks.", "parameters": _CITY},
        },
    )
    for name in ("get_weather", "get_time")
)
CALLS: list[Call] = [
    ("get_weather", {"city": 'Zürich "West"', "days": 3}),
    ("get_time", {"city": "Oslo"}),
]
BY_FORMAT = {family.format: family for family in FAMILIES}
# In what their templates write of earlier turns there is more than models write: ids, or who speaks
# to whom. There the arguments are looked for.
_TOLD_OTHERWISE = ("harmony", "solar_open", "mistral", "mistral_named")
# Python may be written in several ways.
_PYTHON = 'get_weather(city="Zürich \\"West\\"", days=3), get_time(city="Oslo")'
TOKENIZER = load_tokenizer(model_files(byte_level_tokenizer()))


def model_of(source: str) -> TextModel:
    template = ChatTemplate({"default": source}, {"bos_token": "<s>", "eos_token": "</s>"})
    conventions = conventions_of(template, "auto", "auto")
    return TextModel("m", 4096, 1000, TOKENIZER, template, False, conventions)


def answered(model: TextModel, said: str) -> dict[str, Any]:
    """The message that a client gets, and sends back."""
    reader = make_reader(model.conventions, TOOLS, NO_MARKS, begun=False)
    pieces = join_pieces([*reader.feed(said), *reader.flush()])
    calls: list[dict[str, Any]] = []
    for piece in pieces:
        if piece.kind is PieceKind.CALL:
            function = {"name": piece.text, "arguments": ""}
            calls.append({"id": f"call_{len(calls)}x", "type": "function", "function": function})
        elif piece.kind is PieceKind.ARGUMENTS:
            calls[piece.call]["function"]["arguments"] += piece.text
    return {"role": "assistant", "content": None, "tool_calls": calls}


@pytest.mark.parametrize("name", TEMPLATES)
def test_calls_that_were_answered_render_as_their_model_wrote_them(name: str) -> None:
    family, model = BY_FORMAT[name], model_of(TEMPLATES[name])
    calls = CALLS if family.is_parallel else CALLS[:1]
    said = family.write(calls)
    message = answered(model, said)
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": f"Result {at}"}
        for at, call in enumerate(message["tool_calls"])
    ]
    chat = [{"role": "user", "content": "Look!"}, message, *results]
    asked = ChatRequest(
        messages=MESSAGES.read("messages", chat), tools=TOOLS, tool_choice=ToolChoice("auto")
    )
    text = "".join(render(asked, model))
    wanted = [said]
    if name in _TOLD_OTHERWISE:
        wanted = [json.dumps(arguments, ensure_ascii=False) for _, arguments in calls]
    elif name == "pythonic":
        wanted = [_PYTHON]
    places = [text.find(each) for each in wanted]
    assert min(places) >= 0, (wanted, text)
    assert places == sorted(places)
    given = [json.loads(call["function"]["arguments"]) for call in message["tool_calls"]]
    assert given == [arguments for _, arguments in calls]
    shown = [text.find(str(result["content"])) for result in results]
    assert min(shown) > places[0]
    assert shown == sorted(shown)
