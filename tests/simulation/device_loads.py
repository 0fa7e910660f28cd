"""Loads on simulated devices, and how streams fare: when one moves, when a shard drains, when long
prompts come beside them.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import TypeVar
from unittest.mock import patch

from penstock_client.fleet.placement import moves, rebalancing
from penstock_common.image_digest import image_digest
from penstock_proto.types import Objective, PromptImage
from simulation import virtual_time
from simulation.device_fleet import DeviceFleet, Timeline, prompts, request_of
from simulation.devices import H100, Device
from simulation.encoders import IMAGE_ID
from simulation.policies import percentile
from simulation.virtual_time import VirtualLoop

_Result = TypeVar("_Result")

_ENDS_S = 1000.0
# What a stream that moves has to say: more than it comes to.
_MANY_TOKENS = 20_000
# Of a stream so many tokens are looked at, before it moves and after that.
_LOOKED_AT = 20
_WARM_UP_TOKENS = 2048
# Of each answer, where a queue is long.
_OUTPUT_TOKENS = 200


@dataclass(frozen=True)
class Setting:
    """A fleet's devices and links, and how blocks go: before their stream ("ahead"), when it comes
    ("asked"), or not at all ("none").
    """

    gbit_per_s: float = 100.0
    blocks: str = "ahead"
    device: Device = H100
    policy: str = "least-load"
    max_prefill_tokens: int = 1024

    def run(
        self, roles: Sequence[str], main: Callable[[DeviceFleet], Coroutine[None, None, _Result]]
    ) -> _Result:
        """Run `main` with a fleet and return its result. `main` starts the shards."""

        async def with_fleet(loop: VirtualLoop) -> _Result:
            fleet = DeviceFleet(
                loop,
                roles,
                device=self.device,
                gbit_per_s=self.gbit_per_s,
                moves_blocks=self.blocks != "none",
                policy=self.policy,
                max_prefill_tokens=self.max_prefill_tokens,
            )
            try:
                return await main(fleet)
            finally:
                await fleet.close()

        least_tokens = moves._LEAST_TOKENS if self.blocks == "ahead" else 2**31
        with patch.object(moves, "_LEAST_TOKENS", least_tokens):
            return virtual_time.run(with_fleet, ends_s=_ENDS_S)


# ---- one stream ---------------------------------------------------------------------------------


def pause_of_move(setting: Setting, num_tokens: int) -> float:
    """Seconds: the longest between tokens of a stream of so many tokens that moves to an idle
    shard.
    """

    async def main(fleet: DeviceFleet) -> float:
        rng = random.Random(0)
        await fleet.start(0)
        stream = fleet.send(prompts(rng, 1, num_tokens)[0], _MANY_TOKENS)
        await fleet.wait_for_tokens([stream], _LOOKED_AT)
        await fleet.start(1)
        await _warm_up(fleet, rng, 1)
        left_s = fleet.now_s
        fleet.shards[0].terminate()
        await fleet.wait_until_left(0)
        await fleet.wait_for_tokens([stream], len(stream.times_s) + _LOOKED_AT)
        fleet.check_answers([stream])
        return stream.longest_gap_s(left_s)

    return setting.run(["both"] * 2, main)


def first_token_elsewhere(setting: Setting, num_tokens: int) -> float:
    """Seconds to the first token of a prompt at an idle shard, another of which has computed it."""

    async def main(fleet: DeviceFleet) -> float:
        rng = random.Random(0)
        await fleet.start()
        (prompt,) = prompts(rng, 1, num_tokens)
        await fleet.send(prompt, 2, only_at=0).over()
        await _warm_up(fleet, rng, 1)
        elsewhere = fleet.send_from(0, 1, prompt)
        await elsewhere.over()
        fleet.check_answers([elsewhere])
        return elsewhere.first_token_s

    return setting.run(["both"] * 2, main)


async def _warm_up(fleet: DeviceFleet, rng: random.Random, shard: int) -> None:
    """Let a shard learn what its steps take."""
    await fleet.send(prompts(rng, 1, _WARM_UP_TOKENS)[0], 100, only_at=shard).over()


# ---- a drain ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Drain:
    """Seconds. `usual_s` is between tokens of the streams that leave, `longest_s` the longest for
    each of them from then on, and the others are those of the streams that run where they go.
    """

    took_s: float
    usual_s: float
    longest_s: list[float]
    others_usual_s: float
    others_longest_s: float

    @property
    def steps(self) -> list[float]:
        """The longest pause of each stream, in its usual steps."""
        return [longest_s / self.usual_s for longest_s in self.longest_s]


def drain(setting: Setting, *, num_streams: int, num_tokens: int, num_others: int) -> Drain:
    """Drain one shard of four, where `num_streams` streams run whose prompts have `num_tokens`
    tokens. `num_others` streams like these run on each of the three others.
    """

    async def main(fleet: DeviceFleet) -> Drain:
        rng = random.Random(0)
        await fleet.start(0)
        streams = [
            fleet.send(prompt, _MANY_TOKENS) for prompt in prompts(rng, num_streams, num_tokens)
        ]
        await fleet.start(1, 2, 3)
        others = [
            fleet.send(prompt, _MANY_TOKENS, only_at=1 + number % 3)
            for number, prompt in enumerate(prompts(rng, 3 * num_others, num_tokens))
        ]
        await fleet.wait_for_tokens([*streams, *others], _LOOKED_AT)
        left_s = fleet.now_s
        fleet.shards[0].terminate()
        await fleet.wait_until_left(0)
        took_s = fleet.now_s - left_s
        for stream in streams:
            await fleet.wait_for_tokens([stream], len(stream.times_s) + _LOOKED_AT)
        fleet.check_answers(streams)
        return Drain(
            took_s,
            _usual_s(streams, left_s),
            sorted(stream.longest_gap_s(left_s) for stream in streams),
            _usual_s(others, left_s),
            max(other.longest_gap_s(left_s) for other in others),
        )

    return setting.run(["both"] * 4, main)


def _usual_s(streams: Sequence[Timeline], until_s: float) -> float:
    """Return the median seconds between the last tokens that came before a time."""
    return median(gap for s in streams for gap in s.gaps_s(until_s=until_s)[-_LOOKED_AT // 2 :])


# ---- roles --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Image:
    """Pixels, and the tokens that they take."""

    width: int
    height: int
    num_tokens: int


@dataclass(frozen=True)
class Load:
    """Streams that decode throughout, and prompts that come beside them."""

    per_s: float
    prompt_tokens: int = 4000
    output_tokens: int = 100
    seconds: float = 10.0
    num_streams: int = 64
    stream_tokens: int = 1000
    # What the streams want.
    seconds_between_tokens: float | None = None
    # The image before each prompt, if any.
    image: Image | None = None


@dataclass(frozen=True)
class Fared:
    """Seconds between tokens of the streams; to the first token of each prompt; and the longest
    between tokens of each of their answers.
    """

    gaps_s: list[float]
    first_tokens_s: list[float]
    longest_s: list[float]

    @property
    def gap_p99_s(self) -> float:
        return percentile(self.gaps_s, 0.99)


def long_prompts(setting: Setting, roles: Sequence[str], load: Load) -> Fared:
    """Put a load on a fleet with these roles, and return how it fares."""

    async def main(fleet: DeviceFleet) -> Fared:
        rng = random.Random(1)
        await fleet.start()
        streams = []
        objective = Objective(seconds_between_tokens=load.seconds_between_tokens)
        for prompt in prompts(rng, load.num_streams, load.stream_tokens):
            request = request_of(prompt, _MANY_TOKENS)
            streams.append(fleet.submit(replace(request, objective=objective)))
            await asyncio.sleep(0.05)
        await fleet.wait_for_tokens(streams, _LOOKED_AT)
        since_s = fleet.now_s
        answers = []
        for pause_s in _pauses(rng, load):
            await asyncio.sleep(pause_s)
            answers.append(_ask(fleet, rng, load))
        until_s = since_s + load.seconds
        await asyncio.sleep(max(0.0, until_s - fleet.now_s))
        for answer in answers:
            await answer.over()
        fleet.check_answers(answers)
        return Fared(
            [gap for stream in streams for gap in stream.gaps_s(since_s, until_s)],
            [answer.first_token_s for answer in answers],
            [max(answer.gaps_s()) for answer in answers],
        )

    return setting.run(roles, main)


def _ask(fleet: DeviceFleet, rng: random.Random, load: Load) -> Timeline:
    (prompt,) = prompts(rng, 1, load.prompt_tokens)
    if load.image is None:
        return fleet.send(prompt, load.output_tokens)
    image = load.image
    data = rng.randbytes(16).ljust(3 * image.width * image.height, b"\0")
    sha256 = image_digest(image.width, image.height, data).hex()
    placed = PromptImage(sha256, image.width, image.height, 0, image.num_tokens)
    request = request_of([IMAGE_ID] * image.num_tokens + prompt, load.output_tokens)

    async def pixels(_: PromptImage) -> bytes:
        return data

    return fleet.submit(replace(request, images=[placed]), pixels)


def _pauses(rng: random.Random, load: Load) -> Iterator[float]:
    """Yield the seconds between Poisson arrivals, until the load ends."""
    at_s = 0.0
    while load.per_s:
        pause_s = rng.expovariate(load.per_s)
        at_s += pause_s
        if at_s > load.seconds:
            return
        yield pause_s


# ---- a shared prompt ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Shared:
    """Requests whose prompts begin alike, to so many shards: one by itself, then others at random
    for so many seconds.
    """

    num_shards: int = 8
    shared_tokens: int = 4000
    own_tokens: int = 100
    output_tokens: int = 50
    per_s: float = 100.0
    seconds: float = 5.0


@dataclass(frozen=True)
class SharedFared:
    """The result for a shared prompt: how often each shared token was computed on average, how many
    shards computed prompts, and the seconds from each request to its first token.
    """

    times_computed: float
    num_shards: int
    first_tokens_s: list[float]


def shared_prompt(setting: Setting, load: Shared) -> SharedFared:
    """Send a fleet prompts that begin alike, and return how it fares."""

    async def main(fleet: DeviceFleet) -> SharedFared:
        rng = random.Random(2)
        await fleet.start()
        for shard in range(load.num_shards):
            await _warm_up(fleet, rng, shard)
        before = _prompt_tokens(fleet)
        (shared,) = prompts(rng, 1, load.shared_tokens)
        answers = []
        for pause_s in (0.0, 1.0, *_pauses(rng, Load(load.per_s, seconds=load.seconds))):
            await asyncio.sleep(pause_s)
            (own,) = prompts(rng, 1, load.own_tokens)
            answers.append(fleet.send([*shared, *own], load.output_tokens))
        for answer in answers:
            await answer.over()
        fleet.check_answers(answers)
        computed = [after - n for after, n in zip(_prompt_tokens(fleet), before, strict=True)]
        own_tokens = len(answers) * load.own_tokens
        return SharedFared(
            (sum(computed) - own_tokens) / load.shared_tokens,
            sum(each > 0 for each in computed),
            [answer.first_token_s for answer in answers],
        )

    return setting.run(["both"] * load.num_shards, main)


def _prompt_tokens(fleet: DeviceFleet) -> list[int]:
    """Computed by each shard so far."""
    supervisors = [shard.supervisor for shard in fleet.shards]
    return [0 if each is None else each.load.prompt_tokens_total for each in supervisors]


# ---- a shard that joins -------------------------------------------------------------------------


def first_tokens_when_one_joins(
    *, num_requests: int, num_tokens: int, rebalances: bool
) -> list[float]:
    """Seconds to each first token of requests that came at once to one shard, which has no room for
    all of them, a second before another one joins.
    """

    async def main(fleet: DeviceFleet) -> list[float]:
        await fleet.start(0)
        answers = [
            fleet.send(prompt, _OUTPUT_TOKENS)
            for prompt in prompts(random.Random(3), num_requests, num_tokens)
        ]
        await asyncio.sleep(1.0)
        await fleet.start(1)
        for answer in answers:
            await answer.over()
        fleet.check_answers(answers)
        return [answer.first_token_s for answer in answers]

    interval_s = rebalancing._LOOK_INTERVAL_S if rebalances else _ENDS_S
    with patch.object(rebalancing, "_LOOK_INTERVAL_S", interval_s):
        return Setting().run(["both"] * 2, main)
