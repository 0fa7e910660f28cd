"""Keys with real processes: none is written anywhere, and a file that changes counts for all."""

from __future__ import annotations

import contextlib
import io
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.processes import Router, Service, Shard, free_port, running, wait_until

from penstock_cli.keys import main as keys_command
from penstock_common import key_file_format

# Each is shown, or used, in what follows.
SECRETS = {
    "PENSTOCK_API_KEY": "sk-clients-5ecret",
    "PENSTOCK_ADMIN_KEY": "sk-operator-5ecret",
    "PENSTOCK_SHARD_API_KEY": "sk-shards-5ecret",
    "PENSTOCK_RESUME_KEY": "sk-resume-5ecret",
}
WRONG = "sk-wrong-5ecret"


class KeyedShard(Shard):
    def environment(self, log_file: Path) -> dict[str, str]:
        return {"PENSTOCK_API_KEY": SECRETS["PENSTOCK_SHARD_API_KEY"]}

    def healthy(self) -> bool:
        # The router says when it is; a probe has no key.
        return True


class KeyedRouter(Router):
    def environment(self, log_file: Path) -> dict[str, str]:
        return {**super().environment(log_file), **SECRETS}


def _made(*arguments: str) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert keys_command(["new", *arguments]) == 0
    return printed.getvalue().strip()


def _ask(
    router: Router, path: str, key: str | None = None, body: Any = None, header: str = "Bearer"
) -> tuple[int, str]:
    shown = {}
    if key is not None:
        shown = {"x-api-key": key} if header == "x-api-key" else {"Authorization": f"Bearer {key}"}
    return router.ask(path, body, shown, max_bytes=600 if path == "/console/feed" else None)


def _command_lines(*services: Service) -> str:
    """Return the command lines of the services and of all their children, as `ps` shows them."""
    lines = []
    for service in services:
        parent = psutil.Process(service.process.pid)
        for process in (parent, *parent.children(recursive=True)):
            lines += process.cmdline()
    return "\n".join(lines)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "keys.toml"


@dataclass(frozen=True)
class System:
    """A shard and a router of two workers, with a file of keys in its folder."""

    folder: Path
    shard: KeyedShard
    router: KeyedRouter
    # By name.
    keys: dict[str, str]

    @property
    def file(self) -> Path:
        return self.folder / "keys.toml"


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    folder = tmp_path_factory.mktemp("keys")
    file = folder / "keys.toml"
    made = {
        "alice": _made("alice", "--file", str(file), "--requests-per-minute", "1000"),
        "root": _made("root", "--file", str(file), "--scope", "admin"),
        "old": _made("old", "--file", str(file)),
        "carol": _made("carol", "--file", str(file), "--max-concurrent-requests", "8"),
    }
    keys_command(["revoke", "old", "--file", str(file)])
    audit_key = folder / "audit-key"
    audit_key.write_bytes(b"audit-5ecret-0123456789")
    shard = KeyedShard(folder / "shard")
    flags = ["--api-keys-file", str(file), "--log-level", "debug", "--workers", "2"]
    audit = ["--audit-log", str(folder / "audit"), "--audit-key-file", str(audit_key)]
    router = KeyedRouter(folder / "router", [shard.address], *flags, *audit)
    with running(shard, router):
        yield System(folder, shard, router, made)


def _replace(file: Path, text: str) -> None:
    """Write the file at once, so that no worker reads half of it."""
    written = file.with_suffix(".new")
    written.write_text(text)
    written.replace(file)


def test_a_change_of_the_file_counts_for_all_workers_within_two_seconds(system: System) -> None:
    router, file, carol = system.router, system.file, system.keys["carol"]

    def statuses(key: str) -> set[int]:
        # Each is a connection of its own, to one worker or the other.
        return {_ask(router, "/v1/models", key)[0] for _ in range(12)}

    assert statuses(carol) == {200}
    bob = _made("bob", "--file", str(file))
    assert keys_command(["revoke", "carol", "--file", str(file)]) == 0
    wait_until(lambda: statuses(bob) == {200}, timeout_s=10, what="bob is let in")
    # A worker may have read the file between the two changes.
    wait_until(lambda: statuses(carol) == {401}, timeout_s=10, what="carol is kept out")
    good = file.read_text()
    _replace(file, "[[keys]]\nname = 'x'\n")
    wait_until(
        lambda: router.log.count("key x: hash: must be sha256") == 2,
        timeout_s=10,
        what="both workers say what is wrong",
    )
    assert statuses(bob) == {200}
    # Each says it once, however often it looks.
    time.sleep(1.5)
    assert router.log.count("key x: hash: must be sha256") == 2
    _replace(file, good)


# The last one of the system: it ends its router.
def test_any_worker_tells_what_a_key_used_at_all_of_them_and_one_that_ended_counts_on(
    system: System,
) -> None:
    router, alice, root = system.router, system.keys["alice"], system.keys["root"]

    def used() -> list[dict[str, int]]:
        """Return alice's usage as 12 connections report it. Each worker gets some of them."""
        answers = [json.loads(_ask(router, "/admin/usage", root)[1]) for _ in range(12)]
        rows = [[row for row in each["usage"] if row["key"] == "alice"] for each in answers]
        return [row for each in rows for row in each]

    body = {"prompt": "Hello", "max_tokens": 5, "ignore_eos": True}
    before = max((row["requests"] for row in used()), default=0)

    def has_all(count: int) -> bool:
        rows = used()
        wanted = {(before + count, 5 * (before + count))}
        return {(row["requests"], row["completion_tokens"]) for row in rows} == wanted

    for _ in range(20):
        assert _ask(router, "/v1/completions", alice, body)[0] == 200
    wait_until(lambda: has_all(20), timeout_s=10, what="all workers tell of all requests")
    worker = psutil.Process(router.process.pid).children()[-1]
    worker.kill()
    wait_until(
        lambda: "listening on" in router.log.partition("ended with status")[2],
        timeout_s=30,
        what="the worker was started again",
    )
    for _ in range(20):
        assert _ask(router, "/v1/completions", alice, body)[0] == 200
    wait_until(lambda: has_all(40), timeout_s=10, what="what was used before counts too")


def test_no_key_is_written_to_a_log_a_metric_a_page_or_a_list_of_processes(system: System) -> None:
    shard, router, made = system.shard, system.router, system.keys.values()
    said = _everything_that_can_be_asked(router, [*made, *SECRETS.values(), WRONG])
    said += _command_lines(router, shard)
    assert router.terminate() == 0
    said += router.log + shard.log
    said += "".join(path.read_text() for path in system.folder.glob("audit-worker*"))
    for secret in (*made, WRONG, "5ecret", *SECRETS.values()):
        assert secret not in said
    digests = [entry.digest.hex() for entry in key_file_format.read(str(system.file))]
    assert digests
    assert not any(digest in said for digest in digests)
    # It did look, and names are shown.
    assert "alice" in router.log
    assert "DEBUG" in router.log.upper()


def _everything_that_can_be_asked(router: Router, keys: list[str]) -> str:
    chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3}
    text = {"prompt": "x", "max_tokens": 3, "stream": True}
    said, statuses = "", set()
    for key in keys:
        for path, body in (
            ("/v1/completions", text),
            ("/v1/chat/completions", chat),
            ("/v1/messages", {**chat, "model": "builtin"}),
            ("/generate", {"inputs": "x", "parameters": {"max_new_tokens": 2}}),
            ("/v1/completions", {"prompt": "x", "max_tokens": -2}),
            ("/v1/completions", b"["),
            ("/v1/nothing", None),
            ("/admin/shards", None),
            ("/console/feed", None),
            ("/v1/models", None),
        ):
            for header in ("Bearer", "x-api-key"):
                status, answer = _ask(router, path, key, body, header)
                statuses.add(status)
                said += answer
    for path in ("/metrics", "/info", "/openapi.json", "/docs", "/", "/load", "/ready"):
        said += _ask(router, path)[1]
    assert {200, 400, 401, 403, 404} <= statuses
    return said


@pytest.mark.parametrize(
    ("content", "flags", "words"),
    [
        (None, [], "No such file"),
        ("[[keys]\n", [], "not TOML: .*line 1"),
        ("[[keys]]\nname = 'a'\nhash = 'psk-oops'\n", [], "key a: hash: must be sha256:"),
        (
            "[[keys]]\nname = 'a'\nhash = 'sha256:" + "0" * 64 + "'\nrequests_per_minute = 2\n",
            ["--workers", "3"],
            "key a: requests_per_minute: 2 is below --workers 3",
        ),
    ],
)
def test_a_start_with_a_broken_file_is_one_line_and_status_2(
    file: Path, content: str | None, flags: list[str], words: str
) -> None:
    if content is not None:
        file.write_text(content)
    address = f"127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "penstock_router", "--shards", address, "--port", "0"]
    ended = subprocess.run(
        [*command, "--api-keys-file", str(file), *flags],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 2
    [line] = ended.stderr.splitlines()
    assert re.match(rf"penstock router: --api-keys-file {re.escape(str(file))}: {words}", line)
    assert "psk-oops" not in line
