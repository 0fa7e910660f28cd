"""A sequence in flight, as its reader sees it. Pure asyncio; knows no gRPC.

What arrives while the reader is away is merged into one output, so a slow reader costs memory for
its own tokens and holds up nobody. A reader waits by iterating, or has itself called and takes what
is there: waking a task costs as much as all else that a token does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Self

from penstock_proto.errors import PenstockError, RequestRefused, ShardFailed
from penstock_proto.limits import MAX_UNREAD_SCORES_BYTES
from penstock_proto.types import AttemptRecord, Logprobs, Output


def _nobody() -> None:
    """Listens to nothing."""


def _too_much_unread() -> RequestRefused:
    return RequestRefused(
        f"logprobs: more than {MAX_UNREAD_SCORES_BYTES} bytes of them wait for their reader; read "
        "faster, or ask for fewer of them or of tokens",
        field="logprobs",
    )


@dataclass(slots=True, eq=False, repr=False)
class GenerationStream:
    """Iterate for everything new since the last time, until the output with a finish reason.

    Raises `PenstockError` subclasses from the iteration. `cancel` (or leaving `async with`) ends
    the generation in the shard. One reader at a time: one that iterates, or one that listens.
    """

    request_id: str
    attempt: int
    _next_position: int
    # Aborts the generation.
    _on_cancel: Callable[[GenerationStream], None]
    # It went on at a shard with other numerics, where tokens may differ at a near-tie. Only a
    # fleet's streams do.
    approximate: bool = False
    # The numerics fingerprints of all shards that gave its tokens; filled in by a fleet.
    fingerprints: list[str] = field(default_factory=list)
    # The attempts so far, in order; kept by a fleet.
    attempts: list[AttemptRecord] = field(default_factory=list)
    # The next index of the prompt's log-probabilities; the token at index 0 has none.
    _next_prompt_index: int = 1
    _on_output: Callable[[], None] = _nobody
    _min_tokens: int = 1
    _pending: Output | None = None
    _error: PenstockError | None = None
    # No more will arrive: finished, failed or cancelled.
    _ended: bool = False

    @property
    def ended(self) -> bool:
        """Tell whether nothing more will arrive from the shard."""
        return self._ended

    @property
    def num_tokens(self) -> int:
        """The number of tokens that have arrived, taken or not, with those given in the request."""
        return self._next_position

    @property
    def progress(self) -> int:
        """Grows with every token, and with every log-probability of the prompt, that arrives."""
        return self._next_position + self._next_prompt_index

    @property
    def has_more(self) -> bool:
        """Tell whether an output is left to take."""
        return self._pending is not None

    def take(self, at_most: int | None = None) -> Output | None:
        """Take the outputs that arrived since the last call, merged; None if there were none. With
        `at_most` no more tokens than that: the others can be taken next.

        Once all is taken, raises the error that the generation failed with, if any.
        """
        output = self._pending
        if output is not None and at_most is not None and len(output.token_ids) > at_most:
            return output.take_first(at_most)
        self._pending = None
        if output is None and self._error is not None:
            # All streams of a connection share one error: it must not collect all their tracebacks.
            raise self._error.with_traceback(None)
        return output

    def listen(self, on_output: Callable[[], None], *, min_tokens: int = 1) -> None:
        """Have `on_output` called when `min_tokens` tokens can be taken, and at the end.

        It is called by the task that receives for all streams of a shard: it must be quick, and
        raise nothing.
        """
        self._on_output, self._min_tokens = on_output, min_tokens

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Output:
        while (output := self.take()) is None:
            if self._ended:
                raise StopAsyncIteration
            news = asyncio.Event()
            self.listen(news.set, min_tokens=0)
            try:
                await news.wait()
            finally:
                self.listen(_nobody)
        return output

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *raised: object) -> None:
        self.cancel()

    def cancel(self) -> None:
        """Abort the generation. Idempotent; a reader that waits gets `StopAsyncIteration`."""
        if self._ended:
            return
        self._ended = True
        self._pending = None
        self._on_cancel(self)
        self._on_output()

    # ---- called by the connection ----

    def feed(self, output: Output) -> None:
        """Take an output of the shard; drops tokens that are known already, fails on a gap."""
        if not self._ended and self._accept(output):
            self._tell()

    def _tell(self) -> None:
        pending = self._pending
        if self._ended or (pending is not None and len(pending.token_ids) >= self._min_tokens):
            self._on_output()

    def _accept(self, output: Output) -> bool:
        """Keep an output for the reader, without notifying it; False if tokens are missing."""
        if output.first_position != self._next_position or output.prompt_logprobs is not None:
            gap = self._align(output)
            if gap:
                self._on_cancel(self)
                self.fail(ShardFailed(f"request {self.request_id}: {gap}"))
                return False
        pending = self._pending
        if pending and pending.scores_bytes + output.scores_bytes > MAX_UNREAD_SCORES_BYTES:
            self._on_cancel(self)
            self.fail(_too_much_unread())
            return False
        self._next_position += len(output.token_ids)
        if pending is None:
            self._pending = output
        else:
            pending.merge(output)
        if output.finish_reason is not None:
            self._ended = True
        return True

    def fail(self, error: PenstockError) -> None:
        """End with an error, which the reader gets after the outputs it has not taken yet."""
        if self._ended:
            return
        self._ended = True
        self._error = error
        self._on_output()

    def _align(self, output: Output) -> str:
        """Cut off tokens that are known; returns an error text if there is a gap, "" if not."""
        known = self._next_position - output.first_position
        if known < 0:
            return (
                f"tokens from position {output.first_position} arrived, "
                f"{self._next_position} was next"
            )
        if known > 0:
            del output.token_ids[:known]
            output.first_position = self._next_position
            if output.logprobs is not None:
                output.logprobs.drop_first(known)
        if output.prompt_logprobs is not None:
            return self._align_prompt(output, output.prompt_logprobs)
        return ""

    def _align_prompt(self, output: Output, logprobs: Logprobs) -> str:
        """Do as `_align` does, for the prompt's log-probabilities; each attempt sends them all
        again.
        """
        known = self._next_prompt_index - output.prompt_logprobs_start
        if known < 0:
            return (
                f"log-probabilities of the prompt from index {output.prompt_logprobs_start} "
                f"arrived, {self._next_prompt_index} was next"
            )
        if known > 0:
            logprobs.drop_first(known)
            output.prompt_logprobs_start += known
        self._next_prompt_index += len(logprobs.chosen)
        if not logprobs.chosen:
            output.prompt_logprobs = None
        return ""
