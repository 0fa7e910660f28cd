"""Requests that are computed once more on a second shard while serving."""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.processes import Shard, running
from support.streams import run_whole

from penstock_client import Fleet, GenerationRequest, SamplingParams
from penstock_shard.checkpoint.model_source import BUILTIN_MODEL

FAKE = ("--step-ms", "2", "--served-model-name", "m")


@pytest.fixture(scope="module")
def equal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Shard]]:
    """Two shards that compute the same."""
    logs = tmp_path_factory.mktemp("equal")
    shards = [Shard(logs / f"shard{index}", *FAKE) for index in range(2)]
    with running(*shards):
        yield shards


async def _verify(addresses: list[str], first: str, *, share: float = 1.0) -> list[str]:
    """Return the outcomes of verification for six requests that run on `first`."""
    events: list[tuple[str, str]] = []
    fleet = Fleet(addresses, verify_share=share, observe=lambda *event: events.append(event))

    def verified() -> list[str]:
        return [reason for event, reason in events if event == "verified"]

    async with fleet, asyncio.timeout(60):
        while not all(shard.ready for shard in fleet.shards):
            await asyncio.sleep(0.02)
        for seed in range(6):
            sampling = SamplingParams(temperature=1.0, seed=seed)
            request = GenerationRequest([1, 2], sampling, max_tokens=20, shard=first)
            await run_whole(fleet, request)
            # If it is verified, the request is computed once more after its end.
            until_s = time.monotonic() + (5 if share and len(addresses) > 1 else 0.1)
            while len(verified()) <= seed and time.monotonic() < until_s:
                await asyncio.sleep(0.02)
    return verified()


async def test_shards_that_compute_the_same_are_found_to(equal: list[Shard]) -> None:
    addresses = [shard.address for shard in equal]
    assert await _verify(addresses, addresses[0]) == ["equal"] * 6
    assert await _verify(addresses, addresses[0], share=0.0) == []
    assert await _verify(addresses[:1], addresses[0]) == []


async def test_a_shard_that_computes_something_else_is_named(
    tmp_path: Path, equal: list[Shard], caplog: pytest.LogCaptureFixture
) -> None:
    # Both say that their numerics are the same; one has an ordinary id less.
    model = tmp_path / "model"
    shutil.copytree(BUILTIN_MODEL, model)
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    tokenizer["added_tokens"].append({**tokenizer["added_tokens"][0], "id": 300, "content": "x!"})
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    right = equal[0]
    wrong = Shard(tmp_path / "wrong", "--runner", "fake", "--model", str(model), *FAKE)
    with running(wrong), caplog.at_level(logging.ERROR):
        reasons = await _verify([right.address, wrong.address], right.address)
        assert "different" in reasons
    assert f"shards {right.address} and {wrong.address} have the same numerics" in caplog.text


@pytest.mark.parametrize("share", [-0.1, 1.5])
async def test_a_share_that_is_none_is_refused(share: float) -> None:
    with pytest.raises(ValueError, match="verify_share"):
        Fleet(["a:1"], verify_share=share)
