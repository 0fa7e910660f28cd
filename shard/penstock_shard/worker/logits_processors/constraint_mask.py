"""Bans the ids that a sequence's constraint does not allow."""

from __future__ import annotations

from collections import abc
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock_proto.engine_request import EngineRequest
from penstock_shard.device.async_copy import is_host, to_device
from penstock_shard.sequence import Sequence
from penstock_shard.worker.logits_processors.base import LogitsProcessor, LogitsState, index

if TYPE_CHECKING:
    from penstock_shard.structured_output.matcher_state import ConstraintState, MaskFiller


class _Constrained(LogitsState):
    def __init__(self, sequence: Sequence) -> None:
        assert sequence.constraint is not None
        self.constraint: ConstraintState = sequence.constraint
        self.constraint.move_to(sequence.token_ids[sequence.num_prompt_tokens :])

    @property
    def problem(self) -> str:
        return self.constraint.error

    def append(self, token_id: int) -> None:
        self.constraint.append(token_id)

    def skip(self) -> None:
        self.constraint.skip()

    def repeat(self) -> None:
        self.constraint.repeat()


class ConstraintMask(LogitsProcessor[_Constrained]):
    """Fills masks in threads while the forward pass runs."""

    def __init__(self, masks: MaskFiller | None) -> None:
        self._masks = masks
        # Waits until the masks are filled.
        self._finish: Callable[[], None] | None = None

    def wants(self, request: EngineRequest) -> bool:
        return request.constraint is not None

    def begin(self, sequence: Sequence) -> _Constrained:
        return _Constrained(sequence)

    def prepare(self, states: abc.Sequence[_Constrained]) -> None:
        assert self._masks is not None
        self._finish = self._masks.start([state.constraint for state in states])

    def apply(self, logits: Tensor, rows: abc.Sequence[tuple[int, _Constrained]]) -> None:
        self.abandon()
        mask_rows(logits, [(i, state.constraint.mask) for i, state in rows])

    def abandon(self) -> None:
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()


def mask_rows(logits: Tensor, rows: abc.Sequence[tuple[int, NDArray[np.int32] | None]]) -> None:
    """Ban the ids that the masks do not allow. If a constraint failed, its row has no mask, and all
    ids are banned.
    """
    for i, mask in rows:
        if mask is None:
            logits[i] = float("-inf")
    masked = [(i, mask) for i, mask in rows if mask is not None]
    if not masked:
        return
    masks = np.stack([mask for _, mask in masked])
    if is_host(logits):
        # Work row by row on this thread, because torch's thread pool is busy computing.
        values, forbidden = logits.numpy(), unpacked(~masks, logits.shape[1])
        for (i, _), row in zip(masked, forbidden, strict=True):
            np.copyto(values[i], -np.inf, where=row)
        return
    # Copy one bit for each token to the device, not one byte.
    chosen = index([i for i, _ in masked], logits)
    rest = forbidden_bits(to_device(masks, logits.device), logits.shape[1])
    logits.index_copy_(0, chosen, logits[chosen].masked_fill_(rest, float("-inf")))


def unpacked(masks: NDArray[np.int32], vocab_size: int) -> NDArray[np.bool_]:
    """Unpack masks [n, words] to bool [n, V]."""
    packed = masks.view(np.uint8)
    return np.unpackbits(packed, axis=1, count=vocab_size, bitorder="little").view(np.bool_)


def forbidden_bits(packed: Tensor, vocabulary: int) -> Tensor:
    """Return bool [n, vocabulary]: the ids that masks int32 [n, words] do not allow."""
    ids = torch.arange(vocabulary, device=packed.device)
    return (packed[:, ids >> 5] >> (ids & 31)) & 1 == 0
