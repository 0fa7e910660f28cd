"""Fields of completions and chats in combination: batches, seeds, scores, echo, ids, streams."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import AsyncIterator
from itertools import chain, pairwise
from typing import Any

import pytest
from support.budget import budget, seeded
from support.checked_fleet import CheckedFleet
from support.router_doubles import (
    INFO,
    Answer,
    FakeFleet,
    FakeShard,
    MemoryRouter,
    fake_logprobs,
    memory_router,
    model_files,
    random_text,
)
from tokenizers import Tokenizer

from penstock_proto.types import GenerationRequest, Logprobs, Output, bytes_of
from penstock_router.apis.chat_messages import MAX_PIECES
from penstock_router.generation.job import choice_seed
from penstock_router.text.chat_template import ChatTemplate

LOWEST = -9999.0


@pytest.fixture
async def checked(byte_level: Tokenizer) -> AsyncIterator[MemoryRouter]:
    """A router whose fleet refuses what a shard would."""
    async with memory_router(CheckedFleet(model_files(byte_level))) as served:
        yield served


def choices_of(answer: Answer) -> list[Any]:
    assert answer.status == 200, answer.body
    choices: list[Any] = answer.json()["choices"]
    return choices


def chunks_of(answer: Answer) -> list[Any]:
    assert answer.status == 200, answer.body
    assert answer.events[-1] == "[DONE]"
    return answer.events[:-1]


# ---- Batches -----------------------------------------------------------------------------------


async def test_a_batch_of_mixed_forms_and_lengths_is_answered_in_its_order(
    router: MemoryRouter, fleet: FakeFleet
) -> None:
    rng = seeded("batches")
    prompts: list[Any] = []
    for _ in range(20):
        ids = [rng.randrange(3, 400) for _ in range(rng.randrange(1, 300))]
        prompts.append(rng.choice([ids, random_text(rng, 1 + rng.randrange(40))]))
    fields: dict[str, Any] = {"n": 2, "seed": 4, "max_tokens": 5, "return_token_ids": True}
    # Those of later prompts come first.
    fleet.bundle = lambda: 1 + len(fleet.requests) % 5
    choices = choices_of(await router.complete(prompts, **fields))
    assert [choice["index"] for choice in choices] == list(range(40))
    for number, prompt in enumerate(prompts):
        alone = choices_of(await router.complete(prompt, **fields))
        for choice, own in zip(choices[2 * number :], alone, strict=False):
            for name in ("text", "token_ids", "prompt_token_ids", "finish_reason"):
                assert choice[name] == own[name]


@pytest.mark.parametrize(
    ("bad", "fields", "words"),
    [
        ([5, INFO.vocab_size], {}, "out of vocabulary"),
        ([5] * 512, {}, "This model's maximum context length is"),
        ("fox " * 600, {}, "This model's maximum context length is"),
        ([5] * 510, {"max_tokens": 3}, "This model's maximum context length is"),
        # Fits, but has no room for so many tokens.
        ([5] * 509, {"min_tokens": 5}, "min_tokens: must be at most 3"),
    ],
)
async def test_one_bad_prompt_refuses_the_batch_before_any_work(
    checked: MemoryRouter, bad: Any, fields: dict[str, Any], words: str
) -> None:
    for prompts in ([[5, 6], "fox", bad], [bad, "fox"]):
        answer = await checked.complete(prompts, **fields)
        assert answer.status == 400
        assert words in answer.error["message"]
        assert checked.fleet.requests == []


async def test_far_too_many_sequences_are_refused_in_no_time(router: MemoryRouter) -> None:
    prompts = ["fox"] * 1024
    spent_s = []
    # The first imports what it needs, and a collection of garbage may fall into any.
    for _ in range(4):
        started = time.process_time()
        answer = await router.complete(prompts, n=16384)
        spent_s.append(time.process_time() - started)
        assert answer.status == 400
        assert str(1024 * 16384) in answer.error["message"]
    assert min(spent_s) < 0.05
    assert router.fleet.requests == []


# ---- Seeds and the best of several -------------------------------------------------------------


async def test_choice_i_has_the_published_seed_in_each_prompt(
    router: MemoryRouter, fleet: FakeFleet
) -> None:
    await router.complete([[5], [6, 7]], n=3, seed=11)
    seeds = [request.sampling.seed for request in fleet.requests]
    assert seeds == [choice_seed(11, choice) for choice in range(3)] * 2
    assert seeds[0] == 11
    fleet.requests.clear()
    await router.complete(n=2, best_of=4, seed=-3)
    seeds = [request.sampling.seed for request in fleet.requests]
    assert seeds == [choice_seed(-3, choice) for choice in range(4)]


async def test_the_best_of_each_prompt_stand_under_its_own_indices(
    router: MemoryRouter, fleet: FakeFleet
) -> None:
    def script(request: GenerationRequest) -> list[int]:
        # The fake's even ids are likelier than its odd ones.
        prompt = request.prompt_token_ids[0]
        seed = request.sampling.seed or 0
        likelihood = [choice_seed(1, choice) for choice in range(3)].index(seed)
        return [prompt + 10] * likelihood + [prompt + 11] * (3 - likelihood)

    fleet.script = script
    fields: dict[str, Any] = {"n": 2, "best_of": 3, "seed": 1, "max_tokens": 3}
    answer = await router.complete([[20], [40]], return_token_ids=True, **fields)
    found = [choice["token_ids"] for choice in choices_of(answer)]
    assert found == [[30, 30, 31], [30, 31, 31], [50, 50, 51], [50, 51, 51]]
    assert [choice["prompt_token_ids"] for choice in choices_of(answer)] == [[20]] * 2 + [[40]] * 2
    assert [choice["index"] for choice in choices_of(answer)] == [0, 1, 2, 3]
    assert answer.json()["usage"]["completion_tokens"] == 18
    scored = choices_of(await router.complete([[20], [40]], logprobs=0, echo=True, **fields))
    assert [choice["logprobs"]["token_logprobs"] for choice in scored] == [
        [None, -0.5, -0.5, -5.25],
        [None, -0.5, -5.25, -5.25],
    ] * 2


# ---- Log-probabilities -------------------------------------------------------------------------


async def test_lm_eval_finds_the_very_same_float_in_both_places(router: MemoryRouter) -> None:
    rng = seeded("lm-eval")
    prompts = [[rng.randrange(3, 500) for _ in range(rng.randrange(1, 60))] for _ in range(12)]
    body: dict[str, Any] = {"temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234}
    choices = choices_of(await router.complete(prompts, echo=True, **body))
    for prompt, choice in zip(prompts, choices, strict=True):
        columns = choice["logprobs"]
        assert {len(column) for column in columns.values()} == {len(prompt) + 1}
        assert (columns["token_logprobs"][0], columns["top_logprobs"][0]) == (None, None)
        rows = zip(
            columns["tokens"], columns["token_logprobs"], columns["top_logprobs"], strict=True
        )
        for token, value, top in list(rows)[1:]:
            assert top[token] == value
            assert 1 <= len(top) <= 2
        offsets = columns["text_offset"]
        assert offsets[0] == 0
        steps = [later - earlier for earlier, later in pairwise(offsets)]
        assert steps == [len(token) for token in columns["tokens"][:-1]]


async def test_scores_alone_are_the_same_streamed_and_whole(router: MemoryRouter) -> None:
    fields: dict[str, Any] = {"max_tokens": 0, "echo": True, "logprobs": 2, "prompt_logprobs": 0}
    [whole] = choices_of(await router.complete("The lazy fox", **fields))
    [chunk] = chunks_of(await router.complete("The lazy fox", stream=True, **fields))
    [streamed] = chunk["choices"]
    for name in ("text", "logprobs", "finish_reason", "prompt_logprobs"):
        assert streamed[name] == whole[name]
    assert whole["text"] == "The lazy fox"
    assert len(whole["prompt_logprobs"]) == len(whole["logprobs"]["tokens"])


def check_prompt_logprobs(found: list[Any], ids: list[int], top_n: int, tok: Tokenizer) -> None:
    assert found[0] is None
    assert len(found) == len(ids)
    wanted = fake_logprobs(ids[1:], top_n)
    for row, (token_id, shown) in enumerate(zip(ids[1:], found[1:], strict=True)):
        own = shown[str(token_id)]
        assert (own["logprob"], own["rank"]) == (wanted.chosen[row], wanted.ranks[row])
        assert own["decoded_token"] == tok.decode([token_id], skip_special_tokens=False)
        top = wanted.top_token_ids[row * top_n : (row + 1) * top_n]
        assert set(shown) == {str(token_id), *map(str, top)}
        for rank, other in enumerate(top, 1):
            assert shown[str(other)]["rank"] == (rank if other != token_id else own["rank"])


async def test_prompt_logprobs_stand_in_the_choice_or_on_top(
    router: MemoryRouter, fleet: FakeFleet, byte_level: Tokenizer
) -> None:
    prompts = [[20, 21, 22, 23], [31], [40, 41]]
    answer = await router.complete(prompts, n=2, prompt_logprobs=3, max_tokens=2)
    for choice in choices_of(answer):
        ids = prompts[choice["index"] // 2]
        check_prompt_logprobs(choice["prompt_logprobs"], ids, 3, byte_level)
        assert choice["logprobs"] is None
    fleet.requests.clear()
    chat = (await router.chat("The lazy fox", n=2, prompt_logprobs=2, max_tokens=2)).json()
    ids = list(fleet.requests[0].prompt_token_ids)
    check_prompt_logprobs(chat["prompt_logprobs"], ids, 2, byte_level)
    assert all("prompt_logprobs" not in choice for choice in chat["choices"])


async def test_more_prompt_logprobs_than_logprobs_leave_the_echo_as_it_is(
    router: MemoryRouter,
) -> None:
    fields: dict[str, Any] = {"echo": True, "logprobs": 1, "seed": 2}
    [plain] = choices_of(await router.complete([20, 21, 22], **fields))
    [both] = choices_of(await router.complete([20, 21, 22], prompt_logprobs=5, **fields))
    assert both["logprobs"] == plain["logprobs"]
    assert len(both["prompt_logprobs"][1]) == 6
    [fewer] = choices_of(await router.complete([20, 21, 22], prompt_logprobs=0, **fields))
    assert [len(row) for row in fewer["prompt_logprobs"][1:]] == [1, 1]


async def test_prompt_logprobs_are_not_for_streams(router: MemoryRouter) -> None:
    # A chat's stream has no place for any.
    for answer in (
        await router.complete(stream=True, prompt_logprobs=1),
        await router.chat(stream=True, prompt_logprobs=1),
        await router.chat(stream=True, prompt_logprobs=0),
    ):
        assert (answer.status, answer.error["param"]) == (400, "prompt_logprobs")


async def test_the_prompts_own_logprobs_come_with_a_streams_first_event_of_each_choice(
    router: MemoryRouter,
) -> None:
    fields: dict[str, Any] = {"prompt_logprobs": 0, "max_tokens": 3, "n": 2, "seed": 1}
    whole = choices_of(await router.complete(["The lazy fox", "dog"], **fields))
    streamed = await router.complete(["The lazy fox", "dog"], stream=True, **fields)
    found: dict[int, Any] = {}
    for event in streamed.events[:-1]:
        [choice] = event["choices"]
        assert ("prompt_logprobs" in choice) == (choice["index"] not in found)
        found.setdefault(choice["index"], choice.get("prompt_logprobs"))
    assert found == {choice["index"]: choice["prompt_logprobs"] for choice in whole}


async def test_what_nobody_asked_for_is_null_in_an_answer_and_absent_from_a_stream(
    router: MemoryRouter,
) -> None:
    """Check that each name is there: clients written for vLLM read it as an attribute."""
    completion = (await router.complete([5, 6])).json()
    chat = (await router.chat("fox")).json()
    of_prompts, of_answers = (
        {"prompt_token_ids", "prompt_logprobs"},
        {"service_tier", "kv_transfer_params"},
    )
    for shown, names in (
        (completion, of_answers),
        (completion["choices"][0], {*of_prompts, "token_ids", "logprobs"}),
        (chat, {*of_answers, *of_prompts}),
        (chat["choices"][0], {"token_ids", "logprobs"}),
        (chat["choices"][0]["message"], {"refusal", "reasoning"}),
    ):
        assert {name for name in names if shown[name] is None} == names
    for answer in (await router.complete([5], stream=True), await router.chat(stream=True)):
        for chunk in chunks_of(answer):
            seen = {*chunk, *(name for choice in chunk["choices"] for name in choice)}
            assert not seen & {*of_prompts, *of_answers, "token_ids"}


async def test_requested_ids_are_reported_once_in_place_of_the_best(
    router: MemoryRouter, fleet: FakeFleet
) -> None:
    fleet.script = lambda request: [50, 51]
    requested = [60, 50, 53, 60]
    fields: dict[str, Any] = {"logprob_token_ids": requested, "return_tokens_as_token_ids": True}
    [choice] = choices_of(await router.complete(logprobs=1, **fields))
    assert fleet.requests[0].logprob_token_ids == (60, 50, 53)
    assert fleet.requests[0].logprobs == 0
    assert choice["logprobs"]["top_logprobs"] == [
        {"token_id:50": -0.5, "token_id:60": -80.0, "token_id:53": -73.0},
        {"token_id:51": -5.25, "token_id:60": -80.0, "token_id:50": -70.0, "token_id:53": -73.0},
    ]
    for top in ({"top_logprobs": 2}, {}):
        whole = await router.chat(logprobs=True, **top, **fields)
        chunks = chunks_of(await router.chat(stream=True, logprobs=True, **top, **fields))
        streamed = [
            row
            for chunk in chunks
            for choice in chunk["choices"]
            for row in (choice["logprobs"] or {"content": []})["content"]
        ]
        rows = choices_of(whole)[0]["logprobs"]["content"]
        assert rows == streamed
        assert [[entry["token"] for entry in row["top_logprobs"]] for row in rows] == [
            ["token_id:50", "token_id:60", "token_id:53"],
            ["token_id:51", "token_id:60", "token_id:50", "token_id:53"],
        ]
        assert rows[0]["token"] == "token_id:50"


async def test_requested_ids_leave_the_scores_of_an_echoed_prompt_as_they_are(
    router: MemoryRouter,
) -> None:
    fields: dict[str, Any] = {"echo": True, "logprobs": 3, "max_tokens": 1}
    [plain] = choices_of(await router.complete([5, 6, 7], **fields))
    [choice] = choices_of(await router.complete([5, 6, 7], logprob_token_ids=[60], **fields))
    tops = [each["logprobs"]["top_logprobs"][:3] for each in (plain, choice)]
    assert tops[0] == tops[1]
    assert len(choice["logprobs"]["top_logprobs"][3]) == 2


@pytest.fixture
async def unbounded(byte_level: Tokenizer) -> AsyncIterator[MemoryRouter]:
    """A router of shards that give the whole vocabulary."""
    limits = dataclasses.replace(INFO.limits, max_logprobs=INFO.vocab_size)
    shard = FakeShard(info=dataclasses.replace(INFO, limits=limits))
    fleet = FakeFleet(model_files(byte_level), members=[shard])
    async with memory_router(fleet) as served:
        yield served


async def test_minus_one_is_the_whole_vocabulary_streamed_or_not(unbounded: MemoryRouter) -> None:
    size = INFO.vocab_size
    fields: dict[str, Any] = {"max_tokens": 3, "return_tokens_as_token_ids": True}
    [choice] = choices_of(await unbounded.complete([5, 6], logprobs=-1, **fields))
    assert unbounded.fleet.requests[-1].logprobs == size
    assert [len(top) for top in choice["logprobs"]["top_logprobs"]] == [size] * 3
    fields |= {"logprobs": True, "top_logprobs": -1, "seed": 3}
    rows = choices_of(await unbounded.chat(**fields))[0]["logprobs"]["content"]
    assert [len({entry["token"] for entry in row["top_logprobs"]}) for row in rows] == [size] * 3
    chunks = chunks_of(await unbounded.chat(stream=True, **fields))
    streamed = [choice["logprobs"] for chunk in chunks for choice in chunk["choices"]]
    assert [row for scores in streamed if scores for row in scores["content"]] == rows
    scored = choices_of(await unbounded.complete([5, 6, 7], prompt_logprobs=-1, max_tokens=1))
    assert unbounded.fleet.requests[-1].prompt_logprobs == size
    assert [len(row) for row in scored[0]["prompt_logprobs"][1:]] == [size] * 2


@pytest.mark.parametrize("asked", [-1, 21])
async def test_more_scores_than_the_shards_give_are_refused_by_name(
    router: MemoryRouter, asked: int
) -> None:
    for answer, name in (
        (await router.complete(logprobs=asked), "logprobs"),
        (await router.complete(prompt_logprobs=asked), "prompt_logprobs"),
        (await router.chat(logprobs=True, top_logprobs=asked), "top_logprobs"),
        (await router.chat(logprobs=True, top_logprobs=asked, stream=True), "top_logprobs"),
    ):
        assert (answer.status, answer.error["param"]) == (400, name)
        message = answer.error["message"]
        assert message.startswith(f"{name}: must be at most 20 (--max-logprobs")
        assert f"given: {asked}" in message
        assert ("all 500 tokens" in message) == (asked == -1)
    assert router.fleet.requests == []


def _fives(request: GenerationRequest) -> list[int]:
    return [5] * (request.max_tokens or 1)


async def test_more_bytes_of_scores_than_an_answer_holds_are_refused(byte_level: Tokenizer) -> None:
    limits = dataclasses.replace(INFO.limits, max_logprobs=INFO.vocab_size)
    shard = FakeShard(info=dataclasses.replace(INFO, limits=limits))
    fleet = FakeFleet(model_files(byte_level), members=[shard], script=_fives)
    row_bytes = 64 * (1 + INFO.vocab_size)
    async with memory_router(fleet, max_answer_bytes=row_bytes * 4) as router:
        assert (await router.complete([5, 6], logprobs=-1, max_tokens=4)).status == 200
        whole = await router.complete([5, 6], logprobs=-1, max_tokens=5)
        assert (whole.status, whole.error["param"]) == (400, "logprobs")
        prompt = await router.complete([5] * 5, prompt_logprobs=-1)
        assert (prompt.status, prompt.error["param"]) == (400, "prompt_logprobs")
        # A stream holds no more than its reader has left.
        streamed = await router.complete([5, 6], logprobs=-1, max_tokens=12, stream=True)
        tops = [
            top
            for chunk in chunks_of(streamed)
            for choice in chunk["choices"]
            for top in (choice["logprobs"] or {"top_logprobs": []})["top_logprobs"]
        ]
        assert len(tops) == 12


class _Impossible(FakeFleet):
    """Reports minus infinity for everything."""

    def _output(self, request: GenerationRequest, ids: list[int], position: int) -> Output:
        output = super()._output(request, ids, position)
        for columns in (output.logprobs, output.prompt_logprobs):
            if columns is not None:
                columns.chosen = [float("-inf")] * len(columns.chosen)
                best = [float("-inf")] * len(columns.top_logprobs)
                columns.best_logprobs = bytearray(bytes_of("f", best))
                columns.requested = [float("-inf")] * len(columns.requested)
        return output


async def test_log_probabilities_end_at_a_number_that_json_has(byte_level: Tokenizer) -> None:
    def numbers(value: Any) -> list[float]:
        if isinstance(value, dict):
            value = list(value.values())
        if isinstance(value, list):
            return [number for item in value for number in numbers(item)]
        return [value] if isinstance(value, float) else []

    fields: dict[str, Any] = {"prompt_logprobs": 2, "logprob_token_ids": [70], "max_tokens": 3}
    async with memory_router(_Impossible(model_files(byte_level))) as router:
        completion = await router.complete([5, 6, 7], logprobs=2, echo=True, **fields)
        chat = await router.chat(logprobs=True, top_logprobs=2, **fields)
        for answer in (completion, chat):
            assert b"Infinity" not in answer.body
            assert set(numbers(answer.json())) == {LOWEST}


async def test_nothing_about_log_probabilities_is_null_but_the_first(router: MemoryRouter) -> None:
    for count in (0, 1, 5, 20):
        body = (await router.chat(logprobs=True, top_logprobs=count)).json()
        rows = body["choices"][0]["logprobs"]["content"]
        assert len(rows) == body["usage"]["completion_tokens"]
        assert {len(row["top_logprobs"]) for row in rows} == {count}


# ---- Ids ---------------------------------------------------------------------------------------


async def test_a_chats_ids_come_whole_and_in_pieces(router: MemoryRouter, fleet: FakeFleet) -> None:
    fields: dict[str, Any] = {"return_token_ids": True, "n": 3, "seed": 6, "max_tokens": 9}
    whole = (await router.chat("fox", **fields)).json()
    assert whole["prompt_token_ids"] == list(fleet.requests[0].prompt_token_ids)
    assert all("prompt_token_ids" not in choice for choice in whole["choices"])
    chunks = chunks_of(await router.chat("fox", stream=True, **fields))
    # One prompt, however many choices: it is in the very first frame and in no other.
    assert chunks[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    assert all("prompt_token_ids" not in chunk for chunk in chunks[1:])
    for choice in whole["choices"]:
        pieces = [
            token_id
            for chunk in chunks
            for own in chunk["choices"]
            if own["index"] == choice["index"]
            for token_id in own.get("token_ids", ())
        ]
        assert pieces == choice["token_ids"]


# ---- Streams -----------------------------------------------------------------------------------


@pytest.mark.parametrize("route", ["completion", "chat"])
async def test_events_carry_as_many_tokens_as_asked_and_lose_none(
    router: MemoryRouter, fleet: FakeFleet, route: str
) -> None:
    rng = seeded("stream_interval")
    ask = router.complete if route == "completion" else router.chat
    for _ in range(budget(15, 500)):
        interval, n = rng.randrange(1, 12), rng.randrange(1, 4)
        fleet.bundle = lambda: rng.randrange(1, 5)
        fields: dict[str, Any] = {
            "n": n,
            "seed": rng.randrange(1000),
            "max_tokens": rng.randrange(1, 40),
            "logprobs": 1 if route == "completion" else True,
            "return_token_ids": True,
            "stop": rng.choice([None, "e", "the"]),
        }
        whole = choices_of(await ask("fox", **fields))
        chunks = chunks_of(await ask("fox", stream=True, stream_interval=interval, **fields))
        for wanted in whole:
            own = [
                choice
                for chunk in chunks
                for choice in chunk["choices"]
                if choice["index"] == wanted["index"] and "token_ids" in choice
            ]
            sizes = [len(choice["token_ids"]) for choice in own]
            assert all(size >= interval for size in sizes[1:-1]), (interval, sizes)
            ids = list(chain.from_iterable(choice["token_ids"] for choice in own))
            assert ids == wanted["token_ids"]
            texts = [choice["text"] if "text" in choice else choice["delta"].get("content", "")
                     for choice in own]  # fmt: skip
            shown = wanted["text"] if "text" in wanted else wanted["message"]["content"]
            assert "".join(texts) == shown
            assert own[-1]["finish_reason"] == wanted["finish_reason"]
            assert own[-1]["stop_reason"] == wanted["stop_reason"]
            name = "tokens" if route == "completion" else "content"
            rows = [row for choice in own for row in (choice["logprobs"] or {name: []})[name]]
            assert rows == wanted["logprobs"][name]


async def test_usage_in_streams_comes_when_and_as_often_as_asked(router: MemoryRouter) -> None:
    for ask in (router.complete, router.chat):
        for options, frames, last in (
            ({}, "absent", False),
            ({"include_usage": False, "continuous_usage_stats": True}, "absent", False),
            ({"include_usage": True}, "null", True),
            ({"include_usage": True, "continuous_usage_stats": True}, "all", True),
        ):
            answer = await ask("fox", stream=True, stream_options=options, max_tokens=6, n=2)
            chunks = chunks_of(answer)
            if last:
                final = chunks.pop()
                assert (final["choices"], final["usage"]["completion_tokens"]) == ([], 12)
            for chunk in chunks:
                assert len(chunk["choices"]) == 1
                if frames == "absent":
                    assert "usage" not in chunk
                else:
                    assert (chunk["usage"] is None) == (frames == "null")
            if frames == "all":
                counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
                # A chunk with a role says what there was before it: nothing.
                assert counts == sorted(counts)
                opening = 2 if ask == router.chat else 0
                assert counts[:opening] == [0] * opening
                assert counts[opening] > 0


# ---- Templates and errors ----------------------------------------------------------------------


async def test_a_requests_own_template_is_refused_where_nobody_trusts_it(
    router: MemoryRouter,
) -> None:
    answer = await router.chat(chat_template="{{ messages[0].content }}")
    assert (answer.status, answer.error["param"]) == (400, "chat_template")
    assert "--trust-request-chat-template" in answer.error["message"]
    assert router.fleet.requests == []


async def test_a_requests_own_template_is_rendered_in_another_process(
    byte_level: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    rendered_here: list[object] = []
    render = ChatTemplate.render

    def noting(*given: Any, **named: Any) -> str:
        rendered_here.append(given[1])
        return render(*given, **named)

    monkeypatch.setattr(ChatTemplate, "render", noting)
    fleet = FakeFleet(model_files(byte_level))
    async with memory_router(fleet, trust_request_chat_template=True) as router:
        assert (await router.chat("fox")).status == 200
        num_rendered = len(rendered_here)
        assert num_rendered >= 1
        assert (await router.chat("fox", chat_template="{{ 'fox' * 3 }}")).status == 200
    assert len(rendered_here) == num_rendered
    assert list(fleet.requests[1].prompt_token_ids) == byte_level.encode("fox" * 3).ids


# What jinja takes, and Python or the tokenizer does not.
UNUSABLE = [
    ("{{ " + "(" * 150 + "1" + ")" * 150 + " }}", "nested too deeply"),
    ("{{ " + "1+" * 3000 + "1 }}", "nested too deeply"),
    ("{% break %}", "'break' outside loop"),
    ("{% for x in y %}" * 25 + "{% endfor %}" * 25, "too many statically nested blocks"),
    ("{% if x %}" * 120 + "{% endif %}" * 120, "too many levels of indentation"),
    ("{{ dict(a=1,a=2) }}", "keyword argument repeated: a"),
    ("{% macro f(a,a) %}{% endmacro %}", "duplicate argument"),
    ("{{ " + "1" * 6000 + " }}", "limit"),
    ("{{ '\\ud800' }}", "U+D800"),
]


async def test_a_requests_own_template_that_cannot_be_used_is_a_bad_request(
    byte_level: Tokenizer, capfd: pytest.CaptureFixture[str]
) -> None:
    fleet = FakeFleet(model_files(byte_level))
    async with memory_router(fleet, trust_request_chat_template=True) as router:
        for source, words in UNUSABLE:
            answer = await router.chat(chat_template=source)
            assert (answer.status, answer.error["param"]) == (400, "chat_template"), source
            assert answer.error["message"].startswith("chat_template: ")
            assert words in answer.error["message"]
        # Its words may hold what cannot be encoded, too.
        answer = await router.chat(chat_template="{{ raise_exception('\\ud800') }}")
        assert answer.status == 400
    # The process for templates logs what it did not foresee.
    assert "Traceback" not in capfd.readouterr().err


async def test_a_template_that_quotes_the_messages_does_not_send_them_all_back(
    byte_level: Tokenizer,
) -> None:
    fleet = FakeFleet(model_files(byte_level))
    async with memory_router(fleet, trust_request_chat_template=True) as router:
        template = "{{ raise_exception(messages[0].content) }}"
        for character in ("x", "\U0001f98a", "\x01", "\\", '"'):
            answer = await router.chat(character * 200_000, chat_template=template)
            assert answer.status == 400
            assert len(answer.body) < 2000, character


@pytest.mark.parametrize("name", ["messages", "tools", "documents", "add_generation_prompt"])
async def test_a_variable_that_is_a_field_is_not_a_templates_argument(
    router: MemoryRouter, name: str
) -> None:
    answer = await router.chat(chat_template_kwargs={name: []})
    assert (answer.status, answer.error["param"]) == (400, "chat_template_kwargs")
    assert name in answer.error["message"]


async def test_both_routes_name_the_context_in_the_words_clients_match(
    checked: MemoryRouter,
) -> None:
    words = f"This model's maximum context length is {INFO.max_model_len} tokens"
    for answer in (
        await checked.complete([5] * 512),
        await checked.complete([5] * 500, max_tokens=13),
        await checked.complete("fox " * 600),
        await checked.complete("fox " * 600_000),
        await checked.chat("fox " * 600),
        await checked.chat("fox", max_tokens=512),
        await checked.chat("fox", max_completion_tokens=512),
    ):
        assert answer.status == 400
        assert words in answer.error["message"]
        assert answer.error["type"] == "BadRequestError"
    assert checked.fleet.requests == []


async def test_bad_words_reach_the_engine_once_each_and_never_empty(checked: MemoryRouter) -> None:
    assert (await checked.complete(bad_words=["fox", " fox", "日本"])).status == 200
    words = [tuple(word) for word in checked.fleet.requests[0].sampling.bad_words]
    assert len(set(words)) == len(words)
    assert all(words)


async def test_unknown_fields_change_nothing(checked: MemoryRouter) -> None:
    assert isinstance(checked.fleet, CheckedFleet)
    unknown: dict[str, Any] = {
        "metadata": {"a": 1},
        "store": True,
        "service_tier": "auto",
        "depth": 0.5,
        "": 1,
        "logprobs_": [[]],
        "x" * 10_000: 1,
    }
    await checked.complete(seed=1)
    await checked.complete(seed=1, **unknown)
    await checked.chat(seed=1)
    await checked.chat(seed=1, **unknown)
    first, second, third, fourth = checked.fleet.submits
    assert (first, third) == (second, fourth)


def test_the_fakes_columns_are_well_formed() -> None:
    columns = fake_logprobs([50, 51], 2, [60, 50])
    assert columns.requested == [-80.0, -0.5, -80.0, -70.0]
    assert isinstance(columns, Logprobs)


# ---- bounds of what there may be many of -------------------------------------------------------


async def test_a_bad_word_of_too_many_tokens_is_refused_by_name(router: MemoryRouter) -> None:
    assert (await router.complete(bad_words=["zq" * 15], max_tokens=2)).status == 200
    refused = await router.complete(bad_words=["zq" * 500], max_tokens=2)
    assert (refused.status, refused.error["param"]) == (400, "bad_words")
    assert "64 tokens" in refused.error["message"]


async def test_a_chat_has_a_bounded_number_of_pieces(router: MemoryRouter) -> None:
    part = {"type": "text", "text": ""}
    most = [{"role": "user", "content": [part] * (MAX_PIECES - 1)}]
    assert (await router.post("/v1/chat/completions", {"messages": most})).status == 400  # length
    for messages in (
        [{"role": "user", "content": [part] * MAX_PIECES}],
        [{"role": "user", "content": ""}] * (MAX_PIECES + 1),
        [{"role": "assistant", "tool_calls": [{}] * MAX_PIECES}],
    ):
        refused = await router.post("/v1/chat/completions", {"messages": messages})
        assert refused.status == 400
        assert f"at most {MAX_PIECES} messages, parts" in refused.error["message"]


async def test_as_many_ids_may_be_allowed_as_a_vocabulary_has(
    router: MemoryRouter, fleet: FakeFleet
) -> None:
    ids = list(range(INFO.vocab_size))
    assert (await router.complete(allowed_token_ids=ids, max_tokens=2)).status == 200
    assert len(fleet.requests[0].sampling.allowed_token_ids) == INFO.vocab_size
    started = time.process_time()
    refused = await router.complete(allowed_token_ids=[1] * 1_000_001, max_tokens=2)
    assert (refused.status, refused.error["param"]) == (400, "allowed_token_ids")
    assert time.process_time() - started < 1


async def test_the_field_that_asks_for_too_many_tokens_is_named(router: MemoryRouter) -> None:
    for name in ("max_tokens", "max_completion_tokens"):
        refused = await router.chat(**{name: 100_000})
        assert (refused.status, refused.error["param"]) == (400, name)
