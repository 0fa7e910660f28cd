"""No process gets a secret that it does not need: a whole system is started with many in its
environment, and the environments of all its processes are looked at.
"""

from __future__ import annotations

import json
import shutil
import sys
import urllib.request
from pathlib import Path

import psutil
import pytest
from support.budget import in_soak
from support.processes import Service, free_port, wait_until

pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="the system does not say how processes were started"
)

KEY = "sk-users-5ecret"
# Nobody reads the last two.
PLANTED = {
    "PENSTOCK_API_KEY": KEY,
    "PENSTOCK_ADMIN_KEY": "sk-admin-5ecret",
    "PENSTOCK_RESUME_KEY": "resume-5ecret-0123456789",
    "PENSTOCK_SHARD_API_KEY": KEY,
    "HF_TOKEN": "hf_5ecret",
    "OTEL_EXPORTER_OTLP_HEADERS": "authorization=5ecret",
    "https_proxy": "http://user:5ecret@127.0.0.1:9",
    "AWS_SECRET_ACCESS_KEY": "5ecret",
    "DATABASE_URL": "postgres://user:5ecret@127.0.0.1/db",
}
RANK = "penstock_shard.model_loader.rank_main"
OUTSIDE = {"OTEL_EXPORTER_OTLP_HEADERS", "https_proxy"}
# By a part of its command line: which of them a process may have. Those of others: none.
KINDS = {
    "penstock_router": {name for name in PLANTED if name.startswith("PENSTOCK_")} | OUTSIDE,
    "multiprocessing.resource_tracker": OUTSIDE,
    "multiprocessing.spawn": OUTSIDE,
    "penstock_shard": {"PENSTOCK_API_KEY", "PENSTOCK_SHARD_API_KEY", "HF_TOKEN"} | OUTSIDE,
    "penstock_shard.engine.main": {"HF_TOKEN", "https_proxy"},
    RANK: set[str](),
    "penstock_shard.structured_output.check_process": set[str](),
    "penstock_router.offload.text_process": set[str](),
}
SMALL = ("--kv-memory", "32M", "--max-model-len", "512", "--max-num-seqs", "4", "--threads", "1")
# A model compiles its kernels where it finds none, and has another rank.
MODEL = ("--runner", "model", "--device", "cpu", "--tensor-parallel-size", "2", *SMALL)


class _Everything(Service):
    """`penstock serve` with each kind of process."""

    def __init__(self, folder: Path, compiler: Path, *runner: str) -> None:
        self._compiler = compiler
        port = free_port()
        shard_port = free_port()
        flags = ["serve", "--port", str(port), "--shard-port", str(shard_port), "--workers", "2"]
        flags += runner
        super().__init__("penstock_cli.main", flags, port, folder / "log")

    def environment(self, log_file: Path) -> dict[str, str]:
        # Nothing is compiled yet there.
        own = {"PENSTOCK_CACHE": str(log_file.with_name("cache")), "CC": str(self._compiler)}
        return {**PLANTED, **own, "TMPDIR": str(log_file.parent)}

    def healthy(self) -> bool:
        try:
            with urllib.request.urlopen(self.url + "/ready", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def by_kind(self) -> dict[str, list[psutil.Process]]:
        """Return all processes below this one, by the module that each runs, or by its program."""
        found: dict[str, list[psutil.Process]] = {}
        for process in psutil.Process(self.process.pid).children(recursive=True):
            try:
                found.setdefault(_kind_of(process.cmdline()), []).append(process)
            except psutil.NoSuchProcess:
                continue
        return found


def _kind_of(command: list[str]) -> str:
    if "-m" in command:
        return command[command.index("-m") + 1]
    text = " ".join(command)
    return next((kind for kind in KINDS if kind in text), text)


def _compiler_that_tells(folder: Path) -> Path:
    """A C compiler that writes its environment down, and takes no time to optimise."""
    real = next(path for name in ("cc", "gcc", "clang") if (path := shutil.which(name)))
    script = folder / "cc"
    script.write_text(f'#!/bin/sh\nenv > "{folder}/compiler-$$"\nexec "{real}" "$@" -O0\n')
    script.chmod(0o755)
    return script


@pytest.mark.skipif(not shutil.which("cc"), reason="needs a C compiler")
@pytest.mark.parametrize(
    "runner",
    [("--runner", "fake"), in_soak(MODEL)],
    ids=["fake", "model"],
)
def test_no_process_gets_a_secret_that_it_does_not_need(
    tmp_path: Path, runner: tuple[str, ...]
) -> None:
    expected = KINDS.keys() - (set() if runner == MODEL else {RANK})
    system = _Everything(tmp_path, _compiler_that_tells(tmp_path), *runner)
    try:
        system.wait_healthy(timeout_s=180)
        _use_all_processes(system)
        wait_until(lambda: expected <= system.by_kind().keys(), timeout_s=30, what="all kinds")
        for kind, processes in system.by_kind().items():
            for process in processes:
                too_many = PLANTED.keys() & process.environ().keys() - KINDS.get(kind, set())
                assert not too_many, f"{kind} has {too_many}"
        told = list(tmp_path.glob("compiler-*"))
        assert bool(told) == (runner == MODEL)
        assert not any("5ecret" in path.read_text() for path in told)
    finally:
        system.close()


def _use_all_processes(system: _Everything) -> None:
    """Have those started that wait for something to do."""
    shown = {"Authorization": f"Bearer {KEY}"}
    for path, body in (
        ("/metrics", None),
        ("/tokenize", json.dumps({"prompt": "x " * 50_000}).encode()),
    ):
        request = urllib.request.Request(system.url + path, body, shown)
        if body is not None:
            request.add_header("Content-Type", "application/json")
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert answer.status == 200
