"""The reader's side of one sequence: merging, duplicates, gaps, ends."""

from __future__ import annotations

import asyncio

import pytest
from support.scores import logprobs_of

from penstock_client import (
    FinishReason,
    GenerationStream,
    Output,
    ShardFailed,
)
from penstock_client import ShardUnavailable as Unavailable
from penstock_client.rpc import generation_stream
from penstock_proto.errors import RequestRefused


def _stream(next_position: int = 0) -> tuple[GenerationStream, list[str]]:
    cancelled: list[str] = []
    stream = GenerationStream("r", 0, next_position, lambda s: cancelled.append(s.request_id))
    return stream, cancelled


def _finished(token_ids: list[int], position: int) -> Output:
    return Output(token_ids, position, finish_reason=FinishReason.STOP)


async def test_what_arrives_while_the_reader_is_away_is_merged() -> None:
    stream, _ = _stream()
    stream.feed(Output([1], 0, cached_tokens=5))
    stream.feed(Output([2, 3], 1))
    stream.feed(_finished([4], 3))
    outputs = [output async for output in stream]
    assert [(o.token_ids, o.first_position, o.cached_tokens) for o in outputs] == [
        ([1, 2, 3, 4], 0, 5)
    ]
    assert outputs[0].finish_reason is FinishReason.STOP


async def test_a_waiting_reader_is_woken_for_each_output() -> None:
    stream, _ = _stream()
    reader = asyncio.create_task(anext(stream))
    await asyncio.sleep(0)
    stream.feed(Output([1], 0))
    assert (await reader).token_ids == [1]


async def test_known_tokens_are_dropped_with_their_logprobs() -> None:
    stream, _ = _stream(next_position=2)
    logprobs = logprobs_of([-1.0, -2.0, -3.0], [1, 1, 1], 1, [(7, -1.0), (8, -2.0), (9, -3.0)])
    stream.feed(Output([7, 8, 9], 0, logprobs=logprobs))
    output = await anext(stream)
    assert (output.token_ids, output.first_position) == ([9], 2)
    assert output.logprobs == logprobs_of([-3.0], [1], 1, [(9, -3.0)])


async def test_scores_of_a_prompt_that_come_again_leave_positions_as_they_are() -> None:
    stream, _ = _stream()
    rows = [logprobs_of([-1.0, -2.0], [1, 1]), logprobs_of([-1.0, -2.0], [1, 1])]
    stream.feed(Output([7], 0, prompt_logprobs=rows[0]))
    assert (await anext(stream)).token_ids == [7]
    stream.feed(Output([], 0, prompt_logprobs=rows[1]))
    stream.feed(Output([8], 1))
    output = await anext(stream)
    assert (output.token_ids, output.first_position) == ([8], 1)
    assert output.prompt_logprobs is None


async def test_a_gap_is_an_error_and_ends_the_request_in_the_shard() -> None:
    stream, cancelled = _stream()
    stream.feed(Output([1], 0))
    stream.feed(Output([3], 2))
    assert (await anext(stream)).token_ids == [1]
    with pytest.raises(ShardFailed, match="from position 2 arrived, 1 was next"):
        await anext(stream)
    assert cancelled == ["r"]


async def test_an_error_comes_after_what_is_still_to_be_read() -> None:
    stream, _ = _stream()
    stream.feed(Output([1], 0))
    stream.fail(Unavailable("gone"))
    assert (await anext(stream)).token_ids == [1]
    with pytest.raises(Unavailable, match="gone"):
        await anext(stream)


async def test_cancel_wakes_the_reader_and_is_told_once() -> None:
    stream, cancelled = _stream()
    reader = asyncio.create_task(anext(stream, None))
    await asyncio.sleep(0)
    stream.cancel()
    stream.cancel()
    assert await reader is None
    assert cancelled == ["r"]


async def test_leaving_the_context_cancels_only_what_is_unfinished() -> None:
    unfinished, cancelled = _stream()
    async with unfinished:
        pass
    assert cancelled == ["r"]
    finished, cancelled = _stream()
    async with finished:
        finished.feed(_finished([1], 0))
    assert cancelled == []


async def test_nothing_is_taken_after_the_end() -> None:
    stream, _ = _stream()
    stream.feed(_finished([1], 0))
    stream.feed(Output([2], 1))
    stream.fail(Unavailable("late"))
    assert [output.token_ids async for output in stream] == [[1]]


async def test_a_cancelled_reader_loses_nothing() -> None:
    stream, _ = _stream()
    reader = asyncio.create_task(anext(stream))
    await asyncio.sleep(0)
    stream.feed(Output([1], 0))
    reader.cancel()
    await asyncio.gather(reader, return_exceptions=True)
    stream.feed(_finished([2], 1))
    assert [output.token_ids async for output in stream] == [[1, 2]]


async def test_a_stream_begins_with_nothing_and_counts_what_it_was_given() -> None:
    stream, _ = _stream(next_position=2)
    assert (stream.attempt, stream.approximate, stream.ended) == (0, False, False)
    assert (stream.fingerprints, stream.attempts, stream.take()) == ([], [], None)
    assert (stream.num_tokens, stream.progress) == (2, 3)
    stream.feed(Output([7], 2))
    assert (stream.num_tokens, stream.progress) == (3, 4)


async def test_a_listener_is_called_when_there_are_enough_tokens_and_at_the_end() -> None:
    stream, _ = _stream()
    heard: list[list[int]] = []

    def hear() -> None:
        output = stream.take()
        heard.append([] if output is None else output.token_ids)

    stream.listen(hear, min_tokens=2)
    stream.feed(Output([1], 0))
    assert heard == []
    stream.feed(Output([2], 1))
    stream.listen(hear)
    stream.feed(Output([3], 2))
    stream.feed(_finished([], 3))
    assert heard == [[1, 2], [3], []]


async def test_a_reader_is_woken_for_what_has_no_tokens() -> None:
    stream, _ = _stream()
    reader = asyncio.create_task(anext(stream))
    await asyncio.sleep(0)
    row = logprobs_of([-1.0], [1])
    stream.feed(Output([], 0, prompt_logprobs=row, prompt_logprobs_start=1))
    async with asyncio.timeout(30):
        assert (await reader).prompt_logprobs == logprobs_of([-1.0], [1])


@pytest.mark.parametrize(
    ("known", "expected"), [(0, [7, 8, 9]), (1, [8, 9]), (2, [9]), (3, []), (4, [])]
)
async def test_an_output_is_shown_from_the_first_token_that_is_news(
    known: int, expected: list[int]
) -> None:
    stream, _ = _stream(next_position=10 + known)
    stream.feed(Output([7, 8, 9], 10))
    output = await anext(stream)
    assert output.token_ids == expected
    assert output.first_position == 10 + known
    stream.feed(Output([1], 13))
    assert (await anext(stream)).token_ids == ([1] if known < 4 else [])


async def test_scores_of_the_prompt_are_shown_once_whatever_tokens_come_with_them() -> None:
    stream, _ = _stream(next_position=1)
    first, again = logprobs_of([-1.0, -2.0], [1, 2]), logprobs_of([-1.0, -2.0, -3.0], [1, 2, 3])
    stream.feed(Output([], 1, prompt_logprobs=first, prompt_logprobs_start=1))
    assert (await anext(stream)).prompt_logprobs_start == 1
    # Another attempt: all of them again, and a token that is known.
    stream.feed(Output([5, 6], 0, prompt_logprobs=again, prompt_logprobs_start=1))
    output = await anext(stream)
    assert (output.token_ids, output.prompt_logprobs_start) == ([6], 3)
    assert output.prompt_logprobs == logprobs_of([-3.0], [3])
    stream.feed(Output([7], 2, prompt_logprobs=logprobs_of([-3.0], [3]), prompt_logprobs_start=3))
    assert (await anext(stream)).prompt_logprobs is None


async def test_a_gap_in_the_scores_of_the_prompt_is_told() -> None:
    stream, cancelled = _stream()
    row = logprobs_of([-1.0], [1])
    stream.feed(Output([], 0, prompt_logprobs=row, prompt_logprobs_start=2))
    with pytest.raises(ShardFailed, match="from index 2 arrived, 1 was next"):
        await anext(stream)
    assert cancelled == ["r"]


async def test_a_gap_is_told_once_and_is_the_end() -> None:
    stream, _ = _stream()
    told: list[bool] = []
    stream.listen(lambda: told.append(stream.ended))
    stream.feed(Output([1], 3))
    assert told == [True]


async def test_the_first_error_ends_a_stream_and_is_the_one_that_counts() -> None:
    stream, _ = _stream()
    told: list[bool] = []
    stream.listen(lambda: told.append(stream.ended))
    for text in ("first", "second"):
        stream.fail(Unavailable(text))
    assert told == [True]
    with pytest.raises(Unavailable, match="first"):
        await anext(stream)


async def test_a_reader_that_leaves_too_many_scores_gets_what_there_is_and_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(generation_stream, "MAX_UNREAD_SCORES_BYTES", 80)
    stream, cancelled = _stream()

    def scored(position: int) -> Output:
        row = logprobs_of([-1.0], [1], 4, [(1, -1.0), (2, -2.0), (3, -3.0), (4, -4.0)])
        return Output([7], position, logprobs=row)

    stream.feed(scored(0))
    assert (await anext(stream)).token_ids == [7]
    for position in range(1, 4):
        stream.feed(scored(position))
    assert cancelled == ["r"]
    assert (await anext(stream)).token_ids == [7, 7]
    with pytest.raises(RequestRefused, match="80 bytes") as ended:
        await anext(stream)
    assert ended.value.field == "logprobs"


async def test_a_reader_may_take_so_many_tokens_at_a_time() -> None:
    stream, _ = _stream()
    for position in range(5):
        row = logprobs_of([-float(position)], [1], 2, [(position, -1.0), (9, -2.0)])
        output = Output([position], position, logprobs=row, prompt_logprobs=None)
        output.cached_tokens = 3 if position == 0 else None
        stream.feed(output)
    stream.feed(_finished([], 5))
    taken = []
    while stream.has_more:
        part = stream.take(2)
        assert part is not None
        assert part.logprobs is not None
        ids = part.logprobs.top_token_ids[::2]
        assert list(ids) == part.token_ids
        taken.append((part.first_position, part.token_ids, part.cached_tokens))
        last = part.finish_reason
    assert taken == [(0, [0, 1], 3), (2, [2, 3], None), (4, [4], None)]
    assert last is FinishReason.STOP
