"""`penstock replay`: repeats the requests of an audit log, and compares the tokens.

Each record goes to a shard with the record's weights and stops at the first different token.
Log-probabilities, deadlines and priorities are left out: no token depends on them. A record that
ended early (an abort, an error) is compared up to its end.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from penstock_cli.arguments import (
    add_shard_tls,
    parser_for,
    positive_int,
    shard_address,
    shard_tls,
)
from penstock_client.audit_log import AuditRecord, read_audit, read_key
from penstock_client.fleet.fleet import Fleet
from penstock_client.fleet.shard_state import ShardState
from penstock_common.logs import escape
from penstock_common.shared_flags import SHARD_API_KEY, add_api_key
from penstock_proto.errors import PenstockError
from penstock_proto.facts import ShardInfo
from penstock_proto.limits import GREEDY_TEMPERATURE
from penstock_proto.types import FinishReason, GenerationRequest, Objective

_DESCRIPTION = """\
Generate again what an audit log recorded, and compare token by token. Exit status: 0 when every
record was compared and is equal, 1 when one differs, could not be compared or is damaged, 2 when
the command line is wrong.
"""
_READY_TIMEOUT_S = 30.0
_OTHERS_TIMEOUT_S = 5.0
_PROGRESS_EVERY_S = 5.0


class NotComparable(Exception):
    """The record cannot be generated again here. The text is the reason, which is equal for similar
    records.
    """


@dataclass(slots=True)
class Tally:
    equal: int = 0
    # Compared records, equal or different, that were recorded with other numerics.
    other_numerics: int = 0
    different: int = 0
    failed: int = 0
    problems: int = 0
    not_comparable: Counter[str] = field(default_factory=Counter)

    @property
    def records(self) -> int:
        return self.equal + self.different + self.failed + self.not_comparable.total()

    @property
    def all_equal(self) -> bool:
        return self.equal == self.records and not self.problems

    def lines(self) -> Iterator[str]:
        yield (
            f"{self.records} records: {self.equal} equal, {self.different} different, "
            f"{self.failed} failed, {self.not_comparable.total()} not comparable; "
            f"{self.other_numerics} compared on other numerics; "
            f"{self.problems} problems in the log"
        )
        for reason, count in self.not_comparable.most_common():
            yield f"not comparable: {count} records: {reason}"


def main(arguments: Sequence[str]) -> int:
    args = _parse(arguments)
    try:
        tally = asyncio.run(_replay(args))
    except (PenstockError, OSError) as error:
        print(escape(f"penstock replay: {error}"), file=sys.stderr)
        return 1
    for line in tally.lines():
        print(escape(line))
    return 0 if tally.all_equal else 1


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = parser_for("replay", _DESCRIPTION)
    parser.add_argument("files", metavar="FILE", nargs="+", help="an audit log, with its prompts")
    parser.add_argument(
        "--shards",
        required=True,
        type=_addresses,
        metavar="HOST:PORT,...",
        help="shards that replay",
    )
    add_api_key(parser, "API key to send", SHARD_API_KEY)
    add_shard_tls(parser)
    parser.add_argument("--key-file", metavar="FILE", help="the log's key, if it has one")
    parser.add_argument(
        "--limit", type=positive_int, metavar="N", help="replay the first N records only"
    )
    parser.add_argument(
        "--concurrency",
        type=positive_int,
        default=16,
        metavar="N",
        help="requests at a time (default: %(default)s)",
    )
    args = parser.parse_args(arguments)
    args.tls = shard_tls(parser, args)
    try:
        args.key = None if args.key_file is None else read_key(args.key_file)
        for file in args.files:
            with open(file, "rb"):
                pass
    except (OSError, ValueError) as error:
        parser.error(str(error))
    return args


def _addresses(text: str) -> list[str]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    addresses = list(dict.fromkeys(map(shard_address, parts)))
    if not addresses:
        raise argparse.ArgumentTypeError("give at least one HOST:PORT")
    return addresses


async def _replay(args: argparse.Namespace) -> Tally:
    tally = Tally()
    records = _records(args, tally)
    async with Fleet(args.shards, api_key=args.api_key, tls=args.tls) as fleet:
        await _wait_for_shards(fleet)
        progress = asyncio.create_task(_show_progress(tally))
        workers = (_compare_all(records, fleet, tally) for _ in range(args.concurrency))
        try:
            await asyncio.gather(*workers)
        finally:
            progress.cancel()
    return tally


def _records(args: argparse.Namespace, tally: Tally) -> Iterator[AuditRecord]:
    def report(problem: str) -> None:
        tally.problems += 1
        print(escape(problem))

    left = args.limit
    for file in args.files:
        for record in read_audit(file, report, key=args.key):
            if left == 0:
                return
            left = None if left is None else left - 1
            yield record


async def _wait_for_shards(fleet: Fleet) -> None:
    """Wait for the first shard to be ready, then a shorter time for the others."""
    await fleet.wait_ready(_READY_TIMEOUT_S)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_OTHERS_TIMEOUT_S):
            while not all(shard.ready for shard in fleet.shards):
                await fleet.wait_changed()
    for shard in fleet.shards:
        if not shard.ready:
            line = f"penstock replay: shard {shard.address}: {shard.problem}"
            print(escape(line), file=sys.stderr)


async def _show_progress(tally: Tally) -> None:
    while True:
        await asyncio.sleep(_PROGRESS_EVERY_S)
        print(f"{tally.records} records, {tally.equal} of them equal", file=sys.stderr)


# ---- one record ----


async def _compare_all(records: Iterator[AuditRecord], fleet: Fleet, tally: Tally) -> None:
    """Compare records until none is left. Several tasks share the iterator."""
    for record in records:
        try:
            await _compare(record, fleet, tally)
        except NotComparable as reason:
            tally.not_comparable[str(reason)] += 1
        except PenstockError as error:
            tally.failed += 1
            print(escape(f"{record.request_id}: could not be generated again: {error}"))


async def _compare(record: AuditRecord, fleet: Fleet, tally: Tally) -> None:
    if _ended_early(record) and not record.output_token_ids:
        tally.equal += 1  # the recorded request gave no tokens
        return
    check_recorded_whole(record)
    shard, info = choose_shard(record, fleet.shards)
    request = replay_request(record, shard.address)
    difference = await _first_difference(record, request, fleet)
    remark = numerics_remark(record, info)
    tally.other_numerics += bool(remark)
    if difference:
        tally.different += 1
        print(escape(f"{record.request_id}: {difference}{remark}"))
    else:
        tally.equal += 1


def check_recorded_whole(record: AuditRecord) -> None:
    """Raise `NotComparable` if the record lacks anything that its tokens depend on."""
    if record.withheld_prompt is not None:
        raise NotComparable("the log was written without prompts, and nothing follows from none")
    sampling = record.request.sampling
    greedy = sampling.temperature is not None and sampling.temperature < GREEDY_TEMPERATURE
    if sampling.seed is None and not greedy:
        raise NotComparable("no seed was recorded, and the tokens were drawn")


def choose_shard(record: AuditRecord, shards: Sequence[ShardState]) -> tuple[ShardState, ShardInfo]:
    """Choose the least busy ready shard with the record's weights, and with its numerics if
    possible. Raise `NotComparable` if no shard has the weights.
    """
    fitting = [
        (shard, shard.info)
        for shard in shards
        if shard.ready and shard.info and shard.info.weights_hash == record.weights_hash
    ]
    if not fitting:
        raise NotComparable(f"no shard has the weights {record.weights_hash or '(none recorded)'}")

    def rank(choice: tuple[ShardState, ShardInfo]) -> tuple[bool, int]:
        return bool(numerics_remark(record, choice[1])), choice[0].in_flight

    return min(fitting, key=rank)


def numerics_remark(record: AuditRecord, info: ShardInfo) -> str:
    """Return a remark if tokens may differ because the numerics do; else ""."""
    recorded = ", ".join(name or "none" for name in record.numerics_fingerprints) or "none"
    here = info.numerics_fingerprint
    if recorded == here:
        return ""
    return f" (other numerics: recorded on {recorded}, regenerated on {here or 'none'})"


def replay_request(record: AuditRecord, shard: str) -> GenerationRequest:
    request = record.request
    recorded_tokens = len(request.output_token_ids) + len(record.output_token_ids)
    max_tokens = request.max_tokens
    if _ended_early(record):
        max_tokens = max(recorded_tokens, request.min_tokens or 0)
    elif max_tokens is None and record.finish_reason is FinishReason.LENGTH:
        max_tokens = recorded_tokens  # the context was full; this shard's context may be longer
    return replace(
        request,
        max_tokens=max_tokens,
        logprobs=None,
        prompt_logprobs=None,
        logprob_token_ids=(),
        objective=Objective(),
        # The weights are the same, so the model's name and tokenizer do not matter.
        model="",
        tokenizer_hash="",
        exact=False,
        numerics="",
        session="",
        shard=shard,
        traceparent="",
        caller="",
    )


def _ended_early(record: AuditRecord) -> bool:
    return record.finish_reason not in (FinishReason.STOP, FinishReason.LENGTH)


async def _first_difference(record: AuditRecord, request: GenerationRequest, fleet: Fleet) -> str:
    """Generate until the first difference; return the difference, or ""."""
    recorded, position = record.output_token_ids, 0
    finish_reason = None
    async with fleet.submit(request) as stream:
        async for output in stream:
            if difference := compare_ids(recorded, output.token_ids, position, record):
                return difference
            position += len(output.token_ids)
            finish_reason = output.finish_reason
            if _ended_early(record) and position >= len(recorded):
                return ""
    return compare_ends(record, position, finish_reason)


def compare_ids(
    recorded: Sequence[int], regenerated: Sequence[int], position: int, record: AuditRecord
) -> str:
    """Return the first difference from `position` on, or ""."""
    for index, token_id in enumerate(regenerated, position):
        if index >= len(recorded):
            if _ended_early(record):
                return ""
            return f"position {index}: recorded the end, regenerated {token_id}"
        if recorded[index] != token_id:
            return f"position {index}: recorded {recorded[index]}, regenerated {token_id}"
    return ""


def compare_ends(record: AuditRecord, position: int, finish_reason: FinishReason | None) -> str:
    """Return the difference between the ends of outputs that are equal up to `position`, or ""."""
    recorded = record.output_token_ids
    if position < len(recorded):
        return f"position {position}: recorded {recorded[position]}, regenerated the end"
    if finish_reason is not record.finish_reason and not _ended_early(record):
        return f"finish reason: recorded {_name(record.finish_reason)}, {_name(finish_reason)} now"
    return ""


def _name(reason: FinishReason | None) -> str:
    return "none" if reason is None else reason.value
