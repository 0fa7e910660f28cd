"""Released clients, each sending an image as its documentation shows: what they get is what
transformers says.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import jsonschema
import openai
import pytest
from clients.environments import observe
from clients.image_asked import MAX_TOKENS, QUESTION, SCHEMA
from pydantic import BaseModel
from support.image_files import picture, saved
from support.image_site import ImageSite, SeeingShards, data_url, image_site, web_folder

# What clients make of answers is the same of each.
pytestmark = pytest.mark.parametrize("shards", ["qwen3_vl"], indirect=True)

FILE = saved(picture(width=90, height=50), "JPEG")
URL = data_url(FILE, "image/jpeg")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("images")
    (made / "it.jpg").write_bytes(FILE)
    return made


@pytest.fixture(scope="module")
def link(folder: Path) -> Iterator[str]:
    with web_folder(folder) as url:
        yield f"{url}/it.jpg"


@pytest.fixture(scope="module")
def site(shards: SeeingShards, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ImageSite]:
    flags = ("--allowed-media-domains", "127.0.0.1", "--allowed-media-networks", "127.0.0.0/8")
    with image_site(tmp_path_factory.mktemp("site"), shards, *flags) as made:
        yield made


CONTENT: list[Any] = [
    {"type": "image_url", "image_url": {"url": URL}},
    {"type": "text", "text": QUESTION},
]
MESSAGES: list[Any] = [{"role": "user", "content": CONTENT}]


@pytest.fixture(scope="module")
def expected(site: ImageSite) -> tuple[str, int]:
    return site.answer_to(MESSAGES, [FILE])


def seen_by(environment: str, script: str, site: ImageSite, folder: Path, link: str) -> Any:
    path = str(folder / "it.jpg")
    return observe(environment, script, site.router.url, site.name, path, link)


# ---- openai --------------------------------------------------------------------------------------


@pytest.fixture
def client(site: ImageSite) -> Iterator[openai.OpenAI]:
    url = f"{site.router.url}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as made:
        yield made


class Seen(BaseModel):
    """An answer with the fields of `SCHEMA`."""

    colour: Literal["red", "green"]
    sharp: bool


def test_openais_chat_is_answered_whole_and_streamed(
    client: openai.OpenAI, site: ImageSite, expected: tuple[str, int], link: str
) -> None:
    linked = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": link}},
                                           CONTENT[1]]}]  # fmt: skip
    for messages in (MESSAGES, linked):
        asked: dict[str, Any] = {"model": site.name, "messages": messages, "temperature": 0}
        asked["max_tokens"] = MAX_TOKENS
        answer = client.chat.completions.create(**asked)
        assert (answer.choices[0].message.content, answer.usage.prompt_tokens) == expected
        chunks = list(
            client.chat.completions.create(
                **asked, stream=True, stream_options={"include_usage": True}
            )
        )
        pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
        assert ("".join(pieces), chunks[-1].usage.prompt_tokens) == expected


def test_openais_responses_are_answered_whole_and_streamed(
    client: openai.OpenAI, site: ImageSite, expected: tuple[str, int], link: str
) -> None:
    for url in (URL, link):
        content = [
            {"type": "input_image", "image_url": url, "detail": "auto"},
            {"type": "input_text", "text": QUESTION},
        ]
        asked: dict[str, Any] = {
            "model": site.name,
            "input": [{"role": "user", "content": content}],
            "max_output_tokens": MAX_TOKENS,
            "temperature": 0,
        }
        answer = client.responses.create(**asked)
        assert (answer.output_text, answer.usage.input_tokens) == expected
        with client.responses.stream(**asked) as stream:
            pieces = [each.delta for each in stream if each.type == "response.output_text.delta"]
        assert "".join(pieces) == expected[0]


def test_openai_reads_an_answer_about_an_image_by_a_schema(
    client: openai.OpenAI, site: ImageSite
) -> None:
    parsed = client.chat.completions.parse(
        model=site.name, messages=MESSAGES, response_format=Seen, max_tokens=200, temperature=0
    )
    seen = parsed.choices[0].message.parsed
    assert isinstance(seen, Seen)
    content: list[Any] = [
        {"type": "input_image", "image_url": URL, "detail": "auto"},
        {"type": "input_text", "text": QUESTION},
    ]
    response = client.responses.parse(
        model=site.name,
        input=[{"role": "user", "content": content}],
        text_format=Seen,
        max_output_tokens=200,
        temperature=0,
    )
    assert response.output_parsed == seen


def test_openai_calls_a_tool_about_an_image_and_goes_on(
    client: openai.OpenAI, site: ImageSite
) -> None:
    tool: Any = {"type": "function", "function": {"name": "note", "parameters": SCHEMA}}
    asked: dict[str, Any] = {"model": site.name, "tools": [tool], "temperature": 0}
    answer = client.chat.completions.create(
        **asked,
        messages=MESSAGES,
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=400,
    )
    message = answer.choices[0].message
    [call] = message.tool_calls or []
    assert call.type == "function"
    jsonschema.validate(json.loads(call.function.arguments), SCHEMA)
    result = {"role": "tool", "tool_call_id": call.id, "content": CONTENT[:1]}
    then: list[Any] = [*MESSAGES, message.to_dict(), result]
    answer = client.chat.completions.create(
        **asked, messages=then, tool_choice="none", max_tokens=MAX_TOKENS
    )
    assert answer.choices[0].message.content


def test_openai_raises_its_own_error_for_a_bad_image(
    client: openai.OpenAI, site: ImageSite
) -> None:
    bad: Any = {"type": "image_url", "image_url": {"url": data_url(FILE[:200])}}
    messages: Any = [{"role": "user", "content": [CONTENT[1], bad]}]
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=site.name, messages=messages)
    assert caught.value.param == "messages[0].content[1]"
    assert "messages[0].content[1]: the image is not valid JPEG" in caught.value.message


# ---- others --------------------------------------------------------------------------------------


def test_anthropics_and_ollamas_clients_are_answered(
    site: ImageSite, expected: tuple[str, int], folder: Path, link: str
) -> None:
    seen = seen_by("anthropic", "with_anthropic_images", site, folder, link)
    text, num_tokens = expected
    for form in ("base64", "link"):
        counts = {"tokens": num_tokens, "counted": num_tokens}
        assert seen[form] == {"text": text, "streamed": text, **counts}
    call = {"id": "t1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "t1", "content": CONTENT[:1]},
    ]
    assert seen["result"] == site.answer_to(messages, [FILE])[0]
    assert "messages[0].content[0]: the image is" in seen["error"]["text"]
    texts = dict.fromkeys(("chat", "streamed", "generated"), text)
    assert seen["ollama"] == {**texts, "tokens": num_tokens}


@pytest.mark.parametrize("environment", [pytest.param("sdks", marks=pytest.mark.soak), "dev"])
def test_huggingface_hubs_client_is_answered(
    site: ImageSite, expected: tuple[str, int], folder: Path, link: str, environment: str
) -> None:
    seen = seen_by(environment, "with_huggingface_images", site, folder, link)
    text, num_tokens = expected
    for form in ("data", "link"):
        assert seen[form] == {"text": text, "tokens": num_tokens, "streamed": text}
    inputs = f"![]({URL}){QUESTION}"
    ids = [token["id"] for token in site.post("/tokenize", {"inputs": inputs})]
    assert seen["generated"] == site.text(site.expected(ids, [FILE]))


@pytest.mark.soak
def test_langchain_and_litellm_are_answered(
    site: ImageSite, expected: tuple[str, int], folder: Path, link: str
) -> None:
    seen = seen_by("sdks", "with_sdk_images", site, folder, link)
    text, num_tokens = expected
    langchain = seen["langchain"]
    assert langchain["texts"] == dict.fromkeys(("image_url", "base64", "link"), text)
    assert langchain["tokens"] == [num_tokens] * 3
    assert langchain["streamed"] == text
    assert langchain["responses"] == dict.fromkeys(("image_url", "base64", "link"), text)
    jsonschema.validate(langchain["structured"], SCHEMA)
    for provider, answer in seen["litellm"].items():
        assert answer == {"text": text, "tokens": num_tokens, "streamed": text}, provider
