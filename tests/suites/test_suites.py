"""Tests of other projects do as their tables say: `tables/`, written anew by `python -m suites`."""

from __future__ import annotations

from pathlib import Path

import pytest
from suites.all import SUITES
from suites.suite import SUITE_TIMEOUT_S, outcomes
from suites.tables import differences, path_of, read

pytestmark = [pytest.mark.soak, pytest.mark.timeout(SUITE_TIMEOUT_S + 120)]


@pytest.mark.parametrize("name", SUITES)
def test_each_test_of_another_project_does_as_its_row_says(name: str, tmp_path: Path) -> None:
    found = outcomes(SUITES[name], tmp_path)
    assert found, (tmp_path / "pytest").read_text("utf-8")[-4000:]
    different = list(differences(read(path_of(name).read_text("utf-8")), found))
    assert not different, "\n".join([f"{len(different)} of {len(found)}:", *different])
