"""A change to vLLM's worker on processors, which vLLM's executor imports by name."""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker


class Worker(CPUWorker):  # type: ignore[misc]
    """Draws with a request's seed only tokens that vLLM keeps. While a prompt is computed in
    pieces, vLLM draws a token after each, and puts the generator back: those of processors cannot
    go back, which ends the engine.
    """

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Draw the tokens of a step."""
        runner = self.model_runner
        generators = runner.input_batch.generators
        discarded = runner.discard_request_mask.np
        unused = {row: generators.pop(row) for row in list(generators) if discarded[row]}
        output = super().sample_tokens(grammar_output)
        generators.update(unused)
        return output
