"""A text process: long bodies are read and worked on here, where no event loop waits meanwhile.

    python -m penstock_router.text_process FD LOG_LEVEL

Serves the router at the other end of the socket FD, one body at a time, until that end is closed
or gone. Keeps the files of the models it has worked for, and the last body. Knows no network.
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
from collections.abc import Sequence
from pathlib import Path

from penstock_router import text_messages as messages
from penstock_router.chat_template import load_chat_template
from penstock_router.errors import ApiError, as_api_error
from penstock_router.prompts import TextModel
from penstock_router.text_messages import (
    HEADER,
    Files,
    ModelFacts,
    NeedsFiles,
    Read,
    Report,
    Task,
    WasAnswered,
    WasLoaded,
    WasRead,
    Work,
)
from penstock_router.text_work import SORTS, Reading, read
from penstock_router.tokenizer import load_tokenizer

logger = logging.getLogger("penstock.text_process")

# Where processors are scarce, the router's event loop goes first: many wait for it.
_NICENESS = 5
# Of 1000, added to what the kernel goes by when memory is scarce: a text process is soon replaced.
_OOM_SCORE = "500"
# Longer bodies leave memory behind that is worth a few milliseconds.
_MUCH_BYTES = 1024 * 1024

_Key = tuple[str, str]
# A report, and what comes after it.
_Said = tuple[Report, Sequence[bytes]]


class TextWorker:
    """Does what it is told. Holds the last body that was read, and models."""

    def __init__(self) -> None:
        self._kept: tuple[int, Reading] | None = None
        # By model and tokenizer hash.
        self._models: dict[_Key, TextModel] = {}

    def do(self, task: Task, after: memoryview) -> _Said:
        """A task, with what came after it. Never raises but for want of memory."""
        sort = ""
        try:
            match task:
                case Read():
                    return self._read(task, after)
                case Files():
                    return self._load(task, after)
            sort = task.sort
            return self._work(task, after)
        except MemoryError:
            raise
        except ApiError as error:
            return messages.pack_error(error, sort), ()
        except Exception as error:
            logger.exception("a body could not be worked on")
            return messages.pack_error(as_api_error(error), sort), ()

    def _read(self, task: Read, body: memoryview) -> _Said:
        self._kept = None
        reading = read(SORTS[task.sort], body, with_digest=task.with_digest)
        if reading.refusal is not None:
            return messages.pack_error(reading.refusal, reading.sort.name), ()
        self._kept = task.number, reading
        asked = messages.pack_asked(reading.asked.without_text())
        return WasRead(reading.sort.name, asked, reading.digest), ()

    def _work(self, task: Work, after: memoryview) -> _Said:
        body, earlier = messages.split(after, (task.body_bytes, task.earlier_bytes))
        reading = self._reading(task, body)
        model = self._model(task.model)
        if model is None:
            return NeedsFiles(), ()
        self._kept = None
        made = reading.sort.work(reading.asked, model, bytes(earlier))
        if isinstance(made, bytes):
            return WasAnswered(), (made,)
        return messages.pack_prepared(made)

    def _reading(self, task: Work, body: memoryview) -> Reading:
        """Of the body that was kept, or else of the one that came along."""
        if self._kept is not None and self._kept[0] == task.number:
            return self._kept[1]
        reading = read(SORTS[task.sort], body, with_digest=False)
        if reading.refusal is not None:
            raise reading.refusal
        self._kept = task.number, reading
        return reading

    def _model(self, facts: ModelFacts) -> TextModel | None:
        loaded = self._models.get((facts.name, facts.tokenizer_hash))
        if loaded is None:
            return None
        return TextModel(
            name=facts.name,
            max_model_len=facts.max_model_len,
            vocab_size=facts.vocab_size,
            tokenizer=loaded.tokenizer,
            chat_template=loaded.chat_template,
            trusts_templates=facts.trusts_templates,
        )

    def _load(self, task: Files, after: memoryview) -> _Said:
        parts = messages.split(after, task.sizes.values())
        files = {name: bytes(part) for name, part in zip(task.sizes, parts, strict=True)}
        for key in [key for key in self._models if key[0] == task.model]:
            # It was replaced.
            del self._models[key]
        self._models[task.model, task.tokenizer_hash] = TextModel(
            name=task.model,
            max_model_len=0,
            vocab_size=0,
            tokenizer=load_tokenizer(files),
            chat_template=load_chat_template(files, task.chat_template),
            trusts_templates=False,
        )
        return WasLoaded(), ()


# ---- The process -------------------------------------------------------------------------------


def main(argv: Sequence[str]) -> int:
    """Serve until the router is gone."""
    fd, log_level = argv
    logging.basicConfig(
        level=log_level.upper(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    for number in (signal.SIGINT, signal.SIGTERM):
        # A terminal and a supervisor send them to all processes: the router's end is what counts.
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        os.nice(_NICENESS)
        Path("/proc/self/oom_score_adj").write_text(_OOM_SCORE, encoding="ascii")
    with socket.socket(fileno=int(fd)) as router:
        threading.Thread(target=_end_with, args=(router.fileno(),), daemon=True).start()
        with contextlib.suppress(EOFError, ConnectionError):
            _serve(router, TextWorker())
    return 0


def _end_with(fd: int) -> None:
    """End when the other end is gone, also amid work that looks at no socket."""
    poll = select.poll()
    # Of nothing but the end, which needs no mention.
    poll.register(fd, 0)
    poll.poll()
    os._exit(0)


def _serve(router: socket.socket, worker: TextWorker) -> None:
    while True:
        message_bytes, after_bytes = HEADER.unpack(_receive(router, HEADER.size))
        task = messages.decode_task(_receive(router, message_bytes))
        after = memoryview(_receive(router, after_bytes))
        report, parts = worker.do(task, after)
        del task, after
        router.sendall(messages.framed(report, sum(map(len, parts))))
        for part in parts:
            router.sendall(part)
        del report, parts
        if after_bytes > _MUCH_BYTES:
            _give_memory_back()


def _give_memory_back() -> None:
    """The C library keeps what is freed: a long text took a hundred times its length."""
    with contextlib.suppress(AttributeError):
        # Only glibc's has it.
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
