"""Products with matrices divided over ranks, combined by gather or sum."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from penstock_shard.distributed.collectives import Ranks
from penstock_shard.lora.lora import TokenAdapters
from penstock_shard.models.decoder.feed_forward import (
    Dense,
    DenseAndSparse,
    FeedForward,
    FeedForwardScratch,
)
from penstock_shard.models.decoder.linear import Linear
from penstock_shard.models.decoder.weights import DecoderWeights, LayerWeights
from penstock_shard.ops.base import Matrix


class GatheredMatrix:
    """A rank's rows of a weight [N, K]. `linear` gathers all ranks' outputs, without padding."""

    has_rows = False

    def __init__(self, part: Matrix, ranks: Ranks, out_features: int) -> None:
        self._part = part
        self._ranks = ranks
        self.out_features, self.in_features = out_features, part.in_features
        self.nbytes = part.nbytes

    def linear(self, x: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        return gathered(self._part.linear(x, bias), self._ranks, self.out_features)

    def rows(self, ids: Tensor) -> Tensor:
        raise NotImplementedError("each rank has some rows only")


@dataclass(frozen=True, slots=True)
class ReducedFeedForward:
    """A feed-forward part, divided over ranks by inner units. It sums the ranks' results."""

    part: FeedForward
    ranks: Ranks

    @property
    def capturable(self) -> bool:
        return self.part.capturable

    def __call__(
        self, hidden: Tensor, scratch: FeedForwardScratch, adapters: TokenAdapters | None = None
    ) -> Tensor:
        return self.ranks.add_up(self.part(hidden, scratch, adapters))

    def change(self, change: Callable[[Linear], Linear]) -> ReducedFeedForward:
        return dataclasses.replace(self, part=self.part.change(change))


def gathered(part: Tensor, ranks: Ranks, out_features: int) -> Tensor:
    """Gather outputs [..., n] of all ranks: [..., out_features]."""
    side_by_side = ranks.gather(part).movedim(0, -2).flatten(-2)
    return side_by_side[..., :out_features].contiguous()


def parallel_weights(weights: DecoderWeights, ranks: Ranks, vocab_size: int) -> DecoderWeights:
    """Return this rank's weights, with products that combine all ranks' results."""
    head = Linear(GatheredMatrix(weights.head.matrix, ranks, vocab_size), weights.head.bias)
    layers = tuple(_parallel_layer(layer, ranks) for layer in weights.layers)
    return dataclasses.replace(weights, head=head, layers=layers)


def _parallel_layer(layer: LayerWeights, ranks: Ranks) -> LayerWeights:
    return dataclasses.replace(
        layer,
        output=_reduced(layer.output, ranks),
        feed_forward=_parallel_feed_forward(layer.feed_forward, ranks),
    )


def _parallel_feed_forward(whole: FeedForward, ranks: Ranks) -> FeedForward:
    if isinstance(whole, Dense):
        return dataclasses.replace(whole, down=_reduced(whole.down, ranks))
    if isinstance(whole, DenseAndSparse):
        dense = dataclasses.replace(whole.dense, down=_reduced(whole.dense.down, ranks))
        return dataclasses.replace(
            whole, dense=dense, sparse=ReducedFeedForward(whole.sparse, ranks)
        )
    # Each rank has a part of every expert, and sums its experts' results before the sum over ranks.
    return ReducedFeedForward(whole, ranks)


def _reduced(linear: Linear, ranks: Ranks) -> Linear:
    return dataclasses.replace(linear, add_up=ranks.add_up)
