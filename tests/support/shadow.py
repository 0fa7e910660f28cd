"""A runner that keeps the KV memory a model would have, and checks every read of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from penstock_proto.engine_request import EngineRequest
from penstock_shard.worker.base import Batch, RowResult, Runner, StepOutOfMemory

# What a place holds: the token there and, as a number, all tokens before it; and for which group.
_Content = tuple[int, int, int] | None


@dataclass
class _Held:
    """The sequence in a slot, by what was told of it and what came of its rows."""

    request: EngineRequest
    token_ids: list[int]
    # For each cache group.
    block_ids: list[list[int]] = field(default_factory=list)


@dataclass
class ShadowStep:
    """A launched step: whose rows it has, and for each row and cache group its blocks when it was
    launched.
    """

    batch: Batch
    sequences: list[_Held]
    tables: list[list[list[int]]]

    @property
    def names(self) -> list[str]:
        return [sequence.request.request_id for sequence in self.sequences]

    @property
    def num_tokens(self) -> int:
        return self.batch.num_tokens


# Whether memory does not hold a step, told as it is collected.
Fails = Callable[[ShadowStep], bool]


class ShadowRunner:
    """Around another runner. A row writes its tokens into its blocks, then must find there all
    tokens that it sees; and where layers have states, it must find the sum of all tokens before it.
    So whoever shares, frees or reuses a block wrongly is caught, and whoever gives a slot to
    another while a launched step has a row of it, or has a row of none. Drafts are written like all
    else, and are wrong or right.

    Where `fails` says so, memory does not hold a step: it and all that were launched write what
    nobody may read.
    """

    # What copied bytes of a group stand for, whichever engine copied them.
    _copied: ClassVar[dict[tuple[bytes, int], list[Any]]] = {}

    def __init__(self, runner: Runner, fails: Fails = lambda step: False) -> None:
        self.info = runner.info
        self.adapters = runner.adapters
        self.images = runner.images
        self._runner = runner
        self._fails = fails
        self._num_void = 0
        self.num_failed = 0
        # For each pool.
        self._memory: list[list[_Content]] = [
            [None] * (num_blocks * self.info.block_size) for num_blocks in self.info.pools
        ]
        # By pool and block: all tokens that a state sums up, as a number.
        self._states: dict[tuple[int, int], int | None] = {}
        self._launched: deque[ShadowStep] = deque()
        # By slot.
        self.held: dict[int, _Held] = {}
        self.num_slots = 0
        self.released: list[EngineRequest] = []

    def launch(self, batch: Batch) -> None:
        for each in batch.admitted:
            assert each.slot not in self.held, f"slot {each.slot} is somebody's"
            tables: list[list[int]] = [[] for _ in self.info.cache_groups]
            self.held[each.slot] = _Held(each.request, list(each.token_ids), tables)
            self.num_slots = max(self.num_slots, each.slot + 1)
        verified = {
            slot
            for step in self._launched
            for slot, drafts in zip(step.batch.slots, step.batch.drafts, strict=True)
            if drafts
        }
        again = verified & set(batch.slots)
        assert not again, f"{len(again)} sequences whose drafts are not verified yet"
        sequences = [self.held[slot] for slot in batch.slots]
        for sequence, start, drafts in zip(sequences, batch.starts, batch.drafts, strict=True):
            assert not drafts or start + 1 == len(sequence.token_ids)
        for group, column in enumerate(batch.new_blocks):
            for sequence, new_blocks in zip(sequences, column, strict=True):
                sequence.block_ids[group] += new_blocks
        copies = [[list(table) for table in sequence.block_ids] for sequence in sequences]
        self._launched.append(ShadowStep(batch, sequences, copies))

    def collect(self) -> Sequence[RowResult]:
        step = self._launched.popleft()
        if self._num_void or self._fails(step):
            self._lose(step)
        # Only now: what is void is never computed.
        self._runner.launch(step.batch)
        self._copy_states(step.batch.state_copies)
        for row in range(step.batch.num_rows):
            self._go_on(step, row)
        for row in range(step.batch.num_rows):
            self._write(step, row)
        for row in range(step.batch.num_rows):
            self._check(step, row)
        results = self._runner.collect()
        for sequence, result in zip(step.sequences, results, strict=True):
            if result.token_id is not None:
                sequence.token_ids += [result.token_id, *result.more_token_ids]
        return results

    def release(self, slot: int) -> None:
        in_flight = {each for step in self._launched for each in step.batch.slots}
        assert slot not in in_flight, f"slot {slot} is in flight"
        self.released.append(self.held.pop(slot).request)
        self._runner.release(slot)

    def copy_states(self, copies: Sequence[tuple[int, int]]) -> None:
        assert not self._launched
        self._runner.copy_states(copies)
        self._copy_states(copies)

    def read_block(self, group: int, block_id: int, into: memoryview) -> None:
        """The bytes are those of the runner; what they stand for is kept beside them."""
        self._runner.read_block(group, block_id, into)
        self._copied[bytes(into), group] = self._content(group, block_id)

    def write_block(self, group: int, block_id: int, data: memoryview) -> None:
        self._runner.write_block(group, block_id, data)
        content, pool = self._copied[bytes(data), group], self.info.cache_groups[group].pool
        if self.info.cache_groups[group].has_state:
            self._states[pool, block_id] = content[0]
        else:
            self._memory[pool][self._places(block_id)] = content

    def _content(self, group: int, block_id: int) -> list[Any]:
        pool = self.info.cache_groups[group].pool
        if self.info.cache_groups[group].has_state:
            return [self._states.get((pool, block_id))]
        return self._memory[pool][self._places(block_id)]

    def _places(self, block_id: int) -> slice:
        size = self.info.block_size
        return slice(block_id * size, (block_id + 1) * size)

    def _lose(self, step: ShadowStep) -> None:
        if self._num_void:
            self._num_void -= 1
        else:
            self._num_void = len(self._launched)
            self.num_failed += 1
        for row, tables in enumerate(step.tables):
            start = step.batch.starts[row]
            for position in range(start, start + step.batch.counts[row]):
                for group, table in enumerate(tables):
                    if not self.info.cache_groups[group].has_state:
                        self._put(group, table, position, None)
            for group in self._state_groups:
                self._states[self.info.cache_groups[group].pool, tables[group][0]] = None
        raise StepOutOfMemory("256 MiB were asked for")

    @property
    def _state_groups(self) -> list[int]:
        return [i for i, group in enumerate(self.info.cache_groups) if group.has_state]

    def _copy_states(self, copies: Sequence[tuple[int, int]]) -> None:
        for source, target in copies:
            for pool in {self.info.cache_groups[group].pool for group in self._state_groups}:
                self._states[pool, target] = self._states.get((pool, source))

    def _go_on(self, step: ShadowStep, row: int) -> None:
        """The row's states must be of all tokens before it, and are then of its own too."""
        contents, start = _contents(step, row), step.batch.starts[row]
        for group in self._state_groups:
            place = self.info.cache_groups[group].pool, step.tables[row][group][0]
            if start and start < len(contents):
                found, expected = self._states.get(place), contents[start][1]
                assert found == expected, (
                    f"request {step.names[row]}, position {start}: state {place[1]} is of other "
                    "tokens than those before it"
                )
            end = start + step.batch.counts[row]
            last = contents[end - 1] if end <= len(contents) else None
            self._states[place] = None if last is None else hash((last[1], last[0]))

    def _memory_of(self, group: int, table: list[int], position: int) -> tuple[list[_Content], int]:
        size, pool = self.info.block_size, self.info.cache_groups[group].pool
        return self._memory[pool], table[position // size] * size + position % size

    def _put(self, group: int, table: list[int], position: int, content: _Content) -> None:
        memory, place = self._memory_of(group, table, position)
        memory[place] = content

    def _write(self, step: ShadowStep, row: int) -> None:
        contents, start = _contents(step, row), step.batch.starts[row]
        for position in range(start, start + step.batch.counts[row]):
            # Of one that ended with an error no token came.
            known = position < len(contents)
            for group, table in enumerate(step.tables[row]):
                if not self.info.cache_groups[group].has_state:
                    content = (*contents[position], group) if known else None
                    self._put(group, table, position, content)

    def _check(self, step: ShadowStep, row: int) -> None:
        contents, start = _contents(step, row), step.batch.starts[row]
        end = min(start + step.batch.counts[row], len(contents))
        for group, table in enumerate(step.tables[row]):
            if self.info.cache_groups[group].has_state:
                continue
            for position in range(self.info.cache_groups[group].first_visible(start), end):
                memory, place = self._memory_of(group, table, position)
                found, expected = memory[place], (*contents[position], group)
                assert found == expected, (
                    f"request {step.names[row]}, group {group}, position {position}: block "
                    f"{place // self.info.block_size} holds {found}, not {expected}"
                )


def _contents(step: ShadowStep, row: int) -> list[tuple[int, int]]:
    sequence, contents = step.sequences[row], []
    before = hash(sequence.request.cache_salt)
    for token_id in (*sequence.token_ids, *step.batch.drafts[row]):
        contents.append((token_id, before))
        before = hash((before, token_id))
    return contents
