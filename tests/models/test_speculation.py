"""Drafts on real logits and real models: the same tokens, in fewer steps."""

from __future__ import annotations

import dataclasses
import json
import random
from collections import abc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from models.drawer import Drawer, SampleRow
from models.driver import load, make_sequence
from models.runners import make_runner
from support.budget import budget, in_soak, seeded
from support.compilers import VOCAB_SIZE, ids_of, two_ended_compiler
from support.drafters import FickleOracle, Oracle, named
from support.engines import with_blocks

from penstock_proto.types import Constraint, EngineSampling, Logprobs, ThinkingBudget
from penstock_shard.engine.create_engine import create_scheduler
from penstock_shard.engine.engine import Engine
from penstock_shard.kv_cache.block_manager import BlockManager
from penstock_shard.scheduler.step_budget import SchedulerLimits
from penstock_shard.sequence import Sequence
from penstock_shard.spec_decode.prompt_lookup import Drafter
from penstock_shard.structured_output.matcher_state import ConstraintState, MaskFiller
from penstock_shard.worker.base import RowResult
from penstock_shard.worker.model_runner import ModelRunner
from penstock_shard.worker.outputs.draft_verification import DraftRow, Verification

_LENGTH = 8


@dataclass(frozen=True)
class Draft:
    """Draft tokens of a sequence, whose first logits are row `place`."""

    sequence: Sequence
    token_ids: abc.Sequence[int]
    position: int
    place: int


def verify(sampler: Drawer, logits: torch.Tensor, drafts: abc.Sequence[Draft]) -> list[RowResult]:
    slots = sampler.rows([SampleRow(draft.sequence, 0) for draft in drafts]).slots.tolist()
    rows = [
        DraftRow(number, slot, draft.token_ids, draft.position, draft.place)
        for number, (slot, draft) in enumerate(zip(slots, drafts, strict=True))
    ]
    return Verification(sampler.sampler, logits, rows).finish()


SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "drawn": {"temperature": 1.0},
    "filtered": {"temperature": 0.7, "top_k": 9, "top_p": 0.9, "min_p": 0.02},
    "penalties": {"temperature": 0.8, "repetition_penalty": 1.8, "frequency_penalty": 0.7},
    "windowed penalties": {
        "temperature": 0.8,
        "repetition_penalty": 1.8,
        "frequency_penalty": 0.7,
        "penalty_window_tokens": 3,
    },
    "greedy penalties": {"temperature": 0.0, "presence_penalty": 1.5},
    "bad words": {"temperature": 1.0, "bad_words": ((3, 4), (5,), (6, 7, 8))},
    "allowed": {"temperature": 1.0, "allowed_token_ids": (2, 3, 5, 7)},
    "bias": {"temperature": 1.0, "logit_bias": ((3, 2.0), (4, -3.0))},
}


def _request(sampling: dict[str, Any], seed: int, **changes: Any) -> Sequence:
    matcher, distinct = changes.pop("matcher", None), changes.pop("distinct", None)
    params = EngineSampling(seed=seed, **sampling)
    sequence = make_sequence([1, 2, 3], params, logprobs=2, **changes)
    if matcher is not None:
        sequence.constraint = ConstraintState(sequence.request, matcher, distinct)
    return sequence


def _one_by_one(sequence: Sequence, logits: torch.Tensor) -> list[RowResult]:
    """Return what a sampler draws from the logits, one by one, until the sequence ends."""
    sampler = Drawer(MaskFiller(logits.shape[1]))
    results: list[RowResult] = []
    for position, row in enumerate(logits):
        (result,) = sampler.sample(row[None], [SampleRow(sequence, position)])
        results.append(result)
        if result.token_id is None or sequence.request.ends_with(result.token_id):
            break
        sequence.token_ids.append(result.token_id)
    del sequence.token_ids[sequence.num_prompt_tokens :]
    return results


def _drafted(rng: random.Random, right: abc.Sequence[int], count: int, size: int) -> list[int]:
    kept = list(right[: rng.randint(0, count)])
    return (kept + [rng.randrange(size) for _ in range(count)])[:count]


@pytest.mark.parametrize("name", SAMPLINGS)
def test_what_is_sampled_after_drafts_is_what_is_sampled_without(name: str) -> None:
    rng = seeded(f"drafts, {name}")
    vocabulary = 24
    for _ in range(budget(6, 500)):
        torch.manual_seed(rng.randrange(2**31))
        sequences = [
            _request(SAMPLINGS[rng.choice((name, "greedy", name))], seed, **_ending(rng))
            for seed in range(rng.randint(1, 5))
        ]
        logits = [4 * torch.randn(_LENGTH, vocabulary) for _ in sequences]
        expected = [_one_by_one(r, own) for r, own in zip(sequences, logits, strict=True)]
        drafts, place = [], 0
        for sequence, results in zip(sequences, expected, strict=True):
            right = [result.token_id or 0 for result in results]
            count = rng.randint(1, _LENGTH - 1)
            drafts.append(Draft(sequence, _drafted(rng, right, count, vocabulary), 0, place))
            place += _LENGTH
        found = verify(Drawer(), torch.cat(logits), drafts)
        for draft, result, results in zip(drafts, found, expected, strict=True):
            _is_beginning(draft, result, results)


def _ending(rng: random.Random) -> dict[str, Any]:
    if rng.random() < 0.5:
        return {}
    stops = frozenset(rng.sample(range(24), 4))
    return rng.choice(
        (
            {"stop_token_ids": stops},
            {"stop_token_ids": stops, "min_tokens": 4},
            {"thinking_budget": ThinkingBudget(3, 2, 3, begun=True)},
        )
    )


def _is_beginning(draft: Draft, result: RowResult, expected: abc.Sequence[RowResult]) -> None:
    """Check that the result has the right drafts and one token more, or all expected tokens if
    there are no more.
    """
    if expected[0].token_id is None:
        assert result == expected[0]
        return
    tokens = [result.token_id, *result.more_token_ids]
    whole = [one.token_id for one in expected if one.token_id is not None]
    right = 0
    while right < min(len(draft.token_ids), len(whole)) and draft.token_ids[right] == whole[right]:
        right += 1
    assert tokens == whole[: right + 1]
    assert result.error is None
    merged = Logprobs(top_n=2)
    for one in expected[: len(tokens)]:
        assert one.logprobs is not None
        merged.extend(one.logprobs)
    assert result.logprobs is not None
    assert result.logprobs.chosen == pytest.approx(merged.chosen, abs=1e-6)
    assert result.logprobs.top_token_ids == merged.top_token_ids
    assert result.logprobs.ranks == merged.ranks


_OF_LETTERS = Constraint("regex", "[a-f]{2,4}-[0-9]{2}(ab|cd){4,12}")
_SET = {"type": "array", "uniqueItems": True, "items": {"enum": [1, 2, 3, 12]}, "minItems": 3}
_OF_SETS = Constraint(
    "json_schema", json.dumps({**_SET, "x-guidance": {"whitespace_pattern": " ?"}})
)


@pytest.mark.parametrize("constraint", [_OF_LETTERS, _OF_SETS], ids=lambda of: of.kind)
def test_a_constraint_is_followed_through_drafts(constraint: Constraint) -> None:
    rng = seeded("constrained drafts")
    for seed in range(budget(4, 100)):
        torch.manual_seed(rng.randrange(2**31))
        logits = torch.randn(_LENGTH, VOCAB_SIZE)

        def sequence(seed: int = seed) -> Sequence:
            compiler = two_ended_compiler()
            matcher = compiler.compile(constraint)
            distinct = compiler.distinct(constraint, matcher)
            made = {"matcher": matcher, "distinct": distinct, "constraint": constraint}
            return _request({"temperature": 1.0}, seed, **made)

        expected = _one_by_one(sequence(), logits)
        right = [result.token_id or 0 for result in expected]
        draft = Draft(sequence(), _drafted(rng, right, 6, VOCAB_SIZE), 0, 0)
        (found,) = verify(Drawer(MaskFiller(VOCAB_SIZE)), logits, [draft])
        _is_beginning(draft, found, expected)


def test_logits_that_are_no_numbers_are_an_error_when_they_come_first() -> None:
    logits = torch.zeros(3, 8)
    logits[:, 5] = 1.0
    logits[1] = float("nan")
    sequence = _request({"temperature": 0.0}, 0)
    (result,) = verify(Drawer(), logits, [Draft(sequence, [5, 5], 0, 0)])
    assert (result.token_id, result.more_token_ids, result.error) == (5, [], None)
    (result,) = verify(Drawer(), logits[1:], [Draft(sequence, [5], 0, 0)])
    assert result.token_id is None
    assert result.error == "the model gave no finite logits at output position 0"


def test_where_a_constraint_leaves_nothing_behind_right_drafts_the_error_says_so() -> None:
    constraint = Constraint("regex", "[ab]c[de]f")
    a, c = (ids_of(two_ended_compiler(), text)[0] for text in "ac")
    matcher = two_ended_compiler().compile(constraint)
    sampling = {"temperature": 0.0, "allowed_token_ids": (a, c)}
    sequence = _request(sampling, 0, constraint=constraint, matcher=matcher)
    sampler = Drawer(MaskFiller(VOCAB_SIZE))
    logits = torch.zeros(4, VOCAB_SIZE)
    (found,) = verify(sampler, logits, [Draft(sequence, [a, c, c], 0, 0)])
    assert (found.token_id, found.more_token_ids, found.error) == (a, [c], None)
    sequence.token_ids.extend([a, c])
    (found,) = verify(sampler, logits, [Draft(sequence, [], 2, 0)])
    assert found.is_callers
    assert found.error == "the sampling parameters leave no token to draw at output position 2"


# ---- through the engine ----


def _prompts() -> list[list[int]]:
    rng = random.Random(5)
    phrases = [[rng.randrange(3, 380) for _ in range(6)] for _ in range(3)]
    return [
        [token for _ in range(6) for token in rng.choice(phrases)] + phrases[i % 3][: 1 + i % 4]
        for i in range(6)
    ]


def _samplings() -> list[EngineSampling]:
    return [
        EngineSampling(temperature=0.0),
        EngineSampling(temperature=0.0, repetition_penalty=1.05, penalty_window_tokens=5),
        EngineSampling(temperature=0.3, seed=7),
        EngineSampling(temperature=0.0),
        EngineSampling(temperature=0.6, top_p=0.8, seed=9, bad_words=((5,), (9, 10))),
        EngineSampling(temperature=0.0, allowed_token_ids=tuple(range(20, 30))),
    ]


def _generate(
    runner: ModelRunner, drafter: Drafter | None, num_blocks: int = 40
) -> tuple[dict[str, list[int]], dict[str, Logprobs], Engine]:
    info = runner.info
    blocks = BlockManager.of(with_blocks(info, num_blocks), 40)
    scheduler = create_scheduler(SchedulerLimits(6, 40), blocks, drafter)
    engine = Engine(runner, scheduler, blocks)
    logprobs: dict[str, Logprobs] = {}
    for number, (prompt, sampling) in enumerate(zip(_prompts(), _samplings(), strict=True)):
        name = str(number)
        sequence = make_sequence(prompt, sampling, max_tokens=30, logprobs=1, request_id=name)
        logprobs[name] = Logprobs(top_n=1)
        engine.submit(sequence.request)
    sequences = scheduler.sequences
    for _ in range(3000):
        if not engine.has_work:
            break
        for output in engine.step():
            assert output.error is None
            if output.logprobs is not None:
                assert len(output.logprobs.chosen) == len(output.token_ids)
                logprobs[output.request_id].extend(output.logprobs)
        engine.check_integrity()
    assert blocks.num_referenced == 0
    outputs = {r.request.request_id: r.token_ids[r.num_prompt_tokens :].tolist() for r in sequences}
    return outputs, logprobs, engine


@pytest.mark.parametrize(
    ("family", "max_steps_ahead"),
    [
        in_soak("llama", 0),
        ("llama", 1),
        in_soak("gemma2", 0),
        ("gemma2", 1),
        ("gpt2", 0),
        in_soak("gpt2", 1),
    ],
)
def test_an_engine_with_drafts_gives_the_tokens_of_one_without(
    family: str, max_steps_ahead: int, model_dir: Callable[[str], Path]
) -> None:
    loaded = load(model_dir(family), kv_blocks=40, max_model_len=200)
    info = dataclasses.replace(loaded.info, max_steps_ahead=max_steps_ahead)
    expected, expected_logprobs, plain = _generate(make_runner(loaded.model, info), None)
    foresee = named(expected)
    rng = seeded("engine drafts")
    for drafter in (Drafter(4), Oracle(4, foresee), FickleOracle(5, foresee, rng, 384)):
        found, logprobs, engine = _generate(make_runner(loaded.model, info), drafter)
        assert found == expected
        assert 0 < drafter.accepted_total <= drafter.proposed_total
        if type(drafter) is Oracle:
            assert engine.steps_total < plain.steps_total
        for name, own in expected_logprobs.items():
            assert logprobs[name].chosen == pytest.approx(own.chosen, abs=1e-4)
            assert logprobs[name].ranks == own.ranks


@pytest.mark.parametrize("max_steps_ahead", [0, 1])
def test_drafts_under_a_small_cache_give_the_same_tokens(
    max_steps_ahead: int, model_dir: Callable[[str], Path]
) -> None:
    loaded = load(model_dir("llama"), kv_blocks=16, max_model_len=120)
    info = dataclasses.replace(loaded.info, max_steps_ahead=max_steps_ahead)
    expected, _, _ = _generate(make_runner(loaded.model, info), None, 16)
    foresee = named(expected)
    drafter = FickleOracle(5, foresee, seeded("small cache drafts"), 384)
    found, _, engine = _generate(make_runner(loaded.model, info), drafter, 16)
    assert found == expected
    assert engine.load().counts["preemptions_total"] > 0
