"""Each example of ollama's client is a test: it passes if it ends well."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

_TIMEOUT_S = 45


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    if file_path.parent.name != "examples" or file_path.suffix != ".py":
        return None
    examples: Examples = Examples.from_parent(parent, path=file_path)
    return examples


class Examples(pytest.File):
    """A file with one example, which is a script."""

    def collect(self) -> Iterator[pytest.Item]:
        yield Example.from_parent(self, name="runs")


class Example(pytest.Item):
    """A run of an example; it passes if the script exits with status 0."""

    def runtest(self) -> None:
        ended = subprocess.run(
            [sys.executable, self.path],
            cwd=self.path.parent,
            env={**os.environ, "OLLAMA_HOST": os.environ["SUITE_URL"]},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
        assert ended.returncode == 0, ended.stderr.strip().splitlines()[-1]
