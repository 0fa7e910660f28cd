"""The environments in which released clients are installed; runs a script or a program there.

The Makefile makes the environments. A script is a module of `clients.scripts`, which returns its
observations as JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from clients.asked import ENGINE

TESTS = Path(__file__).parents[1]
ENVIRONMENTS = TESTS.parent / ".venv-clients"
TIMEOUT_S = 100.0

# What a test run may have set and a user would not: huggingface_hub's client, for one, refuses to
# talk to any server in its offline mode.
_TELLTALE = ("PYTHONPATH", "HF_HUB_OFFLINE")
# What only `make soak` installs.
_OF_THE_SOAK = ("agents", "harnesses", "node", "sdks", "suites")
# litellm's prices come with it, and would be looked up anew.
_NO_DOWNLOADS = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}


def python_of(environment: str) -> Path:
    """Return the path of an environment's Python; `dev` is the environment that tests run in.

    If the environment does not exist, skip the test, or fail it where the variable CI is set.
    """
    if environment == "dev":
        return Path(sys.executable)
    return made(environment) / "bin" / "python"


def node_packages() -> Path:
    """Return the folder of the packages for Node and of the code generated from the proto.

    Skips as `python_of`.
    """
    return made("node")


def agent_packages() -> Path:
    """Return the folder in which coding agents are installed; skips as `python_of`."""
    return made("agents")


def made(environment: str) -> Path:
    """Return the folder of an environment; skips as `python_of`."""
    if environment in _OF_THE_SOAK and not os.environ.get("PENSTOCK_SOAK"):
        pytest.fail(f"{environment} is installed for the soak only: mark what needs it `soak`")
    if not (ENVIRONMENTS / environment / ".done").exists():
        missing = f"no clients to test with; make them: make .venv-clients/{environment}/.done"
        if os.environ.get("CI"):
            pytest.fail(missing)
        pytest.skip(missing)
    return ENVIRONMENTS / environment


# vLLM's answers end where the model ends them, and may depend on what else is computed.
OF_ANY_LENGTH = pytest.mark.skipif(ENGINE == "vllm", reason="this engine's answers may end early")
# It embeds in a mode in which it does nothing else.
WITH_EMBEDDINGS = pytest.mark.skipif(ENGINE == "vllm", reason="this engine has no embeddings")


def observe(environment: str, script: str, *arguments: str) -> Any:
    """Run a script, and return the JSON that it printed on its last line."""
    module = f"clients.scripts.{script}"
    output = run(environment, "-m", module, *arguments, folder=TESTS)
    return json.loads(output.splitlines()[-1])


def run(environment: str, *arguments: str, folder: Path, **variables: str) -> str:
    """Run Python with these arguments, and return its output.

    The process does not get the variables of a test run that a user would not have set.
    """
    known = {name: value for name, value in os.environ.items() if name not in _TELLTALE}
    ended = subprocess.run(
        [python_of(environment), *arguments],
        cwd=folder,
        env={**known, **_NO_DOWNLOADS, **variables},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert ended.returncode == 0, f"{arguments}: {ended.stdout[-2000:]}\n{ended.stderr[-4000:]}"
    return ended.stdout
