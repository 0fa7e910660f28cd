"""A shard with an engine that records its steps: see `steps.py`.

Start it instead of `python -m penstock_shard`, with the same flags. Its engine process also runs
this module, with another first argument.
"""

from __future__ import annotations

import asyncio
import os
import sys
from asyncio.subprocess import Process
from typing import Any

from benchmarks.split_bench.steps import STEPS_VARIABLE, measure_engine

_ENGINE = "engine"
_start_process = asyncio.create_subprocess_exec


async def _start_engine(program: str, *arguments: str, **options: Any) -> Process:
    """Start this module if the supervisor starts `penstock_shard.engine.main`."""
    if arguments[1] != "penstock_shard.engine.main":
        return await _start_process(program, *arguments, **options)
    module = "benchmarks.split_bench.measured_shard"
    options["env"] |= {STEPS_VARIABLE: os.environ[STEPS_VARIABLE]}
    return await _start_process(program, "-m", module, _ENGINE, *arguments[2:], **options)


def _run_engine() -> int:
    from penstock_shard.engine import main as engine_main

    measure_engine(os.environ[STEPS_VARIABLE])
    del sys.argv[1]
    return engine_main.main()


def _run_shard() -> int:
    from penstock_shard.__main__ import main

    asyncio.create_subprocess_exec = _start_engine  # type: ignore[assignment]
    return main()


if __name__ == "__main__":
    sys.exit(_run_engine() if sys.argv[1] == _ENGINE else _run_shard())
