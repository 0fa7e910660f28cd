"""Two recordings of one checkout are equal, and what is wrong or differs is told."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from comparison.differences import differences
from histories.reading import Line, wrong
from support.checkouts import this_checkout

LINE: Line = {
    "token_ids": [5, 6],
    "logprobs.chosen": ["bf860000", "bf870000"],
    "finish": ["length"],
    "ends": [1, 1],
    "gaps": 0,
    "late": 0,
}


def test_what_is_wrong_by_itself_and_what_differs_is_told() -> None:
    assert wrong({"it": LINE}) == []
    assert wrong({"it": LINE | {"gaps": 2}}) == ["it: 2 positions do not follow the one before"]
    assert wrong({"it": LINE | {"late": 1}}) == ["it: 1 outputs came after the end"]
    assert wrong({"it": LINE | {"ends": [1, 0]}}) == ["it: it ended [1, 0] times"]
    now = copy.deepcopy(LINE)
    now["logprobs.chosen"][1] = "bf870001"
    (line,) = differences({"it": LINE}, {"it": now})
    assert line == "it: logprobs.chosen[1] was 'bf870000', is 'bf870001'"


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("parts", "num_requests"), [(("fake",), 157), (("model", "seeing"), 189)])
def test_histories_are_the_same_twice(
    tmp_path: Path, parts: tuple[str, ...], num_requests: int
) -> None:
    if parts != ("fake",):
        pytest.importorskip("torch")
    tests = str(Path(__file__).parents[1])
    paths = os.pathsep.join((this_checkout().python_path, tests))
    files = [tmp_path / "first", tmp_path / "second"]
    runs = [
        subprocess.Popen(
            [sys.executable, "-m", "histories", str(file), "--parts", *parts],
            env={**os.environ, "PYTHONPATH": paths},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for file in files
    ]
    for run in runs:
        said, _ = run.communicate()
        assert run.returncode == 0, said
    first, second = (file.read_text() for file in files)
    assert first == second
    assert len({json.loads(line)["request"] for line in first.splitlines()}) == num_requests
