"""Constraints in the engine: compiled off the loop, followed at each token, gone on with."""

from __future__ import annotations

import dataclasses
import json
import threading
from collections import abc
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

import msgspec
import pytest
from llguidance import LLMatcher
from support.budget import budget, seeded
from support.compilers import (
    EOS_IDS,
    LIMITS,
    VOCAB_SIZE,
    ids_of,
    new_compiler,
    tokenizer_json,
    two_ended_compiler,
)
from support.constrained_engines import ConstrainedEngine, constrained, text, tokens

from penstock_proto.engine_request import EngineRequest
from penstock_proto.errors import Code
from penstock_proto.types import Constraint, FinishReason, ThinkingBudget
from penstock_shard.engine.matchers import PendingMatchers
from penstock_shard.sequence import Sequence
from penstock_shard.structured_output.compiler import Compiler
from penstock_shard.structured_output.following import Discarded, compiling_threads
from penstock_shard.structured_output.pace import Pace
from penstock_shard.structured_output.refusal import ConstraintRefused

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "sizes": {"type": "array", "items": {"type": "integer", "maximum": 99}, "maxItems": 3},
        "kind": {"enum": ["router", "shard"]},
    },
    "required": ["name", "sizes", "kind"],
    "additionalProperties": False,
}
JSON = Constraint("json_schema", json.dumps({**SCHEMA, "x-guidance": {"whitespace_pattern": " ?"}}))
# Items and names that must differ, and by chance often would not.
SETS = Constraint(
    "json_schema",
    json.dumps(
        {
            "type": "object",
            "properties": {
                "kinds": {
                    "type": "array",
                    "uniqueItems": True,
                    "items": {"enum": ["a", "b", "ab"]},
                    "minItems": 3,
                },
                "on": {"type": "array", "uniqueItems": True, "items": {"type": "boolean"}},
            },
            "required": ["kinds", "on"],
            "propertyNames": {"maxLength": 5},
            "additionalProperties": {"type": "boolean"},
            "maxProperties": 5,
            "x-guidance": {"whitespace_pattern": " ?"},
        }
    ),
)
LANGUAGES = [
    JSON,
    Constraint("regex", "[a-f]{3,9}-[0-9]{2}"),
    Constraint("choice", options=("left", "right", "neither of both")),
    Constraint("grammar", 'start: item ("," item)*\nitem: /[a-z]{1,4}/ "=" /[0-9]{1,3}/'),
    SETS,
]


@pytest.mark.parametrize("constraint", LANGUAGES, ids=lambda c: c.kind)
def test_an_output_is_of_its_constraints_language(constraint: Constraint) -> None:
    engine = ConstrainedEngine()
    requests = [constrained(f"r{seed}", constraint, seed=seed) for seed in range(8)]
    for outputs in engine.run(*requests).values():
        matcher = two_ended_compiler().compile(constraint)
        given = tokens(outputs)
        if outputs[-1].finish_reason is FinishReason.STOP:
            given = given[:-1]
        assert matcher.consume_tokens(given)
        assert outputs[-1].finish_reason is FinishReason.LENGTH or matcher.is_accepting()


def test_what_the_schema_allows_is_json_that_has_its_fields() -> None:
    engine = ConstrainedEngine()
    for outputs in engine.run(*[constrained(f"r{i}", JSON, seed=i) for i in range(8)]).values():
        assert outputs[-1].finish_reason is FinishReason.STOP
        value = json.loads(text(outputs))
        assert set(value) == {"name", "sizes", "kind"}
        assert value["kind"] in ("router", "shard")


def test_items_of_a_set_are_not_drawn_twice_whoever_runs_beside_it() -> None:
    requests = [constrained(f"r{i}", SETS, seed=i) for i in range(budget(16, 200))]
    requests += [constrained(f"j{i}", JSON, seed=i) for i in range(4)]
    for name, outputs in ConstrainedEngine().run(*requests).items():
        if name.startswith("r") and outputs[-1].finish_reason is FinishReason.STOP:
            value = json.loads(text(outputs))
            assert sorted(value["kinds"]) == ["a", "ab", "b"]
            assert len(set(value["on"])) == len(value["on"])


def test_a_request_taken_up_anywhere_in_its_constraint_gives_the_rest() -> None:
    random = seeded("cuts in constrained outputs")
    for seed in range(budget(3, 30)):
        constraint = random.choice(LANGUAGES)
        [outputs] = ConstrainedEngine().run(constrained("r", constraint, seed=seed)).values()
        whole = tokens(outputs)
        for cut in sorted({1, len(whole) - 1, *(random.randrange(len(whole)) for _ in range(4))}):
            again = constrained("r", constraint, seed=seed, output=whole[:cut])
            [rest] = ConstrainedEngine().run(again).values()
            assert whole[:cut] + tokens(rest) == whole


@pytest.mark.parametrize("constraint", [JSON, SETS])
def test_requests_that_are_preempted_stay_in_their_constraints(constraint: Constraint) -> None:
    plenty, scarce = ConstrainedEngine(), ConstrainedEngine(num_blocks=12)
    requests = [constrained(f"r{i}", constraint, seed=i, max_tokens=120) for i in range(8)]
    again = [constrained(f"r{i}", constraint, seed=i, max_tokens=120) for i in range(8)]
    expected = {name: tokens(outputs) for name, outputs in plenty.run(*requests).items()}
    assert {name: tokens(o) for name, o in scarce.run(*again).items()} == expected
    assert scarce.under_test.scheduler.preemptions_total > 0


def test_an_output_that_the_constraint_does_not_allow_is_refused_as_that() -> None:
    [outputs] = ConstrainedEngine().run(constrained("r", JSON, output=[500, 501])).values()
    [ending] = outputs
    assert ending.error is not None
    assert (ending.error.code, ending.error.field) == (3, "output_token_ids")


def test_a_constraint_that_cannot_be_compiled_ends_its_request_alone() -> None:
    engine = ConstrainedEngine()
    said = engine.run(
        constrained("bad", Constraint("regex", "((")), constrained("good", LANGUAGES[1])
    )
    [ending] = said["bad"]
    assert ending.error is not None
    assert (ending.error.code, ending.error.field) == (3, "regex")
    assert said["good"][-1].finish_reason is FinishReason.STOP


def test_a_stop_id_of_the_request_may_come_where_the_constraint_may_end() -> None:
    engine = ConstrainedEngine()
    request = constrained("r", Constraint("regex", "[ab]{3}"), stop_token_ids=[700, *EOS_IDS])
    [outputs] = engine.run(request).values()
    assert outputs[-1].stop_token_id in (700, *EOS_IDS)
    letters = Constraint("regex", "[ab]{3}")
    early = constrained("r", letters, stop_token_ids=[700], reluctant=EOS_IDS)
    [outputs] = engine.run(early).values()
    assert outputs[-1].stop_token_id == 700


def test_what_should_not_end_an_output_ends_it_only_where_nothing_else_is_left() -> None:
    # The shortest text has one token, and the eos may follow each.
    open_end = Constraint("regex", "[ab]*")
    engine = ConstrainedEngine()
    [outputs] = engine.run(constrained("r", open_end, max_tokens=40, reluctant=EOS_IDS)).values()
    assert (outputs[-1].finish_reason, len(tokens(outputs))) == (FinishReason.LENGTH, 40)
    [outputs] = engine.run(constrained("r", open_end, max_tokens=40, min_tokens=30)).values()
    assert len(tokens(outputs)) >= 30
    closed = Constraint("regex", "[ab]{3}")
    [outputs] = engine.run(constrained("r", closed, reluctant=EOS_IDS, min_tokens=300)).values()
    assert outputs[-1].finish_reason is FinishReason.STOP
    assert set(text(outputs)) <= set("ab")


def test_an_eos_that_is_ignored_ends_what_is_complete_and_nothing_before() -> None:
    engine = ConstrainedEngine()
    closed, open_end = Constraint("regex", "[ab]{3}"), Constraint("regex", "[ab]*")
    for stop_token_ids in ([], [700]):
        request = constrained(
            "r", closed, stop_token_ids=stop_token_ids, reluctant=EOS_IDS, min_tokens=300
        )
        [outputs] = engine.run(request).values()
        assert outputs[-1].finish_reason is FinishReason.STOP
        assert outputs[-1].stop_token_id in (*stop_token_ids, *EOS_IDS)
        assert len(text(outputs[:-1])) == 3
        request = constrained(
            "r", open_end, stop_token_ids=stop_token_ids, reluctant=EOS_IDS, min_tokens=30
        )
        [outputs] = engine.run(request).values()
        assert len(tokens(outputs)) >= 30
        assert not set(EOS_IDS) & set(tokens(outputs))


class _Unwatched:
    """A compiler of matchers only."""

    def distinct(self, constraint: Constraint, beginning: object) -> None:
        return None

    def pace(self, constraint: Constraint) -> Pace:
        return Pace()


class _Panic(BaseException):
    """An error as the library raises it: of a class that nobody foresees."""


def test_whatever_goes_wrong_with_a_constraint_ends_its_request_alone() -> None:
    class Broken(_Unwatched):
        def compile(self, constraint: Constraint, *, goes_on: bool = False) -> object:
            if constraint.kind == "regex":
                raise _Panic("index out of bounds")
            return two_ended_compiler().compile(constraint)

    engine = ConstrainedEngine(compiler=Broken())  # type: ignore[arg-type]
    said = engine.run(constrained("bad", LANGUAGES[1]), constrained("good", LANGUAGES[2]))
    [ending] = said["bad"]
    assert ending.error is not None
    assert (ending.error.code, ending.error.field) == (13, "regex")
    assert said["good"][-1].finish_reason is FinishReason.STOP


def test_a_long_output_that_is_gone_on_with_holds_up_no_step() -> None:
    taken: list[int] = []
    masked: list[int] = []

    class Counted:
        def deep_copy(self) -> Counted:
            return self

        def consume_token(self, token_id: int) -> bool:
            taken.append(token_id)
            return True

        def compute_bitmask(self) -> None:
            masked.append(len(taken))

        def is_error(self) -> bool:
            return False

    class Counting(_Unwatched):
        def compile(self, constraint: Constraint, *, goes_on: bool = False) -> object:
            return Counted()

    matchers = PendingMatchers(Counting(), lambda: None, compiling_threads(1))  # type: ignore[arg-type]
    request = Sequence.of(constrained("r", JSON, output=[500] * 2001))
    matchers.add(request)
    while len(matchers):
        for _, error in matchers.take():
            assert error is None
    # One by one, as the interpreter is held meanwhile; and its work is bounded from mask to mask.
    assert taken == [500] * 2001
    assert masked == [*range(0, 2001, 16), 2001]


def test_an_abort_reaches_a_request_whose_constraint_is_being_compiled() -> None:
    held, entered = threading.Event(), threading.Event()

    class Slow(_Unwatched):
        def compile(self, constraint: Constraint, *, goes_on: bool = False) -> object:
            entered.set()
            assert held.wait(60)
            return two_ended_compiler().compile(constraint)

    engine = ConstrainedEngine(compiler=Slow())  # type: ignore[arg-type]
    under_test = engine.under_test
    under_test.engine.submit(constrained("slow", JSON))
    assert entered.wait(60)
    # Nothing waits for a step meanwhile, and others run.
    assert not under_test.engine.has_work
    under_test.engine.submit(constrained("other", None, max_tokens=5))
    under_test.run()
    assert len(under_test.tokens("other")) == 5
    under_test.engine.abort("slow", 0)
    under_test.step()
    held.set()
    [ending] = under_test.endings("slow")
    assert ending.finish_reason is FinishReason.ABORTED
    assert not under_test.engine.has_work


def test_what_is_refused_once_is_refused_again() -> None:
    for _ in range(2):
        with pytest.raises(ConstraintRefused, match="regex"):
            two_ended_compiler().compile(Constraint("regex", "(("))


# ---- Constraints that are much work --------------------------------------------------------------

# Of a text without spaces nobody knows how many words it has.
AMBIGUOUS = Constraint("regex", "([a-z]{2,6} ?){5,60}[.]")


def _ambiguous(seed: int, output: abc.Sequence[int] = ()) -> EngineRequest:
    return constrained(f"r{seed}", AMBIGUOUS, seed=seed, output=output, max_tokens=60)


def test_many_that_are_taken_up_at_once_do_not_wear_out_what_they_share() -> None:
    seeds = range(48)
    requests = [_ambiguous(seed) for seed in seeds]
    wholes = {name: tokens(o) for name, o in ConstrainedEngine().run(*requests).items()}
    begun = {name: whole[:-2] for name, whole in wholes.items()}
    again = [_ambiguous(seed, begun[f"r{seed}"]) for seed in seeds]
    # As after a crash: no step has made masks of this constraint yet.
    rests = ConstrainedEngine(compiler=new_compiler(eos_token_ids=EOS_IDS)).run(*again)
    assert {name: begun[name] + tokens(o) for name, o in rests.items()} == wholes


def _wear_out(begin: Callable[[], LLMatcher], compiler: Compiler) -> None:
    """Wear out the lexer that all matchers of `begin` share. The outputs are followed without a
    mask, and so need more than is allowed between two masks.
    """
    random = seeded("words")
    matcher = begin()
    while not matcher.is_error():
        matcher = begin()
        words = ("".join(random.choices("abcdefgh", k=random.randint(2, 6))) for _ in range(50))
        text = "".join(word + random.choice(["", " "]) for word in words)
        matcher.consume_tokens(ids_of(compiler, text))


def test_what_one_output_wears_out_the_next_request_does_not_meet() -> None:
    compiler = new_compiler(eos_token_ids=EOS_IDS)
    _wear_out(compiler.compile(AMBIGUOUS).deep_copy, compiler)
    for _ in range(2):
        [outputs] = ConstrainedEngine(compiler=compiler).run(_ambiguous(1)).values()
        assert outputs[-1].error is None


@pytest.mark.parametrize("ends", [False, True])
def test_an_output_is_followed_no_further_when_its_request_has_ended(ends: bool) -> None:
    class Begun(Executor):
        """Runs its work when told to, too late to cancel."""

        def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
            self.future: Future[Any] = Future()
            self.future.set_running_or_notify_cancel()
            self.run = lambda: fn(*args, **kwargs)
            return self.future

    letters = Constraint("regex", "[a-f]{3,90}")
    output = ids_of(two_ended_compiler(), "abc" * 9)
    request = Sequence.of(constrained("r", letters, output=output))
    threads = Begun()
    matchers = PendingMatchers(two_ended_compiler(), lambda: None, threads)
    matchers.add(request)
    if ends:
        assert matchers.discard(request)
        with pytest.raises(Discarded):
            threads.run()
    else:
        assert not threads.run().error


def test_what_is_worn_out_while_an_output_is_followed_costs_that_output_nothing() -> None:
    class WornOutAtOnce(Compiler):
        def compile(self, constraint: Constraint, *, goes_on: bool = False) -> LLMatcher:
            matcher = super().compile(constraint, goes_on=goes_on)
            _wear_out(matcher.deep_copy, self)
            return matcher

    [outputs] = ConstrainedEngine().run(_ambiguous(1)).values()
    whole = tokens(outputs)
    compiler = WornOutAtOnce(tokenizer_json({}), VOCAB_SIZE, EOS_IDS, LIMITS)
    [rest] = ConstrainedEngine(compiler=compiler).run(_ambiguous(1, whole[:30])).values()
    assert whole[:30] + tokens(rest) == whole


def test_however_many_wear_a_constraint_out_together_none_is_long_given_back_in_vain() -> None:
    # Few places for what each of them has to find out, enough for any one.
    limits = dataclasses.replace(LIMITS, memory_bytes=3000 * 2048)
    endless = Constraint("regex", ".*(a|b).{30}c.*")
    engine = ConstrainedEngine(
        compiler=new_compiler(eos_token_ids=EOS_IDS, limits=limits), num_blocks=4096
    )
    begun: dict[str, list[int]] = {f"r{seed}": [] for seed in range(16)}
    in_vain = dict.fromkeys(begun, 0)
    rounds = 0
    while begun:
        rounds += 1
        again = [
            constrained(name, endless, seed=int(name[1:]), output=output, max_tokens=60)
            for name, output in begun.items()
        ]
        for name, outputs in engine.run(*again).items():
            if outputs[-1].error is None:
                del begun[name]
                continue
            assert outputs[-1].error.code == Code.UNAVAILABLE
            in_vain[name] += not tokens(outputs)
            begun[name] += tokens(outputs)
    assert rounds > 1
    # Its constraint may be worn out just when one gets it, and once more when it comes again: in
    # which order threads get it is chance. Whoever tries in vain goes on being tried alone.
    assert max(in_vain.values()) <= 3


def test_an_output_that_was_never_its_constraints_is_refused_without_another_compilation() -> None:
    compiled: list[Constraint] = []

    class Counting(Compiler):
        def compile_alone(self, constraint: Constraint) -> LLMatcher:
            compiled.append(constraint)
            return super().compile_alone(constraint)

    compiler = Counting(tokenizer_json({}), VOCAB_SIZE, EOS_IDS, LIMITS)
    engine = ConstrainedEngine(compiler=compiler)
    for _ in range(3):
        [[ending]] = engine.run(constrained("r", JSON, output=[500, 501])).values()
        assert ending.error is not None
        assert ending.error.field == "output_token_ids"
    assert compiled == [JSON]


def test_nobody_waits_for_the_long_output_of_a_request_that_was_aborted() -> None:
    followed, aborted = threading.Event(), threading.Event()
    taken: list[int] = []

    class Slow:
        def deep_copy(self) -> Slow:
            return self

        def compute_bitmask(self) -> None:
            followed.set()
            assert aborted.wait(60)

        def is_error(self) -> bool:
            return False

        def consume_tokens(self, token_ids: list[int]) -> bool:
            taken.extend(token_ids)
            return True

    class Handing(_Unwatched):
        def compile(self, constraint: Constraint, *, goes_on: bool = False) -> object:
            return Slow() if goes_on else two_ended_compiler().compile(constraint)

    engine = ConstrainedEngine(compiler=Handing())  # type: ignore[arg-type]
    engine.under_test.engine.submit(constrained("long", JSON, output=[500] * 4000))
    assert followed.wait(60)
    engine.under_test.engine.abort("long", 0)
    engine.under_test.step()
    engine.under_test.outputs.clear()
    aborted.set()
    [outputs] = engine.run(constrained("next", JSON)).values()
    assert outputs[-1].finish_reason is FinishReason.STOP
    assert len(taken) <= 16


def test_an_output_whose_constraint_another_wore_out_is_given_back_and_gone_on_with() -> None:
    [whole] = ConstrainedEngine().run(_ambiguous(1)).values()
    compiler = new_compiler(eos_token_ids=EOS_IDS)
    engine = ConstrainedEngine(compiler=compiler)
    engine.under_test.engine.submit(_ambiguous(1))
    while len(engine.under_test.tokens("r1")) < 20:
        engine.under_test.step()
    _wear_out(compiler.compile(AMBIGUOUS).deep_copy, compiler)
    engine.under_test.run()
    [ending] = engine.under_test.endings("r1")
    assert ending.error is not None
    assert ending.error.code == Code.UNAVAILABLE
    assert "given back" in ending.error.message
    begun = engine.under_test.tokens("r1")
    assert 20 <= len(begun) < 60
    engine.under_test.outputs.clear()
    [rest] = engine.run(_ambiguous(1, begun)).values()
    assert begun + tokens(rest) == tokens(whole)


def test_an_output_that_is_too_much_by_itself_is_told_so_where_it_is_taken_up() -> None:
    few_states = dataclasses.replace(LIMITS, memory_bytes=200 * 2048)
    engine = ConstrainedEngine(compiler=new_compiler(eos_token_ids=EOS_IDS, limits=few_states))
    given: list[int] = []
    error = None
    while error is None or error.code == Code.UNAVAILABLE:
        [outputs] = engine.run(_ambiguous(1, given)).values()
        # Each time it gets further, or hears why not.
        assert error is None or tokens(outputs) or outputs[-1].error != error
        given += tokens(outputs)
        error = outputs[-1].error
        assert error is not None
    assert 10 < len(given) < 60
    assert (error.code, error.field) == (Code.OUT_OF_RANGE, "regex")
    assert error.message.startswith("regex: cannot be followed any further")


# ---- Budgets of reasoning -----------------------------------------------------------------------

BEGIN, END = 600, 601


def _thinking(max_tokens: int, *, begun: bool = True, **options: object) -> EngineRequest:
    request = constrained("r", None, max_tokens=30, **options)  # type: ignore[arg-type]
    budget = ThinkingBudget(max_tokens, BEGIN, END, begun)
    return msgspec.structs.replace(request, thinking_budget=budget)


def test_reasoning_ends_when_its_budget_is_spent() -> None:
    for max_tokens in (0, 1, 7):
        [outputs] = ConstrainedEngine().run(_thinking(max_tokens)).values()
        assert tokens(outputs).index(END) == max_tokens


def test_a_budget_counts_what_was_delivered_before() -> None:
    [outputs] = ConstrainedEngine().run(_thinking(9)).values()
    whole = tokens(outputs)
    for cut in (1, 8, 9, 10, 20):
        [rest] = ConstrainedEngine().run(_thinking(9, output=whole[:cut])).values()
        assert whole[:cut] + tokens(rest) == whole


def test_reasoning_that_has_not_begun_has_no_end() -> None:
    [outputs] = ConstrainedEngine().run(_thinking(2, begun=False)).values()
    assert END not in tokens(outputs)
    request = _thinking(2, begun=False, output=[BEGIN])
    [outputs] = ConstrainedEngine().run(request).values()
    assert tokens(outputs)[2] == END


def test_an_end_of_reasoning_that_the_constraint_does_not_have_is_the_callers_mistake() -> None:
    request = constrained("r", Constraint("regex", "[a-z]{40,}"), max_tokens=30)
    budget = ThinkingBudget(3, BEGIN, END, True)
    request = msgspec.structs.replace(request, thinking_budget=budget)
    [outputs] = ConstrainedEngine().run(request).values()
    assert END not in tokens(outputs)
    assert outputs[-1].error is not None
    assert outputs[-1].error.code == 11
