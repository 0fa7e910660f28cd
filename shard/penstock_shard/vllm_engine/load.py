"""The load of vLLM's engine, as shards report it."""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Any

from penstock_shard.ipc.messages import Load
from penstock_shard.vllm_engine.outputs import Progress


class LoadCount:
    """Sums over an engine's steps."""

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._usage = 0.0
        self._steps = 0
        self._seconds = 0.0
        self._sequences = 0
        self._prompt_tokens = 0
        self._output_tokens = 0
        self._preemptions = 0
        self._last_s = time.monotonic()

    def on_submit(self, was_idle: bool) -> None:
        """Restart the clock after idle time."""
        if was_idle:
            self._last_s = time.monotonic()

    def on_step(self, given: Any) -> int:
        """Count a step by vLLM's `EngineCoreOutputs`; return its number of computed prompt
        tokens.
        """
        before = self._prompt_tokens
        now_s = time.monotonic()
        self._seconds += now_s - self._last_s
        self._last_s = now_s
        self._steps += 1
        self._sequences += len(given.outputs)
        for output in given.outputs:
            self._output_tokens += len(output.new_token_ids)
            if output.prefill_stats is not None:
                self._prompt_tokens += output.prefill_stats.num_computed_tokens
            events = output.events or ()
            self._preemptions += sum(event.type.name == "PREEMPTED" for event in events)
        if given.scheduler_stats is not None:
            self._usage = given.scheduler_stats.kv_cache_usage
        return self._prompt_tokens - before

    def load(self, known: Collection[Progress]) -> Load:
        running = [each for each in known if each.is_started]
        waiting_tokens = sum(each.request.num_tokens for each in known if not each.is_started)
        return Load(
            running=len(running),
            waiting=len(known) - len(running),
            queued_tokens=waiting_tokens,
            running_tokens=sum(map(_num_tokens, running)),
            referenced_blocks=round(self._usage * self._num_blocks),
            steps_total=self._steps,
            steps_seconds_total=self._seconds,
            sequences_total=self._sequences,
            prompt_tokens_total=self._prompt_tokens,
            decode_tokens_total=self._output_tokens,
            counts={"preemptions_total": self._preemptions},
        )


def _num_tokens(progress: Progress) -> int:
    return progress.request.num_prompt_tokens + progress.num_output
