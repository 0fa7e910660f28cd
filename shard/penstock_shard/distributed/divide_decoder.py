"""A rank's part of a decoder: heads and inner units are divided, and every rank has all the rest.

As in Megatron-LM (Shoeybi et al., 2019), matrices that produce inner values (queries, keys, values,
gate, up) are divided by rows, and matrices that consume them (output, down) by columns. So a layer
has two all-reduces. The output head is divided by rows of the vocabulary. transformers'
`base_model_tp_plan` divides in the same way.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from penstock_shard.attention.base import LayerSpec
from penstock_shard.errors import ModelError
from penstock_shard.lora.lora import Share, Shares
from penstock_shard.models.decoder.spec import DecoderSpec, tensor_shapes
from penstock_shard.models.decoder.tensor_reader import TensorSource

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
# Last parts of modules' names, by how their weights are divided. w1, w3 and w2 are Mixtral's gate,
# up and down; q_b and kv_b make queries, keys and values of latent attention.
_BY_HEADS = {"q_proj", "k_proj", "v_proj", "qkv_proj", "q_b_proj", "kv_b_proj"}
_BY_ROWS = {"gate_proj", "up_proj", "gate_up_proj", "w1", "w3"}
_BY_COLUMNS = {"o_proj", "down_proj", "w2"}


def divided_by(leaf: str) -> str | None:
    """Tell how a weight [N, K] is divided: by "heads", "rows" or "columns"; None if it stays whole.
    `leaf` is the last part of its module's name.
    """
    if leaf in _BY_HEADS:
        return "heads"
    if leaf in _BY_ROWS:
        return "rows"
    return "columns" if leaf in _BY_COLUMNS else None


def check_divisible(size: int, sizes: dict[str, int], num_kv_heads: int) -> None:
    """Raise ModelError unless `size` divides each of `sizes`, by name, and ranks can divide or
    share the KV heads evenly.
    """
    for name, value in sizes.items():
        if value % size:
            raise ModelError(
                f"--tensor-parallel-size {size}: the model's {name} is {value}, which must be a "
                f"multiple of it{_advice(size, [*sizes.values()])}"
            )
    if num_kv_heads % size and size % num_kv_heads:
        raise ModelError(
            f"--tensor-parallel-size {size}: the model's num_key_value_heads is {num_kv_heads}; "
            "one must be a multiple of the other"
        )


def _advice(size: int, values: Sequence[int]) -> str:
    fitting = [n for n in range(size, 1, -1) if not any(value % n for value in values)]
    return f"; {fitting[0]} would do" if fitting else ""


def states_are_whole(size: int) -> ModelError:
    return ModelError(
        f"--tensor-parallel-size {size}: layers of this model have states, which are not divided "
        "over devices; use 1"
    )


def local_spec(spec: DecoderSpec, size: int) -> DecoderSpec:
    """Return the spec of one rank's part. Raises ModelError if the decoder cannot be divided.

    With fewer KV heads than ranks, several ranks have the same KV head.
    """
    if any(layer.state is not None for layer in spec.layers):
        raise states_are_whole(size)
    sizes = {"num_attention_heads": spec.layers[0].num_heads, **_inner_sizes(spec)}
    for num_kv_heads in {layer.num_kv_heads for layer in spec.layers}:
        check_divisible(size, sizes, num_kv_heads)
    experts = spec.experts
    if experts is not None:
        experts = dataclasses.replace(
            experts,
            intermediate_size=experts.intermediate_size // size,
            shared_size=experts.shared_size // size,
        )
    return dataclasses.replace(
        spec,
        intermediate_size=spec.intermediate_size // size,
        layers=tuple(_local_layer(layer, size) for layer in spec.layers),
        experts=experts,
        # A rank has the whole embedding, but only a part of the head.
        tied=False,
    )


def _inner_sizes(spec: DecoderSpec) -> dict[str, int]:
    if spec.experts is None:
        return {"intermediate_size": spec.intermediate_size}
    sizes = {"moe_intermediate_size": spec.experts.intermediate_size}
    if len(spec.experts.layers) < len(spec.layers) or spec.experts.beside_dense:
        sizes["intermediate_size"] = spec.intermediate_size
    return sizes


def _local_layer(layer: LayerSpec, size: int) -> LayerSpec:
    return dataclasses.replace(
        layer,
        num_heads=layer.num_heads // size,
        num_kv_heads=max(1, layer.num_kv_heads // size),
    )


def rank_shares(spec: DecoderSpec, rank: int, size: int) -> Shares:
    """Return a rank's share of each divided matrix, by module; `spec` is the whole model's."""
    shares = {}
    for name, shape in tensor_shapes(spec).items():
        module = name.removesuffix(".weight")
        leaf = module.rpartition(".")[2]
        side = divided_by(leaf)
        if len(shape) != 2 or side is None:
            continue
        rows, columns = shape
        if side == "columns":
            shares[module] = Share((rows, columns), columns=even_part(columns, rank, size))
        elif side == "heads":
            layer = spec.layers[int(module.split(".")[2])]
            shares[module] = Share((rows, columns), _heads(leaf, rows, layer, rank, size))
        else:
            count = 2 if leaf == "gate_up_proj" else 1
            part = even_part(rows // count, rank, size)
            shares[module] = Share(
                (rows, columns), tuple(_moved(part, i * rows // count) for i in range(count))
            )
    return shares


def _heads(leaf: str, rows: int, layer: LayerSpec, rank: int, size: int) -> tuple[slice, ...]:
    if leaf in ("q_proj", "q_b_proj", "kv_b_proj"):
        return (even_part(rows, rank, size),)
    queries, keys = layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
    first = rank * layer.num_kv_heads // size * layer.head_dim
    key = slice(first, first + max(1, layer.num_kv_heads // size) * layer.head_dim)
    if leaf == "qkv_proj":
        query = even_part(queries, rank, size)
        return query, _moved(key, queries), _moved(key, queries + keys)
    return (key,)


def even_part(length: int, rank: int, size: int) -> slice:
    count = length // size
    return slice(rank * count, (rank + 1) * count)


def _moved(part: slice, by: int) -> slice:
    return slice(part.start + by, part.stop + by)


class SlicedTensors:
    """The tensors of one rank's part: slices of the whole model's."""

    def __init__(self, source: TensorSource, spec: DecoderSpec, rank: int, size: int) -> None:
        """`source` and `spec` belong to the whole model."""
        self._source = source
        self._tied = spec.tied
        self._rank = rank
        self._size = size
        self._shares = rank_shares(spec, rank, size)

    @contextmanager
    def read(self, names: Sequence[str]) -> Iterator[list[Tensor]]:
        stored = [EMBEDDING if name == HEAD and self._tied else name for name in names]
        with self._source.read(stored) as tensors:
            yield [self._part(name, tensor) for name, tensor in zip(names, tensors, strict=True)]

    def codes(self, name: str) -> None:
        """Return None, because a part of a matrix is read dequantized."""

    def _part(self, name: str, tensor: Tensor) -> Tensor:
        if name == HEAD:
            return vocabulary_part(tensor, self._rank, self._size)
        share = self._shares.get(name.rpartition(".")[0])
        return tensor if share is None else share.of(tensor)


def vocabulary_part(head: Tensor, rank: int, size: int) -> Tensor:
    """Return a rank's rows of the output head, padded with zeros to the same number for all
    ranks.
    """
    count = -(-len(head) // size)
    part = head[rank * count : (rank + 1) * count]
    missing = count - len(part)
    if not missing:
        return part
    return torch.cat([part, part.new_zeros(missing, head.shape[1])])
