"""A shard that writes down when it sends tokens, and says so in the tokens.

Started in place of `python -m penstock_shard`, with the same flags. Each batch of outputs that is
handed to gRPC gets a number, and all its tokens become the one token of that number: whoever reads
the text knows when it was sent, however many others wait before it. Numbers come again after as
many batches as there are such tokens, which takes many seconds; of several shards each has tokens
of its own. Times are of `time.monotonic`.
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
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import penstock_shard
from penstock_shard.__main__ import main
from penstock_shard.ipc.messages import Output
from penstock_shard.server import proto_codec

# A file; which shard this is, and of how many.
STAMPS_VARIABLE = "PENSTOCK_BENCH_STAMPS"
# Of each batch: when, which number, how many tokens.
_RECORD = struct.Struct("<dII")
_SPACE = "\u0120"


def stamp_tokens(index: int, count: int) -> dict[str, int]:
    """Those of shard `index` of so many: texts of a space and a word, each one token of the builtin
    model, and its id.
    """
    path = Path(penstock_shard.__file__).parent / "builtin_model" / "tokenizer.json"
    vocabulary = json.loads(path.read_bytes())["model"]["vocab"]
    tokens = {
        " " + text.removeprefix(_SPACE): token_id
        for text, token_id in vocabulary.items()
        if re.fullmatch(_SPACE + "[a-z]+", text)
    }
    return dict(list(tokens.items())[index::count])


class Stamps:
    """What stamping shards wrote down."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.batches: list[tuple[float, int, int]] = []
        # By text and by id of a token.
        self._sent_at_s: dict[str | int, list[float]] = {}
        for index, path in enumerate(paths):
            batches = list(_RECORD.iter_unpack(path.read_bytes()))
            self.batches += batches
            times_s: dict[int, list[float]] = defaultdict(list)
            for at_s, number, _ in batches:
                times_s[number].append(at_s)
            for number, (text, token_id) in enumerate(stamp_tokens(index, len(paths)).items()):
                self._sent_at_s[text] = self._sent_at_s[token_id] = times_s[number]

    def sent_at_s(self, token: str | int, read_at_s: float) -> float | None:
        """When a token that was read at that time was sent; None for one of another origin."""
        times_s = self._sent_at_s.get(token, [])
        index = bisect_right(times_s, read_at_s)
        return times_s[index - 1] if index else None

    def num_tokens(self, from_s: float, to_s: float) -> int:
        """Sent within that time."""
        return sum(count for at_s, _, count in self.batches if from_s <= at_s < to_s)


def _stamp(path: str, index: int, count: int) -> None:
    """Have `wire.responses` stamp what goes through it."""
    make_responses = proto_codec.responses
    token_ids = list(stamp_tokens(index, count).values())
    # Written at once, so that it can be read while the shard runs.
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    batch = -1

    def responses(outputs: Iterable[Output], *others: Any) -> Iterator[Any]:
        nonlocal batch
        batch += 1
        number, num_tokens = batch % len(token_ids), 0
        stamped = list(outputs)
        for output in stamped:
            num_tokens += len(output.token_ids)
            output.token_ids = [token_ids[number]] * len(output.token_ids)
        messages = list(make_responses(stamped, *others))
        os.write(log, _RECORD.pack(time.monotonic(), number, num_tokens))
        yield from messages

    proto_codec.responses = responses  # type: ignore[assignment]


if __name__ == "__main__":
    stamps_file, index, count = os.environ[STAMPS_VARIABLE].rsplit(":", 2)
    _stamp(stamps_file, int(index), int(count))
    sys.exit(main())
