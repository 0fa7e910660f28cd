"""Blocks of Messages that are no text, image or call of the client's: as text, or left out."""

from __future__ import annotations

from typing import Any

import pytest

from penstock_router.apis.messages.requests import parse
from penstock_router.errors import BadRequest
from penstock_router.request import ChatRequest, Message

USER = {"role": "user", "content": "Hello"}
REFERENCE = {"type": "tool_reference", "tool_name": "f"}
PLAIN = {"type": "text", "media_type": "text/plain", "data": "All of it."}


def request_of(*turns: Any, **fields: Any) -> ChatRequest:
    return parse({"model": "m", "max_tokens": 9, "messages": [USER, *turns], **fields})


def messages_of(*turns: Any) -> list[Message]:
    return request_of(*turns).messages[1:]


def asked(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def said(*blocks: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


# ---- Documents and what was found --------------------------------------------------------------

DOCUMENT = {"type": "document", "source": PLAIN, "title": "Report", "context": "Of May."}
FOUND = {
    "type": "search_result",
    "source": "https://example.org",
    "title": "A page",
    "content": [text("Words.")],
    "citations": {"enabled": False},
}


def test_documents_are_their_text_with_what_they_are_called() -> None:
    [message] = messages_of(asked(DOCUMENT, text("Sum it up.")))
    assert message["content"] == [
        text("Document: Report\nOf May."),
        text("All of it."),
        text("Sum it up."),
    ]
    untitled = {"type": "document", "source": {"type": "content", "content": [text("In blocks.")]}}
    assert messages_of(asked(untitled)) == [{"role": "user", "content": "In blocks."}]
    nothing = {**DOCUMENT, "title": None, "context": None, "citations": {"enabled": True}}
    request = request_of(asked(nothing))
    assert request.messages[1]["content"] == "All of it."
    assert request.warnings == ("messages[1].content[0].citations: none are made",)


def test_what_a_search_found_is_text_also_in_results() -> None:
    parts = [text("Search result: A page\nhttps://example.org"), text("Words.")]
    assert messages_of(asked(FOUND))[0]["content"] == parts
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [FOUND, DOCUMENT]}
    assert messages_of(asked(result))[0]["content"][:2] == parts


def test_a_browsers_state_is_text() -> None:
    state = {"type": "browser_state", "tabs": [{"tab_id": 1, "active": True}]}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [state]}
    assert messages_of(asked(result))[0]["content"] == '{"tabs": [{"tab_id": 1, "active": true}]}'


@pytest.mark.parametrize(
    ("block", "words"),
    [
        (
            {"type": "document", "source": {"type": "base64", "media_type": "application/pdf"}},
            "messages[1].content[0]: this server does not support PDF input; send text",
        ),
        ({"type": "document", "source": {"type": "file", "file_id": "f"}}, "not 'file'"),
        ({"type": "document"}, "messages[1].content[0].source: must be an object"),
        ({**DOCUMENT, "title": 3}, "messages[1].content[0].title: must be a string"),
        ({"type": "search_result"}, "messages[1].content[0].content: must be an array"),
        ({"type": "container_upload", "file_id": "f"}, "blocks of type 'container_upload' are not"),
        ({"type": "something_new"}, "messages[1].content[0]: blocks of type 'something_new' are"),
        ({"type": "tool_reference"}, "messages[1].content[0].tool_name: must be a string"),
    ],
)
def test_a_block_with_what_cannot_be_read_is_refused(block: Any, words: str) -> None:
    with pytest.raises(BadRequest) as refused:
        request_of(asked(block))
    assert words in refused.value.message


# ---- What Anthropic's servers added to an answer -----------------------------------------------


def call(kind: str, name: str, id_: str = "s1", **arguments: Any) -> dict[str, Any]:
    return {"type": kind, "id": id_, "name": name, "input": arguments}


def shown(name: str, id_: str = "s1", **arguments: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": id_, "type": "function", "function": function}


def test_calls_that_servers_ran_are_calls_with_their_results() -> None:
    web = {
        "type": "web_search_tool_result",
        "tool_use_id": "s1",
        "content": [
            {
                "type": "web_search_result",
                "title": "Cats",
                "url": "https://cats.example",
                "encrypted_content": "AAAA",
                "page_age": None,
            }
        ],
    }
    turn = said(text("I look."), call("server_tool_use", "web_search", query="cats"), web,
                {**text("They purr."), "citations": [{"cited_text": "purr"}]})  # fmt: skip
    assert messages_of(turn, USER)[:3] == [
        {
            "role": "assistant",
            "content": "I look.",
            "tool_calls": [shown("web_search", query="cats")],
        },
        {
            "role": "tool",
            "tool_call_id": "s1",
            "name": "web_search",
            "content": '[{"type": "web_search_result", "title": "Cats", '
            '"url": "https://cats.example"}]',
        },
        {"role": "assistant", "content": "They purr."},
    ]


@pytest.mark.parametrize(
    ("kind", "content", "told"),
    [
        ("web_search_tool_result", {"error_code": "max"}, '{"error_code": "max"}'),
        ("mcp_tool_result", "Done.", "Done."),
        ("mcp_tool_result", [text("Done.")], "Done."),
        ("mcp_tool_result", None, ""),
        ("code_execution_tool_result", {"stdout": "4\n"}, '{"stdout": "4\\n"}'),
        (
            "web_fetch_tool_result",
            {"type": "web_fetch_result", "content": {"source": {"type": "base64", "data": "A"}}},
            '{"type": "web_fetch_result", "content": {"source": {"type": "base64"}}}',
        ),
        ("tool_search_tool_result", {"tool_references": [REFERENCE]}, "f"),
    ],
)  # fmt: skip
def test_results_of_servers_are_told_as_far_as_they_can_be_read(
    kind: str, content: Any, told: str
) -> None:
    result = {"type": kind, "tool_use_id": "s1", "content": content}
    messages = messages_of(said(call("server_tool_use", "x"), result), USER)
    assert messages[1]["role"] == "tool"
    assert messages[1]["content"].startswith(told)


def test_a_servers_failure_is_one() -> None:
    result = {"type": "mcp_tool_result", "tool_use_id": "s1", "content": "No.", "is_error": True}
    turn = said({**call("mcp_tool_use", "go"), "server_name": "mine"}, result)
    assert messages_of(turn, USER)[1]["content"] == "Error: No."


def test_a_summary_stands_for_all_before_it() -> None:
    earlier = said(text("Long ago."))
    turn = said({"type": "compaction", "content": "They met."}, text("Now?"))
    assert request_of(earlier, USER, turn, USER).messages == [
        {"role": "user", "content": "They met."},
        {"role": "assistant", "content": "Now?"},
        USER,
    ]
    failed = said({"type": "compaction", "content": None}, text("Now?"))
    assert len(request_of(earlier, USER, failed, USER).messages) == 5


def test_blocks_that_no_model_sees_are_left_out() -> None:
    turn = said(
        {"type": "redacted_thinking", "data": "AAAA"},
        {"type": "thinking", "thinking": "", "signature": "s"},
        {"type": "thinking", "thinking": None},
        {"type": "fallback", "from": {}, "to": {}},
        {"type": "mcp_tool_listing", "mcp_server_name": "x", "tools": []},
        text("Yes."),
    )
    assert messages_of(turn, USER)[0] == {"role": "assistant", "content": "Yes."}
