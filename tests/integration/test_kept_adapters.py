"""Adapters that were loaded over HTTP are there again when a shard's process is started again."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from integration.images import ROOT, image
from integration.manifests import read_compose
from support.adapters import make_adapter
from support.processes import Router, Shard, free_port, running, wait_until

from penstock_client import GenerationRequest, SamplingParams, SyncShardClient
from penstock_shard.device.cache_directory import state_directory

FLAGS = ("--served-model-name", "base", "--step-ms", "3", "--enable-lora", "--max-loras", "3")
ADMIN = {"Authorization": "Bearer root"}


class Site:
    """A router, and a shard behind it that is killed and started again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._port = free_port()
        self._starts = 0
        self.shard = self.start()
        self.router = Router(folder / "router", [self.shard.address], "--admin-key", "root")

    def start(self, *flags: str, model: str = "penstock-toy") -> Shard:
        """The shard's next process, which has a log of its own."""
        self._starts += 1
        log = self.folder / f"shard{self._starts}"
        named = () if model == "penstock-toy" else ("--model", model, "--runner", "fake")
        self.shard = Shard(log, *FLAGS, *named, *flags, port=self._port)
        return self.shard

    def kill(self) -> None:
        """SIGKILL; its engine ends by itself."""
        os.kill(self.shard.process.pid, signal.SIGKILL)
        self.shard.close()

    def restart(self, *flags: str, model: str = "penstock-toy") -> None:
        self.kill()
        self.start(*flags, model=model).wait_healthy()

    def change(self, what: str, name: str, path: Path | None = None) -> None:
        body = {"lora_name": name} | ({} if path is None else {"lora_path": str(path)})
        status, text = self.router.ask(f"/v1/{what}_lora_adapter", body, ADMIN)
        assert status == 200, text

    def stream(self, model: str) -> tuple[int, list[Any]]:
        """The status, and the texts of the stream's events."""
        body = {"model": model, "prompt": "Hello", "max_tokens": 12, "seed": 1, "stream": True}
        status, text = self.router.ask("/v1/completions", body, ADMIN)
        lines = [line.removeprefix("data: ") for line in text.splitlines() if line]
        events = [json.loads(line) for line in lines if line.startswith("{")]
        return status, [event["choices"][0]["text"] for event in events if event.get("choices")]

    def text(self, model: str) -> str:
        """Wait until the router knows the shard's new engine and the adapter, and return the text
        of a stream.
        """
        wait_until(lambda: self.stream(model)[0] == 200, timeout_s=30, what=f"streams of {model}")
        return "".join(self.stream(model)[1])

    @property
    def adapters(self) -> list[str]:
        with SyncShardClient(self.shard.address) as client:
            return list(client.info().adapters)

    @property
    def lists(self) -> list[Path]:
        return list((self.folder / "state" / "adapters").glob("*"))


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path)
    with contextlib.ExitStack() as ends:
        ends.callback(lambda: made.shard.close())
        with running(made.shard, made.router):
            yield made


@pytest.fixture
def adapters(tmp_path: Path) -> Path:
    """Directories `one`, `two`, `three`."""
    for seed, name in enumerate(("one", "two", "three")):
        make_adapter(tmp_path / "adapters" / name, seed=seed)
    return tmp_path / "adapters"


def test_streams_of_an_adapter_are_the_same_after_the_shard_was_killed(
    site: Site, adapters: Path
) -> None:
    site.change("load", "sql", adapters / "one")
    site.change("load", "chat", adapters / "two")
    site.change("load", "brief", adapters / "three")
    site.change("unload", "brief")
    before = {name: site.text(name) for name in ("base", "sql", "chat")}
    assert len(set(before.values())) == 3
    with SyncShardClient(site.shard.address) as client:
        known = client.info().adapters
    site.restart()
    assert {name: site.text(name) for name in before} == before
    assert site.stream("brief")[0] == 404
    assert "adapter sql was loaded before this start, and is again" in site.shard.log
    with SyncShardClient(site.shard.address) as client:
        # Failover and the prefix cache know them by their hashes.
        assert client.info().adapters == known
    # Those that came from the list are unloaded as others are.
    site.change("unload", "sql")
    site.restart()
    assert site.text("chat") == before["chat"]
    assert site.adapters == ["chat"]


@pytest.mark.skipif(not importlib.util.find_spec("torch"), reason="torch is not installed")
def test_a_models_tokens_with_an_adapter_are_the_same_after_the_shard_was_killed(
    tmp_path: Path,
) -> None:
    queries = {f"model.layers.{layer}.self_attn.q_proj": (256, 256) for layer in (0, 1)}
    path = make_adapter(tmp_path / "sql", queries)
    memory = ("--kv-memory", "32M", "--max-model-len", "512", "--threads", "1")
    flags = ("--runner", "model", "--device", "cpu", *memory, "--enable-lora")

    def tokens(client: SyncShardClient, adapter: str) -> list[int]:
        sampling = SamplingParams(seed=1)
        request = GenerationRequest([5, 6, 7], sampling, max_tokens=16, adapter=adapter)
        return [i for output in client.generate(request) for i in output.token_ids]

    first = Shard(tmp_path / "first", *flags)
    with running(first), SyncShardClient(first.address) as client:
        client.load_adapter("sql", str(path))
        before = [tokens(client, name) for name in ("", "sql")]
        os.kill(first.process.pid, signal.SIGKILL)
    assert before[0] != before[1]
    port = int(first.address.partition(":")[2])
    second = Shard(tmp_path / "second", *flags, port=port)
    with running(second), SyncShardClient(second.address) as client:
        assert [tokens(client, name) for name in ("", "sql")] == before


def test_an_adapter_whose_files_are_gone_or_others_is_left_out_with_a_line(
    site: Site, adapters: Path
) -> None:
    for name in ("one", "two", "three"):
        site.change("load", name, adapters / name)
    expected = site.text("three")
    site.kill()
    shutil.rmtree(adapters / "one")
    make_adapter(adapters / "two", seed=9)
    site.start().wait_healthy()
    assert site.text("three") == expected
    assert site.adapters == ["three"]
    for name, why in (("one", "there is no such directory"), ("two", "its files were changed")):
        (line,) = [
            line for line in site.shard.log.splitlines() if f"adapter {name} is left out" in line
        ]
        assert f"{adapters / name}: " in line
        assert why in line


def test_without_the_list_a_shard_starts_with_the_adapters_of_its_flags(
    site: Site, adapters: Path
) -> None:
    site.restart("--no-keep-loras")
    site.text("base")
    site.change("load", "sql", adapters / "one")
    assert site.adapters == ["sql"]
    assert site.lists == []
    site.restart()
    assert site.adapters == []
    site.text("base")
    site.change("load", "sql", adapters / "one")
    assert len(site.lists) == 1
    site.restart("--no-keep-loras")
    assert site.adapters == []
    # Flags come first.
    site.restart("--lora", f"sql={adapters / 'two'}")
    with SyncShardClient(site.shard.address) as client:
        assert client.info().adapters["sql"].source == str(adapters / "two")
    assert "adapter 'sql' is left out: its name is taken" in site.shard.log


def test_a_shard_of_another_model_or_port_does_not_take_the_list(
    site: Site, adapters: Path, tmp_path: Path
) -> None:
    site.change("load", "sql", adapters / "one")
    beside = Shard(tmp_path / "beside", *FLAGS)
    with running(beside), SyncShardClient(beside.address) as client:
        assert client.info().adapters == {}
    builtin = ROOT / "shard" / "penstock_shard" / "builtin_model"
    other = shutil.copytree(builtin, tmp_path / "other")
    site.restart(model=str(other))
    assert site.adapters == []
    site.restart()
    assert site.adapters == ["sql"]


def test_a_damaged_list_is_a_line_in_the_log_of_a_shard_that_serves(
    site: Site, adapters: Path
) -> None:
    site.change("load", "sql", adapters / "one")
    (kept,) = site.lists
    kept.write_bytes(kept.read_bytes()[:-9])
    site.restart()
    (line,) = [line for line in site.shard.log.splitlines() if str(kept) in line]
    assert "is damaged" in line
    assert site.adapters == []
    site.text("base")
    site.change("load", "sql", adapters / "one")
    site.restart()
    assert site.adapters == ["sql"]


CACHE = "/var/cache/penstock"


@pytest.mark.parametrize("target", ["shard-cpu", "shard-cuda"])
def test_in_the_images_of_shards_lists_are_on_the_volume_of_the_cache(
    target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PENSTOCK_STATE", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in image(target).env.items():
        monkeypatch.setenv(name, value)
    assert state_directory().is_relative_to(CACHE)
    profile = "cpu" if target == "shard-cpu" else "gpu"
    services = read_compose(ROOT / "deploy" / "compose.yaml", {}, profile)
    del services["router"]
    for service in services.values():
        assert CACHE in [volume.split(":")[1] for volume in service["volumes"]]


def test_a_shard_that_ends_by_sigterm_has_its_adapters_again_too(
    site: Site, adapters: Path
) -> None:
    site.change("load", "sql", adapters / "one")
    before = site.text("sql")
    assert site.shard.terminate() == 0
    site.start().wait_healthy()
    assert site.text("sql") == before
