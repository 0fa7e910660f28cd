"""Embeddings are what transformers gives, however prompts are cut, batched, preempted or found."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from model_maker import VOCABULARY, make_model
from models.driver import Driver, load, make_sequence
from models.runners import make_runner
from safetensors.torch import load_file, save_file
from support.budget import budget, in_soak
from support.engines import changed, with_blocks
from torch import Tensor
from transformers import AutoModel, GPT2LMHeadModel

from penstock_proto.types import Pooling
from penstock_shard.engine.create_engine import create_scheduler
from penstock_shard.engine.engine import Engine
from penstock_shard.errors import ModelError
from penstock_shard.kv_cache.block_manager import BlockManager
from penstock_shard.models.decoder.decoder import Decoder
from penstock_shard.models.transformers.transformers_model import TransformersModel
from penstock_shard.scheduler.step_budget import SchedulerLimits
from penstock_shard.sequence import Sequence
from penstock_shard.worker.outputs.embeddings import Embeddings

Directory = Callable[[str], Path]
FAMILIES = ("llama", "qwen3", "gemma3", "gpt2", "opt")


def pooled(prompt: list[int], pooling: Pooling) -> Sequence:
    return make_sequence(prompt, max_tokens=1, pooling=pooling)


def prompts(count: int, longest: int = 100) -> list[list[int]]:
    rng = random.Random(5)
    return [rng.choices(range(3, VOCABULARY), k=rng.randint(1, longest)) for _ in range(count)]


def vector(data: bytes | None) -> Tensor:
    assert data is not None
    return torch.frombuffer(bytearray(data), dtype=torch.float32)


def in_chunks(driver: Driver, sequence: Sequence, size: int) -> Tensor:
    """Return the sequence's vector, computed alone in chunks of `size` tokens."""
    while True:
        count = min(size, sequence.num_uncomputed)
        is_last = count == sequence.num_uncomputed
        (result,) = driver.step([(sequence, count)])
        assert (result.token_id, result.error) == (None, None)
        assert (result.embedding is not None) == is_last
        if is_last:
            driver.free += driver.blocks[sequence]
            return vector(result.embedding)


@cache
def _as_transformers_has_it(directory: Path) -> Any:
    return AutoModel.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")


def own(directory: Path, prompt: list[int], pooling: Pooling) -> Tensor:
    """Return the vector that transformers computes for the prompt."""
    model = _as_transformers_has_it(directory)
    with torch.inference_mode():
        hidden: Tensor = model(torch.tensor([prompt])).last_hidden_state[0]
    return hidden[-1] if pooling is Pooling.LAST else hidden.mean(dim=0)


@pytest.mark.parametrize("pooling", Pooling)
@pytest.mark.parametrize("family", FAMILIES)
def test_vectors_are_those_of_transformers(
    family: str, pooling: Pooling, model_dir: Directory
) -> None:
    runner = load(model_dir(family), embeddings="last")
    driver = Driver(runner)
    assert isinstance(runner.model, TransformersModel) == (family in ("gpt2", "opt"))
    for prompt in prompts(3):
        found = in_chunks(driver, pooled(prompt, pooling), 40)
        assert runner.info.embedding is not None
        assert len(found) == runner.info.embedding.size
        expected = own(model_dir(family), prompt, pooling)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("whole_check")
@pytest.mark.parametrize("pooling", Pooling)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_vectors_depend_neither_on_chunks_nor_on_the_batch(
    family: str, pooling: Pooling, model_dir: Directory
) -> None:
    runner = load(model_dir(family), embeddings="mean", kv_blocks=128)
    assert runner.info.batch_invariant
    driver = Driver(runner)
    several = prompts(6, budget(50, 100))
    alone = [in_chunks(driver, pooled(prompt, pooling), 512) for prompt in several]
    for size in (1, 16):
        for prompt, expected in zip(several, alone, strict=True):
            check(in_chunks(driver, pooled(prompt, pooling), size), expected, pooling)
    # Beside a decode, requests that want tokens, and those of the other pooling.
    other = next(each for each in Pooling if each is not pooling)
    decoding = make_sequence(several[0])
    driver.step([(decoding, decoding.num_uncomputed)])
    rows = [pooled(prompt, pooling) for prompt in several]
    others = [pooled(several[1], other), make_sequence(several[2], prompt_logprobs=2)]
    mixed = [rows[0], others[0], *rows[1:4], others[1], *rows[4:]]
    results = driver.step([(decoding, 1), *((row, row.num_uncomputed) for row in mixed)])
    assert results[0].token_id is not None
    for row, result in zip(mixed, results[1:], strict=True):
        if row in rows:
            check(vector(result.embedding), alone[rows.index(row)], pooling)


def check(found: Tensor, expected: Tensor, pooling: Pooling) -> None:
    if pooling is Pooling.LAST:
        assert torch.equal(found, expected)
    else:
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)


def test_tokens_beside_embeddings_are_those_without(model_dir: Directory) -> None:
    runner = load(model_dir("llama"), embeddings="last")
    alone, beside = make_sequence(range(3, 23), logprobs=3), make_sequence(range(3, 23), logprobs=3)
    driver = Driver(runner)
    (expected,) = driver.step([(alone, 20)])
    rows = [(pooled(list(range(40)), pooling), 40) for pooling in Pooling]
    found = driver.step([rows[0], (beside, 20), rows[1]])[1]
    assert (found.token_id, found.logprobs) == (expected.token_id, expected.logprobs)


@pytest.mark.parametrize(
    ("family", "max_steps_ahead"),
    [in_soak("llama", 0), ("llama", 1), ("opt", 0), in_soak("opt", 1)],
)
def test_vectors_survive_preemption_and_prefix_hits(
    family: str, max_steps_ahead: int, model_dir: Directory
) -> None:
    loaded = load(model_dir(family), kv_blocks=16, max_model_len=120, embeddings="last")
    runner = make_runner(
        loaded.model, dataclasses.replace(loaded.info, max_steps_ahead=max_steps_ahead)
    )
    blocks = BlockManager.of(with_blocks(runner.info, 16), 24)
    scheduler = create_scheduler(SchedulerLimits(max_num_seqs=6, max_num_batched_tokens=24), blocks)
    engine = Engine(runner, scheduler, blocks)
    several = prompts(8)
    several[3] = several[2] = several[1][:40] + several[2]
    wanted = [(prompt[:120], pooling) for prompt in several for pooling in Pooling]
    # Those that generate come first, need more blocks as they go on, and put the others down.
    generating = [make_sequence(prompt[:60], max_tokens=40) for prompt in several[:4]]
    sequences = [*generating, *(pooled(prompt, pooling) for prompt, pooling in wanted)]
    for number, sequence in enumerate(sequences):
        engine.submit(changed(sequence, request_id=str(number)).request)
    sequences = scheduler.sequences
    outputs = []
    while engine.has_work:
        outputs += engine.step()
        engine.check_integrity()
    vectors = {o.request_id: vector(o.embedding) for o in outputs if o.embedding is not None}
    assert scheduler.preemptions_total > 0
    embedded = sequences[len(generating) :]
    assert any(r.cached_tokens for r in embedded if r.request.pooling is Pooling.LAST)
    assert not any(r.cached_tokens for r in embedded if r.request.pooling is Pooling.MEAN)
    for sequence, (prompt, pooling) in zip(embedded, wanted, strict=True):
        expected = own(model_dir(family), prompt, pooling)
        torch.testing.assert_close(
            vectors[sequence.request.request_id], expected, rtol=1e-4, atol=1e-4
        )
    (embeddings,) = (each for each in runner._outputs if isinstance(each, Embeddings))
    assert not embeddings._sums


def test_a_mean_that_begins_anew_forgets_what_it_had(model_dir: Directory) -> None:
    runner = load(model_dir("llama"), embeddings="mean")
    driver = Driver(runner)
    prompt = list(range(3, 63))
    expected = in_chunks(driver, pooled(prompt, Pooling.MEAN), 512)
    sequence = pooled(prompt, Pooling.MEAN)
    driver.step([(sequence, 25)])
    driver.preempt(sequence)
    check(in_chunks(driver, sequence, 30), expected, Pooling.MEAN)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_step_of_single_tokens_gives_each_its_own(family: str, model_dir: Directory) -> None:
    """Each token of the step is wanted: two for their vectors, the one between for its logits."""
    runner = load(model_dir(family), embeddings="last")
    driver = Driver(runner)
    first, last = (pooled([token], Pooling.LAST) for token in (7, 9))
    alone = [in_chunks(driver, pooled([token], Pooling.LAST), 1) for token in (7, 9)]
    decoding = make_sequence([5])
    found = driver.step([(first, 1), (decoding, 1), (last, 1)])
    assert torch.equal(vector(found[0].embedding), alone[0])
    assert torch.equal(vector(found[2].embedding), alone[1])
    assert found[1].token_id == driver.step([(make_sequence([5]), 1)])[0].token_id


def test_int8_and_half_weights_embed_too(model_dir: Directory) -> None:
    prompt = prompts(1)[0]
    for family in ("llama", "gpt2"):
        expected = own(model_dir(family), prompt, Pooling.MEAN)
        for flags in ({"dtype": "auto"}, {"dtype": "auto", "quantization": "int8"}):
            driver = Driver(load(model_dir(family), embeddings="mean", **flags))
            found = in_chunks(driver, pooled(prompt, Pooling.MEAN), 512)
            assert torch.cosine_similarity(found, expected, dim=0) > 0.98


def test_hidden_states_that_are_no_numbers_end_their_request_alone(
    model_dir: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = load(model_dir("llama"), embeddings="last")
    good = type(runner.model).forward

    def forward(*args: object) -> object:
        values = good(*args)  # type: ignore[arg-type]
        values.hidden[0] = float("nan")
        return values

    monkeypatch.setattr(type(runner.model), "forward", forward)
    rows = [(pooled([3, 4], Pooling.LAST), 2), (pooled([5, 6], Pooling.LAST), 2)]
    bad, fine = Driver(runner).step(rows)
    assert bad.embedding is None
    assert "no finite hidden states" in (bad.error or "")
    assert fine.error is None
    assert fine.embedding is not None


def test_a_model_says_by_its_files_that_it_embeds(tmp_path: Path) -> None:
    directory = make_model(tmp_path, "llama")
    assert "embed" not in load(directory).info.capabilities
    assert load(directory).info.embedding is None
    modules = [
        {"idx": 0, "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
        {"idx": 2, "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"},
    ]
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "1_Pooling").mkdir()
    (directory / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    info = load(directory).info
    assert "embed" in info.capabilities
    assert info.embedding is not None
    assert dataclasses.astuple(info.embedding) == (Pooling.MEAN, True, 32)


def test_a_model_saved_without_its_head_runs_on_our_decoder(tmp_path: Path) -> None:
    directory = make_model(tmp_path, "qwen3", tie_word_embeddings=True)
    prompt = prompts(1)[0]
    expected = own(directory, prompt, Pooling.LAST)
    weights = directory / "model.safetensors"
    tensors = {name.removeprefix("model."): tensor for name, tensor in load_file(weights).items()}
    assert "embed_tokens.weight" in tensors
    save_file(tensors, weights, {"format": "pt"})
    runner = load(directory, embeddings="last")
    assert isinstance(runner.model, Decoder)
    found = in_chunks(Driver(runner), pooled(prompt, Pooling.LAST), 40)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_a_model_that_calls_its_head_in_its_own_way_serves_tokens_and_no_embeddings(
    model_dir: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = GPT2LMHeadModel.get_output_embeddings
    monkeypatch.setattr(GPT2LMHeadModel, "get_output_embeddings", lambda self: None)
    runner = load(model_dir("gpt2"))
    assert "embed" not in runner.info.capabilities
    (result,) = Driver(runner).step([(make_sequence([3, 4]), 2)])
    assert result.token_id is not None
    with pytest.raises(ModelError, match=r"--embeddings last: .* hidden states"):
        load(model_dir("gpt2"), embeddings="last")
    monkeypatch.setattr(GPT2LMHeadModel, "get_output_embeddings", good)
    assert "embed" in load(model_dir("gpt2"), embeddings="last").info.capabilities
