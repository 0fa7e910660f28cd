"""Measures the start and the memory of a 130 M model behind a router.

    python benchmarks/startup.py [--rounds 3]

Each round starts processes of a shard and a router, waits for the answer to a completion, serves 16
streams, and adds up the memory of all processes (PSS if the kernel tells it, which counts shared
pages once). The model is random, and its files are in the page cache.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import psutil


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--model", type=Path, metavar="DIR", help="default: random, 130 M")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        model = args.model or _make_model(Path(scratch) / "model")
        rounds = [_round(model, Path(scratch)) for _ in range(args.rounds)]
    for name, unit in (("ready", "s"), ("stack", "MB"), ("router", "MB")):
        values = [measured[name] for measured in rounds]
        print(f"{name:<8}{statistics.median(values):8.1f} {unit}   "
              f"({min(values):.1f} to {max(values):.1f})")  # fmt: skip


def _make_model(directory: Path) -> Path:
    """Make the model in another process, so that its memory does not count."""
    code = (
        "import sys; from pathlib import Path; from model_maker import make_model; "
        "make_model(Path(sys.argv[1]), 'llama-130m')"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent / "tests")}
    subprocess.run([sys.executable, "-c", code, str(directory)], check=True, env=environment)
    return directory


def _round(model: Path, scratch: Path) -> dict[str, float]:
    from support.processes import Router, Shard, running

    started_s = time.monotonic()
    shard = Shard(scratch / "shard.log", "--model", str(model))
    router = Router(scratch / "router.log", [shard.address])
    with running(shard, router):
        ready_s = time.monotonic() - started_s
        bench = [sys.executable, "-m", "penstock_cli.main", "bench", "--url", router.url]
        subprocess.run([*bench, "--requests", "32", "--output-tokens", "32"], check=True)
        stack = sum(_memory_mb(service.process.pid) for service in (shard, router))
        return {"ready": ready_s, "stack": stack, "router": _memory_mb(router.process.pid)}


def _memory_mb(pid: int) -> float:
    processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    total = 0
    for process in processes:
        full = process.memory_full_info()
        total += getattr(full, "pss", full.rss)
    return total / 1e6


if __name__ == "__main__":
    main()
