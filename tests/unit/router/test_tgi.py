"""The API of text-generation-inference: fields and their bounds, answers, streams, errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from support.budget import budget, seeded
from support.router_doubles import (
    INFO,
    Answer,
    FakeFleet,
    MemoryRouter,
    byte_level_tokenizer,
    fake_logprobs,
    id_of,
    memory_router,
    model_files,
    random_text,
)
from tokenizers import Tokenizer

from penstock_proto.errors import (
    NoShardAvailable,
    Overloaded,
    PenstockError,
    RequestRefused,
    ShardFailed,
)
from penstock_proto.types import GenerationRequest
from penstock_router.apis.tgi.answers import GenerateRequest, error_answer, error_status
from penstock_router.apis.tgi.requests import (
    PARAMETERS,
    parse_compat,
    parse_generate,
    parse_generate_stream,
)
from penstock_router.errors import ApiError, BadRequest, TimedOut, Unauthorized
from penstock_router.generation.job import choice_seed
from penstock_router.request import TextWithImages

LIMIT = INFO.max_model_len


def asked(**parameters: Any) -> GenerateRequest:
    return parse_generate({"inputs": "Hello", "parameters": parameters})


def says(tokenizer: Tokenizer, text: str, *, end: int | None = 0) -> Callable[..., list[int]]:
    """A model that always answers `text`, then its eos token."""
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    ids = ids if end is None else [*ids, end]
    return lambda request: ids[: request.max_tokens]


async def generate(router: MemoryRouter, inputs: str = "Hello", **parameters: Any) -> Answer:
    return await router.post("/generate", {"inputs": inputs, "parameters": parameters})


async def details_of(router: MemoryRouter, **parameters: Any) -> dict[str, Any]:
    answer = await generate(router, details=True, **parameters)
    assert answer.status == 200, answer.body
    details: dict[str, Any] = answer.json()["details"]
    return details


async def stream(router: MemoryRouter, inputs: str = "Hello", **parameters: Any) -> list[Any]:
    answer = await router.post("/generate_stream", {"inputs": inputs, "parameters": parameters})
    assert answer.status == 200, answer.body
    assert answer.headers["x-accel-buffering"] == "no"
    return answer.events


def shown_text(tokens: list[dict[str, Any]]) -> str:
    return "".join(token["text"] for token in tokens if not token["special"])


# ---- fields ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("best_of", 0, "`best_of` must be > 0 and <= 16384. Given: 0"),
        ("best_of", 16385, "`best_of` must be > 0 and <= 16384. Given: 16385"),
        ("temperature", 0, "`temperature` must be strictly positive"),
        ("temperature", -1.5, "`temperature` must be strictly positive"),
        ("repetition_penalty", 0.0, "`repetition_penalty` must be strictly positive"),
        ("frequency_penalty", -2.1, "`frequency_penalty` must be >= -2.0 and <= 2.0"),
        ("frequency_penalty", 2.1, "`frequency_penalty` must be >= -2.0 and <= 2.0"),
        ("top_k", 0, "`top_k` must be strictly positive"),
        ("top_k", -1, "`top_k` must be strictly positive"),
        ("top_p", 0, "`top_p` must be > 0.0 and < 1.0"),
        ("top_p", 1.0, "`top_p` must be > 0.0 and < 1.0"),
        ("typical_p", 0.0, "`typical_p` must be > 0.0 and < 1.0"),
        ("typical_p", 1, "`typical_p` must be > 0.0 and < 1.0"),
        ("max_new_tokens", 0, "`max_new_tokens` must be strictly positive"),
        ("stop", list("abcde"), "`stop` supports up to 4 stop sequences. Given: 5"),
        ("truncate", 0, "`truncate` must be strictly positive and less than"),
        ("top_n_tokens", -1, "`top_n_tokens` must be >= 0 and <= 5. Given: -1"),
        ("top_n_tokens", 6, "`top_n_tokens` must be >= 0 and <= 5. Given: 6"),
        ("grammar", {"type": "lark", "value": "x"}, "grammar is not supported"),
        ("grammar", {"type": "json", "value": "{"}, "grammar is not valid: "),
        ("watermark", True, "watermark: not served"),
        ("seed", -1, "seed: must be at least 0"),
        ("seed", 2**64, "seed: must be at most"),
        ("temperature", "hot", "temperature: must be a number"),
        ("top_k", 1.5, "top_k: must be an integer"),
        ("do_sample", "yes", "do_sample: must be true or false"),
        ("stop", "a", "stop: must be an array"),
        ("stop", [""], "stop: must be a string of 1"),
        ("stop", [7], "stop: must be a string"),
    ],
)
def test_a_value_out_of_bounds_is_refused_in_the_words_that_clients_know(
    field: str, value: object, words: str
) -> None:
    with pytest.raises(BadRequest) as caught:
        asked(**{field: value})
    assert caught.value.message.startswith(words)
    assert caught.value.param == field
    assert error_status(caught.value) == 422
    shown = error_answer(caught.value)
    assert shown["error"].startswith(f"Input validation error: {words}")
    assert shown["error_type"] == "validation"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("best_of", 1),
        ("temperature", 1e-9),
        ("repetition_penalty", 0.01),
        ("frequency_penalty", -2),
        ("frequency_penalty", 2.0),
        ("top_k", 1),
        ("top_p", 0.999),
        ("typical_p", 0.001),
        ("max_new_tokens", 1),
        ("stop", []),
        ("stop", list("abcd")),
        ("truncate", 1),
        ("top_n_tokens", 5),
        ("seed", 2**64 - 1),
        ("watermark", False),
    ],
)
def test_a_value_at_its_bound_is_accepted(field: str, value: object) -> None:
    asked(**{field: value})


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"best_of": 2}, "you must use sampling when `best_of` is > 1"),
        (
            {"best_of": 2, "do_sample": True, "seed": 1},
            "`seed` must not be set when `best_of` > 1",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(parameters: dict[str, Any], words: str) -> None:
    with pytest.raises(BadRequest) as caught:
        asked(**parameters)
    assert caught.value.message == words


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        (
            {"best_of": 2, "do_sample": True},
            "`best_of` != 1 is not supported when streaming tokens",
        ),
        (
            {"decoder_input_details": True},
            "`decoder_input_details` == true is not supported when streaming tokens",
        ),
    ],
)
def test_what_streams_cannot_show_is_refused(parameters: dict[str, Any], words: str) -> None:
    body = {"inputs": "Hello", "parameters": parameters}
    for parse, more in ((parse_generate_stream, {}), (parse_compat, {"stream": True})):
        with pytest.raises(BadRequest) as caught:
            parse({**body, **more})
        assert caught.value.message == words
    parse_generate(body)


@pytest.mark.parametrize("body", [{}, {"inputs": None}, {"inputs": ""}, {"inputs": ["Hello"]}])
def test_inputs_are_a_text_that_is_not_empty(body: dict[str, Any]) -> None:
    with pytest.raises(BadRequest, match="inputs"):
        parse_generate(body)
    if body.get("inputs") == "":
        with pytest.raises(BadRequest, match=r"^`inputs` cannot be empty$"):
            parse_generate(body)


def test_images_stand_within_the_inputs_and_a_link_with_words_is_text() -> None:
    url = "data:image/png;base64,iVBORw0KGgo="
    asked = parse_generate({"inputs": f"One ![]({url})and ![](https://example.org/b.png)."})
    assert asked.prompts == (TextWithImages(("One ", "and ", ".")),)
    assert [image.url for image in asked.images] == [url, "https://example.org/b.png"]
    text = "![a cat](https://example.org/cat.png)"
    plain = parse_generate({"inputs": text})
    assert (plain.prompts, plain.images) == ((text,), ())


def test_null_is_the_same_as_not_given() -> None:
    assert asked(**dict.fromkeys(PARAMETERS)) == asked()
    assert parse_compat({"inputs": "Hello", "parameters": None, "stream": None}) == parse_compat(
        {"inputs": "Hello"}
    )


@pytest.mark.parametrize(
    ("parameters", "samples"),
    [
        (None, True),
        ({}, False),
        ({"max_new_tokens": 5, "seed": 3, "repetition_penalty": 1.2}, False),
        ({"do_sample": True}, True),
        ({"temperature": 0.5}, True),
        ({"top_k": 5}, True),
        ({"top_p": 0.5}, True),
        ({"typical_p": 0.5}, True),
        ({"do_sample": False, "top_p": 0.5}, True),
    ],
)
def test_tokens_are_drawn_only_where_something_asks_for_it(
    parameters: dict[str, Any] | None, samples: bool
) -> None:
    request = parse_generate({"inputs": "Hello", "parameters": parameters})
    assert request.samples == samples
    expected = (parameters or {}).get("temperature", 1.0) if samples else 0.0
    assert request.temperature == expected


@pytest.mark.parametrize(
    ("field", "value", "received"),
    [
        ("temperature", 0.7, {"temperature": 0.7}),
        ("top_k", 3, {"top_k": 3}),
        ("top_p", 0.5, {"top_p": 0.5}),
        ("typical_p", 0.25, {"typical_p": 0.25}),
        ("repetition_penalty", 1.5, {"repetition_penalty": 1.5}),
        ("frequency_penalty", -0.5, {"frequency_penalty": -0.5}),
        ("seed", 2**63 + 5, {"seed": 2**63 + 5}),
        ("do_sample", True, {"temperature": 1.0}),
        # What a model's own configuration says must not come in.
        (
            "do_sample",
            False,
            {
                **{"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0},
                **{"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0},
            },
        ),
    ],
)
async def test_shards_are_told_how_to_sample(
    router: MemoryRouter, fleet: FakeFleet, field: str, value: Any, received: dict[str, Any]
) -> None:
    await generate(router, max_new_tokens=1, **{field: value})
    [request] = fleet.requests
    for name, expected in received.items():
        assert getattr(request.sampling, name) == expected


async def test_max_new_tokens_is_a_bound_and_its_default_the_context(
    router: MemoryRouter, fleet: FakeFleet
) -> None:
    await generate(router, max_new_tokens=7)
    await generate(router)
    first, second = fleet.requests
    assert first.max_tokens == 7
    assert second.max_tokens == LIMIT - len(second.prompt_token_ids)


async def test_truncate_keeps_the_last_tokens_of_the_inputs(
    router: MemoryRouter, fleet: FakeFleet, byte_level: Tokenizer
) -> None:
    text = "The quick brown fox jumps over the lazy dog"
    await generate(router, text, truncate=3, max_new_tokens=1)
    assert list(fleet.requests[0].prompt_token_ids) == byte_level.encode(text).ids[-3:]


# ---- answers -----------------------------------------------------------------------------------


async def test_an_answer_is_its_text_and_no_more(router: MemoryRouter, fleet: FakeFleet) -> None:
    fleet.script = says(byte_level_tokenizer(), " world")
    answer = await generate(router)
    assert answer.status == 200
    assert answer.json() == {"generated_text": " world"}
    # Nobody sees them, so that shards need not make them.
    assert fleet.requests[0].logprobs is None


async def test_details_show_every_token(
    router: MemoryRouter, fleet: FakeFleet, byte_level: Tokenizer
) -> None:
    ids = byte_level.encode(" the lazy dog").ids
    fleet.script = lambda request: [*ids, 0]
    answer = (await generate(router, details=True)).json()
    details = answer["details"]
    tokens = details["tokens"]
    assert [token["id"] for token in tokens] == [*ids, 0]
    assert [token["special"] for token in tokens] == [*[False] * len(ids), True]
    assert shown_text(tokens) == answer["generated_text"] == " the lazy dog"
    assert tokens[-1]["text"] == "<|eos|>"
    assert [token["logprob"] for token in tokens] == fake_logprobs([*ids, 0], 0).chosen
    assert details["finish_reason"] == "eos_token"
    assert details["generated_tokens"] == len(ids) + 1
    assert details["seed"] is None
    assert details["prefill"] == []
    assert "top_tokens" not in details
    assert "best_of_sequences" not in details


async def test_prefill_shows_the_inputs_tokens_and_the_first_without_a_logprob(
    router: MemoryRouter, fleet: FakeFleet
) -> None:
    answer = await generate(router, "Hello world", decoder_input_details=True, max_new_tokens=2)
    prefill = answer.json()["details"]["prefill"]
    ids = list(fleet.requests[0].prompt_token_ids)
    assert [token["id"] for token in prefill] == ids
    assert "".join(token["text"] for token in prefill) == "Hello world"
    assert [token["logprob"] for token in prefill] == [None, *fake_logprobs(ids[1:], 0).chosen]


async def test_top_tokens_are_the_likeliest_beside_each_token(
    router: MemoryRouter, fleet: FakeFleet
) -> None:
    details = await details_of(router, top_n_tokens=2, max_new_tokens=3, seed=1)
    ids = [token["id"] for token in details["tokens"]]
    expected = fake_logprobs(ids, 2)
    top = details["top_tokens"]
    assert [len(row) for row in top] == [2, 2, 2]
    assert [token["id"] for row in top for token in row] == expected.top_token_ids
    assert [token["logprob"] for row in top for token in row] == expected.top_logprobs
    assert top[0][0].keys() == {"id", "text", "logprob", "special"}
    events = await stream(router, top_n_tokens=2, max_new_tokens=3, seed=1)
    assert [event["top_tokens"] for event in events] == top
    assert "top_tokens" not in (await stream(router, max_new_tokens=1))[0]


@pytest.mark.parametrize(
    ("text", "parameters", "reason", "shown"),
    [
        (" the lazy dog", {"max_new_tokens": 1}, "length", " the"),
        (" the lazy dog", {}, "eos_token", " the lazy dog"),
        # A stop string stays, and nothing behind it, also within a token.
        (" the lazy dog", {"stop": ["zy"]}, "stop_sequence", " the lazy"),
        (" the lazy dog", {"stop": ["nothing", "he l"]}, "stop_sequence", " the l"),
        (" the lazy dog", {"stop": [" th"]}, "stop_sequence", " th"),
    ],
)
async def test_how_a_text_ends(
    router: MemoryRouter,
    fleet: FakeFleet,
    byte_level: Tokenizer,
    text: str,
    parameters: dict[str, Any],
    reason: str,
    shown: str,
) -> None:
    fleet.script = says(byte_level, text)
    answer = (await generate(router, details=True, **parameters)).json()
    assert answer["generated_text"] == shown
    assert answer["details"]["finish_reason"] == reason
    assert shown_text(answer["details"]["tokens"]) == shown
    events = await stream(router, details=True, **parameters)
    assert events[-1]["generated_text"] == shown
    assert events[-1]["details"]["finish_reason"] == reason
    assert shown_text([event["token"] for event in events]) == shown


async def test_return_full_text_begins_with_the_whole_inputs(
    router: MemoryRouter, fleet: FakeFleet, byte_level: Tokenizer
) -> None:
    fleet.script = says(byte_level, " world")
    parameters = {"return_full_text": True, "truncate": 1}
    answer = await generate(router, "Hello hello", **parameters)
    assert answer.json()["generated_text"] == "Hello hello world"
    events = await stream(router, "Hello hello", **parameters)
    assert events[-1]["generated_text"] == "Hello hello world"
    assert shown_text([event["token"] for event in events]) == " world"


async def test_the_seed_is_shown_where_tokens_are_drawn_and_brings_the_text_back(
    router: MemoryRouter,
) -> None:
    first = (await generate(router, do_sample=True, details=True, max_new_tokens=4)).json()
    seed = first["details"]["seed"]
    assert 0 <= seed < 2**64
    again = (await generate(router, do_sample=True, seed=seed, max_new_tokens=4)).json()
    assert again["generated_text"] == first["generated_text"]
    assert (await details_of(router, seed=5, max_new_tokens=1))["seed"] is None


async def test_the_best_of_several_is_the_likeliest_and_the_others_are_told(
    router: MemoryRouter, fleet: FakeFleet
) -> None:
    # Of even ids the double says that they are likely.
    scores = [[5, 7], [8, 10], [6, 9]]
    fleet.script = lambda request: scores[fleet.requests.index(request)]
    details = await details_of(router, best_of=3, do_sample=True, max_new_tokens=2)
    assert [token["id"] for token in details["tokens"]] == [8, 10]
    others = details["best_of_sequences"]
    assert [[token["id"] for token in other["tokens"]] for other in others] == [[6, 9], [5, 7]]
    assert others[0].keys() == {
        *("generated_text", "finish_reason", "generated_tokens", "seed", "prefill", "tokens")
    }
    seeds = [request.sampling.seed or 0 for request in fleet.requests]
    assert seeds == [choice_seed(seeds[0], choice) for choice in range(3)]
    assert [details["seed"], *(other["seed"] for other in others)] == [
        *(seeds[1], seeds[2], seeds[0])
    ]
    fleet.requests.clear()
    plain = await generate(router, best_of=3, do_sample=True, max_new_tokens=2)
    assert plain.json().keys() == {"generated_text"}


async def test_the_compatible_route_answers_an_array_or_events(
    router: MemoryRouter, fleet: FakeFleet, byte_level: Tokenizer
) -> None:
    fleet.script = says(byte_level, " world")
    body: dict[str, Any] = {"inputs": "Hello", "parameters": {"return_full_text": False}}
    assert (await router.post("/", body)).json() == [{"generated_text": " world"}]
    events = (await router.post("/", {**body, "stream": True})).events
    assert events[-1]["generated_text"] == " world"
    # As pipelines have it, which this route stood for.
    plain = await router.post("/", {"inputs": "Hello"})
    assert plain.json() == [{"generated_text": "Hello world"}]
    assert (await router.get("/")).status == 200


async def test_headers_say_how_long_it_took_and_of_how_much(
    fleet: FakeFleet, byte_level: Tokenizer
) -> None:
    fleet.script = says(byte_level, " the lazy dog", end=None)
    fleet.step_s = 0.02
    async with memory_router(fleet) as router:
        await generate(router, max_new_tokens=1)
        answer = await generate(router, "Hello wörld", details=True)
    headers = answer.headers
    count = answer.json()["details"]["generated_tokens"]
    assert headers["x-compute-type"] == INFO.device
    assert headers["x-compute-characters"] == "11"
    assert headers["x-prompt-tokens"] == str(len(fleet.requests[-1].prompt_token_ids))
    assert headers["x-generated-tokens"] == str(count)
    total_ms, validation_ms, queue_ms, inference_ms, token_ms = [
        int(headers[f"x-{name}"])
        for name in (
            *("total-time", "validation-time", "queue-time", "inference-time"),
            "time-per-token",
        )
    ]
    assert abs(total_ms - validation_ms - queue_ms - inference_ms) <= 2
    assert abs(float(headers["x-compute-time"]) * 1000 - total_ms) <= 1
    assert inference_ms >= 20 * count
    assert abs(token_ms - inference_ms / count) <= 1


async def test_the_time_in_a_queue_is_the_shards(
    router: MemoryRouter, fleet: FakeFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = fleet._output

    def queued(request: GenerationRequest, ids: list[int], position: int) -> Any:
        output = plain(request, ids, position)
        output.queue_s = 0.25 if position == 0 else None
        return output

    monkeypatch.setattr(fleet, "_output", queued)
    answer = await generate(router, max_new_tokens=3)
    assert answer.headers["x-queue-time"] == "250"


# ---- streams -----------------------------------------------------------------------------------


async def test_a_stream_has_an_event_for_each_token_and_the_last_has_it_all(
    router: MemoryRouter, fleet: FakeFleet, byte_level: Tokenizer
) -> None:
    ids = byte_level.encode(" the lazy dog").ids
    fleet.script = lambda request: [*ids, 0]
    events = await stream(router, details=True, do_sample=True, seed=9)
    assert [event["index"] for event in events] == list(range(1, len(ids) + 2))
    assert [event["token"]["id"] for event in events] == [*ids, 0]
    *firsts, last = events
    assert {(event["generated_text"], event["details"]) for event in firsts} == {(None, None)}
    assert last["token"] == {"id": 0, "text": "<|eos|>", "logprob": -0.5, "special": True}
    assert last["generated_text"] == " the lazy dog"
    assert last["details"] == {
        "finish_reason": "eos_token",
        "generated_tokens": len(ids) + 1,
        "seed": 9,
        "input_length": len(fleet.requests[0].prompt_token_ids),
    }
    assert (await stream(router))[-1]["details"] is None


async def test_a_character_of_several_tokens_is_the_last_ones(
    router: MemoryRouter, fleet: FakeFleet, byte_level: Tokenizer
) -> None:
    bytes_of_emoji = [id_of(byte_level, character) for character in "ðŁĴĻ"]
    fleet.script = lambda request: [*bytes_of_emoji, 0]
    tokens = [event["token"] for event in await stream(router)]
    assert [token["text"] for token in tokens] == ["", "", "", "💙", "<|eos|>"]
    assert tokens == (await details_of(router))["tokens"]


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece", "wordpiece", "metaspace"])
async def test_a_stream_and_a_whole_answer_are_the_same(
    kind: str, request: pytest.FixtureRequest
) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(kind)
    rng = seeded(f"TGI's stream equals whole, {kind}")
    fleet = FakeFleet(model_files(tokenizer), bundle=lambda: rng.randint(1, 5))
    ids: list[int] = []
    fleet.script = lambda _: [*ids, 0]
    async with memory_router(fleet) as router:
        for _ in range(budget(15, 2_000)):
            ids = [rng.randrange(tokenizer.get_vocab_size()) for _ in range(rng.randint(0, 30))]
            if rng.random() < 0.5:
                ids = tokenizer.encode(random_text(rng, 8), add_special_tokens=False).ids
            parameters: dict[str, Any] = {
                "stop": [random_text(rng, 1) for _ in range(rng.randint(0, 2))],
                "details": True,
                "top_n_tokens": rng.randint(0, 2),
            }
            inputs = f"Hello{random_text(rng, 2)}"
            whole = (await generate(router, inputs, **parameters)).json()
            check_stream(await stream(router, inputs, **parameters), whole)


def check_stream(events: list[Any], whole: dict[str, Any]) -> None:
    """Check that a stream has what the whole answer has, and that its tokens join to the text."""
    details = whole["details"]
    tokens = [event["token"] for event in events]
    assert tokens == details["tokens"]
    no_top = [None] * len(events)
    assert [event.get("top_tokens") for event in events] == details.get("top_tokens", no_top)
    assert shown_text(tokens) == whole["generated_text"]
    assert events[-1]["generated_text"] == whole["generated_text"]
    for name in ("finish_reason", "generated_tokens", "seed"):
        assert events[-1]["details"][name] == details[name]


async def test_an_end_without_a_token_has_an_event_all_the_same(
    router: MemoryRouter, fleet: FakeFleet
) -> None:
    fleet.script = lambda request: []
    [event] = await stream(router, details=True)
    assert event["token"] == {"id": 0, "text": "", "logprob": None, "special": True}
    assert event["generated_text"] == ""
    assert event["details"]["generated_tokens"] == 0


# ---- errors ------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/generate", "/generate_stream", "/", "/invocations"])
async def test_what_does_not_fit_is_told_in_the_words_that_clients_match(
    router: MemoryRouter, fleet: FakeFleet, path: str
) -> None:
    body = {"inputs": "Hello", "parameters": {"max_new_tokens": LIMIT}, "stream": True}
    answer = await router.post(path, body)
    assert answer.status == 422
    given = len(byte_level_tokenizer().encode("Hello").ids)
    assert answer.json() == {
        "error": f"Input validation error: `inputs` tokens + `max_new_tokens` must be <= {LIMIT}. "
        f"Given: {given} `inputs` tokens and {LIMIT} `max_new_tokens`",
        "error_type": "validation",
    }
    assert fleet.requests == []


async def test_inputs_that_are_too_long_are_told_their_length(router: MemoryRouter) -> None:
    text = "Hello " * LIMIT
    count = len(byte_level_tokenizer().encode(text).ids)
    answer = await generate(router, text)
    words = f"Input validation error: `inputs` must have less than {LIMIT} tokens. Given: "
    assert (answer.status, answer.json()["error"]) == (422, f"{words}{count}")
    # Not tokenized at all.
    answer = await generate(router, text * 50)
    assert answer.json()["error"] == f"{words}more"
    answer = await generate(router, text, truncate=LIMIT + 1)
    assert answer.json()["error"] == (
        "Input validation error: `truncate` must be strictly positive and less than "
        f"{LIMIT}. Given: {LIMIT + 1}"
    )


@pytest.mark.parametrize(
    ("error", "status", "error_type", "words"),
    [
        (Overloaded("full"), 429, "overloaded", "Model is overloaded"),
        (ShardFailed("broken"), 424, "generation", "Request failed during generation: "),
        (NoShardAvailable("none"), 503, "unavailable", "no shard"),
        (RequestRefused("no", field="top_k"), 422, "validation", "Input validation error: no"),
    ],
)
async def test_an_error_before_the_first_token_is_a_status_and_after_it_an_event(
    router: MemoryRouter,
    fleet: FakeFleet,
    error: PenstockError,
    status: int,
    error_type: str,
    words: str,
) -> None:
    fleet.script = lambda request: [error]
    for path in ("/generate", "/generate_stream"):
        answer = await router.post(path, {"inputs": "Hello"})
        assert answer.status == status
        assert answer.json()["error_type"] == error_type
        assert answer.json()["error"].startswith(words)
    fleet.script = lambda request: [5, error]
    first, last = await stream(router)
    assert first["token"]["id"] == 5
    assert last.keys() == {"error", "error_type"}
    assert last["error_type"] == error_type
    assert last["error"].startswith(words)


@pytest.mark.parametrize(
    ("error", "status", "error_type"),
    [
        (Unauthorized("x"), 401, "authentication"),
        (TimedOut("x"), 504, "timeout"),
        (ApiError("x"), 500, "incomplete_generation"),
    ],
)
def test_other_errors_keep_their_status(error: ApiError, status: int, error_type: str) -> None:
    assert error_status(error) == status
    assert error_answer(error) == {"error": "x", "error_type": error_type}


async def test_errors_of_a_route_have_its_form_whatever_they_are(byte_level: Tokenizer) -> None:
    fleet = FakeFleet(model_files(byte_level))
    async with memory_router(fleet, api_key="secret", max_body_bytes=100) as router:
        assert (await router.post("/generate", {})).json()["error_type"] == "authentication"
        key = {"Authorization": "Bearer secret"}
        answer = await router.post("/", {"inputs": "x" * 200}, **key)
        assert (answer.status, answer.json()["error_type"]) == (413, "payload_too_large")
        answer = await router.post("/generate", b"{", **key)
        assert (answer.status, answer.json()["error_type"]) == (422, "validation")
        assert (await router.get("/info")).status == 200


# ---- other routes ------------------------------------------------------------------------------


async def test_info_tells_the_model_and_the_bounds_that_hold(byte_level: Tokenizer) -> None:
    fleet = FakeFleet(model_files(byte_level))
    async with memory_router(fleet, max_concurrent_requests=8, tokenizer_threads=3) as router:
        info = (await router.get("/info")).json()
        assert info["model_id"] == INFO.model
        assert info["model_sha"] is None
        assert (info["max_input_tokens"], info["max_total_tokens"]) == (LIMIT - 1, LIMIT)
        assert info["validation_workers"] == 3
        assert info["router"] == "penstock"
        assert info["version"]
        assert info.keys() >= {
            *("model_pipeline_tag", "max_concurrent_requests", "max_client_batch_size"),
            *("sha", "docker_label"),
        }
        # What it says is what is accepted.
        assert info["max_best_of"] == info["max_concurrent_requests"] == 8
        at_bound = await generate(router, best_of=8, do_sample=True, max_new_tokens=1)
        assert at_bound.status == 200
        refused = await generate(router, best_of=9, do_sample=True, max_new_tokens=1)
        assert refused.status == 422
        assert "best_of" in refused.json()["error"]
        stops = ["x"] * info["max_stop_sequences"]
        assert (await generate(router, stop=stops, max_new_tokens=1)).status == 200
        assert (await generate(router, stop=[*stops, "x"])).status == 422


async def test_info_without_a_shard_is_an_error_in_the_apis_form(
    router: MemoryRouter, fleet: FakeFleet
) -> None:
    fleet.shards.clear()
    answer = await router.get("/info")
    assert (answer.status, answer.json()["error_type"]) == (503, "unavailable")


async def test_a_chat_is_rendered_and_its_tokens_stand_at_their_bytes(
    router: MemoryRouter, byte_level: Tokenizer
) -> None:
    body = {"messages": [{"role": "user", "content": "café 😀"}], "model": "tgi", "max_tokens": 5}
    answer = (await router.post("/chat_tokenize", body)).json()
    text = answer["templated_text"]
    assert text == "<|im_start|>user\ncafé 😀<|im_end|>\n<|im_start|>assistant\n"
    tokens = answer["tokenize_response"]
    assert [token["id"] for token in tokens] == byte_level.encode(text).ids
    data = text.encode()
    for token in tokens:
        shown = data[token["start"] : token["stop"]].decode("utf-8", "replace")
        assert token["text"] == shown or len(shown) == 1
    refused = await router.post("/chat_tokenize", {"messages": []})
    assert (refused.status, refused.json()["error_type"]) == (422, "validation")


async def test_a_template_that_refuses_is_told_as_such(byte_level: Tokenizer) -> None:
    template = "{{ raise_exception('system messages are not for me') }}"
    async with memory_router(FakeFleet(model_files(byte_level, template))) as router:
        body = {"messages": [{"role": "user", "content": "Hi"}]}
        answer = await router.post("/chat_tokenize", body)
    assert (answer.status, answer.json()["error_type"]) == (422, "template_error")
    assert "not for me" in answer.json()["error"]


async def test_tokenize_refuses_inputs_in_this_apis_form(router: MemoryRouter) -> None:
    answer = await router.post("/tokenize", {"inputs": ""})
    assert answer.status == 422
    assert answer.json() == {
        "error": "Input validation error: `inputs` cannot be empty",
        "error_type": "validation",
    }
    answer = await router.post("/tokenize", {"prompt": ""})
    assert answer.status == 400


@pytest.mark.parametrize(
    ("body", "sign"),
    [
        ({"messages": [{"role": "user", "content": "Hi"}]}, "choices"),
        ({"prompt": "Hello"}, "choices"),
        ({"input": "Hello"}, "data"),
    ],
)
async def test_invocations_are_answered_by_what_the_body_is(
    router: MemoryRouter, body: dict[str, Any], sign: str
) -> None:
    answer = await router.post("/invocations", body)
    assert answer.status == 200
    assert sign in answer.json()
    expected = {"messages": "chat.completion", "prompt": "text_completion", "input": "list"}
    assert answer.json()["object"] == expected[next(iter(body))]


async def test_invocations_with_inputs_are_answered_as_the_compatible_route_does(
    router: MemoryRouter,
) -> None:
    body = {"inputs": "Hello", "parameters": {"max_new_tokens": 2, "seed": 1}}
    answer = await router.post("/invocations", body)
    assert answer.json() == (await router.post("/", body)).json()
    refused = await router.post("/invocations", {"text": "Hello"})
    assert refused.status == 400
    assert "messages, prompt, input or inputs" in refused.error["message"]
