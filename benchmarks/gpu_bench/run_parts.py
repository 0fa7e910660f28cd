"""Runs parts in processes, for bounded times, one after the other or side by side.

A part that hangs writes its stacks to its log and is ended. When a part ends, all processes that it
started are ended.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu_bench import marks
from benchmarks.gpu_bench.results import add_rows, last_words, read_rows, tail, write_report

_POLL_S = 0.1
# Between reports while parts run.
_REPORT_S = 5.0
# For processes to write their stacks before they are killed.
_DUMP_S = 2.0
# For the report and packing compiled kernels after the last part.
_AFTERWARDS_S = 8.0
_LEAST_S = 3.0
_LAST_BYTES = 20_000


@dataclass(frozen=True, slots=True)
class Run:
    """The parts' command before `--run`, environment, output and end."""

    command: Sequence[str]
    environment: Mapping[str, str]
    out: Path
    # A folder for each part.
    scratch: Path
    # By the monotonic clock.
    until_s: float

    @property
    def mark(self) -> str:
        """The mark above those of the parts."""
        return str(self.scratch)

    def folders(self) -> list[Path]:
        """List the folders of the parts so far."""
        rows = read_rows(self.out)
        return [self.scratch / row["part"] for row in rows if row["what"] == "begun"]

    def left_s(self) -> float:
        """The seconds left for parts."""
        return self.until_s - _AFTERWARDS_S - time.monotonic()


class _Started:
    def __init__(self, name: str, bound_s: float, run: Run) -> None:
        self.name = name
        self._run = run
        self._bound_s = bound_s
        self._begun_s = time.monotonic()
        folder = run.scratch / name
        folder.mkdir()
        self.mark = f"{run.mark}/{name}"
        self._log = folder / "log"
        add_rows(run.out, {"what": "begun", "part": name})
        with self._log.open("wb") as output:
            self._process = subprocess.Popen(
                [*run.command, "--run", name, "--folder", str(folder)],
                env={**run.environment, marks.VARIABLE: self.mark},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def is_over(self) -> bool:
        """Tell whether the part has ended; end it if its time is over."""
        status = self._process.poll()
        if status is not None:
            self.end(f"exit status {status}: {self._words()}" if status else "")
            return True
        if time.monotonic() - self._begun_s < self._bound_s:
            return False
        words = self._words()
        self._dump()
        self.end(f"not within {self._bound_s:.0f} s: {words}")
        return True

    def _words(self) -> str:
        return last_words(tail(self._log, _LAST_BYTES))

    def _dump(self) -> None:
        """Have the part and its servers write their stacks to their logs, and end."""
        marks.tell_all(self.mark, signal.SIGABRT)
        until_s = time.monotonic() + _DUMP_S
        while marks.marked(self.mark) and time.monotonic() < until_s:
            time.sleep(_POLL_S)

    def end(self, failed: str) -> None:
        """End the part's remaining processes, and record the result."""
        if self._process.poll() is None:
            self._process.kill()
        marks.end_all(self.mark, max(1.0, self._run.left_s() + _AFTERWARDS_S / 2))
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        seconds = round(time.monotonic() - self._begun_s, 1)
        rows = [{"what": "took", "part": self.name, "seconds": seconds}]
        if failed:
            rows.append({"what": "part failed", "part": self.name, "failed": failed})
        add_rows(self._run.out, *rows)
        print(f"{self.name}: {failed or 'done'} ({seconds:.0f} s)", file=sys.stderr, flush=True)


def run_together(bounds: Mapping[str, float], run: Run) -> None:
    """Run parts side by side, each for at most its bound in seconds, or the time that is left."""
    room_s = run.left_s() - _DUMP_S
    if room_s < _LEAST_S:
        late = [_too_late(name) for name in bounds]
        add_rows(run.out, *late)
        write_report(run.out, run.folders())
        return
    with contextlib.ExitStack() as ends:
        running = []
        for name, bound_s in bounds.items():
            part = _Started(name, min(bound_s, room_s), run)
            running.append(part)
            ends.callback(_end_early, part, running)
        _wait(running, run)
    write_report(run.out, run.folders())


def _too_late(name: str) -> dict[str, str]:
    return {"what": "part failed", "part": name, "failed": "no time was left"}


def _wait(running: list[_Started], run: Run) -> None:
    """Wait until all parts end; remove each from the list when it ends."""
    for _ in _reports(run):
        running[:] = [part for part in running if not part.is_over()]
        if not running:
            return
        time.sleep(_POLL_S)


def _reports(run: Run) -> Iterator[None]:
    """Write the report every few seconds, while the caller iterates."""
    written_s = 0.0
    while True:
        if time.monotonic() - written_s > _REPORT_S:
            write_report(run.out, run.folders())
            written_s = time.monotonic()
        yield


def _end_early(part: _Started, running: Sequence[_Started]) -> None:
    if part in running:
        part.end("the run was ended")
