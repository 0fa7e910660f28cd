"""Ollama's routes over HTTP: bodies of any type, names, errors, and what is not served."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from support.router_doubles import INFO, Answer, FakeFleet, MemoryRouter, memory_router

from penstock_proto.facts import ModelShape
from penstock_proto.types import SamplingParams
from penstock_router.apis.ollama import model_facts
from penstock_router.apis.ollama.names import served_name

ASK = {"model": "fake-model", "prompt": "Hello", "stream": False, "options": {"num_predict": 4}}
FORM = "application/x-www-form-urlencoded"
POSTS = ("generate", "chat", "embed", "embeddings", "show", "pull", "create", "copy", "push")


async def send(router: MemoryRouter, path: str, body: Any, **headers: str) -> Answer:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return await router.request("POST", path, data, named)


async def head_of(router: MemoryRouter, path: str) -> int:
    connection = router.connect()
    connection.send("HEAD", path, b"", {})
    status, _ = await connection.read_head()
    connection.close()
    return status


# ---- The type of a body, and pages -------------------------------------------------------------


@pytest.mark.parametrize("kind", [FORM, "text/plain", "", None])
@pytest.mark.parametrize("path", ["generate", "chat", "embed", "embeddings", "show", "pull"])
async def test_a_body_needs_no_content_type(router: MemoryRouter, path: str, kind: Any) -> None:
    body = {**ASK, "messages": [{"role": "user", "content": "Hi"}], "input": "Hi"}
    headers = {} if kind is None else {"Content-Type": kind}
    assert (await send(router, f"/api/{path}", body, **headers)).status == 200


async def test_other_apis_still_want_the_type_of_json(router: MemoryRouter) -> None:
    answer = await send(router, "/v1/completions", {"prompt": "Hi"}, Content_Type=FORM)
    assert answer.status == 400
    assert "Content-Type must be application/json" in answer.json()["error"]["message"]


@pytest.mark.parametrize("origin", ["https://example.org", "null", "http://memory.evil", "x"])
@pytest.mark.parametrize("kind", [FORM, "text/plain", None])
@pytest.mark.parametrize("path", ["/api/generate", "/api/show", "/api/pull"])
async def test_a_page_of_another_origin_sends_nothing_without_asking(
    router: MemoryRouter, path: str, kind: Any, origin: str
) -> None:
    headers = {} if kind is None else {"Content-Type": kind}
    answer = await send(router, path, ASK, Origin=origin, **headers)
    assert answer.status == 403
    assert answer.json()["error"].startswith("Origin: ")


async def test_nor_a_body_without_a_type_to_another_api(router: MemoryRouter) -> None:
    body = {"prompt": "Hi", "max_tokens": 1}
    answer = await send(router, "/v1/completions", body, Origin="https://example.org")
    assert answer.status == 403
    assert (await send(router, "/v1/completions", body)).status == 200


async def test_a_page_of_this_router_or_of_an_allowed_origin_may(fleet: FakeFleet) -> None:
    own = {"Origin": "http://memory", "Content-Type": FORM}
    friend = {**own, "Origin": "https://friend.example"}
    async with memory_router(fleet, cors_origins=("https://friend.example",)) as router:
        for headers in (own, friend):
            assert (await send(router, "/api/generate", ASK, **headers)).status == 200
    async with memory_router(fleet) as router:
        assert (await send(router, "/api/generate", ASK, **friend)).status == 403
    async with memory_router(fleet, cors_origins=("*",)) as router:
        assert (await send(router, "/api/generate", ASK, **friend)).status == 200


# ---- Errors ------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", POSTS[:6])
@pytest.mark.parametrize(
    "body", [b"", b"{", b"[1]", b"\xff", b"null", b'{"model": 7}', b"{}", b'{"model": ""}']
)
async def test_a_body_that_is_wrong_is_one_line(
    router: MemoryRouter, path: str, body: bytes
) -> None:
    answer = await send(router, f"/api/{path}", body)
    assert answer.status == 400
    error = answer.json()
    assert list(error) == ["error"]
    assert isinstance(error["error"], str)


@pytest.mark.parametrize("path", POSTS[:6])
async def test_an_unknown_model_is_in_ollamas_words(router: MemoryRouter, path: str) -> None:
    body = {**ASK, "model": "gemma3:4b", "messages": [], "input": "Hi"}
    answer = await send(router, f"/api/{path}", body)
    assert (answer.status, answer.json()) == (404, {"error": "model 'gemma3:4b' not found"})


async def test_a_prompt_that_is_too_long_is_in_ollamas_words(router: MemoryRouter) -> None:
    body = {**ASK, "prompt": "fox " * 900, "truncate": False}
    answer = await send(router, "/api/generate", body)
    assert answer.status == 400
    assert "the input length exceeds the context length" in answer.json()["error"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        *(("POST", f"/api/{path}", 403) for path in POSTS[6:]),
        ("DELETE", "/api/delete", 403),
        ("POST", "/api/blobs/sha256:abc", 403),
        ("GET", "/api/nothing", 404),
        ("GET", "/api/generate", 405),
    ],
)
async def test_what_is_not_served_says_so_in_ollamas_form(
    router: MemoryRouter, method: str, path: str, status: int
) -> None:
    answer = await router.request(method, path, b'{"model": "x"}')
    assert (answer.status, list(answer.json())) == (status, ["error"])


async def test_too_large_a_body_and_a_missing_key_are_one_line(fleet: FakeFleet) -> None:
    async with memory_router(fleet, max_body_bytes=100) as router:
        answer = await send(router, "/api/chat", {**ASK, "prompt": "x" * 200})
        assert (answer.status, list(answer.json())) == (413, ["error"])
    async with memory_router(fleet, api_key="secret") as router:
        for path in POSTS:
            answer = await send(router, f"/api/{path}", ASK)
            assert (answer.status, list(answer.json())) == (401, ["error"])


@pytest.mark.parametrize("has_console", [True, False])
@pytest.mark.parametrize("path", ["/", "/api/tags", "/api/version"])
async def test_head_is_answered(fleet: FakeFleet, has_console: bool, path: str) -> None:
    async with memory_router(fleet, console=has_console) as router:
        assert await head_of(router, path) == 200


async def test_a_blob_is_not_there(router: MemoryRouter) -> None:
    assert await head_of(router, "/api/blobs/sha256:abc") == 403


# ---- Models ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("org/Toy", "org/Toy"),
        ("org/Toy:latest", "org/Toy"),
        ("ORG/toy:LATEST", "org/Toy"),
        ("hf.co/org/Toy", "org/Toy"),
        ("registry.ollama.ai/library/plain:latest", "plain"),
        ("library/plain", "plain"),
        ("tagged", "tagged:latest"),
        ("tagged:latest", "tagged:latest"),
        ("plain:8b", "plain:8b"),
        ("away:latest", "away"),
    ],
)
def test_a_name_means_what_is_served_of_it(given: str, expected: str) -> None:
    assert served_name(given, {"org/Toy": 0, "plain": 0, "tagged:latest": 0}) == expected


def test_the_same_name_comes_before_a_like_one() -> None:
    assert served_name("toy", ["TOY", "toy:latest", "toy"]) == "toy"
    assert served_name("library/toy", ["toy", "library/toy"]) == "library/toy"


@pytest.mark.parametrize("path", POSTS[:6])
@pytest.mark.parametrize(
    "name",
    [{"model": "FAKE-model:latest"}, {"name": "library/fake-model"}, {"model": "fake-alias"}],
)
async def test_every_route_finds_a_model_by_its_names(
    router: MemoryRouter, path: str, name: dict[str, str]
) -> None:
    body = {**ASK, "model": None, "messages": [], "input": "Hi", **name}
    assert (await send(router, f"/api/{path}", body)).status == 200


async def test_a_model_is_shown_in_ollamas_words(fleet: FakeFleet) -> None:
    info = dataclasses.replace(
        INFO,
        architecture="Qwen3MoeForCausalLM",
        dtype="bfloat16",
        device="cuda:0",
        shape=ModelShape("qwen3_moe", 30_532_122_624, 61_064_245_248, 48, 2048, 32, 4),
    )
    fleet.shards[0].info = info
    async with memory_router(fleet) as router:
        shown = (await send(router, "/api/show", {"model": "fake-model"})).json()
        (listed,) = (await router.get("/api/tags")).json()["models"][:1]
        (running,) = (await router.get("/api/ps")).json()["models"]
    details = shown["details"]
    assert (details["family"], details["families"]) == ("qwen3moe", ["qwen3moe"])
    assert (details["parameter_size"], details["quantization_level"]) == ("30.5B", "BF16")
    assert listed["details"] == running["details"] == details
    assert shown["model_info"] == {
        "general.architecture": "qwen3moe",
        "general.parameter_count": 30_532_122_624,
        "qwen3moe.context_length": 512,
        "qwen3moe.embedding_length": 2048,
        "qwen3moe.block_count": 48,
        "qwen3moe.attention.head_count": 32,
        "qwen3moe.attention.head_count_kv": 4,
        "qwen3moe.vocab_size": 500,
    }
    assert listed["size"] == running["size"] == running["size_vram"] == 61_064_245_248
    assert listed["digest"] == running["digest"]
    assert len(listed["digest"]) == 64


@pytest.mark.parametrize(
    ("kind", "name", "expected"),
    [
        ("llama", "LlamaForCausalLM", "llama"),
        ("mistral", "MistralForCausalLM", "llama"),
        ("deepseek_v3", "DeepseekV3ForCausalLM", "deepseek2"),
        ("gpt_oss", "GptOssForCausalLM", "gptoss"),
        # Of a shard of an earlier version.
        ("", "Qwen3MoeForCausalLM", "qwen3moe"),
        ("", "LlavaForConditionalGeneration", "llava"),
        ("", "GPT2LMHeadModel", "gpt2"),
    ],
)
def test_an_architecture_has_the_name_of_its_kind(kind: str, name: str, expected: str) -> None:
    info = dataclasses.replace(INFO, architecture=name, shape=ModelShape(kind))
    assert model_facts.architecture(info) == expected


@pytest.mark.parametrize(
    ("count", "expected"),
    [(8_030_261_248, "8.0B"), (494_032_768, "494.03M"), (12_345, "12K"), (0, "")],
)
def test_a_size_is_short(count: int, expected: str) -> None:
    info = dataclasses.replace(INFO, shape=ModelShape(num_parameters=count))
    assert model_facts.parameter_size(info) == expected


async def test_pulling_what_is_served_is_a_success(router: MemoryRouter) -> None:
    lines = await send(router, "/api/pull", {"model": "fake-model"})
    assert lines.headers["content-type"] == "application/x-ndjson"
    stages = [json.loads(line)["status"] for line in lines.body.splitlines()]
    assert stages == ["pulling manifest", "success"]
    whole = await send(router, "/api/pull", {"name": "fake-model", "stream": False})
    assert whole.json() == {"status": "success"}


# ---- Vectors, and the context of an answer -----------------------------------------------------


@pytest.mark.parametrize("given", ["", [], None])
async def test_no_input_has_no_vectors(router: MemoryRouter, given: Any) -> None:
    body = {"model": "fake-model:latest", "input": given, "prompt": given or ""}
    several = (await send(router, "/api/embed", body)).json()
    assert several == {"model": "fake-model", "embeddings": []}
    assert (await send(router, "/api/embeddings", body)).json() == {"embedding": []}


async def test_inputs_that_are_no_texts_are_refused(router: MemoryRouter) -> None:
    for given in (7, {"a": 1}, [["a"]], ["a", 7]):
        answer = await send(router, "/api/embed", {"model": "fake-model", "input": given})
        assert answer.status == 400
        assert answer.json()["error"].startswith("input")


async def test_the_newer_route_scales_vectors_and_the_older_leaves_them_as_the_model_has_them(
    router: MemoryRouter,
) -> None:
    asked = {"model": "fake-model", "input": "Hi", "prompt": "Hi"}
    for more in ({}, {"normalize": False}, {"normalize": True}):
        for path in ("/api/embed", "/api/embeddings"):
            assert (await send(router, path, asked | more)).status == 200
    found = [request.normalize for request in router.fleet.embedded]
    assert found == [True, None, False, False, True, True]


@pytest.mark.parametrize("stream", [True, False])
async def test_an_answer_s_context_is_prompt_and_answer_and_goes_on(
    router: MemoryRouter, stream: bool
) -> None:
    answer = await send(router, "/api/generate", {**ASK, "stream": stream})
    last = json.loads(answer.body.splitlines()[-1])
    (first,) = router.fleet.requests
    assert last["context"][: len(first.prompt_token_ids)] == list(first.prompt_token_ids)
    assert len(last["context"]) == len(first.prompt_token_ids) + 4
    await send(router, "/api/generate", {**ASK, "context": last["context"]})
    second = router.fleet.requests[-1]
    assert list(second.prompt_token_ids) == [*last["context"], *first.prompt_token_ids]
    raw = await send(router, "/api/generate", {**ASK, "raw": True})
    assert "context" not in raw.json()


@pytest.mark.parametrize(
    ("options", "default", "window"),
    [
        ({}, None, None),
        ({"repeat_penalty": 1.0, "presence_penalty": 0}, None, None),
        ({"repeat_penalty": 1.1}, None, 64),
        ({"frequency_penalty": 0.5}, None, 64),
        ({}, 1.05, 64),
        ({"repeat_penalty": 1.0}, 1.05, None),
    ],
)
async def test_a_window_is_asked_for_only_where_there_are_penalties(
    fleet: FakeFleet, options: dict[str, float], default: float | None, window: int | None
) -> None:
    """Shards of earlier versions know none, and clients send Ollama's default."""
    defaults = SamplingParams(repetition_penalty=default)
    fleet.shards[0].info = dataclasses.replace(INFO, default_sampling=defaults)
    async with memory_router(fleet) as router:
        asked = {**ASK, "options": {"num_predict": 1, "repeat_last_n": 64, **options}}
        assert (await send(router, "/api/generate", asked)).status == 200
    assert fleet.requests[-1].sampling.penalty_window_tokens == window
