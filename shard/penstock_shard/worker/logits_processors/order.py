"""Every logits processor, in the order in which they apply."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock_shard.runner.logits.allowed_ids import AllowedIds
from penstock_shard.runner.logits.bad_words import BadWords
from penstock_shard.runner.logits.bias import Bias
from penstock_shard.runner.logits.constraint_mask import ConstraintMask
from penstock_shard.runner.logits.min_tokens import MinTokens
from penstock_shard.runner.logits.penalties import Penalties
from penstock_shard.runner.logits.shaping import LogitsShaping

if TYPE_CHECKING:
    from penstock_shard.constraints.state import MaskFiller


def every_processor(masks: MaskFiller | None = None) -> LogitsShaping:
    """Without `masks` no request may have a constraint."""
    return LogitsShaping(
        [Penalties(), Bias(), AllowedIds(), BadWords(), MinTokens(), ConstraintMask(masks)]
    )
