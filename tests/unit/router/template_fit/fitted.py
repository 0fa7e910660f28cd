"""Chats made to fit small templates, each with the quirk of a family."""

from __future__ import annotations

import re
from typing import Any

from penstock_router.request import Message
from penstock_router.text.chat_template import ChatTemplate
from penstock_router.text.template_fit.fit import fit
from penstock_router.text.template_fit.scenes import TOOL
from penstock_router.text.template_fit.traits import TemplateTraits

# Takes all there is. What stands in capitals is replaced by the quirks of families.
WHOLE = """{%- for m in messages -%}
HEAD
{%- if m.role == 'tool' -%}
[tool RESULT]
{%- elif m.role == 'assistant' -%}
[assistant REASON TEXT CALLS]
{%- else -%}
[{{ m.role }} {{ m.content }}]
{%- endif -%}
{%- endfor -%}"""
_PIECES = {
    "BEFORE": "",
    "HEAD": "",
    "RESULT": "{{ m.content }}",
    "REASON": "{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}",
    "TEXT": "{{ m.content }}",
    "CALLS": "{% for c in m.tool_calls or [] %}<{{ c.function.name }} "
    "{{ c.function.arguments | tojson }}>{% endfor %}",
}


def template(**pieces: str) -> ChatTemplate:
    """The whole template with other pieces; `BEFORE` stands before it."""
    source = WHOLE
    for name, piece in (_PIECES | pieces).items():
        source = source.replace(name, piece)
    return ChatTemplate(
        {"default": pieces.get("BEFORE", "") + source + pieces.get("AFTER", "")}, {}
    )


def refusing(condition: str) -> str:
    """A piece that refuses messages."""
    return "{%- if " + condition + " -%}{{ raise_exception('not so') }}{%- endif -%}"


def traits_of(made: ChatTemplate) -> TemplateTraits:
    """Return the form of messages that the template takes."""
    return made.traits(with_tools=False)


def rendered(made: ChatTemplate, *messages: Message, **hooks: Any) -> str:
    """The chat as the template renders it when it is made to fit, without space beside brackets."""
    before = repr(messages)
    fitted = fit(list(messages), traits_of(made), **hooks)
    assert repr(messages) == before, "a message was changed where it is"
    text = made.render(fitted, tools=[TOOL] if made.takes_tools else None)
    return re.sub(r" ?([][()<>]) ?", r"\1", " ".join(text.split()))


def passing_over(condition: str) -> str:
    """A piece that shows nothing of messages."""
    return "{%- if " + condition + " -%}{%- continue -%}{%- endif -%}"


def user(text: Any) -> Message:
    """A message of the user."""
    return {"role": "user", "content": text}


def system(text: Any) -> Message:
    """A message of the operator."""
    return {"role": "system", "content": text}


def developer(text: Any) -> Message:
    """A message of the developer."""
    return {"role": "developer", "content": text}


def answer(text: Any, **more: Any) -> Message:
    """A message of the assistant."""
    return {"role": "assistant", "content": text, **more}


def call(call_id: str = "", name: str = "look", arguments: Any = None) -> dict[str, Any]:
    """A call in a message of the assistant; without an id where it is ""."""
    function = {"name": name, "arguments": {"at": 1} if arguments is None else arguments}
    return {**({"id": call_id} if call_id else {}), "type": "function", "function": function}


def calling(*calls: dict[str, Any], **more: Any) -> Message:
    """A message of the assistant with calls."""
    return {"role": "assistant", **more, "tool_calls": list(calls)}


def result(text: Any, call_id: str = "", **more: Any) -> Message:
    """A message with what a call returned."""
    return {"role": "tool", **({"tool_call_id": call_id} if call_id else {}), "content": text,
            **more}  # fmt: skip


def parts(*texts: str) -> list[dict[str, str]]:
    """A content in parts."""
    return [{"type": "text", "text": text} for text in texts]
