"""The experts of gpt-oss as released: stacks of blocks in MXFP4."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from penstock_shard.checkpoint.codes.codes import Codes
from penstock_shard.checkpoint.codes.mxfp4 import GROUP, mxfp4_codes
from penstock_shard.checkpoint.safetensors import Checkpoint
from penstock_shard.checkpoint.stacked_experts import StackedExperts
from penstock_shard.errors import ModelError

MXFP4_METHOD = "mxfp4"


class Mxfp4Experts(StackedExperts):
    """A checkpoint that lists the matrices of MXFP4 blocks, dequantized or as codes."""

    def __init__(self, model_dir: Path, config: PreTrainedConfig) -> None:
        """Raises ModelError, with a tensor's name, if blocks do not fit the configuration."""
        super().__init__(model_dir, config)
        # For each matrix, its stack, expert and rows.
        self._blocks: dict[str, tuple[str, int, slice]] = {}
        for name in list(self.shapes):
            for ending, (outputs, inputs) in self._sizes.items():
                if name.endswith(f"{ending}_blocks"):
                    self._divide_blocks(name.removesuffix("_blocks"), outputs, inputs)

    def for_transformers(self) -> Checkpoint:
        raise ModelError("experts in MXFP4 are read for our decoder alone")

    def codes(self, name: str) -> Codes | None:
        found = self._blocks.get(name)
        if found is None:
            return None
        stack, expert, rows = found
        blocks, scales = (
            self._slice(f"{stack}_{part}")[expert][rows].contiguous()
            for part in ("blocks", "scales")
        )
        return mxfp4_codes(blocks, scales)

    def _tensor(self, name: str) -> Tensor:
        codes = self.codes(name)
        return super()._tensor(name) if codes is None else codes.dense()

    def _divide_blocks(self, stack: str, outputs: dict[str, int], inputs: int) -> None:
        """List each expert's matrices in place of blocks and scales."""
        groups = inputs // GROUP
        count = self.shapes[f"{stack}_blocks"][0]
        wanted = {
            "blocks": (count, sum(outputs.values()), groups, GROUP // 2),
            "scales": (count, sum(outputs.values()), groups),
        }
        for part, shape in wanted.items():
            name = f"{stack}_{part}"
            if inputs % GROUP or self.shapes.get(name) != shape:
                raise ModelError(
                    f"{name}: has the shape {list(self.shapes.get(name, ()))}; with matrices of "
                    f"{inputs} inputs it must be {list(shape)}"
                )
            del self.shapes[name], self.stored[name], self.dtypes[name]
        for expert, (name, rows) in self._each(count, outputs):
            part = f"{stack.rpartition('.')[0]}.{expert}.{name}.weight"
            self._blocks[part] = (stack, expert, rows)
            self.shapes[part] = (outputs[name], inputs)
            self.stored[part], self.dtypes[part] = "F32", torch.float32
