"""Our worker for processors, and where it is used; vLLM is a stand-in here."""

from __future__ import annotations

import random
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from penstock_shard.vllm_engine import core


class TheirWorker:
    """Draws for each row with its generator; discards as vLLM does, which fails."""

    def __init__(self, seeds: dict[int, int], discarded: list[bool]) -> None:
        generators = {row: random.Random(seed) for row, seed in seeds.items()}
        self.model_runner = SimpleNamespace(
            input_batch=SimpleNamespace(generators=generators),
            discard_request_mask=SimpleNamespace(np=np.array(discarded)),
        )

    def sample_tokens(self, grammar_output: Any) -> Any:
        runner = self.model_runner
        generators = runner.input_batch.generators
        if any(runner.discard_request_mask.np[row] for row in generators):
            raise RuntimeError("a generator of processors does not go back")
        return grammar_output, {row: each.random() for row, each in generators.items()}


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Our worker over theirs: row 1 is in the midst of its prompt, row 2 has no seed."""
    theirs = "vllm.v1.worker.cpu_worker"
    monkeypatch.setitem(sys.modules, theirs, SimpleNamespace(CPUWorker=TheirWorker))
    ours = "penstock_shard.vllm_engine.in_core.cpu_worker"
    monkeypatch.delitem(sys.modules, ours, raising=False)
    from penstock_shard.vllm_engine.in_core.cpu_worker import Worker

    yield Worker({0: 5, 1: 6, 3: 7}, [False, True, True, False])
    monkeypatch.delitem(sys.modules, ours)


def test_a_piece_of_a_prompt_draws_nothing_from_its_seed(worker: Any) -> None:
    first = {row: random.Random(seed).random() for row, seed in ((0, 5), (1, 6), (3, 7))}
    told, drawn = worker.sample_tokens("masks")
    assert (told, drawn) == ("masks", {0: first[0], 3: first[3]})
    worker.model_runner.discard_request_mask.np[:] = False
    _, drawn = worker.sample_tokens(None)
    assert set(drawn) == {0, 1, 3}
    assert drawn[1] == first[1]


@pytest.mark.parametrize(
    ("worker", "is_newer", "lacks", "is_ours"),
    [
        ("vllm.v1.worker.cpu_worker.CPUWorker", False, [], True),
        ("vllm.v1.worker.cpu_worker.CPUWorker", False, ["a.b:C"], False),
        ("vllm.v1.worker.cpu_worker.CPUWorker", True, [], False),
        ("vllm.v1.worker.gpu_worker.Worker", False, [], False),
    ],
)
def test_it_is_used_on_processors_with_the_older_runner(
    worker: str, is_newer: bool, lacks: list[str], is_ours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(worker_cls=worker), use_v2_model_runner=is_newer
    )
    made = SimpleNamespace(create_engine_config=lambda **_: config)
    modules: dict[str, dict[str, Any]] = {
        "vllm.config": {"PoolerConfig": None},
        "vllm.engine.arg_utils": {"AsyncEngineArgs": lambda: made},
        "vllm.usage.usage_lib": {"UsageContext": SimpleNamespace(OPENAI_API_SERVER="server")},
    }
    for name, names in modules.items():
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**names))
    monkeypatch.setattr(core, "missing", lambda _: lacks)
    core.configure({}, schedules=False)
    ours = "penstock_shard.vllm_engine.in_core.cpu_worker.Worker"
    assert config.parallel_config.worker_cls == (ours if is_ours else worker)
