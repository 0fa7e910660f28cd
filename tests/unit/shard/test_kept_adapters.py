"""Adapters that the engines of a server load, and those of the server after it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from penstock_proto.errors import Code
from penstock_proto.facts import Adapter
from penstock_proto.types import Error
from penstock_shard.config import ShardConfig
from penstock_shard.ipc.messages import AdapterChange, AdapterChanged, WantedAdapter
from penstock_shard.server.adapter_changes import ServerAdapters
from penstock_shard.server.adapter_list import AdapterList, KeptAdapter
from penstock_shard.server.validation import Refusal

FLAG = ("flagged", "/flagged")
CONFIG = ShardConfig(loras=(FLAG,), max_loras=3)
REQUIRED = WantedAdapter(*FLAG, required=True)


class Server:
    """A server process whose engine loads all that it is asked for, but for what is at `/bad`."""

    def __init__(self, path: Path, config: ShardConfig = CONFIG) -> None:
        self.adapters = ServerAdapters(
            config, self._tell, lambda loaded: None, AdapterList(path, "this one")
        )

    def _tell(self, change: AdapterChange) -> None:
        if change.source == "/bad":
            answer = AdapterChanged(change.number, error=Error(Code.INVALID_ARGUMENT, "it is bad"))
        else:
            loaded = adapter(change.name, change.source) if change.source else None
            answer = AdapterChanged(change.number, loaded)
        asyncio.get_running_loop().call_soon(self.adapters.on_answer, answer)

    def start_engine(self, *, without: Sequence[str] = ()) -> list[WantedAdapter]:
        """Start an engine that loads all but `without`. Returns the adapters it was to load."""
        wanted = self.adapters.begin_engine()
        loaded = (adapter(each.name, each.source) for each in wanted if each.name not in without)
        self.adapters.on_engine_ready(tuple(loaded))
        return wanted


def adapter(name: str, source: str) -> Adapter:
    return Adapter(name, f"hash of {source}", source, 4)


def again(name: str, source: str) -> WantedAdapter:
    return WantedAdapter(name, source, f"hash of {source}")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "adapters" / "list.json"


def names_in(path: Path) -> list[str]:
    return [each.name for each in AdapterList(path, "").read()]


def is_there(path: Path) -> bool:
    return path.exists()


async def save(path: Path, *kept: KeptAdapter) -> None:
    await AdapterList(path, "this one").save(list(kept))


async def test_what_was_loaded_while_a_server_ran_is_loaded_by_the_next_one(path: Path) -> None:
    first = Server(path)
    assert first.start_engine() == [REQUIRED]
    await first.adapters.load("one", "/one")
    # Whoever was told that it is loaded may kill the server now.
    assert names_in(path) == ["one"]
    await first.adapters.load("two", "/two")
    second = Server(path)
    assert second.start_engine() == [REQUIRED, again("one", "/one"), again("two", "/two")]
    assert [each.name for each in second.adapters.loaded] == ["flagged", "one", "two"]
    await second.adapters.unload("one")
    assert names_in(path) == ["two"]
    await second.adapters.unload("two")
    assert not is_there(path)


async def test_what_cannot_be_loaded_is_not_kept(path: Path) -> None:
    server = Server(path)
    server.start_engine()
    with pytest.raises(Refusal, match="it is bad"):
        await server.adapters.load("bad", "/bad")
    assert not is_there(path)


async def test_what_an_engine_left_out_is_off_the_list(path: Path) -> None:
    await save(path, KeptAdapter("gone", "/gone", "h"), KeptAdapter("one", "/one", "hash of /one"))
    server = Server(path)
    server.start_engine(without=["gone"])
    await server.adapters._saved()
    assert names_in(path) == ["one"]


async def test_a_caller_who_leaves_does_not_keep_a_loaded_adapter_off_the_list(path: Path) -> None:
    server = Server(path)
    server.start_engine()
    loading = asyncio.create_task(server.adapters.load("one", "/one"))
    await asyncio.sleep(0)
    loading.cancel()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert [each.name for each in server.adapters.loaded] == ["flagged", "one"]
    await server.adapters._saved()
    assert names_in(path) == ["one"]


async def test_flags_come_before_the_list(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    await save(path, KeptAdapter("flagged", "/other", "h"), KeptAdapter("one", "/one", "h"))
    server = Server(path)
    assert server.adapters.begin_engine() == [REQUIRED, WantedAdapter("one", "/one", "h")]
    (record,) = caplog.records
    assert record.getMessage() == (
        "adapter 'flagged' is left out: its name is taken; what --lora says comes first"
    )


async def test_no_more_are_loaded_again_than_there_are_places_for(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await save(path, *(KeptAdapter(f"a{number}", "/a", "h") for number in range(4)))
    server = Server(path)
    wanted = [each.name for each in server.adapters.begin_engine()]
    assert wanted == ["flagged", "a0", "a1"]
    assert [record.getMessage() for record in caplog.records] == [
        f"adapter 'a{number}' is left out: there are places for 3; see --max-loras"
        for number in (2, 3)
    ]


@pytest.mark.parametrize(
    ("kept", "why"),
    [
        (KeptAdapter("penstock-toy", "/x", "h"), "the model itself has this name"),
        (KeptAdapter("x\ny", "/x", "h"), "control characters"),
        (KeptAdapter("x", "", "h"), "must be a directory"),
        (KeptAdapter("x", "/x" * 4096, "h"), "must be a directory"),
        (KeptAdapter("x", "/x", ""), "no hash"),
    ],
)
async def test_what_no_adapter_can_be_is_left_out_by_name(
    kept: KeptAdapter, why: str, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await save(path, kept, KeptAdapter("one", "/one", "h"))
    server = Server(path)
    assert [each.name for each in server.adapters.begin_engine()] == ["flagged", "one"]
    (record,) = caplog.records
    assert f"adapter {kept.name!r} is left out" in record.getMessage()
    assert why in record.getMessage()
    assert "\n" not in record.getMessage()


async def test_an_engine_that_is_started_again_loads_what_the_one_before_had(path: Path) -> None:
    server = Server(path)
    server.start_engine()
    await server.adapters.load("one", "/one")
    await server.adapters.unload("flagged")
    await server.adapters.load("flagged", "/other")
    server.adapters.on_engine_death()
    assert server.start_engine() == [again("one", "/one"), again("flagged", "/other")]
    await server.adapters.unload("flagged")
    await server.adapters.load(*FLAG)
    server.adapters.on_engine_death()
    # Of a flag's place the content may be new.
    assert server.start_engine() == [again("one", "/one"), WantedAdapter(*FLAG)]


async def test_no_adapter_of_the_list_keeps_a_shard_from_starting(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await save(path, KeptAdapter("fatal", "/fatal", "h"))
    server = Server(path, replace(CONFIG, max_restarts=3))
    with_it = [REQUIRED, WantedAdapter("fatal", "/fatal", "h")]
    # Engines that die while they load it.
    assert [server.adapters.begin_engine() for _ in range(2)] == [with_it, with_it]
    assert server.start_engine() == [REQUIRED]
    (record,) = caplog.records
    assert record.getMessage() == "adapter fatal is left out: 2 engines failed to start with it"
    await server.adapters._saved()
    assert not is_there(path)


async def test_engines_after_the_first_have_what_was_loaded_however_often_they_fail(
    path: Path,
) -> None:
    server = Server(path, replace(CONFIG, max_restarts=3))
    server.start_engine()
    await server.adapters.load("one", "/one")
    told = [server.adapters.begin_engine() for _ in range(5)]
    assert told == [[WantedAdapter(*FLAG), again("one", "/one")]] * 5
