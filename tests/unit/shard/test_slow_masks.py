"""Constraints whose masks take long: who waits for them, and where their outputs end."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

import pytest
from support.budget import budget, seeded
from support.compilers import EOS_IDS, allows, ids_of, new_compiler
from support.constrained_engines import ConstrainedEngine, constrained, tokens

from penstock_proto.engine_request import EngineRequest
from penstock_proto.errors import Code
from penstock_proto.types import Constraint
from penstock_shard.spec_decode.prompt_lookup import Drafter
from penstock_shard.structured_output import matcher_state, pace
from penstock_shard.structured_output.compiler import Compiler
from penstock_shard.structured_output.matcher_state import ConstraintState
from penstock_shard.structured_output.pace import SLOW_S, Pace
from penstock_shard.structured_output.refusal import ConstraintRefused

# Any text of these letters is an `e` in as many ways as there are trees over it.
AMBIGUOUS = Constraint("grammar", 'start: e\ne: e e | "a" | "b" | " " | e "c" e\n')
JSON = Constraint(
    "json_schema",
    json.dumps(
        {
            "type": "object",
            "properties": {
                "kinds": {"type": "array", "uniqueItems": True, "items": {"enum": ["a", "b"]}},
                "n": {"type": "integer"},
            },
            "required": ["kinds", "n"],
            "additionalProperties": False,
        }
    ),
)
WORDS = Constraint("regex", "([a-f]{2,6} ?){5,30}[.]")


# ---- Where an ambiguous grammar ends -------------------------------------------------------------


def _ambiguous(seed: int, output: list[int] | None = None) -> EngineRequest:
    return constrained(f"r{seed}", AMBIGUOUS, seed=seed, output=output or [], max_tokens=1000)


def test_an_ambiguous_grammar_ends_before_a_token_costs_much() -> None:
    [outputs] = ConstrainedEngine().run(_ambiguous(1)).values()
    assert 20 < len(tokens(outputs)) < 400
    assert outputs[-1].error is not None
    # Nobody else is the cause: it is not tried again.
    assert outputs[-1].error.code is Code.OUT_OF_RANGE
    assert "too much of it fits what is written so far" in outputs[-1].error.message


def test_it_ends_at_the_same_token_wherever_it_is_taken_up_and_whoever_runs_beside_it() -> None:
    random = seeded("cuts of ambiguous outputs")
    for seed in range(budget(2, 20)):
        [alone] = ConstrainedEngine().run(_ambiguous(seed)).values()
        whole = tokens(alone)
        others = [constrained(f"j{i}", JSON, seed=i) for i in range(4)]
        beside = ConstrainedEngine().run(_ambiguous(seed), *others)[f"r{seed}"]
        assert tokens(beside) == whole
        for cut in {1, len(whole) - 1, *(random.randrange(len(whole)) for _ in range(3))}:
            compiler = new_compiler(eos_token_ids=EOS_IDS)
            taken_up = _ambiguous(seed, whole[:cut])
            [rest] = ConstrainedEngine(compiler=compiler).run(taken_up).values()
            assert whole[:cut] + tokens(rest) == whole


def test_who_takes_up_all_of_it_hears_that_it_is_too_much_and_not_that_it_is_wrong() -> None:
    [outputs] = ConstrainedEngine().run(_ambiguous(1)).values()
    [again] = ConstrainedEngine().run(_ambiguous(1, tokens(outputs))).values()
    error = again[-1].error
    assert error is not None
    assert error.code is Code.OUT_OF_RANGE
    assert "too much of it fits what is written so far" in error.message


def test_an_engine_refuses_at_once_what_has_too_many_beginnings() -> None:
    rules = "\n".join(f'r{n}: "a" r{n} | "b"' for n in range(300))
    alternatives = " | ".join(f"r{n}" for n in range(300))
    with pytest.raises(ConstraintRefused, match="grammar: too much of it fits"):
        new_compiler().compile(Constraint("grammar", f"start: {alternatives}\n{rules}"))


def test_a_structural_tag_around_an_ambiguous_grammar_ends_as_soon() -> None:
    content = {"type": "grammar", "grammar": AMBIGUOUS.value}
    tag = {"type": "tag", "begin": "<", "content": content, "end": ">"}
    constraint = Constraint("structural_tag", json.dumps({"type": "structural_tag", "format": tag}))
    compiler = new_compiler()
    matcher = compiler.compile(constraint)
    count = 0
    matcher.consume_tokens(ids_of(compiler, "<"))
    while not matcher.is_error() and count < 1000:
        matcher.compute_bitmask()
        matcher.consume_tokens(ids_of(compiler, "a"))
        count += 1
    assert 50 < count < 400


def _alike(count: int) -> Constraint:
    """Objects of many kinds, which begin alike and hold each other."""
    link = {"$ref": "#/$defs/e"}
    kinds: list[dict[str, Any]] = [
        {
            "type": "object",
            "properties": {"a": link, f"b{n}": {"type": "integer"}},
            "required": ["a"],
            "additionalProperties": False,
        }
        for n in range(count)
    ]
    union = {"anyOf": [*kinds, {"type": "integer"}]}
    return Constraint("json_schema", json.dumps({"$defs": {"e": union}, **link}))


def _consuming_s(compiler: Compiler, constraint: Constraint, text: str) -> float:
    """Return the seconds of processor time of the slowest token: the least of three tries."""
    worst = []
    for _ in range(3):
        matcher, slowest_s = compiler.compile(constraint), 0.0
        for token_id in ids_of(compiler, text):
            matcher.compute_bitmask()
            before_s = time.thread_time()
            assert matcher.consume_token(token_id)
            slowest_s = max(slowest_s, time.thread_time() - before_s)
        worst.append(slowest_s)
    return min(worst)


def test_a_token_before_a_wide_union_costs_its_width_and_not_that_cubed() -> None:
    compiler, text = new_compiler(), '{"a":{"a":1}}'
    narrow_s = _consuming_s(compiler, _alike(50), text)
    # The cube would be 33 times as much.
    assert _consuming_s(compiler, _alike(160), text) < 15 * max(narrow_s, 1e-4)


def test_a_wide_union_may_have_alternatives_that_no_value_meets() -> None:
    never = {"allOf": [{"type": "string"}, {"type": "integer"}]}
    kinds = [{"const": [n]} for n in range(100)]
    schema = {"type": "array", "items": {"anyOf": [never, *kinds, never]}}
    assert allows(new_compiler(), Constraint("json_schema", json.dumps(schema)), "[[3],[99]]")


def test_a_choice_may_have_thousands_of_options() -> None:
    options = tuple(f"option {n} of many" for n in range(5000))
    compiler = new_compiler()
    matcher = compiler.compile(Constraint("choice", options=options))
    assert matcher.consume_tokens(ids_of(compiler, "option 4321 of many"))
    assert matcher.is_accepting()


# ---- Who waits -----------------------------------------------------------------------------------


@pytest.fixture
def all_are_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit of time that makes each mask count as slow."""
    monkeypatch.setattr(pace, "SLOW_S", -1.0)
    monkeypatch.setattr(matcher_state, "SLOW_S", -1.0)


def _outputs(engine: ConstrainedEngine) -> dict[str, list[int]]:
    requests = [
        constrained(f"r{seed}", constraint, seed=seed, max_tokens=60)
        for seed, constraint in enumerate([JSON, WORDS, AMBIGUOUS] * 3)
    ]
    plain = [constrained(f"p{seed}", None, seed=seed, max_tokens=40) for seed in range(3)]
    return {name: tokens(outputs) for name, outputs in engine.run(*requests, *plain).items()}


@pytest.fixture(scope="module")
def at_ordinary_pace() -> dict[str, list[int]]:
    return _outputs(ConstrainedEngine())


@pytest.mark.usefixtures("all_are_slow")
@pytest.mark.parametrize("num_blocks", [512, 14])
@pytest.mark.parametrize("drafts", [0, 3])
def test_tokens_are_the_same_however_slow_masks_are(
    at_ordinary_pace: dict[str, list[int]], num_blocks: int, drafts: int
) -> None:
    drafter = Drafter(drafts) if drafts else None
    engine = ConstrainedEngine(num_blocks=num_blocks, drafter=drafter)
    assert _outputs(engine) == at_ordinary_pace
    if num_blocks < 100:
        assert engine.under_test.scheduler.preemptions_total


class _Held(Executor):
    """Does nothing until it is told to."""

    def __init__(self) -> None:
        self.work: list[tuple[Future[Any], Callable[[], Any]]] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.work.append((future, lambda: fn(*args, **kwargs)))
        return future

    def do(self) -> None:
        work, self.work = self.work, []
        for future, do in work:
            if future.set_running_or_notify_cancel():
                future.set_result(do())


@pytest.mark.usefixtures("all_are_slow")
def test_no_step_waits_for_a_mask_that_is_not_there() -> None:
    threads = _Held()
    engine = ConstrainedEngine(slow_threads=threads)
    under_test = engine.under_test
    under_test.engine.submit(constrained("slow", WORDS, max_tokens=20))
    while not under_test.tokens("slow"):
        under_test.step()
    under_test.engine.submit(constrained("plain", None, max_tokens=30))
    while len(under_test.tokens("plain")) < 30:
        under_test.step()
    # It has the tokens whose steps were launched before any mask was seen to be slow.
    before = len(under_test.tokens("slow"))
    assert before < 4
    # While its mask is not there, there is nothing to do.
    assert not under_test.engine.has_work
    while not under_test.endings("slow"):
        if not under_test.engine.has_work:
            assert len(threads.work) == 1
            threads.do()
        under_test.step()
    assert len(under_test.tokens("slow")) > before


@pytest.mark.usefixtures("all_are_slow")
def test_an_abort_reaches_a_sequence_that_waits_for_its_mask() -> None:
    threads = _Held()
    engine = ConstrainedEngine(slow_threads=threads)
    under_test = engine.under_test
    under_test.engine.submit(constrained("slow", WORDS, max_tokens=20))
    while under_test.engine.has_work or not under_test.tokens("slow"):
        under_test.step()
    under_test.engine.abort("slow", 0)
    under_test.step()
    assert [output.finish_reason for output in under_test.endings("slow")]
    threads.do()
    assert not under_test.engine.has_work
    under_test.engine.check_integrity()


# ---- The pace ------------------------------------------------------------------------------------


def test_a_constraint_is_slow_for_a_while_after_a_slow_mask_and_longer_each_time() -> None:
    own, lengths = Pace(), []
    assert not own.is_slow
    for _ in range(12):
        own.learn(2 * SLOW_S)
        count = 0
        while own.is_slow:
            own.learn(SLOW_S / 2)
            count += 1
        lengths.append(count)
    assert lengths == [min(16 * 2**n, 4096) for n in range(12)]


def test_sequences_of_one_constraint_share_its_pace() -> None:
    compiler = new_compiler()
    compiler.compile(WORDS)
    assert compiler.pace(WORDS) is compiler.pace(WORDS)
    assert compiler.pace(WORDS) is not compiler.pace(JSON)


def test_a_slow_mask_in_a_step_is_found_among_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the slow constraint waits aside from then on."""
    for module in (pace, matcher_state):
        monkeypatch.setattr(module, "SLOW_S", SLOW_S / 4)
    compiler = new_compiler()
    filler = matcher_state.MaskFiller(compiler.tokenizer.vocab_size)
    quick = [_state(compiler.compile(JSON)) for _ in range(3)]
    slow = _state(compiler.compile(AMBIGUOUS))
    letter = ids_of(compiler, "a")
    while not slow.pace.is_slow:
        for state in (*quick, slow):
            state.mask = None
        filler.fill([*quick, slow])
        assert not slow.error
        slow.append(letter[0])
    assert not any(state.pace.is_slow for state in quick)


def _state(matcher: Any) -> ConstraintState:
    return ConstraintState(constrained("r", AMBIGUOUS), matcher)
