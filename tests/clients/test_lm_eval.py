"""lm-eval as it is released, with `local-completions`: the scores that transformers gives directly.

The tasks are in `tasks`. The reference reads what lm-eval asked from its own record of samples,
tokenizes and computes that anew.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from clients.asked import MODEL
from clients.environments import run

pytest.importorskip("torch")

pytestmark = pytest.mark.soak

TASKS = Path(__file__).parent / "tasks"
MAX_TOKENS = 12
STOPS = ("\n", ".")
TOLERANCE = 1e-4

# Of a context and a continuation: its log-likelihood, and whether it is what greedy search takes.
Score = Callable[[str, str], tuple[float, bool]]


@pytest.fixture(scope="module", params=["huggingface", "remote"])
def samples(
    request, toy, toy_files, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Any]:
    """A function that returns the samples that lm-eval logged for a task.

    lm-eval has run both tasks, with 3 prompts a request and 4 requests at once. It tokenizes with
    the model's files, or asks the router to.
    """
    output = tmp_path_factory.mktemp("lm_eval")
    model: dict[str, Any] = {
        "model": MODEL,
        "base_url": f"{toy.url}/v1/completions",
        "tokenizer_backend": request.param,
        "num_concurrent": 4,
    }
    if request.param == "huggingface":
        model["tokenizer"] = str(toy_files)
    run(
        "harnesses", "-m", "lm_eval", "run",
        "--model", "local-completions",
        "--model_args", ",".join(f"{name}={value}" for name, value in model.items()),
        "--batch_size", "3",
        "--tasks", "small_choice,small_continuation",
        "--include_path", str(TASKS),
        "--log_samples",
        "--output_path", str(output),
        HF_HUB_OFFLINE="1",
        folder=TASKS,
        HF_HOME=str(output / "cache"),
    )  # fmt: skip

    def of(task: str) -> Any:
        (record,) = output.rglob(f"samples_{task}_*.jsonl")
        return [json.loads(line) for line in record.read_text("utf-8").splitlines()]

    return of


@pytest.fixture(scope="module")
def reference(toy_files) -> Any:
    """transformers' model and tokenizer of the built-in model."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(toy_files, dtype=torch.float32)
    return model, AutoTokenizer.from_pretrained(toy_files)


@pytest.fixture(scope="module")
def score(reference) -> Score:
    import torch

    model, tokenizer = reference

    def of(context: str, continuation: str) -> tuple[float, bool]:
        ids = tokenizer(context + continuation, add_special_tokens=False).input_ids
        first = len(tokenizer(context, add_special_tokens=False).input_ids)
        with torch.inference_mode():
            logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        chosen = [logprobs[at - 1, ids[at]].item() for at in range(first, len(ids))]
        best = [logprobs[at - 1].max().item() for at in range(first, len(ids))]
        return sum(chosen), chosen == best

    return of


def test_log_likelihoods_are_those_of_transformers(samples, score) -> None:
    compared = 0
    for sample in samples("small_choice"):
        for asked, answer in zip(sample["arguments"].values(), sample["resps"], strict=True):
            logprob, greedy = answer[0]
            expected, expected_greedy = score(*_without_trailing_space(asked))
            assert float(logprob) == pytest.approx(expected, abs=TOLERANCE), asked
            assert (greedy == "True") == expected_greedy, asked
            compared += 1
    assert compared == 16


def test_some_choices_are_greedy_and_some_are_not(samples) -> None:
    """Else the comparison above says nothing of that flag."""
    flags = {answer[0][1] for sample in samples("small_choice") for answer in sample["resps"]}
    assert flags == {"True", "False"}


def test_the_model_knows_its_opposites(samples) -> None:
    assert [sample["acc"] for sample in samples("small_choice")[:2]] == [1.0, 1.0]


def test_continuations_up_to_a_stop_are_those_of_transformers(samples, reference) -> None:
    found = samples("small_continuation")
    assert len(found) == 6
    for sample in found:
        context = sample["arguments"]["gen_args_0"]["arg_0"]
        assert sample["resps"] == [[_continued(reference, context)]]


def _without_trailing_space(asked: dict[str, str]) -> tuple[str, str]:
    """Spaces at a context's end are scored with the continuation, as lm-eval does for any model."""
    context, continuation = asked["arg_0"], asked["arg_1"]
    kept = context.rstrip()
    return kept, context[len(kept) :] + continuation


def _continued(reference: Any, context: str) -> str:
    """Return the text by which greedy search continues a context, up to the first stop."""
    import torch

    model, tokenizer = reference
    ids = torch.tensor([tokenizer(context, add_special_tokens=False).input_ids])
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=MAX_TOKENS, do_sample=False
    )
    text: str = tokenizer.decode(output[0][ids.shape[1] :], skip_special_tokens=True)
    return min((text.partition(stop)[0] for stop in STOPS), key=len)
