"""Images in prompts for vLLM's core, without vLLM, and the bridge meanwhile."""

from __future__ import annotations

import asyncio
import json
import threading
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from penstock_proto.engine_request import EngineRequest
from penstock_proto.errors import Code
from penstock_proto.types import EngineSampling, FinishReason, PromptImage, RequestOutput
from penstock_shard.cli import parse_config
from penstock_shard.engine.adapter_slots import EngineAdapters
from penstock_shard.errors import ImageUnusable
from penstock_shard.ipc.messages import (
    FromEngine,
    ImageDrop,
    ImagePiece,
    Inbox,
    Started,
    StepOutputs,
)
from penstock_shard.ipc.runner_info import RunnerInfo
from penstock_shard.vllm_engine.bridge import Bridge
from penstock_shard.vllm_engine.engine_arguments import engine_arguments
from penstock_shard.vllm_engine.images import PromptImages, serves_images
from penstock_shard.vllm_engine.requests import CAPABILITIES, CoreRequest

IMAGE = 9
# Of what fits a patch of two by two pixels; four patches are a token.
_PATCH = 2


class Processor:
    """Cuts pixels into patches, once it may."""

    def __init__(self) -> None:
        self.may_go_on = threading.Event()
        self.may_go_on.set()

    def __call__(self, pixels: bytes, width: int, height: int) -> Mapping[str, Any]:
        assert self.may_go_on.wait(5)
        if width > 50 * height:
            raise ValueError("such a shape")
        return {
            "pixel_values": pixels,
            "image_grid_thw": np.array([[1, height // _PATCH, width // _PATCH]]),
        }


def _join(request: EngineRequest, made: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {"images": [each["pixel_values"] for each in made], "salt": request.cache_salt}


def made_images(processor: Processor | None = None) -> PromptImages:
    return PromptImages(processor or Processor(), _join, IMAGE, 2)


def digest(name: str) -> bytes:
    return name.encode() * 32


def pieces(number: int, name: str, *parts: bytes) -> list[ImagePiece]:
    size = sum(map(len, parts))
    given = [ImagePiece(number, size, part) for part in parts]
    return [*given, ImagePiece(number, size, b"", digest(name))]


def inbox(*given: ImagePiece, drops: Sequence[str] = (), **fields: Any) -> Inbox:
    dropped = [ImageDrop(digest(name)) for name in drops]
    return Inbox(
        **{"requests": [], "aborts": [], **fields}, image_pieces=[*given], image_drops=dropped
    )


def placed(name: str, offset: int, num_tokens: int, size: tuple[int, int] = (8, 4)) -> PromptImage:
    return PromptImage(digest(name).hex(), *size, offset, num_tokens)


def request(ids: Sequence[int], *images: PromptImage, **fields: Any) -> EngineRequest:
    prompt = array("I", ids).tobytes()
    greedy = EngineSampling(temperature=0.0)
    given = {"request_id": "r", "attempt": 0, "max_tokens": 4, **fields}
    return EngineRequest(prompt=prompt, sampling=greedy, images=images, **given)


async def put_into(images: PromptImages, asked: EngineRequest) -> dict[str, Any]:
    return await images.put_into({"type": "token", "prompt_token_ids": [1, 2]}, asked)


async def test_a_prompt_keeps_its_ids_and_gets_its_images_in_their_order() -> None:
    images = made_images()
    images.take(inbox(*pieces(1, "a", b"x" * 50, b"y" * 46), *pieces(2, "b", b"z" * 96)))
    asked = request(
        [1, *[IMAGE] * 2, 3, *[IMAGE] * 2, 4], placed("b", 1, 2), placed("a", 4, 2), cache_salt="s"
    )
    assert await put_into(images, asked) == {
        "type": "multimodal",
        "prompt_token_ids": [1, 2],
        "images": [b"z" * 96, b"x" * 50 + b"y" * 46],
        "salt": "s",
    }


async def test_pieces_of_several_images_may_be_mixed_and_one_may_end_unfinished() -> None:
    images = made_images()
    first, second = pieces(1, "a", b"1", b"2"), pieces(2, "b", b"3", b"4")
    images.take(inbox(first[0], second[0]))
    images.take(inbox(second[1], ImagePiece(1, 0, b""), second[2]))
    # The number comes again in another engine's life; nothing is left of what did not end.
    images.take(inbox(*pieces(1, "a", b"5")))
    asked = request([IMAGE] * 4, placed("a", 0, 2), placed("b", 2, 2))
    assert (await put_into(images, asked))["images"] == [b"5", b"34"]


async def test_an_image_that_was_dropped_is_not_there() -> None:
    images = made_images()
    images.take(inbox(*pieces(1, "a", b"1"), *pieces(2, "b", b"2")))
    images.take(inbox(drops=["a", "unknown"]))
    asked = request([IMAGE] * 4, placed("b", 0, 2), placed("a", 2, 2))
    with pytest.raises(ImageUnusable, match=r"images\[1\]: its pixels are not here any more"):
        await put_into(images, asked)
    asked = request([IMAGE] * 2, placed("b", 0, 2))
    assert (await put_into(images, asked))["images"] == [b"2"]


@pytest.mark.parametrize(
    ("ids", "place", "said"),
    [
        ([1, 9, 9, 9, 1], (1, 3), "3 of its 3 tokens have the id for images; the encoder makes 2"),
        ([1, 9, 1, 1, 1], (1, 1), "1 of its 1 tokens have"),
        # What penstock's own engine takes: vLLM counts positions from the first.
        ([1, 8, 9, 9, 8], (1, 4), "2 of its 4 tokens have"),
        ([1, 9, 5, 1, 1], (1, 2), "1 of its 2 tokens have"),
    ],
)
async def test_places_that_are_not_what_the_encoder_makes_are_refused(
    ids: list[int], place: tuple[int, int], said: str
) -> None:
    images = made_images()
    images.take(inbox(*pieces(1, "a", b"1")))
    with pytest.raises(ImageUnusable) as refused:
        await put_into(images, request(ids, placed("a", *place)))
    assert str(refused.value).startswith(f"images[0]: {said}")
    assert "rows of 8x4 pixels" in str(refused.value)


async def test_what_the_processor_stumbles_over_is_that_images_fault() -> None:
    images = made_images()
    images.take(inbox(*pieces(1, "a", b"1")))
    with pytest.raises(ImageUnusable, match=r"images\[0\]: it cannot be encoded: ValueError"):
        await put_into(images, request([IMAGE], placed("a", 0, 1, (400, 4))))


# ---- Which models ------------------------------------------------------------------------------


def _model(folder: Path, model_type: str, *, sees: bool = True) -> Path:
    config = {"model_type": model_type, **({"vision_config": {}} if sees else {})}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("model_type", "flags", "is_tried", "served", "said"),
    [
        ("qwen2_vl", "", True, True, ""),
        ("qwen2_vl", "--image-cache-bytes 0", True, False, ""),
        ("qwen2_vl", "", False, False, "this version of vLLM was not tried"),
        ("qwen2_vl", "--exact", True, False, "--exact promises equal bits"),
        ("qwen3_vl", "", True, False, "those of models of type qwen2_vl, not qwen3_vl"),
    ],
)
def test_images_of_one_family_are_served_and_those_of_others_named(
    tmp_path: Path, model_type: str, flags: str, is_tried: bool, served: bool, said: str
) -> None:
    lines: list[str] = []
    config = parse_config(["--engine", "vllm", *flags.split()])
    model_dir = _model(tmp_path, model_type)
    told = serves_images(config, model_dir, is_tried=is_tried, progress=lines.append)
    assert told is served
    assert [said in line and "its images are not served" in line for line in lines] == (
        [True] if said else []
    )
    arguments = engine_arguments(config, model_dir, None, told)
    assert arguments.get("language_model_only", False) is not served
    assert arguments["skip_tokenizer_init"] is not served


def test_a_model_of_text_gets_no_arguments_of_images(tmp_path: Path) -> None:
    config = parse_config(["--engine", "vllm"])
    model_dir = _model(tmp_path, "llama", sees=False)
    told = serves_images(config, model_dir, is_tried=True, progress=pytest.fail)
    assert told is None
    assert engine_arguments(config, model_dir, None, told) == engine_arguments(config, model_dir)


# ---- The bridge --------------------------------------------------------------------------------


class FakeCore:
    """Notes what it gets, and gives nothing."""

    keeps_output = False
    max_step_tokens = 64

    def __init__(self) -> None:
        self.added: list[tuple[str, str]] = []
        self.steps: asyncio.Queue[Any] = asyncio.Queue()

    async def add(self, asked: CoreRequest, adapter: int) -> None:
        self.added.append((asked.name, asked.prompt["type"]))

    async def abort(self, names: list[str]) -> None:
        pass

    async def step(self) -> Any:
        return await self.steps.get()

    def check_alive(self) -> None:
        pass


INFO = RunnerInfo(
    architecture="Fake",
    weights_hash="w",
    vocab_size=100,
    max_model_len=64,
    eos_token_ids=(2,),
    default_sampling={},
    block_size=16,
    pools=(100,),
    dtype="float32",
    kv_dtype="float32",
    device="cpu",
    attention_backend="vllm",
    capabilities=CAPABILITIES,
)


class Running:
    """A bridge that runs, with images, and what it has sent."""

    def __init__(self) -> None:
        self.core: Any = FakeCore()
        self.processor = Processor()
        self.sent: list[FromEngine] = []

    async def __aenter__(self) -> Running:
        adapters = EngineAdapters(None, 1, lambda: None)
        images = made_images(self.processor)
        self.bridge = Bridge(
            self.core, adapters, lambda index: index, INFO, self.sent.append, images
        )
        self.task = asyncio.create_task(self.bridge.run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self.processor.may_go_on.set()
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)

    async def take(self, message: Inbox) -> None:
        self.bridge.take(message)
        await self.wait()

    async def wait(self) -> None:
        for _ in range(5):
            await asyncio.sleep(0.01)

    @property
    def outputs(self) -> list[RequestOutput]:
        steps = [sent for sent in self.sent if isinstance(sent, StepOutputs)]
        return [output for step in steps for output in step.outputs]


SEEING = request([1, IMAGE, IMAGE], placed("a", 1, 2))
READING = request([1, 3], request_id="text")


async def test_a_request_waits_for_its_images_and_others_do_not() -> None:
    async with Running() as running:
        running.processor.may_go_on.clear()
        await running.take(inbox(*pieces(1, "a", b"1"), requests=[SEEING]))
        assert running.bridge.beat().step_running_s == 0.0
        await running.take(inbox(requests=[READING]))
        assert running.core.added == [("text/0", "token")]
        running.core.steps.put_nowait(SimpleNamespace(outputs=[], scheduler_stats=None))
        await running.wait()
        (step,) = [sent for sent in running.sent if isinstance(sent, StepOutputs)]
        assert (step.load.running, step.load.waiting, step.load.queued_tokens) == (1, 1, 3)
        running.processor.may_go_on.set()
        await running.wait()
        assert running.core.added[1:] == [("r/0", "multimodal")]
        started = [sent.request_ids for sent in running.sent if isinstance(sent, Started)]
        assert started == [["text"], ["r"]]


async def test_a_request_that_is_aborted_while_it_waits_never_reaches_the_core() -> None:
    async with Running() as running:
        running.processor.may_go_on.clear()
        await running.take(inbox(*pieces(1, "a", b"1"), requests=[SEEING]))
        await running.take(inbox(aborts=[("r", 0)]))
        running.processor.may_go_on.set()
        await running.wait()
        assert running.core.added == []
        assert [output.finish_reason for output in running.outputs] == [FinishReason.ABORTED]


async def test_a_request_whose_images_are_refused_ends_alone_and_names_them() -> None:
    async with Running() as running:
        wrong = request([1, IMAGE, IMAGE, IMAGE], placed("a", 1, 3))
        await running.take(inbox(*pieces(1, "a", b"1"), requests=[wrong, READING]))
        (output,) = running.outputs
        assert output.error is not None
        assert (output.error.code, output.error.field) == (Code.INVALID_ARGUMENT, "images")
        assert output.error.message.startswith("images[0]: 3 of its 3 tokens")
        assert running.core.added == [("text/0", "token")]
