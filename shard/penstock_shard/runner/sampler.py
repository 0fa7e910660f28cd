"""Logits -> tokens and log-probabilities. Knows nothing of models, caches or scheduling.

A token is a function of (its row of logits, its sequence's parameters, seed, prompt and output so
far, its position) and of nothing else; other rows only decide which work can be skipped.

Parameters apply in this order:

1. repetition_penalty, on tokens of the prompt and the output: positive logits are divided by it,
   others multiplied (Keskar et al., "CTRL", 2019)
2. presence_penalty and frequency_penalty, on tokens of the output: the first is subtracted once,
   the second as often as the token occurs
3. logit_bias is added
4. bans (-inf): all but allowed_token_ids; the last id of a bad word whose other ids end the output;
   stop ids before min_tokens; what the constraint does not allow; at the end of a thinking budget
   all but its end token
5. temperature, top-k, top-p (over what top-k left), min-p (relative to the most likely token),
   typical-p (over what the others left): see `draw`

Greedy rows skip 5 and take the largest logit, the lowest id among equals. Log-probabilities are
those of the raw logits, before all of these.

Sampling has two halves, so that the device never waits for the host: `enqueue` launches all device
work and reads none of its results; `finish`, once the device is done, makes results from what was
copied back. Where sampling depends on earlier tokens on the host (penalties, bad words,
constraints, thinking budgets, min_tokens), the previous token must be finished first. `enqueue`
does wait for the device for typical-p in vocabularies larger than the first window of `draw` (and,
without Triton, for top-p without top-k).

On one thread of a server cpu, 16 greedy rows of 32k logits take 0.1 ms, 64 rows with penalties and
every filter 11 ms (135 by sorting), 8 rows of 150k with top-p 10 to 20 ms (110 by sorting).
"""

from __future__ import annotations

from collections import abc
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from penstock_shard.constraints.state import MaskFiller
from penstock_shard.runner.adjust import adjust
from penstock_shard.runner.base import Logprobs, RowResult
from penstock_shard.runner.device import is_host, mark, to_device, to_host
from penstock_shard.runner.draw import Columns, draw, ordered_topk
from penstock_shard.runner.philox import uniforms
from penstock_shard.runner.request_numbers import Integers, RequestNumbers, grown
from penstock_shard.runner.token_state import TokenState, needs_state
from penstock_shard.sequence import Sequence

# Increment when the same logits give other tokens than before.
SAMPLER_REVISION = 1

# Codes in place of a token: the model's logits are not finite, or the sequence leaves no token to
# draw.
_NO_LOGITS = -1
_NO_TOKEN = -2
# A sequence's uniform numbers are computed for this many positions at once.
_POSITIONS = 16
_Index = NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class SampleRow:
    """What a row of logits is for: the token at `position` of the sequence's output, counted from
    its first token; tokens delivered before this attempt count too.
    """

    sequence: Sequence
    position: int


@dataclass(frozen=True, slots=True)
class SampleRows:
    """Many `SampleRow`s as columns; `numbers` are the sequence numbers of `RequestNumbers`."""

    sequences: abc.Sequence[Sequence]
    positions: Integers
    numbers: Integers


class Sampler:
    """Draws tokens, and keeps the state of sequences that drawing depends on.

    Rows are enqueued in the order of the steps, and finished in that order. The sampler adds each
    token it draws to its state, so `Sequence.token_ids` may lag behind; those are read only where a
    position does not follow the last one. `prepare` may be called first, with the same rows:
    constraint masks are then filled while the forward pass runs.
    """

    def __init__(
        self, masks: MaskFiller | None = None, numbers: RequestNumbers | None = None
    ) -> None:
        """Without `masks` no sequence may have a constraint."""
        self._states: dict[Sequence, TokenState] = {}
        self._masks = masks
        self._numbers = numbers or RequestNumbers()
        self._known = _Known(self._numbers)
        self._prepared: _Prepared | None = None

    def needs_tokens(self, rows: SampleRows) -> bool:
        """Whether all rows enqueued earlier must be finished before these are prepared."""
        self._known.update(rows)
        return bool(self._known.stateful[rows.numbers].any())

    def prepare(self, rows: SampleRows) -> None:
        """Begin what needs no logits for these rows, which must be enqueued next."""
        self._known.update(rows)
        stateful = np.flatnonzero(self._known.stateful[rows.numbers])
        states = [self._state(rows.sequences[i], int(rows.positions[i])) for i in stateful.tolist()]
        constraints = [state.constraint for state in states if state.constraint]
        finish_masks = None
        if constraints:
            assert self._masks is not None
            finish_masks = self._masks.start(constraints)
        self._prepared = _Prepared(stateful, states, finish_masks)

    def enqueue(self, logits: Tensor, rows: SampleRows) -> Enqueued:
        """Launch the sampling of logits [N, V] of any float type, which are not changed; gives N
        tokens.
        """
        if self._prepared is None:
            self.prepare(rows)
        prepared = self._prepared
        assert prepared is not None
        if is_host(logits):
            logits = logits.float()
        best, tokens = _largest(logits)
        codes = torch.where(torch.isfinite(best), tokens, _NO_LOGITS)
        adjusted = self._adjust(logits, prepared)
        # Only now that the masks are filled: on an earlier error `abandon` must wait for them.
        self._prepared = None
        if adjusted is not None:
            own_best, own_tokens = _largest(adjusted.logits)
            places = to_device(adjusted.rows, logits.device)
            own_codes = torch.where(torch.isfinite(own_best), own_tokens, _NO_TOKEN)
            own_codes = torch.where(codes[places] == _NO_LOGITS, _NO_LOGITS, own_codes)
            codes.index_copy_(0, places, own_codes)
            tokens.index_copy_(0, places, own_tokens)
            adjusted.best = own_best
        self._draw(logits, best, adjusted, rows, tokens, codes)
        scored = self._score(logits, tokens, rows)
        return Enqueued(tokens, to_host(codes), rows, prepared, _problems(prepared), scored)

    def abandon(self) -> None:
        """Drop what was prepared, which will not be enqueued."""
        prepared, self._prepared = self._prepared, None
        if prepared is not None and prepared.finish_masks is not None:
            prepared.finish_masks()

    def columns(self, rows: abc.Sequence[SampleRow]) -> SampleRows:
        """The rows as columns; a sequence may occur several times if it has no `TokenState`."""
        sequences = [row.sequence for row in rows]
        positions = np.array([row.position for row in rows], dtype=np.int64)
        return SampleRows(sequences, positions, self._numbers.of(sequences))

    def sample(self, logits: Tensor, rows: abc.Sequence[SampleRow]) -> list[RowResult]:
        """Both halves at once: logits [N, V] -> one result a row.

        A row with NaN logits, or with no token left to draw, gets an error; other rows do not.
        """
        if not rows:
            return []
        enqueued = self.enqueue(logits, self.columns(rows))
        mark(logits.device)()
        return enqueued.finish()

    def forget(self, sequence: Sequence) -> None:
        """Drop the state of a sequence that ended. Its number is freed by `RequestNumbers`."""
        self._states.pop(sequence, None)

    def _state(self, sequence: Sequence, position: int) -> TokenState:
        state = self._states.get(sequence)
        if state is None:
            state = self._states[sequence] = TokenState(sequence)
        state.move_to(position)
        return state

    def _adjust(self, logits: Tensor, prepared: _Prepared) -> _Adjusted | None:
        """Copy and change the logits of rows with penalties, biases, bans or masks (1 to 4)."""
        if prepared.finish_masks is not None:
            prepared.finish_masks()
        changed = [
            (i, state)
            for i, state in zip(prepared.rows.tolist(), prepared.states, strict=True)
            if state.changes_logits
        ]
        if not changed:
            return None
        rows = np.array([i for i, _ in changed], dtype=np.int64)
        own = logits.index_select(0, to_device(rows, logits.device)).float()
        adjust(own, [state for _, state in changed])
        return _Adjusted(rows, own, own[:, 0])

    def _draw(
        self,
        logits: Tensor,
        best: Tensor,
        adjusted: _Adjusted | None,
        rows: SampleRows,
        tokens: Tensor,
        codes: Tensor,
    ) -> None:
        """Overwrite `tokens` and `codes` of rows that are not greedy with drawn tokens."""
        is_random = self._known.temperature[rows.numbers] != 0.0
        if not is_random.any():
            return
        chosen = np.flatnonzero(is_random)
        parts = [(logits, best, chosen, chosen)]
        if adjusted is not None:
            is_own = np.isin(chosen, adjusted.rows)
            own = chosen[is_own]
            places = np.searchsorted(adjusted.rows, own)
            parts = [
                (logits, best, chosen[~is_own], chosen[~is_own]),
                (adjusted.logits, adjusted.best, places, own),
            ]
        for source, source_best, index, targets in parts:
            if not len(targets):
                continue
            drawn = draw(source, source_best, index, self._known.columns(rows, targets))
            if len(targets) == len(tokens):
                tokens.copy_(drawn)
                codes.copy_(torch.where(codes < 0, codes, drawn))
                continue
            places_there = to_device(targets, tokens.device)
            before = codes.index_select(0, places_there)
            tokens.index_copy_(0, places_there, drawn)
            codes.index_copy_(0, places_there, torch.where(before < 0, before, drawn))

    def _score(self, logits: Tensor, tokens: Tensor, rows: SampleRows) -> _Scored | None:
        wanted = np.flatnonzero(self._known.scored[rows.numbers])
        if not len(wanted):
            return None
        sequences = [rows.sequences[i] for i in wanted.tolist()]
        if len(wanted) < len(tokens):
            places = to_device(wanted, logits.device)
            logits, tokens = logits.index_select(0, places), tokens.index_select(0, places)
        scores = score_tokens(
            logits,
            tokens,
            [sequence.request.logprobs or 0 for sequence in sequences],
            [sequence.request.logprob_token_ids for sequence in sequences],
        )
        return _Scored(wanted, scores)


@dataclass(frozen=True, slots=True)
class _Prepared:
    """The rows sampled next that have a state, and what waits for their masks to be filled."""

    rows: _Index
    states: abc.Sequence[TokenState]
    finish_masks: Callable[[], None] | None


@dataclass(slots=True)
class _Adjusted:
    """Rows whose logits were changed: their copies, float32 [n, V], and the largest of each row."""

    rows: Integers
    logits: Tensor
    best: Tensor


@dataclass(frozen=True, slots=True)
class _Scored:
    rows: _Index
    scores: TokenScores


@dataclass(frozen=True, slots=True)
class Enqueued:
    """Rows that are being sampled. `tokens` int64 [N] are on the device; a row with an error has an
    arbitrary one.
    """

    tokens: Tensor
    _codes: Tensor
    _rows: SampleRows
    _prepared: _Prepared
    # By row: why its constraint leaves no token to draw.
    _problems: dict[int, str]
    _scored: _Scored | None

    def finish(self) -> list[RowResult]:
        """One result a row. Call once, after the device has finished the copies to the host."""
        codes: list[int] = self._codes.tolist()
        for i, state in zip(self._prepared.rows.tolist(), self._prepared.states, strict=True):
            if codes[i] < 0:
                state.skip()
            else:
                state.append(codes[i])
        results = list(map(RowResult, codes))
        if min(codes) < 0:
            for i, code in enumerate(codes):
                if code < 0:
                    results[i] = self._failure(i, code)
        if self._scored is not None:
            found = self._scored.scores.finish()
            for i, logprobs in zip(self._scored.rows.tolist(), found, strict=True):
                if results[i].error is None:
                    results[i].logprobs = logprobs
        return results

    def _failure(self, index: int, code: int) -> RowResult:
        what = "the model gave no finite logits"
        if code == _NO_TOKEN:
            what = self._problems.get(index, "the sampling parameters leave no token to draw")
        position = self._rows.positions[index]
        return RowResult(
            error=f"{what} at output position {position}", is_callers=code == _NO_TOKEN
        )


def _problems(prepared: _Prepared) -> dict[int, str]:
    constrained = [
        (i, state.constraint)
        for i, state in zip(prepared.rows.tolist(), prepared.states, strict=True)
        if state.constraint is not None
    ]
    return {i: constraint.error for i, constraint in constrained if constraint.error}


class _Known:
    """Sampling parameters of sequences, in arrays indexed by sequence number."""

    def __init__(self, numbers: RequestNumbers) -> None:
        self._numbers = numbers
        self._serials: Integers = np.zeros(0, dtype=np.int64)
        # The columns of `draw.Columns` except `uniform`, which is computed here from `_seeds`.
        self._parameters = np.zeros((0, len(Columns._fields) - 1))
        self._seeds = np.zeros(0, dtype=np.uint64)
        # Whether the sequence has a `TokenState`; whether it wants log-probabilities.
        self.stateful = np.zeros(0, dtype=np.bool_)
        self.scored = np.zeros(0, dtype=np.bool_)
        # Uniform numbers for one run of `_POSITIONS` positions, and which run: 1 is the first, 0
        # none.
        self._uniforms = np.zeros((0, _POSITIONS))
        self._runs: Integers = np.zeros(0, dtype=np.int64)

    @property
    def temperature(self) -> NDArray[np.float64]:
        return self._parameters[:, 0]

    def update(self, rows: SampleRows) -> None:
        """Read the parameters of sequences that are new."""
        if len(self._serials) < self._numbers.capacity:
            self._grow(self._numbers.capacity)
        new = self._serials[rows.numbers] != self._numbers.serials[rows.numbers]
        for i in np.flatnonzero(new).tolist():
            self._read(rows.sequences[i], int(rows.numbers[i]))

    def columns(self, rows: SampleRows, chosen: _Index) -> Columns:
        """The parameters and uniform numbers of the rows `chosen`."""
        numbers, positions = rows.numbers[chosen], rows.positions[chosen]
        temperature, top_k, top_p, min_p, typical_p = self._parameters[numbers].T
        uniform = self._uniform(numbers, positions)
        return Columns(temperature, top_k, top_p, min_p, typical_p, uniform)

    def _uniform(self, numbers: Integers, positions: Integers) -> NDArray[np.float64]:
        runs = positions // _POSITIONS
        missing = np.flatnonzero(self._runs[numbers] != runs + 1)
        if len(missing):
            new = numbers[missing]
            wanted = runs[missing, None] * _POSITIONS + np.arange(_POSITIONS)
            seeds = np.repeat(self._seeds[new], _POSITIONS)
            made = uniforms(seeds, wanted.ravel())
            self._uniforms[new] = made.reshape(-1, _POSITIONS)
            self._runs[new] = runs[missing] + 1
        found = self._uniforms[numbers, positions % _POSITIONS]
        # A sequence may occur twice, at positions in two runs.
        for i in np.flatnonzero(self._runs[numbers] != runs + 1).tolist():
            found[i] = uniforms([int(self._seeds[numbers[i]])], [int(positions[i])])[0]
        return found

    def _read(self, sequence: Sequence, number: int) -> None:
        sampling = sequence.request.sampling
        self._serials[number] = self._numbers.serials[number]
        self._parameters[number] = (
            sampling.temperature,
            sampling.top_k,
            sampling.top_p,
            sampling.min_p,
            sampling.typical_p,
        )
        self._seeds[number] = sampling.seed
        self.stateful[number] = needs_state(sequence)
        self.scored[number] = sequence.request.logprobs is not None
        self._runs[number] = 0

    def _grow(self, capacity: int) -> None:
        self._serials = grown(self._serials, capacity)
        self._parameters = grown(self._parameters, capacity)
        self._seeds = grown(self._seeds, capacity)
        self.stateful = grown(self.stateful, capacity)
        self.scored = grown(self.scored, capacity)
        self._uniforms = grown(self._uniforms, capacity)
        self._runs = grown(self._runs, capacity)


def _largest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The largest of each row of logits [N, V], NaN if it has any; and the lowest id with it."""
    if not is_host(logits):
        best, tokens = logits.max(dim=1)
        return best, tokens
    # numpy's argmax uses vector instructions: a seventh of torch's time.
    tokens = torch.from_numpy(logits.numpy().argmax(axis=1))
    return logits.gather(1, tokens.unsqueeze(1)).squeeze(1), tokens


@dataclass(frozen=True, slots=True)
class TokenScores:
    """Log-probabilities on their way to the host: those of the chosen tokens [n] and their ranks
    [n], the best [n, k] and their ids, and those of requested ids, row after row.
    """

    _chosen: Tensor
    _ranks: Tensor
    _top: Tensor
    _top_ids: Tensor
    _requested: Tensor
    _counts: abc.Sequence[int]
    _asked: abc.Sequence[abc.Sequence[int]]
    _vocabulary: int

    def finish(self) -> list[Logprobs]:
        """The log-probabilities of each row, once the device has copied them to the host."""
        chosen, ranks, requested = (
            self._chosen.tolist(),
            self._ranks.tolist(),
            self._requested.tolist(),
        )
        top, ids = self._top.numpy(), self._top_ids.numpy()
        columns = [
            Logprobs(
                chosen=[chosen[i]],
                ranks=[ranks[i]],
                top_n=min(count, self._vocabulary),
                top_token_ids=ids[i, :count].tolist(),
                top_logprobs=top[i, :count].tolist(),
            )
            for i, count in enumerate(self._counts)
        ]
        start = 0
        for asked, logprobs in zip(self._asked, columns, strict=False):
            logprobs.requested = requested[start : start + len(asked)]
            start += len(asked)
        return columns


def score_tokens(
    logits: Tensor,
    tokens: Tensor,
    counts: abc.Sequence[int],
    asked: abc.Sequence[abc.Sequence[int]] = (),
) -> TokenScores:
    """From raw logits [n, V]: the log-probability and rank of tokens [n] (rank 1 is the most
    likely; equals share a rank), the `counts[i]` best of row i, and those of the ids `asked[i]`.

    Ranks and order are taken from the logits: as log-probabilities, two may round to the same.
    """
    logits = logits.float()
    vocabulary = logits.shape[1]
    scores = torch.log_softmax(_with_aligned_rows(logits), dim=1)
    place = tokens.unsqueeze(1)
    ranks = (logits > logits.gather(1, place)).sum(dim=1, dtype=torch.int32) + 1
    top_ids = torch.empty((len(counts), 0), dtype=torch.int64, device=logits.device)
    if most := min(max(counts), vocabulary):
        # A difference of 0 only for what equals the largest logit.
        top_ids = ordered_topk(logits - logits.amax(dim=1, keepdim=True), most)
    width = scores.shape[1]
    wanted = [row * width + token for row, ids in enumerate(asked) for token in ids]
    requested = scores.view(-1)[to_device(np.array(wanted, dtype=np.int64), logits.device)]
    return TokenScores(
        to_host(scores.gather(1, place).squeeze(1)),
        to_host(ranks),
        to_host(scores.gather(1, top_ids)),
        to_host(top_ids),
        to_host(requested),
        counts,
        asked,
        vocabulary,
    )


def _with_aligned_rows(logits: Tensor) -> Tensor:
    """float32 [n, V], padded with -inf columns so that each row begins at a multiple of 16 bytes:
    torch on CUDA sums a row in an order that depends on its alignment, which shows in the last bit.
    """
    spare = -logits.shape[1] % 4
    if is_host(logits) or not spare:
        return logits
    return functional.pad(logits, (0, spare), value=float("-inf"))
