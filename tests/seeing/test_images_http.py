"""Images over HTTP: by every API the tokens of transformers, and refusals in its own form."""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jsonschema
import pytest
from PIL import Image
from support.image_files import picture, png_of_zeros, saved, turned
from support.image_site import (
    NUM_TOKENS,
    ImageSite,
    SeeingShards,
    data_url,
    image_site,
    web_folder,
)
from support.processes import Router, running

_QUESTION = "what is this"
_NOISE = Image.frombytes("RGB", (210, 130), random.Random(1).randbytes(210 * 130 * 3))
_FILES = {
    "a JPEG file": saved(picture(width=90, height=50), "JPEG"),
    "a PNG file with alpha": saved(picture("RGBA", 64, 70), "PNG"),
    "one that EXIF turns": turned("JPEG", 6),
    "a WebP file": saved(picture(width=70, height=33), "WEBP"),
    # Its body is parsed in a text process.
    "a long one": saved(_NOISE, "PNG"),
}
_FILE = _FILES["a JPEG file"]
_OTHER = _FILES["one that EXIF turns"]
_MAX_IMAGES = 3
_MAX_PIXELS = 40_000


@pytest.fixture(scope="module")
def site(shards: SeeingShards, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ImageSite]:
    flags = (
        *("--allowed-media-domains", "127.0.0.1", "--allowed-media-networks", "127.0.0.0/8"),
        *("--max-images", str(_MAX_IMAGES), "--max-image-pixels", str(_MAX_PIXELS)),
        *("--trust-request-chat-template", "--max-image-bytes", "150000"),
    )
    # What one has cached the next request finds.
    one = replace(shards, shards=shards.shards[:1])
    with image_site(tmp_path_factory.mktemp("site"), one, *flags) as made:
        yield made


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a host that has each of `_FILES` under its index."""
    folder = tmp_path_factory.mktemp("host")
    for index, file in enumerate(_FILES.values()):
        (folder / str(index)).write_bytes(file)
    with web_folder(folder) as url:
        yield url


# ---- The ways to ask -----------------------------------------------------------------------------


@dataclass(frozen=True)
class _Said:
    # Without bytes of no character at its end.
    text: str
    num_prompt_tokens: int


def _said(text: str, num_prompt_tokens: int) -> _Said:
    return _Said(text.rstrip("\ufffd"), num_prompt_tokens)


@dataclass(frozen=True)
class _Way:
    path: str
    # What asks about an image at a URL, before a text.
    body: Callable[[str, str, str], dict[str, Any]]
    # Of a whole answer, and of the events of a stream.
    whole: Callable[[Any], _Said]
    streamed: Callable[[Sequence[Any]], _Said]
    takes_links: bool = True
    stream_path: str = ""


def _plain(url: str) -> str:
    """The base64 of a data URL."""
    return url.partition(",")[2]


def _chat(model: str, url: str, text: str, *, is_bare: bool = False) -> dict[str, Any]:
    image = {"type": "image_url", "image_url": url if is_bare else {"url": url, "detail": "low"}}
    content = [image, {"type": "text", "text": text}]
    return {
        **{"model": model, "messages": [{"role": "user", "content": content}]},
        **{"max_tokens": NUM_TOKENS, "temperature": 0},
    }


def _responses(model: str, url: str, text: str) -> dict[str, Any]:
    image = {"type": "input_image", "image_url": url, "detail": "auto"}
    content = [image, {"type": "input_text", "text": text}]
    return {
        **{"model": model, "input": [{"role": "user", "content": content}]},
        **{"max_output_tokens": NUM_TOKENS, "temperature": 0},
    }


def _base64_block(url: str) -> dict[str, Any]:
    media_type = url.removeprefix("data:").partition(";")[0]
    return {
        "type": "image",
        "source": {"type": "base64", "media_type": media_type, "data": _plain(url)},
    }


def _link_block(url: str) -> dict[str, Any]:
    return {"type": "image", "source": {"type": "url", "url": url}}


def _messages(
    model: str, url: str, text: str, *, block: Callable[[str], dict[str, Any]] = _link_block
) -> dict[str, Any]:
    content = [block(url), {"type": "text", "text": text}]
    return {
        **{"model": model, "messages": [{"role": "user", "content": content}]},
        **{"max_tokens": NUM_TOKENS, "temperature": 0},
    }


def _ollama_chat(model: str, url: str, text: str) -> dict[str, Any]:
    message = {"role": "user", "content": text, "images": [_plain(url)]}
    options = {"temperature": 0, "num_predict": NUM_TOKENS}
    return {"model": model, "messages": [message], "options": options}


def _ollama_generate(model: str, url: str, text: str) -> dict[str, Any]:
    options = {"temperature": 0, "num_predict": NUM_TOKENS}
    return {"model": model, "prompt": text, "images": [_plain(url)], "options": options}


def _whole_chat(answer: Any) -> _Said:
    text = answer["choices"][0]["message"]["content"]
    return _said(text, answer["usage"]["prompt_tokens"])


def _streamed_chat(events: Sequence[Any]) -> _Said:
    deltas = [event["choices"][0]["delta"] for event in events if event["choices"]]
    text = "".join(delta.get("content") or "" for delta in deltas)
    return _said(text, events[-1]["usage"]["prompt_tokens"])


def _whole_response(answer: Any) -> _Said:
    text = answer["output"][0]["content"][0]["text"]
    return _said(text, answer["usage"]["input_tokens"])


def _streamed_response(events: Sequence[Any]) -> _Said:
    pieces = [event["delta"] for event in events if event["type"].endswith("output_text.delta")]
    said = _whole_response(events[-1]["response"])
    assert "".join(pieces).rstrip("\ufffd") == said.text
    return said


def _input_tokens(usage: Any) -> int:
    return int(usage["input_tokens"] + usage["cache_read_input_tokens"])


def _whole_message(answer: Any) -> _Said:
    return _said(answer["content"][0]["text"], _input_tokens(answer["usage"]))


def _streamed_message(events: Sequence[Any]) -> _Said:
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    # The first knows nothing of the cache yet.
    ends = [event["usage"] for event in events if event["type"] == "message_delta"]
    return _said("".join(delta["text"] for delta in deltas), _input_tokens(ends[-1]))


def _ollama_said(lines: Sequence[Any], read: Callable[[Any], str]) -> _Said:
    return _said("".join(map(read, lines)), lines[-1]["prompt_eval_count"])


def _ollama(read: Callable[[Any], str]) -> tuple[Callable[..., _Said], Callable[..., _Said]]:
    return lambda answer: _ollama_said([answer], read), lambda lines: _ollama_said(lines, read)


_AS_CHATS = {
    "chat": _Way("/v1/chat/completions", _chat, _whole_chat, _streamed_chat),
    "chat with a bare URL": _Way(
        "/v1/chat/completions", partial(_chat, is_bare=True), _whole_chat, _streamed_chat
    ),
    "chat by /invocations": _Way("/invocations", _chat, _whole_chat, _streamed_chat),
    "responses": _Way("/v1/responses", _responses, _whole_response, _streamed_response),
    "messages": _Way("/v1/messages", _messages, _whole_message, _streamed_message),
    "messages with base64": _Way(
        "/v1/messages",
        partial(_messages, block=_base64_block),
        _whole_message,
        _streamed_message,
        takes_links=False,
    ),
    "ollama's chat": _Way(
        "/api/chat",
        _ollama_chat,
        *_ollama(lambda line: str(line["message"]["content"])),
        takes_links=False,
    ),
    "ollama's generate": _Way(
        "/api/generate",
        _ollama_generate,
        *_ollama(lambda line: str(line["response"])),
        takes_links=False,
    ),
}


def _urls(name: str, host: str, way: _Way) -> list[str]:
    media_type = "image/jpeg" if _FILES[name].startswith(b"\xff\xd8") else "image/png"
    links = [f"{host}/{list(_FILES).index(name)}"] if way.takes_links else []
    return [data_url(_FILES[name], media_type), *links]


def _chat_ids(site: ImageSite, messages: Any, **more: Any) -> list[int]:
    asked = {"model": site.name, "messages": messages, **more}
    token_ids: list[int] = site.post("/tokenize", asked)["tokens"]
    return token_ids


# ---- What comes of them --------------------------------------------------------------------------


@pytest.mark.parametrize("name", _FILES)
def test_a_chats_ids_are_counted_sent_and_answered_as_transformers_does(
    site: ImageSite, host: str, name: str
) -> None:
    for url in _urls(name, host, _AS_CHATS["chat"]):
        asked = {**_chat(site.name, url, _QUESTION), "return_token_ids": True}
        token_ids = _chat_ids(site, asked["messages"])
        expected = site.expected(token_ids, [_FILES[name]])
        answer = site.post("/v1/chat/completions", asked)
        assert answer["prompt_token_ids"] == token_ids
        assert answer["choices"][0]["token_ids"] == expected
        assert answer["usage"]["prompt_tokens"] == len(token_ids)
        events = site.events("/v1/chat/completions", {**asked, "stream": True})
        choices = [choice for event in events for choice in event["choices"]]
        streamed = [i for choice in choices for i in choice.get("token_ids") or ()]
        assert streamed == expected
        assert events[0]["prompt_token_ids"] == token_ids
        assert events[-1]["usage"]["prompt_tokens"] == len(token_ids)


@pytest.mark.parametrize("way", _AS_CHATS)
def test_every_api_says_what_transformers_says_whole_and_streamed(
    site: ImageSite, host: str, way: str
) -> None:
    asks = _AS_CHATS[way]
    for name, file in _FILES.items():
        same_chat = _chat(site.name, data_url(file), _QUESTION)["messages"]
        token_ids = _chat_ids(site, same_chat)
        expected = _said(site.text(site.expected(token_ids, [file])), len(token_ids))
        for url in _urls(name, host, asks):
            body = asks.body(site.name, url, _QUESTION)
            whole = site.post(asks.path, {**body, "stream": False})
            assert asks.whole(whole) == expected, (name, url[:30])
            events = site.events(asks.path, {**body, "stream": True})
            assert asks.streamed(events) == expected, (name, url[:30])


@pytest.mark.parametrize("name", _FILES)
def test_an_image_in_markdown_is_generated_after_as_transformers_does(
    site: ImageSite, host: str, name: str
) -> None:
    file = _FILES[name]
    for url in (data_url(file), f"{host}/{list(_FILES).index(name)}"):
        inputs = f"look ![]({url}) {_QUESTION}"
        parameters = {"max_new_tokens": NUM_TOKENS, "details": True}
        asked = {"inputs": inputs, "parameters": parameters}
        token_ids = [each["id"] for each in site.post("/tokenize", {"inputs": inputs})]
        expected = site.expected(token_ids, [file])
        scored = {**parameters, "decoder_input_details": True}
        whole = site.post("/generate", {"inputs": inputs, "parameters": scored})["details"]
        assert [token["id"] for token in whole["prefill"]] == token_ids
        assert [token["id"] for token in whole["tokens"]] == expected
        events = site.events("/generate_stream", asked)
        assert [event["token"]["id"] for event in events] == expected
        [compat] = site.post("/", asked)
        shown = site.text(expected)
        told = compat["generated_text"].rstrip("\ufffd")
        assert told == f"look ![]() {_QUESTION}{shown}"


def test_places_in_texts_are_those_of_what_stands_for_an_image(site: ImageSite) -> None:
    url = data_url(_FILE)
    shown = site.post("/tokenize", {"inputs": f"naïve ![]({url}) there"})
    whole = b""
    for token in shown:
        if token["start"] >= len(whole):
            assert token["start"] == len(whole)
            whole += token["text"].encode()
        assert whole[token["start"] : token["stop"]].decode() == token["text"]
    assert whole.startswith("naïve ".encode())
    assert whole.endswith(b" there")
    messages = _chat(site.name, url, _QUESTION)["messages"]
    chat = site.post("/chat_tokenize", {"model": site.name, "messages": messages})
    ids = [token["id"] for token in chat["tokenize_response"]]
    assert ids == _chat_ids(site, messages)
    text = chat["templated_text"].encode()
    for token in chat["tokenize_response"]:
        assert text[token["start"] : token["stop"]].decode() == token["text"]


_Kind = str | bytes


def _part(kind: _Kind) -> dict[str, Any]:
    if isinstance(kind, str):
        return {"type": "text", "text": kind}
    return {"type": "image_url", "image_url": {"url": data_url(kind)}}


def _block(kind: _Kind) -> dict[str, Any]:
    if isinstance(kind, str):
        return {"type": "text", "text": kind}
    return {
        "type": "image",
        "source": {"type": "base64", "media_type": "image/webp", "data": _plain(data_url(kind))},
    }


def _item(kind: _Kind) -> dict[str, Any]:
    if isinstance(kind, str):
        return {"type": "input_text", "text": kind}
    return {"type": "input_image", "image_url": data_url(kind)}


_WEBP = _FILES["a WebP file"]
_TURNS: list[tuple[str, list[_Kind]]] = [
    ("user", ["first ", _FILE, " then ", _OTHER]),
    ("assistant", ["seen"]),
    ("user", [_WEBP, "and this?"]),
]


def test_images_of_several_turns_stand_where_they_were_said(site: ImageSite) -> None:
    files = [kind for _, said in _TURNS for kind in said if isinstance(kind, bytes)]
    messages = [
        {"role": role, "content": "seen" if role == "assistant" else list(map(_part, said))}
        for role, said in _TURNS
    ]
    asked = {**_chat(site.name, "", ""), "messages": messages, "return_token_ids": True}
    answer = site.post("/v1/chat/completions", asked)
    token_ids = answer["prompt_token_ids"]
    expected = site.expected(token_ids, files)
    assert answer["choices"][0]["token_ids"] == expected
    assert _chat_ids(site, messages) == token_ids
    said = _said(site.text(expected), len(token_ids))
    turns: list[Any] = [
        {"role": role, "content": "seen" if role == "assistant" else list(map(_block, parts))}
        for role, parts in _TURNS
    ]
    asked = {"model": site.name, "messages": turns}
    counted = site.post("/v1/messages/count_tokens", asked)
    assert counted["input_tokens"] == len(token_ids)
    answer = site.post("/v1/messages", {**asked, "max_tokens": NUM_TOKENS, "temperature": 0})
    assert _whole_message(answer) == said
    items: list[Any] = [
        {"role": role, "content": "seen" if role == "assistant" else list(map(_item, parts))}
        for role, parts in _TURNS
    ]
    asked = {"model": site.name, "input": items, "max_output_tokens": NUM_TOKENS, "temperature": 0}
    assert _whole_response(site.post("/v1/responses", asked)) == said
    # Others in the same places, and the same in others.
    for others in ([_OTHER, _FILE, _WEBP], [_FILE, _OTHER, _OTHER]):
        assert site.expected(token_ids, files) == expected
        swapped = json.loads(json.dumps(messages))
        swapped[0]["content"][1], swapped[0]["content"][3] = map(_part, others[:2])
        swapped[2]["content"][0] = _part(others[2])
        asked = {**_chat(site.name, "", ""), "messages": swapped, "return_token_ids": True}
        answer = site.post("/v1/chat/completions", asked)
        again = site.expected(answer["prompt_token_ids"], others)
        assert answer["choices"][0]["token_ids"] == again


def test_a_prompt_is_the_templates_text_with_so_many_tokens_as_the_encoder_has_rows(
    site: ImageSite,
) -> None:
    if site.family != "qwen3_vl":
        pytest.skip("written out for one template")
    first: list[_Kind] = ["a", _FILE, "b", _OTHER]
    messages = [
        {"role": "user", "content": list(map(_part, first))},
        {"role": "assistant", "content": "c"},
        {"role": "user", "content": list(map(_part, [_WEBP]))},
    ]
    # 32 pixels a side, of at least four squares: 90 x 50, 40 x 60, 70 x 33.
    seen = [f"<|vision_start|>{'<|image_pad|>' * rows}<|vision_end|>" for rows in (6, 6, 6)]
    text = (
        f"<|im_start|>user\na{seen[0]}b{seen[1]}<|im_end|>\n<|im_start|>assistant\nc<|im_end|>\n"
        f"<|im_start|>user\n{seen[2]}<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = site.tokenizer.encode(text, add_special_tokens=False).ids
    assert _chat_ids(site, messages) == ids


def test_images_in_results_of_tools_are_seen(site: ImageSite) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    result: list[_Kind] = ["here: ", _FILE]
    messages = [
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": "ok", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": list(map(_part, result))},
    ]
    asked = {**_chat(site.name, "", ""), "messages": messages, "return_token_ids": True}
    answer = site.post("/v1/chat/completions", asked)
    token_ids = answer["prompt_token_ids"]
    expected = site.expected(token_ids, [_FILE])
    assert answer["choices"][0]["token_ids"] == expected
    said = _said(site.text(expected), len(token_ids))
    use = {"type": "tool_use", "id": "c1", "name": "look", "input": {}}
    done = {"type": "tool_result", "tool_use_id": "c1", "content": list(map(_block, result))}
    turns = [
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": [{"type": "text", "text": "ok"}, use]},
        {"role": "user", "content": [done]},
    ]
    asked = {"model": site.name, "messages": turns, "max_tokens": NUM_TOKENS, "temperature": 0}
    assert _whole_message(site.post("/v1/messages", asked)) == said
    items = [
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": "ok"},
        {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": list(map(_item, result))},
    ]
    asked = {"model": site.name, "input": items, "max_output_tokens": NUM_TOKENS, "temperature": 0}
    assert _whole_response(site.post("/v1/responses", asked)) == said


# ---- Beside an image -----------------------------------------------------------------------------

_SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "green"]}, "sharp": {"type": "boolean"}},
    "required": ["colour", "sharp"],
    "additionalProperties": False,
}


def test_answers_about_an_image_keep_to_a_schema(site: ImageSite) -> None:
    url = data_url(_FILE)
    named = {"type": "json_schema", "json_schema": {"name": "seen", "schema": _SCHEMA}}
    chat = {**_chat(site.name, url, _QUESTION), "max_tokens": 200, "response_format": named}
    texts = [_whole_chat(site.post("/v1/chat/completions", chat)).text]
    texts.append(_streamed_chat(site.events("/v1/chat/completions", {**chat, "stream": True})).text)
    text = {"format": {"type": "json_schema", "name": "seen", "schema": _SCHEMA}}
    response = {**_responses(site.name, url, _QUESTION), "max_output_tokens": 200, "text": text}
    texts.append(_whole_response(site.post("/v1/responses", response)).text)
    ollama = _ollama_chat(site.name, url, _QUESTION)
    ollama |= {"format": _SCHEMA, "stream": False, "options": {"temperature": 0}}
    texts.append(site.post("/api/chat", ollama)["message"]["content"])
    for each in texts:
        jsonschema.validate(json.loads(each), _SCHEMA)
    assert len(set(texts)) == 1


def test_an_answer_about_an_image_calls_a_tool(site: ImageSite) -> None:
    url = data_url(_FILE)
    tool = {"type": "function", "function": {"name": "note", "parameters": _SCHEMA}}
    chat = {**_chat(site.name, url, _QUESTION), "max_tokens": 250, "tools": [tool]}
    answer = site.post("/v1/chat/completions", {**chat, "tool_choice": "required"})
    [call, *_] = answer["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "note"
    arguments = json.loads(call["function"]["arguments"])
    jsonschema.validate(arguments, _SCHEMA)
    counted = _chat_ids(site, chat["messages"], tools=[tool], tool_choice="required")
    assert answer["usage"]["prompt_tokens"] == len(counted)
    message = {**_messages(site.name, url, _QUESTION), "max_tokens": 250}
    message |= {
        "tools": [{"name": "note", "input_schema": _SCHEMA}],
        "tool_choice": {"type": "any"},
    }
    [use, *_] = site.post("/v1/messages", message)["content"]
    assert (use["name"], use["input"]) == ("note", arguments)


def test_several_choices_of_one_image_are_counted_once(site: ImageSite) -> None:
    asked = {**_chat(site.name, data_url(_FILE), _QUESTION), "n": 2, "return_token_ids": True}
    answer = site.post("/v1/chat/completions", asked)
    first, second = answer["choices"]
    assert first["token_ids"] == second["token_ids"]
    assert first["token_ids"] == site.expected(answer["prompt_token_ids"], [_FILE])
    assert answer["usage"]["prompt_tokens"] == len(answer["prompt_token_ids"])
    assert answer["usage"]["completion_tokens"] == 2 * NUM_TOKENS


def test_a_prefix_with_an_image_is_cached_and_another_image_does_not_find_it(
    site: ImageSite,
) -> None:
    file = saved(picture(width=101, height=99), "PNG")
    other = saved(picture(width=101, height=99).rotate(180), "PNG")
    block = 16

    def ask(file: bytes, text: str, **more: Any) -> Any:
        answer = site.post(
            "/v1/chat/completions", {**_chat(site.name, data_url(file), text), **more}
        )
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"], answer

    long = "this text goes on for more than one block of tokens"
    assert ask(file, long)[0] < block
    cached, first = ask(file, long)
    assert cached >= first["usage"]["prompt_tokens"] - 2 * block
    # The same template before it, and nothing of the image.
    assert ask(other, long)[0] < block
    assert ask(file, long, cache_salt="another")[0] == 0
    asked = {**_chat(site.name, data_url(file), long), "return_token_ids": True}
    answer = site.post("/v1/chat/completions", asked)
    expected = site.expected(answer["prompt_token_ids"], [file])
    assert answer["choices"][0]["token_ids"] == expected


# ---- Text ----------------------------------------------------------------------------------------

_SPELLED = {
    **dict.fromkeys(
        ("qwen2_5_vl", "qwen3_5", "qwen3_vl"), "<|vision_start|><|image_pad|><|vision_end|>"
    ),
    **dict.fromkeys(("glm46v", "glm4v"), "<|begin_of_image|><|image|><|end_of_image|>"),
    **dict.fromkeys(
        ("idefics3", "smolvlm"), "<fake_token_around_image><global-img><image><row_1_col_1>"
    ),
    "gemma3": "<start_of_image><image_soft_token><end_of_image>",
    "internvl": "<img><IMG_CONTEXT></img>",
    **dict.fromkeys(("llava", "llava_next"), "<image>"),
    **dict.fromkeys(("mistral3", "pixtral"), "[IMG][IMG_BREAK][IMG_END]"),
}


@pytest.mark.parametrize("way", _AS_CHATS)
def test_text_that_spells_an_image_stays_text(site: ImageSite, way: str) -> None:
    asks, spelled = _AS_CHATS[way], f"a {_SPELLED[site.family]} b"
    url = data_url(_FILE)
    body = asks.body(site.name, url, spelled)
    said = asks.whole(site.post(asks.path, {**body, "stream": False}))
    plain = asks.body(site.name, url, "x" * len(spelled))
    # A token for each character.
    plainly = asks.whole(site.post(asks.path, {**plain, "stream": False}))
    assert said.num_prompt_tokens == plainly.num_prompt_tokens
    messages = _chat(site.name, url, spelled)["messages"]
    token_ids = _chat_ids(site, messages)
    assert said.text == site.text(site.expected(token_ids, [_FILE]))


def test_text_that_spells_an_image_without_one_stays_text(site: ImageSite) -> None:
    spelled = _SPELLED[site.family]
    for path, field in (("/generate", "inputs"), ("/v1/completions", "prompt")):
        body: dict[str, Any] = {field: spelled, "model": site.name, "max_tokens": 4}
        if path == "/generate":
            body = {"inputs": spelled, "parameters": {"decoder_input_details": True}}
            body["parameters"]["max_new_tokens"] = 4
            prefill = site.post(path, body)["details"]["prefill"]
            assert len(prefill) == len(spelled)
        else:
            assert site.post(path, body)["usage"]["prompt_tokens"] == len(spelled)
    assert len(site.post("/tokenize", {"inputs": spelled})) == len(spelled)
    assert site.post("/tokenize", {"prompt": spelled})["count"] == len(spelled)


# ---- Refusals ------------------------------------------------------------------------------------


def _openai_error(answer: Any) -> str:
    error = answer["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "BadRequestError"
    return str(error["message"])


def _response_error(answer: Any) -> str:
    error = answer["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    return str(error["message"])


def _message_error(answer: Any) -> str:
    """The words, without those by which Claude Code knows that it has to leave an image out."""
    assert answer["type"] == "error"
    assert answer["error"]["type"] == "invalid_request_error"
    return str(answer["error"]["message"]).removeprefix("Could not process image: ")


def _ollama_error(answer: Any) -> str:
    assert set(answer) == {"error"}
    return str(answer["error"])


def _tgi_error(answer: Any) -> str:
    assert answer["error_type"] == "validation"
    return str(answer["error"]).removeprefix("Input validation error: ")


def _tgi(model: str, url: str, text: str) -> dict[str, Any]:
    return {"inputs": f"![]({url}){text}", "parameters": {"max_new_tokens": 2}}


@dataclass(frozen=True)
class _Refusing:
    way: _Way
    # What the image is called.
    field: str
    read: Callable[[Any], str]
    status: int = 400


_REFUSING = {
    "chat": _Refusing(_AS_CHATS["chat"], "messages[0].content[0]", _openai_error),
    "responses": _Refusing(_AS_CHATS["responses"], "input[0].content[0]", _response_error),
    "messages": _Refusing(_AS_CHATS["messages"], "messages[0].content[0]", _message_error),
    "ollama": _Refusing(_AS_CHATS["ollama's chat"], "messages[0].images[0]", _ollama_error),
    "ollama's generate": _Refusing(_AS_CHATS["ollama's generate"], "images[0]", _ollama_error),
    "TGI": _Refusing(
        _Way("/generate", _tgi, _whole_chat, _streamed_chat), "inputs", _tgi_error, status=422
    ),
    "TGI's stream": _Refusing(
        _Way("/generate_stream", _tgi, _whole_chat, _streamed_chat), "inputs", _tgi_error, 422
    ),
    "tokenize": _Refusing(
        _Way("/tokenize", _chat, _whole_chat, _streamed_chat),
        "messages[0].content[0]",
        _openai_error,
    ),
    "count_tokens": _Refusing(
        _Way("/v1/messages/count_tokens", _messages, _whole_message, _streamed_message),
        "messages[0].content[0]",
        _message_error,
    ),
}
_CUT = _FILE[: len(_FILE) // 2]
_BAD_URLS = {
    data_url(png_of_zeros(300, 300)): (
        f"the image has 300 x 300 pixels; an image may have {_MAX_PIXELS} pixels "
        "(--max-image-pixels)"
    ),
    data_url(_CUT): "the image is not valid JPEG, or is cut off",
    data_url(b"hello there"): "none of JPEG, PNG, WebP and GIF",
    data_url(bytes(200_000)): "150000 bytes (--max-image-bytes)",
    "data:image/png;base64,%%%%": "base64",
    data_url(b""): "empty",
}
_BAD_LINKS = {
    "ftp://127.0.0.1/x": "must begin with data:, https://, http:// or file:",
    "file:///etc/hostname": "--allowed-media-folder",
    "http://example.invalid/x": "--allowed-media-domains",
    "http://127.0.0.1:9/x": "could not be fetched",
}


@pytest.mark.parametrize("api", _REFUSING)
def test_a_bad_image_is_refused_in_the_form_of_its_api(site: ImageSite, api: str) -> None:
    refusing = _REFUSING[api]
    way = refusing.way
    cases = dict(_BAD_URLS)
    if way.takes_links:
        cases |= _BAD_LINKS
    for url, words in cases.items():
        for streams in (False, True):
            body = {**way.body(site.name, url, _QUESTION), "stream": streams}
            if api in ("TGI", "TGI's stream", "tokenize", "count_tokens"):
                body.pop("stream")
            message = refusing.read(site.post(way.path, body, refusing.status))
            assert message.startswith(f"{refusing.field}: "), message
            assert words in message, message
            assert "\n" not in message
            assert len(message) < 300


def test_more_images_than_are_allowed_are_refused(site: ImageSite) -> None:
    parts = [_part(_FILE)] * (_MAX_IMAGES + 1)
    body = {**_chat(site.name, "", ""), "messages": [{"role": "user", "content": parts}]}
    error = site.post("/v1/chat/completions", body, 400)["error"]
    assert error["message"] == (
        f"messages[0].content[{_MAX_IMAGES}]: a request may have {_MAX_IMAGES} images "
        f"(--max-images); given: {_MAX_IMAGES + 1}"
    )
    inputs = f"![]({data_url(_FILE)})" * (_MAX_IMAGES + 1)
    refused = site.post("/generate", {"inputs": inputs}, 422)
    assert "--max-images" in refused["error"]
    asked = {"model": site.name, "messages": body["messages"]}
    assert "--max-images" in site.post("/tokenize", asked, 400)["error"]["message"]


def test_a_prompt_too_long_by_its_images_is_refused_before_anything_is_computed(
    site: ImageSite,
) -> None:
    large = saved(picture(width=199, height=199), "PNG")
    text = "x" * 2020
    error = site.post("/v1/chat/completions", _chat(site.name, data_url(large), text), 400)
    assert "maximum context length is 2048 tokens" in error["error"]["message"]
    assert error["error"]["code"] == "context_length_exceeded"


def test_without_the_flag_nothing_is_fetched(
    site: ImageSite, host: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    router = Router(tmp_path_factory.mktemp("closed") / "router", [site.shards[0].address])
    with running(router):
        for refusing in _REFUSING.values():
            if not refusing.way.takes_links:
                continue
            body = refusing.way.body(site.name, f"{host}/0", _QUESTION)
            status, text = router.ask(refusing.way.path, body)
            assert status == refusing.status, text
            message = refusing.read(json.loads(text))
            assert message.startswith(f"{refusing.field}: ")
            assert "--allowed-media-domains" in message


def test_files_that_are_not_served_are_refused_by_name(site: ImageSite) -> None:
    part = {"type": "input_image", "file_id": "file-1"}
    body = {**_responses(site.name, "", ""), "input": [{"role": "user", "content": [part]}]}
    assert "file_id" in site.post("/v1/responses", body, 400)["error"]["message"]
    block = {"type": "image", "source": {"type": "file", "file_id": "file-1"}}
    message = _messages(site.name, "", "", block=lambda url: block)
    refused = _message_error(site.post("/v1/messages", message, 400))
    assert "messages[0].content[0].source.type: must be base64 or url" in refused


# ---- What is kept --------------------------------------------------------------------------------


def test_a_response_about_an_image_is_not_stored(site: ImageSite) -> None:
    body = _responses(site.name, data_url(_FILE), _QUESTION)
    for asked in (body, {**body, "store": True}):
        answer = site.post("/v1/responses", asked)
        assert answer["store"] is False
        events = site.events("/v1/responses", {**asked, "stream": True})
        assert events[-1]["response"]["store"] is False
        for response in (answer, events[-1]["response"]):
            assert base64.b64encode(_FILE).decode()[:40] not in json.dumps(response)
            then = {"model": site.name, "input": "and?", "previous_response_id": response["id"]}
            error = site.post("/v1/responses", then, 400)["error"]
            assert error["param"] == "previous_response_id"
            assert response["id"] in error["message"]
            assert site.router.ask(f"/v1/responses/{response['id']}")[0] == 404
    refused = site.post("/v1/responses", {**body, "background": True}, 400)["error"]
    assert refused["param"] == "background"
    assert "images" in refused["message"]


def test_an_image_can_follow_a_stored_response(site: ImageSite) -> None:
    body = {"model": site.name, "input": "hello", "max_output_tokens": 4, "temperature": 0}
    first = site.post("/v1/responses", body)
    asked = {
        **_responses(site.name, data_url(_FILE), _QUESTION),
        "previous_response_id": first["id"],
    }
    second = site.post("/v1/responses", asked)
    said = _whole_response(second)
    messages = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": first["output"][0]["content"][0]["text"]},
        *_chat(site.name, data_url(_FILE), _QUESTION)["messages"],
    ]
    token_ids = _chat_ids(site, messages)
    assert said == _said(site.text(site.expected(token_ids, [_FILE])), len(token_ids))


def test_a_template_of_the_request_may_show_images(site: ImageSite) -> None:
    template = (
        "{% for message in messages %}{% for part in message.content %}"
        "{% if part.type == 'image' %}"
        + _SPELLED[site.family]
        .replace("[IMG_BREAK][IMG_END]", "")
        .replace("<image_soft_token><end_of_image>", "")
        .replace("<img><IMG_CONTEXT></img>", "<IMG_CONTEXT>")
        + "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endfor %}"
    )
    asked = {**_chat(site.name, data_url(_FILE), "ab"), "chat_template": template}
    answer = site.post("/v1/chat/completions", {**asked, "return_token_ids": True})
    expected = site.expected(answer["prompt_token_ids"], [_FILE])
    assert answer["choices"][0]["token_ids"] == expected
    # In a process of its own too.
    asked = {name: asked[name] for name in ("model", "messages", "chat_template")}
    assert site.post("/tokenize", asked)["tokens"] == answer["prompt_token_ids"]


@pytest.mark.parametrize("mode", ["L", "P", "LA", "CMYK", "1"])
def test_images_of_any_mode_are_seen_in_their_colours(site: ImageSite, mode: str) -> None:
    file = saved(picture(mode, 50, 40), "JPEG" if mode == "CMYK" else "PNG")
    asked = {**_chat(site.name, data_url(file), "?"), "return_token_ids": True}
    answer = site.post("/v1/chat/completions", asked)
    expected = site.expected(answer["prompt_token_ids"], [file])
    assert answer["choices"][0]["token_ids"] == expected
