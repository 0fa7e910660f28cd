"""The parts of benchmarks/agents.py that are not processes: what agents send, the simulation."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache, partial
from pathlib import Path

import pytest
from simulation.policies import SimulatedFleet

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks import agents
from benchmarks.agents_bench import real
from benchmarks.agents_bench.figures import Request, figures_of
from benchmarks.agents_bench.found import found_by_all, steps_of
from benchmarks.agents_bench.simulated import ONE_SHARD, Agents, Gpu, OneShard, capacity, run
from benchmarks.agents_bench.trace import (
    Habits,
    Session,
    Text,
    Turn,
    samples,
    sessions,
    token_ids,
    words,
)
from penstock_client.load_balancing.policies import POLICIES, make_policy

# Small enough for a fraction of a second, with many subagents.
_HABITS = Habits(
    systems=3,
    least_system_tokens=150,
    most_system_tokens=400,
    task_tokens=40,
    turns=5,
    answer_tokens=6,
    result_tokens=40,
    pause_s=0.5,
    branches=0.2,
    subagent_turns=2,
    most_tokens=2_000,
)
_GPU = Gpu(kv_tokens=6_000, block_size=16)
_SHARDS = 3
_RULES = (*POLICIES, ONE_SHARD)


@cache
def _trace() -> list[Session]:
    return sessions(_HABITS, per_s=0.8, seconds=6.0)


# ---- The trace -----------------------------------------------------------------------------------


def test_equal_seeds_give_equal_traces() -> None:
    again, other = (sessions(_HABITS, per_s=0.8, seconds=6.0, seed=seed) for seed in (0, 1))
    assert again == _trace()
    assert other != _trace()


def test_a_session_is_the_same_at_every_rate() -> None:
    few, many = (
        [each for each in sessions(_HABITS, per_s=per_s, seconds=40.0) if not each.said]
        for per_s in (0.5, 1.0)
    )
    assert len(many) > len(few) >= 5
    for slow, fast in zip(few, many, strict=False):
        assert (slow.name, slow.turns) == (fast.name, fast.turns)
        assert slow.start_s == pytest.approx(2 * fast.start_s)


def test_sessions_begin_as_often_as_is_said() -> None:
    begun = [each for each in sessions(_HABITS, per_s=1.0, seconds=400.0) if not each.said]
    assert len(begun) == pytest.approx(400, rel=0.15)
    assert all(0 <= each.start_s < 400 for each in begun)


def test_sessions_are_under_way_at_the_start() -> None:
    under_way = [each for each in sessions(_HABITS, per_s=2.0, seconds=1.0) if each.said]
    assert under_way
    for session in under_way:
        assert session.said[0] == session.system
        assert session.turns[0].pause_s == 0
        # The last that was said is an answer; then comes what a tool gave.
        assert session.said[-1].key.endswith(" answer")
        assert session.system not in session.turns[0].added


def test_prompts_grow_and_stay_within_the_bound() -> None:
    for session in samples(_HABITS, 100):
        assert session.turns[0].added[0] == session.system
        steps = list(steps_of(session))
        assert all(step.prompt_tokens > step.known_tokens for step in steps)
        assert all(
            step.prompt_tokens + step.turn.answer_tokens <= _HABITS.most_tokens for step in steps
        )
        own = [step for step in steps if step.turn in session.turns]
        lengths = [step.prompt_tokens for step in own]
        assert lengths == sorted(set(lengths))


def test_an_answers_last_token_is_computed_by_the_first_that_goes_on_from_there() -> None:
    result, task = Text("result", 20), Text("task", 9)
    subagent = (Turn((task,), 3, 0.0),)
    turns = (Turn((Text("system", 50), Text("task", 10)), 4, 0.0, (subagent,)),
             Turn((result,), 5, 1.0), Turn((Text("result", 5),), 1, 1.0))  # fmt: skip
    steps = list(steps_of(Session("s", 0.0, Text("system", 50), turns)))
    assert [(step.prompt_tokens, step.known_tokens) for step in steps] == [
        (60, 50),
        (73, 64),
        (84, 64),
        (94, 88),
    ]


def test_the_first_system_prompts_are_the_most_frequent() -> None:
    counts = Counter(session.system.key for session in samples(_HABITS, 600))
    assert [key for key, _ in counts.most_common()] == [f"0 system {rank}" for rank in range(3)]


def test_equal_keys_begin_alike_and_others_do_not() -> None:
    text, longer, other = Text("a", 40), Text("a", 60), Text("b", 40)
    assert token_ids(longer)[:40] == token_ids(text)
    assert words(longer).split()[:40] == words(text).split()
    assert token_ids(other)[:4] != token_ids(text)[:4]
    assert len(token_ids(text)) == len(words(text).split()) == 40


def test_subagents_have_tasks_of_their_own() -> None:
    tasks = [
        turns[0].added[0].key
        for session in samples(_HABITS, 50)
        for turn in session.turns
        for turns in turn.subagents
    ]
    assert len(tasks) == len(set(tasks)) > 50


# ---- The simulation ------------------------------------------------------------------------------


@cache
def _played(rule: str, to_s: float = math.inf) -> tuple[SimulatedFleet, Agents, list[Session]]:
    trace = _trace()
    make = OneShard if rule == ONE_SHARD else partial(make_policy, rule)
    fleet = SimulatedFleet(_SHARDS, make, _GPU.device())
    played = Agents(fleet, trace, _GPU.block_size)
    fleet.run_until(to_s)
    return fleet, played, trace


@pytest.mark.parametrize("rule", _RULES)
def test_every_turn_of_every_session_and_subagent_is_answered_once(rule: str) -> None:
    fleet, played, trace = _played(rule)
    asked = [turn for session in trace for turn in _all_turns(session.turns)]
    assert sorted(turn.answer_tokens for turn in asked) == sorted(
        len(answer.token_times_s) for answer in fleet.answers
    )
    assert played.num_ended == len(trace)
    assert all(request.is_ended for request in played.requests(0.0))


@pytest.mark.parametrize("rule", _RULES)
def test_no_request_finds_more_than_a_cache_that_forgets_nothing(rule: str) -> None:
    _, played, _ = _played(rule)
    for request in played.requests(0.0):
        assert request.cached_tokens is not None
        assert request.cached_tokens <= request.found_by_all < request.prompt_tokens


def test_requests_that_wait_at_the_end_are_counted_with_their_wait() -> None:
    fleet, played, _ = _played("round-robin", 4.0)
    requests = played.requests(0.0)
    assert len(requests) == len(fleet.answers)
    waiting = [each for each in requests if not each.is_ended]
    assert 0 < len(waiting) < len(requests)
    assert all(0 <= each.first_token_s <= 4.0 for each in requests)
    assert len(played.requests(2.0)) < len(requests)


def test_one_shard_with_room_for_all_finds_nearly_what_one_cache_would() -> None:
    gpu = dataclasses.replace(_GPU, kv_tokens=200_000)
    figures = run(ONE_SHARD, _trace(), gpu, _SHARDS, from_s=0.0, to_s=6.0)
    assert 0.9 <= figures.of_infinite <= 1.0
    assert run("round-robin", _trace(), gpu, _SHARDS, from_s=0.0, to_s=6.0).of_infinite < 0.9


def test_a_session_that_was_under_way_finds_what_was_said() -> None:
    said = (Text("s", 300), Text("answer", 20))
    session = Session("only", 1.0, said[0], (Turn((Text("result", 50),), 4, 0.0),), said)
    fleet = SimulatedFleet(_SHARDS, partial(make_policy, "prefix-affinity"), _GPU.device())
    played = Agents(fleet, [session], _GPU.block_size)
    fleet.run_until(math.inf)
    (request,) = played.requests(0.0)
    assert request.prompt_tokens == 370
    # All but the last token of the answer was computed: 319, and whole blocks of them.
    assert request.cached_tokens == request.found_by_all == 304


def test_equal_seeds_give_equal_figures() -> None:
    both = [run("prefix-affinity", _trace(), _GPU, 2, from_s=1.0, to_s=4.0) for _ in range(2)]
    assert both[0] == both[1]


def test_capacity_grows_with_shards_and_falls_with_what_a_step_takes() -> None:
    one = capacity(_HABITS, _GPU, 1)
    assert capacity(_HABITS, _GPU, 4) == pytest.approx(4 * one)
    assert capacity(_HABITS, dataclasses.replace(_GPU, step_s=0.04), 1) < one
    assert capacity(_HABITS, dataclasses.replace(_GPU, kv_tokens=60_000), 1) > one


def _all_turns(turns: Sequence[Turn]) -> Iterator[Turn]:
    for turn in turns:
        yield turn
        for subagent in turn.subagents:
            yield from _all_turns(subagent)


# ---- Figures, and the command line ---------------------------------------------------------------


def test_shares_are_of_the_prompts_that_began_and_times_of_all() -> None:
    begun = Request(100, 30, 60, 1.0, 0.5, is_ended=True)
    waiting = Request(500, None, 400, 9.0, 9.0, is_ended=False)
    figures = figures_of([begun, begun, waiting], 1.2)
    assert (figures.requests, figures.ended) == (3, 2)
    assert (figures.cached_share, figures.infinite_share) == (0.3, 0.6)
    assert figures.of_infinite == pytest.approx(0.5)
    assert (figures.first_token_p50_s, figures.first_token_p99_s) == (1.0, 9.0)
    assert (figures.queue_p50_s, figures.queue_p99_s) == (0.5, 9.0)


def test_figures_of_nothing_are_none() -> None:
    figures = figures_of([], math.nan)
    assert figures.requests == 0
    assert math.isnan(figures.of_infinite)
    assert math.isnan(figures.first_token_p99_s)
    assert figures.as_json()["of_infinite"] is None


@pytest.mark.parametrize(
    ("known", "prompt", "found"), [(0, 100, 0), (40, 100, 32), (96, 96, 80), (97, 97, 96)]
)
def test_whole_blocks_are_found_and_never_the_last_token(
    known: int, prompt: int, found: int
) -> None:
    assert found_by_all(known, prompt, 16) == found


def test_processes_have_smaller_agents_unless_flags_say_otherwise() -> None:
    args = agents.parse_args(["--real", "--turns", "7"])
    assert (args.turns, args.answer_tokens, args.shards) == (7, real.SMALL.answer_tokens, 3)
    assert ONE_SHARD not in args.rules
    assert agents.parse_args([]).answer_tokens == Habits().answer_tokens


@pytest.mark.parametrize(
    "argv",
    [
        ["--real", "--rules", ONE_SHARD],
        ["--real", "--loads", "60"],
        ["--real", "--step-s", "0.1"],
        ["--rate", "2"],
        ["--least-system-tokens", "20000"],
        ["--loads", "0"],
    ],
)
def test_what_makes_no_sense_is_refused(argv: list[str]) -> None:
    with pytest.raises(SystemExit):
        agents.parse_args(argv)
