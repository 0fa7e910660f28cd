"""A text process: parses long bodies and does their text work, where it blocks no event loop.

    python -m penstock_router.offload.text_process FD LOG_LEVEL LOG_FORMAT

Does one task at a time for the router at the other end of the socket FD, until that end is closed
or gone. A task that takes too long ends the process. Each task has all that it needs, but for a
model's files, which come with the first one and are kept.
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
from io import BufferedRWPair
from pathlib import Path

from penstock_common.logs import set_up_logging
from penstock_router.apis.responses.stored import read_stored
from penstock_router.errors import ApiError, as_api_error
from penstock_router.offload.body_kinds import KINDS, Reading, read, work
from penstock_router.offload.text_messages import (
    HEADER,
    MAX_TASK_S,
    ModelFacts,
    Outcome,
    Read,
    Show,
    Task,
    Work,
    decode_task,
    encode_outcome,
)
from penstock_router.text.chat_template import load_chat_template
from penstock_router.text.image_tokens.registry import load_image_tokens
from penstock_router.text.model_conventions import conventions_named
from penstock_router.text.prompts import TextModel
from penstock_router.text.tokenizer import load_tokenizer

logger = logging.getLogger("penstock.text_process")

# Where processors are scarce, the router's event loop goes first: many wait for it.
_NICENESS = 5
# The kernel's oom_score_adj, of 1000: when memory runs out, kill a text process first, which is
# soon replaced.
_OOM_SCORE = 500
# After bodies longer than this, returning memory to the system is worth a few milliseconds.
_MUCH_BYTES = 1024 * 1024


class TextWorker:
    """Does the router's tasks. Keeps models, and the last body that was parsed."""

    def __init__(self) -> None:
        self._kept: tuple[int, Reading] | None = None
        self._models: dict[ModelFacts, TextModel] = {}

    def load(self, task: Work, parts: Sequence[bytes]) -> None:
        """Load a model of the files that came with a task, if any did."""
        if task.file_names:
            files = dict(zip(task.file_names, parts[2:], strict=True))
            facts = task.model
            tokenizer = load_tokenizer(files)
            image_tokens, images_unusable = load_image_tokens(files, tokenizer)
            self._models[facts] = TextModel(
                name=facts.name,
                max_model_len=facts.max_model_len,
                vocab_size=facts.vocab_size,
                tokenizer=tokenizer,
                chat_template=load_chat_template(files),
                trusts_templates=facts.trusts_templates,
                conventions=conventions_named(facts.tool_format, facts.reasoning),
                image_tokens=image_tokens,
                images_unusable=images_unusable,
            )

    def do(self, task: Task, parts: Sequence[bytes]) -> bytes:
        """Do a task; returns the message of its outcome. Raises nothing but `MemoryError`."""
        try:
            return encode_outcome(self._do(task, parts))
        except MemoryError:
            raise
        except ApiError as error:
            return encode_outcome(error)
        except Exception as error:  # a defect costs the body it shows on
            logger.exception("a body could not be worked on")
            return encode_outcome(as_api_error(error))

    def _do(self, task: Task, parts: Sequence[bytes]) -> Outcome:
        match task:
            case Read():
                return self._read(task, *parts)
            case Work():
                return self._work(task, *parts[:2])
            case Show():
                response, messages = parts
                return read_stored(response, messages, task.page)

    def _read(self, task: Read, body: bytes) -> Reading:
        self._kept = None
        reading = read(KINDS[task.kind], body, with_digest=task.with_digest)
        self._kept = task.number, reading
        return reading

    def _work(self, task: Work, body: bytes, earlier: bytes) -> Outcome:
        kept, self._kept = self._kept, None
        if kept is not None and kept[0] == task.number:
            reading = kept[1]
        else:
            reading = read(KINDS[task.kind], body, with_digest=False)
        if reading.refusal is not None:
            raise reading.refusal
        model = self._models[task.model]
        return work(reading.kind, reading.asked, model, earlier, task.image_sizes)


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
        with contextlib.suppress(EOFError, ConnectionError), router.makefile("rwb") as stream:
            _serve(stream, TextWorker())
    return 0


def _end_with(fd: int) -> None:
    """Exit when the router is gone, even in the middle of a task."""
    poll = select.poll()
    # No events: a hang-up is always reported.
    poll.register(fd, 0)
    poll.poll()
    os._exit(0)


def _serve(stream: BufferedRWPair, worker: TextWorker) -> None:
    while True:
        [num_bytes] = HEADER.unpack(_exactly(stream, HEADER.size))
        task, sizes = decode_task(_exactly(stream, num_bytes))
        parts = [_exactly(stream, size) for size in sizes]
        _end_after(MAX_TASK_S)
        if isinstance(task, Work):
            worker.load(task, parts)
            _end_after(task.max_s)
        outcome = worker.do(task, parts)
        _end_after(0)
        del task, parts
        stream.write(outcome)
        stream.flush()
        del outcome
        if sum(sizes) > _MUCH_BYTES:
            _give_memory_back()


def _end_after(max_s: float) -> None:
    """Have the kernel end the process after that time, by SIGALRM; 0: not any more. Nothing else
    ends work that never releases the interpreter lock, such as a huge power in a template.
    """
    signal.setitimer(signal.ITIMER_REAL, max_s)


def _give_memory_back() -> None:
    """Return freed memory to the system: a long text takes a hundred times its length."""
    with contextlib.suppress(AttributeError):
        # Only glibc has malloc_trim.
        ctypes.CDLL(None).malloc_trim(0)


def _exactly(stream: BufferedRWPair, num_bytes: int) -> bytes:
    data = stream.read(num_bytes)
    if len(data) < num_bytes:
        raise EOFError
    return data


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
