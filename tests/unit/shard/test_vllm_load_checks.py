"""Checks of a loaded vLLM, on stand-ins for its core."""

from __future__ import annotations

import asyncio
import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from penstock_shard.errors import ModelError
from penstock_shard.ipc.runner_info import RunnerInfo
from penstock_shard.vllm_engine.devices import wait_for_memory
from penstock_shard.vllm_engine.load_checks import trials
from penstock_shard.vllm_engine.load_checks.continuation import find_uncontinued
from penstock_shard.vllm_engine.load_checks.exactness import check_bits, fingerprint
from penstock_shard.vllm_engine.requests import COUNTED, OUTPUT_TOKENS, CoreRequest


class CountingCore:
    """Draws each token from the output so far, and from what was told to be output."""

    def __init__(self, *, keeps_output: bool = True, is_deaf: bool = False) -> None:
        self.keeps_output = keeps_output
        self.max_step_tokens = 64
        self.num_preempted = 0
        self.adapters: set[int] = set()
        self.steps: asyncio.Queue[Any] = asyncio.Queue()
        self._is_deaf = is_deaf
        self._left: dict[str, tuple[dict[str, Any], list[int]]] = {}

    async def add(self, asked: CoreRequest, adapter: int) -> None:
        name, sampling, prompt = asked.name, asked.sampling, asked.prompt
        self.adapters.add(adapter)
        given = (sampling["extra_args"] or {}).get(OUTPUT_TOKENS, 0)
        counted = prompt["prompt_token_ids"][-given:] if given and not self._is_deaf else []
        left = sampling["max_tokens"] - given
        self._left[name] = ({**sampling, "left": left}, list(counted))

    async def abort(self, names: list[str]) -> None:
        raise AssertionError(names)

    def check_alive(self) -> None:
        pass

    async def preempt_all(self) -> None:
        self.num_preempted += 1

    async def load_adapter(self, number: int, path: str) -> None:
        raise AssertionError(path)

    async def unload_adapter(self, number: int) -> None:
        raise AssertionError(number)

    async def step(self) -> Any:
        outputs = []
        for name, (sampling, output) in list(self._left.items()):
            sampling["left"] -= 1
            heavy = sampling["presence_penalty"] or sampling["frequency_penalty"]
            output.append((len(output) if heavy else sampling["left"]) + 3)
            is_last = not sampling["left"]
            outputs.append(
                SimpleNamespace(
                    request_id=name,
                    new_token_ids=output[-1:],
                    new_logprobs=None,
                    finish_reason="length" if is_last else None,
                )
            )
            if is_last:
                del self._left[name]
        return SimpleNamespace(outputs=outputs)


INFO = RunnerInfo(
    architecture="Fake",
    weights_hash="w",
    vocab_size=100,
    max_model_len=64,
    eos_token_ids=(2,),
    default_sampling={},
    block_size=16,
    pools=(100,),
    dtype="float32",
    kv_dtype="float32",
    device="cpu",
    attention_backend="vllm",
    capabilities=frozenset(),
)


async def test_a_core_that_goes_on_from_output_passes_preempted_once() -> None:
    core = CountingCore()
    assert await find_uncontinued(core, INFO) == frozenset()
    assert core.num_preempted == 1


async def test_what_a_core_does_not_go_on_with_is_left_to_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    found = await find_uncontinued(CountingCore(is_deaf=True), INFO)
    assert found == {"presence_penalty", "frequency_penalty"}
    assert "frequency_penalty, presence_penalty" in caplog.text


async def test_an_adapter_is_tried_where_one_is_loaded() -> None:
    core = CountingCore()
    assert await find_uncontinued(core, INFO, adapter=4) == frozenset()
    assert core.adapters == {0, 4}


async def test_a_core_that_has_no_place_for_output_gets_it_as_prompt() -> None:
    assert await find_uncontinued(CountingCore(keeps_output=False), INFO) == COUNTED


async def test_a_core_that_never_ends_a_trial_is_not_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Silent(CountingCore):
        async def step(self) -> Any:
            return await self.steps.get()

    monkeypatch.setattr(trials, "_MOST_S", 0.05)
    with pytest.raises(ModelError, match=r"trial requests did not end within 0\.05 s"):
        await find_uncontinued(Silent(), INFO)


# ---- Bits --------------------------------------------------------------------------------------


class ScoringCore(CountingCore):
    """Log-probabilities are of the token, and, if it is `odd`, of how many requests there are."""

    def __init__(self, odd: float = 0.0, *, is_deaf: bool = False) -> None:
        super().__init__(is_deaf=is_deaf)
        self._odd = odd

    async def step(self) -> Any:
        step = await super().step()
        for each in step.outputs:
            score = -each.new_token_ids[0] + self._odd * len(step.outputs)
            each.new_logprobs = (None, np.array([[score, -1.0]]), None)
        return step


async def test_bits_that_depend_on_nothing_but_the_request_pass() -> None:
    await check_bits(ScoringCore(), INFO)


@pytest.mark.parametrize(
    ("core", "text"),
    [
        (ScoringCore(odd=1e-6), "--exact: among others vLLM computed a request otherwise"),
        (CountingCore(keeps_output=False), "--exact: this vLLM's model runner does not go on"),
    ],
)
async def test_an_engine_whose_bits_differ_does_not_start_as_exact(
    core: CountingCore, text: str
) -> None:
    with pytest.raises(ModelError, match=text):
        await check_bits(core, INFO)


async def test_an_engine_that_goes_on_otherwise_does_not_start_as_exact() -> None:
    class Forgetful(ScoringCore):
        async def add(self, asked: CoreRequest, adapter: int) -> None:
            await super().add(asked, adapter)
            if asked.sampling["extra_args"]:
                self._left[asked.name][0]["left"] += 1

    with pytest.raises(ModelError, match="as a continuation vLLM computed a request otherwise"):
        await check_bits(Forgetful(), INFO)


def test_a_fingerprint_is_of_all_that_decides_bits() -> None:
    facts = {"device": "H200", "torch": "2.13"}
    one = fingerprint(INFO, facts)
    assert len(one) == 32
    assert one == fingerprint(INFO, dict(reversed(facts.items())))
    others = [
        fingerprint(INFO, {**facts, "torch": "2.14"}),
        *(
            fingerprint(dataclasses.replace(INFO, **{name: "other"}), facts)  # type: ignore[arg-type]
            for name in ("weights_hash", "dtype", "kv_dtype", "attention_backend")
        ),
    ]
    assert len({one, *others}) == 6


# ---- Memory of devices -------------------------------------------------------------------------


def test_a_load_waits_until_the_memory_of_the_engine_before_is_back() -> None:
    told: list[str] = []
    free = iter([[0.95, 0.2], [0.95, 0.2], [0.95, 0.93]])
    wait_for_memory(0.9, told.append, lambda: next(free), patience_s=2.0)
    assert told == ["waiting for GPU memory: 20% is free, 90% is wanted"]
    assert next(free, None) is None


def test_a_load_does_not_wait_for_ever_and_without_a_gpu_not_at_all() -> None:
    told: list[str] = []
    wait_for_memory(0.9, told.append, lambda: [0.5], patience_s=0.05)
    assert len(told) == 1
    wait_for_memory(0.9, told.append, list)
    assert len(told) == 1
