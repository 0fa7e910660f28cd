"""One compute thread, no downloads: set before torch and transformers are imported."""

from __future__ import annotations

import importlib.util
import os
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
