"""Makes a constraint's state after the output that was delivered before."""

from __future__ import annotations

import logging
import os
import sys
import threading
from array import array
from concurrent.futures import ThreadPoolExecutor

from llguidance import LLMatcher

from penstock_proto.engine_request import EngineRequest
from penstock_proto.errors import Code
from penstock_proto.types import Error
from penstock_shard.structured_output.compiler import Compiler, is_worn_out
from penstock_shard.structured_output.distinct.distinct import Distinct
from penstock_shard.structured_output.matcher_state import (
    ConstraintState,
    failure_of,
    fill_mask,
    is_mismatch,
)
from penstock_shard.structured_output.refusal import ConstraintRefused

logger = logging.getLogger(__name__)

# A mask renews the matcher's work limit. With one mask for this many delivered tokens, even a
# highly ambiguous regex stays within the limit. More masks would cost more than the tokens.
_TOKENS_A_MASK = 16
_NICE = 10


def _stand_back() -> None:
    """Lower this thread's priority below that of the thread that runs steps (on Linux only)."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)


def compiling_threads(count: int) -> ThreadPoolExecutor:
    """Make threads with lower priority than the thread that runs steps."""
    return ThreadPoolExecutor(count, thread_name_prefix="constraints", initializer=_stand_back)


class OutputRefused(Exception):
    """The delivered output does not match the constraint."""


class OutputExhausts(Exception):
    """Following the delivered output exceeds the matcher's limits."""


class Discarded(Exception):
    """The request ended while its matcher was being made."""


def state_after_output(
    compiler: Compiler, request: EngineRequest, is_discarded: threading.Event
) -> ConstraintState:
    """The state of a request's constraint after `request.output`.

    Raises:
        ConstraintRefused: the constraint cannot be compiled.
        OutputRefused: the constraint does not allow the output.
        OutputExhausts: following the output exceeds the matcher's limits.
        Discarded: the event was set meanwhile.
    """
    constraint = request.constraint
    assert constraint is not None
    beginning = compiler.compile(constraint, goes_on=bool(request.output))
    matcher = beginning.deep_copy()
    distinct = compiler.distinct(constraint, matcher)
    output = array("I", request.output).tolist()
    try:
        _follow(matcher, distinct, output, is_discarded, _TOKENS_A_MASK)
    except (OutputRefused, OutputExhausts):
        if not is_worn_out(beginning):
            raise
        # Other requests with this constraint may have used up the shared lexer's limits. Compile
        # alone, and compute a mask before each token, as when the tokens were sampled.
        matcher = compiler.compile_alone(constraint)
        distinct = compiler.distinct(constraint, matcher)
        _follow(matcher, distinct, output, is_discarded, 1)
    state = ConstraintState(request, matcher, distinct, compiler.pace(constraint))
    if state.pace.is_slow:
        fill_mask(state, compiler.tokenizer.vocab_size)
    return state


def error_of(request: EngineRequest, reason: BaseException) -> Error:
    """The error that ends a request after `state_after_output` raised `reason`."""
    assert request.constraint is not None
    kind = request.constraint.kind
    if isinstance(reason, OutputRefused):
        return Error(Code.INVALID_ARGUMENT, str(reason), "output_token_ids")
    if isinstance(reason, OutputExhausts):
        return Error(Code.OUT_OF_RANGE, f"{kind}: {reason}", kind)
    if isinstance(reason, ConstraintRefused):
        return Error(Code.INVALID_ARGUMENT, str(reason), kind)
    logger.error("request %s: its constraint failed", request.request_id, exc_info=reason)
    return Error(Code.INTERNAL, f"{kind}: it cannot be compiled: {type(reason).__name__}", kind)


def _follow(
    matcher: LLMatcher,
    distinct: Distinct | None,
    output: list[int],
    is_discarded: threading.Event,
    tokens_a_mask: int,
) -> None:
    """Advance the matcher past an output, and check that it can fill the next mask.

    Raises OutputRefused, OutputExhausts, Discarded.
    """
    for start in range(0, len(output), tokens_a_mask):
        if is_discarded.is_set():
            raise Discarded
        _compute_mask(matcher)
        some = output[start : start + tokens_a_mask]
        if not _consume(matcher, distinct, some):
            raise _unfollowed(matcher)
    _compute_mask(matcher)


def _unfollowed(matcher: LLMatcher) -> OutputRefused | OutputExhausts:
    if is_mismatch(matcher):
        return OutputRefused(
            "output_token_ids: they are no beginning of what the constraint allows"
        )
    return OutputExhausts(failure_of(matcher))


def _consume(matcher: LLMatcher, distinct: Distinct | None, token_ids: list[int]) -> bool:
    # Consume one token at a time: in an ambiguous grammar, each holds for some milliseconds the
    # interpreter lock, which steps need.
    if distinct is None:
        return all(matcher.consume_token(each) for each in token_ids)
    return all(distinct.consume([each], matcher) for each in token_ids)


def _compute_mask(matcher: LLMatcher) -> None:
    matcher.compute_bitmask()
    if matcher.is_error():
        raise OutputExhausts(failure_of(matcher))
