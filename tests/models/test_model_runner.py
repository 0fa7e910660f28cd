"""The runner: what it says of its model, and what it gives beside greedy tokens."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from model_maker import make_model
from models.driver import Driver, let_generate, load, make_sequence
from support.plans import batch_of
from transformers import AutoModelForCausalLM

from penstock_proto.types import EngineSampling, Logprobs
from penstock_shard.config import ShardConfig
from penstock_shard.errors import ModelError
from penstock_shard.ipc.runner_info import CacheGroup
from penstock_shard.model_loader.load_model_runner import load_model_runner
from penstock_shard.models.decoder.decoder import Decoder
from penstock_shard.models.embedding_table import Embedding
from penstock_shard.scheduler.rows import Row
from penstock_shard.worker.input_batch import InputBuilder

Directory = Callable[[str], Path]
PROMPT = [9, 200, 31, 77, 5, 160, 42, 42, 300, 11]


def own_logprobs(directory: Path, token_ids: list[int]) -> torch.Tensor:
    """[len(token_ids), V]: what transformers says after each token."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.inference_mode():
        logits = model(torch.tensor([token_ids])).logits[0]
    return torch.log_softmax(logits, dim=-1)


def merge(parts: list[Logprobs | None]) -> Logprobs:
    merged = Logprobs()
    for part in parts:
        if part is not None:
            merged.top_n = part.top_n
            merged.extend(part)
    return merged


@pytest.mark.parametrize("chunks", [(10,), (4, 6), (1, 8, 1)])
def test_prompt_logprobs_are_those_of_the_model(
    chunks: tuple[int, ...], model_dir: Directory
) -> None:
    directory = model_dir("llama")
    runner = load(directory)
    driver = Driver(runner)
    sequence = make_sequence(PROMPT, logprobs=1, prompt_logprobs=2)
    other = make_sequence(PROMPT[::-1])
    expected_token = load_first_token(directory, PROMPT)
    parts = []
    for i, count in enumerate(chunks):
        rows = [(sequence, count), (other, 4)] if i == 0 else [(sequence, count)]
        result = driver.step(rows)[0]
        parts.append(result.prompt_logprobs)
    assert result.token_id == expected_token
    assert result.logprobs is not None
    found = merge(parts)
    expected = own_logprobs(directory, PROMPT)
    assert len(found.chosen) == len(PROMPT) - 1
    assert found.top_n == 2
    for i, token in enumerate(PROMPT[1:]):
        row = expected[i]
        assert found.chosen[i] == pytest.approx(float(row[token]), abs=1e-4)
        assert found.ranks[i] == int((row > row[token]).sum()) + 1
        best = row.topk(2)
        assert found.top_token_ids[2 * i : 2 * i + 2] == best.indices.tolist()
        assert found.top_logprobs[2 * i : 2 * i + 2] == pytest.approx(
            best.values.tolist(), abs=1e-4
        )


def load_first_token(directory: Path, prompt: list[int]) -> int:
    return int(own_logprobs(directory, prompt)[-1].argmax())


def test_sampled_logprobs_are_those_of_the_model(model_dir: Directory) -> None:
    directory = model_dir("qwen2")
    driver = Driver(load(directory))
    sampling = EngineSampling(temperature=0.8, top_p=0.9, seed=3)
    sequence = make_sequence(PROMPT, sampling, logprobs=3)
    results = [driver.step([(sequence, len(PROMPT))])[0]]
    results += [driver.step([(sequence, 1)])[0] for _ in range(5)]
    expected = own_logprobs(directory, sequence.token_ids.tolist())
    for i, result in enumerate(results):
        row = expected[len(PROMPT) - 1 + i]
        assert result.logprobs is not None
        assert result.token_id is not None
        assert result.logprobs.chosen[0] == pytest.approx(float(row[result.token_id]), abs=1e-4)
        assert result.logprobs.top_token_ids == row.topk(3).indices.tolist()


def test_rows_that_do_not_sample_give_nothing(model_dir: Directory) -> None:
    driver = Driver(load(model_dir("llama")))
    (result,) = driver.step([(make_sequence(PROMPT, logprobs=1), 4)])
    assert (result.token_id, result.logprobs, result.prompt_logprobs) == (None, None, None)


def test_a_token_is_the_same_after_preemption_and_in_another_batch(model_dir: Directory) -> None:
    runner = load(model_dir("llama"))
    sampling = EngineSampling(temperature=1.2, top_k=50, seed=99)
    alone = make_sequence(PROMPT, sampling, max_tokens=12)
    Driver(runner, seed=1).generate([alone])
    together = make_sequence(PROMPT, sampling, max_tokens=6)
    others = [make_sequence(PROMPT[i:], EngineSampling(seed=i), max_tokens=12) for i in range(5)]
    driver = Driver(runner, seed=2)
    driver.generate([together, *others[:2]])
    driver.preempt(together)
    let_generate(together, 12)
    driver.generate([together, *others[2:]])
    assert together.token_ids == alone.token_ids


def test_nan_logits_end_their_own_row_only(tmp_path: Path) -> None:
    directory = make_model(tmp_path, "llama")
    runner = load(directory)
    driver = Driver(runner)
    good = driver.step([(make_sequence(PROMPT), len(PROMPT))])[0]
    assert isinstance(runner.model, Decoder)
    embedding = runner.model._weights.embedding
    assert isinstance(embedding, Embedding)
    embedding.table[300] = float("nan")
    clean = [token for token in PROMPT if token != 300]
    bad, fine = driver.step(
        [
            (make_sequence(PROMPT, prompt_logprobs=0), len(PROMPT)),
            (make_sequence(clean), len(clean)),
        ]
    )
    assert bad.token_id is None
    assert bad.error is not None
    assert fine.error is None
    assert fine.token_id is not None
    assert good.error is None


def test_info_says_what_is_served(tmp_path: Path) -> None:
    directory = make_model(tmp_path, "opt")
    settings = {"temperature": 0.7, "top_p": 0.9, "eos_token_id": [1, 7], "repetition_penalty": 1.1}
    (directory / "generation_config.json").write_text(json.dumps(settings))
    info = load(directory, kv_blocks=20).info
    assert info.architecture == "OPTForCausalLM"
    assert info.eos_token_ids == (1, 7)
    expected = {"temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.1}
    assert info.default_sampling == expected
    assert (info.vocab_size, info.max_model_len) == (384, 256)
    assert (info.block_size, info.num_blocks) == (16, 20)
    assert (info.dtype, info.kv_dtype, info.device) == ("float32", "float32", "cpu")
    assert info.attention_backend == "cpu"
    assert len(info.weights_hash) == 32
    assert {"logprobs", "prompt_logprobs", "allowed_token_ids"} <= info.capabilities


def test_eos_falls_back_to_the_configuration(tmp_path: Path) -> None:
    directory = make_model(tmp_path, "llama")
    (directory / "generation_config.json").unlink()
    assert load(directory).info.eos_token_ids == (1,)


@pytest.mark.parametrize(("stated", "served"), [([384, 7], (7,)), (-1, ()), ([1, 383], (1, 383))])
def test_eos_ids_that_no_logit_stands_for_are_left_out(
    stated: int | list[int], served: tuple[int, ...], tmp_path: Path
) -> None:
    """Banned before min_tokens they would be ids of the next row of logits."""
    directory = make_model(tmp_path, "llama")
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": stated}))
    config = ShardConfig(device="cpu", threads=1, kv_blocks=64)
    lines: list[str] = []
    assert load_model_runner(config, directory, progress=lines.append).info.eos_token_ids == served
    told = [line for line in lines if "eos_token_id" in line]
    assert len(told) == (0 if served == (1, 383) else 1)


def test_positions_end_where_the_model_says(model_dir: Directory) -> None:
    assert load(model_dir("opt"), max_model_len=100).info.max_model_len == 100
    with pytest.raises(ModelError, match="--max-model-len 257: the model has 256 positions"):
        load(model_dir("opt"), max_model_len=257)


def test_too_few_blocks_are_refused_with_a_way_out(model_dir: Directory) -> None:
    with pytest.raises(ModelError, match="lower --max-model-len to 80 or raise --kv-blocks"):
        load(model_dir("llama"), kv_blocks=5)


def test_dummy_weights_need_a_configuration_only(tmp_path: Path) -> None:
    directory = make_model(tmp_path, "llama")
    (directory / "model.safetensors").unlink()
    driver = Driver(load(directory, load_format="dummy"))
    assert driver.step([(make_sequence(PROMPT), len(PROMPT))])[0].token_id is not None


def test_an_unreadable_generation_config_is_one_line(tmp_path: Path) -> None:
    directory = make_model(tmp_path, "llama")
    (directory / "generation_config.json").write_text("{")
    with pytest.raises(ModelError, match=r"generation_config\.json: is not valid JSON"):
        load(directory)


def test_sharded_and_half_precision_checkpoints_are_read(tmp_path: Path) -> None:
    whole = make_model(tmp_path / "whole", "llama")
    parts = make_model(tmp_path / "parts", "llama", shard_size="100KB")
    assert len(list(parts.glob("model-*.safetensors"))) > 1
    tokens = [
        Driver(load(directory)).step([(make_sequence(PROMPT), len(PROMPT))])[0].token_id
        for directory in (whole, parts)
    ]
    assert tokens[0] == tokens[1]


def test_a_slot_that_is_given_again_has_its_new_sequences_blocks() -> None:
    """Even where that is the same sequence, at the token that it had come to."""
    builder = InputBuilder(16, torch.device("cpu"), (CacheGroup(),))
    sequence = make_sequence(list(range(33)))
    sequence.slot = 5
    for blocks, pieces in (([3, 5, 6], ((0, 32), (32, 1))), ([9, 2, 4], ((32, 1),))):
        for start, count in pieces:
            is_first = (start, count) == pieces[0]
            row = Row(sequence, start, count, True)
            new_blocks = [[blocks if is_first else ()]]
            inputs = builder.build(batch_of(row, new_blocks=new_blocks, admits=is_first))
            needed = -(-(start + count) // 16)
            (attention,) = inputs.attention
            assert attention.block_table.tolist() == [blocks[:needed]]
            last = start + count - 1
            assert int(attention.slots[-1]) == blocks[last // 16] * 16 + last % 16
