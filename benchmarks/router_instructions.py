"""Counts a router's instructions for each token of a streamed chat, by valgrind.

    python benchmarks/router_instructions.py
    python benchmarks/router_instructions.py --versus ../earlier-checkout --turns 5

A chat is streamed through the whole router in memory, from a fleet that returns one token at a
time, with few and with many tokens, so that the costs of start and request cancel out. With another
checkout, both take turns; prints medians and their ratio.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

_FEW, _MANY = 200, 1_400
_KINDS = ("plain", "reasoning", "tools")
_REFERENCES = re.compile(r"I\s+refs:\s+([\d,]+)")
_SOURCES = ("router", "client", "proto", "shard", "tests")


def main() -> None:
    """Count instructions, in turns with another checkout, if given."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--versus", type=Path, help="another checkout of penstock")
    parser.add_argument("--turns", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--kinds", nargs="+", choices=_KINDS, default=_KINDS)
    parser.add_argument("--stream", nargs=2, metavar=("KIND", "TOKENS"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.stream:
        asyncio.run(_stream(args.stream[0], int(args.stream[1])))
        return
    here = Path(__file__).parent.parent
    checkouts = [here] if args.versus is None else [args.versus.resolve(), here]
    for kind in args.kinds:
        counts: list[list[float]] = [[] for _ in checkouts]
        for turn in range(args.turns):
            for place, checkout in enumerate(checkouts):
                counts[place].append(_a_token(checkout, kind))
            print(f"\r{kind}: turn {turn + 1} of {args.turns}", end="", file=sys.stderr)
        print(file=sys.stderr)
        medians = [statistics.median(each) for each in counts]
        shown = " -> ".join(f"{median:,.0f}" for median in medians)
        ratio = f", ratio {medians[1] / medians[0]:.4f}" if len(medians) > 1 else ""
        print(f"{kind}: {shown} instructions a token{ratio}")


def _a_token(checkout: Path, kind: str) -> float:
    few, many = (_instructions(checkout, kind, tokens) for tokens in (_FEW, _MANY))
    return (many - few) / (_MANY - _FEW)


def _instructions(checkout: Path, kind: str, tokens: int) -> int:
    path = os.pathsep.join(str(checkout / source) for source in _SOURCES)
    with tempfile.TemporaryDirectory() as scratch:
        command = ["valgrind", "--tool=cachegrind", "--cache-sim=no"]
        command += [f"--cachegrind-out-file={scratch}/out", sys.executable, __file__]
        ran = subprocess.run(
            [*command, "--stream", kind, str(tokens)],
            env={**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": "0"},
            capture_output=True,
            text=True,
            check=False,
        )
    found = _REFERENCES.search(ran.stderr)
    if ran.returncode or found is None:
        sys.exit(f"the stream failed: {ran.stderr[-2000:]}")
    return int(found[1].replace(",", ""))


async def _stream(kind: str, tokens: int) -> None:
    """Stream a chat of `tokens` tokens."""
    from unit.router.chat_template_styles import STYLES

    is_known = importlib.util.find_spec("support.router_doubles") is not None
    # Earlier checkouts have the doubles elsewhere.
    doubles: Any = importlib.import_module(
        "support.router_doubles" if is_known else "unit.router.router_doubles"
    )
    tokenizer = doubles.byte_level_tokenizer()
    style = "chatml" if kind == "plain" else "qwen-tools"
    fleet = doubles.FakeFleet(doubles.model_files(tokenizer, STYLES[style]))
    said = "<think>" if kind == "reasoning" else ""
    ids = tokenizer.encode(said + "a word of text, " * tokens, add_special_tokens=False).ids
    fleet.script = lambda request: ids[:tokens]
    body: dict[str, Any] = {
        "model": "fake-model",
        "stream": True,
        "messages": [{"role": "user", "content": "Hi"}],
    }
    if kind == "tools":
        body["tools"] = [{"type": "function", "function": {"name": "look"}}]
    async with doubles.memory_router(fleet) as router:
        answer = await router.post("/v1/chat/completions", body)
    assert answer.status == 200, answer.body


if __name__ == "__main__":
    main()
