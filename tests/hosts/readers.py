"""64 readers of every kind of answer, in a process of their own: what each read, and how late."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterable, AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import aiohttp
from support.http_answers import (
    EMBEDDINGS,
    KINDS,
    OTHER_KINDS,
    WHOLE_ONLY,
    Refused,
    resumed,
    streamed,
    whole,
)
from support.streams import mixed_request, read_whole

from penstock_client import EmbeddingRequest, Fleet, GenerationRequest, Output, ShardUnavailable

READERS = 64
# Of a client that asks for the rest of a stream that is silent.
RESUMES_AFTER_S = 2.0
_VOCAB = 1000
# Between attempts of a request that was refused for want of shards.
_REFUSED_S = 0.1
# Only embeddings may be refused later: a generation that has begun waits for a shard.
_AT_ONCE_S = 2.0


class How(Enum):
    """The ways to read an answer."""

    STREAMED = auto()
    WHOLE = auto()
    RESUMABLE = auto()
    # Over gRPC, past the router.
    DIRECT = auto()
    DIRECT_EMBEDDING = auto()


@dataclass(frozen=True)
class Job:
    """A request, and how its answer is read."""

    how: How
    request: GenerationRequest | EmbeddingRequest | None = None
    path: str = ""
    body: Any = None

    @property
    def is_stream(self) -> bool:
        return self.how not in (How.WHOLE, How.DIRECT_EMBEDDING)

    @property
    def is_embedding(self) -> bool:
        return self.how is How.DIRECT_EMBEDDING or "embeddings" in self.path


@dataclass(frozen=True)
class Reading:
    """One whole answer, and how long the client waited for it."""

    job: int
    answer: Any
    took_s: float
    # The longest time without an event, from the request on. For an answer in one piece it is
    # the whole time.
    gap_s: float
    # How many times the request was refused before, because no shard was there.
    num_refused: int


def jobs(seed: int) -> list[Job]:
    """Return the jobs of the readers, the same for the same seed."""
    rng = random.Random(seed)
    kinds = [(How.STREAMED, KINDS + OTHER_KINDS), (How.RESUMABLE, KINDS[::3])]
    kinds += [(How.WHOLE, KINDS + OTHER_KINDS + WHOLE_ONLY + EMBEDDINGS)]
    made = [Job(how, path=path, body=body) for how, of_it in kinds for path, body in of_it]
    inputs = [rng.choices(range(_VOCAB), k=rng.randint(1, 60)) for _ in range(90)]
    made.append(Job(How.DIRECT_EMBEDDING, EmbeddingRequest(inputs, pooling="mean")))
    while len(made) < READERS:
        made.append(Job(How.DIRECT, mixed_request(rng, _VOCAB)))
    return made


def read(url: str, shards: Sequence[str], seed: int, for_s: float) -> list[Reading]:
    """Repeat each job for `for_s` seconds, and at least once; return the readings."""
    return asyncio.run(_Readers(url, shards, jobs(seed)).read(for_s))


class _Pace:
    """The time that a client waits for an answer: in all, and at most between two events."""

    def __init__(self) -> None:
        self._begun_s = self._last_s = time.monotonic()
        self.gap_s = 0.0

    @property
    def took_s(self) -> float:
        return self._last_s - self._begun_s

    def mark(self) -> None:
        """Note that an event came."""
        now_s = time.monotonic()
        self.gap_s, self._last_s = max(self.gap_s, now_s - self._last_s), now_s


class _Readers:
    """Call `read` once."""

    def __init__(self, url: str, shards: Sequence[str], of: Sequence[Job]) -> None:
        self._url = url
        self._shards = shards
        self._jobs = of
        self._until_s = 0.0

    async def read(self, for_s: float) -> list[Reading]:
        async with (
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as session,
            Fleet(self._shards) as fleet,
        ):
            while not all(shard.ready for shard in fleet.shards):
                await asyncio.sleep(0.02)
            self._until_s = time.monotonic() + for_s
            one_by_one = (self._again(number, session, fleet) for number in range(len(self._jobs)))
            return [reading for each in await asyncio.gather(*one_by_one) for reading in each]

    async def _again(
        self, number: int, session: aiohttp.ClientSession, fleet: Fleet
    ) -> list[Reading]:
        job = self._jobs[number]
        readings: list[Reading] = []
        num_refused = 0
        while not readings or time.monotonic() < self._until_s:
            pace = _Pace()
            try:
                answer = await self._answer(job, session, fleet, pace.mark)
            except Refused as error:
                at_once = error.waited_s < _AT_ONCE_S or job.is_embedding
                if error.status != 503 or not at_once:
                    raise
                num_refused += 1
                await asyncio.sleep(_REFUSED_S)
                continue
            pace.mark()
            readings.append(Reading(number, answer, pace.took_s, pace.gap_s, num_refused))
            num_refused = 0
        return readings

    async def _answer(
        self, job: Job, session: aiohttp.ClientSession, fleet: Fleet, on_event: Callable[[], None]
    ) -> Any:
        url = self._url + job.path
        match job.how:
            case How.STREAMED:
                return await streamed(session, url, job.body, on_event)
            case How.RESUMABLE:
                return await resumed(session, url, job.body, on_event, RESUMES_AFTER_S)
            case How.WHOLE:
                return await whole(session, url, job.body)
        if isinstance(job.request, EmbeddingRequest):
            try:
                return await fleet.embed(job.request)
            except ShardUnavailable as error:
                raise Refused(503, str(error), 0.0) from error
        assert job.request is not None
        async with fleet.submit(job.request) as stream:
            return await read_whole(_marked(stream, on_event))


async def _marked(
    outputs: AsyncIterable[Output], on_event: Callable[[], None]
) -> AsyncIterator[Output]:
    async for output in outputs:
        on_event()
        yield output
