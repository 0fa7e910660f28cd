from __future__ import annotations

import json

import pytest
from jsonschema import Draft202012Validator
from support.budget import budget, seeded
from support.compilers import plain_compiler
from support.random_schemas import random_schema
from support.walks import walk

from penstock_proto.types import Constraint


@pytest.mark.timeout(3000)
def test_whatever_is_walked_through_a_random_schema_is_valid_and_most_walks_end():
    compiler = plain_compiler()
    rng = seeded("random schemas")
    finished = 0
    count = budget(40, 1000)
    for _ in range(count):
        schema = random_schema(rng)
        Draft202012Validator.check_schema(schema)
        matcher = compiler.compile(Constraint("json_schema", json.dumps(schema)))
        found = walk(matcher, compiler.tokenizer, rng)
        finished += found.finished
        if found.finished:
            text = compiler.tokenizer.decode_str(found.token_ids)
            checker = Draft202012Validator.FORMAT_CHECKER
            errors = Draft202012Validator(schema, format_checker=checker).iter_errors(
                json.loads(text)
            )
            assert not list(errors), f"{json.dumps(schema)}\n{text}"
    print(f"{finished} of {count} walks ended")
    assert count - finished <= max(0.05 * count, 10)
