"""Positions on three axes, where a model has such: time, row and column.

Text has the same position on all three. An image that follows position p has p for its time, and
p plus row and column of its grid; what follows it goes on behind its longer side. Qwen2-VL (Wang et
al., 2024), section 2.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PromptPositions:
    """`axes` int64 [3, end] are those of a prompt's tokens up to its last image's end; a later one
    has its index plus `shift` on all three.
    """

    axes: Integers
    shift: int

    @property
    def end(self) -> int:
        return int(self.axes.shape[1])

    def between(self, start: int, end: int) -> Integers:
        """int64 [3, end - start]."""
        later = np.arange(max(start, self.end), max(end, self.end)) + self.shift
        return np.concatenate([self.axes[:, start:end], np.tile(later, (3, 1))], axis=1)


def prompt_positions(offsets: Sequence[int], grids: Sequence[tuple[int, int]]) -> PromptPositions:
    """Of a prompt with images at these offsets, arranged in so many rows and columns each."""
    parts, known, position = list[Integers](), 0, 0
    for offset, (num_rows, num_columns) in zip(offsets, grids, strict=True):
        text = np.arange(offset - known) + position
        parts.append(np.tile(text, (3, 1)))
        position += offset - known
        rows, columns = np.indices((num_rows, num_columns)).reshape(2, -1)
        parts.append(position + np.stack([np.zeros_like(rows), rows, columns]))
        position += max(num_rows, num_columns)
        known = offset + num_rows * num_columns
    return PromptPositions(np.concatenate(parts, axis=1), position - known)
