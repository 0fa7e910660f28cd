"""A runner without torch or weights: for tests, for trying things, for measuring everything else.

Its token is a hash of the prompt, all output so far, every sampling parameter, the seed and the
position, so whoever loses or mixes up one of them gives other tokens. Log-probabilities come from
the same hash. A sequence ends early only at `eos_rate`. A step takes `step_s`, counted, as on a
device stream, from when its inputs are handed over and the step before is over.
"""

from __future__ import annotations

import hashlib
import struct
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import astuple, dataclass

from penstock_shard.request import Request
from penstock_shard.runner.base import Logprobs, RowResult, RunnerInfo, StepPlan

CAPABILITIES = frozenset(
    {
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "seed",
        "logprobs",
        "prompt_logprobs",
        "allowed_token_ids",
    }
)


@dataclass(slots=True)
class _Progress:
    """The chained hash over a request's tokens, and how many of them it covers."""

    digest: bytes
    num_tokens: int = 0


class FakeRunner:
    """Implements `Runner`. `ordinary_ids` are what it generates; eos ids only by `eos_rate`."""

    def __init__(
        self,
        info: RunnerInfo,
        ordinary_ids: Sequence[int],
        *,
        step_s: float,
        eos_rate: float = 0.0,
    ) -> None:
        self._info = info
        self._ordinary_ids = ordinary_ids
        self._step_s = step_s
        self._eos_rate = eos_rate
        self._progress: dict[Request, _Progress] = {}
        self._launched: deque[tuple[StepPlan, float]] = deque()
        self._free_at_s = 0.0

    @property
    def info(self) -> RunnerInfo:
        return self._info

    def launch(self, plan: StepPlan) -> None:
        self._free_at_s = max(self._free_at_s, time.monotonic()) + self._step_s
        self._launched.append((plan, self._free_at_s))

    def collect(self) -> list[RowResult]:
        plan, done_at_s = self._launched.popleft()
        results = [self._run(row.request, row.start, row.count, row.samples) for row in plan.rows]
        time.sleep(max(0.0, done_at_s - time.monotonic()))
        return results

    def release(self, request: Request) -> None:
        self._progress.pop(request, None)

    # ---- tokens from hashes ----

    def _run(self, request: Request, start: int, count: int, samples: bool) -> RowResult:
        result = RowResult()
        if request.prompt_logprobs is not None and start < request.num_prompt_tokens - 1:
            end = min(start + count, request.num_prompt_tokens - 1)
            result.prompt_logprobs = self._prompt_logprobs(request, start, end)
        if samples:
            draw = self._draw(request)
            result.token_id = self._token(request, draw)
            if request.logprobs is not None:
                result.logprobs = Logprobs(top_n=request.logprobs)
                self._add_logprobs(result.logprobs, draw, result.token_id, request.logprobs)
        return result

    def _draw(self, request: Request) -> bytes:
        """32 bytes that depend on all that a token may depend on, and on nothing else."""
        progress = self._progress.get(request)
        if progress is None:
            parameters = repr(astuple(request.sampling)).encode()
            progress = _Progress(hashlib.blake2b(parameters, digest_size=32).digest())
            self._progress[request] = progress
        # One token at a time, so that a prompt and an output of the same ids hash alike.
        for token_id in request.token_ids[progress.num_tokens :]:
            packed = progress.digest + struct.pack("<I", token_id)
            progress.digest = hashlib.blake2b(packed, digest_size=32).digest()
        progress.num_tokens = len(request.token_ids)
        position = struct.pack("<QI", request.sampling.seed, request.num_output_tokens)
        return hashlib.blake2b(progress.digest + position, digest_size=32).digest()

    def _token(self, request: Request, draw: bytes) -> int:
        ids = request.sampling.allowed_token_ids or self._ordinary_ids
        ends = int.from_bytes(draw[8:16], "little") / 2**64 < self._eos_rate
        if ends and self._info.eos_token_ids and not request.sampling.allowed_token_ids:
            return self._info.eos_token_ids[0]
        return ids[int.from_bytes(draw[:8], "little") % len(ids)]

    def _prompt_logprobs(self, request: Request, start: int, end: int) -> Logprobs:
        """Of the prompt tokens at start + 1 .. end."""
        top_n = request.prompt_logprobs or 0
        columns = Logprobs(top_n=top_n)
        for index in range(start + 1, end + 1):
            token_id = request.token_ids[index]
            before = request.token_ids[max(0, index - 8) : index + 1]
            draw = hashlib.blake2b(struct.pack(f"<{len(before)}I", *before)).digest()
            self._add_logprobs(columns, draw, token_id, top_n)
        return columns

    def _add_logprobs(self, columns: Logprobs, draw: bytes, token_id: int, top_n: int) -> None:
        """The chosen token is the most likely; the others follow it in steps of a quarter."""
        chosen = -(draw[16] + 1) / 64.0
        columns.chosen.append(chosen)
        columns.ranks.append(1)
        base = int.from_bytes(draw[17:21], "little")
        ids = (self._ordinary_ids[(base + i) % len(self._ordinary_ids)] for i in range(top_n + 1))
        others = [other_id for other_id in ids if other_id != token_id]
        for rank, other_id in enumerate([token_id, *others][:top_n]):
            columns.top_token_ids.append(other_id)
            columns.top_logprobs.append(chosen - 0.25 * rank)
