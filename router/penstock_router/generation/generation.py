"""The story of a request: the file to read first.

    request = api.parse(body)                        # fields, types, bounds: `apis/`
    prepared = prepare_prompts(request, model)       # template, tokens: `text/prompts.py`
    job = await make_job(request, model, prepared, seed)  # lengths, seeds, choices: `job.py`
    async with Generation(job, fleet, metrics, record) as generation:
        await for_each(generation, use)              # what a choice has gained, as it comes

A job has one `GenerationRequest` for each choice of each prompt. Entering a `Generation` submits
them to the fleet; shards send token ids; each `Choice` turns its ids into text and ends itself at a
stop string; the code that writes the answer gets deltas. Leaving the scope, for whatever reason,
aborts unfinished choices.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import math
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Self

from penstock_client import Fleet
from penstock_proto.errors import Overloaded, RequestRefused, ShardFailed
from penstock_proto.types import ConstraintKind, GenerationRequest, Output, Retain
from penstock_router.errors import (
    BadRequest,
    SlowClient,
    TimedOut,
    TooManyRequests,
    Unavailable,
    UnknownModel,
    as_api_error,
    unavailable_model,
)
from penstock_router.generation.choice import Choice, Delta
from penstock_router.generation.client_progress import BEGINNING, ResumePoint
from penstock_router.generation.deltas import Deltas, ignore_output
from penstock_router.generation.job import Job
from penstock_router.generation.tool_pauses import Session, ToolPauses
from penstock_router.observe.metrics import Metrics
from penstock_router.observe.request_record import RequestRecord, Usage, outcome_of
from penstock_router.request import MAX_TIMEOUT_S

# A submission copies its prompt's ids (about 10 ns each) and costs some 20 us besides, as much as
# copying 2,000 ids. After about half a millisecond of submitting the event loop gets a turn.
_TOKENS_A_TURN = 50_000
_SUBMISSION_TOKENS = 2_000
# The router ends a request at its deadline; shards do so a little later, in case it has died.
_SHARDS_WAIT_S = 0.1
# How often each choice is checked for progress within `silence_timeout_s`.
_LOOKS = 4
_CONSTRAINTS = frozenset(ConstraintKind)


class Generation(Deltas):
    """A job in flight and its deltas. Leaving the scope aborts unfinished choices."""

    def __init__(
        self,
        job: Job,
        fleet: Fleet,
        metrics: Metrics,
        record: RequestRecord,
        *,
        point: ResumePoint = BEGINNING,
        ends_at_s: float | None = None,
        silence_timeout_s: float = math.inf,
        pauses: ToolPauses | None = None,
    ) -> None:
        """`record` receives usage, attempts and outcome. What was delivered up to `point` counts in
        the usage, and is made again except for choices that are finished. Shards are told to end at
        `ends_at_s`, on the event loop's clock. When nothing arrives for a choice for
        `silence_timeout_s`, the generation fails with `TimedOut`. `pauses` say for how long answers
        that call tools are retained; without, none are.
        """
        self.job = job
        self.point = point
        self.usage = Usage(
            prompt_tokens=sum(len(prompt.token_ids) for prompt in job.prompts),
            completion_tokens=sum(known.tokens for known in point.choices),
        )
        for known in point.choices:
            # None of those that are unfinished: their tokens come again.
            if known.reasoning_tokens is not None:
                self._count_reasoning(known.reasoning_tokens)
        self._counts = [
            (known.cached_tokens, known.reasoning_tokens)
            for known in map(point.of, range(len(job.requests)))
        ]
        self._record = record
        record.usage = self.usage
        self._fleet = fleet
        self._metrics = metrics
        self._model = job.model.info.model
        self._meter = metrics.tokens_of(self._model)
        self._choices: list[Choice] = []
        self._unfinished = 0
        self._ends_at_s = ends_at_s
        self._silence_timeout_s = silence_timeout_s
        self._pauses = pauses
        self._next_look: asyncio.TimerHandle | None = None
        self._failure: TimedOut | None = None
        # Choices with outputs that were not taken yet, in the order of arrival.
        self._with_output: deque[Choice] = deque()
        self._on_output: Callable[[], None] = ignore_output

    async def __aenter__(self) -> Self:
        try:
            await self._submit()
        except BaseException as error:  # `__aexit__` does not run when `__aenter__` raises
            self.abandon(error)
            raise
        if self._pauses is not None and self.point is BEGINNING:
            tokens, arrived_s = self.usage.prompt_tokens, self._record.arrived_s
            self._pauses.on_request(self._session, tokens, arrived_s)
        self._count_cached()
        self._metrics.prompt_tokens.labels(self._model).inc(self.usage.prompt_tokens)
        if self._silence_timeout_s < math.inf:
            self._look_again()
        return self

    async def _submit(self) -> None:
        since_turn = 0
        for index, request in enumerate(self.job.requests):
            # Made before submitting: nothing that can fail may come between submitting a request
            # and having the choice that can abort it.
            choice = Choice(self.job, index)
            known = self.point.of(index)
            choice.cached_tokens = known.cached_tokens
            if known.finished:
                choice.finished = True
                self._choices.append(choice)
                continue
            try:
                choice.stream = self._fleet.submit(
                    self._complete(request), self.job.pixels, deadline_s=self._deadline_s()
                )
            except RequestRefused as error:
                raise self._refused(error) from None
            self._record.follow(choice.stream.attempts)
            # Notified of the first token at once, for the time to first token. `_observe` then
            # asks for `tokens_at_once`.
            choice.stream.listen(functools.partial(self._came, choice))
            self._choices.append(choice)
            self._unfinished += 1
            self._metrics.in_flight.inc()
            since_turn += _SUBMISSION_TOKENS + _num_ids(request)
            if since_turn >= _TOKENS_A_TURN:
                since_turn = 0
                await asyncio.sleep(0)

    def _complete(self, request: GenerationRequest) -> GenerationRequest:
        """Return the request, with the numerics of a resumed answer."""
        if not self.point.numerics:
            return request
        return dataclasses.replace(request, numerics=self.point.numerics)

    def _deadline_s(self) -> float | None:
        """Return the seconds that a shard has for a request which is submitted now."""
        if self._ends_at_s is None:
            return None
        left_s = max(self._ends_at_s - asyncio.get_running_loop().time(), 0.0)
        return min(left_s + _SHARDS_WAIT_S, MAX_TIMEOUT_S)

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.abandon(exc)

    def abandon(self, error: BaseException | None) -> None:
        """Abort unfinished choices because of `error`. A caller that swallows an error inside the
        scope calls this first, since `__aexit__` will not see that error.
        """
        # No await in here: a handler that is being cancelled still completes all of it.
        if self._next_look is not None:
            self._next_look.cancel()
        # Break the reference cycle: otherwise prompts stay in memory until the garbage collector
        # runs over all of the process's objects.
        self._on_output = ignore_output
        cause = _abort_cause(error)
        if self._unfinished and cause == "error" and isinstance(error, Exception):
            # Not every error counts as a failure: a shard may have refused the request.
            outcome = outcome_of(as_api_error(error).status)
            self._record.record_outcome(outcome, type(error).__name__)
        elif self._unfinished:
            self._record.record_outcome(cause)
        self._abort(cause)

    def put_down(self) -> None:
        """Abort unfinished choices, as the rest of them is to be made later."""
        self._abort("put_down")

    def _abort(self, cause: str) -> None:
        for choice in self._choices:
            if not choice.finished:
                choice.finished = True
                self._end(choice, cause)

    def _end(self, choice: Choice, abort_cause: str | None) -> None:
        self._metrics.in_flight.dec()
        self._meter.write_out(time.perf_counter())
        self._unfinished -= 1
        self._record.made_tokens += choice.stream.num_tokens
        choice.stream.listen(ignore_output)
        # A stream that the shard refused or ended has nothing to abort.
        if abort_cause is not None and not choice.stream.ended:
            self._count_cut(choice, abort_cause)
            choice.stream.cancel()

    def _count_cut(self, choice: Choice, cause: str) -> None:
        untaken = choice.stream.take()
        if untaken is not None:
            choice.num_tokens += len(untaken.token_ids)
            self._meter.add(len(untaken.token_ids))
        self._metrics.aborts.labels(cause).inc()
        if cause != "stop_string":
            self._metrics.wasted_tokens.labels(cause).inc(choice.num_tokens)

    # ---- silence ----

    def _look_again(self) -> None:
        delay_s = self._silence_timeout_s / _LOOKS
        self._next_look = asyncio.get_running_loop().call_later(delay_s, self._look)

    def _look(self) -> None:
        """Check each choice for progress. Resetting a timer at each arrival instead would cost
        something with every token.
        """
        for choice in self._choices:
            if not choice.finished and choice.is_silent_for(_LOOKS):
                self._failure = TimedOut(
                    f"nothing came from the shard for {self._silence_timeout_s:g} s"
                )
                self._on_output()
                return
        self._look_again()

    @property
    def numerics(self) -> str:
        """The numerics fingerprint of the shards that made all tokens so far; "" where there is
        none, or several differ.
        """
        found = {self.point.numerics} - {""}
        for choice in self._choices:
            if not self.point.of(choice.index).finished:
                found.update(choice.stream.fingerprints)
        return found.pop() if len(found) == 1 else ""

    @property
    def counts(self) -> tuple[tuple[int | None, int | None], ...]:
        """Count for each choice: cached tokens and, once it is finished, tokens of reasoning."""
        return tuple(self._counts)

    @property
    def ended(self) -> bool:
        return not self._unfinished

    def listen(self, on_output: Callable[[], None]) -> None:
        self._on_output = on_output

    def _came(self, choice: Choice) -> None:
        """The choice's stream has an output or its end. It merges outputs until they are taken."""
        if not (choice.has_output or choice.finished):
            choice.has_output = True
            self._with_output.append(choice)
            self._on_output()

    def take(self) -> Delta | None:
        """The next delta of any choice; None when none has anything to show now."""
        if self._failure is not None:
            raise self._failure
        while self._with_output:
            choice = self._with_output.popleft()
            choice.has_output = False
            delta = None if choice.finished else self._take_of(choice)
            if delta is not None:
                return delta
        return None

    def _take_of(self, choice: Choice) -> Delta | None:
        try:
            output = choice.stream.take(choice.most_tokens)
        except (RequestRefused, Overloaded) as error:
            raise self._refused(error) from None
        if output is None:
            if choice.stream.ended:
                raise ShardFailed("the shard ended the request without saying why")
            return None
        if choice.stream.has_more or (choice.stream.ended and output.finish_reason is None):
            # There is more, or an error that the next `take` raises. The stream will not notify
            # again, so queue the choice here.
            choice.has_output = True
            self._with_output.append(choice)
        self._observe(choice, output)
        reasoning = choice.reasoning_tokens
        delta = choice.take(output)
        if reasoning is not None:
            self._count_reasoning((choice.reasoning_tokens or 0) - reasoning)
        if output.cached_tokens is not None:
            self._count_cached()
        if output.cached_tokens is not None or choice.finished:
            whole = choice.reasoning_tokens if choice.finished else None
            self._counts[choice.index] = choice.cached_tokens, whole
        if output.queue_s is not None:
            self.usage.queue_s = max(output.queue_s, self.usage.queue_s or 0.0)
        if delta is not None:
            self._account(choice, delta, output)
        return delta

    def _count_reasoning(self, tokens: int) -> None:
        self.usage.reasoning_tokens = (self.usage.reasoning_tokens or 0) + tokens

    def _refused(self, error: RequestRefused | Overloaded) -> Exception:
        """The shard's refusal, naming the request body's field instead of the shard's field."""
        if error.field == "adapter":
            # The client named the adapter as `model`.
            return UnknownModel(self.job.model.adapter)
        if error.field == "model":
            # Its last shard has left since the model was looked up.
            return unavailable_model(self._model, self._model)
        if error.field not in _CONSTRAINTS:
            return error
        field = self.job.options.constraint_field or "tools"
        kind = TooManyRequests if isinstance(error, Overloaded) else BadRequest
        reason = str(error).removeprefix(f"{field}: ")
        return kind(f"{field}: {reason}", param=field)

    def _count_cached(self) -> None:
        # Only each prompt's first choice counts: the others hit the blocks that it cached.
        firsts = self._choices[:: self.job.choices_per_prompt]
        known = [choice.cached_tokens for choice in firsts if choice.cached_tokens is not None]
        self.usage.cached_tokens = sum(known) if known else None

    def _account(self, choice: Choice, delta: Delta, output: Output) -> None:
        self.usage.completion_tokens += len(delta.token_ids)
        if delta.finish_reason is not None:
            self.usage.approximate = self.usage.approximate or choice.stream.approximate
            self._end(choice, None if output.finish_reason is not None else "stop_string")
            self._retain(choice, delta.finish_reason)
            if self.ended:
                # "tool_calls" counts as "stop".
                self._record.record_outcome("length" if delta.finish_reason == "length" else "stop")

    @property
    def _session(self) -> Session | None:
        """The session, apart from those of other keys."""
        record = self._record
        return (record.key_name, record.session) if record.session else None

    def _retain(self, choice: Choice, reason: str) -> None:
        """Have the shard retain what the next turn begins with, if tools run until it comes, or
        the client says so.
        """
        hinted, retain = self.job.options.retain, Retain(0.0)
        if reason == "tool_calls" and self._pauses is not None:
            retain = self._pauses.on_tool_calls(self._session, self.usage.prompt_tokens)
        retain = retain if hinted is None else hinted
        if retain.seconds and self._fleet.retain(choice.stream, retain):
            self._record.retained_s = retain.seconds
            self._metrics.retained.labels("tool_calls" if hinted is None else "hint").inc()

    def _observe(self, choice: Choice, output: Output) -> None:
        count = len(output.token_ids)
        if not count:
            return
        now = time.perf_counter()
        choice.num_tokens += count
        if choice.last_arrival_s is None:
            self._meter.add(count)
            if self._record.first_token_s is None:
                self._record.first_token_s = now
                ttft_s = now - self._record.arrived_s
                self._metrics.first_token_seconds.labels(self._model).observe(ttft_s)
            on_output = functools.partial(self._came, choice)
            choice.stream.listen(on_output, min_tokens=choice.tokens_at_once)
        else:
            # Once per output, however many tokens it bundles: a loop over the tokens would cost
            # most under load, when outputs bundle many.
            gap_s = now - choice.last_arrival_s
            self._meter.observe(count, gap_s / count, now)
            if len(choice.stream.attempts) > choice.num_attempts:
                self._record.failover_gaps_s.append(gap_s)
        choice.num_attempts = len(choice.stream.attempts)
        choice.last_arrival_s = now


def _num_ids(request: GenerationRequest) -> int:
    """Roughly how many ids a submission copies."""
    sampling = request.sampling
    num_ids = len(request.prompt_token_ids) + len(sampling.allowed_token_ids)
    num_ids += len(request.stop_token_ids) + len(request.logprob_token_ids)
    # An entry of `logit_bias` costs as much as several ids.
    return num_ids + 10 * len(sampling.logit_bias) + sum(map(len, sampling.bad_words))


def _abort_cause(error: BaseException | None) -> str:
    if error is None or isinstance(error, GeneratorExit):
        return "abandoned"
    if isinstance(error, SlowClient):
        return "slow_reader"
    if isinstance(error, asyncio.CancelledError | ConnectionError):
        return "disconnect"
    if isinstance(error, TimedOut):
        return "timeout"
    # Inside a generation only a shutdown raises `Unavailable`; failures of shards are
    # `penstock_proto.errors`.
    return "shutdown" if isinstance(error, Unavailable) else "error"
