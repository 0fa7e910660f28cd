"""Logits -> tokens and log-probabilities. Knows nothing of models, caches or scheduling.

A token is a function of (its row of logits, its request's parameters, seed, prompt and output so
far, its position) and of nothing else; what other rows ask for only lets work be skipped.

Parameters act in this order:

1. repetition_penalty, on tokens of the prompt and the output: positive logits are divided by it,
   others multiplied (Keskar et al., "CTRL", 2019)
2. presence_penalty and frequency_penalty, on tokens of the output: the first is subtracted once,
   the second as often as the token occurs
3. logit_bias is added
4. what cannot be drawn: all but allowed_token_ids; the last id of a bad word whose other ids end
   the output; ids that stop the sequence, before min_tokens; what the constraint does not allow;
   while the end of reasoning is forced, all but that
5. temperature, top-k, top-p (over what top-k left), min-p (relative to the most likely token),
   typical-p (over what the others left): see `draw`

Greedy rows end with 4 and take the largest logit, the lowest id among equals. Log-probabilities
are of the raw logits, before all of these.

On one thread of a server cpu, 16 greedy rows of 32k logits take 0.1 ms, 64 rows with penalties and
every filter 11 ms (sorting them would take 135), 8 rows of 150k with top-p 10 to 20 ms (110).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock_shard.constraints.state import MaskFiller
from penstock_shard.request import Request
from penstock_shard.runner.adjust import adjust
from penstock_shard.runner.base import Logprobs, RowResult
from penstock_shard.runner.draw import draw, ordered_topk
from penstock_shard.runner.token_state import TokenState, needs_state

# Raised when the same logits give other tokens than before.
SAMPLER_REVISION = 1


@dataclass(frozen=True, slots=True)
class SampleRow:
    """What a row of logits is for: the token at `position` of the request's output, counted from
    its first token, those delivered before this attempt included.
    """

    request: Request
    position: int


@dataclass(slots=True)
class _Pick:
    """What is known so far of one row: its logits [V], the largest of them, that one's token."""

    row: SampleRow
    logits: Tensor
    largest: float
    token: int
    error: str | None = None
    # It is what the request asks for.
    is_callers: bool = False

    def check(self, what: str, *, is_callers: bool = False) -> None:
        # NaN is the largest where there is one; +inf leaves no distribution, -inf no token.
        if not math.isfinite(self.largest):
            self.error = f"{what} at output position {self.row.position}"
            self.is_callers = is_callers


class Sampler:
    """Draws tokens, and keeps what has to be remembered of the requests they are drawn for.

    `sample` is called in the order of the steps. What it draws it takes in itself, so a request's
    own tokens may lag behind; they are read where a position does not follow the last one.
    `prepare` may be called before it, with the same rows: masks are filled meanwhile.
    """

    def __init__(self, masks: MaskFiller | None = None) -> None:
        """Without `masks` no request may have a constraint."""
        self._states: dict[Request, TokenState] = {}
        self._masks = masks
        # Of the rows that are sampled next, and when their masks are there.
        self._prepared: list[TokenState | None] | None = None
        self._finish_masks: Callable[[], None] | None = None

    def prepare(self, rows: Sequence[SampleRow]) -> None:
        """These are sampled next: begin with what needs no logits."""
        states = [self._state(row) if needs_state(row.request) else None for row in rows]
        self._prepared = states
        constraints = [state.constraint for state in states if state and state.constraint]
        if constraints:
            assert self._masks is not None
            self._finish_masks = self._masks.start(constraints)

    def sample(self, logits: Tensor, rows: Sequence[SampleRow]) -> list[RowResult]:
        """logits [N, V] of any float type -> one result a row; the logits are not changed.

        A row with NaN, or with nothing left to draw, has an error, alone.
        """
        if not rows:
            return []
        if self._prepared is None:
            self.prepare(rows)
        states, self._prepared = self._prepared or [], None
        logits = logits.float()
        picks = [
            _Pick(row, own, value, token)
            for row, own, value, token in zip(rows, logits.unbind(), *_largest(logits), strict=True)
        ]
        if self._finish_masks is not None:
            self._finish_masks()
            self._finish_masks = None
        for pick in picks:
            pick.check("the model gave no finite logits")
        _adjust([(p, s) for p, s in zip(picks, states, strict=True) if s and not p.error])
        _draw([p for p in picks if not p.error and not p.row.request.sampling.is_greedy])
        for pick, state in zip(picks, states, strict=True):
            # Also after an error: a step that was launched ahead may still ask for what follows.
            if state is not None:
                state.append(pick.token)
        results = [
            RowResult(None if p.error else p.token, error=p.error, is_callers=p.is_callers)
            for p in picks
        ]
        _add_logprobs(logits, rows, results)
        return results

    def forget(self, request: Request) -> None:
        """The request is over."""
        self._states.pop(request, None)

    def _state(self, row: SampleRow) -> TokenState:
        state = self._states.get(row.request)
        if state is None:
            state = self._states[row.request] = TokenState(row.request)
        state.move_to(row.position)
        return state


def _largest(logits: Tensor) -> tuple[list[float], list[int]]:
    """Of each row of logits [N, V]: the largest, or NaN if there is one; its lowest token."""
    if logits.device.type == "cpu":
        # numpy's argmax uses vector instructions: a seventh of torch's time.
        tokens = torch.from_numpy(logits.numpy().argmax(axis=1))
    else:
        tokens = logits.argmax(dim=1)
    largest = logits.gather(1, tokens.unsqueeze(1)).squeeze(1)
    return largest.tolist(), tokens.tolist()


def _adjust(picks: Sequence[tuple[_Pick, TokenState]]) -> None:
    """Give rows that their requests' tokens and wishes change logits of their own."""
    changed = [(pick, state) for pick, state in picks if state.changes_logits]
    if not changed:
        return
    logits = torch.stack([pick.logits for pick, _ in changed])
    adjust(logits, [state for _, state in changed])
    for (pick, state), own, value, token in zip(
        changed, logits.unbind(), *_largest(logits), strict=True
    ):
        pick.logits, pick.largest, pick.token = own, value, token
        what = "" if state.constraint is None else state.constraint.error
        what = what or "the sampling parameters leave no token to draw"
        pick.check(what, is_callers=True)


def _draw(picks: Sequence[_Pick]) -> None:
    if not picks:
        return
    tokens = draw(
        [pick.logits for pick in picks],
        [pick.largest for pick in picks],
        [pick.row.request.sampling for pick in picks],
        [pick.row.position for pick in picks],
    )
    for pick, token in zip(picks, tokens, strict=True):
        pick.token = token


def _add_logprobs(logits: Tensor, rows: Sequence[SampleRow], results: Sequence[RowResult]) -> None:
    wanted = [
        i
        for i, (row, result) in enumerate(zip(rows, results, strict=True))
        if row.request.logprobs is not None and result.error is None
    ]
    if not wanted:
        return
    requests = [rows[i].request for i in wanted]
    found = token_logprobs(
        logits if len(wanted) == len(rows) else torch.stack([logits[i] for i in wanted]),
        torch.tensor([results[i].token_id for i in wanted], device=logits.device),
        [request.logprobs or 0 for request in requests],
        [request.logprob_token_ids for request in requests],
    )
    for i, logprobs in zip(wanted, found, strict=True):
        results[i].logprobs = logprobs


def token_logprobs(
    logits: Tensor,
    tokens: Tensor,
    counts: Sequence[int],
    requested: Sequence[Sequence[int]] = (),
) -> list[Logprobs]:
    """Of raw logits [n, V]: the log-probability of tokens [n], their rank (1 is the most likely;
    equals share a rank), the `counts[i]` best of row i, and those of the ids `requested[i]`.

    Ranks and order are those of the logits: as log-probabilities two of them may round to one.
    """
    logits = logits.float()
    scores = torch.log_softmax(logits, dim=1)
    chosen = scores.gather(1, tokens.unsqueeze(1))
    better = logits > logits.gather(1, tokens.unsqueeze(1))
    ranks = (better.sum(dim=1, dtype=torch.int32) + 1).tolist()
    vocabulary = logits.shape[1]
    top_ids = torch.empty((len(counts), 0), dtype=torch.int64, device=logits.device)
    if most := min(max(counts), vocabulary):
        # Only what equals the largest logit is 0 here.
        top_ids = ordered_topk(logits - logits.amax(dim=1, keepdim=True), most)
    top = scores.gather(1, top_ids).cpu().numpy()
    ids = top_ids.cpu().numpy()
    columns = [
        Logprobs(
            chosen=[score],
            ranks=[ranks[i]],
            top_n=min(count, vocabulary),
            top_token_ids=ids[i, :count].tolist(),
            top_logprobs=top[i, :count].tolist(),
        )
        for i, (score, count) in enumerate(zip(chosen.squeeze(1).tolist(), counts, strict=True))
    ]
    for row, asked, logprobs in zip(scores, requested, columns, strict=False):
        if asked:
            logprobs.requested = row[torch.tensor(asked, device=row.device)].tolist()
    return columns
