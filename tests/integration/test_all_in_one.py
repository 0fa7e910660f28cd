"""The image that takes TGI's and vLLM's place: its entry point, as a process of this machine, with
the flags, variables and folders of theirs.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from clients.environments import observe
from integration.images import image
from support.budget import budget
from support.processes import free_port, is_alive, wait_until

pytest.importorskip("torch")

ROOT = Path(__file__).parents[2]
TOY = ROOT / "shard" / "penstock_shard" / "builtin_model"
# Which of them computes is nothing to the flags and the routes.
RUNNER = ("fake", "model")[budget(0, 1)]


class Started:
    """A process like the one that `docker run IMAGE FLAGS` would start."""

    def __init__(self, target: str, folder: Path, *flags: str, **variables: str) -> None:
        made = image(target)
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log_file = folder / "log"
        home = made.env["HF_HOME"]
        words = list(made.entrypoint)
        assert words[:2] == ["penstock", "translate"]
        # The interpreter here is this user's alone; leaving root has a test of its own.
        place = words.index("--drop-root")
        assert words[place + 1] == home
        del words[place : place + 2]
        # Tests run side by side on one machine.
        added = ["--shard-port", str(free_port()), "--runner", RUNNER]
        words[words.index("--") : words.index("--")] = added
        path = os.environ["PATH"]
        environment = {**os.environ, **made.env, "PATH": path, "HF_HOME": f"{folder}{home}"}
        with self.log_file.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "penstock_cli.main", *words[1:], *flags],
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                cwd=folder,
                env={**environment, **variables, "PORT": str(self.port), "HF_HUB_OFFLINE": "1"},
            )

    @property
    def log(self) -> str:
        return self.log_file.read_text()

    def health(self) -> int:
        """Run the image's own HEALTHCHECK, and return its exit status."""
        check = image("cpu").healthcheck
        command = [sys.executable, "-m", "penstock_cli.main", *check[1:]]
        environment = {**os.environ, "PORT": str(self.port)}
        return subprocess.run(command, env=environment, capture_output=True, check=False).returncode

    def ready(self) -> bool:
        assert self.process.poll() is None, self.log
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/health", timeout=5):
            return True
        return False


@contextlib.contextmanager
def running(started: Started) -> Iterator[Started]:
    children: list[psutil.Process] = []
    try:
        wait_until(started.ready, timeout_s=90, what="it is ready")
        children = psutil.Process(started.process.pid).children(recursive=True)
        yield started
        started.process.terminate()
        assert started.process.wait(30) == 0
    finally:
        if started.process.poll() is None:
            started.process.kill()
            started.process.wait()
        for child in children:
            if is_alive(child):
                child.kill()


def ask(url: str, body: Any = None, **headers: str) -> Any:
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json", **headers}
    request = urllib.request.Request(url, data, headers)
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.loads(response.read() or "null")


@pytest.fixture(scope="module")
def tgi(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    """A server that gets its settings as TGI does: by a flag and by variables. The environment also
    has variables that every container has.
    """
    variables = {
        "MAX_TOTAL_TOKENS": "512",
        "DTYPE": "float16",
        "MAX_BEST_OF": "3",
        "NUM_SHARD": "1",
    }
    around = {"HOSTNAME": "0f3c2a1b", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    folder = tmp_path_factory.mktemp("tgi")
    with running(
        Started("cpu", folder, "--model-id", str(TOY), "--json-output", **variables, **around)
    ) as started:
        yield started


def test_tgis_flags_and_variables_are_heeded(tgi: Started) -> None:
    info = ask(f"{tgi.url}/info")
    assert (info["model_id"], info["max_total_tokens"]) == (str(TOY), 512)
    assert ask(f"{tgi.url}/generate", {"inputs": "The sea", "parameters": {"max_new_tokens": 4}})
    assert tgi.health() == 0
    assert "# MAX_BEST_OF: no counterpart: " in tgi.log
    # It looks for itself, once in a while.
    wait_until(lambda: "penstock is ready" in tgi.log, timeout_s=30, what="it says so")


@pytest.mark.soak
def test_tgis_own_client_finds_its_routes(tgi: Started) -> None:
    seen = observe("sdks", "with_text_generation", tgi.url)
    assert seen["generated"]["whole"]["details"]["generated_tokens"] >= 1
    assert seen["streamed"][-1]["generated_text"] == seen["generated"]["whole"]["generated_text"]
    assert seen["asynchronous"]["texts"] == [seen["generated"]["whole"]["generated_text"]] * 4


def test_vllms_flags_without_a_command_are_heeded(tmp_path: Path) -> None:
    flags = ["--model", str(TOY), "--served-model-name", "toy", "--max-model-len", "1k"]
    around = {"VLLM_API_KEY": "k", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "0"}
    port = free_port()
    started = Started("vllm-cpu", tmp_path, *flags, "--port", str(port), **around)
    started.url, started.port = f"http://127.0.0.1:{port}", port
    with running(started):
        with pytest.raises(urllib.error.HTTPError, match="401"):
            ask(f"{started.url}/v1/models")
        (model,) = ask(f"{started.url}/v1/models", Authorization="Bearer k")["data"]
        assert (model["id"], model["max_model_len"]) == ("toy", 1000)
        assert started.health() == 0
        # Whoever lists processes sees no key.
        children = psutil.Process(started.process.pid).children(recursive=True)
        assert not any("k" in child.cmdline() for child in children)


def test_what_would_change_answers_silently_is_not_served(tmp_path: Path) -> None:
    started = Started("cpu", tmp_path, "--model-id", str(TOY), "--quantize", "eetq")
    assert started.process.wait(30) == 2
    assert "# --quantize: refused: " in started.log
    assert "not served, as answers would differ without --quantize" in started.log
