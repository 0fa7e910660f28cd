"""What rows give besides a sampled token: log-probabilities of a prompt, an embedding, accepted
drafts. Each is a file here; `every` lists them. By itself a runner gives none.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from penstock_shard.worker.base import RowResult
from penstock_shard.worker.input_batch import Inputs


class PendingOutput(Protocol):
    """What a device is making of a forward pass."""

    def finish(self, results: list[RowResult]) -> None:
        """Set it in the results of the batch's rows. Called once, in the order of the steps, after
        the device has finished all that was given to it.
        """


class RowOutput(Protocol):
    """One kind of output. Keeps what it knows of sequences by slot."""

    def begin(self, inputs: Inputs, logits: Tensor, hidden: Tensor) -> PendingOutput | None:
        """Have the device make it of a pass: logits [N, V] of all `logit_rows`, final hidden states
        [M, H] of all `hidden_rows`. None if no row wants it.
        """

    def release(self, slot: int) -> None:
        """No sequence has this slot any more."""
