"""What the runner asks of a model, whichever code computes it. Knows nothing of requests."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from penstock_shard.models.attention.base import AttentionBatch, LayerSpec

# Raised when the same weights give other logits than before, but for what the kernels' own source
# and the version of transformers tell.
MODEL_REVISION = 2


class Forwarded(NamedTuple):
    """Logits [N, V] of the tokens they were wanted of; final hidden states [M, H], after the last
    norm, of the tokens these were wanted of. The latter are good until the next forward.
    """

    logits: Tensor
    hidden: Tensor


class CausalModel(Protocol):
    """Runs flat steps: tokens of many sequences, each of which has its part of a paged cache."""

    device: torch.device

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        """What each attention layer asks for."""

    @property
    def hidden_size(self) -> int:
        """Of final hidden states; 0 where they cannot be had."""

    def allocate(self, num_blocks: int, block_size: int, dtype: torch.dtype) -> None:
        """Make the cache of every layer, instead of the one there was."""

    def free(self) -> None:
        """Drop the cache."""

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        batch: AttentionBatch,
        logit_rows: Tensor,
        hidden_rows: Tensor | None = None,
        adapters: Tensor | None = None,
    ) -> Forwarded:
        """input_ids and positions int64 [T]; logit_rows int64 [N] and hidden_rows int64 [M], each
        rising, into T. Where N is T the rows are all in order. `adapters` int64 [T] names the index
        of each token's adapter, 0 for none; None where no token has any.
        """

    def shortened(self) -> AbstractContextManager[None]:
        """While it lasts, forward runs one layer of each kind and maybe the last: for checks of how
        layers compute and what memory they take, which more of the same kinds do not change.
        """
