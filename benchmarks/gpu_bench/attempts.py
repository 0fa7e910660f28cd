"""Runs attempts one after the other. If an attempt ends its process or takes too long, another
process continues with the next. After a fault, a device takes no more work from a process.
"""

from __future__ import annotations

import faulthandler
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from pathlib import Path
from typing import TextIO

from benchmarks.gpu_bench.goals import Row
from benchmarks.gpu_bench.results import last_words, tail

# Name -> function that returns a row of figures. A row with `failed` says what was wrong.
Attempts = Mapping[str, Callable[[], Row]]
# An attempt's time, with compilation.
_EACH_S = 45.0
_FAULT = re.compile("CUDA error|illegal memory|misaligned address|launch failure")
_SANITIZER = "compute-sanitizer"
_SANITIZER_S = 80.0
_LAST_BYTES = 20_000


def in_turn(folder: Path) -> Iterator[Row]:
    """Yield rows of all attempts of this process's part, from other processes with the same command
    and `--first N`.
    """
    first, faults = 0, list[int]()
    while (last := (yield from _said(first, folder / f"from-{first}.log"))) is not None:
        yield last
        first = last["number"] + 1
        if _FAULT.search(last["failed"]):
            faults.append(last["number"])
    if faults and shutil.which(_SANITIZER):
        yield _sanitized(faults[0], folder / "sanitizer.log")


def _said(first: int, log: Path) -> Generator[Row, None, Row | None]:
    """Run attempts from `first` on; yield their rows. Returns that of the attempt that ended the
    process.
    """
    begun: Row | None = None
    with log.open("wb") as output:
        command = [sys.executable, *sys.argv, "--first", str(first)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=output) as process:
            assert process.stdout is not None
            for line in process.stdout:
                row = json.loads(line)
                begun = row if "number" in row else None
                if begun is None:
                    yield row
    if not process.returncode:
        return None
    words = last_words(tail(log, _LAST_BYTES))
    if begun is None:
        raise RuntimeError(f"exit status {process.returncode} between attempts: {words}")
    return {"what": "attempt", **begun, "failed": words}


def _sanitized(first: int, log: Path) -> Row:
    """Run CUDA's memory checker on the first attempt with a fault."""
    command = [_SANITIZER, "--tool", "memcheck", "--print-limit", "8", sys.executable, *sys.argv]
    command += ["--first", str(first), "--count", "1"]
    ended = ""
    with log.open("wb") as output:
        try:
            subprocess.run(command, stdout=output, stderr=output, timeout=_SANITIZER_S, check=False)
        except subprocess.TimeoutExpired:
            ended = f", not within {_SANITIZER_S:.0f} s"
    lines = tail(log, 1_000_000).splitlines()
    faults = [line.strip("= ") for line in lines if line.startswith("========= Invalid")]
    said = faults[0] if faults else "no invalid access"
    return {"what": "attempt", "name": f"{_SANITIZER} of attempt {first}", "found": said + ended}


def make_attempts(attempts: Attempts, device: str, first: int, count: int | None) -> None:
    """Run attempts from `first` on; write a line of JSON to standard output before and after each.
    Output of libraries goes to the log.
    """
    with os.fdopen(os.dup(1), "w") as says:
        os.dup2(2, 1)
        names = list(attempts)
        bound_s = _EACH_S if count is None else _SANITIZER_S
        for number in range(first, len(names) if count is None else first + count):
            name = names[number]
            _say(says, {"number": number, "name": name})
            faulthandler.dump_traceback_later(bound_s, exit=True)
            begun_s = time.perf_counter()
            found = attempts[name]()
            _settle(device)
            seconds = round(time.perf_counter() - begun_s, 2)
            faulthandler.cancel_dump_traceback_later()
            _say(says, {"what": "attempt", "name": name, "seconds": seconds, **found})


def _say(says: TextIO, row: Row) -> None:
    print(json.dumps(row), file=says, flush=True)


def _settle(device: str) -> None:
    """Wait for the device. Raises RuntimeError for late faults."""
    if device == "cuda" and "torch" in sys.modules:
        from torch import cuda

        is_initialized: Callable[[], bool] = cuda.is_initialized
        if is_initialized():
            cuda.synchronize()
