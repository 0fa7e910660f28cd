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
    *("scheduler.priority_policy", "scheduler.urgency", "scheduler.speculation"),
    *(
        "spec_decode.prompt_lookup",
        "engine.create_engine",
        "engine.matchers",
        "engine.adapter_slots",
    ),
    *("structured_output.matcher_state", "structured_output.compiler"),
    *("model_loader.adapter_store", "lora.lora", "models.lora_targets", "worker.token_state"),
    *(
        f"worker.outputs.{name}"
        for name in ("prompt_logprobs", "embeddings", "draft_verification", "all_outputs")
    ),
    *(
        f"worker.logits_processors.{name}"
        for name in (
            *("penalties", "logit_bias", "allowed_ids", "bad_words", "min_tokens"),
            *("constraint_mask", "order"),
        )
    ),
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
