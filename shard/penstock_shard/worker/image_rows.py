"""Which rows of the residual stream of a step come from images."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from penstock_shard.errors import ImageUnusable
from penstock_shard.images.features import ImageFeatures
from penstock_shard.ipc.request import PlacedImage
from penstock_shard.models.base import ImageInputs
from penstock_shard.worker.base import Admission, Batch, ImageEncoder


class FeatureSource(ImageEncoder, Protocol):
    """What a runner of a model asks of its encoder besides."""

    def features(self, salt: str, image: PlacedImage) -> ImageFeatures:
        """What stands in the image's places. Raises `ImageUnusable`."""


@dataclass(slots=True)
class _Placed:
    """An image of the sequence in a slot."""

    image: PlacedImage
    salt: str
    # Of each of its tokens, how many before it have a row of features; and of them all.
    num_before: NDArray[np.int64]
    features: ImageFeatures | None = None


class ImageRows:
    """Features of the sequences in slots, from when a step needs them until all are computed."""

    def __init__(self, source: FeatureSource, device: torch.device) -> None:
        self._source = source
        self._device = device
        self._placed: dict[int, list[_Placed]] = {}

    def admit(self, admission: Admission) -> None:
        """A sequence has this slot from now on."""
        request = admission.request
        if request.images:
            ids = np.frombuffer(admission.token_ids, dtype=np.uint32)
            self._placed[admission.slot] = [
                _Placed(image, request.cache_salt, self._num_before(ids, image))
                for image in request.images
            ]

    def release(self, slot: int) -> None:
        """The slot is free."""
        self._placed.pop(slot, None)

    def inputs(self, batch: Batch) -> tuple[ImageInputs | None, dict[int, str]]:
        """What the model gets for a batch, None if nothing; and why rows of it are void."""
        if not self._placed:
            return None, {}
        places, rows, deep, errors = [], [], [], dict[int, str]()
        first = 0
        for row, (slot, start, count) in enumerate(
            zip(batch.slots, batch.starts, batch.counts, strict=True)
        ):
            for placed in self._placed.get(slot, ()):
                found = self._of_row(placed, start, start + count)
                if isinstance(found, str):
                    errors[row] = found
                elif found is not None:
                    own, begin, features = found
                    places.append(torch.from_numpy(own + (first - start)))
                    rows.append(features.rows[begin : begin + len(own)])
                    deep.append([each[begin : begin + len(own)] for each in features.deep])
            first += count
        if not rows:
            return None, errors
        made = ImageInputs(
            torch.cat(places).to(self._device),
            torch.cat(rows).to(self._device),
            tuple(torch.cat(each).to(self._device) for each in zip(*deep, strict=True)),
        )
        return made, errors

    def _of_row(
        self, placed: _Placed, start: int, end: int
    ) -> tuple[NDArray[np.int64], int, ImageFeatures] | str | None:
        """Of the tokens [start, end) those in the image's places, the first of their rows, and the
        features; or why there are none.
        """
        image = placed.image
        low, high = max(start, image.offset), min(end, image.offset + image.num_tokens)
        if low >= high:
            return None
        before = placed.num_before[low - image.offset : high - image.offset + 1]
        if placed.features is None:
            try:
                placed.features = self._source.features(placed.salt, image)
            except ImageUnusable as error:
                return f"an image of {image.width}x{image.height} pixels: {error}"
        features = placed.features
        if high == image.offset + image.num_tokens:
            # A sequence is computed in order.
            placed.features = None
        if len(features.rows) != placed.num_before[-1]:
            return f"an image stands for {placed.num_before[-1]} tokens, not {len(features.rows)}"
        own = low + np.flatnonzero(np.diff(before))
        return own, int(before[0]), features

    def _num_before(self, token_ids: NDArray[np.uint32], image: PlacedImage) -> NDArray[np.int64]:
        own = token_ids[image.offset : image.offset + image.num_tokens] == self._source.token_id
        return np.concatenate([[0], np.cumsum(own)])
