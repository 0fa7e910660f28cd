"""Tables of what other projects' tests do (tests/suites) are read, compared and kept."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from suites.all import SUITES
from suites.tables import (
    FOLDER,
    Found,
    Row,
    differences,
    mistakes,
    path_of,
    read,
    summary,
    updated,
    written,
)

TABLE = """\
# 2 pass, 0 fault, 1 gap, 1 n/a

test_chat.py
skip n/a   test_a_gpu  # there is none
pass -     test_an_answer[a # b]
fail gap   test_beams  # beam search is not served

test_more.py
pass -     test_another
"""
SOAK = Path(__file__).parents[1] / "soak.md"


@pytest.mark.parametrize("name", SUITES)
def test_each_suite_has_a_table_of_which_each_row_says_what_it_must(name: str) -> None:
    text = path_of(name).read_text("utf-8")
    table = read(text)
    assert list(mistakes(table)) == []
    assert written(table) == text


def test_each_table_is_of_a_suite() -> None:
    assert {path.stem for path in FOLDER.iterdir()} == set(SUITES)


@pytest.mark.parametrize("name", SUITES)
def test_the_page_of_the_soak_counts_as_the_table_does(name: str) -> None:
    counted = re.search(rf"{name}: ([^;)]*)", SOAK.read_text("utf-8"))
    assert counted
    assert counted[1] == summary(read(path_of(name).read_text("utf-8")))


def test_a_table_is_written_as_it_is_read() -> None:
    table = read(TABLE)
    assert table["test_chat.py::test_beams"] == Row("fail", "gap", "beam search is not served")
    assert table["test_chat.py::test_an_answer[a # b]"] == Row("pass")
    assert written(table) == TABLE


def test_a_table_does_not_name_a_test_twice() -> None:
    with pytest.raises(AssertionError, match=r"twice: test_more\.py::test_another"):
        read(TABLE + "pass -     test_another\n")


def test_what_does_as_its_row_says_makes_no_difference() -> None:
    found = {name: Found(row.outcome, "any") for name, row in read(TABLE).items()}
    assert list(differences(read(TABLE), found)) == []


def test_what_does_otherwise_or_has_no_row_or_did_not_run_is_a_difference() -> None:
    found = {
        "test_chat.py::test_an_answer[a # b]": Found("fail", "no answer"),
        "test_chat.py::test_beams": Found("pass"),
        "test_chat.py::test_new": Found("pass"),
        "test_more.py::test_another": Found("pass"),
    }
    assert list(differences(read(TABLE), found)) == [
        "test_chat.py::test_a_gpu: did not run",
        "test_chat.py::test_an_answer[a # b]: fail, but its row says pass: no answer",
        "test_chat.py::test_beams: pass, but its row says fail: beam search is not served",
        "test_chat.py::test_new: has no row, and its outcome is pass: ",
    ]


def test_an_updated_table_keeps_the_reasons_of_what_still_does_not_pass() -> None:
    found = {
        "test_chat.py::test_an_answer[a # b]": Found("fail", "no answer"),
        "test_chat.py::test_beams": Found("skip", "no beams"),
        "test_chat.py::test_a_gpu": Found("pass"),
    }
    table = updated(read(TABLE), found)
    assert table == {
        "test_chat.py::test_an_answer[a # b]": Row("fail", "fault", "no answer"),
        "test_chat.py::test_beams": Row("skip", "gap", "beam search is not served"),
        "test_chat.py::test_a_gpu": Row("pass"),
    }
    assert list(mistakes(table)) == [
        "test_chat.py::test_an_answer[a # b]: a fault that does not say until what"
    ]


def test_a_fault_that_nobody_judged_says_what_it_says_now() -> None:
    table = {"test_a.py::test_b": Row("fail", "fault", "no answer")}
    found = {"test_a.py::test_b": Found("fail", "another answer")}
    assert updated(table, found) == {"test_a.py::test_b": Row("fail", "fault", "another answer")}
    judged = {"test_a.py::test_b": Row("fail", "fault", "until it answers")}
    assert updated(judged, found) == judged


@pytest.mark.parametrize(
    ("row", "mistake"),
    [
        (Row("pass", "gap"), "passes, and has a reason"),
        (Row("fail"), "'' is no kind"),
        (Row("skip", "gap"), "says not why"),
        (Row("fail", "fault", "it is slow"), "a fault that does not say until what"),
    ],
)
def test_a_row_that_says_too_little_or_too_much_is_a_mistake(row: Row, mistake: str) -> None:
    assert list(mistakes({"test_a.py::test_b": row})) == [f"test_a.py::test_b: {mistake}"]
    assert list(mistakes({"a": Row("fail", "fault", "until it is fast"), "b": Row("pass")})) == []
