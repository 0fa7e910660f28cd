"""The file by which a shard's next process has the adapters that were loaded while it ran."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path

import pytest

from penstock_shard.config import ShardConfig
from penstock_shard.server import adapter_list
from penstock_shard.server.adapter_list import AdapterList, KeptAdapter, open_adapter_list

SQL = KeptAdapter("sql", "/adapters/sql", "a hash")
CHAT = KeptAdapter("chat", "org/chat", "another")
CONFIG = ShardConfig(model="org/model", port=20051, enable_lora=True)


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "state"
    monkeypatch.setenv("PENSTOCK_STATE", str(path))
    return path


def _list(**flags: object) -> AdapterList:
    found = open_adapter_list(ShardConfig(**{"model": "org/model", "enable_lora": True, **flags}))  # type: ignore[arg-type]
    assert found is not None
    return found


async def _saved(kept: AdapterList, *adapters: KeptAdapter) -> None:
    await kept.save(list(adapters))


async def _save(*adapters: KeptAdapter, **flags: object) -> Path:
    kept = _list(**flags)
    await _saved(kept, *adapters)
    return kept.path


async def test_the_next_process_has_what_the_last_one_saved() -> None:
    kept = _list()
    assert kept.read() == []
    await asyncio.gather(kept.save([SQL]), kept.save([SQL, CHAT]))
    assert _list().read() == [SQL, CHAT]
    assert [path.name for path in kept.path.parent.iterdir()] == [kept.path.name]
    assert kept.path.stat().st_mode & 0o777 == 0o600
    assert kept.path.parent.stat().st_mode & 0o777 == 0o700


async def test_a_list_without_adapters_is_no_file() -> None:
    kept = _list()
    await kept.save([SQL])
    await kept.save([])
    assert not kept.path.exists()
    assert _list().read() == []


def test_a_shard_that_keeps_nothing_makes_no_directory(state: Path) -> None:
    kept = _list()
    kept.read()
    asyncio.run(_saved(kept))
    assert not state.exists()


@pytest.mark.parametrize(
    "flags",
    [
        {"model": "org/other"},
        {"model": None},
        {"port": 20052},
        {"host": "0.0.0.0"},
        {"revision": "main"},
    ],
    ids=str,
)
async def test_another_shard_does_not_find_the_list(flags: dict[str, object]) -> None:
    await _save(SQL)
    assert _list(**flags).read() == []


async def test_a_shard_on_another_host_does_not_find_the_list(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    await _save(SQL)
    monkeypatch.setattr(socket, "gethostname", lambda: "another")
    assert _list().read() == []


async def test_a_model_is_the_same_by_whatever_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    await _save(SQL, model="model")
    assert _list(model=str(tmp_path / "model")).read() == [SQL]


@pytest.mark.parametrize(
    "flags", [{"enable_lora": False}, {"keep_loras": False}, {"port": 0}], ids=str
)
async def test_no_list_is_kept(flags: dict[str, object]) -> None:
    asked = {"model": "org/model", "enable_lora": True, **flags}
    assert open_adapter_list(ShardConfig(**asked)) is None  # type: ignore[arg-type]


def test_a_user_without_a_home_is_told_where_to_name_a_directory(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("PENSTOCK_STATE")
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    assert open_adapter_list(CONFIG) is None
    assert [record.getMessage() for record in caplog.records] == [
        "the next start will not know which adapters are loaded: this user has no home directory; "
        "set PENSTOCK_STATE"
    ]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"null",
        b"\xff",
        b"[" * 10_000,
        b'{"shard": "x", "adapters": [{"name": "sql"}]}',
        b'{"shard": "x", "adapters": [{"name": 1, "source": "x", "content_hash": "x"}]}',
        b'{"shard": "x", "adapters": [' + b" " * 16 * 2**20 + b"]}",
    ],
    ids=["empty", "cut", "null", "binary", "deep", "incomplete", "of numbers", "large"],
)
async def test_a_damaged_list_is_a_line_in_the_log_and_is_replaced(
    content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    path = await _save(SQL)
    path.write_bytes(content)
    kept = _list()
    assert kept.read() == []
    (record,) = caplog.records
    assert f"adapters of before are not loaded: {path}: is damaged" in record.getMessage()
    assert "\n" not in record.getMessage()
    await kept.save([])
    assert not path.exists()
    assert len(caplog.records) == 1


async def test_what_is_no_file_is_not_read(caplog: pytest.LogCaptureFixture) -> None:
    path = await _save(SQL)
    path.unlink()
    os.mkfifo(path, 0o600)
    assert _list().read() == []
    (record,) = caplog.records
    assert record.getMessage().endswith(f"{path}: is damaged: no regular file")


@pytest.mark.parametrize("what", ["file", "directory"])
async def test_what_others_may_write_to_is_neither_read_nor_replaced(
    what: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = await _save(SQL)
    open_to_all = path if what == "file" else path.parent
    open_to_all.chmod(0o777)
    kept = _list()
    assert kept.read() == []
    await kept.save([CHAT])
    await kept.save([])
    for record in caplog.records:
        assert f"{open_to_all} has mode 777" in record.getMessage()
    assert len(caplog.records) == 3
    open_to_all.chmod(0o700)
    assert _list().read() == [SQL]


@pytest.mark.skipif(os.getuid() != 0, reason="only root gives files away")
async def test_a_list_of_another_user_is_not_read(caplog: pytest.LogCaptureFixture) -> None:
    path = await _save(SQL)
    os.chown(path, 12345, -1)
    assert _list().read() == []
    (record,) = caplog.records
    assert record.getMessage().endswith(f"{path} belongs to user 12345; it must be root's or ours")


async def test_no_link_is_followed_to_where_a_list_is_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    precious = tmp_path / "precious"
    precious.write_text("precious")
    path = await _save(SQL)
    path.with_suffix(".part").symlink_to(precious)
    await _save(CHAT)
    assert (precious.read_text(), len(caplog.records)) == ("precious", 1)


def test_a_list_that_cannot_be_written_is_a_line_and_the_next_one_is_tried(
    state: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state.write_text("a file")
    kept = _list()
    assert kept.read() == []
    asyncio.run(_saved(kept, SQL))
    (record,) = caplog.records
    assert "the next start will not know which adapters are loaded" in record.getMessage()
    assert str(state) in record.getMessage()
    state.unlink()
    asyncio.run(_saved(kept, SQL))
    assert _list().read() == [SQL]


async def test_lists_of_one_directory_are_bounded_and_those_in_use_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(adapter_list, "_MOST_LISTS", 3)
    for port in (1, 2, 3):
        path = await _save(SQL, port=port)
        os.utime(path, (port, port))
    # One that a shard starts with is in use.
    assert _list(port=1).read() == [SQL]
    await _save(SQL, port=4)
    assert [bool(_list(port=port).read()) for port in (1, 2, 3, 4)] == [True, False, True, True]
