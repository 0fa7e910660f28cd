"""The tests are tested: each fault of tests/faults is caught by what is named beside it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from faults.listed import FAULTS
from faults.planting import (
    Change,
    DoesNotFit,
    Fault,
    becomes,
    files_with,
    left_out,
    never,
    planted,
    returns,
)
from faults.trial import (
    ROOT,
    copy_tree,
    is_caught,
    named_test,
    pass_without,
    seeds_until_found,
)
from support.budget import seeded

TESTED = [fault for fault in FAULTS if fault.caught_by]
SIMULATED = [fault for fault in FAULTS if fault.simulated]

SOURCE = """
class Walk:
    def step(self, on):
        # Left of nothing.
        if (on and
                self.ready):
            self.go(1, pace="slow")
        return [on, *self.rest]

def step(on):
    return on
"""


def _tried() -> list[Fault]:
    """Return all tested faults in a soak, otherwise two that a unit test catches: the tests of the
    others start systems or models.
    """
    if os.environ.get("PENSTOCK_SOAK"):
        return TESTED
    quick = [fault for fault in TESTED if named_test(fault).startswith("tests/unit/")]
    return seeded("planted faults").sample(quick, 2)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "client" / "somewhere").mkdir(parents=True)
    (tmp_path / "client" / "somewhere" / "walk.py").write_text(SOURCE)
    return tmp_path


def test_each_fault_fits_one_place_and_names_what_catches_it():
    assert len({fault.title for fault in FAULTS}) == len(FAULTS) > 100
    for fault in FAULTS:
        files_with(fault, ROOT)
        assert fault.simulated or fault.caught_by, fault.title
    assert [fault.title for fault in TESTED if not named_test(fault)] == []


@pytest.mark.timeout(3600)
def test_planted_faults_are_caught(tmp_path: Path):
    copy_tree(tmp_path)
    tried = _tried()
    assert pass_without(tried, tmp_path)
    assert [fault.title for fault in tried if not is_caught(fault, tmp_path)] == []


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_planted_faults_fail_a_simulated_history(tmp_path: Path):
    copy_tree(tmp_path)
    found = {fault.title: seeds_until_found(fault, tmp_path) for fault in SIMULATED}
    print(*(f"{seeds} seeds: {title}" for title, seeds in found.items()), sep="\n")
    assert [title for title, seeds in found.items() if seeds is None] == []


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (never("on and self.ready"), "if False:"),
        (left_out("self.ready"), "if on:"),
        (left_out("self.go(1, pace='slow')"), "pass"),
        (left_out("pace='slow'"), "self.go(1)"),
        (left_out("*self.rest"), "return [on]"),
        (becomes("pace='slow'", "pace=on"), "self.go(1, pace=on)"),
        (becomes("return [on, *self.rest]", "raise ValueError"), "raise ValueError"),
        (returns("None"), "return None"),
    ],
    ids=str,
)
def test_a_change_is_found_however_its_place_is_written(tree: Path, change: Change, expected: str):
    sound = (tree / "client" / "somewhere" / "walk.py").read_text()
    with planted(Fault("", "Walk.step", change), tree):
        lines = (tree / "client" / "somewhere" / "walk.py").read_text().splitlines()
    assert expected in [line.strip() for line in lines]
    assert (tree / "client" / "somewhere" / "walk.py").read_text() == sound


@pytest.mark.parametrize(
    ("function", "change", "text"),
    [
        ("Walk.stop", never("on"), "there is no Walk.stop"),
        ("Walk.step", never("off"), "fits 0 places"),
        ("Walk.step", never("on"), "fits 2 places"),
        ("step", returns("None"), "fits 2 places"),
        ("Walk.step", returns("await self"), "does not compile"),
    ],
    ids=str,
)
def test_a_fault_that_does_not_fit_one_place_is_refused(
    tree: Path, function: str, change: Change, text: str
):
    with pytest.raises(DoesNotFit, match=text):
        files_with(Fault("", function, change), tree)
