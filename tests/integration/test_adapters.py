"""LoRA adapters on shards with the fake runner: by gRPC, by HTTP, and when shards fail."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.adapters import make_adapter
from support.processes import Router, Shard, running, wait_until

from penstock_client import (
    Fleet,
    GenerationRequest,
    InvalidRequest,
    NotServed,
    SamplingParams,
    ShardClient,
    SyncShardClient,
)

PROMPT = list(range(5, 45))
FAST = ("--step-ms", "3")


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directories `one`, `same` (its copy) and `two`, and one that is broken."""
    root = tmp_path_factory.mktemp("adapters")
    make_adapter(root / "one", seed=1)
    shutil.copytree(root / "one", root / "same")
    make_adapter(root / "two", seed=2)
    make_adapter(root / "broken", use_dora=True)
    return root


@pytest.fixture(scope="module")
def shard(tmp_path_factory: pytest.TempPathFactory, adapters: Path) -> Iterator[Shard]:
    log = tmp_path_factory.mktemp("shard") / "log"
    service = Shard(log, *FAST, "--lora", f"one={adapters / 'one'}", "--max-loras", "2")
    with running(service):
        yield service


@pytest.fixture
def client(shard: Shard) -> Iterator[SyncShardClient]:
    with SyncShardClient(shard.address) as client:
        yield client


def generate(client: SyncShardClient, adapter: str, **fields: Any) -> list[int]:
    request = asked(adapter, **fields)
    return [i for output in client.generate(request) for i in output.token_ids]


def asked(adapter: str, max_tokens: int = 12, **fields: Any) -> GenerationRequest:
    sampling = SamplingParams(seed=1)
    return GenerationRequest(PROMPT, sampling, max_tokens=max_tokens, adapter=adapter, **fields)


def test_a_shard_says_which_adapters_it_has(client: SyncShardClient, adapters: Path) -> None:
    info = client.info()
    (adapter,) = info.adapters.values()
    assert (adapter.name, adapter.source, adapter.rank) == ("one", str(adapters / "one"), 4)
    assert "adapter" in info.capabilities


def test_adapters_come_and_go_while_the_shard_runs(client: SyncShardClient, adapters: Path) -> None:
    plain, one = generate(client, ""), generate(client, "one")
    loaded = client.load_adapter("other", str(adapters / "two"))
    assert loaded.content_hash != client.info().adapter_hash("one")
    other = generate(client, "other")
    assert len({tuple(plain), tuple(one), tuple(other)}) == 3
    # The same content is the same adapter, whatever its name and place.
    client.unload_adapter("other")
    client.load_adapter("other", str(adapters / "same"))
    assert generate(client, "other") == one
    client.unload_adapter("other")
    assert list(client.info().adapters) == ["one"]
    with pytest.raises(InvalidRequest, match=r"adapter 'other' is not loaded here; loaded: one"):
        generate(client, "other")
    assert generate(client, "") == plain


def test_the_prefix_cache_is_not_shared_between_adapters(
    client: SyncShardClient, adapters: Path
) -> None:
    def cached(adapter: str) -> int | None:
        request = asked(adapter, 2, cache_salt="prefix")
        return next(iter(client.generate(request))).cached_tokens

    assert (cached("one"), cached("one")) == (0, 32)
    assert (cached(""), cached("")) == (0, 32)
    client.load_adapter("again", str(adapters / "two"))
    assert cached("again") == 0
    client.unload_adapter("again")
    # Under the name of one that is gone, what that one left is not found.
    client.load_adapter("again", str(adapters / "same"))
    assert cached("again") == 32
    client.unload_adapter("again")


def test_a_running_request_keeps_an_adapter_that_is_unloaded(
    client: SyncShardClient, adapters: Path
) -> None:
    client.load_adapter("brief", str(adapters / "two"))
    expected = generate(client, "brief", max_tokens=150)
    running_one = client.generate(asked("brief", 150))
    tokens = list(next(running_one).token_ids)
    client.unload_adapter("brief")
    with pytest.raises(NotServed, match="still have requests"):
        client.load_adapter("late", str(adapters / "two"))
    tokens += [i for output in running_one for i in output.token_ids]
    assert tokens == expected
    client.load_adapter("late", str(adapters / "two"))
    client.unload_adapter("late")


@pytest.mark.parametrize(
    ("name", "source", "error", "words"),
    [
        ("x", "nowhere/at/all", InvalidRequest, "no adapter can be read there"),
        ("x", "broken", InvalidRequest, "use_dora: 'True' is not served"),
        ("one", "two", InvalidRequest, "another adapter has this name"),
        ("penstock-toy", "two", InvalidRequest, "the model itself has this name"),
        ("", "two", InvalidRequest, "1..256 characters"),
        ("x\ny", "two", InvalidRequest, "control characters"),
    ],
)
def test_an_adapter_that_cannot_be_had_is_refused_in_one_line(
    client: SyncShardClient,
    adapters: Path,
    name: str,
    source: str,
    error: type[Exception],
    words: str,
) -> None:
    with pytest.raises(error, match=words) as caught:
        client.load_adapter(name, str(adapters / source))
    assert "\n" not in str(caught.value)
    assert list(client.info().adapters) == ["one"]


def test_what_is_unloaded_must_be_loaded(client: SyncShardClient) -> None:
    with pytest.raises(InvalidRequest, match=r"'none' is not loaded here; loaded: one"):
        client.unload_adapter("none")


def test_no_more_are_loaded_than_there_are_places_for(
    client: SyncShardClient, adapters: Path
) -> None:
    client.load_adapter("second", str(adapters / "two"))
    with pytest.raises(NotServed, match=r"2 adapters are loaded.*--max-loras"):
        client.load_adapter("third", str(adapters / "same"))
    client.unload_adapter("second")


def test_a_shard_without_the_flag_serves_no_adapters(tmp_path: Path, adapters: Path) -> None:
    plain = Shard(tmp_path / "log")
    with running(plain), SyncShardClient(plain.address) as client:
        with pytest.raises(NotServed, match="--enable-lora"):
            client.load_adapter("one", str(adapters / "one"))
        with pytest.raises(NotServed, match="adapter is not served"):
            generate(client, "one")


def test_a_shard_does_not_start_with_an_adapter_that_cannot_be_had(
    tmp_path: Path, adapters: Path
) -> None:
    service = Shard(tmp_path / "log", "--lora", f"bad={adapters / 'broken'}")
    with contextlib.closing(service):
        assert service.process.wait(30) == 2
    (line,) = [line for line in service.log.splitlines() if "use_dora" in line]
    assert f"--lora bad: {adapters / 'broken'}" in line


async def test_an_engine_that_is_started_again_has_its_adapters(
    tmp_path: Path, adapters: Path
) -> None:
    flags = ("--fake-crash-on", "9", "--lora", f"one={adapters / 'one'}")
    service = Shard(tmp_path / "log", *FAST, *flags)
    gone = tmp_path / "gone"
    shutil.copytree(adapters / "two", gone)
    with running(service):
        async with ShardClient(service.address) as client:
            await client.load_adapter("same", str(adapters / "same"))
            await client.load_adapter("gone", str(gone))
            shutil.rmtree(gone)
            before = (await client.info()).instance_id
            with pytest.raises(Exception, match="died"):
                async for _ in client.generate(GenerationRequest([9], max_tokens=20)):
                    pass
            async with asyncio.timeout(20):
                while (info := await _info(client)) is None or info.instance_id == before:
                    await asyncio.sleep(0.05)
        # What is logged is written a moment later.
        said = "adapter gone is left out"
        await asyncio.to_thread(
            wait_until, lambda: said in service.log, timeout_s=10, what="a line about it"
        )
    assert list(info.adapters) == ["one", "same"]


async def _info(client: ShardClient) -> Any:
    try:
        return await client.info()
    except Exception:  # noqa: BLE001  it is starting
        return None


# ---- a fleet -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory, adapters: Path) -> Iterator[list[Shard]]:
    """Three shards: one with an adapter, one that may load adapters, and one with another adapter
    of the same name.
    """
    folder = tmp_path_factory.mktemp("three")

    def shard(name: str, *flags: str) -> Shard:
        return Shard(folder / name, "--step-ms", "10", *flags)

    made = [
        shard("first", "--lora", f"mine={adapters / 'one'}"),
        shard("bare", "--enable-lora"),
        shard("other", "--lora", f"mine={adapters / 'two'}"),
    ]
    with running(*made):
        yield made


@contextlib.asynccontextmanager
async def fleet_of(*shards: Shard) -> AsyncIterator[Fleet]:
    """Yield a fleet of these shards that is ready."""
    async with Fleet([shard.address for shard in shards]) as fleet:
        async with asyncio.timeout(30):
            while not all(shard.ready for shard in fleet.shards):
                await asyncio.sleep(0.02)
        yield fleet


async def test_a_request_goes_on_only_where_its_adapter_is(
    three: list[Shard], adapters: Path
) -> None:
    # The others are less loaded.
    first, bare, other = three
    async with fleet_of(first, bare, other) as fleet:
        request = asked("mine", 120, shard=first.address)
        expected = [i async for output in fleet.submit(request) for i in output.token_ids]
        stream = fleet.submit(asked("mine", 120))
        while stream.attempts[-1].shard != first.address:
            stream.cancel()
            stream = fleet.submit(asked("mine", 120))
        tokens = list((await anext(stream)).token_ids)
        first.process.kill()
        await asyncio.sleep(0.5)
        assert not stream.ended
        # It waits for a shard that has it, and goes there as soon as there is one.
        async with ShardClient(bare.address) as client:
            await client.load_adapter("mine", str(adapters / "same"))
        async for output in stream:
            tokens += output.token_ids
        assert tokens == expected
        assert [attempt.shard for attempt in stream.attempts] == [first.address, bare.address]


# The last one of the three: it ends another of them.
async def test_a_request_waits_for_no_adapter_that_was_unloaded(
    three: list[Shard], adapters: Path
) -> None:
    _, holder, other = three
    async with (
        ShardClient(holder.address) as client,
        fleet_of(holder, other) as fleet,
        asyncio.timeout(30),
    ):
        [known] = [shard for shard in fleet.shards if shard.address == holder.address]
        await client.load_adapter("brief", str(adapters / "same"))
        while known.info is None or not known.info.has_adapter("brief"):
            await asyncio.sleep(0.05)
        stream = fleet.submit(asked("brief", 1000))
        await anext(stream)
        await client.unload_adapter("brief")
        while known.info is not None and known.info.has_adapter("brief"):
            await asyncio.sleep(0.05)
        # It went on there to the end; nobody else ever had it.
        holder.process.kill()
        with pytest.raises(InvalidRequest, match="'brief' is not loaded; loaded: mine"):
            async for _ in stream:
                pass


# ---- over HTTP ---------------------------------------------------------------------------------


class Served:
    """A router with an admin's key, and two shards."""

    def __init__(self, logs: Path, adapters: Path) -> None:
        flags = ["--served-model-name", "base", "--max-loras", "2"]
        flags += [*FAST, "--lora", f"one={adapters / 'one'}"]
        self.shards = [Shard(logs / f"shard{index}", *flags) for index in range(2)]
        addresses = [shard.address for shard in self.shards]
        self.router = Router(logs / "router", addresses, "--admin-key", "root")

    def ask(self, path: str, body: Any = None, key: str = "root") -> tuple[int, Any]:
        status, answer = self.router.ask(path, body, {"Authorization": f"Bearer {key}"})
        try:
            return status, json.loads(answer)
        except ValueError:
            return status, answer

    def complete(self, model: str, **fields: Any) -> tuple[int, Any]:
        body = {"model": model, "prompt": "Hello", "max_tokens": 8, "seed": 1, **fields}
        return self.ask("/v1/completions", body)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, adapters: Path) -> Iterator[Served]:
    made = Served(tmp_path_factory.mktemp("served"), adapters)
    with running(*made.shards, made.router):
        wait_until(
            lambda: made.complete("one")[0] == 200, timeout_s=20, what="the adapter is served"
        )
        yield made


def test_models_list_their_adapters(served: Served) -> None:
    _, listed = served.ask("/v1/models")
    cards = {card["id"]: (card["root"], card["parent"]) for card in listed["data"]}
    assert cards == {"base": ("base", None), "one": ("base", "base")}
    assert served.ask("/v1/models/one")[1]["parent"] == "base"


def test_model_picks_an_adapter(served: Served) -> None:
    _, plain = served.complete("base")
    _, adapted = served.complete("one")
    assert (plain["model"], adapted["model"]) == ("base", "one")
    assert plain["choices"][0]["text"] != adapted["choices"][0]["text"]
    assert plain["system_fingerprint"] != adapted["system_fingerprint"]


def test_adapter_id_picks_an_adapter(served: Served) -> None:
    def generate(**parameters: Any) -> tuple[int, Any]:
        body = {"inputs": "Hello", "parameters": {"max_new_tokens": 8, **parameters}}
        return served.ask("/generate", body)

    assert generate()[1] != generate(adapter_id="one")[1]
    assert generate(adapter_id="nobody")[0] == 404


def test_an_unknown_adapter_is_an_unknown_model(served: Served) -> None:
    status, answer = served.complete("nobody")
    assert (status, answer["error"]["param"]) == (404, "model")


def test_an_adapter_makes_no_embeddings(served: Served) -> None:
    status, answer = served.ask("/v1/embeddings", {"model": "one", "input": "Hello"})
    assert (status, answer["error"]["param"]) == (400, "model")


def test_adapters_are_loaded_and_unloaded_at_every_shard(served: Served, adapters: Path) -> None:
    body = {"lora_name": "two", "lora_path": str(adapters / "two")}
    status, text = served.ask("/v1/load_lora_adapter", body)
    assert (status, text) == (200, "Success: LoRA adapter 'two' added successfully.")
    texts = set()
    for shard in served.shards:
        headers = {"Authorization": "Bearer root", "x-penstock-shard": shard.address}
        asked_for = {"model": "two", "prompt": "Hello", "max_tokens": 8, "seed": 1}
        status, answer = served.router.ask("/v1/completions", asked_for, headers)
        assert status == 200
        texts.add(json.loads(answer)["choices"][0]["text"])
    assert len(texts) == 1
    status, text = served.ask("/v1/unload_lora_adapter", {"lora_name": "two"})
    assert (status, text) == (200, "Success: LoRA adapter 'two' removed successfully.")
    assert served.complete("two")[0] == 404


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("load", {"lora_name": "x"}, 400, "lora_path: required"),
        ("load", {"lora_path": "/x"}, 400, "lora_name: required"),
        ("load", {"lora_name": "x", "lora_path": "/nowhere"}, 400, "no adapter can be read"),
        ("load", {"lora_name": "base", "lora_path": "/x"}, 400, "base is a model's name"),
        ("load", {"lora_name": "x", "lora_path": "/x", "load_inplace": True}, 400, "load_inplace"),
        ("unload", {"lora_name": "x"}, 404, "'x' cannot be found"),
        ("unload", {}, 400, "lora_name: required"),
    ],
)
def test_a_change_that_cannot_be_made_is_refused(
    served: Served, path: str, body: dict[str, Any], status: int, words: str
) -> None:
    found, answer = served.ask(f"/v1/{path}_lora_adapter", body)
    assert found == status
    assert words in answer["error"]["message"]


def test_a_path_without_an_adapter_tells_callers_nothing_of_what_is_there(
    served: Served, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("{}")
    odd = tmp_path / "odd" / "adapter_config.json"
    odd.mkdir(parents=True)
    there = [str(tmp_path / name) for name in ("empty", "file", "odd", "file/below")]
    answers = set()
    for path in (*there, str(tmp_path / "nowhere"), "/proc/1", "~nobody-has-this-name", "~root"):
        body = {"lora_name": "x", "lora_path": path}
        status, answer = served.ask("/v1/load_lora_adapter", body)
        # A long path is shortened.
        _, _, reason = answer["error"]["message"].rpartition(": no adapter")
        answers.add((status, reason))
    assert len(answers) == 1, answers


def test_a_refusal_blames_the_field_at_fault_and_no_other(served: Served, adapters: Path) -> None:
    def load(name: str, path: str) -> tuple[int, Any]:
        return served.ask("/v1/load_lora_adapter", {"lora_name": name, "lora_path": path})

    def blamed(answer: tuple[int, Any]) -> str | None:
        status, body = answer
        assert status == 400
        param: str | None = body["error"]["param"]
        return param

    assert blamed(load("x", "/nowhere")) == "lora_path"
    assert blamed(load("x\ny", str(adapters / "two"))) == "lora_name"
    assert blamed(load("one", str(adapters / "two"))) == "lora_name"
    assert load("second", str(adapters / "two"))[0] == 200
    # All places are taken, whatever is asked for.
    assert blamed(load("third", str(adapters / "same"))) is None
    assert served.ask("/v1/unload_lora_adapter", {"lora_name": "second"})[0] == 200


def test_adapters_are_the_operators_to_change(served: Served) -> None:
    body = {"lora_name": "x", "lora_path": "/x"}
    for path in ("load", "unload"):
        assert served.ask(f"/v1/{path}_lora_adapter", body, key="guess")[0] == 401
