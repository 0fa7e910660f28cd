"""Steps of few rows on a CPU: calls of the kernels that are recorded and made again."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from models.driver import Driver, load, make_sequence
from support.budget import budget, seeded
from torch import Tensor

from penstock_shard.config import ShardConfig
from penstock_shard.kernels.cpu import load_kernels
from penstock_shard.model_loader.load_model_runner import load_model_runner
from penstock_shard.models.cpu_graphs import MOST_ROWS, CpuGraph
from penstock_shard.models.cuda_graphs import GraphedModel

Directory = Callable[[str], Path]
# Tokens and their log-probabilities.
Results = list[tuple[int, list[float]]]
# Norms of heads, biases, windows.
FAMILIES = ("llama", "qwen2", "qwen3", "mistral")


def generated(directory: Path, counts: list[int], *, eager: bool) -> list[Results]:
    """Tokens with log-probabilities of sequences that decode so many at once, over and over."""
    runner = load(directory, dtype="auto", kv_blocks=256, enforce_eager=eager)
    driver = Driver(runner)
    rng = random.Random(4)
    sequences = [
        make_sequence(rng.choices(range(3, 300), k=rng.randint(1, 40)), logprobs=0, max_tokens=90)
        for _ in range(max(counts))
    ]
    found: list[Results] = [[] for _ in sequences]
    for sequence in sequences:
        driver.step([(sequence, sequence.num_uncomputed)])
    for count in counts:
        chosen = sorted(rng.sample(range(len(sequences)), count))
        results = driver.step([(sequences[i], 1) for i in chosen])
        for i, result in zip(chosen, results, strict=True):
            assert result.token_id is not None
            assert result.logprobs is not None
            found[i].append((result.token_id, result.logprobs.chosen))
    if not eager:
        assert isinstance(runner.model, GraphedModel)
        # One of four rows is recorded at load.
        assert runner.model.num_graphs == len({4, *counts} & {*range(MOST_ROWS + 1)})
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_replayed_steps_of_any_size_give_the_same_bits(family: str, model_dir: Directory) -> None:
    rng = seeded("sizes of steps")
    sizes = range(1, MOST_ROWS + 3)
    counts = [*sizes, *rng.choices(sizes, k=budget(20, 60))]
    rng.shuffle(counts)
    expected = generated(model_dir(family), counts, eager=True)
    assert generated(model_dir(family), counts, eager=False) == expected


def test_what_is_recorded_stays_where_it_is() -> None:
    kernels = load_kernels()
    weight = kernels.pack(torch.randn(32, 16), "float32")
    x = torch.zeros(2, 16)

    def work() -> Tensor:
        hidden = kernels.linear(x, weight)
        return kernels.gated_activation(hidden, "silu")

    graph = CpuGraph(kernels)
    result = graph.capture(work)
    gc.collect()
    others = [torch.full((2, 32), float("nan")) for _ in range(50)]
    for _ in range(3):
        x.copy_(torch.randn(2, 16))
        graph.replay()
        assert torch.equal(result, work())
    assert all(bool(other.isnan().all()) for other in others)


def test_work_that_torch_does_is_not_recorded() -> None:
    kernels = load_kernels()
    weight, x = kernels.pack(torch.ones(32, 16), "float32"), torch.ones(2, 16)
    with pytest.raises(RuntimeError, match=r"torch computes aten\.mul"):
        CpuGraph(kernels).capture(lambda: kernels.linear(x, weight).mul_(2))
    # What was recorded in vain is not recorded any more.
    assert "linear" not in vars(kernels)
    kernels.linear(x, weight)


def test_an_error_of_a_replay_is_that_of_the_call() -> None:
    kernels = load_kernels()
    table, ids = torch.randn(4, 16), torch.tensor([3])
    graph = CpuGraph(kernels)
    result = graph.capture(lambda: kernels.look_up(table, ids))
    ids.fill_(1)
    graph.replay()
    assert torch.equal(result, table[1:2])
    ids.fill_(4)
    with pytest.raises(IndexError, match="a row is outside the weight"):
        graph.replay()


def test_a_model_that_torch_computes_a_part_of_says_so_and_serves(model_dir: Directory) -> None:
    said: list[str] = []
    config = ShardConfig(device="cpu", threads=1, kv_blocks=64)
    runner = load_model_runner(config, model_dir("gemma2"), progress=said.append)
    line = "recorded decode steps: none, the model cannot be recorded: torch computes aten.mul_"
    assert any(each.startswith(line) for each in said)
    driver = Driver(runner)
    sequence = make_sequence([5, 6, 7], max_tokens=4)
    driver.generate([sequence])
    assert sequence.num_output_tokens == 4


def test_enforce_eager_records_nothing(model_dir: Directory) -> None:
    runner = load(model_dir("llama"), enforce_eager=True)
    assert not isinstance(runner.model, GraphedModel)
