"""Constraints and output before a request within vLLM's core, without vLLM: its objects by their
fields.
"""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import pytest
from support.compilers import EOS_IDS, VOCAB_SIZE, ids_of, two_ended_compiler

from penstock_proto.engine_request import EngineRequest
from penstock_proto.errors import Code
from penstock_proto.types import Constraint, EngineSampling
from penstock_shard.structured_output.following import compiling_threads
from penstock_shard.structured_output.matcher_state import allowed_ids
from penstock_shard.structured_output.refusal import ConstraintRefused
from penstock_shard.vllm_engine.in_core.continuing import keep_output
from penstock_shard.vllm_engine.in_core.core_settings import (
    CoreSettings,
    add_settings,
    read_settings,
)
from penstock_shard.vllm_engine.in_core.grammars import Grammar, Grammars
from penstock_shard.vllm_engine.outputs import Progress, read_output
from penstock_shard.vllm_engine.requests import (
    OUTPUT_TOKENS,
    grammar_of,
    sampling_of,
)

COMPILER = two_ended_compiler()


def constrained(regex: str, output: str = "", **changes: Any) -> EngineRequest:
    given: dict[str, Any] = {
        "request_id": "r",
        "attempt": 1,
        "prompt": array("I", [5, 6, 7]).tobytes(),
        "output": array("I", ids_of(COMPILER, output)).tobytes(),
        "sampling": EngineSampling(temperature=0.0),
        "max_tokens": 20,
        "stop_token_ids": frozenset(EOS_IDS),
        "constraint": Constraint("regex", regex),
    }
    return EngineRequest(**{**given, **changes})


def allowed(grammars: Grammars, grammar: Grammar) -> set[int]:
    rows = grammars.allocate_token_bitmask(2)
    grammar.fill_bitmask(rows, 1)
    return set(allowed_ids(rows.numpy()[1]).tolist())


def ended(grammars: Grammars, request: EngineRequest, *token_ids: int) -> Any:
    """Return the output that the server gets for a request that the core ends with an error."""
    given = SimpleNamespace(
        request_id="r/1",
        new_token_ids=list(token_ids),
        new_logprobs=None,
        new_prompt_logprobs_tensors=None,
        finish_reason="error",
        stop_reason=None,
        pooling_output=None,
        prefill_stats=None,
    )
    grammars.explain([given])
    return read_output(Progress(request, 0), given)


# ---- Constraints -------------------------------------------------------------------------------


def test_a_constraint_is_followed_from_the_output_that_a_request_brings_to_its_end() -> None:
    grammars = Grammars(COMPILER)
    request = constrained("ab[cd]", output="ab")
    grammar = grammars.compile_grammar(None, grammar_of(request))
    (c, d) = (ids_of(COMPILER, each)[0] for each in "cd")
    assert allowed(grammars, grammar) == {c, d}
    assert grammar.accept_tokens("r/1", [c])
    assert allowed(grammars, grammar) == set(EOS_IDS)
    assert not grammar.is_terminated()
    assert grammar.accept_tokens("r/1", [EOS_IDS[0]])
    assert grammar.is_terminated()


def test_the_prompt_does_not_travel_twice() -> None:
    long = constrained("a", prompt=bytes(4 * 100_000))
    assert len(grammar_of(long)) < 2000
    assert grammar_of(constrained("a", constraint=None)) == ""


def test_output_that_does_not_fit_is_refused_as_by_penstocks_own_engine() -> None:
    grammars = Grammars(COMPILER)
    request = constrained("ab[cd]", output="xy")
    with pytest.raises(Exception, match="no beginning"):
        grammars.compile_grammar(None, grammar_of(request))
    error = ended(grammars, request).error
    assert (error.code, error.field) == (Code.INVALID_ARGUMENT, "output_token_ids")


def test_a_constraint_that_cannot_be_compiled_is_refused_by_its_kind() -> None:
    grammars = Grammars(COMPILER)
    request = constrained("(")
    with pytest.raises(ConstraintRefused):
        grammars.compile_grammar(None, grammar_of(request))
    error = ended(grammars, request).error
    assert (error.code, error.field) == (Code.INVALID_ARGUMENT, "regex")


def test_a_token_against_the_constraint_ends_the_request_and_is_not_delivered() -> None:
    grammars = Grammars(COMPILER)
    request = constrained("ab")
    grammar = grammars.compile_grammar(None, grammar_of(request))
    wrong = ids_of(COMPILER, "x")
    assert not grammar.accept_tokens("r/1", wrong)
    output = ended(grammars, request, *wrong)
    assert output.token_ids == []
    assert output.error.code is Code.OUT_OF_RANGE
    assert output.error.message.startswith("regex: cannot be followed any further")
    assert output.error.message.endswith("at output position 1")
    # A later request of that name has another end.
    assert ended(grammars, request).error.code is Code.INTERNAL


def test_ends_and_lengths_of_a_constrained_request_are_the_constraints() -> None:
    told = sampling_of(
        constrained("a", min_tokens=4, reluctant_stop_ids=frozenset({9})), as_output=False
    )
    assert told["min_tokens"] == 0
    assert told["stop_token_ids"] == sorted({*EOS_IDS, 9})


def test_grammars_take_the_place_of_vllms_own() -> None:
    manager, grammars = SimpleNamespace(), Grammars(COMPILER)
    with compiling_threads(1) as threads:
        grammars.install(manager, threads)
        made = manager.executor.submit(
            manager.backend.compile_grammar, None, grammar_of(constrained("a"))
        )
        assert allowed(grammars, made.result(30)) == {ids_of(COMPILER, "a")[0]}
    assert grammars.allocate_token_bitmask(3).shape == (3, -(-VOCAB_SIZE // 32))


def test_settings_reach_the_core_with_vllms_configuration() -> None:
    config = SimpleNamespace(additional_config={"theirs": 1})
    settings = CoreSettings("/model", 100, (2, 3), 1.5, 2**20, 2)
    add_settings(config, settings)
    assert read_settings(config) == settings
    assert config.additional_config["theirs"] == 1


# ---- Output before a request -------------------------------------------------------------------


def theirs(prompt: list[int], given: int | None) -> Any:
    extra = None if given is None else {OUTPUT_TOKENS: given}
    return SimpleNamespace(
        sampling_params=SimpleNamespace(extra_args=extra),
        prompt_token_ids=prompt,
        _output_token_ids=[],
        num_prompt_tokens=len(prompt),
    )


@pytest.mark.parametrize(
    ("given", "prompt", "output"),
    [(2, [1, 2], [3, 4]), (0, [1, 2, 3, 4], []), (None, [1, 2, 3, 4], [])],
)
def test_output_that_a_request_brings_is_output_in_vllm(
    given: int | None, prompt: list[int], output: list[int]
) -> None:
    request = theirs([1, 2, 3, 4], given)
    keep_output(request)
    assert (request.prompt_token_ids, request._output_token_ids) == (prompt, output)
    assert request.num_prompt_tokens == len(prompt)


def test_a_request_for_a_vector_brings_no_output() -> None:
    request = SimpleNamespace(sampling_params=None, prompt_token_ids=[1, 2])
    keep_output(request)
    assert request.prompt_token_ids == [1, 2]


def test_output_that_stays_output_keeps_the_seed_and_whole_lengths() -> None:
    later = EngineRequest(
        request_id="r",
        attempt=1,
        prompt=array("I", [5]).tobytes(),
        output=array("I", [8, 9]).tobytes(),
        sampling=EngineSampling(temperature=1.0, seed=7, presence_penalty=1.0),
        max_tokens=10,
        min_tokens=3,
    )
    told = sampling_of(later, as_output=True)
    assert (told["seed"], told["max_tokens"], told["min_tokens"]) == (7, 10, 3)
    assert told["extra_args"] == {OUTPUT_TOKENS: 2}
