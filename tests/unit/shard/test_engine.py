"""The engine over the fake runner: exact tokens, one ending each, aborts, deadlines, takeovers."""

from __future__ import annotations

from collections import deque

import msgspec
import pytest
from support.budget import budget, seeded
from support.engines import CACHE_GROUPS, EOS_ID, EngineUnderTest, make_engine, make_request
from support.scores import logprobs_of
from support.shadow import ShadowRunner

from penstock_proto.types import FinishReason, Objective, RequestOutput, Work
from penstock_shard.engine.engine import Engine
from penstock_shard.sequence import SequenceState
from penstock_shard.worker.base import RowResult


def _alone(prompt, **options) -> list[int]:
    under_test = make_engine(num_blocks=64, max_num_batched_tokens=512)
    under_test.engine.submit(make_request("r", prompt, **options))
    under_test.run()
    return under_test.tokens("r")


def test_a_request_ends_at_max_tokens_with_length() -> None:
    under_test = make_engine()
    under_test.engine.submit(make_request(max_tokens=5))
    under_test.run()
    assert len(under_test.tokens("r")) == 5
    (ending,) = under_test.endings("r")
    assert ending.finish_reason is FinishReason.LENGTH


def test_a_stop_id_ends_the_request_and_is_delivered() -> None:
    tokens = _alone((1, 2, 3), max_tokens=8)
    under_test = make_engine()
    under_test.engine.submit(make_request(max_tokens=8, stop_token_ids=[tokens[3]]))
    under_test.run()
    assert under_test.tokens("r") == tokens[:4]
    (ending,) = under_test.endings("r")
    assert (ending.finish_reason, ending.stop_token_id) == (FinishReason.STOP, tokens[3])


def test_positions_count_every_token_once() -> None:
    under_test = make_engine()
    under_test.engine.submit(make_request(max_tokens=6))
    under_test.run()
    positions = [output.first_position for output in under_test.outputs]
    assert positions == list(range(6))


def test_a_request_taken_up_with_its_output_so_far_gives_the_rest() -> None:
    whole = _alone(range(20), max_tokens=12, seed=7)
    for cut in (1, 5, 11):
        under_test = make_engine()
        under_test.engine.submit(
            make_request("r", range(20), output=whole[:cut], max_tokens=12, seed=7)
        )
        under_test.run()
        assert under_test.tokens("r") == whole[cut:]
        assert under_test.outputs[0].first_position == cut


def test_tokens_depend_on_nothing_but_the_request() -> None:
    rng = seeded("engine tokens")
    for _ in range(budget(10, 200)):
        prompts = {
            str(number): [rng.randrange(3) for _ in range(rng.randint(1, 90))]
            for number in range(rng.randint(2, 12))
        }
        under_test = make_engine(
            num_blocks=rng.randint(12, 30),
            max_model_len=160,
            max_num_seqs=rng.randint(1, 8),
            max_num_batched_tokens=rng.choice((8, 16, 64, 256)),
            cache_groups=rng.choice(CACHE_GROUPS),
        )
        for name, prompt in prompts.items():
            under_test.engine.submit(
                make_request(name, prompt, max_tokens=40, seed=int(name), logprobs=2)
            )
        under_test.run()
        for name, prompt in prompts.items():
            assert under_test.tokens(name) == _alone(prompt, max_tokens=40, seed=int(name))


def test_every_request_of_random_traffic_ends_exactly_once() -> None:
    rng = seeded("engine traffic")
    for _ in range(budget(10, 200)):
        under_test = make_engine(
            num_blocks=rng.randint(10, 24),
            max_model_len=160,
            max_num_seqs=rng.randint(1, 6),
            eos_rate=0.05,
            cache_groups=rng.choice(CACHE_GROUPS),
        )
        names = [str(number) for number in range(40)]
        for name in names:
            prompt = [rng.randrange(2) for _ in range(rng.randint(1, 100))]
            under_test.engine.submit(
                make_request(name, prompt, max_tokens=rng.randint(1, 50), seed=rng.randrange(9)),
            )
            if rng.random() < 0.3:
                under_test.engine.abort(rng.choice(names), 0)
            if rng.random() < 0.6:
                under_test.step()
        under_test.run()
        for name in names:
            assert len(under_test.endings(name)) == 1
        assert under_test.blocks.num_referenced == 0


def test_an_abort_frees_all_blocks_once_no_launched_step_needs_them() -> None:
    under_test = make_engine()
    under_test.engine.submit(make_request(prompt=range(100), max_tokens=50))
    under_test.step()
    assert under_test.blocks.num_referenced > 0
    under_test.engine.abort("r", 0)
    under_test.step()
    assert [o.finish_reason for o in under_test.endings("r")] == [FinishReason.ABORTED]
    assert under_test.blocks.num_referenced == 0


def test_blocks_of_an_aborted_request_stay_its_own_until_its_steps_are_collected() -> None:
    under_test = make_engine(num_blocks=8, max_model_len=128)
    under_test.engine.submit(make_request(prompt=range(60), max_tokens=50))
    under_test.step()
    under_test.engine.abort("r", 0)
    assert under_test.blocks.num_referenced == 4
    under_test.engine.submit(make_request("next", range(100, 200), max_tokens=2))
    under_test.step()
    under_test.run()
    assert under_test.tokens("next") == _alone(range(100, 200), max_tokens=2)


def test_an_abort_works_while_queued_and_in_the_middle_of_a_prompt() -> None:
    under_test = make_engine(max_num_seqs=1, max_num_batched_tokens=16)
    under_test.engine.submit(make_request("half-way", range(100)))
    under_test.engine.submit(make_request("queued", range(100)))
    under_test.step()
    under_test.engine.abort("queued", 0)
    under_test.engine.abort("half-way", 0)
    under_test.run()
    assert [o.finish_reason for o in under_test.outputs] == [FinishReason.ABORTED] * 2


def test_aborting_an_unknown_or_ended_id_does_nothing() -> None:
    under_test = make_engine()
    under_test.engine.abort("nobody", 0)
    under_test.engine.submit(make_request(max_tokens=1))
    under_test.run()
    under_test.engine.abort("r", 0)
    under_test.step()
    assert len(under_test.endings("r")) == 1


def test_a_higher_attempt_ends_the_lower_and_takes_over() -> None:
    under_test = make_engine()
    whole = _alone(range(20), max_tokens=10)
    under_test.engine.submit(make_request("r", range(20), max_tokens=10))
    for _ in range(4):
        under_test.step()
    under_test.engine.submit(
        make_request("r", range(20), output=whole[:2], max_tokens=10, attempt=1)
    )
    under_test.run()
    endings = {output.attempt: output.finish_reason for output in under_test.endings("r")}
    assert endings == {0: FinishReason.ABORTED, 1: FinishReason.LENGTH}
    second = [i for o in under_test.outputs if o.attempt == 1 for i in o.token_ids]
    assert second == whole[2:]


class _FailingRow:
    """Reports an error for one request and runs the others."""

    def __init__(self, under_test: EngineUnderTest, bad: str) -> None:
        runner = under_test.engine._runner
        assert isinstance(runner, ShadowRunner)
        self._runner = runner
        self._bad = bad
        self.info = self._runner.info
        self.adapters = self._runner.adapters
        self.images = self._runner.images
        self.release = self._runner.release
        self.copy_states = self._runner.copy_states
        self.read_block = self._runner.read_block
        self.write_block = self._runner.write_block
        self._held = self._runner.held
        self._names: deque[list[str]] = deque()

    def launch(self, batch) -> None:
        self._runner.launch(batch)
        self._names.append([self._held[slot].request.request_id for slot in batch.slots])

    def collect(self) -> list[RowResult]:
        results = self._runner.collect()
        return [
            RowResult(error="logits are NaN") if name == self._bad else result
            for name, result in zip(self._names.popleft(), results, strict=True)
        ]


def test_an_error_of_one_row_ends_that_request_and_no_other() -> None:
    under_test = make_engine()
    runner = _FailingRow(under_test, "bad")
    under_test.engine = Engine(runner, under_test.scheduler, under_test.blocks)
    for name in ("good", "bad", "fine"):
        under_test.engine.submit(make_request(name, max_tokens=4))
    under_test.run()
    assert under_test.tokens("good") == under_test.tokens("fine") == _alone((1, 2, 3), max_tokens=4)
    (ending,) = under_test.endings("bad")
    assert ending.error is not None
    assert "NaN" in ending.error.message


def test_an_error_after_a_preemption_leaves_no_queued_token_behind() -> None:
    under_test = make_engine()
    under_test.engine = Engine(
        _FailingRow(under_test, "bad"), under_test.scheduler, under_test.blocks
    )
    under_test.engine.submit(make_request("bad", max_tokens=50))
    under_test.engine.step()
    (bad,) = under_test.scheduler.sequences
    under_test.scheduler._preempt(bad, "a reason")
    under_test.run()
    assert bad.num_steps_in_flight == 0
    assert under_test.scheduler.num_queued_tokens == 0


def test_prompt_logprobs_arrive_once_in_order_in_spite_of_chunks_and_preemption() -> None:
    rng = seeded("prompt logprobs")
    prompt = [rng.randrange(900) for _ in range(70)]
    under_test = make_engine(num_blocks=7, max_model_len=112, max_num_batched_tokens=16)
    under_test.engine.submit(make_request("old", range(30), max_tokens=40))
    under_test.engine.submit(make_request("r", prompt, prompt_logprobs=1, max_tokens=4))
    under_test.run()
    slices = [o for o in under_test.outputs if o.request_id == "r" and o.prompt_logprobs]
    next_index = 1
    ids: list[int] = []
    for output in slices:
        assert output.prompt_logprobs_start == next_index
        assert output.prompt_logprobs is not None
        # Where a chunk was computed again nothing is said.
        assert output.prompt_logprobs.chosen
        next_index += len(output.prompt_logprobs.chosen)
        ids += output.prompt_logprobs.top_token_ids
    assert ids == prompt[1:]


def test_a_request_is_told_how_many_steps_it_took() -> None:
    under_test = make_engine(max_num_batched_tokens=64)
    under_test.engine.submit(make_request(prompt=range(150), max_tokens=3))
    under_test.run()
    (ending,) = under_test.endings("r")
    # Two chunks, then the last of the prompt, which gives the first token.
    assert ending.work == Work(steps=2 + 3, preemptions=0)


def test_a_request_is_told_how_often_it_was_preempted() -> None:
    under_test = make_engine(max_num_seqs=1)
    under_test.engine.submit(make_request("low", max_tokens=40))
    for name in ("high", "higher"):
        for _ in range(5):
            under_test.step()
        high = make_request(name, max_tokens=2, objective=Objective(priority=-1))
        under_test.engine.submit(high)
    under_test.run()
    (ending,) = under_test.endings("low")
    assert ending.work is not None
    assert ending.work.preemptions == 2


def test_who_takes_the_place_of_another_begins_in_the_step_in_which_that_is_put_down() -> None:
    under_test = make_engine(num_blocks=64, max_num_seqs=1, max_model_len=96)
    under_test.engine.submit(make_request("low", max_tokens=50, objective=Objective(priority=1)))
    for _ in range(5):
        under_test.step()
    under_test.engine.submit(make_request("up", max_tokens=2, objective=Objective(priority=0)))
    under_test.engine.launch()
    up = under_test.engine.find("up")
    assert up is not None
    assert up.state is SequenceState.RUNNING
    assert under_test.scheduler.preemptions_total == 1
    under_test.run()
    assert len(under_test.tokens("low")) == 50


def test_merged_outputs_read_as_one() -> None:
    first = RequestOutput(
        [1], 3, request_id="r", attempt=0, logprobs=logprobs_of([-1.0], [1], 1, [(1, -1.0)])
    )
    later = RequestOutput(
        [2], 4, request_id="r", attempt=0, logprobs=logprobs_of([-2.0], [2], 1, [(9, -0.5)])
    )
    later.finish_reason = FinishReason.STOP
    first.merge(later)
    assert (first.token_ids, first.first_position, first.is_last) == ([1, 2], 3, True)
    assert first.logprobs == logprobs_of([-1.0, -2.0], [1, 2], 1, [(1, -1.0), (9, -0.5)])


def test_eos_comes_only_at_its_rate() -> None:
    under_test = make_engine(eos_rate=1.0)
    under_test.engine.submit(make_request(max_tokens=8))
    under_test.run()
    assert under_test.tokens("r") == [EOS_ID]


@pytest.mark.parametrize(
    ("num_blocks", "priority", "reason"),
    [
        # It takes the place of one that ran.
        (64, -1, "a request of a higher priority took its place"),
        # Each needs more blocks than half of them.
        (6, 0, "the shard is out of KV blocks"),
    ],
)
def test_who_is_given_back_is_told_what_it_was_preempted_for(
    num_blocks: int, priority: int, reason: str
) -> None:
    max_num_seqs = 1 if priority else 2
    under_test = make_engine(num_blocks=num_blocks, max_num_seqs=max_num_seqs, max_model_len=96)
    leaves = make_request("leaves", range(20), max_tokens=60)
    under_test.engine.submit(msgspec.structs.replace(leaves, hand_back=True))
    under_test.step()
    comes = make_request("comes", range(40, 60), max_tokens=60)
    comes = msgspec.structs.replace(comes, objective=Objective(priority=priority), hand_back=True)
    under_test.engine.submit(comes)
    under_test.run()
    errors = [output.error for name in ("leaves", "comes") for output in under_test.endings(name)]
    (error,) = [error for error in errors if error is not None]
    assert error.message == f"{reason}; the request is given back"
