"""The rows of a step's residual stream that come from images."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock_proto.types import PromptImage
from penstock_shard.errors import ImageUnusable
from penstock_shard.images.features import ImageFeatures
from penstock_shard.images.positions import Integers, PromptPositions, prompt_positions
from penstock_shard.models.base import ImageInputs
from penstock_shard.sequence import Sequence
from penstock_shard.worker.base import Batch, ImageEncoder


class FeatureSource(ImageEncoder, Protocol):
    """The encoder interface that a model's runner needs. Methods raise `ImageUnusable` if they
    fail.
    """

    # The axis of positions for each rotary frequency; empty if there is one axis.
    axis_of_frequencies: tuple[int, ...]

    def features(self, salt: str, image: PromptImage) -> ImageFeatures:
        """Return the features of the image's tokens."""

    def grid(self, salt: str, image: PromptImage) -> tuple[int, int]:
        """Return how many rows and columns of features the image has."""


@dataclass(slots=True)
class _Placed:
    image: PromptImage
    salt: str
    # For each token of the image, the number of features before it; then the total.
    num_before: Integers
    features: ImageFeatures | None = None

    def runs(self) -> list[tuple[int, int]]:
        """Return the runs of tokens with features, as (first, end) in the sequence."""
        has_row = np.pad(np.diff(self.num_before), 1)
        edges = np.flatnonzero(np.diff(has_row)) + self.image.offset
        return [(int(first), int(end)) for first, end in edges.reshape(-1, 2)]


@dataclass(slots=True)
class _Seeing:
    """A sequence with images. If `error` is set, its rows are void."""

    placed: list[_Placed]
    positions: PromptPositions | None = None
    error: str = ""

    @property
    def end(self) -> int:
        return max(placed.image.offset + placed.image.num_tokens for placed in self.placed)


@dataclass(slots=True)
class _Found:
    """The features that a step's rows need, row after row."""

    places: list[Tensor] = field(default_factory=list)
    rows: list[Tensor] = field(default_factory=list)
    deep: list[list[Tensor]] = field(default_factory=list)
    errors: dict[int, str] = field(default_factory=dict)

    def add(self, first: int, own: Integers, begin: int, features: ImageFeatures) -> None:
        """Add the features from `begin` on, for the tokens `own` of a sequence. The tokens' indices
        in the step are `own + first`.
        """
        end = begin + len(own)
        self.places.append(torch.from_numpy(own + first))
        self.rows.append(features.rows[begin:end])
        self.deep.append([each[begin:end] for each in features.deep])


class ImageRows:
    """Image features by slot, from the first step that needs them to the last."""

    def __init__(self, source: FeatureSource, device: torch.device) -> None:
        self._source = source
        self._device = device
        self._axes = np.array(source.axis_of_frequencies, dtype=np.int64)
        self._seeing: dict[int, _Seeing] = {}

    def admit(self, sequence: Sequence) -> None:
        request = sequence.request
        if not request.images:
            return
        ids = np.array(sequence.token_ids, dtype=np.uint32)
        seeing = self._seeing[sequence.slot] = _Seeing(
            [
                _Placed(image, request.cache_salt, self._num_before(ids, image))
                for image in request.images
            ]
        )
        if len(self._axes):
            try:
                grids = [self._source.grid(request.cache_salt, each) for each in request.images]
            except ImageUnusable as error:
                seeing.error = str(error)
            else:
                offsets = [image.offset for image in request.images]
                seeing.positions = prompt_positions(offsets, grids)

    def release(self, slot: int) -> None:
        self._seeing.pop(slot, None)

    def shifts(self, slots: Integers) -> Integers | None:
        """See `input_batch.ImagePlaces`."""
        if not (self._seeing and len(self._axes)):
            return None
        found = (self._seeing.get(slot) for slot in slots.tolist())
        positions = (None if each is None else each.positions for each in found)
        return np.array([0 if each is None else each.shift for each in positions])

    def spans(self, batch: Batch) -> list[tuple[int, int]]:
        """See `input_batch.ImagePlaces`."""
        found, offset = [], 0
        for slot, start, count in zip(batch.slots, batch.starts, batch.counts, strict=True):
            seeing = self._seeing.get(slot) if count > 1 else None
            for placed in () if seeing is None else seeing.placed:
                for first, end in placed.runs():
                    if start <= first and end <= start + count:
                        found.append((first - start + offset, end - start + offset))
            offset += count
        return found

    def are_in(self, batch: Batch) -> bool:
        """See `input_batch.ImagePlaces`. True if `inputs` returns image inputs."""
        if not self._seeing:
            return False
        rows = zip(batch.slots, batch.starts, strict=True)
        return any(start < seeing.end for slot, start in rows if (seeing := self._seeing.get(slot)))

    def inputs(self, batch: Batch) -> tuple[ImageInputs | None, dict[int, str]]:
        """Return the image inputs for a batch, if any, and the reasons why rows are void."""
        found = _Found()
        if not self._seeing:
            return None, found.errors
        first, turns = 0, False
        for row, (slot, start, count) in enumerate(
            zip(batch.slots, batch.starts, batch.counts, strict=True)
        ):
            seeing = self._seeing.get(slot)
            if seeing is not None:
                turns = turns or (seeing.positions is not None and start < seeing.positions.end)
                self._add_row(found, seeing, row, first - start, (start, start + count))
            first += count
        if not (found.rows or turns):
            return None, found.errors
        angles = torch.from_numpy(self._angles(batch)) if turns else None
        none = torch.zeros(0, dtype=torch.int64)
        made = ImageInputs(
            torch.cat([none, *found.places]).to(self._device),
            torch.cat(found.rows).to(self._device) if found.rows else none.to(self._device),
            tuple(torch.cat(each).to(self._device) for each in zip(*found.deep, strict=True)),
            None if angles is None else angles.to(self._device),
        )
        return made, found.errors

    def _add_row(
        self, found: _Found, seeing: _Seeing, row: int, first: int, tokens: tuple[int, int]
    ) -> None:
        if seeing.error:
            found.errors[row] = seeing.error
            return
        for placed in seeing.placed:
            image = placed.image
            end = image.offset + image.num_tokens
            low, high = max(tokens[0], image.offset), min(tokens[1], end)
            if low >= high:
                continue
            try:
                features = self._features(placed)
            except ImageUnusable as error:
                found.errors[row] = f"an image of {image.width}x{image.height} pixels: {error}"
                return
            if high == end:
                # Tokens are computed in order, so no later row needs the features.
                placed.features = None
            before = placed.num_before[low - image.offset : high - image.offset + 1]
            own = low + np.flatnonzero(np.diff(before))
            found.add(first, own, int(before[0]), features)

    def _features(self, placed: _Placed) -> ImageFeatures:
        if placed.features is None:
            placed.features = self._source.features(placed.salt, placed.image)
        expected, given = len(placed.features.rows), int(placed.num_before[-1])
        if given != expected:
            raise ImageUnusable(f"it stands for {expected} tokens; the prompt has {given}")
        return placed.features

    def _angles(self, batch: Batch) -> Integers:
        """Return int64 [T, rotary_dim / 2]: each token's position for each rotary frequency."""
        parts = []
        for slot, start, count in zip(batch.slots, batch.starts, batch.counts, strict=True):
            seeing = self._seeing.get(slot)
            if seeing is None or seeing.positions is None:
                parts.append(np.tile(np.arange(start, start + count), (3, 1)))
            else:
                parts.append(seeing.positions.between(start, start + count))
        return np.ascontiguousarray(np.concatenate(parts, axis=1)[self._axes].T)

    def _num_before(self, token_ids: NDArray[np.uint32], image: PromptImage) -> Integers:
        own = token_ids[image.offset : image.offset + image.num_tokens] == self._source.token_id
        return np.concatenate([[0], np.cumsum(own)])
