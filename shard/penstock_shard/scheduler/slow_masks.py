"""Fills slow masks in separate threads, so that no step waits for them.

A sequence with a slow constraint is in no step until its last token is known and the next token's
mask is filled. So it runs slower, but does not slow down others.
"""

from __future__ import annotations

from collections import abc
from collections.abc import Callable
from concurrent.futures import Executor, Future

from penstock_shard.sequence import Sequence
from penstock_shard.structured_output.matcher_state import ConstraintState, fill_mask


class SlowMasks:
    """Sequences that wait for their masks. Only the stepping thread may use it."""

    def __init__(self, vocab_size: int, on_done: Callable[[], None], threads: Executor) -> None:
        """`on_done` is called in one of `threads` whenever a mask is filled."""
        self._vocab_size = vocab_size
        self._on_done = on_done
        self._threads = threads
        self._waiting: dict[Sequence, Future[None]] = {}

    def __len__(self) -> int:
        self._forget_done()
        return len(self._waiting)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._waiting

    def ready(self, decodes: list[Sequence]) -> list[Sequence]:
        """Return the sequences that may be in a step. Begin to fill the others' masks."""
        self._forget_done()
        return [each for each in decodes if each.constraint is None or self._is_ready(each)]

    def discard(self, sequence: Sequence) -> None:
        filling = self._waiting.pop(sequence, None)
        if filling is not None:
            filling.cancel()

    def _forget_done(self) -> None:
        done = [sequence for sequence, filling in self._waiting.items() if filling.done()]
        for sequence in done:
            self._waiting.pop(sequence).result()

    def _is_ready(self, sequence: Sequence) -> bool:
        state = sequence.constraint
        assert state is not None
        if sequence in self._waiting:
            return False
        if not state.pace.is_slow or state.is_ready_after(sequence.num_output_tokens):
            return True
        if not sequence.num_pending:
            output = sequence.token_ids[sequence.num_prompt_tokens :]
            filling = self._threads.submit(self._fill, state, output)
            self._waiting[sequence] = filling
            filling.add_done_callback(lambda _: self._on_done())
        return False

    def _fill(self, state: ConstraintState, output: abc.Sequence[int]) -> None:
        state.move_to(output)
        fill_mask(state, self._vocab_size)
