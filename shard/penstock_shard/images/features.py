from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class ImageFeatures:
    """An image's features: `rows` [R, H] replace the embeddings of its R tokens, in order.

    Each of `deep`, [R, H], is added to the residual stream after one of the first layers, in order.
    `grid` has the features' numbers of rows and columns if positions depend on them; else (0, 0).
    """

    rows: Tensor
    deep: tuple[Tensor, ...] = ()
    grid: tuple[int, int] = (0, 0)

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in (self.rows, *self.deep))
