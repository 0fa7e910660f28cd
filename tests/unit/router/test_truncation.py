"""`truncate_prompt_tokens` leaves what transformers leaves, and cuts nobody else's prompt."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from support.budget import budget, seeded
from tokenizers import Tokenizer, processors
from unit.router.router_doubles import (
    CHATML,
    INFO,
    FakeFleet,
    MemoryRouter,
    byte_level_tokenizer,
    id_of,
    memory_router,
    metaspace_tokenizer,
    random_text,
    sentencepiece_tokenizer,
    wordpiece_tokenizer,
)

from penstock_router.text.tokenizer import load_tokenizer

pytest.importorskip("transformers")
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<|eos|>", "<|im_start|>", "<|im_end|>", "<ü b>", "<tool call>", "<s>", "[SEP]", "</s>"]


def with_ends(tokenizer: Tokenizer, first: str, last: str) -> Tokenizer:
    """Special tokens at both ends of a text."""
    ids = [(text, id_of(tokenizer, text)) for text in (first, last)]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{first} $A {last}", special_tokens=ids
    )
    return tokenizer


def with_bytes_trimmed(tokenizer: Tokenizer) -> Tokenizer:
    """As GPT-2's, whose post-processor adds nothing."""
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    return tokenizer


TOKENIZERS = {
    "byte level": byte_level_tokenizer(),
    "byte level, nothing added": with_bytes_trimmed(byte_level_tokenizer()),
    "byte level, both ends": with_ends(byte_level_tokenizer(), "<|im_start|>", "<|eos|>"),
    "sentencepiece": sentencepiece_tokenizer(),
    "wordpiece, both ends": with_ends(wordpiece_tokenizer(), "[CLS]", "[SEP]"),
    "metaspace": metaspace_tokenizer(),
}


def files_of(tokenizer: Tokenizer, side: str) -> dict[str, bytes]:
    config = {"eos_token": "<|eos|>", "chat_template": CHATML, "truncation_side": side}
    return {
        "tokenizer.json": tokenizer.to_str().encode(),
        "tokenizer_config.json": json.dumps(config).encode(),
    }


def as_transformers(
    tokenizer: Tokenizer, text: str, most: int, side: str, added: bool
) -> list[int]:
    copy = Tokenizer.from_str(tokenizer.to_str())
    theirs = PreTrainedTokenizerFast(tokenizer_object=copy, truncation_side=side)
    ids: list[int] = theirs(text, truncation=True, max_length=most, add_special_tokens=added)[
        "input_ids"
    ]
    return ids


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_what_is_added_around_a_text_is_known(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]
    files = files_of(tokenizer, "right")
    before, after = load_tokenizer(files).special_around
    for text in ("a", "Hello <ü b> world", "日本"):
        bare = tokenizer.encode(text, add_special_tokens=False).ids
        assert [*before, *bare, *after] == tokenizer.encode(text).ids


@pytest.fixture(params=TOKENIZERS)
async def served(request: pytest.FixtureRequest) -> AsyncIterator[tuple[MemoryRouter, Tokenizer]]:
    tokenizer = TOKENIZERS[request.param]
    fleet = FakeFleet(files_of(tokenizer, "right"))
    async with memory_router(fleet) as router:
        yield router, tokenizer


async def test_what_is_left_is_what_transformers_leaves(
    served: tuple[MemoryRouter, Tokenizer],
) -> None:
    router, tokenizer = served
    rng = seeded("truncation")
    for _ in range(budget(20, 3000)):
        text = "".join(
            rng.choice(SPECIAL) if rng.random() < 0.2 else random_text(rng, 1)
            for _ in range(rng.randrange(1, 30))
        )
        most, side, added = rng.randrange(3, 40), rng.choice(["left", "right"]), rng.random() < 0.5
        wanted = as_transformers(tokenizer, text, most, side, added)
        if not wanted:
            continue
        router.fleet.requests.clear()
        answer = await router.complete(
            text,
            truncate_prompt_tokens=most,
            truncation_side=side,
            add_special_tokens=added,
            max_tokens=1,
        )
        assert answer.status == 200, answer.body
        assert list(router.fleet.requests[0].prompt_token_ids) == wanted, (text, most, side, added)


async def test_chats_are_cut_as_their_text_is() -> None:
    tokenizer = byte_level_tokenizer()
    async with memory_router(FakeFleet(files_of(tokenizer, "left"))) as router:
        text = "<|im_start|>user\nThe quick fox<|im_end|>\n<|im_start|>assistant\n"
        for most in (1, 2, 5, 9, 300):
            for side in ("left", "right", None):
                router.fleet.requests.clear()
                fields = {"truncate_prompt_tokens": most, "truncation_side": side, "max_tokens": 1}
                assert (await router.chat("The quick fox", **fields)).status == 200
                wanted = as_transformers(tokenizer, text, most, side or "left", False)
                assert list(router.fleet.requests[0].prompt_token_ids) == wanted


@pytest.mark.parametrize(("side", "kept"), [("left", [7, 8, 9]), ("right", [5, 6, 7])])
async def test_ids_are_cut_too_and_the_tokenizers_side_is_the_default(
    side: str, kept: list[int]
) -> None:
    async with memory_router(FakeFleet(files_of(byte_level_tokenizer(), side))) as router:
        answer = await router.complete([5, 6, 7, 8, 9], truncate_prompt_tokens=3, echo=True)
        assert list(router.fleet.requests[0].prompt_token_ids) == kept
        assert answer.json()["usage"]["prompt_tokens"] == 3


@pytest.mark.parametrize(
    ("fields", "kept", "follow"),
    [
        # Room for the tokens that completions get when nobody says how many.
        ({}, INFO.max_model_len - 16, 16),
        ({"max_tokens": 1}, INFO.max_model_len - 1, 1),
        ({"max_tokens": 300}, INFO.max_model_len - 300, 300),
        ({"max_tokens": 0, "echo": True}, INFO.max_model_len - 1, 1),
    ],
)
async def test_minus_one_keeps_what_fits_beside_what_may_follow(
    router: MemoryRouter, fields: dict[str, Any], kept: int, follow: int
) -> None:
    for prompt in ([5] * 2000, "fox " * 2000):
        router.fleet.requests.clear()
        answer = await router.complete(prompt, truncate_prompt_tokens=-1, **fields)
        assert answer.status == 200, answer.body
        [request] = router.fleet.requests
        assert (len(request.prompt_token_ids), request.max_tokens) == (kept, follow)


async def test_minus_one_in_a_chat_leaves_room_for_an_answer(router: MemoryRouter) -> None:
    assert (await router.chat("fox " * 2000, truncate_prompt_tokens=-1)).status == 200
    [request] = router.fleet.requests
    assert (len(request.prompt_token_ids), request.max_tokens) == (INFO.max_model_len - 1, 1)


async def test_more_tokens_than_the_context_holds_are_refused_however_the_prompt_is_cut(
    router: MemoryRouter,
) -> None:
    for prompt in ([5] * 2000, "fox " * 2000):
        for side in ("left", "right"):
            answer = await router.complete(
                prompt, truncate_prompt_tokens=-1, truncation_side=side, max_tokens=600
            )
            assert answer.status == 400
            assert "This model's maximum context length is" in answer.error["message"]
    assert router.fleet.requests == []


async def test_truncation_does_not_leak_into_requests_beside_it(router: MemoryRouter) -> None:
    rng = seeded("truncation leaks")
    bodies: list[dict[str, Any]] = []
    for number in range(200):
        # Long ones are tokenized by threads, short ones on the event loop.
        pieces = rng.choice([5, 80, 900]) if number % 2 else rng.choice([5, 30, 80])
        body: dict[str, Any] = {
            "prompt": random_text(rng, pieces),
            "max_tokens": 1,
            "seed": number,
            "return_token_ids": True,
        }
        if number % 2:
            body["truncate_prompt_tokens"] = rng.randrange(1, 30)
            body["truncation_side"] = rng.choice(["left", "right"])
        bodies.append(body)

    async def kept(body: dict[str, Any]) -> Any:
        answer = await router.post("/v1/completions", body)
        assert answer.status == 200, answer.body
        return answer.json()["choices"][0]["prompt_token_ids"]

    alone = [await kept(body) for body in bodies]
    together = await asyncio.gather(*(kept(body) for body in bodies))
    assert together == alone
    lengths = [len(ids) for ids in alone]
    assert max(lengths[::2]) > 30 >= max(lengths[1::2])
