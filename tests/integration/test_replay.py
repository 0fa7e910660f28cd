"""An audit log made of what real shards (fake runner) generated, replayed on others."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from support.processes import Shard, running

from penstock_client import (
    Constraint,
    ConstraintKind,
    Fleet,
    GenerationRequest,
    SamplingParams,
    ThinkingBudget,
)
from penstock_client.audit_log import AuditLog, AuditRecord
from penstock_proto.types import FinishReason

REQUESTS = 12
NUMBERS = Constraint(ConstraintKind.REGEX, "([0-9]{2} ){5,30}")


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Shard, Shard]]:
    logs = tmp_path_factory.mktemp("shards")
    flags = ("--step-ms", "2", "--fake-eos-rate", "0.02", "--max-model-len", "128")
    pair = Shard(logs / "a", *flags), Shard(logs / "b", *flags)
    with running(*pair):
        yield pair


@pytest.fixture(scope="module")
def records(shards: tuple[Shard, Shard]) -> list[AuditRecord]:
    """The records of requests that ended by themselves, were cut off at a length, or were left
    early.
    """
    return asyncio.run(_generate(shards[0].address))


async def _generate(address: str) -> list[AuditRecord]:
    async with Fleet([address]) as fleet:
        await fleet.wait_ready(10)
        requests = [
            GenerationRequest(
                [5, 6, index],
                SamplingParams(temperature=0.8, seed=index, repetition_penalty=1.1),
                max_tokens=None if index % 2 else 30,
                min_tokens=index % 3,
                ignore_eos=index % 5 == 0,
                constraint=NUMBERS if index % 4 == 1 else None,
                thinking_budget=ThinkingBudget(3, 600, 601, begun=True) if index % 4 == 2 else None,
                logprobs=2,
                label=f"label {index}",
            )
            for index in range(REQUESTS)
        ]
        made = (_record(fleet, request, index) for index, request in enumerate(requests))
        return list(await asyncio.gather(*made))


async def _record(fleet: Fleet, request: GenerationRequest, index: int) -> AuditRecord:
    ids: list[int] = []
    reason = None
    async with fleet.submit(request) as stream:
        async for output in stream:
            ids += output.token_ids
            reason = output.finish_reason
            if index >= REQUESTS - 2 and len(ids) >= 5:
                break
    info = fleet.info()
    return AuditRecord(
        request_id=f"request-{index}",
        request=request,
        output_token_ids=ids,
        finish_reason=reason or FinishReason.ABORTED,
        model=info.model,
        weights_hash=info.weights_hash,
        numerics_fingerprints=(info.numerics_fingerprint,),
    )


def _log(path: Path, records: list[AuditRecord], *, prompts: bool = True) -> Path:
    with contextlib.closing(AuditLog(path, prompts=prompts)) as log:
        for record in records:
            log.record(record)
    return path


def _replay(file: Path, *shards: Shard) -> subprocess.CompletedProcess[str]:
    addresses = ",".join(shard.address for shard in shards)
    command = [sys.executable, "-m", "penstock_cli.main", "replay", str(file)]
    return subprocess.run(
        [*command, "--shards", addresses], capture_output=True, text=True, timeout=60
    )


def test_every_record_is_generated_again_elsewhere(
    shards: tuple[Shard, Shard], records: list[AuditRecord], tmp_path: Path
) -> None:
    assert {record.finish_reason for record in records} == set(FinishReason) - {
        FinishReason.FETCHED
    }
    assert [601 in record.output_token_ids for record in records[2::4]] == [True] * 3
    run = _replay(_log(tmp_path / "audit", records), shards[1])
    assert run.stdout.startswith(f"{REQUESTS} records: {REQUESTS} equal, 0 different, 0 failed")
    assert (run.returncode, run.stderr) == (0, "")


def test_what_differs_is_named_and_the_rest_is_still_compared(
    shards: tuple[Shard, Shard], records: list[AuditRecord], tmp_path: Path
) -> None:
    ids = list(records[0].output_token_ids)
    ids[3] += 1
    other_token = replace(records[0], output_token_ids=ids)
    other_seed = replace(
        records[1],
        request=replace(records[1].request, sampling=SamplingParams(temperature=0.8, seed=99)),
    )
    other_end = replace(records[2], finish_reason=FinishReason.STOP)
    longer = replace(other_end, output_token_ids=records[2].output_token_ids[:-1])
    run = _replay(
        _log(tmp_path / "audit", [other_token, other_seed, longer, *records[3:]]), *shards
    )
    assert run.returncode == 1
    assert f"request-0: position 3: recorded {ids[3]}, regenerated {ids[3] - 1}" in run.stdout
    assert "request-1: position 0: recorded" in run.stdout
    assert f"request-2: position {len(longer.output_token_ids)}: recorded the end" in run.stdout
    assert f"\n{REQUESTS} records: {REQUESTS - 3} equal, 3 different" in run.stdout


def test_a_log_without_prompts_says_so(
    shards: tuple[Shard, Shard], records: list[AuditRecord], tmp_path: Path
) -> None:
    run = _replay(_log(tmp_path / "audit", records, prompts=False), *shards)
    assert run.returncode == 1
    assert f"not comparable: {REQUESTS} records: the log was written without prompts" in run.stdout


def test_shards_with_other_weights_compare_nothing(
    shards: tuple[Shard, Shard], records: list[AuditRecord], tmp_path: Path
) -> None:
    strange = [replace(record, weights_hash="0123") for record in records]
    run = _replay(_log(tmp_path / "audit", strange), *shards)
    assert run.returncode == 1
    assert f"not comparable: {REQUESTS} records: no shard has the weights 0123" in run.stdout


def test_a_damaged_log_is_replayed_as_far_as_it_goes(
    shards: tuple[Shard, Shard], records: list[AuditRecord], tmp_path: Path
) -> None:
    path = _log(tmp_path / "audit", records)
    path.write_bytes(path.read_bytes().replace(b'"label 2"', b'"label 3"'))
    run = _replay(path, *shards)
    assert run.returncode == 1
    assert run.stdout.startswith(f"{path}:3: was edited\n")
    assert f"{REQUESTS - 1} records: {REQUESTS - 1} equal" in run.stdout
