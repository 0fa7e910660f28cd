"""Log lines: text on a terminal, otherwise JSON.

A thread writes the lines, so that a pipe that nobody reads blocks nothing. Lines that do not fit
into the queue are dropped and counted. A record's `extra` attributes become JSON fields; if the
message adds nothing to them, `IN_WORDS` has the words for the text line.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import logging
import queue
import re
import select
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from types import TracebackType
from typing import TextIO

FORMATS = ("auto", "text", "json")

# Made once, because making it takes as long as encoding a line.
_ENCODER = json.JSONEncoder(default=str)

# The one `extra` attribute that is not a field: a function that returns the text line's words.
IN_WORDS = "in_words"

_TEXT = "%(asctime)s %(levelname)s %(message)s"
_TEXT_DATE = "%m-%d %H:%M:%S"
_ExcInfo = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]

# About 1 MB of lines.
_MAX_WAITING_LINES = 5_000
_GATHER_S = 0.02
_LAST_WORDS_S = 1.0
# Characters that end a line for some readers, move a terminal's cursor, change the direction of
# text, or are invisible: all of Unicode's categories Cc, Cf, Zl and Zp, and surrogates.
_CONTROLS = re.compile(
    "[\x00-\x1f\x7f-\x9f\xad\u0600-\u0605\u061c\u06dd\u070f\u0890\u0891\u08e2\u180e\u200b-\u200f"
    "\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff\ufff0-\ufffb\U000110bd\U000110cd"
    "\U00013430-\U0001343f\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e007f]"
)
# Attributes of every record; all others come from `extra`.
_COMMON = frozenset(vars(logging.makeLogRecord({}))) | {
    *("message", "asctime", "taskName", IN_WORDS)
}


def set_up_logging(log_format: str = "auto", level: str = "info", *, shard: str = "") -> None:
    """Log to stderr, including uncaught exceptions, and the stacks of all threads if native code
    crashes. `auto` is text on a terminal, otherwise JSON. Each line names the `shard`, if given.
    """
    writer = _Writer(sys.stderr)
    writer.setFormatter(_formatter(log_format, sys.stderr, shard))
    logging.basicConfig(level=level.upper(), handlers=[writer])
    if isinstance(writer.formatter, JsonFormatter):
        sys.excepthook = _log_uncaught
        threading.excepthook = _log_uncaught_in_thread
    if not faulthandler.is_enabled():
        faulthandler.enable()


def end_log(line: str) -> None:
    """Write the waiting lines, then `line` as the last line of this process."""
    logging.shutdown()
    print(line, file=sys.stderr, flush=True)


def _formatter(log_format: str, stream: TextIO, shard: str = "") -> logging.Formatter:
    is_text = stream.isatty() if log_format == "auto" else log_format == "text"
    return TextFormatter(shard) if is_text else JsonFormatter(shard)


def escape(text: str, keep: str = "") -> str:
    """Put the text on one line, without characters that a terminal would act on, except `keep`."""
    return _CONTROLS.sub(lambda match: match[0] if match[0] in keep else _written(match[0]), text)


def _written(character: str) -> str:
    code = ord(character)
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


class TextFormatter(logging.Formatter):
    """Writes a text line; a traceback follows on its own lines."""

    def __init__(self, shard: str = "") -> None:
        super().__init__(_TEXT, _TEXT_DATE)
        self._of = f"shard {shard}: " if shard else ""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        in_words = getattr(record, IN_WORDS, None)
        words = f"{record.name}: {record.message}" if in_words is None else in_words()
        record.message = f"{self._of}{words}"
        return escape(super().formatMessage(record))

    def formatException(self, ei: _ExcInfo) -> str:  # noqa: N802 - logging's name
        return "\n".join(map(escape, super().formatException(ei).split("\n")))


class JsonFormatter(logging.Formatter):
    """Writes a JSON object: time, level, shard, logger, message, all `extra` except `IN_WORDS`, and
    the exception.
    """

    def __init__(self, shard: str = "") -> None:
        super().__init__()
        self._of = {"shard": shard} if shard else {}

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, object] = {
            "time": _timestamp(record.created),
            "level": record.levelname.lower(),
            **self._of,
            "logger": record.name,
            "message": record.getMessage(),
        }
        fields.update(extra_of(record))
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return _ENCODER.encode(fields)


def extra_of(record: logging.LogRecord) -> Mapping[str, object]:
    return {name: value for name, value in vars(record).items() if name not in _COMMON}


def _timestamp(unix_s: float) -> str:
    text = datetime.fromtimestamp(unix_s, UTC).isoformat(timespec="milliseconds")
    return text.replace("+00:00", "Z")


class _Writer(logging.Handler):
    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream
        # None ends the thread.
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._num_dropped = 0
        self._thread = threading.Thread(target=self._write, name="log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        if self._lines.qsize() >= _MAX_WAITING_LINES:
            self._num_dropped += 1
            return
        try:
            self._lines.put(self.format(record))
        except (TypeError, ValueError):
            # The arguments do not fit their message.
            self.handleError(record)

    def close(self) -> None:
        """Write the waiting lines, but do not wait long for a reader. `logging` calls this at
        exit.
        """
        self._lines.put(None)
        self._thread.join(_LAST_WORDS_S)
        super().close()

    def _write(self) -> None:
        lines: list[str | None] = []
        while None not in lines:
            lines = [self._lines.get()]
            if lines[0] is not None:
                # Gather lines: waking for each would cost more than all other work.
                time.sleep(_GATHER_S)
            while not self._lines.empty():
                lines.append(self._lines.get())
            # If nobody reads the log any more, the process must still go on.
            with contextlib.suppress(OSError, ValueError):
                for piece in _pieces(line for line in lines if line is not None):
                    self._stream.write(piece)
                    self._stream.flush()
                self._report_dropped()
                self._stream.flush()

    def _report_dropped(self) -> None:
        if self._num_dropped:
            fields = {"name": __name__, "levelname": "WARNING", "args": (self._num_dropped,)}
            fields["msg"] = "%d lines of this log were dropped: nobody read it"
            self._num_dropped = 0
            self._stream.write(self.format(logging.makeLogRecord(fields)) + "\n")


def _pieces(lines: Iterable[str]) -> Iterator[str]:
    """Join lines into pieces that a pipe takes atomically: other processes write to it too."""
    piece, num_bytes = "", 0
    for line in lines:
        line_bytes = len(line.encode(errors="backslashreplace")) + 1
        if piece and num_bytes + line_bytes > select.PIPE_BUF:
            yield piece
            piece, num_bytes = "", 0
        piece += f"{line}\n"
        num_bytes += line_bytes
    if piece:
        yield piece


def _log_uncaught(
    kind: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:
    logging.getLogger("penstock").critical("uncaught", exc_info=(kind, error, traceback))


def _log_uncaught_in_thread(args: threading.ExceptHookArgs) -> None:
    if args.exc_value is not None:
        _log_uncaught(args.exc_type, args.exc_value, args.exc_traceback)
