"""The processes that decode images: when they start and end, what one image costs the others."""

from __future__ import annotations

import asyncio
import base64
import functools
import os
import signal
import struct
import subprocess
import sys
import zlib
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from PIL import Image as PillowImage
from support import image_files as files
from support.budget import in_soak
from support.image_files import chunk, header, picture, png, saved
from support.image_processes import image_processes
from support.processes import is_alive, wait_until

from penstock_common.child_process.child_end import NICENESS
from penstock_router.config import RouterConfig
from penstock_router.errors import BadRequest, TooManyRequests, Unavailable
from penstock_router.images import decoder_pool, line
from penstock_router.images.image import Image
from penstock_router.images.images import _BYTES_BESIDE, Images
from penstock_router.observe.metrics import Metrics
from penstock_router.thread_pool import Threads

SMALL = saved(picture(), "PNG")
LARGE = (5792, 5792)
# How each kind is written soon, and read with much memory.
_FAST: dict[str, dict[str, Any]] = {
    "WEBP": {"lossless": True, "method": 0, "quality": 0},
    "PNG": {"compress_level": 1},
    "JPEG": {"progressive": True},
}


@pytest.fixture
async def images() -> AsyncIterator[Images]:
    with ThreadPoolExecutor(2) as executor:
        made = Images(RouterConfig(shards="a:1"), Threads(executor, 1000), Metrics())
        yield made
        await made.close()
    assert image_processes() == []
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def load(images: Images, data: bytes, client: str = "a") -> Image:
    return await images.load_base64(base64.b64encode(data).decode(), param="p", client=client)


async def refusal(images: Images, data: bytes) -> str:
    with pytest.raises(BadRequest) as refused:
        await load(images, data)
    return refused.value.message


def numbered(number: int) -> bytes:
    """An image like no other."""
    return saved(picture(), "PNG") + struct.pack("<I", number)


@functools.cache
def endless() -> bytes:
    """Takes half a minute to decode: far too long."""
    return files.jpeg_with_scans(*LARGE, 3000)


def peak_bytes(pid: int) -> int:
    """The most that was ever resident."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


async def test_image_processes_stand_behind_those_of_texts(images: Images) -> None:
    await load(images, SMALL)
    [process] = image_processes()
    assert process.nice() > os.getpriority(os.PRIO_PROCESS, 0) + NICENESS


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
async def test_pixels_of_an_image_in_the_usual_mode_are_there_once(images: Images) -> None:
    await load(images, SMALL)
    [process] = image_processes()
    before_bytes = peak_bytes(process.pid)
    width = height = 4000
    await load(images, saved(PillowImage.new("RGB", (width, height), "teal"), "PNG"))
    assert image_processes() == [process]
    assert peak_bytes(process.pid) - before_bytes < 1.8 * width * height * 3


def test_an_endless_image_is_no_large_one() -> None:
    assert len(endless()) < 2_000_000


async def test_no_process_runs_before_the_first_image_and_one_decodes_all(images: Images) -> None:
    assert image_processes() == []
    first = await load(images, SMALL)
    [process] = image_processes()
    await load(images, numbered(1))
    assert image_processes() == [process]
    assert (first.width, first.height) == (60, 40)


async def test_an_image_that_comes_again_is_decoded_once(
    images: Images, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = count_decodings(monkeypatch)
    url = "data:;base64," + base64.b64encode(SMALL).decode()
    loads = [images.load(url, param="p", client=f"{i}") for i in range(100)]
    found = await asyncio.gather(*loads)
    assert len({each.digest for each in found}) == 1
    assert await load(images, SMALL) is found[0]
    await images.pixels(found[0], client="a")
    assert len(asked) == 1


async def test_images_are_counted_by_what_becomes_of_them(images: Images) -> None:
    await asyncio.gather(*(load(images, SMALL) for _ in range(3)))
    await load(images, SMALL)
    await refusal(images, SMALL[:50])
    images._memory.total = 1
    with pytest.raises(TooManyRequests):
        await asyncio.gather(load(images, numbered(1)), load(images, numbered(2)))
    value = images._metrics.registry.get_sample_value
    name = "penstock_router_images_total"
    outcomes = {each: value(name, {"outcome": each}) for each in ("decoded", "known", "refused")}
    assert outcomes == {"decoded": 1, "known": 3, "refused": 1}
    assert value("penstock_router_refused_total", {"reason": "images"}) == 1
    assert value("penstock_router_image_bytes_total") == 4 * len(SMALL)
    assert value("penstock_router_image_decode_seconds_count") == 2
    assert value("penstock_router_image_held_bytes") == images._memory.held


async def test_memory_is_the_clients_until_nobody_has_the_image_or_its_pixels(
    images: Images,
) -> None:
    image = await load(images, SMALL)
    rows = await images.pixels(image, client="a")
    held = images._memory.held_by
    assert held("a") == len(SMALL) + _BYTES_BESIDE + len(rows)
    images._images.clear()
    images._pixels.clear()
    # What woke this task had the image too.
    await asyncio.sleep(0)
    assert held("a") == len(SMALL) + _BYTES_BESIDE + len(rows)
    del image
    assert held("a") == len(rows)
    del rows
    assert held("a") == 0


async def test_what_is_only_kept_gives_way_and_what_is_needed_does_not(images: Images) -> None:
    images._memory.total = 10 * len(SMALL)
    for number in range(20):
        await load(images, numbered(number))
    loads = [await load(images, numbered(number)) for number in range(20, 23)]
    with pytest.raises(TooManyRequests, match="the images of this client's requests hold"):
        await asyncio.gather(*(load(images, numbered(number)) for number in range(23, 30)))
    assert all(image.encoded for image in loads)
    assert (await load(images, numbered(30), "another client")).width == 60


async def test_pixels_that_are_not_kept_any_more_are_decoded_again(
    images: Images, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = await load(images, SMALL)
    before = bytes(await images.pixels(image, client="a"))
    images._pixels.clear()
    asked = count_decodings(monkeypatch)
    again = await asyncio.gather(*(images.pixels(image, client="a") for _ in range(3)))
    assert [bytes(rows) == before for rows in again] == [True] * 3
    assert len(asked) == 1
    assert all(rows.readonly for rows in again)


async def test_an_image_that_ends_its_process_is_refused_and_the_next_is_not(
    images: Images,
) -> None:
    await load(images, SMALL)
    [process] = image_processes()
    _stop(process)
    task = asyncio.create_task(refusal(images, numbered(1)))
    await asyncio.sleep(0.1)
    process.send_signal(signal.SIGSEGV)
    process.resume()
    assert await task == "p: the image cannot be decoded: its decoder ended"
    assert (await load(images, numbered(2))).width == 60
    assert [child.pid for child in image_processes()] != [process.pid]


async def test_one_that_died_while_idle_costs_nobody_anything(images: Images) -> None:
    await load(images, SMALL)
    [process] = image_processes()
    process.kill()
    process.wait(10)
    assert (await load(images, numbered(1))).width == 60


async def test_an_image_that_takes_too_long_is_refused_and_the_next_is_not(
    images: Images, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoder_pool, "_MODULE", "support.strict_decoder")
    # The image's second is a processor's: on a busy machine it takes many by the clock.
    monkeypatch.setattr(decoder_pool, "_MAX_S", 300.0)
    assert await refusal(images, endless()) == "p: decoding the image takes more than 10 s"
    assert (await load(images, SMALL)).width == 60


async def test_a_process_that_says_nothing_is_killed(
    images: Images, monkeypatch: pytest.MonkeyPatch
) -> None:
    await load(images, SMALL)
    monkeypatch.setattr(decoder_pool, "_MAX_S", 0.3)
    [process] = image_processes()
    _stop(process)
    with pytest.raises(TooManyRequests, match="decoding takes too long at present"):
        await load(images, numbered(1))
    assert not is_alive(process)


@pytest.mark.parametrize("kind", ["WEBP", "PNG", "JPEG"])
async def test_an_image_that_takes_too_much_memory_is_refused_and_the_next_is_not(
    images: Images, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(decoder_pool, "_MODULE", "support.strict_decoder")
    mode = "RGB" if kind == "JPEG" else "RGBA"
    message = await refusal(images, saved(PillowImage.new(mode, LARGE), kind, **_FAST[kind]))
    assert message in (
        "p: decoding the image takes more memory than it may",
        # Where the libraries do not tell one from the other.
        *(f"p: the image is not valid {name}, or is cut off" for name in ("JPEG", "WebP")),
    )
    assert (await load(images, SMALL)).width == 60


@pytest.mark.parametrize(
    ("mode", "kind", "orientation"),
    [
        ("RGBA", "WEBP", 6),
        in_soak("RGBA", "PNG", 6),
        in_soak("RGB", "JPEG", 6),
        in_soak("CMYK", "JPEG", 5),
    ],
)
async def test_the_largest_images_have_memory_and_time_enough(
    images: Images, mode: str, kind: str, orientation: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A bound of time that passes, which other load uses up. That of processor time stays.
    monkeypatch.setattr(decoder_pool, "_MAX_S", 300.0)
    exif = PillowImage.Exif()
    exif[0x0112] = orientation
    data = saved(PillowImage.new(mode, LARGE), kind, exif=exif.tobytes(), **_FAST[kind])
    image = await load(images, data)
    rows = await images.pixels(image, client="a")
    assert (image.width, image.height, len(rows)) == (*LARGE, LARGE[0] * LARGE[1] * 3)


async def test_sixteen_bits_of_grey_keep_the_higher_eight(images: Images) -> None:
    values = [high << 8 | low for high in range(256) for low in (0, 255)]
    rows = [struct.pack(">32H", *values[at : at + 32]) for at in range(0, 512, 32)]
    pixels = zlib.compress(b"".join(b"\0" + row for row in rows))
    image = await load(images, png(header(32, 16, bits=16), chunk(b"IDAT", pixels)))
    grey = bytes(value >> 8 for value in values for _ in range(3))
    assert bytes(await images.pixels(image, client="a")) == grey


async def test_a_client_that_leaves_the_line_frees_its_place(
    images: Images, monkeypatch: pytest.MonkeyPatch
) -> None:
    await load(images, SMALL)
    [process] = image_processes()
    _stop(process)
    asked = count_decodings(monkeypatch)
    tasks = [asyncio.create_task(load(images, numbered(i))) for i in range(10)]
    await asyncio.sleep(0.1)
    for task in tasks[:9]:
        task.cancel()
    await asyncio.gather(*tasks[:9], return_exceptions=True)
    process.resume()
    assert (await tasks[9]).width == 60
    # The one that was being decoded, and the one whose client is still there.
    assert len(asked) == 2


def _stop(process: psutil.Process) -> None:
    process.suspend()
    wait_until(lambda: process.status() == psutil.STATUS_STOPPED, timeout_s=5, what="it stands")


async def test_clients_take_turns_and_none_takes_all_places_in_the_line(
    images: Images, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(line, "_MAX_WAITING", 40)
    images._line = line.Line(1, "decoded")
    await load(images, SMALL)
    [process] = image_processes()
    _stop(process)
    ended: list[str] = []

    async def run(client: str, number: int) -> None:
        await load(images, numbered(number), client)
        ended.append(client)

    greedy = [asyncio.create_task(run("greedy", i)) for i in range(100)]
    async with asyncio.timeout(30):
        while sum(task.done() for task in greedy) < 100 - 20 - 1:
            await asyncio.sleep(0.01)
    other = [asyncio.create_task(run("other", 1000 + i)) for i in range(3)]
    await asyncio.sleep(0.1)
    process.resume()
    outcomes = await asyncio.gather(*greedy, return_exceptions=True)
    await asyncio.gather(*other)
    refused = [each for each in outcomes if isinstance(each, TooManyRequests)]
    assert len(refused) == 100 - 20 - 1
    assert "too many images wait to be decoded" in refused[0].message
    # In turn with the other's until it has all of its three.
    assert ended.index("other") <= 2
    assert [each for each in ended[:8] if each == "other"] == ["other"] * 3


async def test_who_loads_what_another_has_last_in_its_line_waits_its_own_turn(
    images: Images, monkeypatch: pytest.MonkeyPatch
) -> None:
    await load(images, SMALL)
    [process] = image_processes()
    _stop(process)
    asked = count_decodings(monkeypatch)
    greedy = [asyncio.create_task(load(images, numbered(i), "greedy")) for i in range(60)]
    await asyncio.sleep(0.2)
    one = asyncio.create_task(load(images, numbered(59), "one"))
    await asyncio.sleep(0.1)
    process.resume()
    assert (await one).width == 60
    assert len(asked) <= 3
    await asyncio.gather(*greedy)
    # The shared one is decoded once.
    assert len(asked) == 60


async def test_who_has_no_memory_left_for_an_image_is_refused_and_another_is_not(
    images: Images,
) -> None:
    """Both clients ask at once for pixels that are no longer kept."""
    image = await load(images, SMALL, "first")
    images._pixels.clear()
    taken = images._memory.hold("poor")
    taken.add(images._memory.total // 2)
    outcomes = await asyncio.gather(
        *(images.pixels(image, client=client) for client in ("poor", "rich")),
        return_exceptions=True,
    )
    taken.close()
    assert isinstance(outcomes[0], TooManyRequests)
    assert isinstance(outcomes[1], memoryview)


async def test_who_waits_too_long_is_told_to_come_back(
    images: Images, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(line, "_MAX_WAIT_S", 0.2)
    await load(images, SMALL)
    [process] = image_processes()
    _stop(process)
    first = asyncio.create_task(load(images, numbered(1)))
    await asyncio.sleep(0.05)
    with pytest.raises(TooManyRequests, match="too many images wait to be decoded"):
        await load(images, numbered(2))
    process.resume()
    assert (await first).width == 60


async def test_closing_ends_what_is_being_decoded(images: Images) -> None:
    await load(images, SMALL)
    [process] = image_processes()
    _stop(process)
    tasks = [asyncio.create_task(load(images, numbered(i))) for i in range(3)]
    await asyncio.sleep(0.1)
    await images.close()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert not is_alive(process)
    with pytest.raises(Unavailable, match="shutting down"):
        await load(images, SMALL)


def test_a_process_ends_when_its_router_is_killed_also_in_the_middle_of_an_image(
    tmp_path: Path,
) -> None:
    (tmp_path / "image").write_text(base64.b64encode(endless()).decode())
    program = """
import asyncio, sys
from concurrent.futures import ThreadPoolExecutor
from penstock_common.child_process.child_end import NICENESS
from penstock_router.config import RouterConfig
from penstock_router.images.images import Images
from penstock_router.observe.metrics import Metrics
from penstock_router.thread_pool import Threads

async def main():
    images = Images(RouterConfig(shards="a:1"), Threads(ThreadPoolExecutor(1), 9), Metrics())
    await images.load_base64(open(sys.argv[1]).read(), param="p", client="a")

asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", program, tmp_path / "image"]) as router:
        found = psutil.Process(router.pid)
        wait_until(lambda: bool(found.children()), timeout_s=20, what="an image process")
        [process] = found.children()
        wait_until(lambda: process.cpu_times().user > 0.35, timeout_s=20, what="decoding")
        os.kill(router.pid, signal.SIGKILL)
    wait_until(lambda: not is_alive(process), timeout_s=5, what="the end of the image process")


def count_decodings(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    asked: list[object] = []
    ask = decoder_pool._ask

    async def counted(*arguments):
        asked.append(arguments)
        return await ask(*arguments)

    monkeypatch.setattr(decoder_pool, "_ask", counted)
    return asked
