"""Sequences that wait for their images to be encoded before they are queued."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from penstock_shard.errors import ImageUnusable
from penstock_shard.ipc.messages import Inbox
from penstock_shard.ipc.request import PlacedImage
from penstock_shard.kv_cache.block_manager import BlockManager
from penstock_shard.sequence import Sequence
from penstock_shard.worker.base import ImageEncoder

# What encoding may take of the time of a step beside which it comes, and at least; and how long a
# turn lasts where nothing runs.
_SHARE = 0.25
_LEAST_S = 0.002
_IDLE_S = 0.05
# How long to wait before looking again whether an image is resized.
_LOOK_AGAIN_S = 0.002


class PendingImages:
    """Encodes one image after the other, in the order of the sequences that came."""

    def __init__(self, encoder: ImageEncoder, blocks: BlockManager) -> None:
        self._encoder = encoder
        self._blocks = blocks
        # What the last step took.
        self.step_s = 0.0
        # Of images that have not come completely, by the number of their transfer.
        self._parts: dict[int, bytearray] = {}
        self._waiting: dict[Sequence, deque[PlacedImage]] = {}
        self._ready: list[tuple[Sequence, str]] = []
        self._is_stuck = False
        self._num_encoded = 0
        self._encode_s = 0.0

    def __len__(self) -> int:
        return len(self._waiting) + len(self._ready)

    @property
    def has_work(self) -> bool:
        return bool(self._ready) or (bool(self._waiting) and not self._is_stuck)

    @property
    def due_s(self) -> float | None:
        """In how many seconds there may be work; None if there is none."""
        return _LOOK_AGAIN_S if self._waiting else None

    def counts(self) -> dict[str, Any]:
        """Those of `Load` that are of images."""
        return {
            "encoded_images_total": self._num_encoded,
            "encode_seconds_total": self._encode_s,
        }

    def take(self, message: Inbox) -> None:
        """Take pieces of images, and drop images."""
        for piece in message.image_pieces:
            if not piece.num_bytes:
                self._parts.pop(piece.number, None)
            elif piece.digest:
                self._encoder.put(piece.digest, bytes(self._parts.pop(piece.number, b"")))
            else:
                self._parts.setdefault(piece.number, bytearray()).extend(piece.data)
        for drop in message.image_drops:
            self._encoder.drop(drop.digest)

    def hold(self, sequence: Sequence) -> bool:
        """Whether a sequence has to wait, or fails: `take_ready` gives it then."""
        request = sequence.request
        if not request.images:
            return False
        num_cached = 0 if sequence.needs_whole_prompt else self._blocks.count_cached(sequence)
        missing = deque[PlacedImage]()
        for image in request.images:
            is_known = self._encoder.num_rows(image.digest) is not None
            is_computed = image.offset + image.num_tokens <= num_cached
            if not (is_known and (is_computed or self._encoder.has(request.cache_salt, image))):
                missing.append(image)
        if missing:
            self._waiting[sequence] = missing
        elif why := self._mismatch(sequence):
            self._ready.append((sequence, why))
        else:
            return False
        return True

    def discard(self, sequence: Sequence) -> bool:
        """Forget a sequence that ended; whether it waited."""
        if self._waiting.pop(sequence, None) is not None:
            self._blocks.forget(sequence)
            return True
        for index, (ready, _) in enumerate(self._ready):
            if ready is sequence:
                del self._ready[index]
                self._blocks.forget(sequence)
                return True
        return False

    def take_ready(self) -> list[tuple[Sequence, str]]:
        """Sequences that wait no more, and why each fails: empty if it does not."""
        ready, self._ready = self._ready, []
        return ready

    def advance(self, *, is_idle: bool) -> None:
        """Go on encoding, for as long as what runs beside it allows."""
        seconds = _IDLE_S if is_idle else max(_LEAST_S, _SHARE * self.step_s)
        self._is_stuck = False
        for sequence in list(self._waiting):
            missing, salt = self._waiting[sequence], sequence.request.cache_salt
            is_new, began_s = not self._encoder.has(salt, missing[0]), time.monotonic()
            try:
                is_encoded = self._encoder.encode(salt, missing[0], seconds)
            except ImageUnusable as error:
                self._end(sequence, f"{_named(sequence, missing[0])}: {error}")
                continue
            finally:
                self._encode_s += time.monotonic() - began_s
            if is_encoded:
                self._num_encoded += is_new
                missing.popleft()
                if not missing:
                    self._end(sequence, self._mismatch(sequence))
            else:
                self._is_stuck = is_idle
            return

    def _end(self, sequence: Sequence, why: str) -> None:
        del self._waiting[sequence]
        self._ready.append((sequence, why))

    def _mismatch(self, sequence: Sequence) -> str:
        """How the places in a prompt differ from what the encoder makes; empty if they do not."""
        for image in sequence.request.images:
            ids = sequence.token_ids[image.offset : image.offset + image.num_tokens]
            given, made = ids.count(self._encoder.token_id), self._encoder.num_rows(image.digest)
            if made is not None and given != made:
                return (
                    f"{_named(sequence, image)}: {given} of its tokens have the id for images; the "
                    f"encoder makes {made} rows of {image.width}x{image.height} pixels"
                )
        return ""


def _named(sequence: Sequence, image: PlacedImage) -> str:
    return f"images[{sequence.request.images.index(image)}]"
