"""Images with vLLM's own core: one family's, told as penstock's own engine tells them."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import io
import json
import random
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from PIL import Image
from support.processes import Router, Shard, ask, running
from support.vllm_shards import SEES, SEES_INSTALLED, START_S, start

from penstock_client import (
    Constraint,
    ConstraintKind,
    GenerationRequest,
    InvalidRequest,
    Output,
    PromptImage,
    SamplingParams,
    ShardClient,
)
from penstock_common.image_digest import image_digest

if TYPE_CHECKING:
    from models.tiny_vision import Picture

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900), SEES_INSTALLED]

# Heads that vLLM has on processors.
_TEXT = {
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]},
}
# A square of so many pixels is a token. These are shrunk and enlarged before they are encoded.
_SIDE = 28
_WIDE, _HIGH, _SMALL = (3 * _SIDE + 5, 2 * _SIDE + 3), (_SIDE - 3, 4 * _SIDE), (2 * _SIDE, _SIDE)
_SQUARES = {_WIDE: 6, _HIGH: 4, _SMALL: 6}


def _make_vision(directory: Path, family: str) -> Any:
    # What it imports imports Triton, which tests of kernels set up first.
    from models.tiny_vision import make_whole_vision

    return make_whole_vision(directory, family, _TEXT)


def _picture(seed: int, size: tuple[int, int]) -> Picture:
    from models.tiny_vision import random_picture

    return random_picture(random.Random(seed), *size)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """The directory of a model, and the token id that stands for images."""
    directory = tmp_path_factory.mktemp("qwen2_vl")
    made: Any = _make_vision(directory, "qwen2_vl")
    return directory, made.config.image_token_id


@pytest.fixture(scope="module")
def shards(
    model: tuple[Path, int], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Shard, Shard]]:
    """A shard with vLLM's engine, and a shard with penstock's own, of the same model."""
    folder, named = tmp_path_factory.mktemp("shards"), ("--model", str(model[0]))
    flags = ("--runner", "model", "--dtype", "float32", "--max-model-len", "512")
    shards = start(folder / "vllm", *named, python=SEES), Shard(folder / "own", *named, *flags)
    try:
        for shard in shards:
            shard.wait_healthy(START_S)
        yield shards
    finally:
        for shard in shards:
            shard.close()


@pytest.fixture
async def clients(shards: tuple[Shard, Shard]) -> AsyncIterator[list[ShardClient]]:
    theirs, ours = (ShardClient(shard.address) for shard in shards)
    async with theirs, ours:
        yield [theirs, ours]


def _asked(token_id: int, pictures: Sequence[Picture], **fields: Any) -> GenerationRequest:
    """Return a request with the images between words."""
    ids, images = list(range(40, 60)), []
    for picture in pictures:
        size = picture.width, picture.height
        digest = image_digest(*size, picture.pixels).hex()
        images.append(PromptImage(digest, *size, len(ids), _SQUARES[size]))
        ids += [token_id] * _SQUARES[size] + list(range(70, 77))
    given = {"max_tokens": 12, "ignore_eos": True, "logprobs": 2, **fields}
    return GenerationRequest(ids, SamplingParams(temperature=0.0), images=images, **given)


async def _told(
    client: ShardClient, request: GenerationRequest, pictures: Sequence[Picture]
) -> list[Output]:
    for image, picture in zip(request.images, pictures, strict=True):
        await client.put_image(image, picture.pixels)
    return [output async for output in client.generate(request)]


def _tokens(outputs: list[Output]) -> list[int]:
    return [token_id for each in outputs for token_id in each.token_ids]


def _scores(outputs: list[Output]) -> list[float]:
    parts = [part for each in outputs for part in (each.prompt_logprobs, each.logprobs) if part]
    return [score for part in parts for score in part.chosen]


@pytest.mark.parametrize("sizes", [(_WIDE,), (_HIGH, _WIDE), (_SMALL, _SMALL, _HIGH)])
async def test_tokens_and_log_probabilities_are_those_of_penstocks_own_engine(
    clients: list[ShardClient], model: tuple[Path, int], sizes: Sequence[tuple[int, int]]
) -> None:
    pictures = [_picture(seed, size) for seed, size in enumerate(sizes)]
    request = _asked(model[1], pictures, prompt_logprobs=0)
    theirs, ours = [await _told(client, request, pictures) for client in clients]
    assert _tokens(theirs) == _tokens(ours)
    assert len(_scores(ours)) == len(request.prompt_token_ids) - 1 + 12
    assert _scores(theirs) == pytest.approx(_scores(ours), abs=2e-3)
    infos = [await client.info() for client in clients]
    assert infos[0].weights_hash == infos[1].weights_hash
    assert all("images" in info.capabilities for info in infos)


async def test_a_prefix_is_found_with_the_same_image_and_not_with_another(
    clients: list[ShardClient], model: tuple[Path, int]
) -> None:
    # A block has 128 tokens there.
    words = {"cache_salt": "prefix"}
    found = []
    for seed in (1, 1, 2):
        pictures = [_picture(seed, _WIDE)] + [_picture(9, _SMALL)] * 12
        request = _asked(model[1], pictures, **words)
        found.append([await _told(client, request, pictures) for client in clients])
    cached = [max(each.cached_tokens or 0 for each in theirs) for theirs, _ in found]
    assert cached == [0, 128, 0]
    for theirs, ours in found:
        assert _tokens(theirs) == _tokens(ours)
        assert _scores(theirs) == pytest.approx(_scores(ours), abs=2e-3)
    first, again, other = (_scores(theirs) for theirs, _ in found)
    assert again == pytest.approx(first, abs=1e-4)
    assert other != pytest.approx(first, abs=1e-2)


async def test_another_image_of_the_same_size_gives_other_tokens(
    clients: list[ShardClient], model: tuple[Path, int]
) -> None:
    pictures = [_picture(seed, _WIDE) for seed in range(6)]
    told = await asyncio.gather(
        *(_told(clients[0], _asked(model[1], [each]), [each]) for each in pictures)
    )
    assert len({tuple(_tokens(outputs)) for outputs in told}) > 1
    assert len({round(_scores(outputs)[0], 4) for outputs in told}) == len(pictures)


async def test_a_request_goes_on_from_its_output_and_within_a_constraint(
    clients: list[ShardClient], model: tuple[Path, int]
) -> None:
    pictures = [_picture(3, _WIDE)]
    request = _asked(model[1], pictures)
    whole = _tokens(await _told(clients[1], request, pictures))
    rest = dataclasses.replace(request, output_token_ids=whole[:5])
    assert _tokens(await _told(clients[0], rest, pictures)) == whole[5:]
    regex = Constraint(ConstraintKind.REGEX, "[a-c]{5}x|[d-f]{9}")
    bound = dataclasses.replace(request, constraint=regex, ignore_eos=False, max_tokens=20)
    theirs, ours = [_tokens(await _told(client, bound, pictures)) for client in clients]
    assert theirs == ours


def test_a_chat_with_an_image_is_answered_alike_through_a_router(
    shards: tuple[Shard, Shard], tmp_path: Path
) -> None:
    file = io.BytesIO()
    Image.fromarray(_picture(4, _WIDE).array).save(file, "png")
    url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What?"}]
    body = {"messages": [{"role": "user", "content": parts}], "max_tokens": 8, "temperature": 0}
    routers = [Router(tmp_path / str(i), [shard.address]) for i, shard in enumerate(shards)]
    with running(*routers):
        told = [ask(f"{each.url}/v1/chat/completions", body) for each in routers]
    answers = [json.loads(text) for _, text in told]
    assert [status for status, _ in told] == [200, 200], answers
    theirs, ours = [(each["choices"], each["usage"]["prompt_tokens"]) for each in answers]
    assert theirs == ours


async def test_places_that_are_not_what_the_encoder_makes_are_refused_alone(
    clients: list[ShardClient], model: tuple[Path, int]
) -> None:
    pictures = [_picture(3, _WIDE)]
    request = _asked(model[1], pictures)
    (image,) = request.images
    short = dataclasses.replace(image, num_tokens=image.num_tokens - 1)
    wrong = dataclasses.replace(request, images=[short])
    with pytest.raises(InvalidRequest, match=r"images\[0\].*makes 6 rows of 89x59 pixels"):
        await _told(clients[0], wrong, pictures)
    assert _tokens(await _told(clients[0], request, pictures))


async def test_a_family_that_is_not_served_is_refused_by_name_and_its_text_is_served(
    tmp_path: Path,
) -> None:
    made: Any = _make_vision(tmp_path / "model", "qwen2_5_vl")
    shard = start(tmp_path / "vllm", "--model", str(tmp_path / "model"), python=SEES)
    try:
        shard.wait_healthy(START_S)
        assert "images are not served: --engine vllm serves those of models of type" in shard.log
        async with ShardClient(shard.address) as client:
            assert "images" not in (await client.info()).capabilities
            pictures = [_picture(3, _WIDE)]
            request = _asked(made.config.image_token_id, pictures)
            with pytest.raises(Exception, match="images are not served by this shard"):
                await _told(client, request, pictures)
            assert len(_tokens(await _told(client, _asked(0, []), []))) == 12
    finally:
        shard.close()
