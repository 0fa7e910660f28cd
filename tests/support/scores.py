"""Log-probabilities for tests, from plain lists."""

from __future__ import annotations

from collections.abc import Sequence

from penstock_proto.types import Logprobs


def scores(
    chosen: Sequence[float],
    ranks: Sequence[int],
    top_n: int = 0,
    top_token_ids: Sequence[int] = (),
    top_logprobs: Sequence[float] = (),
    requested: Sequence[float] = (),
) -> Logprobs:
    """Columns with these values, `top_n` of the best for each token."""
    columns = Logprobs([*chosen], [*ranks], top_n, requested=[*requested])
    columns.add_best(top_token_ids, top_logprobs)
    return columns
