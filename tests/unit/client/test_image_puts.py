"""Requests with images: their pixels are where they go before they are sent."""

from __future__ import annotations

import pytest
from support.fleet_doubles import Make, World, settled

from penstock_client import (
    GenerationStream,
    InvalidRequest,
    LoadReport,
    NotServed,
    Output,
    Overloaded,
    PromptImage,
    ShardUnavailable,
)
from penstock_client.fleet.failover import Patience
from penstock_client.fleet.fleet_stream import FleetStream

_SEES = frozenset({"images"})
_ONE, _OTHER = (PromptImage(digit * 64, 4, 4, place, 1) for digit, place in (("a", 0), ("b", 1)))


class _Source:
    """Counts how often it is asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def __call__(self, image: PromptImage) -> bytes:
        self.asked.append(image.sha256[0])
        return bytes(48)


def _world(make: Make, *names: str) -> World:
    world = make()
    for name in names:
        world.add(name, capabilities=_SEES)
    return world


def _puts(world: World, name: str) -> str:
    """The images that were put there, in order."""
    return "".join(sha256[0] for sha256, _ in world.at(name).puts)


async def _answer(world: World, name: str, error: Exception | None = None) -> None:
    """Answer the put that has waited longest at the shard; fail it with `error`, if given."""
    answer = next(answer for _, answer in world.at(name).puts if not answer.done())
    if error is None:
        answer.set_result(None)
    else:
        answer.set_exception(error)
    await settled()
    await settled()


def _sent(world: World, name: str) -> list[GenerationStream]:
    return [sent.stream for sent in world.at(name).sent]


async def _rejected(stream: FleetStream) -> str:
    with pytest.raises(InvalidRequest) as refused:
        async for _ in stream:
            pass
    return str(refused.value)


async def test_a_request_is_sent_once_its_images_are_there(make: Make) -> None:
    world, source = _world(make, "a"), _Source()
    stream = world.start(source, images=[_ONE, _OTHER])
    await settled()
    assert (_puts(world, "a"), _sent(world, "a")) == ("a", [])
    await _answer(world, "a")
    assert (_puts(world, "a"), _sent(world, "a")) == ("ab", [])
    await _answer(world, "a")
    assert _sent(world, "a") == [stream]
    assert [image.sha256 for image in world.last(stream).request.images] == ["a" * 64, "b" * 64]


async def test_what_an_engine_has_is_not_put_again(make: Make) -> None:
    world, source = _world(make, "a"), _Source()
    world.start(source, images=[_ONE])
    await settled()
    await _answer(world, "a")
    second = world.start(source, images=[_ONE, _ONE])
    await settled()
    assert (source.asked, _sent(world, "a")[-1]) == (["a"], second)
    # Another engine has none.
    world.add("a", capabilities=_SEES)
    world.start(source, images=[_ONE])
    await settled()
    assert source.asked == ["a", "a"]


async def test_streams_wait_for_one_put_together_and_outlive_each_other(make: Make) -> None:
    world, source = _world(make, "a"), _Source()
    streams = [world.start(source, images=[_ONE]) for _ in range(3)]
    await settled()
    streams[0].cancel()
    await settled()
    await _answer(world, "a")
    assert source.asked == ["a"]
    assert _sent(world, "a") == streams[1:]


async def test_a_shard_that_dropped_pixels_gets_them_again(make: Make) -> None:
    world, source = _world(make, "a"), _Source()
    stream = world.start(source, images=[_ONE])
    await settled()
    await _answer(world, "a")
    stream.fail(InvalidRequest("images[0]: its pixels are not here", field="pixels"))
    await settled()
    assert (source.asked, stream.shard) == (["a", "a"], None)
    await _answer(world, "a")
    assert (world.where(stream), world.last(stream).attempt.number) == ("a", 1)


async def test_a_request_whose_pixels_are_dropped_each_time_is_refused_for_want_of_room(
    make: Make,
) -> None:
    world = _world(make, "a")
    stream = world.start(_Source(), images=[_ONE])
    for _ in range(Patience().attempts):
        await settled()
        await _answer(world, "a")
        stream.fail(InvalidRequest("images[0]: its pixels are not here", field="pixels"))
    with pytest.raises(Overloaded, match="images of other requests take the memory"):
        async for _ in stream:
            pass


async def test_what_is_wrong_with_an_image_ends_its_request(make: Make) -> None:
    world = _world(make, "a", "b")
    stream = world.start(_Source(), images=[_ONE])
    await settled()
    (name,) = [name for name in "ab" if _puts(world, name)]
    await _answer(world, name, InvalidRequest("digest: wrong", field="digest"))
    assert await _rejected(stream) == "digest: wrong"
    unknown = world.start(images=[_ONE])
    await settled()
    assert "no source of their pixels" in await _rejected(unknown)


@pytest.mark.parametrize("error", [ShardUnavailable("gone"), Overloaded("full")])
async def test_where_an_image_cannot_be_put_another_shard_is_tried(
    make: Make, error: Exception
) -> None:
    world, source = _world(make, "a", "b"), _Source()
    stream = world.start(source, images=[_ONE])
    await settled()
    first, second = ("a", "b") if _puts(world, "a") else ("b", "a")
    await _answer(world, first, error)
    assert _puts(world, second) == "a"
    await _answer(world, second)
    assert world.where(stream) == second


async def test_a_stream_that_moves_is_preceded_by_its_images(make: Make) -> None:
    world, source = _world(make, "a"), _Source()
    stream = world.start(source, images=[_ONE])
    await settled()
    await _answer(world, "a")
    stream.feed(Output([10], 0))
    world.add("b", capabilities=_SEES)
    world.shards["a"].load = LoadReport(serving=True, draining=True, handing_over=True)
    world.continuations.on_shard_change(world.shards["a"])
    await settled()
    assert (world.where(stream), _puts(world, "b")) == ("a", "a")
    await _answer(world, "b")
    assert world.where(stream) == "b"


async def test_shards_that_see_nothing_get_no_images(make: Make) -> None:
    world = make("blind")
    with pytest.raises(NotServed, match="images is not served by any shard"):
        world.start(_Source(), images=[_ONE])
    world.add("seeing", capabilities=_SEES)
    world.start(_Source(), images=[_ONE])
    await settled()
    assert (_puts(world, "blind"), _puts(world, "seeing")) == ("", "a")


async def test_a_reader_that_leaves_while_images_are_put_leaves_nothing(make: Make) -> None:
    world = _world(make, "a")
    stream = world.start(_Source(), images=[_ONE])
    await settled()
    stream.cancel()
    await settled()
    await _answer(world, "a")
    images = world.continuations._images
    assert (_sent(world, "a"), images._waiting, images._targets, images._putting) == (
        [],
        {},
        {},
        {},
    )
