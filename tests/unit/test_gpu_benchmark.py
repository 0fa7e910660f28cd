"""The GPU benchmark's arithmetic, what it calls met, and its files."""

from __future__ import annotations

import os
import re
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.gpu_bench import goals, marks, results
from benchmarks.gpu_bench.parts import PARTS
from benchmarks.gpu_bench.shapes import SHAPES

ROOT = Path(__file__).parents[2]
_DECODE: dict[str, Any] = {
    "what": "decode",
    "model": "m",
    "batch": 32,
    "context": 512,
    "period_ms": 5.0,
    "of_floor": 1.2,
    "floor_ms": 4.2,
}


# Parameters as the models' cards state them, less what a decode step does not read (a row of the
# embedding for each token, where the head is not the same matrix) and what is too small to count
# (norms, biases, routers).
@pytest.mark.parametrize(
    ("name", "parameters", "unread"),
    [
        ("llama-3.1-8b", 8_030_261_248, 128256 * 4096 + 65 * 4096),
        ("qwen2.5-1.5b", 1_543_714_304, 57 * 1536 + 28 * 2048),
        (
            "qwen3-30b-a3b",
            30_532_122_624,
            151936 * 2048 + 48 * 128 * 2048 + 48 * (2 * 2048 + 2 * 128) + 2048,
        ),
        ("llama-70b", 70_553_706_496, 128256 * 8192 + 161 * 8192),
    ],
)
def test_a_large_step_reads_the_parameters_that_a_model_is_known_to_have(
    name: str, parameters: int, unread: int
) -> None:
    assert SHAPES[name].weights_read(10**6) == pytest.approx(parameters - unread, rel=1e-12)


def test_one_token_reads_only_the_experts_it_chooses() -> None:
    shape = SHAPES["qwen3-30b-a3b"]
    experts = 48 * 3 * 2048 * 768
    assert shape.weights_read(1) == pytest.approx(shape.weights_read(10**6) - 120 * experts)
    assert shape.weights_read(1) < shape.weights_read(2) < shape.weights_read(32)


def test_where_weights_have_few_bits_the_head_has_as_many_as_activations() -> None:
    shape = SHAPES["llama-70b"]
    weights, head = shape.weights_read(1), 128256 * 8192
    assert shape.weight_bytes(1, "bfloat16") == 2 * weights
    assert shape.weight_bytes(1, "fp8") == weights + head


def test_a_step_that_takes_longer_than_its_goal_is_not_met() -> None:
    rows = [_DECODE, {**_DECODE, "of_floor": 1.31}]
    assert [line.met for line in goals.lines(rows)] == [True, False]


def test_a_goal_that_states_its_floor_is_held_against_that_on_the_device_it_names() -> None:
    row = {**_DECODE, "model": "llama-3.1-8b", "period_ms": 6.1, "of_floor": 1.38}
    facts = {"what": "facts", "device": "NVIDIA H200"}
    (line,) = goals.lines([facts, row])
    assert (line.goal, line.met) == ("<= 1.30 x 4.7", True)
    (line,) = goals.lines([facts, {**row, "period_ms": 6.2}])
    assert line.met is False
    (line,) = goals.lines([{**facts, "device": "NVIDIA H100"}, row])
    assert (line.goal, line.met) == ("<= 1.30 x", False)


def test_what_exactness_costs_is_told_of_two_parts() -> None:
    exact = {**_DECODE, "model": "m exact", "period_ms": 6.5}
    (line,) = list(goals.lines([_DECODE, exact]))[2:]
    assert line.figure == "1.30 x the time without"
    assert line.met is False


def test_what_exactness_costs_is_told_at_the_batch_its_goal_is_stated_for() -> None:
    plain = {**_DECODE, "batch": 1}
    assert len(list(goals.lines([plain, {**plain, "model": "m exact"}]))) == 2


def test_what_fp8_gains_is_told_of_two_parts() -> None:
    fp8 = {**_DECODE, "model": "m fp8", "period_ms": 3.0}
    (line,) = list(goals.lines([_DECODE, fp8]))[2:]
    assert line.figure == "1.67 x as fast"
    assert line.met is True


def test_throughput_is_held_against_what_was_published_for_the_device() -> None:
    row = {"what": "throughput", "model": "m", "requests": 8, "tokens": 1000}
    row |= {"tokens_per_s": 11_000.0, "tpot_p50_ms": 20.0}
    found = {}
    for device in ("NVIDIA H100 80GB HBM3", "NVIDIA H200", "NVIDIA L4"):
        (line,) = goals.lines([{"what": "facts", "device": device}, row])
        found[device] = (line.goal, line.met)
    assert list(found.values()) == [
        (">= 70 % of 15,220", True),
        (">= 70 % of 17,744", False),
        ("", None),
    ]


def test_bits_that_differ_are_named() -> None:
    row = {"what": "exact", "model": "m", "batch": 256, "batch_invariant": True}
    found = [
        *goals.lines([{**row, "differing": []}]),
        *goals.lines([{**row, "differing": ["in chunks"]}]),
        *goals.lines([{**row, "batch_invariant": False, "differing": []}]),
    ]
    assert [(line.figure, line.met) for line in found] == [
        ("equal bits", True),
        ("differs: in chunks", False),
        ("differs: at load", False),
    ]


def test_kernels_that_take_most_of_a_step_are_named_without_what_is_in_all_names() -> None:
    names = (
        "split_kernel",
        "void at::native::reduce_kernel<512, 1, ReduceOp>(ReduceOp)",
        "nvjet_a",
    )
    kernels = [{"name": name, "us": 4000.2, "launches": 32.0} for name in names]
    row = {"what": "kernels", "model": "m", "step": "prefill of 8", "kernels": kernels}
    (line,) = goals.lines([row])
    assert line.what == "m: kernels, prefill of 8"
    assert line.figure == "split_kernel 4,000 us, reduce_kernel 4,000 us, nvjet_a 4,000 us"
    assert line.met is None


def test_what_a_shard_had_to_leave_out_stands_beside_its_figures() -> None:
    said = [
        "loading weights: 30 %",
        "checking what the model computes",
        "CUDA graphs: none, broken",
    ]
    (line,) = goals.lines([{"what": "loaded", "model": "m", "seconds": 12.3, "said": said}])
    assert (line.what, line.figure) == ("m: loaded", "12 s; CUDA graphs: none, broken")


def test_a_part_that_failed_has_a_line_of_the_table() -> None:
    found = list(goals.lines([{"part": "prefill-8b", "failed": "not within 60 s"}]))
    assert "| prefill-8b | not within 60 s |  | no |" in goals.table(found)


def test_an_attempt_has_a_line_of_what_it_found_or_of_why_it_failed() -> None:
    row = {"part": "checks", "what": "attempt", "name": "rows"}
    good, bad = goals.lines(
        [{**row, "seconds": 1.5, "found": "right"}, {**row, "failed": "differs by 2"}]
    )
    assert (good.what, good.figure, good.met) == ("checks: rows", "right (1.5 s)", None)
    assert (bad.what, bad.figure, bad.met) == ("checks: rows", "differs by 2", False)


def test_sampling_with_top_p_is_held_against_the_step_of_the_8b() -> None:
    step = {**_DECODE, "model": "llama-3.1-8b", "batch": 256, "period_ms": 10.0}
    sampling = {"what": "sampling", "batch": 256, "logits": "flat", "host_ms": 0.1, "floor_ms": 0.1}
    rows = [{**sampling, "parameters": "top_p", "ms": ms} for ms in (1.5, 1.6)]
    rows += [{**sampling, "parameters": "greedy", "ms": 9.0}]
    rows += [{**sampling, "batch": 32, "parameters": "top_p", "ms": 9.0}]
    found = [line for line in goals.lines([step, *rows]) if "over the step" in line.what]
    assert [(line.figure, line.met) for line in found] == [("0.15 x", True), ("0.16 x", False)]


def test_rows_of_parts_that_run_side_by_side_are_all_kept(tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda n: results.add_rows(tmp_path, {"n": n}), range(100)))
    assert sorted(row["n"] for row in results.read_rows(tmp_path)) == list(range(100))


def test_a_row_that_the_table_cannot_show_costs_no_more_than_the_table(tmp_path: Path) -> None:
    results.add_rows(tmp_path, {"what": "begun", "part": "8b"}, {"what": "decode", "part": "8b"})
    results.write_report(tmp_path, [])
    ending, _, table = (tmp_path / "summary.txt").read_text().splitlines()
    assert ending == "8b: not over yet"
    assert table.startswith("There is no table, as of KeyError: ")


def test_logs_of_a_part_are_kept_with_those_of_its_servers(tmp_path: Path) -> None:
    folder = tmp_path / "8b"
    folder.mkdir()
    (folder / "log").write_text("one")
    (folder / "shard.log").write_bytes(b"\xff two")
    results.write_report(tmp_path, [folder])
    found = (tmp_path / "logs.txt").read_text()
    assert found == "==== 8b: log\none\n==== 8b: shard.log\n\ufffd two\n"


@pytest.mark.parametrize(
    ("log", "words"),
    [
        ("", "it said nothing"),
        ("loading\nchecking\n\n", "checking"),
        (
            'Traceback (most recent call last):\n  File "a.py", line 1\nRuntimeError: CUDA error\n'
            "Compile with more\n",
            "RuntimeError: CUDA error",
        ),
        (
            "Fatal Python error: Aborted\n\nCurrent thread 0x1 (most recent call first):\n"
            '  File "a.py", line 3 in waits\n  File "a.py", line 9 in <module>\n',
            'Fatal Python error: Aborted   File "a.py", line 3 in waits',
        ),
    ],
)
def test_last_words_of_a_log_are_its_last_error_or_line(log: str, words: str) -> None:
    assert results.last_words(log) == words


def test_a_mark_is_above_those_that_continue_it_after_a_slash() -> None:
    assert marks._is_below("/tmp/a", "/tmp/a")
    assert marks._is_below("/tmp/a/8b", "/tmp/a")
    assert not marks._is_below("/tmp/ab", "/tmp/a")
    assert not marks._is_below("", "/tmp/a")


def test_a_process_without_a_mark_is_nobodys() -> None:
    assert marks._mark_of(Path("/proc") / str(os.getpid())) == ""
    assert marks._mark_of(Path("/proc/no-such-process")) == ""


def test_the_page_has_all_parts_in_their_order_with_their_bounds() -> None:
    page = (ROOT / "docs" / "gpu.md").read_text("utf-8")
    rows = re.findall(r"^\| `([^`]+)` \| (\d+) \|", page, re.MULTILINE)
    assert [(name, float(bound)) for name, bound in rows] == [
        (name, part.bound_s) for name, part in PARTS.items()
    ]


def test_wheels_for_a_bare_machine_are_of_versions_that_penstock_asks_for() -> None:
    text = (ROOT / "benchmarks" / "gpu_bench" / "wheels.txt").read_text()
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    wheels = {wheel.name: wheel.specifier for wheel in map(Requirement, lines)}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked: dict[str, set[str]] = {}
    for extra in ("client", "router", "fake", "shard", "dev"):
        for each in map(Requirement, project["optional-dependencies"][extra]):
            if extra != "dev" or each.name == "psutil":
                asked.setdefault(each.name, set()).add(str(each.specifier))
    # torch and transformers, and what they bring.
    there = {"jinja2", "numpy", "huggingface-hub", "safetensors", "tokenizers"}
    there |= {"torch", "transformers", project["name"]}
    for name in set(asked) - there:
        assert str(wheels[name]) in asked[name], name
