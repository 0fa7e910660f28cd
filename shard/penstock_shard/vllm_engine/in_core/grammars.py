"""Constraints in vLLM's core: penstock's compiler and matchers, so that any engine has the same
syntax, ends and limits.

As a grammar, vLLM passes on a text with the request's constraint, stop ids and earlier output.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from concurrent.futures import Executor
from typing import Any

import msgspec
from llguidance.numpy import allocate_token_bitmask

from penstock_proto.engine_request import EngineRequest
from penstock_proto.errors import Code
from penstock_proto.types import Error
from penstock_shard.structured_output.compiler import Compiler
from penstock_shard.structured_output.following import (
    OutputExhausts,
    OutputRefused,
    error_of,
    state_after_output,
)
from penstock_shard.structured_output.matcher_state import ConstraintState, fill_mask
from penstock_shard.structured_output.refusal import ConstraintRefused
from penstock_shard.vllm_engine.requests import core_id

_REQUESTS = msgspec.json.Decoder(EngineRequest)


class Grammar:
    """The constraint of a request, as vLLM's `StructuredOutputGrammar`. Nothing is rolled back,
    because this engine serves no drafts.
    """

    def __init__(self, state: ConstraintState, request: EngineRequest, grammars: Grammars) -> None:
        self._state = state
        self._request = request
        self._grammars = grammars
        self._num_output = len(request.output) // 4
        self._has_ended = False

    def accept_tokens(self, name: str, token_ids: Iterable[int]) -> bool:
        """Take drawn tokens; return False to end the request with an error."""
        state = self._state
        for token_id in token_ids:
            if state.error:
                break
            if self._request.ends_with(token_id):
                self._has_ended = True
                return True
            state.append(token_id)
            self._num_output += 1
        if state.error:
            text = f"{state.error} at output position {self._num_output}"
            self._grammars.fail(name, Error(Code.OUT_OF_RANGE, text))
        return not state.error

    def fill_bitmask(self, bitmask: Any, row: int) -> None:
        """Write the next token's mask to a row of a host tensor, int32 [rows, words]."""
        if self._state.mask is None:
            fill_mask(self._state, self._grammars.vocab_size)
        # Without a mask, the constraint has failed, and the next token ends the request.
        mask = self._state.mask
        bitmask.numpy()[row] = -1 if mask is None else mask

    def is_terminated(self) -> bool:
        return self._has_ended


class Grammars:
    """A core's constraints: vLLM's `StructuredOutputBackend`."""

    def __init__(self, compiler: Compiler) -> None:
        self._compiler = compiler
        self.vocab_size = compiler.tokenizer.vocab_size
        # Errors of the requests that vLLM will end in its next step.
        self._failures: dict[str, Error] = {}

    def install(self, manager: Any, threads: Executor) -> None:
        manager.backend = self
        manager.executor = threads

    def compile_grammar(self, kind: object, spec: str, stop_token_ids: object = None) -> Grammar:
        """Compile a constraint, which `requests.grammar_of` wrote, and advance past the earlier
        output. Any thread may call this.

        Raises the errors of `state_after_output`, by which vLLM ends the request.
        """
        request = _REQUESTS.decode(spec)
        try:
            state = state_after_output(self._compiler, request, threading.Event())
        except (ConstraintRefused, OutputRefused, OutputExhausts) as reason:
            self.fail(core_id(request.request_id, request.attempt), error_of(request, reason))
            raise
        return Grammar(state, request, self)

    def allocate_token_bitmask(self, num_rows: int) -> Any:
        """Allocate masks, int32 [rows, words], on the host."""
        import torch

        return torch.from_numpy(allocate_token_bitmask(num_rows, self.vocab_size))

    def destroy(self) -> None:
        """Do nothing."""

    def fail(self, name: str, error: Error) -> None:
        """Record why the core ends a request."""
        self._failures[name] = error

    def explain(self, outputs: Iterable[Any]) -> None:
        """Write the reasons of failures to outputs."""
        for output in outputs:
            if output.finish_reason is not None:
                error = self._failures.pop(output.request_id, None)
                if error is not None:
                    output.stop_reason = msgspec.json.encode(error).decode()
