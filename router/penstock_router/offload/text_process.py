"""A text process: parses long bodies and does their text work, where it blocks no event loop.

    python -m penstock_router.offload.text_process FD LOG_LEVEL LOG_FORMAT

Serves the router at the other end of the socket FD, one body at a time, until that end is closed or
gone. Keeps the files of the models it has worked for, and the last body.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import select
import signal
import socket
import sys
import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

from penstock_common.logs import set_up_logging
from penstock_router.apis.responses.stored import read_stored
from penstock_router.errors import ApiError, as_api_error
from penstock_router.offload.body_kinds import KINDS, Reading, read
from penstock_router.offload.text_messages import (
    HEADER,
    Files,
    ModelFacts,
    NeedsFiles,
    Read,
    Report,
    Show,
    Task,
    WasAnswered,
    WasLoaded,
    WasRead,
    Work,
    decode_task,
    framed,
    pack_asked,
    pack_error,
    pack_prepared,
    split,
)
from penstock_router.text.chat_template import ChatTemplate, load_chat_template
from penstock_router.text.model_conventions import conventions_named
from penstock_router.text.prompts import TextModel
from penstock_router.text.tokenizer import Tokenizer, load_tokenizer

logger = logging.getLogger("penstock.text_process")

# Where processors are scarce, the router's event loop goes first: many wait for it.
_NICENESS = 5
# The kernel's oom_score_adj, of 1000: when memory runs out, kill a text process first, which is
# soon replaced.
_OOM_SCORE = 500
# Longer than any router waits for a task. Without this limit, work that never releases the
# interpreter lock, such as a huge power in a template, would outlive the router.
_MAX_TASK_S = 90
# How many models are kept, as a tokenizer takes many MB. For more, files are sent again.
MAX_MODELS = 8
# After bodies longer than this, returning memory to the system is worth a few milliseconds.
_MUCH_BYTES = 1024 * 1024

_Key = tuple[str, str]
# A report, and the bytes after it.
_Reply = tuple[Report, Sequence[bytes | memoryview]]


class TextWorker:
    """Does the router's tasks. Keeps the last body that was parsed, and models."""

    def __init__(self) -> None:
        self._kept: tuple[int, Reading] | None = None
        # By model and tokenizer hash, least recently used first.
        self._loaded: OrderedDict[_Key, tuple[Tokenizer, ChatTemplate | None]] = OrderedDict()

    def do(self, task: Task, after: memoryview) -> _Reply:
        """Do a task, with the bytes after it. Raises nothing but `MemoryError`."""
        kind = ""
        try:
            match task:
                case Read():
                    return self._read(task, after)
                case Files():
                    return self._load(task, after)
                case Show():
                    sizes = task.response_bytes, task.messages_bytes
                    response, messages = split(after, sizes)
                    return WasAnswered(), (read_stored(response, messages, task.page),)
            kind = task.kind
            return self._work(task, after)
        except MemoryError:
            raise
        except ApiError as error:
            return pack_error(error, kind), ()
        except Exception as error:  # a defect costs the body it shows on
            logger.exception("a body could not be worked on")
            return pack_error(as_api_error(error), kind), ()

    def _read(self, task: Read, body: memoryview) -> _Reply:
        self._kept = None
        reading = read(KINDS[task.kind], body, with_digest=task.with_digest)
        if reading.refusal is not None:
            return pack_error(reading.refusal, reading.kind.name), ()
        self._kept = task.number, reading
        asked = pack_asked(reading.asked.without_text())
        return WasRead(reading.kind.name, asked, reading.digest), ()

    def _work(self, task: Work, after: memoryview) -> _Reply:
        body, earlier = split(after, (task.body_bytes, task.earlier_bytes))
        reading = self._reading(task, body)
        model = self._model(task.model)
        if model is None:
            return NeedsFiles(), ()
        self._kept = None
        made = reading.kind.work(reading.asked, model, bytes(earlier))
        if isinstance(made, bytes):
            return WasAnswered(), (made,)
        return pack_prepared(made)

    def _reading(self, task: Work, body: memoryview) -> Reading:
        """The parsed body that was kept, or else that of the body sent with the task."""
        if self._kept is not None and self._kept[0] == task.number:
            return self._kept[1]
        reading = read(KINDS[task.kind], body, with_digest=False)
        if reading.refusal is not None:
            raise reading.refusal
        self._kept = task.number, reading
        return reading

    def _model(self, facts: ModelFacts) -> TextModel | None:
        key = facts.name, facts.tokenizer_hash
        if key not in self._loaded:
            return None
        self._loaded.move_to_end(key)
        tokenizer, chat_template = self._loaded[key]
        return TextModel(
            name=facts.name,
            max_model_len=facts.max_model_len,
            vocab_size=facts.vocab_size,
            tokenizer=tokenizer,
            chat_template=chat_template,
            trusts_templates=facts.trusts_templates,
            conventions=conventions_named(facts.tool_format, facts.reasoning),
        )

    def _load(self, task: Files, after: memoryview) -> _Reply:
        parts = split(after, task.sizes.values())
        files = {name: bytes(part) for name, part in zip(task.sizes, parts, strict=True)}
        for key in [key for key in self._loaded if key[0] == task.model]:
            # The model's earlier tokenizer was replaced.
            del self._loaded[key]
        self._loaded[task.model, task.tokenizer_hash] = (
            load_tokenizer(files),
            load_chat_template(files, task.chat_template),
        )
        if len(self._loaded) > MAX_MODELS:
            self._loaded.popitem(last=False)
        return WasLoaded(), ()


# ---- The process -------------------------------------------------------------------------------


def main(argv: Sequence[str]) -> int:
    """Serve until the router is gone."""
    fd, log_level, log_format = argv
    set_up_logging(log_format, log_level)
    for number in (signal.SIGINT, signal.SIGTERM):
        # A terminal or a supervisor sends them to all processes; this one ends with the router.
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        os.nice(_NICENESS)
        score = Path("/proc/self/oom_score_adj")
        score.write_text(str(min(1000, int(score.read_text()) + _OOM_SCORE)))
    with socket.socket(fileno=int(fd)) as router:
        threading.Thread(target=_end_with, args=(router.fileno(),), daemon=True).start()
        with contextlib.suppress(EOFError, ConnectionError):
            _serve(router, TextWorker())
    return 0


def _end_with(fd: int) -> None:
    """Exit when the router is gone, even in the middle of a task."""
    poll = select.poll()
    # No events: a hang-up is always reported.
    poll.register(fd, 0)
    poll.poll()
    os._exit(0)


def _serve(router: socket.socket, worker: TextWorker) -> None:
    while True:
        message_bytes, after_bytes = HEADER.unpack(_receive(router, HEADER.size))
        task = decode_task(_receive(router, message_bytes))
        after = memoryview(_receive(router, after_bytes))
        signal.alarm(_MAX_TASK_S)
        report, parts = worker.do(task, after)
        signal.alarm(0)
        del task, after
        router.sendall(framed(report, sum(map(len, parts))))
        for part in parts:
            router.sendall(part)
        del report, parts
        if after_bytes > _MUCH_BYTES:
            _give_memory_back()


def _give_memory_back() -> None:
    """Return freed memory to the system: a long text takes a hundred times its length."""
    with contextlib.suppress(AttributeError):
        # Only glibc has malloc_trim.
        ctypes.CDLL(None).malloc_trim(0)


def _receive(router: socket.socket, num_bytes: int) -> bytearray:
    data = bytearray(num_bytes)
    view = memoryview(data)
    while view:
        received = router.recv_into(view)
        if not received:
            raise EOFError
        view = view[received:]
    return data


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
