"""Logits of whole sequences out of steps that are cut in odd ways, and those of transformers."""

from __future__ import annotations

from pathlib import Path

import torch
from models.driver import load
from torch import Tensor
from transformers import AutoModelForCausalLM

from penstock_shard.selfcheck.random_steps import random_steps
from penstock_shard.worker.model_runner import ModelRunner

_LENGTHS = (70, 33)


def cut_logits(runner: ModelRunner) -> tuple[list[list[int]], Tensor]:
    """Two random sequences in four steps, chunks beside decodes, blocks shuffled; their token ids,
    and the logits [70 + 33, V] of all their tokens.
    """
    info = runner.info
    kv_dtype = {"float32": torch.float32, "float16": torch.float16}[info.kv_dtype]
    with random_steps(runner.model, info.vocab_size, info.block_size, 32, kv_dtype) as steps:
        long, short = (steps.sequence(length) for length in _LENGTHS)
        parts = [
            steps.run([(long, 0, 40), (short, 0, 7)]).split([40, 7]),
            steps.run([(long, 40, 1), (short, 7, 20)]).split([1, 20]),
            steps.run([(short, 27, 1), (long, 41, 29)]).split([1, 29])[::-1],
            (torch.empty(0, info.vocab_size), steps.run([(short, 28, 5)])),
        ]
    logits = [torch.cat([part[row] for part in parts]) for row in (0, 1)]
    return [long.token_ids, short.token_ids], torch.cat(logits)


def own_logits(directory: Path, sequences: list[list[int]]) -> Tensor:
    """Return the logits that transformers computes for the sequences in float32, with its own
    attention.
    """
    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.inference_mode():
        return torch.cat([model(torch.tensor([ids])).logits[0] for ids in sequences])


def relative_errors(directory: Path, **settings: object) -> tuple[float, float]:
    """Largest and root mean square difference of logits from those of transformers, in standard
    deviations of the latter.
    """
    return errors_of(load(directory, **settings), directory)


def errors_of(runner: ModelRunner, directory: Path) -> tuple[float, float]:
    """The same of a model of this directory that is loaded."""
    sequences, logits = cut_logits(runner)
    expected = own_logits(directory, sequences)
    errors = (logits - expected) / expected.std()
    return float(errors.abs().max()), float(errors.square().mean().sqrt())
