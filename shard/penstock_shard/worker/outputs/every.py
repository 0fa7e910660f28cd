"""Every output of rows besides their sampled tokens."""

from __future__ import annotations

from collections import abc

from penstock_shard.runner.outputs.base import RowOutput
from penstock_shard.runner.outputs.embeddings import Embeddings
from penstock_shard.runner.outputs.prompt_logprobs import PromptLogprobs
from penstock_shard.runner.outputs.verification import Drafts
from penstock_shard.runner.sampler import Sampler
from penstock_shard.runner.slots import Slots


def every_output(slots: Slots, sampler: Sampler) -> abc.Sequence[RowOutput]:
    """Those of a runner with these slots and this sampler."""
    return PromptLogprobs(slots), Embeddings(slots), Drafts(slots, sampler)
