"""A call that is cut off: by a limit, a stop string, a stop token, or by the model itself."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.router_doubles import FakeFleet, memory_router, model_files
from tokenizers import Tokenizer
from unit.router.chat_template_styles import STYLES

BEGUN = '<tool_call>\n{"name": "run", "arguments": {"command": "rm -rf /tmp/x'
OFFERED = [{"type": "function", "function": {"name": "run"}}]
BODY: dict[str, Any] = {
    "model": "fake-model",
    "messages": [{"role": "user", "content": "Hi"}],
    "tools": OFFERED,
}


async def answered(
    tokenizer: Tokenizer, said: str, *, ends: bool = True, **more: Any
) -> dict[str, Any]:
    """The choice of an answer that says this, and which the model or its limit then ends.

    Streamed it is the same.
    """
    fleet = FakeFleet(model_files(tokenizer, STYLES["qwen-tools"]))
    ids = tokenizer.encode(said, add_special_tokens=False).ids
    fleet.script = lambda request: [*ids, 0] if ends else ids
    async with memory_router(fleet) as router:
        whole = (await router.post("/v1/chat/completions", BODY | more)).json()["choices"][0]
        streamed = await router.post("/v1/chat/completions", BODY | more | {"stream": True})
    arguments, reason = "", None
    for event in streamed.events:
        for choice in event.get("choices", ()) if isinstance(event, dict) else ():
            for call in choice["delta"].get("tool_calls", ()):
                arguments += call["function"].get("arguments", "")
            reason = choice["finish_reason"] or reason
    assert (arguments_of(whole), whole["finish_reason"]) == (arguments, reason)
    return whole


def arguments_of(choice: dict[str, Any]) -> str:
    return "".join(c["function"]["arguments"] for c in choice["message"].get("tool_calls", ()))


@pytest.fixture
def tokenizer(byte_level: Tokenizer) -> Tokenizer:
    return byte_level


async def test_a_limit_leaves_a_call_as_far_as_it_came(tokenizer: Tokenizer) -> None:
    choice = await answered(tokenizer, BEGUN, ends=False)
    assert choice["finish_reason"] == "length"
    assert arguments_of(choice) == '{"command": "rm -rf /tmp/x'


async def test_a_stop_string_leaves_a_call_as_far_as_it_came(tokenizer: Tokenizer) -> None:
    choice = await answered(tokenizer, BEGUN + '/y"}}\n</tool_call>', stop=["/y"])
    assert choice["finish_reason"] == "stop"
    assert arguments_of(choice) == '{"command": "rm -rf /tmp/x'


async def test_a_stop_string_behind_a_whole_call_is_no_cut(tokenizer: Tokenizer) -> None:
    choice = await answered(tokenizer, BEGUN + '"}}\n</tool_call> so', stop=["</tool_call>"])
    assert choice["finish_reason"] == "tool_calls"
    assert json.loads(arguments_of(choice)) == {"command": "rm -rf /tmp/x"}


async def test_a_model_that_ends_within_a_value_gets_no_end_written(tokenizer: Tokenizer) -> None:
    choice = await answered(tokenizer, BEGUN)
    assert arguments_of(choice) == '{"command": "rm -rf /tmp/x'


async def test_an_end_mark_that_is_missing_is_not_missed(tokenizer: Tokenizer) -> None:
    choice = await answered(tokenizer, BEGUN + '"}')
    assert choice["finish_reason"] == "tool_calls"
    assert json.loads(arguments_of(choice)) == {"command": "rm -rf /tmp/x"}
