"""A transformers causal LM whose attention runs on our paged cache.

Modelling code is not changed: each attention layer calls the function registered here, which passes
queries, keys and values to the current forward's hook (`_attention`). Causality comes from the
step's lengths, so the registered mask function returns no mask, or a placeholder for code with
indexers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from penstock_shard.attention.base import AttentionBatch, LayerSpec, StateSpec
from penstock_shard.attention.cache_groups import CacheLayout, cache_layout
from penstock_shard.lora.lora import TokenAdapters
from penstock_shard.models.base import ForwardOutput, ImageInputs
from penstock_shard.models.latent_heads import LatentHeads
from penstock_shard.models.layer_config import source_of_keys
from penstock_shard.models.paged_caches import PagedCaches, StateCache
from penstock_shard.models.transformers import recurrences
from penstock_shard.models.transformers.latent_attention import keep_latents
from penstock_shard.models.transformers.sparse_indexers import (
    most_unselected_tokens,
    skip_selection,
)
from penstock_shard.ops.base import Ops

ATTENTION_NAME = "penstock"


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """query [T, Hq, D], key [T, Hkv, D], value [T, Hkv, Dv]."""

    layer_index: int
    query: Tensor
    key: Tensor
    value: Tensor
    scale: float
    window: int | None
    softcap: float | None
    sinks: Tensor | None


_Hook = Callable[[AttentionCall], Tensor]
# Called during a forward. A module global, because modelling code passes on different keyword
# arguments; the engine runs one forward at a time.
_hook: _Hook | None = None
# The mask for modelling code; None unless code with indexers takes it apart.
_mask: Tensor | None = None


@contextmanager
def _attention(hook: _Hook, mask: Tensor | None) -> Iterator[None]:
    global _hook, _mask
    outer = _hook, _mask
    _hook, _mask = hook, mask
    try:
        yield
    finally:
        _hook, _mask = outer


def _attention_function(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """query [1, Hq, T, D], key and value in the same layout -> [1, T, Hq, Dv]."""
    if _hook is None:
        raise RuntimeError("a forward outside of TransformersModel")
    call = AttentionCall(
        layer_index=int(module.layer_idx),  # type: ignore[arg-type]
        query=query[0].transpose(0, 1),
        key=key[0].transpose(0, 1),
        value=value[0].transpose(0, 1),
        scale=float(query.shape[-1] ** -0.5 if scaling is None else scaling),
        window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
    )
    return _hook(call).unsqueeze(0), None


def _no_mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """Keep transformers from building a dense mask."""
    return _mask


AttentionInterface.register(ATTENTION_NAME, _attention_function)
AttentionMaskInterface.register(ATTENTION_NAME, _no_mask)


class TransformersModel:
    """A `CausalModel`; see `penstock_shard.models.base`."""

    def __init__(
        self,
        module: PreTrainedModel,
        ops: Ops,
        latent: Mapping[int, LatentHeads] = MappingProxyType({}),
    ) -> None:
        """Take over a module whose attention implementation is `ATTENTION_NAME`. It attends with
        the backend that the ops have at each call. Layers in `latent` cache latents.
        """
        self.module = module
        self.device = ops.device
        self.latent = latent
        self._ops = ops
        self._mask = None
        if most_unselected_tokens(module.config.get_text_config()) is not None:
            self._mask = torch.zeros(1, 1, 1, 1, device=ops.device)
            skip_selection(module, lambda: _hook is not None)
        if latent:
            keep_latents(module, lambda: _hook is not None)
        recurrences.run_on_states(module)
        _note_layers_of_shared(module)
        self.token_adapters: TokenAdapters | None = None
        self._layers, self.hidden_size = self._probe()
        self._caches = PagedCaches(cache_layout(self._layers))

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        return self._layers

    @torch.inference_mode()
    def _probe(self) -> tuple[tuple[LayerSpec, ...], int]:
        """Run one token. Return the specs of all attention calls and recurrences, and the size of
        final hidden states (0 if they do not pass the head).
        """
        specs: list[LayerSpec] = []
        states: dict[int, StateSpec] = {}

        def record(call: AttentionCall) -> Tensor:
            heads = self.latent.get(call.layer_index)
            if heads is not None:
                call = dataclasses.replace(call, query=heads.absorb(call.query))
            specs.append(_spec_of(call, self.module.config.get_text_config(), heads))
            attended = call.query.new_zeros(*call.query.shape[:2], call.value.shape[2])
            return attended if heads is None else heads.expand(attended)

        token = torch.zeros(1, dtype=torch.int64, device=self.device)
        find = recurrences.recording(states, self.device)
        with (
            _attention(record, self._mask),
            recurrences.serving(self._ops, find),
            self._diverted(1) as diverted,
        ):
            self._call(token, token, token)
        specs += [_state_spec(self._state_index(layer), state) for layer, state in states.items()]
        return tuple(specs), diverted[0].shape[1] if len(diverted) == 1 else 0

    def _state_index(self, layer: int) -> int:
        """Number the states after all layers, because a layer with a state may also attend."""
        return layer + self._num_layers

    @property
    def _num_layers(self) -> int:
        return int(self.module.config.get_text_config().num_hidden_layers)

    @property
    def layer_stacks(self) -> list[tuple[str, nn.ModuleList]]:
        """The lists of the model's layers, by name in the module."""
        names = {module: name for name, module in self.module.named_modules()}
        stacks = layer_stacks(self.module, self._num_layers)
        return [(names[stack], stack) for _, _, stack in stacks]

    @property
    def cache_layout(self) -> CacheLayout:
        return self._caches.layout

    def allocate(self, pools: Sequence[int], block_size: int, dtype: torch.dtype) -> None:
        backend = self._ops.backend
        self._caches.allocate(backend, self._layers, pools, block_size, dtype, self.device)

    def free(self) -> None:
        self._caches.free()

    def block_parts(self, group: int, block_id: int) -> Sequence[Tensor]:
        return self._caches.block_parts(group, block_id)

    def copy_states(self, copies: Sequence[tuple[int, int]]) -> None:
        self._caches.copy_states(copies)

    @contextmanager
    def shortened(self) -> Iterator[None]:
        stacks = list(layer_stacks(self.module, self._num_layers))
        text = self.module.config.get_text_config()
        types = getattr(text, "layer_types", None)
        for parent, name, stack in stacks:
            kept = self._one_of_each_kind(stack)
            setattr(parent, name, nn.ModuleList(stack[index] for index in kept))
            # Some layers find their type by index in the stack.
            _set_layer_types(text, types and [types[index] for index in kept])
        try:
            yield
        finally:
            for parent, name, stack in stacks:
                setattr(parent, name, stack)
            _set_layer_types(text, types)

    def _one_of_each_kind(self, stack: nn.ModuleList) -> list[int]:
        """Indices of a layer of each kind, and of the layers whose keys they read."""
        if any(getattr(module, "is_shared_by_layers", False) for module in stack.modules()):
            # Shared modules get their layer index from their place in the stack, so keep all
            # layers.
            return list(range(len(stack)))
        specs = {spec.index: dataclasses.replace(spec, index=0) for spec in self._layers}
        kinds: dict[tuple[LayerSpec | None, LayerSpec | None, str], int] = {}
        for index, layer in enumerate(stack):
            kept = specs.get(index), specs.get(self._state_index(index))
            kinds.setdefault((*kept, repr(layer)), index)
        sources = [specs[index].reads for index in kinds.values() if index in specs]
        return sorted({*kinds.values(), *(source for source in sources if source is not None)})

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
        assert images is None, "images are served by our decoder alone"
        self.token_adapters = None if adapters is None else TokenAdapters(adapters)
        backend, group_of = self._ops.backend, self.cache_layout.group_of
        specs = {spec.index: spec for spec in self._layers}

        def find_state(layer: int, _: StateSpec) -> tuple[StateCache, AttentionBatch]:
            spec = specs[self._state_index(layer)]
            return self._caches.of(spec), batches[group_of[spec.index]]

        def attend(call: AttentionCall) -> Tensor:
            spec = specs[call.layer_index]
            cache, batch = self._caches.of(spec), batches[group_of[spec.index]]
            if spec.reads is None:
                backend.write(cache, call.key, call.value, batch.slots)
            query, heads = call.query, self.latent.get(spec.index)
            if heads is not None:
                query = heads.absorb(query)
            attended = backend.attend(
                cache,
                query,
                batch,
                scale=call.scale,
                window=call.window,
                softcap=call.softcap,
                sinks=call.sinks,
            )
            return attended if heads is None else heads.expand(attended)

        with (
            _attention(attend, self._mask),
            recurrences.serving(self._ops, find_state),
            self._threads(),
        ):
            if hidden_rows is None:
                logits = self._call(input_ids, positions, logit_rows)
                return ForwardOutput(logits, logits.new_empty(0, self.hidden_size))
            rows = torch.cat([logit_rows, hidden_rows])
            with self._diverted(len(logit_rows)) as diverted:
                logits = self._call(input_ids, positions, rows)
        return ForwardOutput(logits, torch.cat(diverted))

    def own_logits(self, token_ids: Tensor) -> Tensor:
        return own_logits(self.module, token_ids)

    @contextmanager
    def _diverted(self, num_logits: int) -> Iterator[list[Tensor]]:
        """Divert all but the first `num_logits` rows of the head's input into the list.

        The input is the final hidden states, whatever code called the head. Calls with other
        arguments are left alone.
        """
        diverted: list[Tensor] = []

        def divert(head: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
            if not arguments or arguments[0].dim() != 3:
                return None
            hidden, *rest = arguments
            diverted.append(hidden[0, num_logits:])
            return (hidden[:, :num_logits], *rest)

        head = self.module.get_output_embeddings()
        handle = None if head is None else head.register_forward_pre_hook(divert)
        try:
            yield diverted
        finally:
            if handle is not None:
                handle.remove()

    @contextmanager
    def _threads(self) -> Iterator[None]:
        """Give torch one thread during our kernels, which have their own. With more, torch would
        divide tensors, and compute the ends of parts with other instructions.
        """
        before = torch.get_num_threads()
        if self._ops.backend.name == "cpu":
            torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(before)

    def _call(self, input_ids: Tensor, positions: Tensor, logit_rows: Tensor) -> Tensor:
        output = self.module(
            input_ids=input_ids.unsqueeze(0),
            position_ids=positions.unsqueeze(0),
            use_cache=False,
            logits_to_keep=logit_rows,
        )
        logits: Tensor = output.logits[0]
        return logits


def own_logits(module: PreTrainedModel, token_ids: Tensor) -> Tensor:
    implementation = module.config._attn_implementation
    module.set_attn_implementation("eager")
    try:
        with torch.inference_mode():
            logits: Tensor = module(input_ids=token_ids, use_cache=False).logits
    finally:
        module.set_attn_implementation(implementation)
    return logits


def layer_stacks(
    module: nn.Module, num_layers: int
) -> Iterator[tuple[nn.Module, str, nn.ModuleList]]:
    """Yield each list of the model's layers: the module that has it, its name there, the list."""
    for parent in module.modules():
        for name, child in parent.named_children():
            if not isinstance(child, nn.ModuleList) or len(child) != num_layers:
                continue
            if any(_knows_its_index(layer) for layer in child):
                yield parent, name, child


def _knows_its_index(layer: nn.Module) -> bool:
    return any(hasattr(module, "layer_idx") for module in layer.modules())


def _note_layers_of_shared(module: PreTrainedModel) -> None:
    """Set the layer index of attention that several layers share (Zamba2) from each call's
    arguments.
    """
    for shared in module.modules():
        if getattr(shared, "layer_idx", None) == -1:
            shared.is_shared_by_layers = True
            shared.register_forward_pre_hook(_note_layer, with_kwargs=True)


def _note_layer(shared: Any, _: Any, named: dict[str, Any]) -> None:
    shared.layer_idx = named["layer_idx"]


def _set_layer_types(text: PreTrainedConfig, types: Sequence[str] | None) -> None:
    """Types that follow from other fields stay unchanged. The layer then takes another type's mask,
    but there are no masks, so this does no harm.
    """
    with suppress(AttributeError):
        if types:
            text.layer_types = types


def _state_spec(index: int, state: StateSpec) -> LayerSpec:
    return LayerSpec(
        index, num_heads=0, num_kv_heads=0, head_dim=0, head_dim_v=0, scale=0.0, state=state
    )


def _spec_of(call: AttentionCall, text: PreTrainedConfig, latent: LatentHeads | None) -> LayerSpec:
    return LayerSpec(
        index=call.layer_index,
        num_heads=call.query.shape[1],
        num_kv_heads=call.key.shape[1],
        head_dim=call.query.shape[2],
        head_dim_v=call.value.shape[2],
        scale=call.scale,
        window=call.window,
        softcap=call.softcap,
        has_sinks=call.sinks is not None,
        values_in_keys=latent is not None,
        reads=source_of_keys(text, call.layer_index),
    )
