"""Positions on three axes, in models that have them: time, row and column.

Text has the same position on all three. A token of an image at position p has time p, and its row
and column in the grid, each plus p. Text after the image continues at p plus the grid's longer
side. See Qwen2-VL (Wang et al., 2024), section 2.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PromptPositions:
    """A prompt's positions: `axes` int64 [3, end] up to the end of its last image. Later tokens
    have their index plus `shift` on all axes.
    """

    axes: Integers
    shift: int

    @property
    def end(self) -> int:
        return int(self.axes.shape[1])

    def between(self, start: int, end: int) -> Integers:
        """Positions of tokens [start, end): int64 [3, end - start]."""
        later = np.arange(max(start, self.end), max(end, self.end)) + self.shift
        return np.concatenate([self.axes[:, start:end], np.tile(later, (3, 1))], axis=1)


def prompt_positions(offsets: Sequence[int], grids: Sequence[tuple[int, int]]) -> PromptPositions:
    """Positions of a prompt with images at `offsets`; `grids` are (rows, columns)."""
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
