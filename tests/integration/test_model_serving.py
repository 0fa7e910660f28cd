"""The whole stack on a real model: HTTP in, the model's own text out."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from integration.conftest import Served
from support.processes import Router, Shard, running

pytest.importorskip("torch")

BUILTIN = Path(__file__).parents[2] / "shard" / "penstock_shard" / "builtin_model"
# As the references compute.
EXACT = ("--dtype", "float32")


@pytest.fixture(scope="module")
def opt_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """OPT as opt-125m is built: learned positions with their offset, biases, tied head."""
    from model_maker import make_model

    return make_model(tmp_path_factory.mktemp("opt"), "opt")


@pytest.fixture(scope="module")
def opt_pair(opt_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Router]:
    logs = tmp_path_factory.mktemp("logs")
    flags = ("--model", str(opt_dir), "--served-model-name", "opt", "--threads", "1")
    shard = Shard(
        logs / "shard", *flags, *EXACT, "--max-num-batched-tokens", "32", "--max-num-seqs", "8"
    )
    router = Router(logs / "router", [shard.address])
    with running(shard, router):
        yield router


async def _post(url: str, path: str, body: Any) -> tuple[int, Any]:
    async with (
        aiohttp.ClientSession(url) as session,
        session.post(path, json=body) as response,
    ):
        return response.status, await response.json()


def _generate(directory: Path, prompts: list[list[int]], count: int) -> list[list[int]]:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    model.generation_config.eos_token_id = None

    def after(prompt: list[int]) -> list[int]:
        given = torch.tensor([prompt])
        mask = torch.ones_like(given)
        output = model.generate(
            given, attention_mask=mask, max_new_tokens=count, do_sample=False, pad_token_id=2
        )
        ids: list[int] = output[0, len(prompt) :].tolist()
        return ids

    return [after(prompt) for prompt in prompts]


async def check_completions(url: str, directory: Path) -> None:
    prompts = [[2, 50 + i, *range(60, 60 + 9 * i)] for i in range(1, 7)]

    async def complete(prompt: list[int]) -> list[int]:
        body = {
            "prompt": prompt,
            "max_tokens": 20,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        status, answer = await _post(url, "/v1/completions", body)
        assert status == 200, answer
        ids: list[int] = answer["choices"][0]["token_ids"]
        return ids

    served = await asyncio.gather(*(complete(prompt) for prompt in prompts))
    assert served == _generate(directory, prompts, 20)


async def test_completions_of_the_built_in_model_are_those_of_generate(toy: Served) -> None:
    await check_completions(toy.url, BUILTIN)


@pytest.mark.soak
async def test_completions_of_an_opt_model_are_those_of_generate(
    opt_pair: Router, opt_dir: Path
) -> None:
    await check_completions(opt_pair.url, opt_dir)


@pytest.mark.soak
async def test_a_model_without_a_template_refuses_chat_and_says_what_to_do(
    opt_pair: Router, opt_dir: Path
) -> None:
    body = {"messages": [{"role": "user", "content": "Hello"}]}
    status, answer = await _post(opt_pair.url, "/v1/chat/completions", body)
    has_template = "chat_template" in (opt_dir / "tokenizer_config.json").read_text()
    assert has_template == (status == 200)
    if not has_template:
        assert "--chat-template" in answer["error"]["message"]


@pytest.fixture(scope="module")
def image_model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Router]:
    """A model of images and text whose chat template is its processor's, as older ones have it."""
    from model_maker import write_tokenizer
    from models.tiny_families import make_family

    directory = make_family(tmp_path_factory.mktemp("images"), "qwen2_5_vl")
    write_tokenizer(directory)
    path = directory / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    template = {"chat_template": settings.pop("chat_template")}
    path.write_text(json.dumps(settings))
    (directory / "chat_template.json").write_text(json.dumps(template))
    logs = tmp_path_factory.mktemp("logs")
    # What its text is, tests of such models show; the template and the refusals are the router's.
    flags = ("--model", str(directory), "--served-model-name", "any", "--runner", "fake")
    shard = Shard(logs / "shard", *flags)
    router = Router(logs / "router", [shard.address])
    with running(shard, router):
        yield router


PICTURE = "data:image/png;base64,iVBORw0KGgo="
IMAGE_BLOCK = {
    "type": "image",
    "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="},
}


def saying(*parts: Any) -> list[Any]:
    return [{"role": "user", "content": list(parts)}]


async def test_a_model_of_images_serves_its_text(image_model: Router) -> None:
    body = {"messages": saying({"type": "text", "text": "What is this?"}), "max_tokens": 3}
    status, answer = await _post(image_model.url, "/v1/chat/completions", body)
    assert status == 200, answer
    # One without a template would be refused.
    assert answer["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        (
            "/v1/chat/completions",
            {"messages": saying({"type": "image_url", "image_url": {"url": PICTURE}})},
            400,
            "takes no images",
        ),
        (
            "/v1/responses",
            {"input": saying({"type": "input_image", "image_url": PICTURE})},
            400,
            "takes no images",
        ),
        (
            "/v1/messages",
            {"model": "any", "max_tokens": 3, "messages": saying(IMAGE_BLOCK)},
            400,
            "takes no images",
        ),
        (
            "/generate",
            {"inputs": f"![]({PICTURE})What is this?"},
            422,
            "takes no images",
        ),
    ],
)
async def test_it_refuses_an_image_in_every_api(
    path: str, body: dict[str, Any], status: int, words: str, image_model: Router
) -> None:
    found, answer = await _post(image_model.url, path, body)
    assert found == status
    assert words in json.dumps(answer, ensure_ascii=False)


async def test_the_built_in_model_says_that_it_is_a_toy(toy: Served) -> None:
    body = {"messages": [{"role": "user", "content": "Who are you?"}], "temperature": 0}
    status, answer = await _post(toy.url, "/v1/chat/completions", body)
    assert status == 200
    assert "toy" in answer["choices"][0]["message"]["content"]
    assert answer["choices"][0]["finish_reason"] == "stop"


async def test_scores_of_a_prompt_are_the_models_own(toy: Served) -> None:
    """Evaluation harnesses send this request: echo with log-probabilities."""
    import torch
    from transformers import AutoModelForCausalLM

    ids = [5, 60, 70, 300, 20, 9]
    body = {
        "prompt": [ids], "max_tokens": 1, "echo": True, "logprobs": 1, "temperature": 0
    }  # fmt: skip
    status, answer = await _post(toy.url, "/v1/completions", body)
    assert status == 200
    model = AutoModelForCausalLM.from_pretrained(BUILTIN, dtype=torch.float32)
    with torch.inference_mode():
        scores = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    expected = [scores[i, token].item() for i, token in enumerate(ids[1:])]
    columns = answer["choices"][0]["logprobs"]
    assert columns["token_logprobs"][1 : len(ids)] == pytest.approx(expected, abs=1e-4)
    for value, top in zip(columns["token_logprobs"][1:], columns["top_logprobs"][1:], strict=True):
        assert value in top.values()


@pytest.fixture
def unbounded(tmp_path: Path) -> Iterator[Served]:
    """The built-in model, which gives the scores of its whole vocabulary."""
    flags = ("--runner", "model", "--device", "cpu", "--threads", "1", "--kv-memory", "64M")
    served = Served(tmp_path / "log", *flags, "--dtype", "float32", "--max-logprobs", "-1")
    with contextlib.closing(served):
        served.wait_healthy(timeout_s=90)
        yield served


async def test_a_whole_vocabulary_of_scores_is_the_models_own(unbounded: Served) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    ids = [5, 60, 70, 300, 20, 9]
    model = AutoModelForCausalLM.from_pretrained(BUILTIN, dtype=torch.float32)
    body: dict[str, Any] = {"prompt": [ids], "max_tokens": 3, "temperature": 0}
    body |= {"prompt_logprobs": -1, "logprobs": -1, "return_tokens_as_token_ids": True}
    status, answer = await _post(
        unbounded.url, "/v1/completions", {**body, "return_token_ids": True}
    )
    assert status == 200, answer
    [choice] = answer["choices"]
    whole = [*ids, *choice["token_ids"]]
    with torch.inference_mode():
        scores = model(torch.tensor([whole])).logits[0].log_softmax(-1)
    size = scores.shape[1]
    rows = [
        *(
            {int(i): each["logprob"] for i, each in row.items()}
            for row in choice["prompt_logprobs"][1:]
        ),
        *(
            {int(name.removeprefix("token_id:")): value for name, value in row.items()}
            for row in choice["logprobs"]["top_logprobs"]
        ),
    ]
    assert len(rows) == len(whole) - 1
    for row, expected in zip(rows, scores, strict=False):
        assert sorted(row) == list(range(size))
        found = torch.tensor([row[i] for i in range(size)])
        assert torch.allclose(found, expected, atol=1e-4)
