"""The path that every request takes, with nothing plugged in."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from models.plain_path import CLAIMS

TESTS = Path(__file__).parents[1]
# What plugs in: objectives, drafts, constraints, adapters, processors and outputs.
PLUGS = (
    *("objectives", "urgency", "speculation", "prompt_lookup", "create_engine"),
    *("constraints.state", "constraints.matchers", "constraints.compiler"),
    *("engine_adapters", "runner.adapters", "models.lora", "models.lora_places"),
    *("runner.outputs.prompt_logprobs", "runner.outputs.embeddings"),
    *("runner.outputs.verification", "runner.outputs.every"),
    *("runner.logits.penalties", "runner.logits.bias", "runner.logits.allowed_ids"),
    *("runner.logits.bad_words", "runner.logits.min_tokens", "runner.logits.constraint_mask"),
    *("runner.logits.order", "runner.token_state"),
)


@pytest.mark.parametrize("claim", CLAIMS)
def test_by_itself(claim: Callable[[], None]) -> None:
    claim()


def test_all_of_it_holds_where_nothing_that_plugs_in_can_be_imported() -> None:
    script = f"""
import importlib.util, sys
for name in {PLUGS!r}:
    assert importlib.util.find_spec(f"penstock_shard.{{name}}"), name
    sys.modules[f"penstock_shard.{{name}}"] = None
sys.modules["llguidance"] = None
sys.path.insert(0, {str(TESTS)!r})
from models.plain_path import CLAIMS
for claim in CLAIMS:
    claim()
print(len(CLAIMS), "hold")
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=100
    )
    assert done.stdout == f"{len(CLAIMS)} hold\n", done.stderr
