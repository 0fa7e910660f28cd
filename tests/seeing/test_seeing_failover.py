"""Requests with images outlive engines that are killed, in the middle of prefill and of decode.

The last of these files: nobody waits for the last engine.
"""

from __future__ import annotations

import asyncio

from support.budget import budget
from support.image_site import SeeingShards

from penstock_client import Fleet, GenerationRequest, PromptImage, SamplingParams
from penstock_client.fleet.fleet_stream import FleetStream

_NUM_TOKENS = 60
# Tokens of text, whichever ids images have.
_WORDS = range(400, 3900)


async def test_streams_with_images_go_on_at_another_shard_with_the_tokens_of_transformers(
    shards: SeeingShards,
) -> None:
    from models.image_prompts import Asked, ask

    asked = [
        ask(shards.directory, shards.whole, sizes, seed, _NUM_TOKENS, words=_WORDS)
        for seed, sizes in enumerate((((300, 200),), ((100, 30), (57, 131))))
    ]

    def request_of(each: Asked) -> GenerationRequest:
        return GenerationRequest(
            each.token_ids,
            SamplingParams(temperature=0.0),
            max_tokens=_NUM_TOKENS,
            ignore_eos=True,
            images=each.placed,
        )

    async def pixels(image: PromptImage) -> bytes:
        (picture,) = [
            picture
            for each in asked
            for picture, placed in zip(each.pictures, each.placed, strict=True)
            if placed.digest == image.digest
        ]
        return picture.pixels

    def is_whole(stream: FleetStream) -> bool:
        return len(stream.token_ids) == _NUM_TOKENS

    by_address, num_moved = {shard.address: shard for shard in shards.shards}, 0
    async with Fleet(list(by_address)) as fleet:
        for number, num_before_death in enumerate((0, 20, 1, 1, 1, 1)):
            # More than these only until some engine died in time.
            if number >= budget(2, 3) and num_moved:
                break
            async with asyncio.timeout(60):
                while not all(state.ready for state in fleet.shards):
                    await asyncio.sleep(0.05)
            streams = [fleet.submit(request_of(each), pixels) for each in asked]
            while any(stream.shard is None and not is_whole(stream) for stream in streams):
                await asyncio.sleep(0.001)
            while len(streams[0].token_ids) < num_before_death:
                await asyncio.sleep(0.001)
            # A stream whose images were not there yet is between two attempts; and on a busy
            # machine all tokens after the first may come at once.
            while (serving := streams[0].shard) is None and not is_whole(streams[0]):
                await asyncio.sleep(0.001)
            if serving is not None:
                by_address[serving.address].engine.kill()
            for stream, each in zip(streams, asked, strict=True):
                token_ids = [i async for output in stream for i in output.token_ids]
                assert token_ids == each.expected
            num_moved += streams[0].attempt > 0
        assert num_moved > 0
