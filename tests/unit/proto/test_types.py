"""Types of the wire."""

from __future__ import annotations

import pytest
from support.scores import logprobs_of

from penstock_proto.types import Constraint, ConstraintKind, Logprobs


def test_columns_stay_aligned_where_nothing_is_appended() -> None:
    columns = logprobs_of([-1.0], [1], 2, [(7, -1.0), (8, -2.0)])
    columns.extend(Logprobs())
    columns.extend(logprobs_of([-3.0], [1], 2, [(9, -3.0), (5, -4.0)]))
    assert columns.best(1)[0].tolist() == [9, 5]
    assert columns.first(1) == logprobs_of([-1.0], [1], 2, [(7, -1.0), (8, -2.0)])


def test_a_kind_of_constraint_is_one_of_those_that_are() -> None:
    assert Constraint("regex", "a") == Constraint(ConstraintKind.REGEX, "a", [])
    with pytest.raises(ValueError, match="poem"):
        Constraint("poem")
