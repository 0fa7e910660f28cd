"""The quick start's own commands, run as they stand.

Left out: what downloads (make's environments, pip) and the `helm` command, whose engine renders the
chart here from the same values. `make serve` is asked what it would run, and that is run.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import yaml
from integration.manifests import render
from support.processes import free_port, wait_until

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/quick-start.md").read_text()
BLOCKS = re.findall(r"^```(?:sh|python)\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
TIMEOUT_S = 60.0
SHOWN = next(iter(re.findall(r"^```text\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)))
# Elsewhere no build has a name of its own.
ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="CPU=1 asks for the usual build")
BREAK = "shard=$(pgrep -f 'penstock_shard --port 6000( |$)')"
CHECK = "answers, {len"


def block(words: str) -> str:
    """The one that has these words."""
    (found,) = (block for block in BLOCKS if words in block)
    return str(found)


@dataclass(frozen=True)
class Served:
    """A running `make serve` with two shards."""

    process: subprocess.Popen[bytes]
    port: int
    shard_port: int
    log_file: Path

    def engines(self) -> dict[int, int]:
        """Return the process id of each shard's engine, by the shard's port."""
        found = {}
        for child in psutil.Process(self.process.pid).children(recursive=True):
            if "penstock_shard.engine.main" in child.cmdline():
                flags = psutil.Process(child.ppid()).cmdline()
                found[int(flags[flags.index("--port") + 1])] = child.pid
        return found

    def run(self, code: str, folder: Path) -> str:
        """Run a block of shell commands, which must succeed, and return its stdout."""
        ended = self.tried(code, folder)
        assert ended.returncode == 0, f"{ended.stdout}\n{ended.stderr}"
        return ended.stdout

    def tried(self, code: str, folder: Path) -> subprocess.CompletedProcess[str]:
        """Run a block of shell commands, which may fail, and return its outcome."""
        code = code.replace("127.0.0.1:8000", f"127.0.0.1:{self.port}")
        code = code.replace("--port 6000", f"--port {self.shard_port}")
        # The commands are in a file: pgrep would find its pattern in the shell's command line.
        script = folder / "script.sh"
        script.write_text(code)
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        return subprocess.run(
            ["bash", "-e", str(script)],
            cwd=folder,
            env={**os.environ, "PATH": path},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )


def made_by(target: str) -> list[str]:
    """The arguments of `penstock` in what make would run, its environment being there already."""
    recipe = subprocess.run(
        ["make", "-n", *shlex.split(target)[1:]],
        cwd=ROOT,
        env=_environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    (line,) = (line for line in recipe.stdout.splitlines() if "bin/penstock serve" in line)
    return shlex.split(line)[1:]


def commands_that_print(venv: Path) -> None:
    """Stand-ins for what is in an environment."""
    (venv / "bin").mkdir()
    for name in ("python", "penstock"):
        (venv / "bin" / name).write_text(f'#!/bin/sh\necho {name} "$@"\n')
        (venv / "bin" / name).chmod(0o755)


def made_in(venv: Path, *target: str) -> list[str]:
    """Return the lines that `make serve` prints with this environment."""
    command = ["make", "serve", f"VENV={venv}", *target]
    made = subprocess.run(
        command, cwd=ROOT, env=_environment(), capture_output=True, text=True, check=True
    )
    return made.stdout.splitlines()


def _environment() -> dict[str, str]:
    """Return the environment without the variables that it inherits from a make that runs the
    tests.
    """
    of_make = ("MAKE", "MFLAGS", "ARGS", "CPU", "FAKE", "MODEL", "PORT", "TORCH")
    return {name: value for name, value in os.environ.items() if not name.startswith(of_make)}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    log_file = tmp_path_factory.mktemp("serve") / "log"
    port, shard_port = free_port(), free_port(in_a_row=2)
    arguments = made_by(block("--shards 2"))
    arguments[arguments.index("8000")] = str(port)
    arguments[arguments.index("6000")] = str(shard_port)
    arguments += ["--step-ms", "10", "--", "--log-format", "text"]
    with log_file.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "penstock_cli.main", *arguments],
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
    try:

        def is_ready() -> bool:
            assert process.poll() is None, log_file.read_text()[-2000:]
            return "penstock is ready" in log_file.read_text()

        wait_until(is_ready, timeout_s=TIMEOUT_S, what="penstock serve is ready")
        yield Served(process, port, shard_port, log_file)
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(20)


def test_every_block_is_tried_here_or_is_named() -> None:
    tried = ["/v1/models", "curl -N", "import OpenAI", "--shards 2", BREAK, CHECK]
    tried += ["helm template", "helm_python", "make serve FAKE=1\n"]
    by_hand = ["make serve\n", "penstock chat"]
    named = [block for block in BLOCKS if any(words in block for words in tried + by_hand)]
    assert named == BLOCKS


@pytest.mark.parametrize(
    ("target", "there", "installs"),
    [
        (["FAKE=1"], [], True),
        (["FAKE=1"], [".shard", ".torch"], False),
        (["FAKE=1"], [".dev", ".torch"], False),
        ([], [".dev", ".torch"], False),
        ([], [".fake", ".torch"], True),
        ([], [".torch", ".shard"], False),
    ],
)
def test_make_says_that_it_installs_only_where_it_does(
    target: list[str], there: list[str], installs: bool, tmp_path: Path
) -> None:
    commands_that_print(tmp_path)
    # Whatever the clock of the checkout: an older one is an older environment.
    later_s = time.time() + 60
    for marker in there:
        (tmp_path / marker).touch()
        os.utime(tmp_path / marker, (later_s, later_s))
    *before, served = made_in(tmp_path, *target)
    assert served.startswith("penstock serve ")
    assert [line.split()[0] for line in before] == (["Installing", "python"] if installs else [])


@pytest.mark.parametrize(
    ("installed", "asked", "installs"),
    [
        ("torch==2.13.0", [], False),
        ("torch==2.13.0+cpu", [], False),
        ("torch==2.13.0+cpu", ["TORCH=torch==2.13.0+cpu"], False),
        ("torch==2.13.0", ["TORCH=torch==2.13.0+cpu"], True),
        pytest.param("torch==2.13.0", ["CPU=1"], True, marks=ON_LINUX),
        pytest.param("torch==2.13.0+cpu", ["CPU=1"], False, marks=ON_LINUX),
    ],
)
def test_a_torch_that_is_asked_for_replaces_another(
    installed: str, asked: list[str], installs: bool, tmp_path: Path
) -> None:
    commands_that_print(tmp_path)
    for marker, text in ((".torch", installed), (".shard", "")):
        (tmp_path / marker).write_text(f"{text}\n")
    later_s = time.time() + 60
    for seconds, marker in enumerate((".torch", ".shard")):
        os.utime(tmp_path / marker, (later_s + seconds, later_s + seconds))
    *before, _ = made_in(tmp_path, *asked)
    said = [line for line in before if line.startswith("Installing torch")]
    build = "torch==2.13.0+cpu"
    download = f"Installing {build} into {tmp_path}: about 200 MB to download."
    assert said == ([download] if installs else [])
    if installs:
        # The next time it is there.
        assert (tmp_path / ".torch").read_text() == f"{build}\n"
        assert not [line for line in made_in(tmp_path, *asked) if line.startswith("Installing t")]


def test_make_serves_the_fake_runner() -> None:
    (found,) = (block for block in BLOCKS if block == "make serve FAKE=1\n")
    assert made_by(found) == ["serve", "--port", "8000", "--runner", "fake"]


def test_make_serves_several_models() -> None:
    given = "make serve FAKE=1 MODEL='org/one ./another' ARGS='--step-ms 1'"
    served = ["serve", "org/one", "./another", "--port", "8000", "--runner", "fake"]
    assert made_by(given) == [*served, "--step-ms", "1"]


def test_models_are_listed(served, tmp_path) -> None:
    assert "penstock-toy" in served.run(block("/v1/models"), tmp_path)


def test_a_chat_is_streamed_by_curl(served, tmp_path) -> None:
    printed = served.run(block("curl -N"), tmp_path)
    assert printed.count("data: {") > 20
    assert printed.endswith("data: [DONE]\n\n")


def test_the_openai_client_streams(served, tmp_path) -> None:
    code = block("import OpenAI")
    printed = served.run(f"{sys.executable} - <<'END'\n{code}END", tmp_path)
    assert len(printed) > 20


def test_a_page_is_there_for_a_browser(served) -> None:
    with urllib.request.urlopen(f"http://127.0.0.1:{served.port}/docs", timeout=5) as page:
        assert page.headers.get_content_type() == "text/html"


def test_answers_outlive_the_shard_that_is_broken(served, tmp_path) -> None:
    before = served.engines()
    first, second = served.shard_port, served.shard_port + 1
    assert set(before) == {first, second}
    printed = served.run(block(BREAK) + block(CHECK), tmp_path)
    assert re.sub(r"^[1-4] continued", "2 continued", printed, flags=re.MULTILINE) == SHOWN
    assert f" shard 127.0.0.1:{second} after engine_died request " in served.log_file.read_text()
    # Nothing is left in the folder from which the blocks are run.
    assert [path.name for path in tmp_path.iterdir()] == ["script.sh"]
    wait_until(lambda: len(served.engines()) == 2, timeout_s=20, what="the engine is back")
    # Of all engines on this machine it was that of the shard on the first port.
    after = served.engines()
    assert after[first] != before[first]
    assert after[second] == before[second]


def test_the_check_fails_where_nothing_was_broken(served, tmp_path) -> None:
    """The check also fails if the router has continued answers before, as here."""
    code = block(BREAK) + block(CHECK)
    nobodys = free_port()
    ended = served.tried(code.replace("--port 6000", f"--port {nobodys}"), tmp_path)
    assert ended.returncode == 1
    assert ended.stdout == "no shard on port 6000\n4 answers, 1 text\n"
    assert ended.stderr == (
        "no answer continued on another shard: nothing was killed while they ran\n"
    )


def test_the_check_fails_where_nobody_answers(served, tmp_path) -> None:
    nobodys = f"127.0.0.1:{free_port()}"
    code = (block(BREAK) + block(CHECK)).replace("127.0.0.1:8000", nobodys)
    ended = served.tried(code.replace("--port 6000", f"--port {free_port()}"), tmp_path)
    assert ended.returncode == 1
    assert "text" not in ended.stdout
    assert "Failed to connect" in ended.stderr
    assert "FileNotFoundError" in ended.stderr


def test_the_chart_renders_with_the_values_that_are_shown(served, tmp_path) -> None:
    *_, assignments = shlex.split(block("helm template"))
    assert assignments == "models[0].name=qwen,models[0].model=Qwen/Qwen3-0.6B"
    values = {"models": [{"name": "qwen", "model": "Qwen/Qwen3-0.6B"}]}
    code = "\n".join(block("helm_python").splitlines()[1:]).replace("deploy/", f"{ROOT}/deploy/")
    printed = served.run(code, tmp_path)
    shown = [part for part in yaml.safe_load_all(printed) if isinstance(part, dict)]
    rendered = {(part["kind"], part["metadata"]["name"]) for part in render(values, "demo")}
    assert {(part["kind"], part["metadata"]["name"]) for part in shown} == rendered
    assert "Qwen/Qwen3-0.6B" in printed
