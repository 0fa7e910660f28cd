"""Images of requests: put before the shard needs them, again where they are gone, and refused."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace

import pytest
from support.processes import Shard, ask, free_port, running

from penstock_cli.info import main as info
from penstock_client import (
    Fleet,
    GenerationRequest,
    InvalidRequest,
    Overloaded,
    PromptImage,
    SamplingParams,
    ShardClient,
    SyncShardClient,
)
from penstock_common.image_digest import image_digest

_SIZE = (40, 30)
_PROMPT = list(range(1, 61))


def _pixels(seed: int, width: int = _SIZE[0], height: int = _SIZE[1]) -> bytes:
    return hashlib.shake_256(bytes([seed])).digest(3 * width * height)


def _image(seed: int, offset: int = 10, num_tokens: int = 5) -> PromptImage:
    digest = image_digest(*_SIZE, _pixels(seed))
    return PromptImage(digest.hex(), *_SIZE, offset, num_tokens)


class _Source:
    """Gives pixels, and counts how often."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def __call__(self, image: PromptImage) -> bytes:
        self.asked.append(image.sha256)
        known = {_image(seed).sha256: _pixels(seed) for seed in range(20)}
        return known[image.sha256]


@pytest.fixture(scope="module")
def metrics_port() -> int:
    """The second shard's."""
    return free_port()


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory, metrics_port: int) -> Iterator[list[Shard]]:
    folder = tmp_path_factory.mktemp("shards")
    # Room for four images.
    flags = ("--step-ms", "2", "--check-integrity", "--image-cache-bytes", "16000")
    made = [
        Shard(folder / "first", *flags),
        Shard(folder / "second", *flags, "--metrics-port", str(metrics_port)),
    ]
    with running(*made):
        yield made


@pytest.fixture
async def fleet(shards: list[Shard]) -> AsyncIterator[Fleet]:
    async with Fleet([shard.address for shard in shards]) as made:
        while not all(state.ready for state in made.shards):
            await made.wait_changed()
        yield made


def _request(*images: PromptImage, **fields: object) -> GenerationRequest:
    sampling = SamplingParams(seed=3, temperature=1.0)
    return GenerationRequest(_PROMPT, sampling, max_tokens=8, images=images, **fields)  # type: ignore[arg-type]


async def _tokens(fleet: Fleet, request: GenerationRequest, source: _Source | None) -> list[int]:
    token_ids: list[int] = []
    async for output in fleet.submit(request, source):
        token_ids += output.token_ids
    return token_ids


# The first one: nothing was put before.
async def test_a_shard_counts_the_images_that_it_gets(
    fleet: Fleet, shards: list[Shard], metrics_port: int
) -> None:
    for seed in (1, 2, 1):
        await _tokens(fleet, _request(_image(seed), shard=shards[1].address), _Source())
    _, text = ask(f"http://127.0.0.1:{metrics_port}/metrics")
    values = dict(line.split() for line in text.splitlines() if line[0] != "#" and "{" not in line)
    assert float(values["penstock_shard_images_put_total"]) == 2
    assert float(values["penstock_shard_image_bytes"]) == 2 * len(_pixels(1))
    assert float(values["penstock_shard_images_encoded_total"]) >= 2
    assert "penstock_shard_image_encode_seconds_total" in values


async def test_an_image_is_put_once_and_tokens_depend_on_it(
    fleet: Fleet, shards: list[Shard]
) -> None:
    source = _Source()
    own = shards[0].address
    first = await _tokens(fleet, _request(_image(1), shard=own), source)
    assert source.asked == [_image(1).sha256]
    assert await _tokens(fleet, _request(_image(1), shard=own), source) == first
    assert len(source.asked) == 1
    others = [
        await _tokens(fleet, _request(*images, shard=own), source)
        for images in ([_image(2)], [_image(1, offset=11)], [], [_image(1), _image(2, offset=20)])
    ]
    assert first not in others
    assert len({tuple(each) for each in others}) == len(others)


async def test_many_streams_with_one_image_put_it_once(fleet: Fleet, shards: list[Shard]) -> None:
    source = _Source()
    request = _request(_image(3), shard=shards[0].address)
    found = await asyncio.gather(*(_tokens(fleet, request, source) for _ in range(10)))
    assert len({tuple(each) for each in found}) == 1
    assert source.asked == [_image(3).sha256]


async def test_pixels_that_a_shard_dropped_are_put_again(fleet: Fleet, shards: list[Shard]) -> None:
    source = _Source()
    own = shards[1].address
    first = await _tokens(fleet, _request(_image(4), shard=own), source)
    for seed in range(5, 10):
        await _tokens(fleet, _request(_image(seed), shard=own), source)
    assert await _tokens(fleet, _request(_image(4), shard=own), source) == first
    assert source.asked.count(_image(4).sha256) == 2


async def test_a_request_with_images_goes_on_at_another_shard(
    fleet: Fleet, shards: list[Shard]
) -> None:
    source = _Source()
    request = GenerationRequest(
        _PROMPT, SamplingParams(seed=3, temperature=1.0), max_tokens=400, images=[_image(10)]
    )
    calm = await _tokens(fleet, request, source)
    stream = fleet.submit(request, source)
    token_ids: list[int] = []
    async for output in stream:
        if not token_ids:
            assert stream.shard is not None
            (own,) = [each for each in shards if each.address == stream.shard.address]
            own.engine.kill()
        token_ids += output.token_ids
    assert token_ids == calm
    assert stream.attempt > 0
    for shard in shards:
        shard.wait_healthy()


async def test_wrong_pixels_are_refused_in_one_line(shards: list[Shard]) -> None:
    image = _image(11)
    async with ShardClient(shards[1].address) as client:
        with pytest.raises(InvalidRequest, match=r"digest: .* that of the size and the pixels"):
            await client.put_image(image, _pixels(12))
        with pytest.raises(InvalidRequest, match=r"^pixels: 3599 bytes is out of bounds"):
            await client.put_image(image, _pixels(11)[:-1])
        with pytest.raises(InvalidRequest, match="pixels: 3601 bytes"):
            await client.put_image(image, _pixels(11) + b"x")
        huge = PromptImage(image.sha256, 60_000, 60_000, 0, 1)
        with pytest.raises(InvalidRequest, match="--image-cache-bytes"):
            await client.put_image(huge, b"")
        with pytest.raises(InvalidRequest, match=r"images\[0\]: its pixels are not here"):
            async for _ in client.generate(_request(image)):
                pass


async def test_an_image_has_the_size_with_which_it_was_put(shards: list[Shard]) -> None:
    image = _image(11)
    turned = replace(image, width=image.height, height=image.width)
    async with ShardClient(shards[1].address) as client:
        await client.put_image(image, _pixels(11))
        with pytest.raises(InvalidRequest, match=r"images\[1\]: 30x40 .* 40x30, as it was put"):
            async for _ in client.generate(_request(image, replace(turned, offset=20))):
                pass


async def test_images_that_are_too_much_together_are_put_once_and_refused(fleet: Fleet) -> None:
    source = _Source()
    images = [_image(seed, offset=10 * seed) for seed in range(5)]
    with pytest.raises(InvalidRequest, match=r"images: 18000 bytes .* at most 16000 bytes"):
        await _tokens(fleet, _request(*images), source)
    assert len(source.asked) == 5


async def test_images_of_requests_that_run_are_never_dropped(shards: list[Shard]) -> None:
    async with ShardClient(shards[0].address) as client:
        running_now = []
        for seed in range(12, 16):
            await client.put_image(_image(seed), _pixels(seed))
            request = GenerationRequest(
                _PROMPT, SamplingParams(seed=1), max_tokens=1900, images=[_image(seed)]
            )
            stream = client.submit(request)
            await anext(aiter(stream))
            running_now.append(stream)
        with pytest.raises(Overloaded, match="images of requests that run take 14400 bytes"):
            await client.put_image(_image(16), _pixels(16))
        for stream in running_now:
            stream.cancel()
        for _ in range(100):
            try:
                await client.put_image(_image(16), _pixels(16))
                break
            except Overloaded:
                await asyncio.sleep(0.02)
        else:
            pytest.fail("the images of requests that were cancelled are kept")


@pytest.mark.parametrize(
    ("images", "message"),
    [
        ([_image(1, offset=58)], r"images\[0\].offset: 58 is out of bounds"),
        ([_image(1, num_tokens=0)], r"images\[0\].num_tokens: 0 .* 1..60"),
        ([_image(1, num_tokens=2**32 - 1)], r"images\[0\].num_tokens: 4294967295 .* 1..60"),
        ([_image(1), _image(1, offset=14)], r"images\[1\].offset: 14 .* behind the image before"),
    ],
)
async def test_places_that_cannot_be_are_refused(
    shards: list[Shard], images: list[PromptImage], message: str
) -> None:
    async with ShardClient(shards[0].address) as client:
        with pytest.raises(InvalidRequest, match=message):
            async for _ in client.generate(_request(*images)):
                pass


def test_info_says_whether_a_shard_sees_images(
    shards: list[Shard], capsys: pytest.CaptureFixture[str]
) -> None:
    assert info([shards[0].address]) == 0
    assert "images              seen\n" in capsys.readouterr().out


def test_the_blocking_client_puts_images_and_asks_about_them(shards: list[Shard]) -> None:
    picture, other = _image(17), _image(18)
    with SyncShardClient(shards[0].address) as client:
        client.put_image(picture, _pixels(17))
        first, again = (
            [i for output in client.generate(_request(picture)) for i in output.token_ids]
            for _ in range(2)
        )
        assert first == again
        with pytest.raises(InvalidRequest, match=r"digest: .* that of the size and the pixels"):
            client.put_image(other, _pixels(17))
        client.put_image(other, _pixels(18))
        assert first != [i for out in client.generate(_request(other)) for i in out.token_ids]
