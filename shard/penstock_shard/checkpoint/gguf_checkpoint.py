"""The tensors of a GGUF file under the names of transformers, as codes or dequantized."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.modeling_gguf_pytorch_utils import (
    TENSOR_PROCESSORS,
    TensorProcessor,
    get_gguf_hf_weights_map,
)

from penstock_shard.checkpoint.codes.codes import Codes
from penstock_shard.checkpoint.codes.gguf_blocks import read_codes
from penstock_shard.checkpoint.gguf_files import open_file
from penstock_shard.checkpoint.safetensors import Checkpoint
from penstock_shard.checkpoint.text_names import text_names
from penstock_shard.checkpoint.weight_files import GGUF
from penstock_shard.errors import ModelError

# The file's float types. Codes are read as float32.
_DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16}
# The configuration's fields that decide the order of a matrix's rows.
_HEADS = ("num_attention_heads", "num_key_value_heads")
# RoPE factors are part of the configuration, not weights.
_NO_WEIGHTS = {"rope_freqs.weight"}


class GgufCheckpoint(Checkpoint):
    is_plain = False

    def __init__(self, model_dir: Path, config: PreTrainedConfig) -> None:
        """Open the file. Raises ModelError if it cannot be read, or has a tensor that the model
        lacks.
        """
        reader = open_file(model_dir / GGUF)
        text = config.get_text_config()
        architecture = text.model_type.removesuffix("_text")
        heads = {name: getattr(text, name, None) for name in _HEADS}
        self._processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=heads)
        with torch.device("meta"):
            module = AutoModelForCausalLM.from_config(text)
        names = get_gguf_hf_weights_map(module, self._processor)
        self._stored: dict[str, Any] = {}
        for tensor in reader.tensors:
            if tensor.name in _NO_WEIGHTS:
                continue
            if tensor.name not in names:
                raise ModelError(f"{model_dir / GGUF}: {tensor.name} is not of a {text.model_type}")
            self._stored[names[tensor.name]] = tensor
        self.names = text_names(self._stored)
        self.stored = {name: tensor.tensor_type.name for name, tensor in self._stored.items()}
        self.shapes = {
            name: tuple(int(size) for size in reversed(tensor.shape))
            for name, tensor in self._stored.items()
        }
        self.dtypes = {
            name: _DTYPES.get(stored, torch.float32) for name, stored in self.stored.items()
        }

    def codes(self, name: str) -> Codes | None:
        tensor = self._stored[name]
        codes = read_codes(tensor.data, self.stored[name])
        if codes is None:
            return None
        return codes.change_rows(lambda rows: self._processed(rows.numpy(), tensor.name))

    def _tensor(self, name: str) -> Tensor:
        from gguf import dequantize

        tensor = self._stored[name]
        values = dequantize(tensor.data, tensor.tensor_type)
        return self._processed(values, tensor.name).to(self.dtypes[name])

    def _processed(self, values: NDArray[Any], stored: str) -> Tensor:
        """Return values with rows in transformers' order."""
        values = self._processor.process(weights=values, name=stored).weights
        return torch.from_numpy(np.require(values, requirements=["C", "W"]))

    def _slice(self, name: str) -> Tensor:
        return self._tensor(name)
