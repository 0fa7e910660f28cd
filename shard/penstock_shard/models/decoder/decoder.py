"""A decoder for the Llama family, driven by a spec and written on an ops interface.

Layers are pre-norm. The norm after a block adds the block's output to the residual stream, so a
layer takes ten calls for any number of tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock_shard.attention.base import AttentionBatch, LayerSpec
from penstock_shard.attention.cache_groups import CacheLayout, cache_layout
from penstock_shard.lora.lora import TokenAdapters
from penstock_shard.models.base import ForwardOutput, ImageInputs
from penstock_shard.models.decoder.feed_forward import FeedForwardScratch
from penstock_shard.models.decoder.linear import Linear
from penstock_shard.models.decoder.self_attention import AttentionScratch
from penstock_shard.models.decoder.spec import DecoderSpec
from penstock_shard.models.decoder.weights import DecoderWeights, LayerWeights
from penstock_shard.models.paged_caches import PagedCaches
from penstock_shard.ops.base import Ops


@dataclass(frozen=True, slots=True)
class _Layer:
    """The parts of a layer that do not change between steps."""

    spec: LayerSpec
    weights: LayerWeights
    # The layer's cache group and the group's pool. In one pool, all heads have the same size.
    group: int
    pool: int


@dataclass(frozen=True, slots=True)
class _Scratch:
    """Memory for intermediate results, [T, ...], reused by every layer."""

    hidden: Tensor | None
    update: Tensor | None
    # One for each pool.
    attention: tuple[AttentionScratch, ...]
    feed_forward: FeedForwardScratch


class Decoder:
    """A `CausalModel`; see `penstock_shard.models.base`."""

    def __init__(self, spec: DecoderSpec, weights: DecoderWeights, ops: Ops) -> None:
        self.device = ops.device
        self._spec = spec
        self._ops = ops
        self._weights = weights
        self._caches = PagedCaches(cache_layout(spec.layers))
        self._layers = tuple(self._with_weights(layer) for layer in spec.layers)
        # The layers that forward runs; fewer within `shortened`.
        self._running = self._layers
        self._scratch: dict[int, _Scratch] = {}

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle without the cache."""
        return Decoder, (self._spec, self._weights, self._ops)

    def _with_weights(self, layer: LayerSpec) -> _Layer:
        layout = self._caches.layout
        group = layout.group_of[layer.index]
        weights = self._weights.layers[layer.index]
        return _Layer(layer, weights, group, layout.groups[group].pool)

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        return self._spec.layers

    @property
    def hidden_size(self) -> int:
        return self._spec.hidden_size

    @property
    def nbytes(self) -> int:
        return self._weights.nbytes

    @property
    def capturable(self) -> bool:
        """True if the layers allow CUDA graphs of pure decode steps; attention backends decide for
        themselves.
        """
        return all(
            layer.spec.state is None and layer.weights.feed_forward.capturable
            for layer in self._layers
        )

    def change(self, change: Callable[[Linear], Linear]) -> None:
        """Replace each linear layer, except the head, by the result of `change`."""
        self._layers = tuple(
            dataclasses.replace(layer, weights=layer.weights.change(change))
            for layer in self._layers
        )
        self._running = self._layers

    @property
    def cache_layout(self) -> CacheLayout:
        return self._caches.layout

    def allocate(self, pools: Sequence[int], block_size: int, dtype: torch.dtype) -> None:
        layers = [layer.spec for layer in self._running]
        backend = self._ops.backend
        self._caches.allocate(backend, layers, pools, block_size, dtype, self.device)

    def free(self) -> None:
        self._caches.free()

    def block_parts(self, group: int, block_id: int) -> Sequence[Tensor]:
        return self._caches.block_parts(group, block_id)

    def copy_states(self, copies: Sequence[tuple[int, int]]) -> None:
        self._caches.copy_states(copies)

    @contextmanager
    def shortened(self) -> Iterator[None]:
        kinds = {self._kind(layer.spec): layer for layer in reversed(self._layers)}
        running = sorted(kinds.values(), key=lambda layer: layer.spec.index)
        if running[-1] is not self._layers[-1]:
            # `forward` computes fewer tokens in the last layer that runs, so another must follow
            # the checked layers.
            running.append(self._layers[-1])
        self._running = tuple(running)
        try:
            yield
        finally:
            self._running = self._layers

    def _kind(self, layer: LayerSpec) -> tuple[object, ...]:
        """Return all that layers may differ in, except their weights."""
        spec, index = self._spec, layer.index
        own = dataclasses.replace(layer, index=0, reads=None)
        has = (index in spec.keys_as_values, layer.reads is not None, spec.has_experts(index))
        return (own, spec.rope_types[index], *has)

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
        rows = logit_rows if hidden_rows is None else torch.cat([logit_rows, hidden_rows])
        needs_all = hidden_rows is None and len(logit_rows) == len(input_ids)
        stream = self._weights.embedding.rows(input_ids)
        if self._spec.embedding_scale != 1.0:
            stream.mul_(self._spec.embedding_scale)
        deep: Sequence[Tensor] = ()
        if images is not None:
            positions = positions if images.angles is None else images.angles
            if len(images.places):
                stream.index_copy_(0, images.places, images.rows.to(stream.dtype))
                deep = images.deep
            # If features are added after the last layer, it needs all tokens, because `places`
            # index all tokens.
            needs_all = needs_all or len(deep) >= len(self._running)
        update = None
        tokens = None if adapters is None else TokenAdapters(adapters)
        for layer in self._running:
            batch = batches[layer.group]
            attended = self._attention(layer, stream, update, positions, batch, tokens)
            if layer is self._running[-1] and not needs_all:
                # Keys and values are in the cache, so only tokens with logits need the last layer's
                # rest.
                stream, attended = stream[rows], attended[rows]
                tokens = None if tokens is None else tokens.of(rows)
            update = self._feed_forward(layer, stream, attended, tokens)
            if images is not None and layer.spec.index < len(deep):
                more = deep[layer.spec.index].to(stream.dtype)
                stream.index_add_(0, images.places, more)
        hidden = self._final_norm(stream, update)
        count = len(logit_rows)
        return ForwardOutput(self._logits(hidden[:count]), hidden[count:])

    def _attention(
        self,
        layer: _Layer,
        stream: Tensor,
        update: Tensor | None,
        positions: Tensor,
        batch: AttentionBatch,
        adapters: TokenAdapters | None,
    ) -> Tensor:
        """Add `update` to the residual stream. Return the layer's attention [T, Hq * D] before its
        output matrix.
        """
        scratch = self._scratch_for(len(stream))
        hidden = self._norm(stream, update, layer.weights.input_norm, scratch.hidden)
        cache = self._caches.of(layer.spec)
        return layer.weights.attention(
            hidden, positions, batch, cache, scratch.attention[layer.pool], adapters
        )

    def _feed_forward(
        self,
        layer: _Layer,
        stream: Tensor,
        attended: Tensor,
        adapters: TokenAdapters | None,
    ) -> Tensor:
        """Add attention's output to the residual stream. Return the feed-forward output, which the
        next norm adds.
        """
        weights = layer.weights
        scratch = self._scratch_for(len(stream))
        update = weights.output(attended, scratch.update, adapters)
        if weights.output_norm is not None:
            update = self._norm(update, None, weights.output_norm, update)
        hidden = self._norm(stream, update, weights.mlp_norm, scratch.hidden)
        update = weights.feed_forward(hidden, scratch.feed_forward, adapters)
        if weights.mlp_output_norm is not None:
            update = self._norm(update, None, weights.mlp_output_norm, update)
        if weights.scalar != 1.0:
            stream.mul_(weights.scalar)
            update.mul_(weights.scalar)
        return update

    def _final_norm(self, stream: Tensor, update: Tensor | None) -> Tensor:
        scratch = self._scratch_for(len(stream))
        return self._norm(stream, update, self._weights.final_norm, scratch.hidden)

    def _logits(self, hidden: Tensor) -> Tensor:
        logits = self._weights.head(hidden)
        cap = self._spec.logit_softcap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

    def _norm(
        self, stream: Tensor, update: Tensor | None, weight: Tensor, out: Tensor | None
    ) -> Tensor:
        """Do `stream += update` in place; return the stream's RMSNorm."""
        spec = self._spec
        if update is None:
            return self._ops.add_rms_norm(
                stream, None, weight, spec.norm_eps, spec.norm_offset, out
            )
        return self._ops.add_rms_norm(update, stream, weight, spec.norm_eps, spec.norm_offset, out)

    def _scratch_for(self, num_tokens: int) -> _Scratch:
        """Scratch memory, kept for at most two sizes: a step's T tokens, and its tokens that need
        logits.
        """
        scratch = self._scratch.get(num_tokens)
        if scratch is None:
            if len(self._scratch) == 2:
                self._scratch.clear()
            scratch = self._scratch[num_tokens] = self._make_scratch(num_tokens)
        return scratch

    def _make_scratch(self, num_tokens: int) -> _Scratch:
        make = self._ops.scratch
        firsts = [self._layers[planes[0][0].index] for planes in self._caches.layout.planes]
        update = make(num_tokens, self._spec.hidden_size)
        return _Scratch(
            hidden=make(num_tokens, self._spec.hidden_size),
            update=update,
            attention=tuple(first.weights.attention.make_scratch(num_tokens) for first in firsts),
            feed_forward=FeedForwardScratch(
                gate_up=make(num_tokens, 2 * self._spec.intermediate_size),
                active=make(num_tokens, self._spec.intermediate_size),
                update=update,
            ),
        )
