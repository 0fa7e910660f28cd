"""Puts the pixels of images where the requests that name them go, before these.

An engine that has an image is told of it by digest from then on. It may have dropped the pixels
meanwhile; then it refuses the request, and they are put again.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterable

from penstock_client.fleet.fleet_stream import FleetStream
from penstock_client.fleet.shard_state import ShardState
from penstock_proto.errors import InvalidRequest, Overloaded, PenstockError
from penstock_proto.types import PixelSource, PromptImage

# The field that a shard names when it has not the pixels of an image.
PIXELS = "pixels"
_NO_ROOM = "images of other requests take the memory of this one's (--image-cache-bytes)"

# Of how many images it is remembered which engines have them.
_MOST_KNOWN = 16_384

# An engine's id, and an image's digest.
_Key = tuple[str, str]


def given_up(error: PenstockError) -> PenstockError:
    """The error that ends a stream after its last attempt: no fault of its own, if pixels were
    dropped each time before it came.
    """
    is_dropped = isinstance(error, InvalidRequest) and error.field == PIXELS
    return Overloaded(_NO_ROOM) if is_dropped else error


class ImagePuts:
    """Puts for the streams of one client. Decides nothing of where to."""

    def __init__(
        self,
        put_due: Callable[[Iterable[FleetStream]], None],
        failed: Callable[[FleetStream, ShardState, PenstockError], None],
    ) -> None:
        """`put_due` is called with a stream whose images are where it goes, `failed` if they cannot
        be put there.
        """
        self._put_due = put_due
        self._failed = failed
        self._known: OrderedDict[_Key, None] = OrderedDict()
        # Streams share the put of an image.
        self._putting: dict[_Key, asyncio.Task[None]] = {}
        self._targets: dict[FleetStream, ShardState] = {}
        self._waiting: dict[FleetStream, asyncio.Task[None]] = {}

    def close(self) -> None:
        """Put nothing more."""
        for task in (*self._waiting.values(), *self._putting.values()):
            task.cancel()

    def hold(self, stream: FleetStream, shard: ShardState) -> bool:
        """Tell whether a stream waits until its images are at the shard where it goes."""
        if stream in self._waiting:
            return True
        missing = self._missing(stream, shard)
        if not missing:
            return False
        self._targets[stream] = shard
        task = asyncio.get_running_loop().create_task(self._put_all(stream, shard, missing))
        self._waiting[stream] = task
        return True

    def target(self, stream: FleetStream) -> ShardState | None:
        """The shard that its images were put to, if it waited for that."""
        return self._targets.get(stream)

    def discard(self, stream: FleetStream) -> None:
        """Forget a stream that was sent, or that has ended."""
        self._targets.pop(stream, None)
        if (task := self._waiting.pop(stream, None)) is not None:
            task.cancel()

    def forget(self, stream: FleetStream, instance_id: str) -> None:
        """An engine has not all images of a stream any more."""
        for image in stream.request.images:
            self._known.pop((instance_id, image.sha256), None)

    def _missing(self, stream: FleetStream, shard: ShardState) -> list[PromptImage]:
        instance_id = "" if shard.info is None else shard.info.instance_id
        by_digest = {image.sha256: image for image in stream.request.images}
        return [
            image for sha256, image in by_digest.items() if (instance_id, sha256) not in self._known
        ]

    async def _put_all(
        self, stream: FleetStream, shard: ShardState, missing: list[PromptImage]
    ) -> None:
        try:
            for image in missing:
                await self._put(stream, shard, image)
        except PenstockError as error:
            self._waiting.pop(stream, None)
            self._failed(stream, shard, error)
        else:
            self._waiting.pop(stream, None)
            self._put_due([stream])

    async def _put(self, stream: FleetStream, shard: ShardState, image: PromptImage) -> None:
        if stream.pixels is None:
            text = "images: no source of their pixels was given"
            raise InvalidRequest(text, field="images")
        instance_id = "" if shard.info is None else shard.info.instance_id
        key = instance_id, image.sha256
        if key not in self._putting:
            putting = self._put_once(shard, key, image, stream.pixels)
            task = self._putting[key] = asyncio.get_running_loop().create_task(putting)
            task.add_done_callback(lambda ended: self._end_put(key, ended))
        # Not awaited itself: others may wait for it when this stream ends.
        task = self._putting[key]
        await asyncio.wait({task})
        task.result()

    def _end_put(self, key: _Key, task: asyncio.Task[None]) -> None:
        del self._putting[key]
        if not task.cancelled():
            # Seen, also where nobody waits for it any more.
            task.exception()

    async def _put_once(
        self, shard: ShardState, key: _Key, image: PromptImage, pixels: PixelSource
    ) -> None:
        await shard.client.put_image(image, await pixels(image), instance_id=key[0])
        self._known[key] = None
        if len(self._known) > _MOST_KNOWN:
            self._known.popitem(last=False)
