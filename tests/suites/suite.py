"""Runs tests of other projects against a penstock, and says what became of each.

A project's released source is unpacked (`sources.txt`, `make .venv-clients/suites/.done`), and its
tests run in an environment of their own. There a plugin of ours stands in for the server that they
would start (`foreign/`). The table of a suite, `tables/NAME.txt`, says of each test whether it
passes, and if not, why (`tables.py`).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from clients.environments import made
from suites.tables import Found
from support.processes import Router, Shard, running

import penstock_shard

HERE = Path(__file__).parent
FOREIGN = HERE / "foreign"
TEST_TIMEOUT_S = 60
SUITE_TIMEOUT_S = 1200
_EMBEDDINGS = "model.embed_tokens.weight"
_MODEL = Path(penstock_shard.__file__).parent / "builtin_model"


@dataclass(frozen=True, slots=True)
class Suite:
    """Tests of another project."""

    name: str
    # How its folder begins; where in it are tests, and below that the first of its conftest.py.
    source: str
    root: str
    conftests: str
    tests: tuple[str, ...]
    # A module of `foreign` that stands in for its server.
    plugin: str
    # What its tests call the model.
    models: tuple[str, ...]
    # Names of which a test, or a fixture of it, uses one if it speaks to a server; none: all do.
    needs: tuple[str, ...] = ()
    # What one of the routers asks for.
    key: str = "key"
    context: int = 2048
    vocabulary: int = 3072
    shard_flags: tuple[str, ...] = ()
    router_flags: tuple[str, ...] = ()
    # Of pytest.
    options: tuple[str, ...] = ()
    # Tests whose outcome is a matter of chance, and why.
    left_out: dict[str, str] = field(default_factory=dict)


def outcomes(suite: Suite, folder: Path) -> dict[str, Found]:
    """Run a suite, and return the outcome of each test by its id."""
    model = _toy(folder / "model", suite)
    with _served(suite, model, folder) as urls:
        lines = folder / "outcomes.jsonl"
        lines.touch()
        _run(suite, folder, {**urls, "SUITE_MODEL": str(model), "SUITE_OUTCOMES": str(lines)})
        told = [json.loads(line) for line in lines.read_text("utf-8").splitlines()]
    if not told:
        raise RuntimeError(f"{suite.name}: no test ran; {folder / 'pytest'} says why")
    return {each["test"]: Found(each["outcome"], each["message"]) for each in told}


def _toy(folder: Path, suite: Suite) -> Path:
    """A copy of the built-in model with this context and as many tokens; by itself it is greedy, so
    that what depends on its answers does so each time.
    """
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(_MODEL, folder)
    told = {"max_position_embeddings": suite.context, "vocab_size": suite.vocabulary}
    _change(folder / "config.json", told)
    _change(folder / "generation_config.json", {"do_sample": False, "temperature": 0.0})
    weights = load_file(folder / "model.safetensors")
    known = weights[_EMBEDDINGS]
    # Further tokens have the logit 0, which is never the greatest.
    unknown = known.new_zeros(suite.vocabulary - len(known), known.shape[1])
    weights[_EMBEDDINGS] = torch.cat([known, unknown])
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def _change(path: Path, told: Mapping[str, object]) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | told))


@contextmanager
def _served(suite: Suite, model: Path, folder: Path) -> Iterator[dict[str, str]]:
    """A shard of the model under all its names, a router, and one that asks for a key."""
    shard = Shard(
        folder / "shard",
        *("--model", str(model), "--served-model-name", *suite.models, str(model)),
        *("--threads", "1", "--dtype", "float32", *suite.shard_flags),
    )
    router = Router(folder / "router", [shard.address], *suite.router_flags)
    secured = Router(folder / "secured", [shard.address], "--api-key", suite.key)
    with running(shard, router, secured):
        yield {"SUITE_URL": router.url, "SUITE_SECURED_URL": secured.url}


def _run(suite: Suite, folder: Path, variables: dict[str, str]) -> None:
    """Run the suite's tests; pytest's own output is in the folder's `pytest`."""
    environment = made("suites")
    (source,) = (environment / "sources").glob(f"{suite.source}-*")
    # Where it is once links are followed, which pytest would take for another place.
    root = (source / suite.root).resolve()
    with (folder / "pytest").open("wb") as output:
        subprocess.run(
            [environment / "bin" / "python", "-m", "pytest", *_arguments(suite, root)],
            cwd=root,
            env={**_environment(suite, root), **variables},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=SUITE_TIMEOUT_S,
            check=False,
        )


def _arguments(suite: Suite, root: Path) -> list[str]:
    return [
        *("-c", str(FOREIGN / "pytest.ini"), "--rootdir", str(root)),
        *("--confcutdir", str(root / suite.conftests)),
        *("-p", "outcomes", "-p", suite.plugin, "--timeout", str(TEST_TIMEOUT_S)),
        *(f"--deselect={test}" for test in suite.left_out),
        *(*suite.options, *suite.tests),
    ]


def _environment(suite: Suite, root: Path) -> dict[str, str]:
    known = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    return {
        **known,
        "PYTHONPATH": str(FOREIGN),
        "HF_HUB_OFFLINE": "1",
        "SUITE_NEEDS": " ".join(suite.needs),
        "SUITE_ROOT": str(root),
    }
