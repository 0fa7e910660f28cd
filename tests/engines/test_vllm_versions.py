"""Several versions of vLLM behind a shard; `install_vllm.py` installs them."""

from __future__ import annotations

import dataclasses
import subprocess
from pathlib import Path

import pytest
from support.processes import Shard
from support.vllm_shards import ENVIRONMENT, INSTALLED, PYTHON, START_S, start

import penstock_proto
import penstock_shard
from penstock_client import (
    Constraint,
    ConstraintKind,
    GenerationRequest,
    NotServed,
    Output,
    SamplingParams,
    ShardClient,
)

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900), INSTALLED]

OTHERS = sorted((ENVIRONMENT / "other").glob("*"), reverse=True)
_REQUEST = GenerationRequest(
    list(range(40, 60)), SamplingParams(temperature=0.0), max_tokens=12, ignore_eos=True, logprobs=2
)
_MISSING = """
from penstock_shard.vllm_engine import touched
print(touched.missing(touched.CORE), touched.missing(touched.GENERATE))
"""


@pytest.mark.parametrize("python", [PYTHON, *(each / "bin/python" for each in OTHERS)], ids=str)
def test_each_version_has_all_that_is_touched(python: Path) -> None:
    path = ":".join(str(Path(each.__path__[0]).parent) for each in (penstock_shard, penstock_proto))
    variables = {"PYTHONPATH": path, "VLLM_CONFIGURE_LOGGING": "0", "VLLM_NO_USAGE_STATS": "1"}
    told = subprocess.run(
        [python, "-c", _MISSING], env=variables, capture_output=True, text=True, check=True
    )
    assert told.stdout.splitlines()[-1] == "[] []"


async def _read(client: ShardClient, request: GenerationRequest) -> list[Output]:
    return [output async for output in client.generate(request)]


async def _check_what_all_serve(shard: Shard) -> None:
    """Check log-probabilities, a request that goes on, and an abort."""
    async with ShardClient(shard.address) as client:
        outputs = await _read(client, dataclasses.replace(_REQUEST, prompt_logprobs=1))
        tokens = [token_id for each in outputs for token_id in each.token_ids]
        rows = [each.logprobs for each in outputs if each.logprobs]
        best = [row.top_token_ids[2 * i] for row in rows for i in range(len(row.chosen))]
        assert best == tokens
        (scores,) = [each.prompt_logprobs for each in outputs if each.prompt_logprobs]
        assert len(scores.chosen) == 19
        rest = await _read(client, dataclasses.replace(_REQUEST, output_token_ids=tokens[:5]))
        assert [token_id for each in rest for token_id in each.token_ids] == tokens[5:]
        async for _ in client.generate(dataclasses.replace(_REQUEST, max_tokens=400)):
            break
        async for load in client.watch_load():
            if not load.running and not load.waiting:
                break


async def test_the_minor_version_before_is_served_as_the_newest(tmp_path: Path) -> None:
    shard = start(tmp_path, python=OTHERS[0] / "bin/python")
    try:
        shard.wait_healthy(START_S)
        await _check_what_all_serve(shard)
        async with ShardClient(shard.address) as client:
            regex = Constraint(ConstraintKind.REGEX, "[ab]{4}")
            asked = dataclasses.replace(_REQUEST, constraint=regex, ignore_eos=False, logprobs=None)
            outputs = await _read(client, asked)
            assert outputs[-1].finish_reason
            assert "regex" in (await client.info()).capabilities
    finally:
        shard.close()


async def test_a_version_that_was_not_tried_runs_by_generate_and_says_so(tmp_path: Path) -> None:
    shard = start(tmp_path, python=OTHERS[1] / "bin/python")
    try:
        shard.wait_healthy(START_S)
        assert "was not tried with this shard, 0.31 and 0.32 were: requests run by gen" in shard.log
        await _check_what_all_serve(shard)
        async with ShardClient(shard.address) as client:
            regex = Constraint(ConstraintKind.REGEX, "[ab]{4}")
            with pytest.raises(NotServed, match="regex"):
                await _read(client, dataclasses.replace(_REQUEST, constraint=regex))
            counted = SamplingParams(temperature=0.0, presence_penalty=1.0)
            later = dataclasses.replace(_REQUEST, sampling=counted, output_token_ids=[50])
            with pytest.raises(NotServed, match="presence_penalty"):
                await _read(client, later)
    finally:
        shard.close()
