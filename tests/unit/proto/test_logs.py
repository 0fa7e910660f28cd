"""Lines of a log: one each, readable by their reader, and never waited for."""

from __future__ import annotations

import io
import json
import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
import unicodedata
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock_common import logs
from penstock_common.logs import IN_WORDS, JsonFormatter, TextFormatter, escape

# How long examples take says more of the machine than of the code.
ANY_PACE = settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)


def record_of(message: str, *args: object, extra: dict[str, Any] | None = None) -> Any:
    return logging.getLogger("test").makeRecord(
        "test", logging.INFO, "file.py", 1, message, args, None, extra=extra
    )


def failed_record() -> logging.LogRecord:
    try:
        raise ValueError("first\nsecond")
    except ValueError:
        return logging.getLogger("test").makeRecord(
            "test", logging.ERROR, "file.py", 1, "it failed", (), sys.exc_info()
        )


def test_a_json_line_says_when_who_what_and_the_rest() -> None:
    record = record_of("%s took %d", "it", 3, extra={"request_id": "mine", "total_ms": 1.5})
    record.created = 1_800_000_000.25
    assert json.loads(JsonFormatter().format(record)) == {
        "time": "2027-01-15T08:00:00.250Z",
        "level": "info",
        "logger": "test",
        "message": "it took 3",
        "request_id": "mine",
        "total_ms": 1.5,
    }


def test_a_line_of_text_says_when_how_bad_and_who() -> None:
    record = record_of("it took %d", 3)
    when, said = TextFormatter().format(record)[:15], TextFormatter().format(record)[15:]
    assert time.strptime(when.strip(), "%m-%d %H:%M:%S")
    assert said == "INFO test: it took 3"


def test_words_that_a_record_brings_are_its_line_of_text_and_no_field_of_its_json() -> None:
    record = record_of("request", extra={"total_ms": 1.5, IN_WORDS: lambda: "it took\n1.5 ms"})
    assert TextFormatter().format(record).endswith(" INFO it took\\u000a1.5 ms")
    fields = json.loads(JsonFormatter().format(record))
    assert (fields["message"], fields["total_ms"]) == ("request", 1.5)
    assert set(fields) == {"time", "level", "logger", "message", "total_ms"}


def test_a_traceback_is_a_field_of_its_line() -> None:
    line = JsonFormatter().format(failed_record())
    assert "\n" not in line
    exception = json.loads(line)["exception"]
    assert exception.startswith("Traceback (most recent call last):\n")
    assert exception.endswith("ValueError: first\nsecond")


def test_as_text_a_traceback_follows_its_line() -> None:
    first, second, *_ = TextFormatter().format(failed_record()).splitlines()
    assert first.endswith(" ERROR test: it failed")
    assert second == "Traceback (most recent call last):"


@ANY_PACE
@given(st.text())
def test_whatever_a_message_holds_stays_on_its_line(text: str) -> None:
    record = record_of("request %s", text, extra={"model": text})
    for line in (TextFormatter().format(record), JsonFormatter().format(record)):
        assert len(line.splitlines()) == 1
        assert "\x1b" not in line
    assert json.loads(JsonFormatter().format(record))["model"] == text


def test_a_traceback_on_a_terminal_moves_no_cursor() -> None:
    try:
        raise ValueError("of a client: \x1b[2J\rall is well")
    except ValueError:
        record = logging.getLogger("test").makeRecord(
            "test", logging.ERROR, "file.py", 1, "it failed", (), sys.exc_info()
        )
    text = TextFormatter().format(record)
    assert "\x1b" not in text
    assert "\r" not in text
    assert text.splitlines()[-1] == "ValueError: of a client: \\u001b[2J\\u000dall is well"


def test_all_that_changes_how_a_line_is_shown_is_written_out_and_nothing_else() -> None:
    hidden = {"Cc", "Cf", "Zl", "Zp", "Cs"}
    for number in range(sys.maxunicode + 1):
        character = chr(number)
        category = unicodedata.category(character)
        if category != "Cn":
            assert (escape(character) != character) == (category in hidden), hex(number)
    assert escape("a\u202etxt.exe\U000e0041") == "a\\u202etxt.exe\\U000e0041"
    assert escape("a\tb\x1b", keep="\t") == "a\tb\\u001b"


def test_control_characters_are_written_out() -> None:
    assert escape("a\nb\x1b[31m\u2028é") == "a\\u000ab\\u001b[31m\\u2028é"


def test_lines_are_written_by_a_thread_and_all_by_the_end() -> None:
    stream = io.StringIO()
    writer = logs._Writer(stream)
    for number in range(100):
        writer.emit(record_of("line %d", number))
    writer.close()
    assert stream.getvalue().splitlines() == [f"line {number}" for number in range(100)]


def test_processes_that_share_a_pipe_do_not_break_one_anothers_lines() -> None:
    """A pipe takes no more than `PIPE_BUF` bytes as a whole."""

    class Pieces(io.StringIO):
        def __init__(self) -> None:
            super().__init__()
            self.pieces: list[str] = []

        def write(self, text: str) -> int:
            self.pieces.append(text)
            return len(text)

    stream = Pieces()
    writer = logs._Writer(stream)
    lengths = [300] * 100 + [10_000, 5] + [select.PIPE_BUF - 1, 1]
    for length in lengths:
        writer._lines.put("é" * (length // 2) + "x" * (length % 2))
    writer.close()
    assert "".join(stream.pieces).count("\n") == len(lengths)
    assert all(piece.endswith("\n") for piece in stream.pieces)
    longer = [piece for piece in stream.pieces if len(piece.encode()) > select.PIPE_BUF]
    # Of a line that is longer by itself there is no help.
    assert [piece.count("\n") for piece in longer] == [1]
    # Nor is each written by itself.
    assert len(stream.pieces) < len(lengths) / 5


class Blocked(io.StringIO):
    """A pipe that nobody reads until `go_on`."""

    def __init__(self) -> None:
        super().__init__()
        self.is_waited_for = threading.Event()
        self.go_on = threading.Event()

    def write(self, text: str) -> int:
        self.is_waited_for.set()
        self.go_on.wait(10)
        return super().write(text)


def test_a_pipe_that_nobody_reads_holds_nobody_up_and_costs_bounded_memory() -> None:
    stream = Blocked()
    writer = logs._Writer(stream)
    writer.emit(record_of("the first"))
    assert stream.is_waited_for.wait(10)
    began_s = time.monotonic()
    for number in range(logs._MAX_WAITING_LINES + 500):
        writer.emit(record_of("line %d", number))
    assert time.monotonic() - began_s < 5
    stream.go_on.set()
    writer.close()
    first, *lines, last = stream.getvalue().splitlines()
    assert first == "the first"
    # It may be said with the lines before the gap or with those after it.
    assert "500 lines of this log were dropped: nobody read it" in {lines[0], last}
    assert len(lines) == logs._MAX_WAITING_LINES


def test_a_stream_that_fails_ends_nothing() -> None:
    stream = io.StringIO()
    stream.close()
    writer = logs._Writer(stream)
    writer.emit(record_of("one"))
    writer.close()


@pytest.mark.parametrize("log_format", ["auto", "json"])
def test_what_nobody_caught_is_one_line_of_json(log_format: str) -> None:
    program = (
        "import threading; from penstock_common.logs import set_up_logging as s; "
        f"s({log_format!r}); t = threading.Thread(target=lambda: 1 / 0); t.start(); t.join(); "
        "raise KeyError('x')"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=False
    )
    assert result.returncode == 1
    in_thread, at_the_end = (json.loads(line) for line in result.stderr.splitlines())
    assert in_thread["exception"].endswith("ZeroDivisionError: division by zero")
    assert at_the_end["exception"].endswith("KeyError: 'x'")


def test_a_crash_in_native_code_leaves_the_stacks_of_all_threads() -> None:
    program = (
        "import ctypes, threading; from penstock_common.logs import set_up_logging as s; s(); "
        "threading.Thread(target=threading.Event().wait, daemon=True).start(); ctypes.string_at(0)"
    )
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONFAULTHANDLER"}
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=30, env=environment
    )
    assert result.returncode == -signal.SIGSEGV
    assert "in string_at" in result.stderr
    assert "in wait" in result.stderr


def test_lines_of_a_shard_name_it() -> None:
    record = logging.makeLogRecord({"name": "engine", "levelname": "INFO", "msg": "loading"})
    assert (
        TextFormatter("127.0.0.1:20051")
        .format(record)
        .endswith(" INFO shard 127.0.0.1:20051: engine: loading")
    )
    assert json.loads(JsonFormatter("127.0.0.1:20051").format(record))["shard"] == "127.0.0.1:20051"
    assert "shard" not in json.loads(JsonFormatter().format(record))


def test_what_waits_comes_before_the_line_that_ends_a_log() -> None:
    program = (
        "import logging; from penstock_common.logs import end_log, set_up_logging as s; s('text'); "
        "[logging.info('line %d', i) for i in range(500)]; end_log('the end'); logging.info('late')"
    )
    said = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stderr.splitlines()
    assert (len(said), said[-1]) == (501, "the end")


@pytest.mark.parametrize(("on_terminal", "is_json"), [(True, False), (False, True)])
def test_auto_is_text_on_a_terminal_and_json_elsewhere(on_terminal: bool, is_json: bool) -> None:
    stream = io.StringIO()
    stream.isatty = lambda: on_terminal  # type: ignore[method-assign]
    assert isinstance(logs._formatter("auto", stream), JsonFormatter) == is_json
