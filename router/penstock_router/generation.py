"""The story of a request: the file to read first.

    request = api.parse(body)                        # fields, types, bounds: `apis/`
    job = await prepare(request, models)             # template, tokens, lengths, seeds: `job.py`
    async with Generation(job, fleet, metrics) as generation:
        async for delta in generation: ...           # what a choice has gained, as it comes

A job has one `GenerationRequest` for each choice of each prompt. Entering a `Generation` submits
them to the fleet; shards send token ids; each `Choice` makes text of its own and ends itself at a
stop string; whoever shows the answer gets deltas. Leaving the scope, for whatever reason, aborts
what is unfinished. Knows no HTTP and no answer shapes.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from penstock_client.errors import ShardFailed
from penstock_client.types import GenerationRequest, Output
from penstock_router.backend import Fleet
from penstock_router.choice import Choice, Delta
from penstock_router.errors import BadRequest, SlowReader, TimedOut, Unavailable
from penstock_router.job import Job
from penstock_router.metrics import Metrics
from penstock_router.request import Options

# A submission copies its prompt's ids (about 10 ns each) and costs some 20 us besides. After about
# half a millisecond of it the event loop gets a turn.
_TOKENS_A_TURN = 50_000
_SUBMISSION_TOKENS = 2_000


@dataclass(slots=True)
class Usage:
    """Tokens of a whole request. A prompt counts once, however many choices it has."""

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int | None = None
    # From arrival at a shard to the first step there: the longest of all sequences.
    queue_s: float | None = None
    # A sequence went on at a shard whose tokens may come out otherwise at a near-tie.
    approximate: bool = False


class Generation:
    """A job in flight: iterate for deltas. Leaving the scope aborts what is unfinished."""

    def __init__(self, job: Job, fleet: Fleet, metrics: Metrics) -> None:
        self.job = job
        self.usage = Usage(
            prompt_tokens=sum(len(prompt.token_ids) for prompt in job.prompts),
            completion_tokens=sum(delivered.tokens for delivered in job.delivered),
        )
        self._fleet = fleet
        self._metrics = metrics
        self._choices: list[Choice] = []
        self._unfinished = 0
        self._submitted_at_s = 0.0
        self._arrivals: _Arrivals | None = None

    async def __aenter__(self) -> Self:
        self._submitted_at_s = time.perf_counter()
        try:
            await self._submit()
        except BaseException as error:
            # No scope was entered yet, so none would be left.
            self.abandon(error)
            raise
        self._metrics.prompt_tokens.inc(self.usage.prompt_tokens)
        if len(self._choices) > 1:
            self._arrivals = _Arrivals(self._choices)
        return self

    async def _submit(self) -> None:
        since_turn = 0
        for index, request in enumerate(self.job.requests):
            # Made before it is submitted: nothing can fail between a submission and its choice.
            choice = Choice(self.job, index)
            if self.job.delivered_of(index).finished:
                choice.finished = True
                self._choices.append(choice)
                continue
            choice.stream = self._fleet.submit(request)
            self._choices.append(choice)
            self._unfinished += 1
            self._metrics.in_flight.inc()
            since_turn += _SUBMISSION_TOKENS + _num_ids(request)
            if since_turn >= _TOKENS_A_TURN:
                since_turn = 0
                await asyncio.sleep(0)

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._abandon(_abort_cause(exc))
        if self._arrivals is not None:
            await self._arrivals.close()

    def abandon(self, error: BaseException | None) -> None:
        """Abort what is unfinished; `error` says why. Whoever swallows an error says it here."""
        self._abandon(_abort_cause(error))

    def _abandon(self, cause: str) -> None:
        # Nothing in here waits: a handler that is being cancelled gets all of it done.
        for choice in self._choices:
            if not choice.finished:
                choice.finished = True
                self._end(choice, cause)

    def _end(self, choice: Choice, abort_cause: str | None) -> None:
        self._metrics.in_flight.dec()
        self._metrics.write_out(time.perf_counter())
        self._unfinished -= 1
        # A stream that the shard refused or ended has nothing to abort.
        if abort_cause is not None and not choice.stream.ended:
            choice.stream.cancel()
            self._metrics.aborts.labels(abort_cause).inc()

    @property
    def numerics(self) -> str:
        """The fingerprint that all tokens so far come from; "" where there is none, or several."""
        found = {self.job.options.numerics} - {""}
        for choice in self._choices:
            if not self.job.delivered_of(choice.index).finished:
                found.update(choice.stream.fingerprints)
        return found.pop() if len(found) == 1 else ""

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        """The next thing worth showing, of whichever choice has it."""
        while self._unfinished:
            if self._arrivals is None:
                choice = self._choices[0]
                output = await _next_output(choice)
            else:
                choice, output = await self._arrivals.next()
            if choice.finished:
                continue
            self._observe(choice, output)
            delta = choice.take(output)
            if output.cached_tokens is not None:
                self._count_cached()
            if output.queue_s is not None:
                self.usage.queue_s = max(output.queue_s, self.usage.queue_s or 0.0)
            if delta is not None:
                self._account(choice, delta, output)
                return delta
        raise StopAsyncIteration

    def _count_cached(self) -> None:
        # Of each prompt's first choice; the others find what that one left.
        firsts = self._choices[:: self.job.choices_per_prompt]
        known = [choice.cached_tokens for choice in firsts if choice.cached_tokens is not None]
        self.usage.cached_tokens = sum(known) if known else None

    def _account(self, choice: Choice, delta: Delta, output: Output) -> None:
        self.usage.completion_tokens += len(delta.token_ids)
        if delta.finish_reason is not None:
            self.usage.approximate = self.usage.approximate or choice.stream.approximate
            self._end(choice, None if output.finish_reason is not None else "stop_string")

    def _observe(self, choice: Choice, output: Output) -> None:
        count = len(output.token_ids)
        if not count:
            return
        now = time.perf_counter()
        if choice.last_arrival_s is None:
            self._metrics.output_tokens.inc(count)
            self._metrics.first_token_seconds.observe(now - self._submitted_at_s)
        else:
            # Once an arrival, however many tokens it bundles: a loop over them would cost most
            # where there is least time.
            self._metrics.came(count, (now - choice.last_arrival_s) / count, now)
        choice.last_arrival_s = now


def _num_ids(request: GenerationRequest) -> int:
    """All that a submission copies."""
    sampling = request.sampling
    num_ids = len(request.prompt_token_ids) + len(sampling.allowed_token_ids)
    num_ids += len(request.stop_token_ids) + len(request.logprob_token_ids)
    # An entry of these costs as much as several ids.
    return num_ids + 10 * len(sampling.logit_bias) + sum(map(len, sampling.bad_words))


async def _next_output(choice: Choice) -> Output:
    try:
        return await anext(choice.stream)
    except StopAsyncIteration:
        raise ShardFailed("the shard ended the request without saying why") from None


def _abort_cause(error: BaseException | None) -> str:
    if error is None or isinstance(error, GeneratorExit):
        return "abandoned"
    if isinstance(error, SlowReader):
        return "slow_reader"
    if isinstance(error, asyncio.CancelledError | ConnectionError):
        return "disconnect"
    if isinstance(error, TimedOut):
        return "timeout"
    # Within a generation no other `Unavailable` arises; shards' troubles are the client's errors.
    return "shutdown" if isinstance(error, Unavailable) else "error"


class _Arrivals:
    """Outputs of several choices in the order of their arrival.

    A task reads each stream; what nobody has taken yet is merged, choice by choice, so that a slow
    reader costs no more than its own tokens.
    """

    def __init__(self, choices: Sequence[Choice]) -> None:
        self._waiting: dict[int, Output] = {}
        self._order: deque[Choice] = deque()
        self._error: Exception | None = None
        self._news = asyncio.Event()
        self._tasks = [asyncio.create_task(self._read(choice)) for choice in choices]

    async def _read(self, choice: Choice) -> None:
        try:
            while not choice.finished:
                output = await _next_output(choice)
                self._put(choice, output)
                if output.finish_reason is not None:
                    return
        except Exception as error:  # noqa: BLE001 - whatever it is, the reader of `next` gets it
            if not choice.finished and self._error is None:
                self._error = error
                self._news.set()

    def _put(self, choice: Choice, output: Output) -> None:
        earlier = self._waiting.get(choice.index)
        if earlier is None:
            self._waiting[choice.index] = output
            self._order.append(choice)
        else:
            earlier.merge(output)
        self._news.set()

    async def next(self) -> tuple[Choice, Output]:
        while not self._order:
            if self._error is not None:
                raise self._error
            self._news.clear()
            await self._news.wait()
        choice = self._order.popleft()
        return choice, self._waiting.pop(choice.index)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


# ---- Fewer and larger deltas -------------------------------------------------------------------


def spaced(generation: Generation) -> AsyncIterator[Delta]:
    """Deltas of `stream_interval` tokens at least; of each choice the first comes at once, and the
    last is whatever is left."""
    interval = generation.job.options.stream_interval
    return generation if interval == 1 else _Spaced(generation, interval)


class _Spaced:
    def __init__(self, generation: Generation, interval: int) -> None:
        self._generation = generation
        self._interval = interval
        # By choice, once it has begun: what is held back.
        self._held: dict[int, Delta | None] = {}

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        while True:
            delta = await anext(self._generation)
            begins = delta.index not in self._held
            held = self._held.get(delta.index)
            if held is not None:
                held.extend(delta)
                delta = held
            is_enough = len(delta.token_ids) >= self._interval
            if begins or is_enough or delta.finish_reason is not None:
                self._held[delta.index] = None
                return delta
            self._held[delta.index] = delta


# ---- Everything at once ------------------------------------------------------------------------


# What a log-probability takes in an answer, with its token's text.
LOGPROB_BYTES = 64


async def bounded(
    deltas: AsyncIterator[Delta], options: Options, max_bytes: int
) -> AsyncIterator[Delta]:
    """A generation's deltas, for whoever keeps them all.

    Raises `BadRequest` once their log-probabilities take more than `max_bytes`.
    """
    num_bytes = 0
    if options.logprobs is not None:
        columns = 1 + options.logprobs + len(options.logprob_token_ids)
        token_bytes = LOGPROB_BYTES * columns
    else:
        token_bytes = 0
    async for delta in deltas:
        num_bytes += token_bytes * len(delta.token_ids)
        if num_bytes > max_bytes:
            raise BadRequest(
                f"logprobs: those of this answer are more than {max_bytes} bytes by now; stream "
                "it, or ask for fewer of them or of tokens",
                param="logprobs",
            )
        yield delta


async def collect(generation: Generation, max_bytes: int) -> list[Delta]:
    """All of a generation: one delta for each choice of the answer, in the answer's order.

    Raises as `bounded`.
    """
    whole: dict[int, Delta] = {}
    async for delta in bounded(generation, generation.job.options, max_bytes):
        if delta.index in whole:
            whole[delta.index].extend(delta)
        else:
            whole[delta.index] = delta
    return _best(generation.job, [whole[index] for index in sorted(whole)])


def _best(job: Job, deltas: list[Delta]) -> list[Delta]:
    """The n most likely of each prompt's choices, by log-probability a token."""
    n, candidates = job.options.n, job.choices_per_prompt
    if n == candidates:
        return deltas
    best: list[Delta] = []
    for start in range(0, len(deltas), candidates):
        ranked = sorted(deltas[start : start + candidates], key=mean_logprob, reverse=True)
        best += ranked[:n]
    for index, delta in enumerate(best):
        delta.index = index
        if job.options.logprobs is None:
            delta.logprobs = None
    return best


def mean_logprob(delta: Delta) -> float:
    """By which the best of several is told."""
    values = delta.logprobs.chosen if delta.logprobs is not None else []
    return sum(values) / len(values) if values else 0.0
