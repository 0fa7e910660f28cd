"""A shard that records when it sends tokens, by numbers in the tokens.

Start it instead of `python -m penstock_shard`, with the same flags. Each batch of outputs for gRPC
gets a number, and all its tokens become the token of that number. So readers of the text know when
it was sent, even if it waited after others. Numbers repeat after many seconds. Each of several
shards has its own tokens. Times are those of `time.monotonic`.
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
from penstock_proto import codec
from penstock_proto.types import RequestOutput
from penstock_shard.__main__ import main

# A file; the shard's index, and the number of shards.
STAMPS_VARIABLE = "PENSTOCK_BENCH_STAMPS"
# Of each batch: time, number, tokens.
_RECORD = struct.Struct("<dII")
_SPACE = "\u0120"


def stamp_tokens(index: int, count: int) -> dict[str, int]:
    """Return the tokens of shard `index` of `count`, text -> id. Texts are a space and a word; each
    is one token of the builtin model.
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
    """The records of stamping shards."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.batches: list[tuple[float, int, int]] = []
        # By a token's text and by its id.
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
        """Return when a token that was read at this time was sent; None for unknown tokens."""
        times_s = self._sent_at_s.get(token, [])
        index = bisect_right(times_s, read_at_s)
        return times_s[index - 1] if index else None

    def num_tokens(self, from_s: float, to_s: float) -> int:
        """Count the tokens sent in [from_s, to_s)."""
        return sum(count for at_s, _, count in self.batches if from_s <= at_s < to_s)


def _stamp(path: str, index: int, count: int) -> None:
    """Have `codec.responses` stamp tokens."""
    make_responses = codec.responses
    token_ids = list(stamp_tokens(index, count).values())
    # Unbuffered, so that it can be read while the shard runs.
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    batch = -1

    def responses(outputs: Iterable[RequestOutput], *others: Any) -> Iterator[Any]:
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

    codec.responses = responses  # type: ignore[assignment]


if __name__ == "__main__":
    stamps_file, index, count = os.environ[STAMPS_VARIABLE].rsplit(":", 2)
    _stamp(stamps_file, int(index), int(count))
    sys.exit(main())
