"""A rank's loaded model, with all that checks and steps need."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch

from penstock_shard.lora.lora import LoraBank
from penstock_shard.models.base import CausalModel
from penstock_shard.models.cuda_graphs import Graphs
from penstock_shard.ops.base import Ops


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts from a model's configuration for routers."""

    # For example LlamaForCausalLM.
    architecture: str
    vocab_size: int
    # Ids may be outside the vocabulary; None if the model states none.
    eos_token_ids: tuple[int, ...] | None


def no_check() -> None:
    """The check of a model that needs none."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model, or one rank's part of it, and everything it is computed with."""

    # Holds this rank's weights and takes adapters.
    part: CausalModel
    # The adapters of `part`; None if it takes none.
    bank: LoraBank | None
    # With several ranks, all call this after each has loaded its part. Raises ModelError if they do
    # not compute the same as the whole model.
    check: Callable[[], None]
    # Runs steps: `part`, wrapped for CUDA graphs if decodes may be captured. On rank 0 of several,
    # a `MirroredModel` over all ranks.
    model: CausalModel
    # The same object as `model` if decodes may be captured, else None.
    graphs: Graphs | None
    ops: Ops
    # Dtype of cached keys and values.
    kv_dtype: torch.dtype
    facts: ModelFacts
    max_model_len: int
    # Compute threads on cpu.
    threads: int

    @property
    def vocab_size(self) -> int:
        return self.facts.vocab_size

    def with_graphs(self, graphs: Graphs | None) -> LoadedModel:
        """Return a copy in which `graphs`, which wraps `part`, runs steps."""
        return dataclasses.replace(self, model=graphs or self.part, graphs=graphs)

    def over_ranks(self, whole: Graphs) -> LoadedModel:
        """Return rank 0's model for steps over all ranks, which `whole` runs."""
        graphs = None if self.graphs is None else whole
        return dataclasses.replace(self, model=whole, graphs=graphs)
