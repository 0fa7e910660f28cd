"""The deltas of a sequence whose text is split into reasoning, content and calls."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

import pytest
from support.budget import budget, seeded
from support.router_doubles import (
    INFO,
    CachingFleet,
    FakeFleet,
    MemoryRouter,
    byte_level_tokenizer,
    id_of,
    memory_router,
    model_files,
)
from tokenizers import AddedToken, Tokenizer

from penstock_proto.types import FinishReason, GenerationRequest, Output
from penstock_router.generation.choice import Choice, Delta, DeltaBuffer
from penstock_router.generation.client_progress import (
    BEGINNING,
    ChoiceProgress,
    ClientProgress,
    ResumePoint,
    skip_delivered,
)
from penstock_router.generation.deltas import Deltas
from penstock_router.generation.job import Job
from penstock_router.observe.request_record import Usage
from penstock_router.request import ChatRequest, CompletionRequest, Tool, ToolChoice
from penstock_router.served_models import ServedModel
from penstock_router.server.parts import ROUTER
from penstock_router.text.answer_pieces import PieceKind
from penstock_router.text.formats.json_formats.hermes import HERMES
from penstock_router.text.model_conventions import Conventions
from penstock_router.text.prompts import PreparedPrompts, Prompt, TextModel
from penstock_router.text.reasoning import STYLES
from penstock_router.text.tokenizer import load_tokenizer

EOS = INFO.eos_token_ids[0]
MARKS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
TOOL = Tool("add")
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
CALLS: dict[str, Any] = {"tools": (TOOL,), "tool_choice": ToolChoice("auto")}
# (kind, text, call)
Shown = list[tuple[str, str, int]]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """Marks are special tokens, as with Qwen 3's."""
    tokenizer = byte_level_tokenizer()
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in MARKS])
    return tokenizer


@pytest.fixture(scope="module")
def model(tokenizer: Tokenizer) -> ServedModel:
    text = TextModel(
        INFO.model,
        INFO.max_model_len,
        INFO.vocab_size,
        load_tokenizer(model_files(tokenizer)),
        None,
        False,
        Conventions(HERMES, STYLES["think"]),
    )
    return ServedModel(INFO, text)


def with_conventions(model: ServedModel, **fields: Any) -> ServedModel:
    conventions = dataclasses.replace(model.text.conventions, **fields)
    return dataclasses.replace(model, text=dataclasses.replace(model.text, conventions=conventions))


def choice_of(
    model: ServedModel,
    begun: bool = False,
    prompt: Prompt | None = None,
    **options: Any,
) -> Choice:
    prompt = prompt or Prompt([5], "$")
    asked = ChatRequest(messages=[], **options)
    request = GenerationRequest(prompt_token_ids=prompt.token_ids)
    prepared = PreparedPrompts((prompt,), reasoning_begun=begun)
    return Choice(Job(model, asked, prepared, (request,)), 0)


def outputs_of(ids: Sequence[int], bundle: int, reason: FinishReason) -> Iterator[Output]:
    for start in range(0, len(ids), bundle):
        output = Output(list(ids[start : start + bundle]), start)
        if start + bundle >= len(ids):
            output.finish_reason = reason
            output.stop_token_id = ids[-1] if reason is FinishReason.STOP else None
        yield output


def deltas_of(
    choice: Choice, ids: Sequence[int], bundle: int = 1, reason: FinishReason = FinishReason.STOP
) -> list[Delta]:
    deltas = []
    for output in outputs_of(ids, bundle, reason):
        delta = choice.take(output)
        if delta is not None:
            deltas.append(delta)
        if choice.finished:
            return deltas
    raise AssertionError("the choice did not end")


def whole(deltas: Sequence[Delta]) -> Delta:
    total = DeltaBuffer(Delta(0, "", []))
    for delta in deltas:
        total.add(delta)
    return total.whole()


def shown(delta: Delta) -> Shown:
    assert delta.pieces is not None
    content = [piece.text for piece in delta.pieces if piece.kind is PieceKind.CONTENT]
    assert delta.text == "".join(content)
    return [(piece.kind.value, piece.text, piece.call) for piece in delta.pieces]


def encoded(tokenizer: Tokenizer, text: str) -> list[int]:
    return [*tokenizer.encode(text, add_special_tokens=False).ids, EOS]


def answer(
    tokenizer: Tokenizer, model: ServedModel, text: str, begun: bool = False, **options: Any
) -> tuple[Shown, str | None, int | None]:
    """The same however its tokens are bundled."""
    ids = encoded(tokenizer, text)
    results = []
    for bundle in (1, 2, 3, 7, 1000):
        choice = choice_of(model, begun, **options)
        total = whole(deltas_of(choice, ids, bundle))
        results.append((shown(total), total.finish_reason, choice.reasoning_tokens))
    assert all(result == results[0] for result in results)
    return results[0]


# ---- Pieces ------------------------------------------------------------------------------------


def test_an_answer_is_told_into_reasoning_content_and_calls(
    tokenizer: Tokenizer, model: ServedModel
) -> None:
    text = f"<think>\nSum it.\n</think>\n\nLet me see.\n{CALL}\n{CALL}"
    pieces, reason, _ = answer(tokenizer, model, text, **CALLS)
    assert pieces == [
        ("reasoning", "Sum it.", 0),
        ("content", "Let me see.", 0),
        ("call", "add", 0),
        ("arguments", '{"a": 1}', 0),
        ("call", "add", 1),
        ("arguments", '{"a": 1}', 1),
    ]
    assert reason == "tool_calls"


def test_what_looks_like_a_call_within_reasoning_is_none(
    tokenizer: Tokenizer, model: ServedModel
) -> None:
    pieces, reason, _ = answer(tokenizer, model, f"<think>{CALL}</think>No.", **CALLS)
    assert pieces == [("reasoning", CALL, 0), ("content", "No.", 0)]
    assert reason == "stop"


@pytest.mark.parametrize("options", [{}, CALLS | {"tool_choice": ToolChoice("none")}])
def test_without_tools_to_call_a_call_is_content(
    tokenizer: Tokenizer, model: ServedModel, options: dict[str, Any]
) -> None:
    silent = with_conventions(model, reasoning=None)
    ids = encoded(tokenizer, f"Well {CALL}")
    total = whole(deltas_of(choice_of(silent, **options), ids))
    assert total.pieces is None
    # Its special tokens are skipped as ever.
    assert total.text == 'Well \n{"name": "add", "arguments": {"a": 1}}\n'
    assert total.finish_reason == "stop"
    pieces, reason, _ = answer(tokenizer, model, f"Well {CALL}", **options)
    assert pieces == [("content", total.text, 0)]
    assert reason == "stop"


def test_a_completion_is_text_whatever_its_model_does(
    tokenizer: Tokenizer, model: ServedModel
) -> None:
    asked = CompletionRequest(prompts=([5],))
    job = Job(
        model, asked, PreparedPrompts((Prompt([5]),)), (GenerationRequest(prompt_token_ids=[5]),)
    )
    choice = Choice(job, 0)
    total = whole(deltas_of(choice, encoded(tokenizer, "<think>a</think>b")))
    assert (total.pieces, total.text, choice.reasoning_tokens) == (None, "ab", None)


def test_a_delta_in_which_nothing_is_shown_has_no_pieces(
    tokenizer: Tokenizer, model: ServedModel
) -> None:
    deltas = deltas_of(choice_of(model), encoded(tokenizer, "<think>a</think>b"))
    assert [shown(delta) for delta in deltas] == [
        [],
        [("reasoning", "a", 0)],
        [],
        [("content", "b", 0)],
        [],
    ]


def test_marks_are_visible_and_other_special_tokens_hidden(
    tokenizer: Tokenizer, model: ServedModel
) -> None:
    text = "<think>a<|im_start|>b</think><tool_call>c<|im_end|>"
    assert answer(tokenizer, model, text)[0] == [("reasoning", "ab", 0), ("content", "c", 0)]
    pieces, _, _ = answer(tokenizer, model, text, **CALLS)
    assert pieces == [("reasoning", "ab", 0), ("content", "<tool_call>c", 0)]


def test_reasoning_that_the_prompt_began_needs_no_mark(
    tokenizer: Tokenizer, model: ServedModel
) -> None:
    pieces, _, count = answer(tokenizer, model, "\na</think>b", begun=True)
    assert pieces == [("reasoning", "a", 0), ("content", "b", 0)]
    assert count == 3


def test_reasoning_that_is_not_asked_for_is_counted_and_not_shown(
    tokenizer: Tokenizer, model: ServedModel
) -> None:
    text = "<think>a</think>b"
    pieces, _, count = answer(tokenizer, model, text, include_reasoning=False)
    assert pieces == [("content", "b", 0)]
    assert count == 3


def test_an_echoed_message_goes_first_and_is_read_by_nobody(
    tokenizer: Tokenizer, model: ServedModel
) -> None:
    prompt = Prompt([5], "<think>so")
    text = " it is</think>\nYes."
    pieces, _, _ = answer(tokenizer, model, text, begun=True, echo=True, prompt=prompt)
    assert pieces == [
        ("content", "<think>so", 0),
        ("reasoning", "it is", 0),
        ("content", "Yes.", 0),
    ]


# ---- Its end -----------------------------------------------------------------------------------


def ending(
    tokenizer: Tokenizer, model: ServedModel, text: str, reason: FinishReason, **options: Any
) -> str | None:
    choice = choice_of(model, **options)
    return whole(deltas_of(choice, encoded(tokenizer, text), reason=reason)).finish_reason


def test_an_answer_that_calls_ends_for_that_reason_but_where_it_was_told_to(
    tokenizer: Tokenizer, model: ServedModel
) -> None:
    stop, length = FinishReason.STOP, FinishReason.LENGTH
    assert ending(tokenizer, model, CALL, stop, **CALLS) == "tool_calls"
    assert ending(tokenizer, model, CALL, length, **CALLS) == "length"
    assert ending(tokenizer, model, "No.", stop, **CALLS) == "stop"
    required = CALLS | {"tool_choice": ToolChoice("required")}
    assert ending(tokenizer, model, CALL, stop, **required) == "tool_calls"
    named = CALLS | {"tool_choice": ToolChoice("named", "add")}
    assert ending(tokenizer, model, CALL, stop, **named) == "stop"


def test_a_call_that_is_cut_off_before_its_name_is_given_back_as_text(
    tokenizer: Tokenizer, model: ServedModel
) -> None:
    text = 'So <tool_call>\n{"name": "ad'
    pieces, reason, _ = answer(tokenizer, model, text, **CALLS)
    assert pieces == [("content", text, 0)]
    assert reason == "stop"


@pytest.mark.parametrize(
    ("text", "stop", "wanted"),
    [
        ("<think>a END b</think>c", "END", [("reasoning", "a ", 0)]),
        ("<think>a</think>b END c", "END", [("reasoning", "a", 0), ("content", "b ", 0)]),
        ("<think>a</think>b", "</think>", [("reasoning", "a", 0)]),
        (f"b{CALL}", "<tool_call>", [("content", "b", 0)]),
        (CALL, '"a"', [("call", "add", 0), ("arguments", "{", 0)]),
        (CALL, "add", [("content", '<tool_call>\n{"name": "', 0)]),
        # Only begun: what was held back is not lost.
        ("<think>a</think>b EN", "END", [("reasoning", "a", 0), ("content", "b EN", 0)]),
        ("<think>a EN", "END", [("reasoning", "a EN", 0)]),
    ],
)
def test_stop_strings_are_looked_for_in_all_text_before_it_is_told_into_pieces(
    tokenizer: Tokenizer, model: ServedModel, text: str, stop: str, wanted: Shown
) -> None:
    pieces, _, _ = answer(tokenizer, model, text, stop=(stop,), **CALLS)
    assert pieces == wanted


# ---- Tokens of reasoning -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "begun", "wanted"),
    [
        ("<think>a</think>b c d", False, 3),
        ("a</think>b", True, 2),
        ("</think>b", True, 1),
        ("b</think>c", False, 0),
        ("<think>a", False, 3),
        ("", True, 1),
        ("b", False, 0),
        ("<think>a</think><think>b</think>", False, 3),
    ],
)
def test_tokens_count_as_reasoning_up_to_the_mark_that_ends_it(
    tokenizer: Tokenizer, model: ServedModel, text: str, begun: bool, wanted: int
) -> None:
    assert answer(tokenizer, model, text, begun)[2] == wanted


def test_where_the_mark_is_several_tokens_those_count_up_to_the_one_it_was_read_with(
    tokenizer: Tokenizer, model: ServedModel
) -> None:
    other = with_conventions(model, reasoning=STYLES["granite"])
    said = "Here is my thought process: ab Here is my response: cd ef gh ij"
    for stop in ((), ("nothing",)):
        pieces, _, count = answer(tokenizer, other, said, stop=stop)
        assert pieces == [("reasoning", "ab", 0), ("content", "cd ef gh ij", 0)]
        assert count == len(encoded(tokenizer, said.removesuffix(" cd ef gh ij"))) - 1


def test_no_tokens_are_counted_where_no_style_is_in_force(
    tokenizer: Tokenizer, model: ServedModel
) -> None:
    assert answer(tokenizer, with_conventions(model, reasoning=None), CALL, **CALLS)[2] is None


# ---- Taken up again ----------------------------------------------------------------------------


class _Listed(Deltas):
    """Deltas that are there already."""

    def __init__(self, deltas: Sequence[Delta]) -> None:
        self._left = list(deltas)

    @property
    def ended(self) -> bool:
        return not self._left

    def take(self) -> Delta | None:
        return self._left.pop(0) if self._left else None

    def listen(self, on_output: Callable[[], None]) -> None:
        """There is nothing to wait for."""


async def rest_of(deltas: Sequence[Delta], *delivered: ChoiceProgress) -> list[Delta]:
    """Return the deltas that were not delivered. Check the usage against them."""
    usage = Usage(0, sum(known.tokens for known in delivered))
    usage.completion_tokens += sum(len(delta.token_ids) for delta in deltas)
    rest = skip_delivered(_Listed(deltas), ResumePoint(delivered), usage)
    left = [delta async for delta in rest]
    known = sum(known.tokens for known in delivered)
    assert usage.completion_tokens == known + sum(len(delta.token_ids) for delta in left)
    return left


@pytest.mark.parametrize("options", [{}, {"include_reasoning": False}, {"stop": ("nothing",)}])
async def test_an_answer_that_is_taken_up_again_goes_on_where_it_was(
    tokenizer: Tokenizer, model: ServedModel, options: dict[str, Any]
) -> None:
    rng = seeded("taken up again")
    text = f"<think>\nSum 日 it.\n</think>\n\nLet me\n see.{CALL}\n{CALL} done"
    ids = encoded(tokenizer, text)
    complete = whole(deltas_of(choice_of(model, **CALLS, **options), ids, 1000))
    for _ in range(budget(60, 3000)):
        first = deltas_of(choice_of(model, **CALLS, **options), ids, rng.randrange(1, 6))
        cut = rng.randrange(len(first))
        progress = ClientProgress(BEGINNING, 1)
        for delta in first[:cut]:
            progress.add(delta)
        [delivered] = [ChoiceProgress(*choice) for choice in progress.choices]
        again = deltas_of(choice_of(model, **CALLS, **options), ids, rng.randrange(1, 9))
        rest = await rest_of(again, delivered)
        assert list(rest[0].known_token_ids) == ids[: delivered.tokens]
        total = whole([*first[:cut], *rest])
        assert shown(total) == shown(complete), (cut, delivered)
        assert total.token_ids == ids
        assert total.finish_reason == "tool_calls"


async def test_the_name_of_a_call_is_never_shown_in_part(
    tokenizer: Tokenizer, model: ServedModel
) -> None:
    ids = encoded(tokenizer, CALL)
    for characters in (1, 2):
        rest = await rest_of(
            deltas_of(choice_of(model, **CALLS), ids), ChoiceProgress(1, characters)
        )
        assert shown(whole(rest))[0] == ("call", "add", 0)


# ---- Of a whole request ------------------------------------------------------------------------

TEMPLATE = "{% if tools %}<tool_call>{% endif %}{{ messages[0].content }}{# </think> #}"
FUNCTION = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
SAID = f"<think>\nHm.\n</think>\n\nSo:\n{CALL}"


@pytest.fixture
async def served(tokenizer: Tokenizer) -> AsyncIterator[MemoryRouter]:
    files = model_files(tokenizer, TEMPLATE)
    fleet = FakeFleet(files, lambda request: encoded(tokenizer, SAID))
    async with memory_router(fleet) as router:
        yield router


async def test_an_answer_has_reasoning_calls_and_what_they_took(
    served: MemoryRouter, tokenizer: Tokenizer
) -> None:
    answer = await served.chat("1 + 1?", tools=[FUNCTION], n=2, max_tokens=100)
    for choice in answer.json()["choices"]:
        message = choice["message"]
        assert message["reasoning_content"] == message["reasoning"] == "Hm."
        assert message["content"] == "So:"
        [call] = message["tool_calls"]
        assert call["function"] == {"name": "add", "arguments": '{"a": 1}'}
        assert choice["finish_reason"] == "tool_calls"
    usage = answer.json()["usage"]
    num_reasoning = encoded(tokenizer, SAID).index(id_of(tokenizer, "</think>")) + 1
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 2 * num_reasoning}
    assert served.fleet.requests[0].constraint is None


async def test_a_stream_with_reasoning_and_calls_is_taken_up_where_it_was(
    served: MemoryRouter,
) -> None:
    body = {
        "messages": [{"role": "user", "content": "1 + 1?"}],
        "tools": [FUNCTION],
        "max_tokens": 100,
        "stream": True,
    }
    flag = {"x-penstock-resumable": "1"}
    whole = await served.post("/v1/chat/completions", body, **flag)
    frames = _frames(whole.body)
    said = _said([event for _, event in frames])
    assert said == ("Hm.", "So:", [("add", '{"a": 1}')])
    cursors = [number for number, (last_id, _) in enumerate(frames) if last_id]
    for number in cursors:
        served.app[ROUTER].live_streams.stop()
        again = await served.post(
            "/v1/chat/completions", body, **flag, **{"Last-Event-ID": frames[number][0]}
        )
        both = [*frames[: number + 1], *_frames(again.body)]
        assert _said([event for _, event in both]) == said, number
    assert len(cursors) > 10


async def test_what_an_answer_took_is_the_same_wherever_it_is_taken_up(
    tokenizer: Tokenizer,
) -> None:
    """Whichever choices were finished before, and whatever is cached by then."""
    seeds: list[int | None] = []

    def said(request: GenerationRequest) -> list[int]:
        if request.sampling.seed not in seeds:
            seeds.append(request.sampling.seed)
        longer = "Well. " * (3 * seeds.index(request.sampling.seed))
        return encoded(tokenizer, f"<think>\nHm.\n</think>\n\n{longer}")

    body = {
        "messages": [{"role": "user", "content": "1 + 1?"}],
        "n": 3,
        "max_tokens": 100,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    flag = {"x-penstock-resumable": "1"}
    async with memory_router(CachingFleet(model_files(tokenizer, TEMPLATE), said)) as router:
        frames = _frames((await router.post("/v1/chat/completions", body, **flag)).body)
        usage = frames[-1][1]["usage"]
        assert usage["completion_tokens_details"]["reasoning_tokens"] > 0
        assert usage["prompt_tokens_details"] == {"cached_tokens": 0}
        for last_id in [last_id for last_id, _ in frames if last_id]:
            router.app[ROUTER].live_streams.stop()
            again = await router.post(
                "/v1/chat/completions", body, **flag, **{"Last-Event-ID": last_id}
            )
            assert _frames(again.body)[-1][1]["usage"] == usage


def _frames(body: bytes) -> list[tuple[str, Any]]:
    """The id and the data of each event but the last."""
    frames = []
    for frame in body.decode().removesuffix("\n\n").split("\n\n"):
        head, _, data = frame.rpartition("data: ")
        if data != "[DONE]":
            frames.append((head.removeprefix("id: ").strip(), json.loads(data)))
    return frames


def _said(events: Sequence[Any]) -> tuple[str, str, list[tuple[str, str]]]:
    """Reasoning, content and calls of a stream."""
    reasoning = content = ""
    calls: dict[int, tuple[str, str]] = {}
    for event in events:
        for choice in event["choices"]:
            delta = choice["delta"]
            assert delta.get("reasoning") == delta.get("reasoning_content")
            reasoning += delta.get("reasoning_content") or ""
            content += delta.get("content") or ""
            for call in delta.get("tool_calls") or ():
                name, arguments = calls.get(call["index"], ("", ""))
                function = call["function"]
                name += function.get("name") or ""
                calls[call["index"]] = name, arguments + (function.get("arguments") or "")
    return reasoning, content, list(calls.values())
