"""Changes to vLLM's scheduler: a request's earlier output stays output, and penstock's constraints
apply. vLLM imports the classes in `scheduler.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from penstock_shard.checkpoint.tokenizer_files import read_tokenizer_files
from penstock_shard.config import ConstraintLimits
from penstock_shard.structured_output.compiler import Compiler
from penstock_shard.structured_output.following import compiling_threads
from penstock_shard.vllm_engine.in_core.core_settings import CoreSettings, read_settings
from penstock_shard.vllm_engine.in_core.grammars import Grammars
from penstock_shard.vllm_engine.requests import OUTPUT_TOKENS


def keep_output(request: Any) -> None:
    """Turn the earlier output at the prompt's end into output, as after a preemption, so that
    penalties and minimal lengths count it.
    """
    # None for an embedding.
    sampling = request.sampling_params
    given = 0 if sampling is None else (sampling.extra_args or {}).get(OUTPUT_TOKENS, 0)
    if given:
        request._output_token_ids.extend(request.prompt_token_ids[-given:])
        request.prompt_token_ids = request.prompt_token_ids[:-given]
        request.num_prompt_tokens -= given


class Continuing:
    """A base class to put before a scheduler class of vLLM."""

    def __init__(self, *arguments: Any, **fields: Any) -> None:
        super().__init__(*arguments, **fields)
        settings = read_settings(fields["vllm_config"])
        self._grammars = _grammars(settings)
        if self._grammars is not None:
            threads = compiling_threads(settings.constraint_threads)
            self._grammars.install(fields["structured_output_manager"], threads)

    def add_request(self, request: Any) -> None:
        """Add a request. Its earlier output is kept apart from the prompt."""
        keep_output(request)
        super().add_request(request)  # type: ignore[misc]

    def update_from_output(self, *arguments: Any, **fields: Any) -> Any:
        """Return a step's outputs by client, with the reasons of failures."""
        given = super().update_from_output(*arguments, **fields)  # type: ignore[misc]
        if self._grammars is not None:
            for each in given.values():
                self._grammars.explain(each.outputs)
        return given


def _grammars(settings: CoreSettings) -> Grammars | None:
    if not settings.tokenizer_dir:
        return None
    compiler = Compiler(
        read_tokenizer_files(Path(settings.tokenizer_dir))["tokenizer.json"],
        settings.vocab_size,
        settings.eos_token_ids,
        ConstraintLimits(settings.timeout_s, settings.memory_bytes),
    )
    # Build the vocabulary before requests wait for it.
    _ = compiler.vocabulary
    return Grammars(compiler)
