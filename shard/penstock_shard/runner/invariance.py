"""Whether a model's logits have the same bits however steps are cut: tried out at load.

One sequence is computed whole, and then again in every way a scheduler may cut it and beside other
sequences, with one and with two threads. One layer of each kind runs: layers of a kind run the
same code on the same shapes, so if one gives equal bits for equal inputs, a stack of them does.

Knows which ways there are. Knows nothing of how the model computes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from penstock_shard.models.base import CausalModel
from penstock_shard.runner.trial import Row, TrialSteps, trial_steps

# Tokens of the sequence that is watched: more than two tiles of keys, and some over.
_LENGTH = 37
_ROWS = (2, 3, 7, 64, 512)
# Tokens computed besides: as many decodes as this, then one long chunk.
_MAX_DECODES = 32
# The head is a product like those of the layers, which all rows go through, but a large one.
_MOST_LOGITS = 64
_FILLER_CHUNK = 448


def first_variance(
    model: CausalModel,
    vocab_size: int,
    max_model_len: int,
    block_size: int,
    kv_dtype: torch.dtype,
    set_threads: Callable[[int], None],
) -> str | None:
    """The first way of cutting that changes a bit, in words; None if none does.

    `set_threads` is left at 2.
    """
    length = min(_LENGTH, max_model_len)
    chunk = min(_FILLER_CHUNK, max_model_len)
    num_fillers = _MAX_DECODES + -(-max(_ROWS) // chunk)
    num_blocks = -(-length // block_size) + num_fillers * -(-chunk // block_size)
    with (
        model.shortened(),
        trial_steps(model, vocab_size, block_size, num_blocks, kv_dtype) as steps,
    ):
        watched = _Watched(steps, length, chunk)
        set_threads(1)
        expected = watched.whole()
        for threads in (1, 2):
            set_threads(threads)
            for name, found, start in watched.ways():
                if not torch.equal(_bits(found), _bits(expected[start : start + len(found)])):
                    return f"{name} with {threads} threads"
    return None


class _Watched:
    """A sequence and others beside it. Each way yields its name, logits [n, V] of consecutive
    tokens of the sequence, and the index of the first of them.
    """

    def __init__(self, steps: TrialSteps, length: int, chunk: int) -> None:
        self._steps = steps
        self._length = length
        self._chunk = chunk
        self._sequence = steps.sequence(length)
        count = _MAX_DECODES + -(-max(_ROWS) // chunk)
        self._fillers = [steps.sequence(chunk) for _ in range(count)]

    def whole(self) -> Tensor:
        return self._steps.run([(self._sequence, 0, self._length)])

    def ways(self) -> Iterator[tuple[str, Tensor, int]]:
        yield "the whole sequence", self.whole(), 0
        yield "chunks of 16 tokens", self._cut(16), 0
        yield "decodes after a chunk", self._cut(1, first=max(1, self._length - 8)), 0
        yield "a chunk among decodes and chunks", *self._mixed()
        for rows in _ROWS:
            yield f"{rows} rows", self._among(rows), self._length - 1

    def _cut(self, size: int, first: int | None = None) -> Tensor:
        """In pieces of `size` after one of `first`."""
        ends = [*range(first or size, self._length, size), self._length]
        starts = [0, *ends[:-1]]
        return torch.cat(
            [
                self._steps.run([(self._sequence, start, end - start)])
                for start, end in zip(starts, ends, strict=True)
            ]
        )

    def _mixed(self) -> tuple[Tensor, int]:
        start, count = self._length // 3, max(1, self._length // 2)
        before = self._beside(9)
        found = self._steps.run([*before, (self._sequence, start, count), *self._beside(20)[9:]])
        first = sum(row[2] for row in before)
        return found[first : first + count], start

    def _among(self, rows: int) -> Tensor:
        """The last token, as the first of so many rows."""
        last: Row = (self._sequence, self._length - 1, 1)
        wanted = range(min(rows, _MOST_LOGITS))
        return self._steps.run([last, *self._beside(rows - 1)], wanted)[:1]

    def _beside(self, num_tokens: int) -> list[Row]:
        """Other rows with so many tokens: decodes, then chunks from the start of a sequence."""
        decodes = min(num_tokens, _MAX_DECODES)
        rows: list[Row] = [(self._fillers[i], 0, 1) for i in range(decodes)]
        left = num_tokens - decodes
        for filler in self._fillers[_MAX_DECODES:]:
            if left > 0:
                rows.append((filler, 0, min(left, self._chunk)))
                left -= self._chunk
        return rows


def _bits(logits: Tensor) -> Tensor:
    """So that a NaN equals itself."""
    return logits.float().contiguous().view(torch.int32)
