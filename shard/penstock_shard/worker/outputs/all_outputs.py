"""The outputs of rows besides their sampled tokens."""

from __future__ import annotations

from collections import abc

from penstock_shard.worker.outputs.base import RowOutput
from penstock_shard.worker.outputs.draft_verification import Drafts
from penstock_shard.worker.outputs.embeddings import Embeddings
from penstock_shard.worker.outputs.prompt_logprobs import PromptLogprobs
from penstock_shard.worker.sampling.sampler import Sampler
from penstock_shard.worker.slot_state import Slots


def every_output(slots: Slots, sampler: Sampler) -> abc.Sequence[RowOutput]:
    return PromptLogprobs(slots), Embeddings(slots), Drafts(slots, sampler)
