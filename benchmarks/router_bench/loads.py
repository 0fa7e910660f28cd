"""Functions that send load. Each runs in its own process, at the other end of a `Load`'s pipe.

Each sends "ready", works until it is stopped or done, and sends its result.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import random
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.router_bench.figures import curve, percentile
from benchmarks.router_bench.http_load import Answer, Client, client, open_streams
from benchmarks.router_bench.servers import Pipe
from benchmarks.router_bench.stamping_shard import Stamps
from penstock_client import (
    Fleet,
    GenerationRequest,
    GenerationStream,
    PenstockError,
    SamplingParams,
)

# An event that comes later after the shard's send was not passed on at once.
PROMPT_EVENT_S = 0.005
_BETWEEN_BURSTS_S = 0.2


async def _told(pipe: Pipe) -> Any:
    """Return the next message of the other end."""
    loop = asyncio.get_running_loop()
    said = asyncio.Event()
    loop.add_reader(pipe.fileno(), said.set)
    await said.wait()
    loop.remove_reader(pipe.fileno())
    return pipe.recv()


# ---- Simultaneous streams ----------------------------------------------------------------------


def hold_streams(
    pipe: Pipe, port: int, request: bytes, count: int, stamps_files: Sequence[Path]
) -> None:
    """Open `count` streams, and read them until the pipe gives a window to analyze."""
    streams = open_streams(port, request, count)
    while not all(answer.first_s or answer.ended_s for answer in streams.answers):
        streams.read(0.05)
    pipe.send("ready")
    streams.read(until_readable=pipe.fileno())
    from_s, to_s = pipe.recv()
    streams.close()
    pipe.send(_window(streams.answers, from_s, to_s, stamps_files))


def hold_answers(pipe: Pipe, port: int, request: bytes, count: int) -> None:
    """Do the same for whole answers, which are dropped at the stop."""
    streams = open_streams(port, request, count)
    pipe.send("ready")
    streams.read(until_readable=pipe.fileno())
    streams.close()
    pipe.send({"lost": sum(bool(answer.chunks) for answer in streams.answers)})


# The time at which an event came, and its tokens, as texts or ids.
_Event = tuple[float, Sequence[str | int]]


@dataclass(slots=True)
class _Events:
    """Counts over all streams in a window."""

    tokens: int = 0
    events: int = 0
    # Tokens that came alone, soon after they were sent.
    prompt: int = 0
    unknown: int = 0
    gaps_s: list[float] = field(default_factory=list)
    delays_s: list[float] = field(default_factory=list)


def _window(
    answers: Sequence[Answer], from_s: float, to_s: float, stamps_files: Sequence[Path]
) -> dict[str, Any]:
    """Return the window's figures; `lost` counts streams that ended or were silent."""
    streams: list[list[_Event]] = []
    lost = 0
    for answer in answers:
        # Each token begins with its only space.
        streams.append(
            [
                (at_s, [" " + word for word in text.split(" ")[1:]])
                for at_s, text in answer.events()
                if from_s <= at_s < to_s
            ]
        )
        lost += not streams[-1] or (bool(answer.ended_s) and answer.ended_s < to_s)
    return {**_figures(streams, Stamps(stamps_files)), "lost": lost}


def _figures(streams: Sequence[Sequence[_Event]], stamps: Stamps) -> dict[str, Any]:
    """Return users' figures: gaps between events, and delays since tokens were sent."""
    found = _Events()
    for events in streams:
        found.gaps_s += [later - earlier for (earlier, _), (later, _) in itertools.pairwise(events)]
        for at_s, tokens in events:
            _take_event(found, at_s, tokens, stamps)
    return {
        "tokens": found.tokens,
        "events": found.events,
        "prompt_share": found.prompt / max(found.tokens, 1),
        "unknown_tokens": found.unknown,
        "delay_p50_ms": 1e3 * percentile(found.delays_s, 0.5),
        "delay_p99_ms": 1e3 * percentile(found.delays_s, 0.99),
        "gap_p50_ms": 1e3 * percentile(found.gaps_s, 0.5),
        "gap_p99_ms": 1e3 * percentile(found.gaps_s, 0.99),
        "gap_max_ms": 1e3 * max(found.gaps_s, default=0.0),
        "gaps_ms": [1e3 * gap_s for gap_s in curve(found.gaps_s)],
        "delays_ms": [1e3 * delay_s for delay_s in curve(found.delays_s)],
    }


def _take_event(found: _Events, at_s: float, tokens: Sequence[str | int], stamps: Stamps) -> None:
    found.events += 1
    found.tokens += len(tokens)
    for token in tokens:
        sent_at_s = stamps.sent_at_s(token, at_s)
        if sent_at_s is None:
            found.unknown += 1
            continue
        delay_s = at_s - sent_at_s
        found.delays_s.append(delay_s)
        found.prompt += len(tokens) == 1 and delay_s <= PROMPT_EVENT_S


# ---- The same streams without a router ---------------------------------------------------------


def fleet_streams(
    pipe: Pipe, addresses: Sequence[str], count: int, max_tokens: int, stamps_files: Sequence[Path]
) -> None:
    """Read `count` streams with only the client library, until stopped.

    As in a router, callbacks on the same event loop get the outputs.
    """

    def read(fleet: Fleet, seed: int) -> GenerationStream:
        events = streams[seed]
        stream = fleet.submit(_request(seed, 16, max_tokens))

        def take() -> None:
            output = stream.take()
            if output is not None:
                events.append((time.monotonic(), output.token_ids))

        stream.listen(take)
        return stream

    async def run() -> tuple[float, float]:
        async with Fleet(addresses) as fleet:
            await fleet.wait_ready(30)
            readers = [read(fleet, seed) for seed in range(count)]
            while not all(streams):
                await asyncio.sleep(0.05)
            pipe.send("ready")
            from_s, to_s = await _told(pipe)
            for reader in readers:
                reader.cancel()
            return from_s, to_s

    streams: list[list[_Event]] = [[] for _ in range(count)]
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        from_s, to_s = runner.run(run())
    within = [[event for event in events if from_s <= event[0] < to_s] for events in streams]
    pipe.send(_figures(within, Stamps(stamps_files)))


def _request(seed: int, prompt_tokens: int, max_tokens: int) -> GenerationRequest:
    rng = random.Random(seed)
    return GenerationRequest(
        [rng.randrange(300, 3000) for _ in range(prompt_tokens)],
        max_tokens=max_tokens,
        sampling=SamplingParams(seed=seed),
        ignore_eos=True,
    )


# ---- One request after another -----------------------------------------------------------------


def closed_loop(pipe: Pipe, port: int, requests: Sequence[bytes], at_once: int, total: int) -> None:
    """Send `total` requests over `at_once` connections, each after the previous answer.

    Kinds of requests take turns. Send the number of answers after each hundredth.
    """

    async def run() -> dict[str, Any]:
        numbers = iter(range(total))
        failures: list[str] = []
        done = 0

        async def worker(http: Client) -> None:
            nonlocal done
            for number in numbers:
                answer = await http.ask(requests[number % len(requests)])
                if answer.error or answer.status != 200:
                    failures.append(answer.error or f"status {answer.status}")
                done += 1
                if done % max(1, total // 100) == 0:
                    pipe.send(done)

        begin_s = time.monotonic()
        async with client(port) as http:
            await asyncio.gather(*(worker(http) for _ in range(at_once)))
        wall_s = time.monotonic() - begin_s
        return {"failed": len(failures), "first_failure": failures[:1], "wall_s": wall_s}

    pipe.send("ready")
    pipe.send(asyncio.run(run()))


def closed_loop_for(
    pipe: Pipe, port: int, requests: Sequence[bytes], at_once: int, warmup_s: float, seconds: float
) -> None:
    """Do the same for `seconds`, after a warm-up that does not count: see `_summary`."""

    async def worker(http: Client, numbers: Iterator[int], until_s: float) -> None:
        while time.monotonic() < until_s:
            answers.append(await http.ask(requests[next(numbers) % len(requests)]))

    async def run() -> None:
        async with client(port) as http:
            numbers = itertools.count()
            workers = (worker(http, numbers, to_s) for _ in range(at_once))
            await asyncio.gather(*workers)

    answers: list[Answer] = []
    pipe.send("ready")
    from_s = time.monotonic() + warmup_s
    to_s = from_s + seconds
    asyncio.run(run())
    pipe.send(_summary(answers, from_s, to_s))


# ---- Requests at random times ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Arrivals:
    """A Poisson process of `rate` requests a second, whatever the answers. Requests that have not
    ended `patience_s` after the last was sent count as hung.
    """

    rate: float
    warmup_s: float
    seconds: float
    seed: int
    patience_s: float


def open_loop(
    pipe: Pipe,
    port: int,
    requests: Sequence[bytes],
    arrivals: Arrivals,
    ca_file: Path | None = None,
) -> None:
    """Send requests at these times; send their figures after the warm-up."""

    async def run() -> dict[str, Any]:
        async with client(port, ca_file) as http:

            def send(index: int) -> Awaitable[Answer]:
                return http.ask(requests[index % len(requests)])

            return await _at_random(send, arrivals)

    pipe.send("ready")
    pipe.send(asyncio.run(run()))


def fleet_open_loop(
    pipe: Pipe,
    address: str,
    prompt_tokens: int,
    max_tokens: int,
    num_prompts: int,
    arrivals: Arrivals,
) -> None:
    """Do the same with only the client library, with token ids."""
    first = arrivals.seed * num_prompts
    requests = [_request(first + i, prompt_tokens, max_tokens) for i in range(num_prompts)]

    async def ask(fleet: Fleet, index: int) -> Answer:
        answer = Answer(time.monotonic(), status=200)
        try:
            async with fleet.submit(requests[index % num_prompts]) as stream:
                async for _ in stream:
                    answer.first_s = answer.first_s or time.monotonic()
        except PenstockError as error:
            answer.error = str(error)
        answer.ended_s = time.monotonic()
        return answer

    async def run() -> dict[str, Any]:
        async with Fleet([address]) as fleet:
            await fleet.wait_ready(30)
            return await _at_random(functools.partial(ask, fleet), arrivals)

    pipe.send("ready")
    pipe.send(asyncio.run(run()))


async def _at_random(
    send: Callable[[int], Awaitable[Answer]], arrivals: Arrivals
) -> dict[str, Any]:
    rng = random.Random(arrivals.seed)
    tasks: list[asyncio.Task[Answer]] = []
    due_s = time.monotonic()
    from_s = due_s + arrivals.warmup_s
    to_s = from_s + arrivals.seconds
    while (due_s := due_s + rng.expovariate(arrivals.rate)) < to_s:
        await asyncio.sleep(max(0.0, due_s - time.monotonic()))
        tasks.append(asyncio.ensure_future(send(len(tasks))))
    done: set[asyncio.Task[Answer]] = set()
    hung: set[asyncio.Task[Answer]] = set()
    if tasks:
        done, hung = await asyncio.wait(tasks, timeout=arrivals.patience_s)
    for task in hung:
        task.cancel()
    await asyncio.gather(*hung, return_exceptions=True)
    return {**_summary([task.result() for task in done], from_s, to_s), "hung": len(hung)}


# ---- Several kinds of request at given times ---------------------------------------------------


@dataclass(frozen=True, slots=True)
class Window:
    """A common time window of several loads; it begins at `begin_s` of `time.monotonic`. Requests
    that have not ended `patience_s` after its end count as hung.
    """

    begin_s: float
    warmup_s: float
    seconds: float
    patience_s: float

    @property
    def from_s(self) -> float:
        return self.begin_s + self.warmup_s

    @property
    def to_s(self) -> float:
        return self.from_s + self.seconds


# Seconds after the begin, and the request to send.
Timed = Sequence[tuple[float, bytes]]


def users(
    pipe: Pipe, port: int, streams: Sequence[Timed], kinds: dict[str, Timed], window: Window
) -> None:
    """Begin streams at given times, and restart each when it ends; also send other kinds of
    requests at their times. Send figures of each kind; streams count as the first kind.
    """
    first = next(iter(kinds))
    answers: dict[str, list[Answer]] = {kind: [] for kind in kinds}

    async def ask(http: Client, kind: str, at_s: float, request: bytes) -> None:
        await asyncio.sleep(window.begin_s + at_s - time.monotonic())
        answers[kind].append(await http.ask(request))

    async def stream(http: Client, requests: Timed) -> None:
        for at_s, request in itertools.cycle(requests):
            if time.monotonic() >= window.to_s:
                return
            await ask(http, first, at_s, request)

    async def run() -> dict[str, int]:
        async with client(port) as http:
            tasks = {asyncio.create_task(stream(http, each)): first for each in streams}
            for kind, timed in kinds.items():
                tasks |= {asyncio.create_task(ask(http, kind, *each)): kind for each in timed}
            left_s = window.to_s + window.patience_s - time.monotonic()
            done, hung = await asyncio.wait(tasks, timeout=left_s)
            for task in hung:
                task.cancel()
            await asyncio.gather(*hung, return_exceptions=True)
            for task in done:
                task.result()
            return {kind: sum(tasks[task] == kind for task in hung) for kind in kinds}

    pipe.send("ready")
    num_hung = asyncio.run(run())
    pipe.send({
        kind: {**_summary(answers[kind], window.from_s, window.to_s), "hung": num_hung[kind]}
        for kind in kinds
    })  # fmt: skip


def _summary(every: Sequence[Answer], from_s: float, to_s: float) -> dict[str, Any]:
    """Return latencies of requests sent in the window, accepted or refused with status 429.
    `goodput` is the rate of requests answered in it; `failed` counts all.
    """
    answers = [each for each in every if from_s <= each.sent_s < to_s]
    good = [each for each in every if each.status == 200 and not each.error]
    accepted = [each for each in good if from_s <= each.sent_s < to_s]
    refused = [each for each in answers if each.status == 429]
    ttfts_s = [each.first_s - each.sent_s for each in accepted if each.first_s]
    e2es_s = [each.ended_s - each.sent_s for each in accepted]
    refusals_s = [each.ended_s - each.sent_s for each in refused]
    gaps_s = [
        later - earlier
        for each in accepted
        for (earlier, _), (later, _) in itertools.pairwise(each.events())
    ]
    found: dict[str, Any] = {
        "requests": len(answers),
        "accepted": len(accepted),
        "refused": len(refused),
        "failed": len(every) - len(good) - sum(each.status == 429 for each in every),
        "goodput": sum(from_s <= each.ended_s < to_s for each in good) / (to_s - from_s),
        "ttfts_ms": [1e3 * value for value in curve(ttfts_s)],
    }
    for name, values in (
        *(("ttft", ttfts_s), ("gap", gaps_s)),
        *(("e2e", e2es_s), ("refusal", refusals_s)),
    ):
        found[f"{name}_p50_ms"] = 1e3 * percentile(values, 0.5) if values else None
        found[f"{name}_p99_ms"] = 1e3 * percentile(values, 0.99) if values else None
    found["refusal_max_ms"] = 1e3 * max(refusals_s) if refusals_s else None
    return found


# ---- Long prompts, and probes beside them ------------------------------------------------------


def bursts(
    pipe: Pipe, port: int, request: bytes, at_once: int, least_s: float, patience_s: float
) -> None:
    """Send bursts of `at_once` requests, each after all answers, for `least_s`. Send the number of
    answers by status, the number missing after `patience_s`, and begin and end of each burst.
    """

    async def burst(http: Client) -> None:
        from_s = time.monotonic()
        tasks = [asyncio.ensure_future(http.ask(request)) for _ in range(at_once)]
        done, late = await asyncio.wait(tasks, timeout=patience_s)
        windows.append((from_s, time.monotonic()))
        unanswered.extend(task.cancel() for task in late)
        await asyncio.gather(*late, return_exceptions=True)
        statuses.extend(task.result().status for task in done)

    async def run() -> None:
        until_s = time.monotonic() + least_s
        async with client(port) as http:
            while time.monotonic() < until_s and not unanswered:
                await burst(http)
                await asyncio.sleep(_BETWEEN_BURSTS_S)

    statuses: list[int] = []
    unanswered: list[bool] = []
    windows: list[tuple[float, float]] = []
    pipe.send("ready")
    asyncio.run(run())
    counts = {str(status): statuses.count(status) for status in sorted(set(statuses))}
    pipe.send({"statuses": counts, "unanswered": len(unanswered), "windows": windows})


def probe(
    pipe: Pipe, port: int, request: bytes, period_s: float, ca_file: Path | None = None
) -> None:
    """Send requests until stopped; send each one's time and duration."""

    async def ask(http: Client) -> None:
        while True:
            answer = await http.ask(request)
            ok = answer.status == 200 and not answer.error
            took_s.append((answer.sent_s, answer.ended_s - answer.sent_s if ok else float("inf")))
            await asyncio.sleep(period_s)

    async def run() -> None:
        async with client(port, ca_file) as http:
            asking = asyncio.create_task(ask(http))
            while not took_s:
                await asyncio.sleep(0.01)
            pipe.send("ready")
            await _told(pipe)
            # Open requests have taken at least until now.
            now_s = time.monotonic()
            took_s.extend((each.sent_s, now_s - each.sent_s) for each in http.unanswered())
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)

    took_s: list[tuple[float, float]] = []
    asyncio.run(run())
    pipe.send(took_s)
