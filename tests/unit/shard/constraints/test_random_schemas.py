from __future__ import annotations

import json
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator
from random_schemas import random_schema
from support.budget import budget, seeded
from support.walks import walk

import penstock_shard
from penstock_shard.constraints.compiler import Compiler, ConstraintLimits
from penstock_shard.request import Constraint

MODEL = Path(penstock_shard.__file__).parent / "builtin_model"


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    raw = (MODEL / "tokenizer.json").read_bytes()
    return Compiler(raw, 3072, [2], ConstraintLimits())


@pytest.mark.timeout(3000)
def test_whatever_is_walked_through_a_random_schema_is_valid_and_most_walks_end(compiler):
    rng = seeded("random schemas")
    finished = 0
    count = budget(100, 1000)
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
