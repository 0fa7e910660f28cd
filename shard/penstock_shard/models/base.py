"""The interface of a model."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from penstock_shard.attention.base import AttentionBatch, LayerSpec
from penstock_shard.attention.cache_groups import CacheLayout

# Part of the numerics fingerprint, with the kernels' source and the version of transformers. Raise
# it when our Python code changes the logits of the same weights.
MODEL_REVISION = 4


class ForwardOutput(NamedTuple):
    """Logits [N, V] of the tokens in `logit_rows`, and final hidden states [M, H], after the last
    norm, of the tokens in `hidden_rows`. The hidden states are valid until the next forward.
    """

    logits: Tensor
    hidden: Tensor


@dataclass(frozen=True, slots=True)
class ImageInputs:
    """Image inputs of a step.

    `rows` [R, H] replace the embeddings of the tokens at `places`, int64 [R]. After layer i,
    `deep[i]` [R, H] is added to these tokens. If positions have three axes, `angles` int64 [T,
    rotary_dim / 2] has each token's position for each rotary frequency.
    """

    places: Tensor
    rows: Tensor
    deep: tuple[Tensor, ...] = ()
    angles: Tensor | None = None


class CausalModel(Protocol):
    """Runs steps on flat tensors: tokens of many sequences, over one paged KV cache."""

    device: torch.device

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        """The parameters of each attention layer."""

    @property
    def hidden_size(self) -> int:
        """Size H of the final hidden states; 0 if the model cannot return them."""

    @property
    def cache_layout(self) -> CacheLayout:
        """The layers that share block tables and memory."""

    def allocate(self, pools: Sequence[int], block_size: int, dtype: torch.dtype) -> None:
        """Allocate the KV cache of all layers, with these numbers of blocks in each pool. Replaces
        the earlier cache.
        """

    def free(self) -> None:
        """Drop the KV cache."""

    def block_parts(self, group: int, block_id: int) -> Sequence[Tensor]:
        """Return the memory of a group's block, uint8 [bytes] each: for each layer in order, its
        keys and then its values, or its state.
        """

    def copy_states(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy states, in all layers that have one, in the order of `copies`: (source block, target
        block).
        """

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        batches: Sequence[AttentionBatch],
        logit_rows: Tensor,
        hidden_rows: Tensor | None = None,
        adapters: Tensor | None = None,
        images: ImageInputs | None = None,
    ) -> ForwardOutput:
        """Run a step. input_ids and positions are int64 [T]; `batches` has a batch for each cache
        group. logit_rows int64 [N] and hidden_rows int64 [M] are ascending indices into the T
        tokens. If N is T, logit_rows are all tokens in order.

        `adapters` int64 [T] has each token's adapter index, or 0; None if no token has an adapter.
        Only our own decoder gets `images`.
        """

    def shortened(self) -> AbstractContextManager[None]:
        """Inside the context, run one layer of each kind, and maybe the last layer: enough for some
        checks of results and memory.
        """


@runtime_checkable
class WithOwnAttention(Protocol):
    """A model that also has its own attention, which ours replaces."""

    def own_logits(self, token_ids: Tensor) -> Tensor:
        """Logits [B, L, V] of token_ids [B, L] with the model's own attention and no cache."""
