"""Calls of tools in the openai and anthropic packages as they are released, for every parser.

Outputs that models of each family write go over HTTP from a router whose fleet says them, cut at
the borders of their tokens; each client reads the same calls whatever the cut.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import sys
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from clients.environments import observe
from support.budget import budget, seeded
from support.recorded_tool_calls import RECORDED, TOOLS, Recorded
from tokenizers import AddedToken, Tokenizer

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "router"))

import support.router_doubles as doubles

from penstock_client import FleetStream
from penstock_proto.types import FinishReason, GenerationRequest, Output
from penstock_router.text.formats.registry import FORMATS
from penstock_router.text.stop_strings import beginning

# Takes tools, and says nothing of them: the prompt is the user's text.
TEMPLATE = "{% if tools %}{% endif %}{{ messages[-1].content }}"
EOS = 0
# So many answers a script reads, well within its time.
AT_ONCE = 1500


def records_of(family: str) -> list[Recorded]:
    """Mistral's two ways to write calls have one reader. A mark is one token here, so that none can
    be cut off within it.
    """
    own, marks = family.removesuffix("_named"), FORMATS[family].marks
    return [
        record
        for record in RECORDED
        if record.family == own and beginning(record.text, marks) == len(record.text)
    ]


FAMILIES = sorted({each.name for each in FORMATS.values() if records_of(each.name)})

# ---- A fleet that says what was recorded -------------------------------------------------------


@dataclass(eq=False, repr=False)
class _ReadStream(FleetStream):
    """A stream that tells when its reader has taken an output, so that no outputs are merged."""

    taken: asyncio.Event = field(default_factory=asyncio.Event)

    def take(self, at_most: int | None = None) -> Output | None:
        output = super().take(at_most)
        self.taken.set()
        return output


@dataclass
class SayingFleet(doubles.FakeFleet):
    """A fleet that answers with the record that the prompt names: in one delta, in two, or with
    one token in each.
    """

    tokenizer: Tokenizer | None = None
    records: Sequence[Recorded] = ()
    stream_type = _ReadStream

    async def _feed(self, request: GenerationRequest, stream: FleetStream) -> None:
        assert isinstance(stream, _ReadStream)
        assert self.tokenizer is not None
        prompt = self.tokenizer.decode(list(request.prompt_token_ids))
        asked = re.fullmatch(r"record (\d+), cut: (\w+)", prompt)
        assert asked is not None, prompt
        ids = [*tokens_of(self.tokenizer, self.records[int(asked[1])]), EOS]
        position = 0
        for end in ends_of(asked[2], len(ids)):
            stream.taken.clear()
            output = Output(ids[position:end], position)
            if end == len(ids):
                output.finish_reason, output.stop_token_id = FinishReason.STOP, EOS
            stream.feed(output)
            position = end
            # A whole answer is taken once it is there, or in large parts.
            if end < len(ids):
                await stream.taken.wait()


def ends_of(cut: str, length: int) -> Iterable[int]:
    """Return the position at which each delta ends, in tokens."""
    if cut == "none":
        return [length]
    return range(1, length + 1) if cut == "each" else [int(cut), length]


def tokenizer_of(family: str) -> Tokenizer:
    """The family's marks are special tokens, as they are in its models."""
    tokenizer = doubles.byte_level_tokenizer()
    marks = [AddedToken(mark, special=True) for mark in FORMATS[family].marks]
    tokenizer.add_special_tokens(marks)
    return tokenizer


def tokens_of(tokenizer: Tokenizer, record: Recorded) -> list[int]:
    """Return the tokens that the record's model wrote."""
    ids: list[int] = tokenizer.encode(record.text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == record.text
    return ids


@dataclass(frozen=True)
class Family:
    """A router with this parser, at an address."""

    name: str
    url: str
    records: Sequence[Recorded]
    lengths: Sequence[int]


@asynccontextmanager
async def served(name: str) -> AsyncIterator[Family]:
    tokenizer, records = tokenizer_of(name), records_of(name)
    info = replace(doubles.INFO, max_model_len=4096, vocab_size=tokenizer.get_vocab_size())
    fleet = SayingFleet(
        doubles.model_files(tokenizer, TEMPLATE),
        members=[doubles.FakeShard(info)],
        tokenizer=tokenizer,
        records=records,
    )
    async with doubles.memory_router(fleet, tool_call_parser=name) as router:
        server = await asyncio.get_running_loop().create_server(router.server, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            lengths = [len(tokens_of(tokenizer, record)) for record in records]
            yield Family(name, f"http://127.0.0.1:{port}", records, lengths)


# ---- What is asked, and what must come of it ---------------------------------------------------


@dataclass(frozen=True)
class Asked:
    """One answer to ask for: the record's number, where it is cut, and how it is read."""

    family: Family
    number: int
    cut: str
    how: str

    def to_json(self) -> list[str]:
        return [self.family.url, f"record {self.number}, cut: {self.cut}", self.how]


def all_asked(family: Family, rng: random.Random) -> list[Asked]:
    """Return each record whole and one token at a time; then in two parts, cut between any two
    tokens. Outside the soak: one record in the first ways, and 3 random cuts of any record.
    """
    asked = []
    for number, length in enumerate(family.lengths):
        asked += [
            Asked(family, number, cut, how)
            for cut, how in (("none", "whole"), ("each", "events"), ("each", "helper"))
        ]
        asked += [Asked(family, number, str(at), "helper") for at in range(1, length + 1)]
    whole = [each for each in asked if not each.cut.isdigit()]
    cut = [each for each in asked if each.cut.isdigit()]
    one = rng.randrange(len(family.records))
    return [
        *[each for each in whole if budget(each.number == one, True)],
        *rng.sample(cut, budget(3, len(cut))),
    ]


def read_by(client: str, environment: str, asked: list[Asked], path: Path) -> list[Any]:
    """Return the client's reading of each answer. The client runs in another process."""
    read: list[Any] = []
    for at in range(0, len(asked), AT_ONCE):
        some = [each.to_json() for each in asked[at : at + AT_ONCE]]
        path.write_text(json.dumps({"tools": TOOLS, "asked": some}))
        read += observe(environment, "with_tool_calls", client, str(path))["read"]
    assert len(read) == len(asked)
    return read


def check(asked: Asked, read: Any, *, call_reason: str, plain_reason: str) -> None:
    """Assert that the client read the text and the calls that the model meant."""
    record = asked.family.records[asked.number]
    texts = [part for part in read["said"] if isinstance(part, str)]
    calls = [part for part in read["said"] if not isinstance(part, str)]
    about = f"{asked} of {record}: {read}"
    assert "".join(texts) == record.content, about
    assert [name for name, _ in calls] == [name for name, _ in record.calls], about
    for (_, arguments), (_, meant) in zip(calls, record.calls, strict=True):
        assert meant is None or json.loads(arguments) == meant, about
    for parsed, (_, meant) in zip(read["objects"], record.calls, strict=False):
        assert meant is None or parsed == meant, about
    assert read["reason"] == (call_reason if calls else plain_reason), about


def check_same(asked: list[Asked], read: list[Any]) -> None:
    """However it was cut and read it is the same, texts of arguments that are no JSON too."""
    first: dict[tuple[str, int], Any] = {}
    for each, seen in zip(asked, read, strict=True):
        said = [part if isinstance(part, str) else _comparable(*part) for part in seen["said"]]
        known = first.setdefault((each.family.name, each.number), said)
        assert said == known, each


def _comparable(name: str, arguments: str) -> tuple[str, Any]:
    try:
        return name, json.loads(arguments)
    except json.JSONDecodeError:
        return name, arguments


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("client", "environment", "call_reason", "plain_reason"),
    [
        ("openai", "dev", "tool_calls", "stop"),
        # An older one.
        pytest.param("openai", "anthropic", "tool_calls", "stop", marks=pytest.mark.soak),
        ("anthropic", "anthropic", "tool_use", "end_turn"),
    ],
)
async def test_every_familys_calls_are_read_the_same_however_they_are_cut(
    client: str, environment: str, call_reason: str, plain_reason: str, tmp_path: Path
) -> None:
    rng = seeded("cuts of calls")
    async with AsyncExitStack() as stack:
        families = [await stack.enter_async_context(served(name)) for name in FAMILIES]
        asked = [each for family in families for each in all_asked(family, rng)]
        print(f"{client} of {environment}: {len(asked)} answers")
        read = await asyncio.to_thread(read_by, client, environment, asked, tmp_path / "asked.json")
    for each, seen in zip(asked, read, strict=True):
        check(each, seen, call_reason=call_reason, plain_reason=plain_reason)
    check_same(asked, read)
