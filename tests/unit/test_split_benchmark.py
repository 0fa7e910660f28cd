"""The parts of benchmarks/split.py that are not processes: what a step is made of, equal tokens."""

from __future__ import annotations

import sys
from itertools import islice
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks import split
from benchmarks.split_bench import load
from benchmarks.split_bench.steps import Moment, parts_of
from benchmarks.split_bench.ways import Stack


def _moments(
    period_s: float,
    *,
    cpu_s: float,
    runner_cpu_s: float = 0.0,
    idle_s: float = 0.0,
    count: int = 11,
) -> list[Moment]:
    """Return the moments at which equal steps end. The first step ends at 0."""
    return [
        Moment(
            at_s=i * period_s,
            cpu_s=i * cpu_s,
            runner_cpu_s=i * runner_cpu_s,
            runner_s=i * (runner_cpu_s + 0.002),
            core_wait_s=i * 0.001,
            runner_core_wait_s=i * 0.0005,
            idle_s=i * idle_s,
            rows=4,
            tokens=3,
        )
        for i in range(count)
    ]


def test_a_step_on_the_engines_thread_is_model_engine_and_waiting() -> None:
    moments = _moments(0.020, cpu_s=0.012, runner_cpu_s=0.010, idle_s=0.003)
    parts = parts_of(moments, 0.0, 1.0, step_s=None, threads=1)
    assert (parts.steps, parts.tokens, parts.rows) == (10, 30, 4)
    found = (parts.period_s, parts.device_s, parts.engine_s, parts.wait_s, parts.engine_cpu_s)
    assert found == pytest.approx((0.017, 0.010, 0.002, 0.005, 0.002))


def test_what_compute_threads_wait_for_each_other_is_the_models_time() -> None:
    moments = _moments(0.020, cpu_s=0.012, runner_cpu_s=0.010)
    parts = parts_of(moments, 0.0, 1.0, step_s=None, threads=2)
    assert (parts.device_s, parts.wait_s) == pytest.approx((0.0115, 0.0065))


@pytest.mark.parametrize(
    ("period_s", "cpu_s", "engine_s", "wait_s"),
    [
        # All of the engine's work fits into the step that runs beside it.
        (0.010, 0.008, 0.0, 0.0),
        (0.014, 0.008, 0.0, 0.004),
        (0.014, 0.013, 0.003, 0.001),
    ],
)
def test_a_device_waits_for_what_does_not_fit_into_its_step(
    period_s: float, cpu_s: float, engine_s: float, wait_s: float
) -> None:
    parts = parts_of(_moments(period_s, cpu_s=cpu_s), 0.0, 1.0, step_s=0.010, threads=1)
    assert (parts.device_s, parts.engine_s, parts.wait_s) == pytest.approx(
        (0.010, engine_s, wait_s), abs=1e-9
    )


def test_steps_outside_the_window_do_not_count() -> None:
    moments = _moments(0.1, cpu_s=0.05)
    assert parts_of(moments, 0.25, 0.65, step_s=None, threads=1).steps == 3
    with pytest.raises(RuntimeError, match="no step"):
        parts_of(moments, 5.0, 6.0, step_s=None, threads=1)


def test_the_same_number_gives_the_same_requests() -> None:
    first, again, other = (load._bodies(seed) for seed in (7, 7, 8))
    bodies = [next(first) for _ in range(50)]
    assert bodies == [next(again) for _ in range(50)]
    assert bodies[:5] != [next(other) for _ in range(5)]


def test_requests_fit_into_the_context_of_the_built_in_model() -> None:
    longest = max(map(sum, islice(load.lengths(0), 20_000)))
    assert 1024 < longest < 2048


def test_other_tokens_for_the_same_seeds_are_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    group = split.Group("fake", 4, (), 0.01)
    comparison = split._Comparison(group, split.parse_args([]), tmp_path)
    stack = Stack(1, tmp_path, {})
    answers = iter([["a", "b"], ["a", "b"], ["a", "c"]])
    monkeypatch.setattr(load, "probe_texts", lambda port: next(answers))
    comparison._compare_tokens(stack, "one process")
    comparison._compare_tokens(stack, "pair")
    with pytest.raises(RuntimeError, match="fake, 4 streams: pair gave other tokens"):
        comparison._compare_tokens(stack, "pair")
