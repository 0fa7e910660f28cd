"""A runner that keeps the KV memory a model would have, and checks every read of it."""

from __future__ import annotations

from collections import abc, deque
from collections.abc import Callable

from penstock_shard.runner.base import (
    RowResult,
    Runner,
    ScheduledSequence,
    StepOutOfMemory,
    StepPlan,
)
from penstock_shard.sequence import Sequence, SequenceState

_PASS_TOKENS = 7
# What a slot holds: the token there and, as a number, all tokens before it.
_Content = tuple[int, int] | None
# Whether memory does not hold a step, told as it is collected.
Fails = Callable[[StepPlan], bool]


class ShadowRunner:
    """Around another runner. A row writes its tokens into the slots of its blocks, then must find
    there all tokens before them: whoever shares, frees or reuses a block wrongly is caught. Rows
    with prompt log-probabilities are computed in passes of a few tokens, as models do. Drafts are
    written like all else, and are wrong or right.

    Where `fails` says so, memory does not hold a step: it and all that were launched write what
    nobody may read.
    """

    def __init__(self, runner: Runner, fails: Fails = lambda plan: False) -> None:
        self.info = runner.info
        self.adapters = runner.adapters
        self._runner = runner
        self._fails = fails
        self._num_void = 0
        self.num_failed = 0
        self._memory: list[_Content] = [None] * (self.info.num_blocks * self.info.block_size)
        self._launched: deque[tuple[StepPlan, list[list[int]]]] = deque()
        self.released: list[Sequence] = []

    def launch(self, plan: StepPlan) -> None:
        verified = {row.sequence for plan, _ in self._launched for row in plan.rows if row.drafts}
        again = verified & {row.sequence for row in plan.rows}
        assert not again, f"{len(again)} requests whose drafts are not verified yet"
        for row in plan.rows:
            assert not row.drafts or row.start + 1 == len(row.sequence.token_ids)
        # As they are now: later the engine may have changed them.
        tables = [list(row.sequence.block_ids) for row in plan.rows]
        self._launched.append((plan, tables))

    def collect(self) -> abc.Sequence[RowResult]:
        plan, tables = self._launched.popleft()
        if self._num_void or self._fails(plan):
            self._lose(plan, tables)
        # Only now: what is void is never computed.
        self._runner.launch(plan)
        ends = [row.start for row in plan.rows]
        while any(end < row.start + row.count for end, row in zip(ends, plan.rows, strict=True)):
            done, room = list(ends), _PASS_TOKENS
            for index, row in enumerate(plan.rows):
                scores = max(0, row.start + row.num_prompt_logprobs - done[index])
                taken = min(scores, room)
                room -= taken
                ends[index] = row.start + row.count if taken == scores else done[index] + taken
                self._write(row, tables[index], done[index], ends[index])
            for row, table, end in zip(plan.rows, tables, ends, strict=True):
                if row.sequence.state is not SequenceState.ENDED:
                    self._check(row, table, end)
        return self._runner.collect()

    def release(self, sequence: Sequence) -> None:
        assert sequence.num_steps_in_flight == 0, f"{sequence.request.request_id} is in flight"
        self.released.append(sequence)
        self._runner.release(sequence)

    def _lose(self, plan: StepPlan, tables: list[list[int]]) -> None:
        if self._num_void:
            self._num_void -= 1
        else:
            self._num_void = len(self._launched)
            self.num_failed += 1
        for row, table in zip(plan.rows, tables, strict=True):
            for position in range(row.start, row.start + row.count):
                self._memory[self._slot(table, position)] = None
        raise StepOutOfMemory("256 MiB were asked for")

    def _slot(self, table: list[int], position: int) -> int:
        size = self.info.block_size
        return table[position // size] * size + position % size

    def _write(self, row: ScheduledSequence, table: list[int], start: int, end: int) -> None:
        contents = _contents(row.sequence, row.drafts)
        for position in range(start, end):
            # Of an aborted request the last token may never have come back.
            known = position < len(contents)
            self._memory[self._slot(table, position)] = contents[position] if known else None

    def _check(self, row: ScheduledSequence, table: list[int], end: int) -> None:
        contents = _contents(row.sequence, row.drafts)
        for position in range(end if end > row.start else 0):
            found = self._memory[self._slot(table, position)]
            assert found == contents[position], (
                f"request {row.sequence.request.request_id}, position {position}: block "
                f"{table[position // self.info.block_size]} holds {found}, not {contents[position]}"
            )


def _contents(sequence: Sequence, drafts: abc.Sequence[int]) -> list[tuple[int, int]]:
    contents = []
    before = hash(sequence.request.cache_salt)
    for token_id in (*sequence.token_ids, *drafts):
        contents.append((token_id, before))
        before = hash((before, token_id))
    return contents
