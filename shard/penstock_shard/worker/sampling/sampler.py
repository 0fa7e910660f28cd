"""Logits -> tokens and log-probabilities.

A token is a function of its row of logits, its position, and its sequence's parameters, seed,
prompt and output so far. Other rows only decide which work can be skipped.

First `logits_processors/` change the logits, in the order of `order.py`. Then `draw` draws a token
by temperature, top-k, top-p (over what top-k left), min-p (relative to the most likely token) and
typical-p (over what the others left). Greedy rows take the largest logit, and among equal logits
the lowest id. Log-probabilities are computed from the raw logits.

Sampling has two halves, so that the device never waits for the host. `enqueue` launches all device
work and reads no results. `finish` makes the results, once the device has copied its data to the
host. With a processor, a token depends on earlier tokens, and the previous one must be finished
first. In two cases `enqueue` waits for the device: typical-p in vocabularies larger than the first
window of `draw`, and top-p without top-k if Triton is missing.

On one thread of a server cpu, 16 greedy rows of 32k logits take 0.1 ms, 64 rows with penalties and
every filter 11 ms, 8 rows of 150k with top-p 10 to 20 ms.
"""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock_proto.engine_request import EngineRequest
from penstock_shard.device.async_copy import is_host, mark, to_device, to_host
from penstock_shard.sequence import Sequence
from penstock_shard.worker.base import RowResult
from penstock_shard.worker.logits_processors.apply import (
    LogitsShaping,
    PreparedShaping,
    ShapedLogits,
)
from penstock_shard.worker.sampling.draw import draw
from penstock_shard.worker.sampling.philox import uniforms
from penstock_shard.worker.sampling.token_scores import TokenScores, score_tokens
from penstock_shard.worker.sampling.top_k_top_p import Columns
from penstock_shard.worker.slot_state import Integers, grown

# Increment when the same logits give other tokens than before.
SAMPLER_REVISION = 1

# Codes in place of a token: the model's logits are not finite, or no token is left to draw.
_NO_LOGITS = -1
_NO_TOKEN = -2
# OpenAI's maximum of log-probabilities for a token, which few requests exceed.
_FEW_LOGPROBS = 20
# Uniform numbers are computed for this many positions at once.
_POSITIONS = 16
_Index = NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class SampleRows:
    """Row i draws output token `positions[i]` of the sequence in `slots[i]`. Positions also count
    tokens that an earlier attempt delivered. Only a slot whose sequence is not stateful may occur
    several times.
    """

    slots: Integers
    positions: Integers


class Sampler:
    """Draws tokens, and keeps the state that drawing depends on, by slot.

    Rows are enqueued and finished in the order of the steps. If `prepare` is called first,
    constraint masks are filled while the forward pass runs.
    """

    def __init__(self, shaping: LogitsShaping | None = None) -> None:
        self._shaping = LogitsShaping() if shaping is None else shaping
        self._requests: dict[int, EngineRequest] = {}
        self._known = _SamplingColumns()
        self._prepared: PreparedShaping | None = None

    def admit(self, sequence: Sequence) -> None:
        self._requests[sequence.slot] = sequence.request
        self._known.admit(sequence.slot, sequence.request)
        self._known.stateful[sequence.slot] = self._shaping.admit(sequence)

    def release(self, slot: int) -> None:
        self._requests.pop(slot, None)
        self._shaping.release(slot)

    def ends_with(self, slot: int, token_id: int) -> bool:
        return self._requests[slot].ends_with(token_id)

    def repeat(self, slot: int) -> None:
        """Go back one position, because no token could be drawn."""
        self._shaping.repeat(slot)

    def is_stateful(self, slot: int) -> bool:
        return bool(self._known.stateful[slot])

    def needs_tokens(self, rows: SampleRows) -> bool:
        """Tell whether all rows enqueued earlier must be finished before `prepare`."""
        return bool(self._known.stateful[rows.slots].any())

    def prepare(self, rows: SampleRows) -> None:
        """Begin the work that needs no logits. The same rows must be enqueued next."""
        stateful = np.flatnonzero(self._known.stateful[rows.slots])
        self._prepared = self._shaping.prepare(
            stateful, rows.slots[stateful], rows.positions[stateful]
        )

    def enqueue(self, logits: Tensor, rows: SampleRows) -> PendingSamples:
        """Launch the sampling of N tokens from logits [N, V] of any float type, which are not
        changed.
        """
        if self._prepared is None:
            self.prepare(rows)
        prepared = self._prepared
        assert prepared is not None
        if is_host(logits):
            logits = logits.float()
        best, tokens = _largest(logits)
        codes = torch.where(torch.isfinite(best), tokens, _NO_LOGITS)
        shaped = self._shaping.apply(logits, prepared)
        # Reset only after the masks are filled, because after an earlier error `abandon` must wait
        # for them.
        self._prepared = None
        own_best = best
        if shaped is not None:
            own_best, own_tokens = _largest(shaped.logits)
            places = to_device(shaped.rows, logits.device)
            own_codes = torch.where(torch.isfinite(own_best), own_tokens, _NO_TOKEN)
            own_codes = torch.where(codes[places] == _NO_LOGITS, _NO_LOGITS, own_codes)
            codes.index_copy_(0, places, own_codes)
            tokens.index_copy_(0, places, own_tokens)
        self._draw(_Sources(logits, best, shaped, own_best), rows, tokens, codes)
        scored = self._score(logits, tokens, rows)
        return PendingSamples(tokens, to_host(codes), rows, prepared, scored)

    def abandon(self) -> None:
        self._prepared = None
        self._shaping.abandon()

    def sample(self, logits: Tensor, rows: SampleRows) -> list[RowResult]:
        """Enqueue and finish at once: logits [N, V] -> one result for each row.

        If a row has NaN logits or no token left to draw, only this row gets an error.
        """
        enqueued = self.enqueue(logits, rows)
        mark(logits.device)()
        return enqueued.finish()

    def _draw(self, sources: _Sources, rows: SampleRows, tokens: Tensor, codes: Tensor) -> None:
        """Overwrite `tokens` and `codes` of rows that are not greedy."""
        is_random = self._known.temperature[rows.slots] != 0.0
        if not is_random.any():
            return
        for logits, best, index, targets in sources.of(np.flatnonzero(is_random)):
            if not len(targets):
                continue
            drawn = draw(logits, best, index, self._known.columns(rows, targets))
            if len(targets) == len(tokens):
                tokens.copy_(drawn)
                codes.copy_(torch.where(codes < 0, codes, drawn))
                continue
            places = to_device(targets, tokens.device)
            before = codes.index_select(0, places)
            tokens.index_copy_(0, places, drawn)
            codes.index_copy_(0, places, torch.where(before < 0, before, drawn))

    def _score(self, logits: Tensor, tokens: Tensor, rows: SampleRows) -> list[_Scored]:
        """Score the rows. Rows that want many log-probabilities get a separate call, because a call
        ranks the same number of tokens for all its rows.
        """
        best = self._known.best_logprobs[rows.slots]
        few = np.flatnonzero((best >= 0) & (best <= _FEW_LOGPROBS))
        many = np.flatnonzero(best > _FEW_LOGPROBS)
        return [self._score_rows(logits, tokens, rows, some) for some in (few, many) if len(some)]

    def _score_rows(
        self, logits: Tensor, tokens: Tensor, rows: SampleRows, wanted: _Index
    ) -> _Scored:
        requests = [self._requests[slot] for slot in rows.slots[wanted].tolist()]
        if len(wanted) < len(tokens):
            places = to_device(wanted, logits.device)
            logits, tokens = logits.index_select(0, places), tokens.index_select(0, places)
        scores = score_tokens(
            logits,
            tokens,
            [request.logprobs or 0 for request in requests],
            [request.logprob_token_ids for request in requests],
        )
        return _Scored(wanted, scores)


@dataclass(frozen=True, slots=True)
class _Sources:
    """The logits [N, V], changed copies of some rows, and the largest logit of each row in both."""

    logits: Tensor
    best: Tensor
    shaped: ShapedLogits | None
    shaped_best: Tensor

    def of(self, rows: _Index) -> abc.Iterator[tuple[Tensor, Tensor, _Index, _Index]]:
        """Yield the logits for these rows, in one or two parts: logits, each row's largest logit,
        the rows' indices in these logits, and their indices in the step.
        """
        if self.shaped is None:
            yield self.logits, self.best, rows, rows
            return
        is_shaped = np.isin(rows, self.shaped.rows)
        yield self.logits, self.best, rows[~is_shaped], rows[~is_shaped]
        own = rows[is_shaped]
        yield self.shaped.logits, self.shaped_best, np.searchsorted(self.shaped.rows, own), own


@dataclass(frozen=True, slots=True)
class _Scored:
    rows: _Index
    scores: TokenScores


@dataclass(frozen=True, slots=True)
class PendingSamples:
    """Rows that are being sampled. `tokens` int64 [N] are on the device. A row with an error has an
    arbitrary token.
    """

    tokens: Tensor
    _codes: Tensor
    _rows: SampleRows
    _prepared: PreparedShaping
    _scored: abc.Sequence[_Scored]

    @property
    def known_tokens(self) -> Integers:
        """The tokens [N] on the host, after the copy is done; 0 for a row with an error."""
        known: Integers = self._codes.numpy()
        return known.clip(min=0)

    def finish(self) -> list[RowResult]:
        """Return one result for each row. Call once, after the copies to the host are done."""
        codes: list[int] = self._codes.tolist()
        results = list(map(RowResult, codes))
        if min(codes) < 0:
            for i, code in enumerate(codes):
                if code < 0:
                    results[i] = self._failure(i, code)
        self._prepared.advance(codes)
        for scored in self._scored:
            found = scored.scores.finish()
            for i, logprobs in zip(scored.rows.tolist(), found, strict=True):
                if results[i].error is None:
                    results[i].logprobs = logprobs
        return results

    def _failure(self, index: int, code: int) -> RowResult:
        what = "the model gave no finite logits"
        if code == _NO_TOKEN:
            what = self._prepared.problem(index)
            what = what or "the sampling parameters leave no token to draw"
        position = self._rows.positions[index]
        return RowResult(
            error=f"{what} at output position {position}", is_callers=code == _NO_TOKEN
        )


class _SamplingColumns:
    """Sampling parameters of sequences, in arrays indexed by slot."""

    def __init__(self) -> None:
        # The columns of `draw.Columns` except `uniform`, which is computed from `_seeds`.
        self._parameters = np.zeros((0, len(Columns._fields) - 1))
        self._seeds = np.zeros(0, dtype=np.uint64)
        # True if a sequence's tokens depend on its earlier tokens.
        self.stateful = np.zeros(0, dtype=np.bool_)
        # The number of best log-probabilities wanted; -1 if the token's own is not wanted either.
        self.best_logprobs: Integers = np.zeros(0, dtype=np.int64)
        # Each slot's uniform numbers for one run of `_POSITIONS` positions, and the run's number
        # from 1 on; 0 means none.
        self._uniforms = np.zeros((0, _POSITIONS))
        self._runs: Integers = np.zeros(0, dtype=np.int64)

    @property
    def temperature(self) -> NDArray[np.float64]:
        return self._parameters[:, 0]

    def admit(self, slot: int, request: EngineRequest) -> None:
        if slot >= len(self._seeds):
            self._grow(max(64, 2 * slot))
        sampling = request.sampling
        self._parameters[slot] = (
            sampling.temperature,
            sampling.top_k,
            sampling.top_p,
            sampling.min_p,
            sampling.typical_p,
        )
        self._seeds[slot] = sampling.seed
        self.best_logprobs[slot] = -1 if request.logprobs is None else request.logprobs
        self._runs[slot] = 0

    def columns(self, rows: SampleRows, chosen: _Index) -> Columns:
        slots, positions = rows.slots[chosen], rows.positions[chosen]
        temperature, top_k, top_p, min_p, typical_p = self._parameters[slots].T
        uniform = self._uniform(slots, positions)
        return Columns(temperature, top_k, top_p, min_p, typical_p, uniform)

    def _uniform(self, slots: Integers, positions: Integers) -> NDArray[np.float64]:
        runs = positions // _POSITIONS
        missing = np.flatnonzero(self._runs[slots] != runs + 1)
        if len(missing):
            new = slots[missing]
            wanted = runs[missing, None] * _POSITIONS + np.arange(_POSITIONS)
            seeds = np.repeat(self._seeds[new], _POSITIONS)
            made = uniforms(seeds, wanted.ravel())
            self._uniforms[new] = made.reshape(-1, _POSITIONS)
            self._runs[new] = runs[missing] + 1
        found = self._uniforms[slots, positions % _POSITIONS]
        # A sequence may occur twice, at positions in two runs.
        for i in np.flatnonzero(self._runs[slots] != runs + 1).tolist():
            found[i] = uniforms([int(self._seeds[slots[i]])], [int(positions[i])])[0]
        return found

    def _grow(self, capacity: int) -> None:
        self._parameters = grown(self._parameters, capacity)
        self._seeds = grown(self._seeds, capacity)
        self.stateful = grown(self.stateful, capacity)
        self.best_logprobs = grown(self.best_logprobs, capacity)
        self._uniforms = grown(self._uniforms, capacity)
        self._runs = grown(self._runs, capacity)


def _largest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest logit of each row [N, V] (NaN if the row has any) and its lowest id."""
    if not is_host(logits):
        best, tokens = logits.max(dim=1)
        return best, tokens
    # numpy's argmax uses vector instructions, and takes a seventh of torch's time.
    tokens = torch.from_numpy(logits.numpy().argmax(axis=1))
    return logits.gather(1, tokens.unsqueeze(1)).squeeze(1), tokens
