"""Tests that need released clients do not go missing unseen."""

from __future__ import annotations

import pytest
from clients.environments import python_of


def test_without_its_clients_a_test_is_skipped_and_says_how_to_make_them(monkeypatch) -> None:
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match=r"make \.venv-clients/none/\.done"):
        python_of("none")


def test_in_ci_a_test_fails_without_its_clients(monkeypatch) -> None:
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match=r"make \.venv-clients/none/\.done"):
        python_of("none")


def test_a_test_outside_of_the_soak_does_not_need_what_only_the_soak_installs(monkeypatch) -> None:
    monkeypatch.delenv("PENSTOCK_SOAK", raising=False)
    with pytest.raises(pytest.fail.Exception, match="installed for the soak only"):
        python_of("sdks")
