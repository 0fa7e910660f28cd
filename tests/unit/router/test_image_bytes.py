"""Images as they come in: data URLs, base64, files; their bounds, and what is kept of them."""

from __future__ import annotations

import asyncio
import base64
import os
import random
from collections import Counter
from pathlib import Path

import pytest

from penstock_router.errors import TooManyRequests
from penstock_router.images import pieces
from penstock_router.images.file_urls import read_file
from penstock_router.images.image import ImageRefused
from penstock_router.images.kept import Kept
from penstock_router.images.pieces import PIECE_BYTES, Incoming, add_base64, base64_start

MAX_BYTES = 1_000_000


class Charged:
    """A client's share of memory, as `Incoming` sees it."""

    def __init__(self, most: int = 10**9) -> None:
        self.held, self._most = 0, most

    def grow(self, num_bytes: int) -> None:
        if self.held + num_bytes > self._most:
            raise TooManyRequests("no room")
        self.held += num_bytes


async def decoded(text: str, start: int = 0) -> bytes:
    charged = Charged()
    incoming = Incoming(MAX_BYTES, charged.grow)
    await add_base64(incoming, text, start, asyncio.Lock())
    data = b"".join(incoming.pieces())
    assert charged.held == len(data)
    return data


@pytest.mark.parametrize(
    "head",
    [
        *("data:image/png;base64,", "data:;base64,", "DATA:image/jpeg;BASE64,"),
        *("data:image/svg+xml;charset=utf-8;base64,", "data:application/octet-stream;base64,"),
    ],
)
async def test_a_data_url_is_read_whatever_it_says_it_has(head: str) -> None:
    url = head + base64.b64encode(b"an image").decode()
    assert await decoded(url, base64_start(url)) == b"an image"


@pytest.mark.parametrize(
    "url",
    [
        *("data:", "data:,", "data:image/png,abc", "data:base64,abcd", "data:image/png;base64"),
        *("data:image/png;base64;abcd", "data:image/png;base64 ,abcd", "data:;base65,abcd"),
        "data:" + "x" * 500 + ";base64,abcd",
    ],
)
def test_other_data_urls_are_refused(url: str) -> None:
    with pytest.raises(ImageRefused, match="a data URL is data:image/TYPE;base64,DATA"):
        base64_start(url)


@pytest.mark.parametrize("num_bytes", [1, 2, 3, 100, 98_303, 98_304, 98_305, 500_000, MAX_BYTES])
async def test_base64_of_any_length_is_decoded_exactly(num_bytes: int) -> None:
    data = random.Random(num_bytes).randbytes(num_bytes)
    text = "data:;base64," + base64.b64encode(data).decode()
    assert await decoded(text, 13) == data


@pytest.mark.parametrize(
    "text",
    [
        *("a", "ab", "abc", "abcde", "====", "=abc", "a=bc", "ab=c", "abc==", "ab==abcd", "YQ==\n"),
        *(
            "YW Jj",
            "YWJj\r\n",
            "YW-_",
            "YWJ\0",
            "YWJé",
            "%59WJj",
            "YWJj=",
            "YWJj====",
            "YQ======",
            " YWJj",
            "YWJj,YWJj",
        ),
        "A" * 131_070 + "==" + "AAAA",
        "A" * 131_071 + "\n" + "AAAA",
        "A" * 131_072 + "=",
        "A" * 131_068 + "====" + "AAAA",
        "A" * 131_075,
    ],
)
async def test_what_is_not_base64_is_refused(text: str) -> None:
    with pytest.raises(ImageRefused, match="not valid base64: A-Z, a-z, 0-9, "):
        await decoded(text)


async def test_nothing_is_no_image() -> None:
    with pytest.raises(ImageRefused, match="the image is empty"):
        await decoded("")


async def test_an_image_over_its_bound_is_refused_before_it_is_decoded() -> None:
    charged = Charged()
    incoming = Incoming(MAX_BYTES, charged.grow)
    with pytest.raises(ImageRefused, match="more than 1000000 bytes"):
        await add_base64(incoming, "A" * 1_333_344, 0, asyncio.Lock())
    assert charged.held == 0
    # One byte more than it may have.
    with pytest.raises(ImageRefused, match="more than 1000000 bytes"):
        await add_base64(
            incoming, base64.b64encode(bytes(MAX_BYTES + 1)).decode(), 0, asyncio.Lock()
        )


async def test_an_image_beyond_the_clients_share_is_told_to_come_back() -> None:
    charged = Charged(300_000)
    with pytest.raises(TooManyRequests):
        await add_base64(Incoming(MAX_BYTES, charged.grow), "A" * 800_000, 0, asyncio.Lock())
    assert charged.held <= 300_000


async def test_of_all_images_one_piece_is_decoded_in_a_turn_of_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    turn_of_loop, decoded_in = 0, []
    decode = pieces._decode_base64

    def noted(piece: str, *, is_last: bool) -> bytes:
        decoded_in.append(turn_of_loop)
        return decode(piece, is_last=is_last)

    monkeypatch.setattr(pieces, "_decode_base64", noted)
    turn = asyncio.Lock()
    images = [Incoming(MAX_BYTES, Charged().grow) for _ in range(20)]
    loads = [asyncio.create_task(add_base64(each, "A" * 300_000, 0, turn)) for each in images]
    while not all(task.done() for task in loads):
        await asyncio.sleep(0)
        turn_of_loop += 1
    await asyncio.gather(*loads)
    assert len(decoded_in) == 60
    assert max(Counter(decoded_in).values()) == 1


def test_what_drips_in_is_gathered_in_pieces() -> None:
    incoming = Incoming(MAX_BYTES, Charged().grow)
    data = random.Random(1).randbytes(3 * PIECE_BYTES)
    start = 0
    for size in (*[1] * 1000, *[777] * 300, PIECE_BYTES // 2, 5):
        incoming.add(data[start : start + size])
        start += size
    found = incoming.pieces()
    assert b"".join(found) == data[:start]
    assert len(found) <= 5
    assert max(map(len, found)) < 2 * PIECE_BYTES


# ---- files ----


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    inside = tmp_path / "inside"
    (inside / "below").mkdir(parents=True)
    (inside / "a b.png").write_bytes(b"an image")
    (inside / "below" / "large").write_bytes(bytes(500_000))
    (inside / "too large").write_bytes(bytes(MAX_BYTES + 1))
    (tmp_path / "inside.png").write_bytes(b"secret")
    (inside / "out").symlink_to(tmp_path / "inside.png")
    (inside / "up").symlink_to(tmp_path)
    (inside / "in").symlink_to(inside / "a b.png")
    os.mkfifo(inside / "pipe")
    (inside / "device").symlink_to("/dev/zero")
    return inside


def test_a_file_below_the_folder_is_read(folder: Path) -> None:
    for name in ("a%20b.png", "in", "below/../a%20b.png"):
        for host in ("", "localhost"):
            assert read_file(f"file://{host}{folder}/{name}", str(folder), 99) == [b"an image"]
    found = read_file(f"file://{folder}/below/large", str(folder), MAX_BYTES)
    assert sum(map(len, found)) == 500_000
    assert max(map(len, found)) <= PIECE_BYTES


@pytest.mark.parametrize(
    "name",
    [
        *(
            "out",
            "up/inside.png",
            "../inside.png",
            "%2e%2e/inside.png",
            "none",
            "below",
            "",
            "pipe",
        ),
        *("device", "a%20b.png%00", "a%20b.png?x", "below/" + "a" * 300),
    ],
)
def test_no_other_file_is_and_nothing_tells_what_is_there(folder: Path, name: str) -> None:
    with pytest.raises(ImageRefused) as refused:
        read_file(f"file://{folder}/{name}", str(folder), MAX_BYTES)
    text = str(refused.value)
    assert text == "it is no file that can be read below --allowed-media-folder"


@pytest.mark.parametrize(
    "url",
    ["file://other.example/a", "file:a%20b.png", "file:", "file:////etc/hostname", "file:///"],
)
def test_nor_is_one_of_another_host_or_without_its_path(folder: Path, url: str) -> None:
    with pytest.raises(ImageRefused, match="it is no file"):
        read_file(url, str(folder), MAX_BYTES)


def test_a_file_over_its_bound_and_any_file_without_the_flag_are_refused(folder: Path) -> None:
    with pytest.raises(ImageRefused, match="more than 1000000 bytes"):
        read_file(f"file://{folder}/too%20large", str(folder), MAX_BYTES)
    with pytest.raises(ImageRefused, match="has no --allowed-media-folder"):
        read_file(f"file://{folder}/a%20b.png", None, MAX_BYTES)


# ---- what is kept ----


def test_the_newest_are_kept_within_a_number_of_bytes() -> None:
    kept = Kept[str](100)
    for name in (b"a", b"b", b"c"):
        kept.put(name, name.decode(), 30)
    assert kept.get(b"a") == "a"
    kept.put(b"d", "d", 40)
    # "b" was the oldest: "a" was asked for since.
    assert [kept.get(name) for name in (b"a", b"b", b"c", b"d")] == ["a", None, "c", "d"]
    kept.put(b"e", "e", 101)
    assert kept.get(b"e") is None
    kept.put(b"d", "another", 10)
    kept.put(b"f", "f", 30)
    assert [kept.get(name) for name in (b"a", b"c", b"d", b"f")] == ["a", "c", "another", "f"]
    assert [kept.drop_oldest() for _ in range(5)] == [True] * 4 + [False]
    kept.drop(b"a")
