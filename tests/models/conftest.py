"""The setup of all tests with torch: one compute thread and no downloads.

The environment is set before torch and transformers are imported.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ["HF_HUB_OFFLINE"] = "1"

# The rest of the tests runs without torch; these are left out where it is not installed.
collect_ignore_glob: list[str] = []
if importlib.util.find_spec("torch") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    import torch
    from support.triton_interpreter import use_interpreter

    torch.set_num_threads(1)
    if not torch.cuda.is_available():
        use_interpreter()


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A function from a family's name to a directory with a small random model of it."""
    from model_maker import make_model

    made: dict[str, Path] = {}

    def directory(family: str) -> Path:
        if family not in made:
            made[family] = make_model(tmp_path_factory.mktemp(family), family)
        return made[family]

    return directory


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loads that are all made anew: tests change what loads do, and the names of kept loads do not
    show it.
    """
    if "torch" in sys.modules:
        from penstock_shard.model_loader import load_checked

        monkeypatch.setattr(load_checked, "_may_keep", lambda config: False)


@pytest.fixture
def whole_check() -> None:
    """The whole check of batch invariance, for tests of whether results depend on the batch."""


@pytest.fixture(autouse=True)
def short_check(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A check of batch invariance in a few small steps, for all other tests: the whole check at
    each load would take a quarter of their time.
    """
    if "torch" not in sys.modules or "whole_check" in request.fixturenames:
        return
    from penstock_shard.selfcheck import batch_invariance

    for name, value in (("_LENGTH", 4), ("_CHUNK", 3), ("_LAST", 1), ("_FILLER_CHUNK", 3)):
        monkeypatch.setattr(batch_invariance, name, value)
    monkeypatch.setattr(batch_invariance, "_ROWS", (3,))
    monkeypatch.setattr(batch_invariance, "_MAX_DECODES", 1)
    monkeypatch.setattr(batch_invariance, "_EDGE", range(3, 4))
