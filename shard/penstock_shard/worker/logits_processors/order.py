"""All logits processors, in the order in which they apply."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock_shard.worker.logits_processors.allowed_ids import AllowedIds
from penstock_shard.worker.logits_processors.apply import LogitsShaping
from penstock_shard.worker.logits_processors.bad_words import BadWords
from penstock_shard.worker.logits_processors.constraint_mask import ConstraintMask
from penstock_shard.worker.logits_processors.logit_bias import Bias
from penstock_shard.worker.logits_processors.min_tokens import MinTokens
from penstock_shard.worker.logits_processors.penalties import Penalties

if TYPE_CHECKING:
    from penstock_shard.structured_output.matcher_state import MaskFiller


def every_processor(masks: MaskFiller | None = None) -> LogitsShaping:
    """Return all processors. Without `masks`, no request may have a constraint."""
    return LogitsShaping(
        [Penalties(), Bias(), AllowedIds(), BadWords(), MinTokens(), ConstraintMask(masks)]
    )
