"""Checkpoints with stacks of experts, read as if each expert were stored separately.

A layer has two tensors: gate_up_proj [E, H, 2 I] and down_proj [E, I, H]. Some tools write [E, 2 I,
H] and [E, H, I]. Biases are also stacks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor
from transformers import PreTrainedConfig

from penstock_shard.checkpoint.safetensors import Checkpoint
from penstock_shard.errors import ModelError

# Text model types with stacks -> the name in the configuration of an expert's size.
_SIZES = {
    "gemma4_text": "moe_intermediate_size",
    "gpt_oss": "intermediate_size",
    "llama4_text": "intermediate_size",
    "mistral4": "moe_intermediate_size",
    "qwen3_5_moe_text": "moe_intermediate_size",
    "qwen3_vl_moe_text": "moe_intermediate_size",
}
# Types whose stacks alternate rows of gate and up, and that have biases.
_IN_TURNS = {"gpt_oss"}
_TRANSPOSED = {"gpt_oss", "llama4_text"}
GATE_UP, DOWN = "experts.gate_up_proj", "experts.down_proj"


@dataclass(frozen=True, slots=True)
class _Part:
    """A matrix [O, I] of one expert in a stack, or its biases [O]."""

    stack: str
    expert: int
    # The part's rows among the expert's outputs.
    rows: slice
    is_transposed: bool


def has_stacks(config: PreTrainedConfig) -> bool:
    return config.get_text_config().model_type in _SIZES


class StackedExperts(Checkpoint):
    """A checkpoint that lists each expert's matrices instead of the stacks."""

    is_plain = False

    def __init__(self, model_dir: Path, config: PreTrainedConfig) -> None:
        """Raises ModelError, with a tensor's name, if a stack does not fit the configuration."""
        super().__init__(model_dir)
        self._model_dir = model_dir
        self._parts: dict[str, _Part] = {}
        text = config.get_text_config()
        # Qwen3-VL-MoE's text runs on the code of Qwen3-MoE, which has no such stacks.
        self._is_transposed = text.model_type in _TRANSPOSED
        self._is_theirs = text.model_type != "qwen3_vl_moe_text"
        self._in_turns = text.model_type in _IN_TURNS
        wide, hidden = int(getattr(text, _SIZES[text.model_type]) or 0), int(text.hidden_size)
        # Each stack's matrices with their numbers of outputs, and its number of inputs.
        self._sizes = {
            GATE_UP: ({"gate_proj": wide, "up_proj": wide}, hidden),
            DOWN: ({"down_proj": hidden}, wide),
        }
        for name in list(self.shapes):
            for ending, (outputs, inputs) in self._sizes.items():
                if name.endswith(ending):
                    self._divide(name, outputs, inputs)
                elif name.endswith(f"{ending}_bias"):
                    self._divide_biases(name, outputs)

    def for_transformers(self) -> Checkpoint:
        return Checkpoint(self._model_dir) if self._is_theirs else self

    def _divide(self, stack: str, outputs: dict[str, int], inputs: int) -> None:
        count, *shape = self.shapes.pop(stack)
        stored, dtype = self.stored.pop(stack), self.dtypes.pop(stack)
        matrix = [sum(outputs.values()), inputs]
        # As in transformers, Llama 4's stacks are transposed; others only if they fit no other way.
        is_transposed = shape != matrix or (self._is_transposed and shape == matrix[::-1])
        if is_transposed and shape != matrix[::-1]:
            raise ModelError(
                f"{stack}: has the shape {[count, *shape]}; the configuration says "
                f"{[count, *matrix[::-1]]}"
            )
        for expert, (name, rows) in self._each(count, outputs):
            part = f"{stack.rpartition('.')[0]}.{expert}.{name}.weight"
            self._parts[part] = _Part(stack, expert, rows, is_transposed)
            self.shapes[part] = (outputs[name], inputs)
            self.stored[part], self.dtypes[part] = stored, dtype

    def _divide_biases(self, stack: str, outputs: dict[str, int]) -> None:
        """Replace the stack [E, O] by each expert's biases in the lists of tensors."""
        count, *shape = self.shapes.pop(stack)
        stored, dtype = self.stored.pop(stack), self.dtypes.pop(stack)
        if shape != [sum(outputs.values())]:
            raise ModelError(
                f"{stack}: has the shape {[count, *shape]}; the configuration says "
                f"{[count, sum(outputs.values())]}"
            )
        for expert, (name, rows) in self._each(count, outputs):
            part = f"{stack.rpartition('.')[0]}.{expert}.{name}.bias"
            self._parts[part] = _Part(stack, expert, rows, is_transposed=False)
            self.shapes[part] = (outputs[name],)
            self.stored[part], self.dtypes[part] = stored, dtype

    def _each(self, count: int, outputs: dict[str, int]) -> Iterator[tuple[int, tuple[str, slice]]]:
        """Yield each expert's index, with its matrices' names and rows among the outputs."""
        for expert in range(count):
            start = 0
            for turn, (name, rows) in enumerate(outputs.items()):
                in_turns = slice(turn, None, len(outputs))
                yield expert, (name, in_turns if self._in_turns else slice(start, start + rows))
                start += rows

    def _tensor(self, name: str) -> Tensor:
        part = self._parts.get(name)
        if part is None:
            return super()._tensor(name)
        matrix: Tensor = self._slice(part.stack)[part.expert]
        return (matrix.T if part.is_transposed else matrix)[part.rows].contiguous()


def refuse_stacks(checkpoint: Checkpoint) -> None:
    """Raise ModelError for a stack of experts beside quantized matrices."""
    for name in checkpoint.shapes:
        if name.endswith((GATE_UP, DOWN)):
            raise ModelError(f"{name}: stacks of experts are not served in quantized checkpoints")
