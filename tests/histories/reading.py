"""The reading of one request to its end, and the line of JSON that shows what it gave."""

from __future__ import annotations

import asyncio
import struct
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock_client import GenerationStream, Output, PenstockError

Line = dict[str, Any]

_END_S = 90.0
_SCORES = ("chosen", "top_logprobs", "requested")
_COUNTS = ("ranks", "top_token_ids")


class Ends:
    """Counts how often a fleet says that a request has ended; stands where an audit log does."""

    def __init__(self) -> None:
        self.of: Counter[str] = Counter()

    def record(self, record: Any) -> None:
        """Count the end of a request."""
        self.of[record.request_id] += 1


@dataclass
class Reading:
    """A stream, and what its reader got."""

    name: str
    stream: GenerationStream
    token_ids: list[int] = field(default_factory=list)
    scores: dict[str, list[Any]] = field(default_factory=dict)
    finish: list[str] = field(default_factory=list)
    stop_token_id: int | None = None
    errors: list[str] = field(default_factory=list)
    num_gaps: int = 0
    num_late: int = 0

    async def read(self) -> None:
        """Read until the stream says that it is over."""
        try:
            async with asyncio.timeout(_END_S):
                async for output in self.stream:
                    self._add(output)
        except PenstockError as error:
            self.errors.append(described(error))
        except TimeoutError:
            self.errors.append(f"no end within {_END_S:g} s")

    def _add(self, output: Output) -> None:
        self.num_gaps += output.first_position != len(self.token_ids)
        self.num_late += bool(self.finish)
        self.token_ids += output.token_ids
        for kind in ("logprobs", "prompt_logprobs"):
            self._add_scores(kind, getattr(output, kind))
        if output.finish_reason is not None:
            self.finish.append(output.finish_reason.value)
            self.stop_token_id = output.stop_token_id

    def _add_scores(self, kind: str, columns: Any) -> None:
        for name in _SCORES if columns else ():
            self.scores.setdefault(f"{kind}.{name}", []).extend(bits(getattr(columns, name)))
        for name in _COUNTS if columns else ():
            self.scores.setdefault(f"{kind}.{name}", []).extend(getattr(columns, name))

    def look_again(self) -> None:
        """Note what came after the end."""
        try:
            self.num_late += self.stream.take() is not None
        except PenstockError as error:
            self.num_late += described(error) not in self.errors

    @property
    def went_on(self) -> bool:
        """Tell whether more than one shard, or engine, had the request."""
        return len(self.stream.attempts) > 1

    def line(self, ends: int) -> Line:
        """Return its line; `ends` is how often it ended by the word of who sent it."""
        return {
            "token_ids": self.token_ids,
            **self.scores,
            "num_tokens": self.stream.num_tokens,
            "finish": self.finish,
            "stop_token_id": self.stop_token_id,
            "errors": self.errors,
            "ends": [len(self.finish) + len(self.errors), ends],
            "gaps": self.num_gaps,
            "late": self.num_late,
        }


def bits(values: Iterable[float]) -> list[str]:
    """Return the bits of each as float32, in hexadecimal."""
    return [struct.pack(">f", value).hex() for value in values]


def described(error: PenstockError) -> str:
    """Return an error's type and the field that it names: the words may be said better."""
    return f"{type(error).__name__} {getattr(error, 'field', '')}".strip()


def wrong(lines: Mapping[str, Line]) -> list[str]:
    """Say of each line what is wrong with it, whatever it is compared with."""
    found = []
    for name, line in lines.items():
        if line["gaps"]:
            found.append(f"{name}: {line['gaps']} positions do not follow the one before")
        if line["late"]:
            found.append(f"{name}: {line['late']} outputs came after the end")
        if set(line["ends"]) != {1}:
            found.append(f"{name}: it ended {line['ends']} times")
    return found
