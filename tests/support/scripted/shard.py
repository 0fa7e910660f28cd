"""`python -m support.scripted.shard`: a shard with the engine process beside this file."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from support.processes import Shard

_TESTS = Path(__file__).parents[2]
_ENGINE = "support.scripted.engine"


class ScriptedShard(Shard):
    """A shard of a model directory that `make_scripted_model` made."""

    module = "support.scripted.shard"
    engine_module = _ENGINE

    def __init__(self, log_file: Path, model: Path, *flags: str) -> None:
        path = os.pathsep.join([str(_TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
        fake = ("--runner", "fake", "--step-ms", "0", "--model", str(model))
        super().__init__(log_file, *fake, *flags, python_path=path)


async def _start_child(start: Any, module: str, *needed: str, **settings: Any) -> Any:
    return await start(_ENGINE, *needed, **settings)


def main() -> int:
    from penstock_common.child_process.start import start_child
    from penstock_shard import __main__ as shard_main
    from penstock_shard.server import engine_process

    start = partial(_start_child, start_child)
    with patch.object(engine_process, "start_child", start):
        return shard_main.main()


if __name__ == "__main__":
    sys.exit(main())
