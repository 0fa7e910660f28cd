"""A runner without torch or weights, for tests, for trials, and to measure everything but the
model.

A token is a hash of the weights' name, the prompt, all output so far, every sampling parameter, the
seed and the position. So code that loses or mixes up one of them gets other tokens. Constraints,
spent thinking budgets, allowed ids, bad words and min_tokens are honoured; a penalty or a bias only
changes the hash. Log-probabilities come from the same hash. An embedding is a hash of the weights'
name, the prompt and the pooling.

With a `FakeKv`, all of these change once a sequence reads a wrong KV block. A sequence ends early
at `eos_rate`. A step takes `step_s` seconds from its launch or from the end of the previous step,
whichever is later.
"""

from __future__ import annotations

import hashlib
import os
import struct
import time
from bisect import bisect_left
from collections import abc, deque
from collections.abc import Callable
from dataclasses import astuple, dataclass
from itertools import chain, islice
from pathlib import Path

import numpy as np

from penstock_common.clock import Clock
from penstock_proto.engine_request import EngineRequest
from penstock_proto.types import Logprobs, Pooling
from penstock_shard.checkpoint.adapter_files import read_adapter_files
from penstock_shard.ipc.runner_info import RunnerInfo
from penstock_shard.sequence import Sequence
from penstock_shard.structured_output.matcher_state import ConstraintState, MaskFiller, allowed_ids
from penstock_shard.worker.base import (
    AdapterStore,
    Batch,
    ImageEncoder,
    ReadAdapter,
    RowResult,
)
from penstock_shard.worker.capabilities import CAPABILITIES
from penstock_shard.worker.fake_images import FakeImages
from penstock_shard.worker.fake_kv import FakeKv
from penstock_shard.worker.token_state import BadWords, Thinking

FAKE_CAPABILITIES = CAPABILITIES | {"embed"}
EMBEDDING_SIZE = 64


USUAL_WEIGHTS = "fake"

# The number of sampling parameters that all tokens depend on, set or not.
_NUM_FIRST = 12
# The output position, counted from 0, at which `crash_on` ends the process.
_CRASH_POSITION = 9


@dataclass(slots=True)
class _Slot:
    """The sequence in a slot. `digest` is the chained hash of its first `num_hashed` tokens."""

    request: EngineRequest
    token_ids: list[int]
    digest: bytes
    bad_words: BadWords
    constraint: ConstraintState | None
    thinking: Thinking | None
    num_hashed: int = 0
    # Added to all hashes once the sequence has read a wrong KV block.
    misread: bytes = b""

    @property
    def num_prompt_tokens(self) -> int:
        return self.request.num_prompt_tokens


def _exit() -> None:
    os._exit(70)


class FakeAdapters:
    """An `AdapterStore` that checks adapter files as far as it can without a model, and keeps
    nothing.
    """

    def __init__(self, find: Callable[[str], Path]) -> None:
        """`find` returns the directory of an adapter's source."""
        self._find = find

    def read(self, source: str) -> ReadAdapter:
        files = read_adapter_files(self._find(source))
        return ReadAdapter(files.content_hash, files.rank)

    def discard(self, adapter: ReadAdapter) -> None:
        """Do nothing."""

    def place(self, index: int, adapter: ReadAdapter) -> None:
        """Do nothing."""

    def drop(self, index: int) -> None:
        """Do nothing."""


class FakeRunner:
    """A `Runner`. It generates `ordinary_ids`, and eos ids at `eos_rate`.

    If a prompt has the id `crash_on`, its tenth output token or its embedding ends the process.
    """

    def __init__(
        self,
        info: RunnerInfo,
        ordinary_ids: abc.Sequence[int],
        *,
        step_s: float,
        eos_rate: float = 0.0,
        crash_on: int | None = None,
        adapters: AdapterStore | None = None,
        kv: FakeKv | None = None,
        clock: Clock = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
        crash: Callable[[], object] = _exit,
    ) -> None:
        self._info = info
        self._adapters = adapters
        self._images = FakeImages()
        self._kv = kv
        self._ordinary_ids = ordinary_ids
        self._special_ids = sorted({*range(info.vocab_size)} - {*ordinary_ids})
        self._step_s = step_s
        self._eos_rate = eos_rate
        self._crash_on = crash_on
        self._clock, self._sleep, self._crash = clock, sleep, crash
        # The default name adds no salt, which keeps tokens as they were before salts existed.
        named = hashlib.blake2b(info.weights_hash.encode(), digest_size=16).digest()
        self._salt = b"" if info.weights_hash == USUAL_WEIGHTS else named
        self._sequences: dict[int, _Slot] = {}
        self._masks = MaskFiller(info.vocab_size)
        self._launched: deque[tuple[Batch, float]] = deque()
        self._free_at_s = 0.0

    @property
    def info(self) -> RunnerInfo:
        return self._info

    @property
    def adapters(self) -> AdapterStore | None:
        return self._adapters

    @property
    def images(self) -> ImageEncoder | None:
        return self._images

    @property
    def done_at_s(self) -> float:
        """The clock's time at which the oldest launched step is over."""
        return self._launched[0][1]

    def launch(self, batch: Batch) -> None:
        for sequence in batch.admitted:
            self._sequences[sequence.slot] = self._begin(sequence)
            if self._kv is not None:
                self._kv.admit(sequence)
        if self._kv is not None:
            self._kv.add_blocks(batch)
        self._free_at_s = max(self._free_at_s, self._clock()) + self._step_s
        self._launched.append((batch, self._free_at_s))

    def collect(self) -> list[RowResult]:
        batch, done_at_s = self._launched.popleft()
        if self._kv is not None:
            self._read_kv(self._kv, batch)
        results = [self._run(batch, row) for row in range(batch.num_rows)]
        self._sleep(max(0.0, done_at_s - self._clock()))
        return results

    def release(self, slot: int) -> None:
        self._sequences.pop(slot, None)

    def copy_states(self, copies: abc.Sequence[tuple[int, int]]) -> None:
        if self._kv is not None:
            self._kv.copy_states(copies)

    def read_block(self, group: int, block_id: int, into: memoryview) -> None:
        assert self._kv is not None
        self._kv.read_block(group, block_id, into)

    def write_block(self, group: int, block_id: int, data: memoryview) -> None:
        assert self._kv is not None
        self._kv.write_block(group, block_id, data)

    def _read_kv(self, kv: FakeKv, batch: Batch) -> None:
        kv.run(batch, lambda slot: self._sequences[slot].token_ids)
        for slot in batch.slots:
            if kv.misread[slot]:
                self._sequences[slot].misread = b"misread"

    # ---- tokens from hashes ----

    def _begin(self, sequence: Sequence) -> _Slot:
        request = sequence.request
        digest = hashlib.blake2b(_parameters(request), digest_size=32, salt=self._salt).digest()
        budget = request.thinking_budget
        return _Slot(
            request,
            list(sequence.token_ids),
            digest,
            BadWords(request.sampling.bad_words),
            sequence.constraint,
            None if budget is None else Thinking(budget),
        )

    def _run(self, batch: Batch, row: int) -> RowResult:
        sequence, start = self._sequences[batch.slots[row]], batch.starts[row]
        result = RowResult()
        if batch.scored[row]:
            end = start + batch.scored[row]
            result.prompt_logprobs = self._prompt_logprobs(sequence, start, end)
        if batch.samples[row] and sequence.request.pooling is not None:
            self._crash_if_told(sequence)
            result.embedding = self._embedding(sequence, sequence.request.pooling)
        elif batch.samples[row]:
            self._sample(sequence, result)
            self._sample_after(sequence, batch.drafts[row], result)
        return result

    def _sample_after(self, sequence: _Slot, drafts: abc.Sequence[int], result: RowResult) -> None:
        """Sample a token after each draft, as long as the sampled tokens equal the drafts."""
        more, token_id = list[int](), result.token_id
        for drafted in drafts:
            if token_id != drafted or sequence.request.ends_with(drafted):
                break
            following = RowResult()
            self._sample(sequence, following)
            token_id = following.token_id
            if token_id is None:
                break
            more.append(token_id)
            if result.logprobs is not None and following.logprobs is not None:
                result.logprobs.extend(following.logprobs)
        result.more_token_ids = more

    def _sample(self, sequence: _Slot, result: RowResult) -> None:
        request, position = sequence.request, len(sequence.token_ids) - sequence.num_prompt_tokens
        if position == _CRASH_POSITION:
            self._crash_if_told(sequence)
        draw = self._draw(sequence, position)
        token_id = self._token(sequence, draw, position)
        if token_id is None:
            why = "" if sequence.constraint is None else sequence.constraint.error
            why = why or "the sampling parameters leave no token to draw"
            result.error = f"{why} at position {position}"
            result.is_callers = True
            return
        result.token_id = token_id
        sequence.token_ids.append(token_id)
        if request.logprobs is not None:
            result.logprobs = Logprobs(top_n=request.logprobs)
            self._add_logprobs(result.logprobs, draw, token_id, request.logprobs)
            requested = self._logprobs_of(draw, token_id, request.logprob_token_ids)
            result.logprobs.requested += requested

    def _crash_if_told(self, sequence: _Slot) -> None:
        if self._crash_on in sequence.token_ids[: sequence.num_prompt_tokens]:
            self._crash()

    def _draw(self, sequence: _Slot, position: int) -> bytes:
        """Hash everything that a token may depend on."""
        # Hash token by token, so that only the ids matter, not which of them are output.
        start = sequence.num_hashed
        for index, token_id in enumerate(sequence.token_ids[start:], start):
            if sequence.thinking is not None and index >= sequence.num_prompt_tokens:
                sequence.thinking.append(token_id)
            packed = sequence.digest + struct.pack("<I", token_id)
            sequence.digest = hashlib.blake2b(packed, digest_size=32).digest()
        sequence.num_hashed = len(sequence.token_ids)
        place = struct.pack("<QI", sequence.request.sampling.seed, position)
        hashed = sequence.digest + place + sequence.misread
        return hashlib.blake2b(hashed, digest_size=32).digest()

    def _token(self, sequence: _Slot, draw: bytes, position: int) -> int | None:
        forced = None if sequence.thinking is None else sequence.thinking.forced_id
        banned = _banned(sequence, position)
        if sequence.constraint is not None:
            only = sequence.request.sampling.allowed_token_ids if forced is None else (forced,)
            return self._constrained(sequence, sequence.constraint, draw, banned, only)
        if forced is not None:
            return None if forced in banned else forced
        ids = sequence.request.sampling.allowed_token_ids or self._ordinary_ids
        ends = int.from_bytes(draw[8:16], "little") / 2**64 < self._eos_rate
        if ends and self._info.eos_token_ids and not sequence.request.sampling.allowed_token_ids:
            eos_id = self._info.eos_token_ids[0]
            if eos_id not in banned:
                return eos_id
        first = int.from_bytes(draw[:8], "little") % len(ids)
        candidates = (ids[(first + i) % len(ids)] for i in range(len(ids)))
        return next((token_id for token_id in candidates if token_id not in banned), None)

    def _constrained(
        self,
        sequence: _Slot,
        constraint: ConstraintState,
        draw: bytes,
        banned: set[int],
        only: abc.Sequence[int],
    ) -> int | None:
        """Return an allowed token, from `only` if that is not empty. It is a stop id at `eos_rate`,
        or if no other token is allowed.
        """
        constraint.move_to(sequence.token_ids[sequence.num_prompt_tokens :])
        self._masks.fill([constraint])
        if constraint.mask is None:
            return None
        # Use arrays, because a mask may allow 100,000 ids.
        ids = allowed_ids(constraint.mask)
        if only:
            ids = ids[np.isin(ids, only)]
        if banned:
            ids = ids[~np.isin(ids, list(banned))]
        ends = int.from_bytes(draw[8:16], "little") / 2**64 < self._eos_rate
        is_stop = np.isin(ids, list(sequence.request.stop_token_ids))
        stops, others = ids[is_stop], ids[~is_stop]
        ids = stops if len(stops) and (ends or not len(others)) else others
        return int(ids[int.from_bytes(draw[:8], "little") % len(ids)]) if len(ids) else None

    def _embedding(self, sequence: _Slot, pooling: Pooling) -> bytes:
        """Return float32 values from -1 to 1."""
        packed = np.array(sequence.token_ids, dtype="<u4").tobytes()
        seed = self._salt + pooling.value.encode() + packed + sequence.misread
        digest = hashlib.shake_256(seed).digest(4 * EMBEDDING_SIZE)
        values = np.frombuffer(digest, dtype="<i4") / 2.0**31
        return values.astype("<f4").tobytes()

    def _prompt_logprobs(self, sequence: _Slot, start: int, end: int) -> Logprobs:
        top_n = sequence.request.prompt_logprobs or 0
        columns = Logprobs(top_n=top_n)
        for index in range(start + 1, end + 1):
            token_id = sequence.token_ids[index]
            before = sequence.token_ids[max(0, index - 8) : index + 1]
            packed = struct.pack(f"<{len(before)}I", *before) + sequence.misread
            draw = hashlib.blake2b(packed).digest()
            self._add_logprobs(columns, draw, token_id, top_n)
        return columns

    def _add_logprobs(self, columns: Logprobs, draw: bytes, token_id: int, top_n: int) -> None:
        """Add the log-probabilities. The chosen token is the most likely; the others follow in
        steps of 0.25: first the ordinary ids, starting at `_second(draw)`, then all other ids.
        """
        chosen = _chosen_logprob(draw)
        columns.chosen.append(chosen)
        columns.ranks.append(1)
        base, count = _second(draw), len(self._ordinary_ids)
        ordinary = (self._ordinary_ids[(base + i) % count] for i in range(count))
        others = (i for i in chain(ordinary, self._special_ids) if i != token_id)
        ids = [token_id, *islice(others, max(0, top_n - 1))][:top_n]
        columns.add_best(ids, self._logprobs_of(draw, token_id, ids))

    def _logprobs_of(self, draw: bytes, token_id: int, ids: abc.Iterable[int]) -> list[float]:
        chosen, chosen_place = _chosen_logprob(draw), self._place(draw, token_id)
        logprobs = list[float]()
        for other_id in ids:
            place = self._place(draw, other_id)
            rank = 0 if other_id == token_id else place + (place < chosen_place)
            logprobs.append(chosen - 0.25 * rank)
        return logprobs

    def _place(self, draw: bytes, token_id: int) -> int:
        """Return an id's place in the order of likely tokens."""
        count = len(self._ordinary_ids)
        index = bisect_left(self._ordinary_ids, token_id)
        if index < count and self._ordinary_ids[index] == token_id:
            return (index - _second(draw)) % count
        return count + token_id


def _parameters(request: EngineRequest) -> bytes:
    """Gather what tokens depend on besides the prompt and the output."""
    sampling = astuple(request.sampling)
    parameters = [sampling[:_NUM_FIRST], request.min_tokens]
    images = tuple((image.digest, image.offset) for image in request.images)
    others = (request.constraint, request.thinking_budget, request.adapter_hash, images)
    # Unset fields are left out, which keeps tokens as they were before these fields existed.
    parameters += [part for part in (*others, *sampling[_NUM_FIRST:]) if part]
    return repr(tuple(parameters)).encode()


def _banned(sequence: _Slot, position: int) -> set[int]:
    tail_start = len(sequence.token_ids) - min(position, sequence.bad_words.num_tail_tokens)
    banned = set(sequence.bad_words.completing(sequence.token_ids[tail_start:]))
    # With a constraint, the constraint decides when stop ids may be drawn.
    if position < sequence.request.min_tokens and sequence.constraint is None:
        return banned | sequence.request.stop_token_ids
    return banned


def _chosen_logprob(draw: bytes) -> float:
    return -(draw[16] + 1) / 64.0


def _second(draw: bytes) -> int:
    """Return the place of the second most likely token in the ordinary ids."""
    return int.from_bytes(draw[17:21], "little")
