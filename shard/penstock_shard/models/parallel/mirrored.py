"""A model of which every rank computes a part: rank 0 says what, all of them do it.

`MirroredModel` is the whole model to whoever calls it. What it is called for it first tells the
other ranks, who `follow`. What the host knows of a step goes over their connection, its tensors
from device to device, so that nothing waits for a device. Knows steps and ranks; knows nothing of
how models are divided.
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

from penstock_shard.models.attention.base import AttentionBatch, LayerSpec
from penstock_shard.models.base import CausalModel, Forwarded
from penstock_shard.models.cuda_graphs import GraphedModel, GraphShape, StaticInputs
from penstock_shard.models.errors import ModelError
from penstock_shard.models.parallel.division_check import own_logits
from penstock_shard.models.parallel.followers import Followers
from penstock_shard.models.parallel.messages import Call, FreeMemory, Step, TensorShape, ToRank
from penstock_shard.models.parallel.ranks import Ranks
from penstock_shard.models.step_inputs import StepInputs
from penstock_shard.models.transformers_model import TransformersModel

logger = logging.getLogger(__name__)

# Of what a tensor's part of the message is a multiple, so that numbers of any size are aligned.
_ALIGNMENT = 8
_BATCH_FIELDS = tuple(field.name for field in dataclasses.fields(AttentionBatch) if field.init)


class RankFailed(ModelError):
    """Rank 0 cannot go on with a step that the others have begun: they would wait for ever. So this
    is nothing to go on after, out of memory or not.
    """


class MirroredModel:
    """A `CausalModel` over several ranks; this one's part is `model`."""

    def __init__(self, model: CausalModel, ranks: Ranks, followers: Followers) -> None:
        self.model = model
        self.device = model.device
        self._ranks = ranks
        self._followers = followers

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        """Those of one rank: what its cache has to hold."""
        return self.model.layers

    @property
    def hidden_size(self) -> int:
        return self.model.hidden_size

    def allocate(self, num_blocks: int, block_size: int, dtype: torch.dtype) -> None:
        arguments: list[int | str] = [num_blocks, block_size, _name(dtype)]
        self._followers.tell(Call("allocate", arguments))
        self.model.allocate(num_blocks, block_size, dtype)

    def free(self) -> None:
        self._followers.tell(Call("free", []))
        self.model.free()

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
        batch: AttentionBatch,
        logit_rows: Tensor,
        hidden_rows: Tensor | None = None,
        adapters: Tensor | None = None,
    ) -> Forwarded:
        tensors = {
            "input_ids": input_ids,
            "positions": positions,
            "logit_rows": logit_rows,
            "hidden_rows": hidden_rows,
            "adapters": adapters,
        }
        step, packed = _pack(tensors, batch)
        self._followers.tell(step)
        self._ranks.from_first(packed)
        try:
            return self.model.forward(
                input_ids, positions, batch, logit_rows, hidden_rows, adapters
            )
        except RuntimeError as error:
            raise RankFailed(
                f"rank 0 could not compute a step: {error}; where memory is short lower "
                "--max-num-batched-tokens or --gpu-memory-utilization"
            ) from error

    # ---- graphs, where each rank has some: see `GraphedModel` ----

    @property
    def num_graphs(self) -> int:
        return self._graphs.num_graphs

    def shapes(self, block_size: int) -> list[GraphShape]:
        return self._graphs.shapes(block_size)

    def capture(self, shapes: Sequence[GraphShape], block_size: int, pad_block: int) -> None:
        numbers = [number for shape in shapes for number in shape]
        self._followers.tell(Call("capture", [block_size, pad_block, *numbers]))
        try:
            self._graphs.capture(shapes, block_size, pad_block)
        except torch.OutOfMemoryError as error:
            # What cannot be recorded fails at the same place on every rank; this may not.
            raise RankFailed(
                f"rank 0 could not record its CUDA graphs: {error}; lower "
                "--gpu-memory-utilization or --max-num-seqs, or give --enforce-eager"
            ) from error

    def drop(self) -> None:
        self._followers.tell(Call("drop", []))
        self._graphs.drop()

    def inputs(self, num_rows: int, num_blocks: int) -> StaticInputs | None:
        return self._graphs.inputs(num_rows, num_blocks)

    def pad(self, arrays: StepInputs[NDArray[Any]], num_rows: int) -> None:
        self._graphs.pad(arrays, num_rows)

    @property
    def _graphs(self) -> GraphedModel:
        assert isinstance(self.model, GraphedModel), "ranks without graphs"
        return self.model

    # ---- what a whole model is not asked ----

    def compute_own(self, token_ids: Tensor) -> None:
        """Have the other ranks run token_ids [B, L] through transformers' modules as they are, with
        their own attention, as rank 0 is about to do.
        """
        numbers: list[int | str] = [len(token_ids), *token_ids.flatten().tolist()]
        self._followers.tell(Call("compute_own", numbers))

    def watch_memory(self) -> None:
        """From now on every rank notes the most memory that it takes."""
        self._followers.tell(Call("watch_memory", []))

    def least_free(self, num_bytes: int, share: float) -> int:
        """The least of what this rank has left, and of what the others have, of whose device's
        memory so great a share may be used. On cpu they share what there is.
        """
        if self.device.type == "cpu":
            return num_bytes // self._ranks.size
        self._followers.tell(Call("free_memory", [str(share)]))
        answers = self._followers.answers(FreeMemory)
        return min(num_bytes, *(answer.num_bytes for answer in answers))


def follow(
    model: CausalModel,
    part: CausalModel,
    ranks: Ranks,
    hear: Callable[[], ToRank],
    answer: Callable[[FreeMemory], None],
) -> None:
    """Do what rank 0 says: `hear` gives the next message, and ends all in the end.

    `model` computes steps; `part` is what it wraps, or itself.
    """
    memory = _Memory(model.device)
    with ExitStack() as shortened:
        while True:
            match hear():
                case Step() as step:
                    _follow_step(model, ranks, step)
                case Call("allocate", [int(num_blocks), int(block_size), str(dtype)]):
                    model.allocate(num_blocks, block_size, getattr(torch, dtype))
                case Call("capture", [int(block_size), int(pad_block), *numbers]):
                    _capture(model, [int(number) for number in numbers], block_size, pad_block)
                case Call("drop"):
                    assert isinstance(model, GraphedModel)
                    model.drop()
                case Call("check"):
                    # Rank 0 computes the same, and says so.
                    with suppress(ModelError):
                        ranks.check()
                case Call("free"):
                    model.free()
                case Call("shorten"):
                    shortened.enter_context(model.shortened())
                case Call("restore"):
                    shortened.pop_all().close()
                case Call("compute_own", [int(count), *numbers]):
                    _compute_own(part, torch.tensor(numbers).view(count, -1))
                case Call("watch_memory"):
                    memory.watch()
                case Call("free_memory", [str(share)]):
                    answer(FreeMemory(memory.num_free(float(share))))
                case message:
                    raise RankFailed(f"rank 0 asks for {message}, which is not known here")


def _compute_own(part: CausalModel, token_ids: Tensor) -> None:
    assert isinstance(part, TransformersModel)
    own_logits(part.module, token_ids.to(part.device))


def _capture(model: CausalModel, numbers: Sequence[int], block_size: int, pad_block: int) -> None:
    assert isinstance(model, GraphedModel)
    shapes = [GraphShape(*pair) for pair in zip(numbers[::2], numbers[1::2], strict=True)]
    try:
        model.capture(shapes, block_size, pad_block)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        # Rank 0 finds out for itself; a rank that launches what others replay does the same work.
        logger.warning("CUDA graphs: none on this rank: %s", error)
        model.drop()


@torch.inference_mode()
def _follow_step(model: CausalModel, ranks: Ranks, step: Step) -> None:
    packed = torch.empty(_packed_size(step.tensors), dtype=torch.uint8, device=model.device)
    ranks.from_first(packed)
    tensors = _unpack(step.tensors, packed)
    batch = {name: tensors.pop(name) for name in _BATCH_FIELDS if name in tensors}
    model.forward(batch=AttentionBatch(**step.values, **batch), **tensors)  # type: ignore[arg-type]


def _pack(tensors: dict[str, Tensor | None], batch: AttentionBatch) -> tuple[Step, Tensor]:
    """A step as a message, and all its numbers in one tensor of bytes."""
    present = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    values: dict[str, int | list[int]] = {}
    for name in _BATCH_FIELDS:
        value = getattr(batch, name)
        if isinstance(value, Tensor):
            present[name] = value
        else:
            values[name] = value if isinstance(value, int) else list(value)
    shapes = [
        TensorShape(name, _name(tensor.dtype), list(tensor.shape))
        for name, tensor in present.items()
    ]
    return Step(shapes, values), torch.cat([_bytes(tensor) for tensor in present.values()])


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


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class _Memory:
    """What a follower's device has left after its largest step."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = 0

    def watch(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
            self._before = torch.cuda.memory_allocated(self._device)

    def num_free(self, share: float) -> int:
        """Bytes for keys and values, as rank 0 counts its own."""
        torch.cuda.synchronize(self._device)
        extra = torch.cuda.max_memory_allocated(self._device) - self._before
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self._device)
        return int(total * share) - (total - free) - extra
