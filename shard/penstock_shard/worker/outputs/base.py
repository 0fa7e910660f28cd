"""Outputs of rows besides sampled tokens: log-probabilities of a prompt, an embedding, accepted
drafts. `all_outputs.py` lists them. A runner has none by default.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from penstock_shard.worker.base import RowResult
from penstock_shard.worker.input_batch import Inputs


class PendingOutput(Protocol):
    """An output that a device is computing."""

    def finish(self, results: list[RowResult]) -> None:
        """Put the output into the results of the batch's rows. Called once, in the order of the
        steps, after the device has finished the step.
        """


class RowOutput(Protocol):
    """A kind of output, which keeps its state of sequences by slot."""

    def begin(self, inputs: Inputs, logits: Tensor, hidden: Tensor) -> PendingOutput | None:
        """Start to compute the output of a pass from logits [N, V] of all `logit_rows` and final
        hidden states [M, H] of all `hidden_rows`. Return None if no row wants it.
        """

    def release(self, slot: int) -> None:
        """Forget the sequence that had this slot."""
