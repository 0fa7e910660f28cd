"""The fake runner: a token that changes with everything it may depend on, and with nothing else."""

from __future__ import annotations

import dataclasses
import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from support.engines import EOS_ID, changed, make_sequence, runner_info
from support.plans import batch_of
from support.sampling_values import SAMPLING_VALUES

from penstock_proto.types import EngineSampling, Pooling
from penstock_shard.checkpoint.model_source import BUILTIN_MODEL
from penstock_shard.config import ShardConfig
from penstock_shard.errors import ModelError
from penstock_shard.model_loader.load_runner import load_runner
from penstock_shard.scheduler.rows import Row
from penstock_shard.sequence import Sequence
from penstock_shard.worker.base import Batch
from penstock_shard.worker.fake_runner import FakeRunner


def _runner(step_s: float = 0.0) -> FakeRunner:
    return FakeRunner(runner_info(), range(EOS_ID), step_s=step_s)


def _row(sequence: Sequence, start: int = 0) -> Row:
    return Row(sequence, start, sequence.num_tokens - start, samples=True)


def _batch(*rows: Row) -> Batch:
    """The rows of sequences that are new to the runner."""
    for slot, row in enumerate(rows):
        row.sequence.slot = slot
    return batch_of(*rows)


def _token(sequence: Sequence, runner: FakeRunner | None = None) -> int:
    runner = runner or _runner()
    runner.launch(_batch(_row(sequence)))
    token_id = runner.collect()[0].token_id
    assert token_id is not None
    return token_id


def test_limits_may_stand_in_the_text_part_of_a_configuration(tmp_path: Path) -> None:
    shutil.copy(BUILTIN_MODEL / "tokenizer.json", tmp_path)
    text = {"max_position_embeddings": 77, "eos_token_id": 5}
    config = {"model_type": "mistral3", "text_config": text, "eos_token_id": [6, 7]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    info = load_runner(ShardConfig(model=str(tmp_path), runner="fake"), print).runner.info
    assert (info.max_model_len, info.eos_token_ids) == (77, (6, 7))


def test_more_tokens_than_memory_holds_are_refused_in_one_line(tmp_path: Path) -> None:
    shutil.copy(BUILTIN_MODEL / "tokenizer.json", tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 1e308}))
    with pytest.raises(ModelError, match=r"max_position_embeddings: 1\d{308} is not from 1 to"):
        load_runner(ShardConfig(model=str(tmp_path), runner="fake"), print)


BASE = EngineSampling(temperature=1.0, seed=1)


@pytest.mark.parametrize(
    "change",
    [
        *({name: value} for name, value in SAMPLING_VALUES.items()),
        {"logit_bias": ((5, 1.0),)},
        {"bad_words": ((5, 6, 7),)},
        {"allowed_token_ids": tuple(range(1, EOS_ID))},
        {"seed": 2},
        {"penalty_window_tokens": 64},
    ],
    ids=lambda change: next(iter(change)),
)
def test_every_sampling_parameter_changes_the_tokens(change: dict[str, Any]) -> None:
    def tokens(sampling: EngineSampling) -> list[int]:
        sequence = changed(make_sequence(), sampling=sampling)
        return [_token(sequence)]

    assert tokens(BASE) == tokens(BASE)
    assert tokens(BASE) != tokens(dataclasses.replace(BASE, **change))


def test_no_sampling_parameter_is_left_out_above() -> None:
    (mark,) = test_every_sampling_parameter_changes_the_tokens.pytestmark
    tried = {name for change in mark.args[1] for name in change}
    assert tried == {field.name for field in dataclasses.fields(EngineSampling)}


def test_min_tokens_changes_the_token_and_logprobs_do_not() -> None:
    sequence = make_sequence(prompt=[1, 2, 3])
    assert _token(sequence) != _token(changed(sequence, min_tokens=5))
    scored = changed(sequence, logprobs=3, logprob_token_ids=(5,))
    assert _token(sequence) == _token(scored)


def test_prompt_output_and_their_border_change_the_token() -> None:
    variants = [
        make_sequence(prompt=[1, 2, 3]),
        make_sequence(prompt=[1, 2, 4]),
        make_sequence(prompt=[3, 2, 1]),
        make_sequence(prompt=[1, 2], output=[3]),
        make_sequence(prompt=[1, 2, 3], output=[3]),
    ]
    assert len({_token(sequence) for sequence in variants}) == len(variants)


def test_a_token_does_not_depend_on_what_the_runner_did_before() -> None:
    runner = _runner()
    sequence = make_sequence()
    first = _token(sequence, runner)
    sequence.token_ids.append(first)
    second = _token(sequence, runner)
    assert second == _token(make_sequence(output=[first]))


def test_only_allowed_ids_come_out() -> None:
    allowed = dataclasses.replace(BASE, allowed_token_ids=(7, 8))
    for seed in range(20):
        sampling = dataclasses.replace(allowed, seed=seed)
        assert _token(changed(make_sequence(), sampling=sampling)) in (7, 8)


def test_a_bad_word_is_never_completed() -> None:
    words = ((7, 8), (8, 7), (7, 7, 7), (10,))
    sampling = dataclasses.replace(BASE, allowed_token_ids=(7, 8, 9, 10), bad_words=words)
    sequence = changed(make_sequence(prompt=[7]), sampling=sampling)
    runner = _runner()
    for _ in range(200):
        sequence.token_ids.append(_token(sequence, runner))
    output = tuple(sequence.token_ids[1:])
    assert set(output) == {7, 8, 9}
    for word in words:
        assert not any(output[i : i + len(word)] == word for i in range(len(output)))


def test_nothing_ends_a_sequence_before_min_tokens() -> None:
    runner = FakeRunner(runner_info(), range(EOS_ID), step_s=0.0, eos_rate=1.0)
    sequence = make_sequence(stop_token_ids=[EOS_ID, *range(500)])
    sequence = changed(sequence, min_tokens=50)
    for _ in range(50):
        token_id = _token(sequence, runner)
        assert token_id not in sequence.request.stop_token_ids
        sequence.token_ids.append(token_id)
    assert _token(sequence, runner) == EOS_ID


def test_nothing_left_to_draw_is_an_error_of_that_row() -> None:
    sampling = dataclasses.replace(BASE, allowed_token_ids=(7, 8), bad_words=((7,), (5, 8)))
    sequence = changed(make_sequence(output=[4, 5]), sampling=sampling)
    runner = _runner()
    runner.launch(_batch(_row(sequence), _row(make_sequence())))
    bad, good = runner.collect()
    assert bad.token_id is None
    assert bad.error == "the sampling parameters leave no token to draw at position 2"
    assert good.error is None


def test_requested_logprobs_are_those_of_the_list() -> None:
    sequence = make_sequence(logprobs=20)
    runner = _runner()
    runner.launch(_batch(_row(sequence)))
    listed = runner.collect()[0].logprobs
    assert listed is not None
    asked = changed(sequence, logprob_token_ids=tuple(listed.top_token_ids[::-1]))
    runner.launch(_batch(_row(asked)))
    found = runner.collect()[0].logprobs
    assert found is not None
    assert found.requested == listed.top_logprobs[::-1]


def test_top_logprobs_have_the_size_asked_for_and_start_with_the_chosen_token() -> None:
    sequence = make_sequence(logprobs=5)
    runner = _runner()
    runner.launch(_batch(_row(sequence)))
    (result,) = runner.collect()
    assert result.logprobs is not None
    assert len(set(result.logprobs.top_token_ids)) == 5
    assert result.logprobs.top_token_ids[0] == result.token_id
    assert result.logprobs.top_logprobs[0] == result.logprobs.chosen[0]


def test_a_whole_vocabulary_is_listed_once_and_as_it_is_when_asked_for_by_id() -> None:
    runner = _runner()
    size = runner.info.vocab_size
    sequence = make_sequence(logprobs=size)
    runner.launch(_batch(_row(sequence)))
    listed = runner.collect()[0].logprobs
    assert listed is not None
    assert sorted(listed.top_token_ids) == list(range(size))
    assert listed.top_logprobs == sorted(listed.top_logprobs, reverse=True)
    asked = changed(sequence, logprob_token_ids=tuple(listed.top_token_ids))
    runner.launch(_batch(_row(asked)))
    found = runner.collect()[0].logprobs
    assert found is not None
    assert found.requested == listed.top_logprobs


def test_a_row_in_the_middle_of_a_prompt_samples_nothing() -> None:
    sequence = make_sequence(prompt=range(10))
    runner = _runner()
    runner.launch(_batch(Row(sequence, 0, 5, samples=False)))
    assert runner.collect()[0].token_id is None


def test_a_step_takes_its_time_from_the_end_of_the_step_before() -> None:
    runner = _runner(step_s=0.05)
    started_s = time.monotonic()
    for _ in range(3):
        runner.launch(Batch())
    for _ in range(3):
        runner.collect()
    assert 0.15 <= time.monotonic() - started_s < 5


def _embedding(sequence: Sequence, runner: FakeRunner | None = None) -> bytes:
    runner = runner or _runner()
    runner.launch(_batch(_row(sequence)))
    (result,) = runner.collect()
    assert result.token_id is None
    assert result.embedding is not None
    return result.embedding


def test_an_embedding_changes_with_ids_pooling_and_weights_and_with_nothing_else() -> None:
    def embedding(prompt: tuple[int, ...] = (1, 2), pooling: Pooling = Pooling.LAST) -> bytes:
        return _embedding(make_sequence(prompt=prompt, pooling=pooling))

    first = embedding()
    assert first == embedding()
    other_seed = make_sequence("other", (1, 2), pooling=Pooling.LAST, seed=5)
    assert first == _embedding(other_seed)
    other_weights = dataclasses.replace(runner_info(), weights_hash="other")
    others = {
        embedding((2, 1)),
        embedding((1,)),
        embedding(pooling=Pooling.MEAN),
        _embedding(
            make_sequence(prompt=(1, 2), pooling=Pooling.LAST),
            FakeRunner(other_weights, range(EOS_ID), step_s=0.0),
        ),
    }
    assert len(others - {first}) == 4
