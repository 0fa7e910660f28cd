"""vLLM's own core behind a shard, with its build for processors: `make soak` installs it."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from support.adapters import make_adapter
from support.processes import Shard, is_alive, running, wait_until
from support.vllm_shards import INSTALLED, START_S, family, named, start

from penstock_client import (
    Constraint,
    ConstraintKind,
    EmbeddingRequest,
    FinishReason,
    GenerationRequest,
    InvalidRequest,
    NotServed,
    Output,
    RequestRefused,
    SamplingParams,
    ShardClient,
    ShardUnavailable,
)

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900), INSTALLED]

# Prompts of more are computed in pieces.
STEP_TOKENS = 256


@pytest.fixture(scope="module")
def shard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shard]:
    flags = ("--enable-lora", "--max-loras", "2", "--max-num-batched-tokens", str(STEP_TOKENS))
    shard = start(tmp_path_factory.mktemp("vllm"), *flags)
    try:
        shard.wait_healthy(START_S)
        yield shard
    finally:
        shard.close()


@pytest.fixture
async def client(shard: Shard) -> AsyncIterator[ShardClient]:
    async with ShardClient(shard.address) as client:
        yield client


GREEDY = SamplingParams(temperature=0.0)
PROMPT = list(range(40, 60))


async def outputs_of(client: ShardClient, request: GenerationRequest) -> list[Output]:
    return [output async for output in client.generate(request)]


async def tokens_of(client: ShardClient, request: GenerationRequest) -> list[int]:
    return [i for output in await outputs_of(client, request) for i in output.token_ids]


def asked(sampling: SamplingParams = GREEDY, **fields: Any) -> GenerationRequest:
    given = {"max_tokens": 16, "ignore_eos": True, **fields}
    return GenerationRequest(PROMPT, sampling, **given)


# ---- What it computes --------------------------------------------------------------------------


async def test_tokens_and_log_probabilities_are_those_of_penstocks_own_engine(
    client: ShardClient, tmp_path: Path
) -> None:
    request = asked(logprobs=2, prompt_logprobs=1)
    own = Shard(tmp_path / "log", "--runner", "model", "--dtype", "float32")
    with running(own):
        async with ShardClient(own.address) as other:
            theirs, ours = await outputs_of(client, request), await outputs_of(other, request)
            for who in (client, other):
                info = await who.info()
                assert (info.model, info.eos_token_ids) == ("penstock-toy", info.eos_token_ids)
            assert (await client.info()).weights_hash == (await other.info()).weights_hash
    assert [i for each in theirs for i in each.token_ids] == [i for o in ours for i in o.token_ids]
    for name in ("logprobs", "prompt_logprobs"):
        found, expected = (_columns(each, name) for each in (theirs, ours))
        assert found["top_token_ids"] == expected["top_token_ids"]
        for column in ("chosen", "top_logprobs"):
            assert found[column] == pytest.approx(expected[column], abs=2e-3)


def _columns(outputs: list[Output], name: str) -> dict[str, list[Any]]:
    parts = [part for output in outputs if (part := getattr(output, name)) is not None]
    return {
        "chosen": [x for part in parts for x in part.chosen],
        "top_token_ids": [x for part in parts for x in part.top_token_ids],
        "top_logprobs": [x for part in parts for x in part.top_logprobs],
    }


async def test_adapters_are_loaded_used_and_unloaded_as_on_penstocks_own_engine(
    client: ShardClient, tmp_path: Path
) -> None:
    queries = {f"model.layers.{layer}.self_attn.q_proj": (256, 256) for layer in (0, 1)}
    sources = {n: str(make_adapter(tmp_path / n, queries, seed=i)) for i, n in enumerate("abc")}
    wide = make_adapter(tmp_path / "wide", queries, rank=100)
    own = Shard(
        tmp_path / "log", "--runner", "model", "--dtype", "float32", "--enable-lora",
        "--max-loras", "2",
    )  # fmt: skip
    with running(own):
        async with ShardClient(own.address) as other:
            told = []
            for who in (client, other):
                found: list[object] = [await tokens_of(who, asked())]
                for name in "ab":
                    await who.load_adapter(name, sources[name])
                    found.append(await tokens_of(who, asked(adapter=name)))
                with pytest.raises(NotServed, match="2 adapters are loaded"):
                    await who.load_adapter("c", sources["c"])
                found.append(await tokens_of(who, asked()))
                found.append((await who.info()).adapters)
                await who.unload_adapter("a")
                with pytest.raises(InvalidRequest, match="rank"):
                    await who.load_adapter("wide", str(wide))
                await who.load_adapter("c", sources["c"])
                found.append(await tokens_of(who, asked(adapter="c")))
                await asyncio.gather(who.unload_adapter("b"), who.unload_adapter("c"))
                with pytest.raises(InvalidRequest, match="adapter 'a' is not loaded"):
                    await tokens_of(who, asked(adapter="a"))
                told.append(found)
    theirs, ours = told
    assert theirs == ours
    assert len({tuple(tokens) for tokens in ours if isinstance(tokens, list)}) == 4


@pytest.mark.parametrize("pooling", ["last", "mean"])
async def test_embeddings_are_those_of_penstocks_own_engine(pooling: str, tmp_path: Path) -> None:
    flags = ("--embeddings", pooling)
    theirs = start(tmp_path / "vllm", *flags)
    own = Shard(tmp_path / "log", "--runner", "model", "--dtype", "float32", *flags)
    inputs = [PROMPT, [5], list(range(300))]
    try:
        theirs.wait_healthy(START_S)
        with running(own):
            async with ShardClient(theirs.address) as first, ShardClient(own.address) as second:
                clients = (first, second)
                request = EmbeddingRequest(inputs, dimensions=100)
                found, expected = [await each.embed(request) for each in clients]
                assert np.allclose(found, expected, atol=1e-4)
                assert (await first.info()).embedding == (await second.info()).embedding
                with pytest.raises(NotServed, match=f"pooling {pooling} and nothing else"):
                    await tokens_of(first, asked())
    finally:
        theirs.close()


_OBJECT = {"type": "object", "properties": {"a": {"enum": [1, 2]}, "b": {"type": "string"}}}
_CONSTRAINTS = [
    Constraint(ConstraintKind.REGEX, "[a-c]{5}x|[d-f]{9}"),
    Constraint(ConstraintKind.CHOICE, options=("yes", "no", "not at all")),
    Constraint(ConstraintKind.JSON_SCHEMA, json.dumps({**_OBJECT, "required": ["a", "b"]})),
    Constraint(ConstraintKind.JSON_OBJECT),
    Constraint(ConstraintKind.GRAMMAR, 'start: ("a" | "b" start "c")'),
    # Read in so many ways that it ends with an error.
    Constraint(ConstraintKind.GRAMMAR, 'start: e\ne: e e | "a" | "b" | " " | e "c" e'),
    Constraint(ConstraintKind.REGEX, "("),
]


async def _told(client: ShardClient, request: GenerationRequest) -> tuple[list[int], str]:
    """Return the tokens, and the error that they end with, if any."""
    tokens: list[int] = []
    try:
        async for output in client.generate(request):
            tokens += output.token_ids
    except RequestRefused as error:
        return tokens, str(error)
    return tokens, ""


async def test_constraints_mean_on_it_what_they_mean_on_penstocks_own_engine(
    client: ShardClient, tmp_path: Path
) -> None:
    own = Shard(tmp_path / "log", "--runner", "model", "--dtype", "float32")
    with running(own):
        async with ShardClient(own.address) as other:
            for constraint in _CONSTRAINTS:
                for least in (0, 5):
                    request = GenerationRequest(
                        PROMPT, GREEDY, constraint=constraint, max_tokens=150, min_tokens=least
                    )
                    theirs, ours = await _told(client, request), await _told(other, request)
                    assert theirs == ours, constraint


async def test_a_constraint_goes_on_from_the_output_that_a_request_brings(
    client: ShardClient,
) -> None:
    for constraint in _CONSTRAINTS[:5]:
        request = GenerationRequest(PROMPT, GREEDY, constraint=constraint, max_tokens=60)
        whole, _ = await _told(client, request)
        rest = dataclasses.replace(request, output_token_ids=whole[:2])
        assert (await _told(client, rest))[0] == whole[2:], constraint
    wrong = dataclasses.replace(request, constraint=_CONSTRAINTS[0], output_token_ids=[77, 78])
    assert "no beginning of what the constraint allows" in (await _told(client, wrong))[1]


async def test_each_parameter_does_what_it_says(client: ShardClient) -> None:
    plain = await tokens_of(client, asked())
    first = plain[0]
    banned = await tokens_of(client, asked(SamplingParams(temperature=0.0, bad_words=((first,),))))
    assert first not in banned
    pushed = SamplingParams(temperature=0.0, logit_bias={77: 100.0})
    assert set(await tokens_of(client, asked(pushed))) == {77}
    allowed = SamplingParams(temperature=0.0, allowed_token_ids=(80, 81))
    assert set(await tokens_of(client, asked(allowed))) <= {80, 81}
    (stopped,) = [
        o for o in await outputs_of(client, asked(stop_token_ids=[first])) if o.finish_reason
    ]
    assert (stopped.finish_reason, stopped.stop_token_id) == (FinishReason.STOP, first)
    later = await tokens_of(client, asked(stop_token_ids=[first], min_tokens=5))
    assert first not in later[:5]
    seeded = asked(SamplingParams(temperature=1.5, seed=2**64 - 3))
    assert await tokens_of(client, seeded) == await tokens_of(client, seeded)


async def test_a_seed_gives_the_same_tokens_whether_or_not_a_prompt_is_cut(
    client: ShardClient,
) -> None:
    sampling = SamplingParams(temperature=1.5, seed=11)
    prompt = [i % 90 for i in range(2 * STEP_TOKENS - 100)]
    request = dataclasses.replace(asked(sampling), prompt_token_ids=prompt)
    cut, cached = [await outputs_of(client, request) for _ in range(2)]
    assert cut[0].cached_tokens == 0
    assert len(prompt) - (cached[0].cached_tokens or 0) <= STEP_TOKENS
    tokens, again = ([i for each in outputs for i in each.token_ids] for outputs in (cut, cached))
    assert (len(tokens), tokens) == (16, again)


async def test_greedy_tokens_go_on_after_the_output_that_a_request_brings(
    client: ShardClient,
) -> None:
    whole = await tokens_of(client, asked())
    rest = asked(output_token_ids=whole[:7])
    outputs = await outputs_of(client, rest)
    assert outputs[0].first_position == 7
    assert [i for each in outputs for i in each.token_ids] == whole[7:]


async def test_what_it_does_not_serve_is_refused_by_name_and_ends_alone(
    client: ShardClient,
) -> None:
    refused = {
        "typical_p": asked(SamplingParams(temperature=1.0, typical_p=0.5)),
        "temperature": asked(SamplingParams(temperature=5.0)),
        "logit_bias": asked(SamplingParams(logit_bias=dict.fromkeys(range(1100), 1.0))),
        "presence_penalty": asked(SamplingParams(presence_penalty=1.0), output_token_ids=[50]),
    }
    whole = asyncio.create_task(tokens_of(client, asked(max_tokens=64)))
    for field, request in refused.items():
        with pytest.raises(NotServed, match=field):
            await tokens_of(client, request)
    assert len(await whole) == 64


async def test_nothing_runs_a_second_after_all_have_left(client: ShardClient) -> None:
    async def read_one(number: int) -> None:
        request = dataclasses.replace(asked(max_tokens=400), prompt_token_ids=[5, 6, number])
        async for _ in client.generate(request):
            return

    await asyncio.gather(*(read_one(number) for number in range(6)))
    async with asyncio.timeout(1.0):
        async for load in client.watch_load():
            if not load.running and not load.waiting:
                return


# ---- How it ends -------------------------------------------------------------------------------


@pytest.mark.parametrize("victim", ["EngineCore", "Worker", "penstock_shard.vllm_engine.main"])
async def test_whatever_dies_of_it_all_of_it_ends_and_another_serves(
    shard: Shard, client: ShardClient, victim: str
) -> None:
    await tokens_of(client, asked(max_tokens=1))
    before = family(shard)
    stream = asyncio.create_task(tokens_of(client, asked(max_tokens=400)))
    await asyncio.sleep(0.5)
    named(shard, victim).send_signal(signal.SIGKILL)
    with pytest.raises(ShardUnavailable):
        await stream
    await asyncio.to_thread(_wait_for_end, before)
    await asyncio.to_thread(shard.wait_healthy, START_S)
    assert len(await tokens_of(client, asked())) == 16


def _wait_for_end(processes: list[psutil.Process]) -> None:
    over = "all of vLLM's processes have ended"
    wait_until(lambda: not any(map(is_alive, processes)), timeout_s=30, what=over)


def test_nothing_is_left_of_it_when_its_server_is_killed(tmp_path: Path) -> None:
    others = _shared_memory()
    shard = start(tmp_path)
    try:
        shard.wait_healthy(START_S)
        before = family(shard)
        shared = _shared_memory() - others
        assert shared
        shard.process.send_signal(signal.SIGKILL)
        _wait_for_end(before)
        wait_until(
            lambda: (
                not {name for name in shared if name.startswith("psm_")}
                & set(os.listdir("/dev/shm"))
            ),
            timeout_s=10,
            what="its shared memory is removed",
        )
    finally:
        shard.close()


def _shared_memory() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if name.startswith("psm_")}
