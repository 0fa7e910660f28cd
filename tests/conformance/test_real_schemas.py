"""Schemas in use are served, or refused in one line, and what is written of them is valid."""

from __future__ import annotations

import json
import os
from collections import Counter
from typing import Any

import jsonschema_rs
import pytest
from conformance.real_schemas import REAL_SCHEMAS, catalogue, geojson, sample
from support.budget import budget, seeded
from support.compilers import plain_compiler
from support.distinct_walks import Walker, text_of

from penstock_proto.types import Constraint
from penstock_shard.structured_output.refusal import ConstraintRefused

# Tokens from which on a walk ends where it may.
_LENGTHS = (5, 30, 100)


@pytest.fixture(autouse=True)
def _schemas() -> None:
    if not (REAL_SCHEMAS / ".done").exists():
        missing = (
            f"no schemas to test with; make {REAL_SCHEMAS.parent.name}/{REAL_SCHEMAS.name}/.done"
        )
        if os.environ.get("CI"):
            pytest.fail(missing)
        pytest.skip(missing)


def _refusal(schema: Any) -> str:
    """Why the schema is refused; "" if it is served."""
    try:
        plain_compiler().compile(Constraint("json_schema", json.dumps(schema)))
    except ConstraintRefused as error:
        return str(error)
    return ""


def test_most_schemas_in_use_are_served_and_the_others_refused_in_a_line_of_ours() -> None:
    refusals = {key: _refusal(schema) for key, schema in sample(seeded("real schemas")).items()}
    told = {key: refusal for key, refusal in refusals.items() if refusal}
    print(told)
    assert len(told) <= 0.08 * len(refusals)
    for refusal in told.values():
        assert "\n" not in refusal
        for word in ("panic", "assertion", "json-schema:///", "NoExtension", "<non-verbose"):
            assert word not in refusal


def test_every_schema_of_geojson_is_served() -> None:
    schemas = geojson()
    if not schemas:
        pytest.skip("npm fetches them, and there is none")
    assert len(schemas) == 11
    assert {name: _refusal(schema) for name, schema in schemas.items()} == dict.fromkeys(
        schemas, ""
    )


def _finite(number: str) -> float:
    """A number as readers have it that know no infinity."""
    return max(-1e308, min(1e308, float(number)))


def _check(schema: Any, text: str) -> None:
    value = json.loads(text, parse_float=_finite)
    assert jsonschema_rs.validator_for(schema).is_valid(value), text


def _checked(schema: Any) -> bool:
    """True if `jsonschema_rs` can check values by the schema: it refuses some patterns."""
    try:
        jsonschema_rs.validator_for(schema)
    except ValueError:
        return False
    return True


def test_what_is_written_of_schemas_in_use_is_valid_and_no_answer_dies() -> None:
    rng = seeded("answers to real schemas")
    schemas = [*sample(rng).values(), *geojson().values()]
    schemas = rng.sample(schemas, budget(30, len(schemas)))
    counts: Counter[str] = Counter()
    for schema in filter(_checked, schemas):
        constraint = Constraint("json_schema", json.dumps(schema))
        if _refusal(schema):
            continue
        for _ in range(budget(2, 20)):
            # Raises if nothing is allowed.
            walk = Walker(plain_compiler(), constraint).walk(rng, rng.choice(_LENGTHS))
            counts["ended" if walk.finished else "cut off"] += 1
            if walk.finished:
                _check(schema, text_of(plain_compiler(), walk.token_ids))
    print(counts)
    assert counts["ended"] > counts["cut off"]


def test_the_catalogue_has_what_samples_are_taken_of() -> None:
    assert len(catalogue()) > 400
