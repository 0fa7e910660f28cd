"""Shards whose engine is vLLM's build for processors, which `make soak` installs."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from support.processes import Shard

ENVIRONMENT = Path(__file__).parents[2] / ".venv-clients" / "vllm"
PYTHON = ENVIRONMENT / "bin" / "python"
INSTALLED = pytest.mark.skipif(
    not PYTHON.exists(), reason="vLLM is not installed: make soak does that"
)
# Of an environment for models that see.
SEES = ENVIRONMENT / "pictures" / "bin" / "python"
SEES_INSTALLED = pytest.mark.skipif(
    not SEES.exists(), reason="vLLM for models that see is not installed: make soak does that"
)
START_S = 240.0


def start(folder: Path, *flags: str, python: Path = PYTHON, threads: str = "0-1") -> Shard:
    folder.mkdir(exist_ok=True)
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": threads}
    sizes = ("--max-num-seqs", "8", "--max-model-len", "512", "--dtype", "float32")
    engine = ("--engine", "vllm", "--engine-python", str(python), "--enforce-eager")
    return Shard(folder / "log", *engine, *sizes, "--runner", "model", *flags)


def family(shard: Shard) -> list[psutil.Process]:
    """The processes of its engine, which is vLLM's here, and of what that started."""
    everyone = psutil.Process(shard.process.pid).children(recursive=True)
    return [each for each in everyone if "vllm" in _command_of(each).lower()]


def named(shard: Shard, name: str) -> psutil.Process:
    return next(each for each in family(shard) if name in _command_of(each))


def _command_of(process: psutil.Process) -> str:
    """Return the command line of a process; empty if it has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return " ".join(process.cmdline())
    return ""


# Python runs this in each of vLLM's processes before anything else.
_AT_START = """\
import os

os.environ.update(TRITON_INTERPRET="1", VLLM_USE_V2_MODEL_RUNNER="1")


class _Driver:
    @staticmethod
    def is_active():
        return False


def _add_backend():
    from triton.backends import Backend, backends

    backends["cpu"] = Backend(compiler=None, driver=_Driver)


_add_backend()
"""


def interpreted(folder: Path) -> Path:
    """The Python of a new environment in `folder` in which vLLM runs its newer model runner, by
    Triton's interpreter. A step of the toy model takes some tenths of a second; filters of tokens
    (top-k, top-p) and masks of constraints do not run there.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (own,) = folder.glob("lib/python3*/site-packages")
    (packages,) = ENVIRONMENT.resolve().glob("lib/python3*/site-packages")
    (own / "vllm.pth").write_text(f"{packages}\n")
    (own / "sitecustomize.py").write_text(_AT_START)
    return folder / "bin" / "python"
