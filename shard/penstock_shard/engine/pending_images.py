"""Sequences that wait for the encoding of their images before they are queued."""

from __future__ import annotations

from penstock_proto.types import PromptImage
from penstock_shard.errors import ImageUnusable
from penstock_shard.ipc.messages import Inbox
from penstock_shard.kv_cache.block_manager import BlockManager
from penstock_shard.sequence import Sequence
from penstock_shard.worker.base import ImageEncoder

# Seconds until an idle engine looks again whether an image is encoded.
_LOOK_AGAIN_S = 0.002
# The salt for `ImageEncoder`, and the image.
_Wanted = tuple[str | None, PromptImage]


class PendingImages:
    """Sequences whose images are being encoded, in order of arrival."""

    def __init__(self, encoder: ImageEncoder, blocks: BlockManager) -> None:
        self._encoder = encoder
        self._blocks = blocks
        # Pixels of incomplete images, by the number of the transfer.
        self._parts: dict[int, bytearray] = {}
        # Images that sequences still wait for.
        self._waiting: dict[Sequence, list[_Wanted]] = {}
        self._ready: list[tuple[Sequence, str]] = []

    def __len__(self) -> int:
        return len(self._waiting) + len(self._ready)

    @property
    def has_work(self) -> bool:
        return bool(self._ready)

    @property
    def due_s(self) -> float | None:
        """Seconds until there may be work; None if there is none."""
        return _LOOK_AGAIN_S if self._waiting else None

    def counts(self) -> dict[str, float]:
        return self._encoder.counts()

    def take(self, message: Inbox) -> None:
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
        """Hold a sequence that must wait, or has failed, until `take_ready`. False if it can
        run.
        """
        request = sequence.request
        if not request.images:
            return False
        num_cached = 0 if sequence.needs_whole_prompt else self._blocks.count_cached(sequence)
        missing: list[_Wanted] = []
        for image in request.images:
            # The rows of an image with cached blocks were checked before.
            is_computed = image.offset + image.num_tokens <= num_cached
            salt = None if is_computed else request.cache_salt
            if not self._encoder.has(salt, image):
                missing.append((salt, image))
        if missing:
            self._waiting[sequence] = missing
        elif why := self._mismatch(sequence):
            self._ready.append((sequence, why))
        else:
            return False
        return True

    def discard(self, sequence: Sequence) -> bool:
        """Forget a sequence that ended; true if it was waiting."""
        missing = self._waiting.pop(sequence, None)
        if missing is not None:
            self._cancel(missing)
        elif sequence in (ready for ready, _ in self._ready):
            self._ready = [pair for pair in self._ready if pair[0] is not sequence]
        else:
            return False
        self._blocks.forget(sequence)
        return True

    def _cancel(self, unwanted: list[_Wanted]) -> None:
        wanted = {
            (salt, image.digest) for missing in self._waiting.values() for salt, image in missing
        }
        for salt, image in unwanted:
            if (salt, image.digest) not in wanted:
                self._encoder.cancel(salt, image)

    def take_ready(self) -> list[tuple[Sequence, str]]:
        """Take sequences that need not wait any more, with the reason of a failure, or ''."""
        ready, self._ready = self._ready, []
        return ready

    def advance(self) -> None:
        for sequence, missing in list(self._waiting.items()):
            try:
                left = [wanted for wanted in missing if not self._encoder.encode(*wanted)]
            except ImageUnusable as error:
                self._end(sequence, f"images: {error}")
                self._cancel(missing)
                continue
            if left:
                self._waiting[sequence] = left
            else:
                self._end(sequence, self._mismatch(sequence))

    def _end(self, sequence: Sequence, why: str) -> None:
        del self._waiting[sequence]
        self._ready.append((sequence, why))

    def _mismatch(self, sequence: Sequence) -> str:
        """Say why a prompt's image tokens do not match the encoder's rows; '' if they do."""
        for image in sequence.request.images:
            ids = sequence.token_ids[image.offset : image.offset + image.num_tokens]
            given, made = ids.count(self._encoder.token_id), self._encoder.num_rows(image.digest)
            if made is not None and given != made:
                return (
                    f"{_named(sequence, image)}: {given} of its tokens have the id for images; the "
                    f"encoder makes {made} rows of {image.width}x{image.height} pixels"
                )
        return ""


def _named(sequence: Sequence, image: PromptImage) -> str:
    return f"images[{sequence.request.images.index(image)}]"
