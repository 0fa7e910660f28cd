"""The `penstock` command as a person uses it."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.processes import Router, Shard, free_port, is_alive, running, wait_until

from penstock_cli.main import run as run_command

TOY = Path(__file__).parents[2] / "shard" / "penstock_shard" / "builtin_model"
PENSTOCK = [sys.executable, "-m", "penstock_cli.main"]


def _run(
    *arguments: str, stdin: str = "", timeout_s: float = 60, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*PENSTOCK, *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env={**os.environ, **(env or {})},
    )


def _loaded(*command: str) -> tuple[set[str], str]:
    """Run Python with this command, and return the modules that it imported, and its stdout."""
    run = subprocess.run(
        [sys.executable, "-X", "importtime", *command], capture_output=True, text=True, timeout=60
    )
    assert run.returncode == 0, run.stderr
    rows = (line.split("|") for line in run.stderr.splitlines() if line.startswith("import time:"))
    return {row[-1].strip() for row in rows}, run.stdout


def test_help_waits_for_no_library_and_names_every_command() -> None:
    """The command takes little longer than the start of Python. The test checks this by the modules
    that it imports.
    """
    loaded, text = _loaded(*PENSTOCK[1:], "--help")
    for command in ("serve", "router", "shard", "chat", "info", "health", "bench", "translate"):
        assert f"\n  {command} " in text
    more = loaded - _loaded("-c", "pass")[0]
    ours = {name for name in more if name.split(".")[0] not in sys.stdlib_module_names}
    assert ours == {"penstock_cli"}
    assert not more & {"asyncio", "argparse", "json", "socket", "ssl", "subprocess"}
    # A command without these modules imports fewer than 50; asyncio alone brings more.
    assert len(more) < 50


@pytest.mark.parametrize("command", ["serve", "chat", "info", "health", "bench"])
def test_every_command_has_its_own_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run_command([command, "--help"])
    assert ended.value.code == 0
    assert f"penstock {command}" in capsys.readouterr().out


def test_a_process_has_its_help_and_imports_nothing_of_the_folder_it_is_started_in(
    tmp_path: Path,
) -> None:
    for name in ("msgspec.py", "grpc.py"):
        (tmp_path / name).write_text("raise SystemExit('the wrong one')")
    # As the installed command: its own path is not the folder.
    command = [sys.executable, "-P", *PENSTOCK[1:]]
    for process in ("router", "shard"):
        run = subprocess.run(
            [*command, process, "--help"], cwd=tmp_path, capture_output=True, text=True, timeout=30
        )
        assert (run.returncode, run.stderr) == (0, "")
        assert f"penstock {process}" in run.stdout


def test_an_unknown_command_is_one_line_and_status_2() -> None:
    for command, meant in (("srve", "; did you mean serve?"), ("xyzzy", "")):
        run = _run(command)
        said = f"penstock: no command {command!r}{meant} (`penstock --help` lists them)\n"
        assert (run.returncode, run.stderr) == (2, said)


@pytest.mark.parametrize(
    ("line", "meant"),
    [
        ("router --shard 127.0.0.1:1", "--shards"),
        ("router --shards 127.0.0.1:1 --polcy round-robin", "--policy"),
        ("shard --kv-memry 2G", "--kv-memory"),
        ("serve --sherds 2", "--shards"),
        ("chat --modle toy", "--model"),
        ("info 127.0.0.1:1 --api-kee k", "--api-key"),
        ("health 127.0.0.1:1 --timout 3", "--timeout"),
        ("bench --request 1", "--requests"),
        ("replay f --shard 127.0.0.1:1", "--shards"),
        ("keys list --fil keys.toml", "--file"),
    ],
)
def test_a_misspelled_flag_of_any_command_is_recognized_in_one_line(line: str, meant: str) -> None:
    run = _run(*line.split())
    assert (run.returncode, run.stdout) == (2, "")
    [said] = run.stderr.splitlines()
    assert f"; did you mean {meant}? (see " in said


def test_info_and_health_of_a_shard(pair) -> None:
    info = _run("info", pair.shard.address)
    assert info.returncode == 0
    assert "penstock-toy" in info.stdout
    assert "KV blocks" in info.stdout
    assert _run("health", pair.shard.address).returncode == 0
    assert _run("health", pair.url).returncode == 0
    assert _run("health", pair.url, "--live").returncode == 0


def test_info_sends_a_shard_the_key_for_shards_and_a_router_the_other(tmp_path: Path) -> None:
    """The two keys are in two variables, as for the router in front of the shards."""
    keys = {"PENSTOCK_SHARD_API_KEY": "of-shards", "PENSTOCK_API_KEY": "of-clients"}
    shard = Shard(tmp_path / "shard", "--api-key", "of-shards")
    flags = ("--shard-api-key", "of-shards", "--api-key", "of-clients")
    router = Router(tmp_path / "router", [shard.address], *flags)
    with running(shard, router):
        for target in (shard.address, router.url):
            run = _run("info", target, env=keys)
            assert (run.returncode, run.stderr) == (0, "")
            assert "penstock-toy" in run.stdout
        run = _run("info", shard.address, env={"PENSTOCK_API_KEY": "of-shards"})
        assert run.returncode == 0, "where both are the same one is enough"
        run = _run("info", shard.address, "--api-key", "of-nobody", env=keys)
        assert "give the right one with --api-key or PENSTOCK_SHARD_API_KEY" in run.stderr
        # The key for shards is never sent to a router.
        del keys["PENSTOCK_API_KEY"]
        assert "missing or wrong API key" in _run("info", router.url, env=keys).stderr


def test_info_of_a_router_says_how_its_model_is_read(pair) -> None:
    info = _run("info", pair.url)
    assert (info.returncode, info.stderr) == (0, "")
    rows = dict(line.split(maxsplit=1) for line in info.stdout.splitlines() if line)
    assert (rows["state"], rows["model"], rows["input"]) == ("serving", "penstock-toy", "text")
    assert rows["tool"] == "calls          plain_json"
    assert rows["reasoning"] == "none"


def test_info_of_no_router_is_one_line_and_status_1() -> None:
    run = _run("info", "http://127.0.0.1:1")
    assert (run.returncode, run.stdout) == (1, "")
    assert run.stderr == (
        "penstock info: no answer from http://127.0.0.1:1: connection refused: start the router, "
        "or correct its address\n"
    )


def test_health_of_a_router_without_a_shard_says_why_and_that_it_lives(tmp_path: Path) -> None:
    router = Router(tmp_path / "router", ["127.0.0.1:1"])
    with contextlib.closing(router):
        wait_until(lambda: router.status("/live") == 200, timeout_s=30, what="it lives")
        run = _run("health", router.url)
        why = "answers 503: not ready: no shard serves yet (1 gone)"
        assert (run.returncode, run.stdout, run.stderr) == (1, f"{router.url}: {why}\n", "")
        run = _run("health", router.url, "--live")
        assert (run.returncode, run.stdout, run.stderr) == (0, f"{router.url}: healthy\n", "")


@pytest.mark.parametrize("target", ["127.0.0.1:1", "http://127.0.0.1:1"])
def test_health_of_nobody_is_one_line_and_status_1(target: str) -> None:
    run = _run("health", target)
    assert run.returncode == 1
    assert run.stdout.startswith(f"{target}: no answer (connection refused: start the ")
    assert run.stdout.endswith(", or correct its address)\n")
    assert run.stderr == ""


def test_info_of_nobody_is_one_line_and_status_1() -> None:
    run = _run("info", "127.0.0.1:1")
    assert run.returncode == 1
    assert run.stderr == (
        "penstock info: shard 127.0.0.1:1: connection refused: start the shard, or correct its "
        "address\n"
    )


def test_chat_answers_in_the_terminal_and_remembers(pair) -> None:
    run = _run("chat", "--url", pair.url, "--max-tokens", "20", stdin="Hello\nAgain\n")
    assert run.returncode == 0
    first, second = run.stdout.split("> ")[1:3]
    assert first.strip()
    assert second.strip()


def test_chat_with_nobody_is_one_line_and_status_1() -> None:
    run = _run("chat", "--url", "http://127.0.0.1:1", stdin="Hello\n")
    assert run.returncode == 1
    assert run.stderr == (
        "penstock chat: no answer from http://127.0.0.1:1: connection refused: start the router, "
        "or correct its address\n"
    )
    assert run.stdout == ""


def test_health_and_chat_of_a_shards_port_as_http_are_one_line_and_status_1(pair) -> None:
    url = f"http://{pair.shard.address}"
    probe = _run("health", url)
    assert (probe.returncode, probe.stdout.count("\n"), probe.stderr) == (1, 1, "")
    talk = _run("chat", "--url", url, stdin="Hello\n")
    assert (talk.returncode, talk.stderr.count("\n")) == (1, 1)
    assert talk.stderr.startswith("penstock chat: ")


def test_bench_measures_a_running_pair(pair) -> None:
    run = _run("bench", "--url", pair.url, "--streams", "4", "--requests", "8",
               "--prompt-words", "20", "--output-tokens", "10", "--json")  # fmt: skip
    assert run.returncode == 0, run.stderr
    summary = json.loads(run.stdout)
    assert (summary["requests"], summary["failed"], summary["output_tokens"]) == (8, 0, 80)
    assert 0 < summary["ttft_ms"]["p50"] <= summary["ttft_ms"]["p99"]
    # Nine steps after the first, of 4 ms each; on a busy machine several come at once.
    assert summary["e2e_ms"]["p50"] >= 36
    assert summary["e2e_ms"]["mean"] > summary["inter_token_ms"]["mean"] > 0


class _Served:
    """`penstock serve --runner fake` with a shard of each model."""

    def __init__(self, log_file: Path, *models: str) -> None:
        self.port, shard_port = free_port(), free_port(in_a_row=max(1, len(models)))
        self._log_file = log_file
        flags = ["--port", str(self.port), "--shard-port", str(shard_port), "--runner", "fake",
                 "--step-ms", "1"]  # fmt: skip
        with log_file.open("wb") as log:
            self.process = subprocess.Popen(
                [*PENSTOCK, "serve", *models, *flags],
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
            )

    @property
    def log(self) -> str:
        return self._log_file.read_text()

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def child(self, module: str) -> psutil.Process:
        return next(child for child in self.children() if module in child.cmdline())

    def answers(self) -> bool:
        body = json.dumps({"prompt": "x", "max_tokens": 2}).encode()
        headers = {"Content-Type": "application/json"}
        url = f"http://127.0.0.1:{self.port}/v1/completions"
        try:
            with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=5):
                return True
        except OSError:
            return False


@contextlib.contextmanager
def _serving(log_file: Path, *models: str) -> Iterator[_Served]:
    served = _Served(log_file, *models)
    try:
        wait_until(
            lambda: "penstock is ready" in served.log, timeout_s=30, what="penstock serve is ready"
        )
        yield served
    finally:
        children = served.children() if served.process.poll() is None else []
        served.process.kill()
        served.process.wait()
        for child in children:
            if is_alive(child):
                child.kill()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[_Served]:
    with _serving(tmp_path_factory.mktemp("served") / "log") as served:
        yield served


def test_serve_prints_a_curl_line_that_works(served: _Served) -> None:
    line = served.log.partition("over HTTP:\n\n")[2].partition("\n\n")[0].replace("\\\n", " ")
    run = subprocess.run(line, shell=True, capture_output=True, text=True, timeout=60)
    assert "data: [DONE]" in run.stdout


def test_serve_first_suggests_a_chat_which_works(served: _Served) -> None:
    line = served.log.partition("another terminal:\n\n")[2].partition("\n")[0]
    command, *arguments = shlex.split(line)
    assert command.endswith("penstock")
    assert arguments == ["chat", "--url", f"http://127.0.0.1:{served.port}"]
    assert _run(*arguments, "--max-tokens", "4", stdin="hello\n").returncode == 0


def test_two_models_are_served_by_one_command_each_under_its_name(tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.symlink_to(TOY)
    with _serving(tmp_path / "log", str(small), f"other={TOY}") as both:
        url = f"http://127.0.0.1:{both.port}"
        assert {model["id"] for model in _models_of(url)} == {"small", "other"}
        lines = both.log.partition("another terminal:\n\n")[2].splitlines()[:2]
        for line, name in zip(lines, ("small", "other"), strict=True):
            chat = shlex.split(line)[1:]
            assert chat[-2:] == ["--model", name]
            run = _run(*chat, "--max-tokens", "4", stdin="hello\n")
            assert (run.returncode, run.stdout.split()[0]) == (0, name)
        shards = [child for child in both.children() if "penstock_shard" in child.cmdline()]
        assert len(shards) == 2


def _models_of(url: str) -> list[dict[str, Any]]:
    with urllib.request.urlopen(f"{url}/v1/models", timeout=5) as response:
        models: list[dict[str, Any]] = json.loads(response.read())["data"]
    return models


@pytest.mark.parametrize("module", ["penstock_router", "penstock_shard"])
def test_serve_restarts_a_child_that_dies(served: _Served, module: str) -> None:
    child = served.child(module)
    child.kill()
    wait_until(lambda: not is_alive(child), timeout_s=30, what="the child is gone")
    wait_until(served.answers, timeout_s=30, what="it answers again")
    assert f"the {module.removeprefix('penstock_')}" in served.log


def test_ctrl_c_ends_all_processes_of_serve(tmp_path: Path) -> None:
    with _serving(tmp_path / "log") as ending:
        children = ending.children()
        assert len(children) >= 3
        ending.process.send_signal(signal.SIGINT)
        assert ending.process.wait(20) == 0
        wait_until(
            lambda: not [child for child in children if is_alive(child)],
            timeout_s=5,
            what="no child is left",
        )


def test_serve_on_a_port_in_use_starts_nothing(served: _Served) -> None:
    run = _run("serve", "--runner", "fake", "--port", str(served.port))
    assert run.returncode == 2
    assert f"127.0.0.1:{served.port}" in run.stderr
    assert run.stderr.count("\n") == 1


def test_serve_of_a_model_that_is_not_there_ends_with_its_reason(tmp_path: Path) -> None:
    flags = ["--port", str(free_port()), "--shard-port", str(free_port())]
    run = _run("serve", str(tmp_path / "nothing"), "--runner", "fake", *flags, timeout_s=60)
    assert run.returncode == 2
    assert run.stderr.count("penstock shard: ") == 1
    assert str(tmp_path / "nothing") in run.stderr
    # Whatever the router logs until it is ended.
    assert run.stderr.splitlines()[-1].endswith("begins `penstock shard:` says why")
    assert "Traceback" not in run.stderr


def test_output_that_nobody_reads_is_no_error_to_tell_of() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    try:
        ended = subprocess.run(
            [*PENSTOCK, "--help"], stdout=write_end, stderr=subprocess.PIPE, check=False
        )
    finally:
        os.close(write_end)
    assert (ended.returncode, ended.stderr) == (1, b"")


# The last one: it ends what others share.
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells children of their parent")
def test_children_of_serve_end_with_it_also_where_it_is_killed(served: _Served) -> None:
    children = served.children()
    assert len(children) >= 3
    served.process.kill()
    try:
        wait_until(
            lambda: not [child for child in children if is_alive(child)],
            timeout_s=20,
            what="no child is left",
        )
    finally:
        for child in children:
            if is_alive(child):
                child.kill()
