"""Tests at load that a model's logits and KV cache have the same bits for any division into steps.

One sequence is computed whole, then in every way that a scheduler may divide it, with other
sequences and several numbers of threads. One layer of each kind suffices: if each layer gives
equal bits for equal inputs, so do many.
"""

from __future__ import annotations

import itertools
from collections import abc
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from penstock_shard.models.base import CausalModel
from penstock_shard.selfcheck.random_steps import RandomSteps, Row, random_steps

# Length of the tested sequence: more than the 256 keys that the attention kernel takes at once, and
# more than small windows.
_LENGTH = 300
_CHUNK = 48
# Decodes are tried at these positions, around key 256, and at the last ones.
_EDGE = range(255, 258)
_LAST = 4
# Also compare every 23rd token. For all tokens, the output head would take most of the time.
_STRIDE = 23
_ROWS = (2, 3, 4, 5, 6, 8, 12, 64, 512)
# Other sequences in a step have up to this many decodes, then long chunks.
_MAX_DECODES = 32
# In larger steps, only compared logits are computed, because the output head is the largest
# product.
_MOST_LOGITS = 64
_FILLER_CHUNK = 448

# One way to compute the sequence, or its end: the rows of each step.
_Way = list[list[Row]]


def first_variance(
    model: CausalModel,
    vocab_size: int,
    max_model_len: int,
    block_size: int,
    kv_dtype: torch.dtype,
    set_threads: Callable[[int], None],
    threads: int,
) -> str | None:
    """Describe the first division that changes a bit; None if none does.

    On cpu, try each division with 1, 2 and `threads` threads; the number is not restored.
    """
    length = min(_LENGTH, max_model_len)
    chunk = min(_FILLER_CHUNK, max_model_len)
    num_fillers = _MAX_DECODES + -(-max(_ROWS) // chunk)
    num_blocks = -(-length // block_size) + num_fillers * -(-chunk // block_size)
    with (
        model.shortened(),
        random_steps(model, vocab_size, block_size, num_blocks, kv_dtype) as steps,
    ):
        watched = _Watched(steps, length, chunk)
        set_threads(1)
        watched.expect()
        on_cpu = model.device.type == "cpu"
        for count in sorted({1, 2, threads}) if on_cpu else [1]:
            set_threads(count)
            for name, way in watched.ways():
                where = f"{name} with {count} threads" if on_cpu else name
                if not all(watched.is_as_expected(rows) for rows in way):
                    return where
                if not watched.is_cached_as_expected():
                    return f"in the KV cache {where}"
    return None


class _Watched:
    """The tested sequence, and the others in its steps."""

    def __init__(self, steps: RandomSteps, length: int, chunk: int) -> None:
        self._steps = steps
        # With states, a token can be computed only once, because that changes the state.
        self._has_states = any(group.has_state for group in steps.model.cache_layout.groups)
        self._length = length
        self._chunk = chunk
        self._sequence = steps.sequence(length)
        count = _MAX_DECODES + -(-max(_ROWS) // chunk)
        self._fillers = [steps.sequence(chunk) for _ in range(count)]
        positions = {*range(0, length, _STRIDE), *_EDGE, *range(length - _LAST, length)}
        # Compared position -> index in `_expected`.
        watched = sorted(position for position in positions if 0 <= position < length)
        self._index = {position: i for i, position in enumerate(watched)}
        self._expected = torch.empty(0)
        self._expected_bytes = torch.empty(0)

    def expect(self) -> None:
        """Compute the sequence whole, and store its logits, keys and values as expected."""
        _, self._expected = self._run([self._piece(0, self._length)])
        self._expected_bytes = self._cached()

    def is_as_expected(self, rows: abc.Sequence[Row]) -> bool:
        """Compute the rows; true if the compared logits have the expected bits."""
        positions, logits = self._run(rows)
        expected = self._expected[[self._index[position] for position in positions]]
        return torch.equal(_bits(logits), _bits(expected))

    def is_cached_as_expected(self) -> bool:
        """Tell whether all blocks of the sequence, except states, have the expected bytes."""
        return torch.equal(self._cached(), self._expected_bytes)

    def _cached(self) -> Tensor:
        model = self._steps.model
        groups = zip(model.cache_layout.groups, self._sequence.block_ids, strict=True)
        parts = [
            part
            for group, (spec, block_ids) in enumerate(groups)
            if not spec.has_state
            for block_id in block_ids
            for part in model.block_parts(group, block_id)
        ]
        return torch.cat(parts) if parts else torch.empty(0)

    def _run(self, rows: abc.Sequence[Row]) -> tuple[list[int], Tensor]:
        positions, wanted, first = [], [], 0
        for sequence, start, count in rows:
            if sequence is self._sequence:
                found = [p for p in range(start, start + count) if p in self._index]
                positions += found
                wanted += [first + position - start for position in found]
            first += count
        if len(rows) > 1 and first <= _MOST_LOGITS:
            return positions, self._steps.run(rows)[wanted]
        return positions, self._steps.run(rows, wanted)

    def ways(self) -> Iterator[tuple[str, _Way]]:
        length = self._length
        decoded = sorted({*_EDGE, *range(max(1, length - _LAST), length)})
        yield "the whole sequence", self._cut([])
        yield f"chunks of {_CHUNK} tokens", self._cut(range(_CHUNK, length, _CHUNK))
        yield "decodes after a chunk", self._cut(decoded)
        yield "a chunk among decodes and chunks", self._after_its_start(self._mixed())
        for rows in _ROWS:
            yield f"{rows} rows", self._after_its_start(self._among(rows))

    def _piece(self, start: int, end: int) -> Row:
        return (self._sequence, start, end - start)

    def _cut(self, starts: abc.Sequence[int]) -> _Way:
        bounds = [0, *(start for start in starts if start < self._length), self._length]
        return [[self._piece(*piece)] for piece in itertools.pairwise(bounds)]

    def _after_its_start(self, rows: list[Row]) -> _Way:
        """Return the steps that compute these rows. With states, there is first a step for the
        sequence's earlier tokens, then one for each of its rows.
        """
        if not self._has_states:
            return [rows]
        own = sorted(row[1] for row in rows if row[0] is self._sequence)
        others = [row for row in rows if row[0] is not self._sequence]
        steps = [[self._piece(0, own[0])]] if own[0] else []
        for place, start in enumerate(own):
            (count,) = {row[2] for row in rows if row[:2] == (self._sequence, start)}
            cut = len(others) * place // len(own)
            steps.append([*others[:cut], (self._sequence, start, count), *others[cut:]])
        return steps

    def _mixed(self) -> list[Row]:
        start, count = self._length // 3, max(1, self._length // 2)
        return [*self._beside(9), (self._sequence, start, count), *self._beside(20)[9:]]

    def _among(self, count: int) -> list[Row]:
        """Return `count` rows, with decodes of the sequence's last tokens first, in the middle and
        last.
        """
        watched = [(self._sequence, self._length - back, 1) for back in (3, 2, 1)]
        watched = [row for row in watched if row[1] >= 0][-count:]
        rows = self._beside(count - len(watched))
        for row, place in zip(watched, (0, len(rows) // 2 + 1, len(rows) + 2), strict=False):
            rows.insert(place, row)
        return rows

    def _beside(self, num_tokens: int) -> list[Row]:
        """Return rows of other sequences, `num_tokens` in all: decodes, then chunks."""
        decodes = min(num_tokens, _MAX_DECODES)
        rows: list[Row] = [(self._fillers[i], 0, 1) for i in range(decodes)]
        left = num_tokens - decodes
        for filler in self._fillers[_MAX_DECODES:]:
            if left > 0:
                rows.append((filler, 0, min(left, self._chunk)))
                left -= self._chunk
        return rows


def _bits(logits: Tensor) -> Tensor:
    """Return the logits' bits as integers, so that NaN equals NaN."""
    return logits.float().contiguous().view(torch.int32)
