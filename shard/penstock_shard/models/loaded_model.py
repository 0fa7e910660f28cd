"""What a rank has of a model once it is loaded: passed to whatever checks, follows or runs it.

Knows nothing of how any of it came to be.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import PreTrainedConfig

from penstock_shard.models.base import CausalModel
from penstock_shard.models.cuda_graphs import Graphs
from penstock_shard.models.lora import LoraBank
from penstock_shard.models.ops.base import Ops


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model, or one rank's part of it, and all that it is computed with."""

    # What was loaded here: it has the weights, and takes adapters.
    part: CausalModel
    # Its places for adapters.
    bank: LoraBank | None
    # Of several ranks: to be called by all, once each has its part. Raises ModelError.
    check: Callable[[], None]
    # What computes steps: the part, through its graphs where decodes may be recorded; on rank 0 of
    # several, all ranks at once.
    model: CausalModel
    # The same model, where its decodes may be recorded.
    graphs: Graphs | None
    ops: Ops
    # Of cached keys and values.
    kv_dtype: torch.dtype
    hf_config: PreTrainedConfig
    max_model_len: int
    # That compute, on cpu.
    threads: int

    @property
    def vocab_size(self) -> int:
        return int(self.hf_config.get_text_config().vocab_size)

    def over_ranks(self, whole: Graphs) -> LoadedModel:
        """Rank 0's, when the others have their parts."""
        graphs = None if self.graphs is None else whole
        return dataclasses.replace(self, model=whole, graphs=graphs)
