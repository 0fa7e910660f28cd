"""Record histories: requests and faults on real shards, a line of JSON for what each request gave.

    T=/path/to/a/checkout
    export PYTHONPATH=$T/proto:$T/client:$T/router:$T/shard:tests
    .venv/bin/python -m histories before.jsonl
    .venv/bin/python -m histories after.jsonl --versus before.jsonl

The packages are those of the checkout on the PYTHONPATH: record the tree before a change, then the
tree after it. Token ids, bits of log-probabilities and ends must be equal. The exit status is 1 if
a line differs, or if it is wrong by itself: not exactly one end, a position that does not follow
the one before, or an output after the end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from pathlib import Path

from comparison.differences import differences
from histories.parts import PARTS
from histories.reading import Line, wrong
from histories.scenes import record

import penstock_client


def main() -> int:
    """Record the parts, print what is wrong and what differs."""
    flags = argparse.ArgumentParser(prog="python -m histories", description=__doc__.splitlines()[0])
    flags.add_argument("file", type=Path, help="where the lines are written")
    flags.add_argument(
        "--parts", nargs="+", choices=PARTS, default=list(PARTS), help="default: all"
    )
    flags.add_argument("--versus", type=Path, help="a recording that this one is compared with")
    asked = flags.parse_args()
    print(f"penstock of {Path(penstock_client.__file__).parents[2]}", flush=True)
    lines: dict[str, Line] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for name in asked.parts:
            folder = Path(scratch) / name
            folder.mkdir()
            lines |= asyncio.run(record(PARTS[name](folder), folder))
    asked.file.write_text("".join(f"{json.dumps({'request': n} | lines[n])}\n" for n in lines))
    found = wrong(lines)
    if asked.versus:
        before = _read(asked.versus)
        found += differences(before, lines)
        print(f"{len(before.keys() & lines.keys())} requests are compared")
    print(*found, f"{len(lines)} requests, {len(found)} differences or faults", sep="\n")
    return int(bool(found))


def _read(file: Path) -> dict[str, Line]:
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    return {line.pop("request"): line for line in lines}


if __name__ == "__main__":
    sys.exit(main())
