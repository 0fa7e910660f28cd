"""A rank's loaded model, with all that is needed to check it and to run steps."""

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
    """Facts that a model's configuration states and routers need."""

    # The architecture's name, such as LlamaForCausalLM.
    architecture: str
    vocab_size: int
    # The ids may be outside the vocabulary; None if the model states none.
    eos_token_ids: tuple[int, ...] | None


def no_check() -> None:
    """Do nothing: stands for the check of a model that needs no check."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model, or one rank's part of it, and everything it is computed with."""

    # The model that holds this rank's weights and takes adapters.
    part: CausalModel
    # The adapters of `part`; None if it takes none.
    bank: LoraBank | None
    # With several ranks, the check that all must call once each has its part. Raises ModelError.
    check: Callable[[], None]
    # The model that runs steps: `part`, wrapped for CUDA graphs if decodes may be captured; on rank
    # 0 of several ranks, a `MirroredModel` over all ranks.
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
        """Return a copy whose steps are run by `graphs`, which wraps `part`."""
        return dataclasses.replace(self, model=graphs or self.part, graphs=graphs)

    def over_ranks(self, whole: Graphs) -> LoadedModel:
        """Return rank 0's loaded model once all ranks have their parts; `whole` runs steps on
        all.
        """
        graphs = None if self.graphs is None else whole
        return dataclasses.replace(self, model=whole, graphs=graphs)
