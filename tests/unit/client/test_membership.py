"""Sources of addresses: what they refuse, what changes their set, and what leaves it alone."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import random
import socket
from collections.abc import AsyncGenerator, Iterator, Sequence
from pathlib import Path

import pytest

from penstock_client.fleet.allowed_networks import AddressInfo
from penstock_client.fleet.discovery import (
    MAX_ADDRESSES,
    MAX_FILE_BYTES,
    DelayedRemoval,
    DnsSource,
    FileSource,
    Source,
    StaticSource,
    UnionSource,
    check_address,
    parse_source,
    read_addresses,
)

Answer = Sequence[str] | Exception


class Over(Exception):
    """The script of answers has been played."""


class World:
    """Answers lookups from a script, one a round; its sleep moves its clock and the round."""

    def __init__(self, *answers: Answer) -> None:
        self.answers = answers
        self.round = 0
        self.now_s = 100.0

    def clock(self) -> float:
        return self.now_s

    async def sleep(self, delay_s: float) -> None:
        self.now_s += delay_s
        self.round += 1
        if self.round == len(self.answers):
            raise Over

    async def resolve(self, name: str, port: int) -> list[AddressInfo]:
        answer = self.answers[self.round]
        if isinstance(answer, Exception):
            raise answer
        return [_info(ip, port) for ip in answer]

    def dns(self, settle_s: float = 15.0, interval_s: float = 5.0) -> DnsSource:
        return DnsSource(
            "shards", 7, interval_s, settle_s, self.resolve, clock=self.clock, sleep=self.sleep
        )


def _info(ip: str, port: int) -> AddressInfo:
    if ":" in ip:
        return (socket.AF_INET6, socket.SOCK_STREAM, 6, "", (ip, port, 0, 0))
    return (socket.AF_INET, socket.SOCK_STREAM, 6, "", (ip, port))


async def seen(source: Source, world: World) -> list[tuple[int, set[str]]]:
    """Return (round, set) for each set that comes before the script is over."""
    sets: list[tuple[int, set[str]]] = []
    with contextlib.suppress(Over):
        async for found in source.addresses():
            sets += [(world.round, set(found))]
    return sets


async def first_of(source: Source) -> set[str]:
    async with contextlib.aclosing(source.addresses()) as sets:
        return set(await anext(sets))


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]


# ---- addresses ----


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:50051", "127.0.0.1:50051"),
        ("Shard-0.Shards.prod:1", "shard-0.shards.prod:1"),
        ("stack_shard_1:65535", "stack_shard_1:65535"),
        ("shards.prod.svc.cluster.local.:1", "shards.prod.svc.cluster.local.:1"),
        ("a:00080", "a:80"),
        ("[0:0:0:0:0:0:0:1]:50051", "[::1]:50051"),
        ("[FD00::A]:1", "[fd00::a]:1"),
    ],
)
def test_an_address_has_one_way_to_be_written(text: str, address: str) -> None:
    assert check_address(text) == address
    assert check_address(address) == address


@pytest.mark.parametrize(
    "text",
    [
        "", "a", ":1", "a:", "a:0", "a:65536", "a:-1", "a:+1", "a:1.5", "a: 1", "a b:1", " a:1",
        "a:1\n", "a:٣", "a:" + "9" * 5000, "::1:50051", "::1", "[::1]", "[::1", "[]:1", "[a]:1",
        "[127.0.0.1]:1", "[fe80::1%eth0]:1", "256.1.1.1:1", "1.2.3:1", "1:1", "127.0.0.1.:1", "é:1",
        "\u212a:1", "a..b:1", ".a:1", "-a:1", "a-:1", "a/b:1", "user@a:1", "unix:/s:1", "*:1",
        "http://a:1", "a" * 64 + ":1", "a." * 127 + "a:1", "a\x00:1",
    ],
)  # fmt: skip
def test_what_is_no_address_is_refused_in_one_short_line_that_quotes_it(text: str) -> None:
    with pytest.raises(ValueError, match="is not HOST:PORT") as error:
        check_address(text)
    assert str(error.value).startswith(repr(text[:100])[:-1])
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 300


def test_any_text_is_an_address_or_a_value_error() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(3000):
        text = "".join(rng.choices("ab1.:[]-_%/#é\n ", k=rng.randrange(12)))
        try:
            address = check_address(text)
        except ValueError:
            continue
        assert check_address(address) == address, text


# ---- parsing a source ----


async def test_a_list_is_one_set_without_its_duplicates() -> None:
    assert parse_source("a:1, b:2,,A:01") == StaticSource(frozenset({"a:1", "b:2"}))
    assert await first_of(parse_source("a:1")) == {"a:1"}


async def test_a_list_never_changes_and_never_ends() -> None:
    async with contextlib.aclosing(parse_source("a:1").addresses()) as sets:
        await anext(sets)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(sets), 0.01)


def test_a_dns_name_and_a_file_are_read_from_their_urls() -> None:
    assert parse_source("dns://Shards.prod:50051") == DnsSource("shards.prod", 50051)
    assert parse_source("dns://[::1]:1", interval_s=1, settle_s=2) == DnsSource("::1", 1, 1, 2)
    assert parse_source("file:///etc/shards 1%20") == FileSource("/etc/shards 1%20")


def test_parts_of_several_kinds_make_a_union() -> None:
    union = parse_source("a:1,dns://x:1,b:2,file:///s,dns://x:1")
    assert isinstance(union, UnionSource)
    static, dns, file = union.parts
    assert static == StaticSource(frozenset({"a:1", "b:2"}))
    assert (str(dns), str(file)) == ("dns://x:1", "file:///s")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "give at least one"),
        (" , ,", "give at least one"),
        ("a:1,b", "'b' is not HOST:PORT"),
        ("dns://x", "'dns://x' is not dns://NAME:PORT"),
        ("dns:///x:1", "'dns:///x:1' is not dns://NAME:PORT"),
        ("file://etc/shards", "'file://etc/shards' is not file:///PATH"),
        ("file://", "'file://' is not file:///PATH"),
        ("file:///a\x00b", "is not file:///PATH"),
        ("file:///a\ud800", "is not file:///PATH"),
        ("http://a:1", "'http://a:1' is not HOST:PORT, dns://NAME:PORT or file:///PATH"),
        ("DNS://a:1", "'DNS://a:1' is not"),
        (",".join(f"a{i}:1" for i in range(MAX_ADDRESSES + 1)), "1001 addresses are more than"),
    ],
)
def test_a_bad_source_is_refused_with_value_and_rule(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=r"^[^\n]*$") as error:
        parse_source(text)
    assert message in str(error.value)


# ---- settling ----


def test_an_address_that_flaps_stays_and_one_that_is_gone_leaves() -> None:
    settling = DelayedRemoval(15)
    assert settling.update(frozenset("ab"), 0) == frozenset("ab")
    assert settling.update(frozenset("a"), 5) == frozenset("ab")
    assert settling.update(frozenset("abc"), 10) == frozenset("abc"), "new ones join at once"
    assert settling.update(frozenset("ac"), 15) == frozenset("abc")
    assert settling.update(frozenset("ac"), 29.9) == frozenset("abc"), "missing for 14.9 s"
    assert settling.update(frozenset("ac"), 30) == frozenset("ac")
    assert settling.update(frozenset("abc"), 31) == frozenset("abc"), "it may come back"


def test_without_a_settling_time_a_set_is_what_was_found() -> None:
    settling = DelayedRemoval(0)
    settling.update(frozenset("ab"), 0)
    assert settling.update(frozenset("bc"), 0) == frozenset("bc")


def test_a_settled_set_is_what_was_found_within_the_settling_time() -> None:
    """The set is compared with its definition: a name stays until it has been missing for
    `settle_s`.
    """
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    settle_s = rng.choice([0, 3, 10])
    settling, history = DelayedRemoval(settle_s), list[tuple[int, set[str]]]()
    now_s = 0
    for _ in range(500):
        now_s += rng.randrange(1, 6)
        found = set(rng.sample("abcdef", rng.randrange(7)))
        history.append((now_s, found))
        expected = {name for name in "abcdef" if _stays(name, history, settle_s)}
        assert settling.update(frozenset(found), now_s) == expected


def _stays(name: str, history: list[tuple[int, set[str]]], settle_s: float) -> bool:
    first_missing_s = None
    for at_s, found in reversed(history):
        if name in found:
            return first_missing_s is None or history[-1][0] - first_missing_s < settle_s
        first_missing_s = at_s
    return False


# ---- DNS ----


async def test_all_addresses_of_both_families_are_taken_once() -> None:
    world = World(["10.0.0.1", "10.0.0.2", "fd00:0::1", "10.0.0.1"])
    assert await seen(world.dns(), world) == [(0, {"10.0.0.1:7", "10.0.0.2:7", "[fd00::1]:7"})]


async def test_a_set_comes_only_when_it_changed_and_a_lost_address_leaves_late() -> None:
    one, both = ["::2"], ["::2", "::1"]
    world = World(both[::-1], both, one, one, [*one, "::3"], one, one)
    sets = await seen(world.dns(settle_s=15), world)
    # ::1 is missing from round 2 on and leaves 15 s, three rounds, later.
    assert sets == [
        (0, {"[::1]:7", "[::2]:7"}),
        (4, {"[::1]:7", "[::2]:7", "[::3]:7"}),
        (5, {"[::2]:7", "[::3]:7"}),
    ]


async def test_failing_and_empty_answers_keep_the_last_set_and_are_told_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    failing = socket.gaierror(socket.EAI_AGAIN, "try again")
    troubles: list[Answer] = [failing, [], TimeoutError()] * 20
    world = World(["::1"], *troubles, ["::1"], [], ["::1"])
    with caplog.at_level(logging.INFO):
        assert await seen(world.dns(), world) == [(0, {"[::1]:7"})]
    assert warnings(caplog) == [
        "dns://shards:7: lookup failed: try again; keeping the last good set (size 1)",
        "dns://shards:7: the answer has no address; keeping the last good set (size 1)",
        "dns://shards:7: lookup failed: TimeoutError; keeping the last good set (size 1)",
    ]
    assert [r.getMessage() for r in caplog.records if r.levelno == logging.INFO] == [
        "dns://shards:7: recovered"
    ]


async def test_a_trouble_that_comes_back_long_after_is_told_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = World(["::1"], [], *([["::1"]] * 20), [])
    await seen(world.dns(), world)
    assert len(warnings(caplog)) == 2


async def test_a_trouble_is_told_once_however_rarely_the_name_is_looked_up(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = World([], [], [])
    await seen(world.dns(interval_s=100), world)
    assert warnings(caplog) == [
        "dns://shards:7: the answer has no address; no address is known yet"
    ]


async def test_a_name_that_is_unknown_at_first_is_asked_until_it_is_known() -> None:
    world = World(socket.gaierror(socket.EAI_NONAME, "unknown"), [], ["::1"])
    assert await seen(world.dns(), world) == [(2, {"[::1]:7"})]


async def test_an_answer_of_too_many_addresses_changes_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    many = [f"fd00::{i:x}" for i in range(MAX_ADDRESSES + 1)]
    world = World(["::1"], many, many[:-1])
    sets = await seen(world.dns(), world)
    assert [(r, len(found)) for r, found in sets] == [(0, 1), (2, MAX_ADDRESSES + 1)]
    (warning,) = warnings(caplog)
    assert "1001 addresses are more than the 1000" in warning


async def test_an_answer_that_leads_to_where_no_shard_is_changes_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = World(["10.0.0.1"], ["10.0.0.2", "169.254.169.254"], ["10.0.0.1"])
    assert await seen(world.dns(settle_s=0.0), world) == [(0, {"10.0.0.1:7"})]
    assert "169.254.169.254 is link-local: no shard is there" in caplog.text


async def test_the_machines_own_resolver_answers() -> None:
    assert await first_of(DnsSource("127.0.0.1", 9)) == {"127.0.0.1:9"}


# ---- files ----


def _write(path: Path, content: str | bytes) -> None:
    """Replace the file in one step, as an operator should."""
    new = path.with_suffix(".new")
    new.write_bytes(content.encode() if isinstance(content, str) else content)
    new.rename(path)


def test_a_file_has_an_address_a_line_and_comments(tmp_path: Path) -> None:
    path = tmp_path / "shards"
    _write(path, "\ufeff# rack 1\r\na:1\r\n\n  B:2  # spare\n\t\n[::1]:3\na:1")
    assert read_addresses(str(path)) == {"a:1", "b:2", "[::1]:3"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("# all\n\na:1\nb 2 # no port\n", "line 4: 'b 2' is not HOST:PORT"),
        ("a:1,b:2", "line 1: 'a:1,b:2' is not HOST:PORT"),
        ("dns://a:1", "line 1: 'dns://a:1' is not HOST:PORT"),
        ("a:1\n\x00", "line 2: "),
        ("x" * MAX_FILE_BYTES, "line 1: 'xxx"),
        ("", "has no address in it"),
        ("# none\n", "has no address in it"),
        (b"a:1\n\xff", "byte 5 is not UTF-8 text"),
        ("a:1\n" + "#" * MAX_FILE_BYTES, "longer than 1000000 bytes"),
        ("\n".join(f"a:{i + 1}" for i in range(1001)), "1001 addresses are more than the 1000"),
    ],
)
def test_a_bad_file_is_refused_in_one_short_line(
    tmp_path: Path, content: str | bytes, message: str
) -> None:
    path = tmp_path / "shards"
    _write(path, content)
    with pytest.raises(ValueError, match=r"^[^\n]*$") as error:
        read_addresses(str(path))
    assert message in str(error.value)
    assert len(str(error.value)) < 300


def test_a_file_may_be_full_to_its_bounds(tmp_path: Path) -> None:
    path = tmp_path / "shards"
    lines = "\n".join(f"a:{i + 1}" for i in range(MAX_ADDRESSES)) + "\n"
    _write(path, lines + "#" * (MAX_FILE_BYTES - len(lines)))
    assert len(read_addresses(str(path))) == MAX_ADDRESSES


def test_what_is_no_readable_file_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.path.relpath(tmp_path / "socket"))
    for path in (tmp_path, tmp_path / "pipe", tmp_path / "socket", tmp_path / "none", "/dev/zero"):
        with pytest.raises(ValueError, match=r"^cannot be read: "):
            read_addresses(str(path))


def test_a_file_that_one_may_not_read_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(ValueError, match=r"^cannot be read: Permission denied$"):
        read_addresses("/etc/shards")


async def test_whatever_becomes_of_a_file_its_last_good_set_stays(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "shards"
    contents: list[str | bytes | None] = [
        None, "a:1\nb:2", "b:2\na:1", "a:1\nb", "a:1\nb", b"\xff", "", None, "c:3"
    ]  # fmt: skip
    world = World(*([[]] * len(contents)))

    def put() -> None:
        content = contents[world.round]
        path.unlink(missing_ok=True)
        if content is not None:
            _write(path, content)

    async def sleep(delay_s: float) -> None:
        await world.sleep(delay_s)
        put()

    put()
    source = FileSource(str(path), 1.0, world.clock, sleep)
    assert await seen(source, world) == [(1, {"a:1", "b:2"}), (8, {"c:3"})]
    keeping = "; keeping the last good set (size 2)"
    assert [w.removeprefix(f"file://{path}: ") for w in warnings(caplog)] == [
        "cannot be read: No such file or directory; no address is known yet",
        f"line 2: 'b' is not HOST:PORT with a port from 1 to 65535 (IPv6 as [::1]:20051){keeping}",
        f"byte 1 is not UTF-8 text{keeping}",
        f"has no address in it{keeping}",
    ]


async def test_a_changed_file_is_seen_in_real_time_however_it_was_replaced(tmp_path: Path) -> None:
    """The ways are a symlink swapped two levels up, as Kubernetes does, a rename, and a write in
    place.
    """
    for name, content in (("v1", "a:1"), ("v2", "b:2")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "shards").write_text(content)
    (tmp_path / "data").symlink_to("v1")
    path = tmp_path / "shards"
    path.symlink_to("data/shards")
    source = FileSource(str(path), 0.02)
    async with asyncio.timeout(10), contextlib.aclosing(source.addresses()) as sets:
        assert await anext(sets) == {"a:1"}
        (tmp_path / "data.new").symlink_to("v2")
        (tmp_path / "data.new").rename(tmp_path / "data")
        assert await anext(sets) == {"b:2"}
        _write(tmp_path / "v2" / "shards", "c:3")
        assert await anext(sets) == {"c:3"}
        stamp = path.stat()
        path.write_text("d:4")
        os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
        assert await anext(sets) == {"d:4"}


# ---- unions ----


class Told:
    """A source that says what it is told to; notes how often it is watched."""

    def __init__(self) -> None:
        self.queue = asyncio.Queue[frozenset[str] | Exception](100)
        self.watchers = 0

    def say(self, *addresses: str) -> None:
        self.queue.put_nowait(frozenset(addresses))

    async def addresses(self) -> AsyncGenerator[frozenset[str], None]:
        self.watchers += 1
        try:
            while True:
                found = await self.queue.get()
                if isinstance(found, Exception):
                    raise found
                yield found
        finally:
            self.watchers -= 1


async def test_a_union_has_what_any_part_has_and_waits_for_none() -> None:
    one, two = Told(), Told()
    one.say("a:1")
    async with contextlib.aclosing(UnionSource([one, two]).addresses()) as sets:
        assert await anext(sets) == {"a:1"}
        two.say("a:1")
        two.say("a:1", "b:2")
        assert await anext(sets) == {"a:1", "b:2"}
        one.say("c:3")
        assert await anext(sets) == {"a:1", "b:2", "c:3"}, "a:1 is still the other's"
        two.say("b:2")
        assert await anext(sets) == {"b:2", "c:3"}
        assert (one.watchers, two.watchers) == (1, 1)
    assert (one.watchers, two.watchers) == (0, 0)


async def test_a_cancelled_reader_leaves_no_part_watched() -> None:
    one, two = Told(), Told()
    reader = asyncio.create_task(first_of(UnionSource([one, two])))
    while not two.watchers:
        await asyncio.sleep(0)
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    assert (one.watchers, two.watchers) == (0, 0)


async def test_a_union_of_too_many_keeps_its_last_set(caplog: pytest.LogCaptureFixture) -> None:
    one, two = Told(), Told()
    one.say(*(f"a{i}:1" for i in range(MAX_ADDRESSES)))
    async with contextlib.aclosing(UnionSource([one, two]).addresses()) as sets:
        assert len(await anext(sets)) == MAX_ADDRESSES
        pending = asyncio.ensure_future(anext(sets))
        for name in "bc":
            two.say(f"{name}:1")
            for _ in range(10):
                await asyncio.sleep(0)
        assert not pending.done()
        one.say("a:1")
        assert await pending == {"a:1", "c:1"}
    (warning,) = warnings(caplog)
    assert warning.endswith("may have; keeping the last good set (size 1000)")


async def test_a_bug_in_a_part_is_not_swallowed() -> None:
    one, two = Told(), Told()
    two.queue.put_nowait(ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        await first_of(UnionSource([one, two]))
    assert one.watchers == 0


@pytest.fixture(autouse=True)
def _informed(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with caplog.at_level(logging.INFO, "penstock_client.fleet.discovery"):
        yield
