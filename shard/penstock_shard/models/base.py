"""The interface of a model, whichever code computes it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from penstock_shard.attention.base import AttentionBatch, LayerSpec
from penstock_shard.attention.cache_groups import CacheLayout

# Part of the numerics fingerprint. Raise it when our Python code changes the logits of the same
# weights; the kernels' source and the version of transformers are in the fingerprint already.
MODEL_REVISION = 4


class ForwardOutput(NamedTuple):
    """Logits [N, V] of the tokens in `logit_rows`; final hidden states [M, H], after the last norm,
    of those in `hidden_rows`. The hidden states are valid until the next forward.
    """

    logits: Tensor
    hidden: Tensor


@dataclass(frozen=True, slots=True)
class ImageInputs:
    """What images bring into a step: `rows` [R, H] take the place of the embeddings of the tokens
    `places`, int64 [R]; each of `deep` [R, H] is added to these behind one of the first layers.
    Where tokens have positions on three axes, `angles` int64 [T, rotary_dim / 2] has the position
    by which each frequency turns.
    """

    places: Tensor
    rows: Tensor
    deep: tuple[Tensor, ...] = ()
    angles: Tensor | None = None


class CausalModel(Protocol):
    """Runs steps on flat tensors: the tokens of many sequences, over one paged KV cache."""

    device: torch.device

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        """The parameters of each attention layer."""

    @property
    def hidden_size(self) -> int:
        """Size H of the final hidden states; 0 where the model cannot give them."""

    @property
    def cache_layout(self) -> CacheLayout:
        """Which layers share block tables and memory."""

    def allocate(self, pools: Sequence[int], block_size: int, dtype: torch.dtype) -> None:
        """Allocate the KV cache of every layer, in place of the earlier one, in pools of so many
        blocks.
        """

    def free(self) -> None:
        """Drop the KV cache."""

    def block_parts(self, group: int, block_id: int) -> Sequence[Tensor]:
        """The memory of a block of a cache group, each uint8 [bytes]: of its layers in order, keys
        and then values, or the state.
        """

    def copy_states(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy states of all layers that have one, in this order: from which block to which."""

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
        """input_ids and positions int64 [T]; a batch for each cache group. logit_rows int64 [N] and
        hidden_rows int64 [M] are ascending indices into the T tokens. Where N is T, logit_rows are
        all tokens in order.
        `adapters` int64 [T] has the index of each token's adapter, 0 for none; None where no token
        has an adapter. `images` are given only to our own decoder.
        """

    def shortened(self) -> AbstractContextManager[None]:
        """Inside the context, forward runs one layer of each kind, and maybe the last layer: for
        checks of results and of memory, to which more layers of the same kinds add nothing.
        """


@runtime_checkable
class WithOwnAttention(Protocol):
    """A model whose code has an attention of its own, which ours stands in for."""

    def own_logits(self, token_ids: Tensor) -> Tensor:
        """Logits [B, L, V] of token_ids [B, L], with the model's own attention and no cache."""
