"""A shard that writes down when it sends tokens, and says so in the tokens.

Started in place of `python -m penstock_shard`, with the same flags. Each batch of outputs that is
handed to gRPC gets a number, and all its tokens become the one token of that number: whoever reads
the text knows when it was sent, however many others wait before it. Numbers come again after as
many batches as there are such tokens, which takes many seconds. Times are of `time.monotonic`.
"""

from __future__ import annotations

import json
import os
import re
import struct
import sys
import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import penstock_shard
from penstock_shard import wire
from penstock_shard.__main__ import main
from penstock_shard.link import Output

STAMPS_VARIABLE = "PENSTOCK_BENCH_STAMPS"
# Of each batch: when, which number, how many tokens.
_RECORD = struct.Struct("<dII")
_SPACE = "\u0120"


def stamp_tokens() -> dict[str, int]:
    """Texts of a space and a word, each one token of the builtin model: its id."""
    path = Path(penstock_shard.__file__).parent / "builtin_model" / "tokenizer.json"
    vocabulary = json.loads(path.read_bytes())["model"]["vocab"]
    return {
        " " + text.removeprefix(_SPACE): token_id
        for text, token_id in vocabulary.items()
        if re.fullmatch(_SPACE + "[a-z]+", text)
    }


class Stamps:
    """What a stamping shard wrote down."""

    def __init__(self, path: Path) -> None:
        self.batches = list(_RECORD.iter_unpack(path.read_bytes()))
        self._sent_at_s: dict[int, list[float]] = defaultdict(list)
        for at_s, number, _ in self.batches:
            self._sent_at_s[number].append(at_s)
        # By text and by id.
        self._number_of: dict[str | int, int] = {}
        for number, (text, token_id) in enumerate(stamp_tokens().items()):
            self._number_of[text] = self._number_of[token_id] = number

    def sent_at_s(self, token: str | int, read_at_s: float) -> float | None:
        """When a token that was read at that time was sent; None for one of another origin."""
        number = self._number_of.get(token)
        times_s = [] if number is None else self._sent_at_s[number]
        index = bisect_right(times_s, read_at_s)
        return times_s[index - 1] if index else None

    def num_tokens(self, from_s: float, to_s: float) -> int:
        """Sent within that time."""
        return sum(count for at_s, _, count in self.batches if from_s <= at_s < to_s)


def _stamp(path: str) -> None:
    """Have `wire.responses` stamp what goes through it."""
    make_responses = wire.responses
    token_ids = list(stamp_tokens().values())
    # Written at once, so that it can be read while the shard runs.
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    batch = -1

    def responses(outputs: Iterable[Output], *others: Any) -> Iterator[Any]:
        nonlocal batch
        batch += 1
        number, count = batch % len(token_ids), 0
        stamped = list(outputs)
        for output in stamped:
            count += len(output.token_ids)
            output.token_ids = [token_ids[number]] * len(output.token_ids)
        messages = list(make_responses(stamped, *others))
        os.write(log, _RECORD.pack(time.monotonic(), number, count))
        yield from messages

    wire.responses = responses  # type: ignore[assignment]


if __name__ == "__main__":
    _stamp(os.environ[STAMPS_VARIABLE])
    sys.exit(main())
