"""A model divided over ranks: rank 0 announces each step, and all ranks compute their parts.

`MirroredModel` looks like the whole model. It sends each call to the other ranks, which run
`follow`, and then applies it to rank 0's part. A step's host data goes over the ranks' connections
and tensors go from device to device, so that the host never waits for a device.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock_shard.attention.base import AttentionBatch, LayerSpec
from penstock_shard.attention.cache_groups import CacheLayout
from penstock_shard.device.dtypes import dtype_name
from penstock_shard.device.gpu_memory import PeakMemory, free_bytes
from penstock_shard.distributed.collectives import Ranks
from penstock_shard.distributed.messages import (
    Call,
    FreeMemory,
    PairShape,
    PlaceAdapter,
    Step,
    TensorShape,
    ToRank,
)
from penstock_shard.distributed.rank_connections import Followers
from penstock_shard.errors import ModelError
from penstock_shard.lora.lora import AdapterWeights, LoraBank, LowRank
from penstock_shard.models.base import CausalModel, ForwardOutput, ImageInputs, WithOwnAttention
from penstock_shard.models.cuda_graphs import GraphedModel, GraphShape, StaticInputs
from penstock_shard.models.loaded_model import LoadedModel
from penstock_shard.models.step_inputs import StepInputs

logger = logging.getLogger(__name__)

# Packed tensors are padded to a multiple of 8 bytes, so that any dtype is aligned.
_ALIGNMENT = 8
_BATCH_FIELDS = tuple(field.name for field in dataclasses.fields(AttentionBatch) if field.init)


class RankFailed(ModelError):
    """Rank 0 failed in a step that other ranks have begun. They would wait forever, so this is
    fatal, even if rank 0 only lacked memory.
    """


class MirroredModel:
    """A `CausalModel` over several ranks; `model` is rank 0's part."""

    def __init__(self, model: CausalModel, ranks: Ranks, followers: Followers) -> None:
        self.model = model
        self.device = model.device
        self._ranks = ranks
        self._followers = followers

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        """The layers with one rank's numbers of heads, as in its KV cache."""
        return self.model.layers

    @property
    def hidden_size(self) -> int:
        return self.model.hidden_size

    @property
    def cache_layout(self) -> CacheLayout:
        return self.model.cache_layout

    def allocate(self, pools: Sequence[int], block_size: int, dtype: torch.dtype) -> None:
        arguments: list[int | str] = [dtype_name(dtype), block_size, *pools]
        self._followers.tell(Call("allocate", arguments))
        self.model.allocate(pools, block_size, dtype)

    def free(self) -> None:
        self._followers.tell(Call("free", []))
        self.model.free()

    def block_parts(self, group: int, block_id: int) -> Sequence[Tensor]:
        """Return the memory of rank 0's heads only."""
        return self.model.block_parts(group, block_id)

    def copy_states(self, copies: Sequence[tuple[int, int]]) -> None:
        assert not copies, "models with states are not divided"

    @contextmanager
    def shortened(self) -> Iterator[None]:
        self._followers.tell(Call("shorten", []))
        try:
            with self.model.shortened():
                yield
        finally:
            self._followers.tell(Call("restore", []))

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
        assert images is None, "images are not served over several ranks"
        tensors = {
            "input_ids": input_ids,
            "positions": positions,
            "logit_rows": logit_rows,
            "hidden_rows": hidden_rows,
            "adapters": adapters,
        }
        step, packed = _pack(tensors, batches)
        self._followers.tell(step)
        self._ranks.from_first(packed)
        try:
            return self.model.forward(
                input_ids, positions, batches, logit_rows, hidden_rows, adapters
            )
        except RuntimeError as error:
            raise RankFailed(
                f"rank 0 could not compute a step: {error}; where memory is short lower "
                "--max-num-batched-tokens or --gpu-memory-utilization"
            ) from error

    # ---- CUDA graphs; each rank has graphs of its own part, see `GraphedModel` ----

    @property
    def num_graphs(self) -> int:
        return self._graphs.num_graphs

    def shapes(self, block_size: int) -> list[GraphShape]:
        return self._graphs.shapes(block_size)

    def capture(
        self, shapes: Sequence[GraphShape], block_size: int, pad_blocks: Sequence[int]
    ) -> None:
        numbers = [int(number) for shape in shapes for number in shape]
        self._followers.tell(Call("capture", [block_size, len(pad_blocks), *pad_blocks, *numbers]))
        try:
            self._graphs.capture(shapes, block_size, pad_blocks)
        except torch.OutOfMemoryError as error:
            # Memory may be short on rank 0 alone. All other failures to capture occur on every
            # rank.
            raise RankFailed(
                f"rank 0 could not record its CUDA graphs: {error}; lower "
                "--gpu-memory-utilization or --max-num-seqs, or give --enforce-eager"
            ) from error

    def drop(self) -> None:
        self._followers.tell(Call("drop", []))
        self._graphs.drop()

    def inputs(
        self, num_rows: int, num_blocks: int, has_adapters: bool = False
    ) -> StaticInputs | None:
        return self._graphs.inputs(num_rows, num_blocks, has_adapters)

    def pad(self, arrays: StepInputs[NDArray[Any]], num_rows: int) -> None:
        self._graphs.pad(arrays, num_rows)

    @property
    def _graphs(self) -> GraphedModel:
        assert isinstance(self.model, GraphedModel), "ranks without graphs"
        return self.model

    # ---- only for a model over several ranks ----

    def place_adapter(self, index: int, weights: AdapterWeights) -> None:
        """Have the other ranks place the adapter too. Send it module by module, because the whole
        might exceed the devices' free memory.
        """
        pairs = [
            PairShape(module, len(pair.a), pair.a.shape[1], len(pair.b))
            for module, pair in weights.items()
        ]
        self._followers.tell(PlaceAdapter(index, pairs))
        for pair in weights.values():
            numbers = torch.cat([pair.a.flatten(), pair.b.flatten()])
            self._ranks.from_first(numbers.to(self.device))

    def drop_adapter(self, index: int) -> None:
        self._followers.tell(Call("drop_adapter", [index]))

    def compute_own(self, token_ids: Tensor) -> None:
        """Have the other ranks compute token_ids [B, L] by their modules' own attention. Rank 0
        must then do the same.
        """
        numbers: list[int | str] = [len(token_ids), *token_ids.flatten().tolist()]
        self._followers.tell(Call("compute_own", numbers))

    def watch_memory(self) -> None:
        """Have the other ranks measure peak memory from now on."""
        self._followers.tell(Call("watch_memory", []))

    def least_free(self, num_bytes: int, share: float) -> int:
        """Return the smallest free memory of all ranks. `num_bytes` is rank 0's free memory, which
        on cpu all ranks share. A rank may use `share` of its device's memory.
        """
        if self.device.type == "cpu":
            return num_bytes // self._ranks.size
        self._followers.tell(Call("free_memory", [str(share)]))
        answers = self._followers.answers(FreeMemory)
        return min(num_bytes, *(answer.num_bytes for answer in answers))


def follow(
    loaded: LoadedModel,
    ranks: Ranks,
    hear: Callable[[], ToRank],
    answer: Callable[[FreeMemory], None],
) -> None:
    """Follow rank 0's messages forever. `hear` returns the next message, and ends the process when
    rank 0 is gone.
    """
    model = loaded.model
    peak = PeakMemory(model.device)
    with ExitStack() as shortened:
        while True:
            match hear():
                case Step() as step:
                    _follow_step(model, ranks, step)
                case Call("allocate", [str(dtype), int(block_size), *pools]):
                    model.allocate(list(map(int, pools)), block_size, getattr(torch, dtype))
                case Call("capture", numbers):
                    _capture(model, [int(number) for number in numbers])
                case Call("drop"):
                    assert isinstance(model, GraphedModel)
                    model.drop()
                case Call("check"):
                    # Rank 0 gets the same error and reports it.
                    with suppress(ModelError):
                        loaded.check()
                case PlaceAdapter() as adapter:
                    _place(_bank(loaded), ranks, model.device, adapter)
                case Call("drop_adapter", [int(index)]):
                    _bank(loaded).drop(index)
                case Call("free"):
                    model.free()
                case Call("shorten"):
                    shortened.enter_context(model.shortened())
                case Call("restore"):
                    shortened.pop_all().close()
                case Call("compute_own", [int(count), *numbers]):
                    _compute_own(loaded.part, torch.tensor(numbers).view(count, -1))
                case Call("watch_memory"):
                    peak = PeakMemory(model.device)
                case Call("free_memory", [str(share)]):
                    extra = peak.extra_bytes()
                    answer(FreeMemory(free_bytes(model.device, float(share)) - extra))
                case message:
                    raise RankFailed(f"rank 0 asks for {message}, which is not known here")


def _bank(loaded: LoadedModel) -> LoraBank:
    assert loaded.bank is not None, "ranks without adapters"
    return loaded.bank


def _place(bank: LoraBank, ranks: Ranks, device: torch.device, adapter: PlaceAdapter) -> None:
    weights = {}
    for pair in adapter.pairs:
        size_a, size_b = pair.rank * pair.in_features, pair.out_features * pair.rank
        numbers = torch.empty(size_a + size_b, device=device)
        ranks.from_first(numbers)
        # The whole adapter may exceed the device's free memory.
        numbers = numbers.cpu()
        a, b = numbers[:size_a], numbers[size_a:]
        weights[pair.module] = LowRank(a.view(pair.rank, -1), b.view(-1, pair.rank))
    bank.place(adapter.index, weights)


def _compute_own(part: CausalModel, token_ids: Tensor) -> None:
    assert isinstance(part, WithOwnAttention)
    part.own_logits(token_ids.to(part.device))


def _capture(model: CausalModel, arguments: Sequence[int]) -> None:
    assert isinstance(model, GraphedModel)
    block_size, num_groups, *rest = arguments
    pad_blocks, numbers = rest[:num_groups], rest[num_groups:]
    columns = zip(numbers[::3], numbers[1::3], map(bool, numbers[2::3]), strict=True)
    shapes = [GraphShape(*shape) for shape in columns]
    try:
        model.capture(shapes, block_size, pad_blocks)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        # A rank without graphs launches the kernels that others replay, so ranks still work
        # together.
        logger.warning("CUDA graphs: none on this rank: %s", error)
        model.drop()


@torch.inference_mode()
def _follow_step(model: CausalModel, ranks: Ranks, step: Step) -> None:
    packed = torch.empty(_packed_size(step.tensors), dtype=torch.uint8, device=model.device)
    ranks.from_first(packed)
    tensors = _unpack(step.tensors, packed)
    batches = []
    for group, values in enumerate(step.batches):
        names = {f"{group}.{name}": name for name in _BATCH_FIELDS}
        own = {names[key]: tensors.pop(key) for key in names.keys() & tensors.keys()}
        batches.append(AttentionBatch(**values, **own))  # type: ignore[arg-type]
    model.forward(batches=batches, **tensors)  # type: ignore[arg-type]


def _pack(
    tensors: dict[str, Tensor | None], batches: Sequence[AttentionBatch]
) -> tuple[Step, Tensor]:
    """Return a step as a message, and its tensors' values as one tensor of bytes."""
    present = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    on_host: list[dict[str, int | list[int]]] = []
    for group, batch in enumerate(batches):
        values: dict[str, int | list[int]] = {}
        for name in _BATCH_FIELDS:
            value = getattr(batch, name)
            if isinstance(value, Tensor):
                present[f"{group}.{name}"] = value
            else:
                values[name] = value if isinstance(value, int) else list(value)
        on_host.append(values)
    shapes = [
        TensorShape(name, dtype_name(tensor.dtype), list(tensor.shape))
        for name, tensor in present.items()
    ]
    return Step(shapes, on_host), torch.cat([_bytes(tensor) for tensor in present.values()])


def _bytes(tensor: Tensor) -> Tensor:
    flat = tensor.contiguous().view(-1).view(torch.uint8)
    missing = -len(flat) % _ALIGNMENT
    return torch.cat([flat, flat.new_zeros(missing)]) if missing else flat


def _unpack(shapes: list[TensorShape], packed: Tensor) -> dict[str, Tensor]:
    tensors, start = {}, 0
    for shape in shapes:
        dtype: torch.dtype = getattr(torch, shape.dtype)
        size = _size(shape)
        flat = packed[start : start + size].view(dtype)
        tensors[shape.name] = flat.view(shape.shape)
        start += size + -size % _ALIGNMENT
    return tensors


def _packed_size(shapes: list[TensorShape]) -> int:
    return sum(-(-_size(shape) // _ALIGNMENT) * _ALIGNMENT for shape in shapes)


def _size(shape: TensorShape) -> int:
    dtype: torch.dtype = getattr(torch, shape.dtype)
    return torch.Size(shape.shape).numel() * dtype.itemsize
