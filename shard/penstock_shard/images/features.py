"""What an encoder makes of an image."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class ImageFeatures:
    """`rows` [R, H] stand in the place of embeddings of the image's R tokens, in their order.

    `deep` has more of them: each [R, H] is added to the residual stream behind one of the first
    layers, in order. `grid` are the rows and columns that they are arranged in, where the model's
    positions follow that; else (0, 0).
    """

    rows: Tensor
    deep: tuple[Tensor, ...] = ()
    grid: tuple[int, int] = (0, 0)

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in (self.rows, *self.deep))
