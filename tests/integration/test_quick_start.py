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
BLOCKS = re.findall(
    r"^```(?:sh|python)\n(.*?)^```",
    (ROOT / "docs/quick-start.md").read_text(),
    re.DOTALL | re.MULTILINE,
)
TIMEOUT_S = 60.0
BREAK = "kill -9 $(pgrep -f penstock_shard.engine_main | head -1)"


def block(words: str) -> str:
    """The one that has these words."""
    (found,) = (block for block in BLOCKS if words in block)
    return str(found)


@dataclass(frozen=True)
class Served:
    """What `make serve` with two shards started."""

    process: subprocess.Popen[bytes]
    port: int

    def engines(self) -> list[int]:
        children = psutil.Process(self.process.pid).children(recursive=True)
        return [child.pid for child in children if "penstock_shard.engine_main" in child.cmdline()]

    def run(self, code: str, folder: Path) -> str:
        """A block of the shell, to its end; what it printed."""
        code = code.replace("127.0.0.1:8000", f"127.0.0.1:{self.port}")
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        ended = subprocess.run(
            ["bash", "-ec", code],
            cwd=folder,
            env={**os.environ, "PATH": path},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        assert ended.returncode == 0, f"{ended.stdout}\n{ended.stderr}"
        return ended.stdout


def made_by(target: str) -> list[str]:
    """The arguments of `penstock` in what make would run, its environment being there already."""
    recipe = subprocess.run(
        ["make", "-n", *shlex.split(target)[1:]],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    (line,) = (line for line in recipe.stdout.splitlines() if "bin/penstock serve" in line)
    return shlex.split(line)[1:]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    log_file = tmp_path_factory.mktemp("serve") / "log"
    port, shard_port = free_port(), free_port(in_a_row=2)
    arguments = made_by(block("--shards 2"))
    arguments[arguments.index("8000")] = str(port)
    arguments += ["--shard-port", str(shard_port), "--step-ms", "10"]
    with log_file.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "penstock_client.cli", *arguments],
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
    try:

        def is_ready() -> bool:
            assert process.poll() is None, log_file.read_text()[-2000:]
            return "Try:" in log_file.read_text()

        wait_until(is_ready, timeout_s=TIMEOUT_S, what="penstock serve is ready")
        yield Served(process, port)
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(20)


def test_every_block_is_tried_here_or_is_named() -> None:
    tried = ["/v1/models", "curl -N", "import OpenAI", "--shards 2", BREAK, "answers, {len"]
    tried += ["helm template", "helm_python", "make serve FAKE=1\n"]
    by_hand = ["make serve\n", "penstock chat"]
    named = [block for block in BLOCKS if any(words in block for words in tried + by_hand)]
    assert named == BLOCKS


def test_make_serves_the_fake_runner() -> None:
    (found,) = (block for block in BLOCKS if block == "make serve FAKE=1\n")
    assert made_by(found) == ["serve", "--port", "8000", "--runner", "fake"]


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
    code = block(BREAK)
    before = served.engines()
    assert len(before) == 2
    # The engine of a shard of this test, and of nobody else on this machine.
    served.run(code.replace(BREAK, f"kill -9 {before[0]}"), tmp_path)
    assert served.run(block("answers, {len"), tmp_path) == "4 answers, 1 text\n"
    metrics = served.run("curl -s http://127.0.0.1:8000/metrics", tmp_path)
    assert 'event="continued"' in metrics
    wait_until(lambda: len(served.engines()) == 2, timeout_s=20, what="the engine is back")
    assert before[0] not in served.engines()


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
