"""A text process: parses long bodies and does their text work, so that no event loop is blocked.

    python -m penstock_router.offload.text_process FD LOG_LEVEL LOG_FORMAT

Does one task at a time for the router at the other end of the socket FD, until the socket is
closed. A task that takes too long ends the process. A task contains all its data, except a model's
files: the model's first task brings them, and they are kept.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from io import BufferedRWPair

from penstock_common.child_process.child_end import end_after, read_exactly, stream_to_parent
from penstock_common.child_process.framing import receive_frame
from penstock_common.malloc import return_free_memory
from penstock_router.apis.responses.stored import read_stored
from penstock_router.errors import ApiError, as_api_error
from penstock_router.offload.body_kinds import KINDS, Reading, read, work
from penstock_router.offload.text_messages import (
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
from penstock_router.text.model_conventions import conventions_of
from penstock_router.text.prompts import TextModel
from penstock_router.text.tokenizer import load_tokenizer

logger = logging.getLogger("penstock.text_process")

# After longer bodies, returning memory to the system is worth a few milliseconds.
_MUCH_BYTES = 1024 * 1024


class TextWorker:
    """Does the router's tasks. Keeps models, and the last body that it parsed."""

    def __init__(self) -> None:
        self._kept: tuple[int, Reading] | None = None
        self._models: dict[ModelFacts, TextModel] = {}

    def load(self, task: Work, parts: Sequence[bytes]) -> None:
        """Load the model of a task that brings its files."""
        if task.file_names:
            files = dict(zip(task.file_names, parts[2:], strict=True))
            facts = task.model
            tokenizer = load_tokenizer(files)
            image_tokens, images_unusable = load_image_tokens(files, tokenizer)
            template = load_chat_template(files)
            self._models[facts] = TextModel(
                name=facts.name,
                max_model_len=facts.max_model_len,
                vocab_size=facts.vocab_size,
                tokenizer=tokenizer,
                chat_template=template,
                trusts_templates=facts.trusts_templates,
                conventions=conventions_of(
                    template, facts.tool_call_parser, facts.reasoning_parser
                ),
                image_tokens=image_tokens,
                images_unusable=images_unusable,
            )

    def do(self, task: Task, parts: Sequence[bytes]) -> bytes:
        """Do a task; return the message of its outcome. Raises only `MemoryError`."""
        try:
            return encode_outcome(self._do(task, parts))
        except MemoryError:
            raise
        except ApiError as error:
            return encode_outcome(error)
        except Exception as error:  # a defect fails only this body
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
    with stream_to_parent(*argv) as stream:
        _serve(stream, TextWorker())
    return 0


def _serve(stream: BufferedRWPair, worker: TextWorker) -> None:
    while (message := receive_frame(stream.read)) is not None:
        task, sizes = decode_task(message)
        parts = [read_exactly(stream, size) for size in sizes]
        end_after(MAX_TASK_S)
        if isinstance(task, Work):
            worker.load(task, parts)
            end_after(task.max_s)
        outcome = worker.do(task, parts)
        end_after(0)
        del task, parts
        stream.write(outcome)
        stream.flush()
        del outcome
        if sum(sizes) > _MUCH_BYTES:
            return_free_memory()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
