"""Log-probabilities for tests, from plain lists."""

from __future__ import annotations

from collections.abc import Sequence

from penstock_proto.types import Logprobs


def logprobs_of(
    chosen: Sequence[float],
    ranks: Sequence[int],
    top_n: int = 0,
    best: Sequence[tuple[int, float]] = (),
    requested: Sequence[float] = (),
) -> Logprobs:
    """Columns with these values; `best` has `top_n` pairs of id and log-probability a token."""
    columns = Logprobs([*chosen], [*ranks], top_n, requested=[*requested])
    columns.add_best([token_id for token_id, _ in best], [value for _, value in best])
    return columns
