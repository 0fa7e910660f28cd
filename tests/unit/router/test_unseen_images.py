"""Images in results of tools, which agents send to models that see none."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from support.router_doubles import MemoryRouter
from tokenizers import Tokenizer

_PIXEL = "data:image/png;base64,iVBORw0KGgo="
_CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
_SEEN: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": [
            {"role": "user", "content": "Look"},
            {"role": "assistant", "content": None, "tool_calls": [_CALL]},
            {
                "role": "tool",
                "tool_call_id": "c1",
                "content": [
                    {"type": "text", "text": "here"},
                    {"type": "image_url", "image_url": {"url": _PIXEL}},
                ],
            },
        ]
    },
    "/v1/messages": {
        "model": "fake-model",
        "max_tokens": 4,
        "messages": [
            {"role": "user", "content": "Look"},
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "c1", "name": "look", "input": {}}],
            },
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "c1",
                        "content": [
                            {"type": "text", "text": "here"},
                            {
                                "type": "image",
                                "source": {
                                    "type": "base64",
                                    "media_type": "image/png",
                                    "data": "iVBORw0KGgo=",
                                },
                            },
                        ],
                    }
                ],
            },
        ],
    },
    "/v1/responses": {
        "input": [
            {"role": "user", "content": "Look"},
            {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
            {
                "type": "function_call_output",
                "call_id": "c1",
                "output": [
                    {"type": "input_text", "text": "here"},
                    {"type": "input_image", "image_url": _PIXEL},
                ],
            },
        ]
    },
}


@pytest.mark.parametrize("path", _SEEN)
@pytest.mark.parametrize("padding", [0, 70_000], ids=["short", "long"])
async def test_of_images_in_results_a_model_that_sees_none_is_told(
    router: MemoryRouter, path: str, padding: int
) -> None:
    answer = await router.post(path, {**_SEEN[path], "padding": "x" * padding})
    assert answer.status == 200, answer.body
    assert "images in results of tools" in answer.headers["x-penstock-warnings"]
    [request] = router.fleet.requests
    tokenizer = Tokenizer.from_str(router.fleet.files["tokenizer.json"].decode())
    prompt = tokenizer.decode(list(request.prompt_token_ids), skip_special_tokens=False)
    assert "here" in prompt
    assert "(an image, which this model cannot see)" in prompt


async def test_an_image_of_the_user_s_is_still_refused_by_such_a_model(
    router: MemoryRouter,
) -> None:
    asked = copy.deepcopy(_SEEN["/v1/chat/completions"])
    asked["messages"].append(
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": _PIXEL}}]}
    )
    answer = await router.post("/v1/chat/completions", asked)
    assert (answer.status, answer.error["param"]) == (400, "messages[3].content[0]")
