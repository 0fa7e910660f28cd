"""Streams over HTTP, each compared with what the same request got while nothing was done to it."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

_STARTS = ("Once upon a time", "The sea", "A penstock is", "It was", "My name is", "In the town")
_CLIENTS = 4
# What a router says that is going, or whose shards are not there yet.
_UNAVAILABLE = 503


class NotServed(Exception):
    """A request that was refused before its answer began: a client may send it again."""


def requests(num_requests: int, max_tokens: int) -> list[dict[str, Any]]:
    """Return the bodies of requests. Each has a seed, so that it always gets the same text."""
    starts = itertools.islice(itertools.cycle(_STARTS), num_requests)
    fields = {"max_tokens": max_tokens, "ignore_eos": True, "stream": True, "temperature": 0.8}
    return [{"prompt": start, "seed": seed, **fields} for seed, start in enumerate(starts, start=1)]


def stream(port: int, body: dict[str, Any]) -> str:
    """The whole text. Raises `NotServed`, or AssertionError for an answer that ends early."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    with contextlib.closing(connection):
        answer = _begin(connection, body)
        assert answer.status == 200, answer.read()
        lines = [line.decode() for line in answer if line.startswith(b"data: ")]
    assert lines[-1:], "it ends before its first event"
    assert lines[-1].strip() == "data: [DONE]", f"it ends early: {lines[-2:]}"
    events = [json.loads(line[6:]) for line in lines[:-1]]
    assert not any("error" in event for event in events), lines[-2:]
    return "".join(choice["text"] for event in events for choice in event["choices"])


def _begin(
    connection: http.client.HTTPConnection, body: dict[str, Any]
) -> http.client.HTTPResponse:
    headers = {"Content-Type": "application/json"}
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        answer = connection.getresponse()
    except (OSError, http.client.HTTPException) as error:
        raise NotServed(repr(error)) from error
    if answer.status == _UNAVAILABLE:
        raise NotServed(answer.read().decode())
    return answer


def texts_of(port: int, bodies: Sequence[dict[str, Any]]) -> list[Future[str]]:
    """Send all requests at once, and return the futures of their texts."""
    with_all = ThreadPoolExecutor(len(bodies))
    under_way = [with_all.submit(stream, port, body) for body in bodies]
    with_all.shutdown(wait=False)
    return under_way


@dataclass
class Load:
    """A load of requests, and their outcomes. Each thread sends one after another until `over`;
    `expected` has the texts that each request may get.
    """

    port: int
    bodies: Sequence[dict[str, Any]]
    expected: Sequence[Collection[str]]
    outcomes: Counter[str] = field(default_factory=Counter)
    not_served: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)

    def run(self, first: int) -> None:
        for index in itertools.count(first):
            if self.over.is_set():
                return
            self._ask(index % len(self.bodies))

    def _ask(self, index: int) -> None:
        try:
            text = stream(self.port, self.bodies[index])
        except NotServed as error:
            self.not_served.append(str(error))
            # A client that tries again waits, too.
            time.sleep(0.2)
        except (AssertionError, OSError, http.client.HTTPException) as error:
            self.broken.append(repr(error))
        else:
            self.outcomes["equal" if text in self.expected[index] else "other text"] += 1


@contextlib.contextmanager
def load(
    port: int,
    bodies: Sequence[dict[str, Any]],
    expected: Sequence[Collection[str]],
    num_clients: int = 4,
) -> Iterator[Load]:
    """Requests arrive while the block runs; what is under way at its end is finished."""
    made = Load(port, bodies, expected)
    with ThreadPoolExecutor(_CLIENTS) as clients:
        running = [clients.submit(made.run, first) for first in range(_CLIENTS)]
        try:
            yield made
        finally:
            made.over.set()
    for client in running:
        client.result()
