"""Tests of what counts as a difference, which fields need a case, which tree is the baseline."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from comparison.cases import PLAIN, WITHOUT, Case, merge, not_as_said, pairs, requests_of
from comparison.differences import differences
from support.checkouts import at_revision, baseline, copy_of, this_checkout

ANSWER: dict[str, Any] = {"token_ids": [5, 6, 7], "logprobs": {"chosen": [-1.0, -0.25]}}
CASES = {
    "top_p": Case({"sampling": {"top_p": 0.5}}),
    "ignore_eos": Case({"ignore_eos": True}, {"stop": [2]}),
    "label": Case({"label": "mine"}, shows=False),
}


def test_equal_answers_have_no_differences() -> None:
    assert differences({"a": ANSWER, "b": ANSWER}, {"a": ANSWER, "b": ANSWER, "c": {}}) == []


@pytest.mark.parametrize(
    ("now", "line"),
    [
        (ANSWER | {"token_ids": [5, 9, 7]}, "token_ids[1] was 6, is 9"),
        (ANSWER | {"token_ids": [5, 6]}, "the length of token_ids was 3, is 2"),
        (ANSWER | {"logprobs": {}}, "logprobs.chosen was [-1.0, -0.25], is absent"),
        (
            # One unit in the last place of a float32.
            ANSWER | {"logprobs": {"chosen": [-1.0, -0.2500000298023224]}},
            "logprobs.chosen[1] was -0.25, is -0.2500000298023224",
        ),
        ({**ANSWER, "stop_token_id": None}, "stop_token_id was absent, is None"),
        ({**ANSWER, "stop_token_id": 7}, "stop_token_id was absent, is 7"),
        ({"error": "InvalidRequest"}, "token_ids was [5, 6, 7], is absent"),
        (None, "the answer was"),
    ],
)
def test_a_difference_names_the_case_and_the_first_place(now: object, line: str) -> None:
    (found,) = differences({"top_p": ANSWER, "same": 1}, {"top_p": now, "same": 1})
    assert found.startswith(f"top_p: {line}")


def test_one_is_not_true() -> None:
    assert differences({"a": {"x": True}}, {"a": {"x": 1}}) == ["a: x was True, is 1"]


def test_a_case_is_asked_with_its_field_and_without() -> None:
    base = {"sampling": {"seed": 7}}
    assert requests_of(base, CASES) == {
        PLAIN: base,
        "top_p": {"sampling": {"seed": 7, "top_p": 0.5}},
        "ignore_eos": {**base, "stop": [2], "ignore_eos": True},
        "ignore_eos" + WITHOUT: {**base, "stop": [2]},
        "label": {**base, "label": "mine"},
    }
    assert list(pairs(base, CASES, ["top_p", "label"])) == ["top_p and label"]
    assert merge(base, {"sampling": {"seed": 8}}) == {"sampling": {"seed": 8}}


def test_a_field_that_both_checkouts_drop_is_found() -> None:
    answers = {PLAIN: 1, "top_p": 2, "ignore_eos": 3, "ignore_eos" + WITHOUT: 4, "label": 1}
    assert not_as_said(CASES, answers) == []
    dropped = answers | {"top_p": 1, "ignore_eos": 4, "label": 9}
    assert not_as_said(CASES, dropped) == [
        "top_p: shows nothing",
        "ignore_eos: shows nothing",
        "label: changes the answer",
    ]


def test_without_the_history_a_comparison_is_skipped_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(pytest.skip.Exception, match=r"history of this repository is not here"):
        at_revision("0" * 40, tmp_path)


def test_the_commit_before_can_be_named_for_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_BASELINE", "HEAD")
    tree = baseline(tmp_path)
    assert tree.name == "HEAD"
    head = ["git", "-C", str(this_checkout().root), "show", "HEAD:CONTRIBUTING.md"]
    told = subprocess.run(head, capture_output=True, check=True).stdout
    assert (tree.root / "CONTRIBUTING.md").read_bytes() == told


def test_a_checkout_finds_its_packages_where_its_own_project_file_says(tmp_path: Path) -> None:
    tree = copy_of(this_checkout(), tmp_path / "copy")
    for path in tree.python_path.split(os.pathsep):
        assert Path(path).parent == tmp_path / "copy"
        assert list(Path(path).glob("penstock_*/__init__.py"))
