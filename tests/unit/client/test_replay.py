"""`penstock replay`: what it sends, where, and what it says of the answer. Shards are stand-ins."""

from __future__ import annotations

import argparse
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, Self, cast

import pytest

from penstock_cli import replay
from penstock_cli.replay import (
    NotComparable,
    Tally,
    check_recorded_whole,
    choose_shard,
    numerics_remark,
    replay_request,
)
from penstock_client.audit_log import AuditLog, AuditRecord, WithheldPrompt
from penstock_client.fleet.fleet import Fleet
from penstock_proto.errors import NoShardAvailable
from penstock_proto.types import (
    FinishReason,
    GenerationRequest,
    Objective,
    Output,
    SamplingParams,
)


class _Info:
    def __init__(self, weights_hash: str = "w", fingerprint: str = "f") -> None:
        self.weights_hash = weights_hash
        self.numerics_fingerprint = fingerprint


class _Shard:
    ready = True

    def __init__(self, address: str, info: _Info | None = None, in_flight: int = 0) -> None:
        self.address = address
        self.info = info or _Info()
        self.in_flight = in_flight


class _Fleet:
    """Gives each request these ids, `at_once` of them in an output."""

    def __init__(
        self,
        ids: Sequence[int] = (),
        reason: FinishReason = FinishReason.STOP,
        *,
        shards: Sequence[_Shard] = (),
        at_once: int = 2,
        error: Exception | None = None,
    ) -> None:
        self.ids, self.reason, self.at_once, self.error = ids, reason, at_once, error
        self.shards = shards or [_Shard("a:1")]
        self.requests: list[GenerationRequest] = []
        self.given = 0

    def submit(self, request: GenerationRequest) -> Self:
        self.requests.append(request)
        return self

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        pass

    async def __aiter__(self) -> AsyncIterator[Output]:
        if self.error is not None:
            raise self.error
        for start in range(0, len(self.ids), self.at_once):
            ids = list(self.ids[start : start + self.at_once])
            self.given += len(ids)
            last = start + self.at_once >= len(self.ids)
            yield Output(ids, start, finish_reason=self.reason if last else None)


def _record(
    ids: Sequence[int] = (1, 2, 3, 4, 5),
    reason: FinishReason | None = FinishReason.STOP,
    request: GenerationRequest | None = None,
    **changes: Any,
) -> AuditRecord:
    request = request or GenerationRequest([7, 8], SamplingParams(seed=1), max_tokens=9)
    values: dict[str, Any] = {"weights_hash": "w", "numerics_fingerprints": ("f",), **changes}
    return AuditRecord("one", request, ids, reason, **values)


async def _compare(fleet: _Fleet, *records: AuditRecord) -> Tally:
    tally = Tally()
    await replay._compare_all(iter(records), cast(Fleet, fleet), tally)
    return tally


# ---- comparing ----


@pytest.mark.parametrize("at_once", [1, 2, 5, 100])
async def test_the_same_tokens_and_end_are_equal(at_once: int, capsys: Any) -> None:
    tally = await _compare(_Fleet([1, 2, 3, 4, 5], at_once=at_once), _record())
    assert (tally.equal, tally.all_equal, capsys.readouterr().out) == (1, True, "")


@pytest.mark.parametrize("at_once", [1, 2, 100])
@pytest.mark.parametrize(
    ("ids", "reason", "line"),
    [
        ([1, 2, 9, 4, 5], FinishReason.STOP, "one: position 2: recorded 3, regenerated 9"),
        ([1, 2, 3], FinishReason.STOP, "one: position 3: recorded 4, regenerated the end"),
        ([1, 2, 3, 4, 5, 6], FinishReason.STOP, "one: position 5: recorded the end, regenerated 6"),
        ([1, 2, 3, 4, 5], FinishReason.LENGTH, "one: finish reason: recorded stop, length now"),
    ],
)
async def test_the_first_difference_is_said(
    ids: list[int], reason: FinishReason, line: str, at_once: int, capsys: Any
) -> None:
    tally = await _compare(_Fleet(ids, reason, at_once=at_once), _record())
    assert (tally.different, tally.all_equal) == (1, False)
    assert capsys.readouterr().out == line + "\n"


async def test_nothing_is_generated_after_the_first_difference() -> None:
    fleet = _Fleet([9] * 100, at_once=1)
    await _compare(fleet, _record())
    assert fleet.given == 1


async def test_nothing_is_generated_after_what_a_record_that_ended_early_has() -> None:
    request = GenerationRequest([7], SamplingParams(seed=1), max_tokens=100, min_tokens=50)
    fleet = _Fleet(range(1, 100), at_once=1)
    tally = await _compare(fleet, _record(reason=FinishReason.ABORTED, request=request))
    assert (tally.equal, fleet.given) == (1, 5)


@pytest.mark.parametrize(
    ("ids", "equal"),
    [([1, 2, 3, 4, 5, 6, 7], 1), ([1, 2, 3, 4, 5], 1), ([1, 2, 3, 4], 0), ([1, 2, 3, 4, 6], 0)],
)
@pytest.mark.parametrize("reason", [FinishReason.ABORTED, None])
async def test_a_record_that_ended_early_is_the_beginning_of_what_is_generated(
    reason: FinishReason | None, ids: list[int], equal: int
) -> None:
    for at_once in (1, 3, 100):
        tally = await _compare(_Fleet(ids, at_once=at_once), _record(reason=reason))
        assert (tally.equal, tally.different) == (equal, 1 - equal)


async def test_a_record_without_a_token_has_nothing_to_compare() -> None:
    fleet = _Fleet()
    tally = await _compare(fleet, _record((), None, error="refused", weights_hash=""))
    assert (tally.all_equal, fleet.requests) == (True, [])


async def test_a_request_that_fails_is_no_equal_and_the_next_is_compared(capsys: Any) -> None:
    tally = await _compare(_Fleet(error=NoShardAvailable("none is left")), _record(), _record())
    assert (tally.failed, tally.all_equal) == (2, False)
    assert "one: could not be generated again: none is left" in capsys.readouterr().out


async def test_a_difference_on_other_numerics_is_marked(capsys: Any) -> None:
    shards = [_Shard("a:1", _Info(fingerprint="g"))]
    tally = await _compare(_Fleet([9], shards=shards), _record())
    assert (tally.different, tally.other_numerics) == (1, 1)
    assert capsys.readouterr().out.endswith(" (other numerics: recorded on f, regenerated on g)\n")


@pytest.mark.parametrize(
    ("recorded", "here", "same"),
    [
        (("f",), "f", True),
        (("f", "g"), "f", False),
        (("f",), "", False),
        (("",), "", False),
        ((), "", False),
        ((), "f", False),
    ],
)
def test_only_one_and_the_same_fingerprint_promises_equal_bits(
    recorded: tuple[str, ...], here: str, same: bool
) -> None:
    remark = numerics_remark(_record(numerics_fingerprints=recorded), cast(Any, _Info("w", here)))
    assert (not remark) is same


# ---- what cannot be compared ----


async def test_other_weights_are_not_compared() -> None:
    fleet = _Fleet(shards=[_Shard("a:1", _Info("other"))])
    tally = await _compare(fleet, _record(), _record())
    assert (tally.not_comparable, fleet.requests) == ({"no shard has the weights w": 2}, [])
    assert list(tally.lines())[1] == "not comparable: 2 records: no shard has the weights w"
    assert not tally.all_equal


def test_a_record_without_its_prompt_is_not_compared() -> None:
    with pytest.raises(NotComparable, match="without prompts"):
        check_recorded_whole(_record(withheld_prompt=WithheldPrompt(2, "")))


@pytest.mark.parametrize(
    ("sampling", "comparable"),
    [
        (SamplingParams(), False),
        (SamplingParams(temperature=1.0), False),
        (SamplingParams(temperature=0.0), True),
        (SamplingParams(seed=0), True),
    ],
)
def test_a_record_without_a_seed_is_compared_only_where_nothing_is_drawn(
    sampling: SamplingParams, comparable: bool
) -> None:
    record = _record(request=GenerationRequest([1], sampling))
    if comparable:
        check_recorded_whole(record)
    else:
        with pytest.raises(NotComparable, match="no seed"):
            check_recorded_whole(record)


# ---- where it goes, and as what ----


def _chosen(record: AuditRecord, *shards: _Shard) -> str:
    return choose_shard(record, cast(Any, shards))[0].address


def test_the_recorded_numerics_go_before_the_least_load() -> None:
    busy, idle = _Shard("busy:1", _Info(), 5), _Shard("idle:1", _Info(fingerprint="g"), 0)
    assert _chosen(_record(), idle, busy) == "busy:1"
    assert _chosen(_record(numerics_fingerprints=("h",)), idle, busy) == "idle:1"
    assert _chosen(_record(), busy, _Shard("less:1", _Info(), 4)) == "less:1"


def test_a_shard_that_is_not_ready_is_not_chosen() -> None:
    away = _Shard("away:1")
    away.ready = False
    with pytest.raises(NotComparable):
        _chosen(_record(), away)


def test_what_decides_the_tokens_is_sent_and_nothing_else() -> None:
    sampling = SamplingParams(temperature=0.5, seed=3, logit_bias={1: 2.0})
    request = GenerationRequest(
        [7, 8], sampling, max_tokens=9, min_tokens=2, stop_token_ids=[4], ignore_eos=True,
        logprobs=5, prompt_logprobs=1, logprob_token_ids=[3], output_token_ids=[6],
        objective=Objective(deadline_s=0.1), model="alias", tokenizer_hash="t", exact=True,
        numerics="g", session="s", shard="gone:1", adapter="a", cache_salt="salt", label="mine",
        traceparent="t",
    )  # fmt: skip
    assert replay_request(_record(request=request), "here:1") == GenerationRequest(
        [7, 8], sampling, max_tokens=9, min_tokens=2, stop_token_ids=[4], ignore_eos=True,
        output_token_ids=[6], shard="here:1", adapter="a", cache_salt="salt", label="mine",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("reason", "max_tokens", "min_tokens", "sent"),
    [
        (FinishReason.STOP, None, None, None),
        (FinishReason.STOP, 9, None, 9),
        (FinishReason.LENGTH, 9, None, 9),
        # The context was full; it may be longer here.
        (FinishReason.LENGTH, None, None, 6),
        (FinishReason.ABORTED, 900, None, 6),
        (None, None, None, 6),
        # A shard refuses a limit below the minimum.
        (None, 900, 20, 20),
    ],
)
def test_no_more_is_asked_for_than_was_recorded(
    reason: FinishReason | None, max_tokens: int | None, min_tokens: int | None, sent: int | None
) -> None:
    request = GenerationRequest(
        [7], max_tokens=max_tokens, min_tokens=min_tokens, output_token_ids=[6]
    )
    assert replay_request(_record(reason=reason, request=request), "a:1").max_tokens == sent


# ---- the command ----


def test_the_limit_is_over_all_files(tmp_path: Path) -> None:
    for name in ("a", "b"):
        log = AuditLog(tmp_path / name)
        for _ in range(3):
            log.record(_record())
        log.close()
    files = [tmp_path / "a", tmp_path / "b"]
    for limit, count in ((None, 6), (4, 4), (100, 6)):
        args = argparse.Namespace(files=files, limit=limit, key=None)
        assert len(list(replay._records(args, Tally()))) == count


def test_damage_alone_is_status_1(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "audit"
    path.write_text("nonsense\n")
    tally = Tally()
    args = argparse.Namespace(files=[path], limit=None, key=None)
    assert list(replay._records(args, tally)) == []
    assert not tally.all_equal
    assert capsys.readouterr().out.startswith(f"{path}:1: ")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["FILE"], "--shards"),
        (["--shards", "a:1"], "FILE"),
        (["FILE", "--shards", ","], "at least one"),
        (["FILE", "--shards", "a"], "'a' is not HOST:PORT"),
        (["FILE", "--shards", "a:1", "--limit", "0"], "at least 1"),
        (["nowhere", "--shards", "a:1"], "nowhere"),
        (["FILE", "--shards", "a:1", "--key-file", "FILE"], "16 to 64 bytes"),
    ],
)
def test_a_wrong_command_line_is_one_line_and_status_2(
    arguments: list[str], said: str, tmp_path: Path, capsys: Any
) -> None:
    (tmp_path / "empty").touch()
    with pytest.raises(SystemExit) as exit_:
        replay.main([str(tmp_path / "empty") if each == "FILE" else each for each in arguments])
    error = capsys.readouterr().err
    assert (exit_.value.code, error.count("\n")) == (2, 1)
    assert said in error
