"""Models that see: their tokens are those of transformers, however their prompts are cut."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from models.driver import Driver, load, make_sequence
from models.image_prompts import OUTPUT_TOKENS, PICTURES, Asked, ask
from models.tiny_families import make_family
from models.tiny_vision import NAMES, make_vision
from support.budget import budget, in_soak

from penstock_proto.errors import Code
from penstock_proto.types import FinishReason, RequestOutput
from penstock_shard.config import ShardConfig
from penstock_shard.engine.create_engine import create_engine
from penstock_shard.errors import ModelError
from penstock_shard.images.features import ImageFeatures
from penstock_shard.images.image_encoder import ImageEncoder
from penstock_shard.images.image_processor import ImageProcessor
from penstock_shard.images.tower import Tower
from penstock_shard.ipc.messages import ImageDrop, ImagePiece, Inbox
from penstock_shard.model_loader.load_model_runner import load_model_runner
from penstock_shard.model_loader.load_runner import LoadedRunner
from penstock_shard.sequence import Sequence
from penstock_shard.worker.model_runner import ModelRunner

# In an engine they differ by what a row of an image is: a row alone; one of an image that is seen
# whole; one with more for later layers; one beside states. The others in the soak.
_IN_AN_ENGINE = {"internvl", "gemma4", "qwen3_vl", "qwen3_5"}
# Each with another way from rows to its text; the soak has all.
_UNLIKE = {*_IN_AN_ENGINE, "gemma3", "qwen2_5_vl", "glm4v", "idefics3"}


@pytest.fixture(scope="module")
def asked_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """A function from a family's name to a runner of it and what transformers answers."""

    @cache
    def make(family: str) -> Any:
        directory = tmp_path_factory.mktemp(family)
        whole = make_vision(directory, family)
        asked = [ask(directory, whole, sizes, seed) for seed, sizes in enumerate(PICTURES)]
        return load(directory, kv_blocks=400), asked

    return make


@pytest.fixture(params=[each if each in _IN_AN_ENGINE else in_soak(each) for each in NAMES])
def family(request: pytest.FixtureRequest, asked_of: Callable[[str], Any]) -> Any:
    return asked_of(request.param)


def _output(sequence: Sequence) -> list[int]:
    return sequence.token_ids[sequence.num_prompt_tokens :].tolist()


@pytest.mark.parametrize("name", [each if each in _UNLIKE else in_soak(each) for each in NAMES])
def test_tokens_are_those_of_transformers_in_chunks_and_batches(
    name: str, asked_of: Callable[[str], Any]
) -> None:
    runner, asked = asked_of(name)
    for each in asked:
        each.put(runner)
    for seed in range(budget(2, 3)):
        driver = Driver(runner, seed)
        sequences = [each.sequence() for each in asked]
        driver.generate(sequences, max_chunk=70)
        assert [_output(sequence) for sequence in sequences] == [each.expected for each in asked]
        for sequence in sequences:
            driver.preempt(sequence)


# ---- in an engine -------------------------------------------------------------------------------


class _Served:
    """An engine over a runner, which is told of images as a server would."""

    def __init__(self, runner: ModelRunner, monkeypatch: pytest.MonkeyPatch, **config: Any) -> None:
        self.runner = runner
        self.encoded: list[int] = []
        values = {"max_num_seqs": 4, "max_num_batched_tokens": 48, "max_prefill_tokens": 48}
        self.engine = create_engine(
            LoadedRunner(runner, {}, ""), ShardConfig(**{**values, **config}), lambda ids: None
        )
        encoder: Any = runner.images
        # As after a start.
        for kept in (encoder._features, encoder._facts, encoder._pixels):
            kept.clear()
        encode = encoder._encoder.encode

        def count(inputs: Any) -> Any:
            self.encoded.append(1)
            return encode(inputs)

        monkeypatch.setattr(encoder._encoder, "encode", count)

    def put(self, *asked: Asked) -> None:
        pieces = []
        for number, (picture, image) in enumerate(
            pair for each in asked for pair in zip(each.pictures, each.placed, strict=True)
        ):
            size, half = len(picture.pixels), len(picture.pixels) // 2
            pieces += [
                ImagePiece(number, size, picture.pixels[:half]),
                ImagePiece(number, size, picture.pixels[half:]),
                ImagePiece(number, size, b"", image.digest),
            ]
        self.engine.take_images(Inbox([], [], image_pieces=pieces))

    def run(self, *sequences: Sequence) -> list[list[RequestOutput]]:
        outputs: dict[str, list[RequestOutput]] = {}
        for number, sequence in enumerate(sequences):
            outputs[str(number)] = []
            request = msgspec.structs.replace(sequence.request, request_id=str(number))
            self.engine.submit(request)
        for _ in range(5000):
            if not self.engine._live:
                break
            if not self.engine.has_work:
                # As the loop does: an image is being resized.
                time.sleep(self.engine.due_s or 0)
            for output in self.engine.step():
                outputs[output.request_id].append(output)
            self.engine.check_integrity()
        assert not self.engine._live
        return list(outputs.values())


def _tokens(outputs: Seq[RequestOutput]) -> list[int]:
    assert outputs[-1].error is None, outputs[-1].error
    return [token_id for output in outputs for token_id in output.token_ids]


def test_an_engine_encodes_each_image_once_and_finds_what_it_computed(
    family: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, asked = family
    served = _Served(runner, monkeypatch)
    encoded_before = served.engine.load().counts["images_encoded_total"]
    served.put(*asked)
    pairs = [each for each in asked for _ in range(4)]
    found = served.run(*(each.sequence() for each in pairs))
    assert [_tokens(outputs) for outputs in found] == [each.expected for each in pairs]
    num_images = sum(len(each.placed) for each in asked)
    assert len(served.encoded) == num_images
    # Again: all but the last block of each is found, though its pixels are gone.
    drops = [ImageDrop(image.digest) for each in asked for image in each.placed]
    served.engine.take_images(Inbox([], [], image_drops=drops))
    again = served.run(*(each.sequence() for each in asked))
    assert [_tokens(outputs) for outputs in again] == [each.expected for each in asked]
    for outputs, each in zip(again, asked, strict=True):
        assert outputs[0].cached_tokens == _most_cached(runner, each)
    assert len(served.encoded) == num_images
    load = served.engine.load()
    assert load.counts["images_encoded_total"] - encoded_before == num_images
    assert load.counts["image_encode_seconds_total"] > 0


def _most_cached(runner: ModelRunner, asked: Asked) -> int:
    """Return how many of the prompt's tokens may be found: whole blocks, and where the model needs
    whole images, no part of one.
    """
    sequence, size = asked.sequence(), runner.info.block_size
    end = (len(asked.token_ids) - 1) // size * size
    if not any(group.bidirectional_images for group in runner.info.cache_groups):
        return end
    while (whole := sequence.end_outside_images(end)) != end:
        end = whole // size * size
    return end


def test_an_engine_that_has_blocks_of_an_image_does_not_encode_it(
    family: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, asked = family
    served = _Served(runner, monkeypatch)
    served.put(*asked)
    served.run(*(each.sequence() for each in asked))
    # As if another shard had computed them.
    encoder: Any = runner.images
    encoder._features.clear()
    encoder._facts.clear()
    served.encoded.clear()
    again = served.run(*(each.sequence() for each in asked))
    assert [_tokens(outputs) for outputs in again] == [each.expected for each in asked]
    # The last block of a prompt is computed anew, whatever ends in it.
    num_computed = [outputs[0].cached_tokens or 0 for outputs in again]
    ends = [[i.offset + i.num_tokens for i in each.placed] for each in asked]
    late = [sum(end > n for end in row) for n, row in zip(num_computed, ends, strict=True)]
    assert len(served.encoded) == sum(late) < sum(map(len, ends))
    assert not encoder._encoding


def test_a_hundred_requests_about_one_image_have_it_encoded_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ask(tmp_path, make_vision(tmp_path, "internvl"), ((60, 60),), 0, 2)
    served = _Served(load(tmp_path, kv_blocks=400), monkeypatch, enable_prefix_caching=False)
    served.put(asked)
    prompt, images = asked.token_ids, asked.placed
    found = served.run(*(make_sequence(prompt, max_tokens=2, images=images) for _ in range(100)))
    assert [_tokens(outputs) for outputs in found] == [asked.expected] * 100
    assert (len(served.encoded), served.engine.load().counts["images_encoded_total"]) == (1, 1)


def test_requests_of_another_salt_share_nothing(
    family: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, asked = family
    served = _Served(runner, monkeypatch)
    served.put(asked[1])
    for salt in ("", "a", "b"):
        (outputs,) = served.run(asked[1].sequence(cache_salt=salt))
        assert (outputs[0].cached_tokens, _tokens(outputs)) == (0, asked[1].expected)
    assert len(served.encoded) == 3 * len(asked[1].placed)


def test_features_that_were_dropped_are_made_again(
    family: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, asked = family
    served = _Served(runner, monkeypatch, enable_prefix_caching=False)
    monkeypatch.setattr(runner.images, "_cache_bytes", 1)
    served.put(*asked)
    found = served.run(*(each.sequence() for each in asked))
    assert [_tokens(outputs) for outputs in found] == [each.expected for each in asked]
    assert len(served.encoded) > sum(len(each.placed) for each in asked)


def test_places_that_do_not_fit_the_size_of_an_image_end_their_request_alone(
    family: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, asked = family
    served = _Served(runner, monkeypatch)
    served.put(*asked)
    whole = asked[0]
    (image,) = whole.placed
    token_ids = list(whole.token_ids)
    del token_ids[image.offset]
    short = dataclasses.replace(image, num_tokens=image.num_tokens - 1)
    wrong = make_sequence(token_ids, max_tokens=OUTPUT_TOKENS, images=(short,))
    found = served.run(wrong, whole.sequence())
    error = found[0][-1].error
    assert error is not None
    assert (error.code, error.field) == (Code.INVALID_ARGUMENT, "images")
    assert error.message == (
        f"images[0]: {short.num_tokens} of its tokens have the id for images; the encoder makes "
        f"{image.num_tokens} rows of 60x60 pixels"
    )
    assert _tokens(found[1]) == whole.expected


def test_an_image_that_no_encoder_takes_ends_its_request_alone(
    family: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, asked = family
    served = _Served(runner, monkeypatch)
    served.put(asked[0])
    monkeypatch.setattr(
        runner.images._processor, "process", lambda *_: (_ for _ in ()).throw(ValueError("odd"))
    )
    (outputs,) = served.run(asked[0].sequence())
    assert outputs[-1].error is not None
    assert outputs[-1].error.message == "images: the encoder cannot take it: ValueError"


def test_probabilities_do_not_depend_on_what_else_runs(
    family: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, asked = family
    served = _Served(runner, monkeypatch, enable_prefix_caching=False)
    served.put(*asked)
    alone = [served.run(each.sequence(logprobs=3))[0] for each in asked]
    together = served.run(*(each.sequence(logprobs=3) for each in asked))
    for one, other in zip(alone, together, strict=True):
        pairs = [[o.logprobs.chosen for o in outputs if o.logprobs] for outputs in (one, other)]
        assert pairs[0] == pairs[1]


def test_kv_blocks_do_not_get_the_memory_that_encoding_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_vision(tmp_path, "qwen3_vl")
    monkeypatch.setattr(ImageEncoder, "peak_bytes", lambda self, device: 2**50)
    with pytest.raises(ModelError, match="KV cache"):
        load(tmp_path, kv_blocks=None)


def test_an_encoder_that_cannot_encode_is_a_line_that_says_how_to_do_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_vision(tmp_path, "qwen3_vl")

    def fail(self: ImageEncoder, device: torch.device) -> int:
        raise IndexError("out of range")

    monkeypatch.setattr(ImageEncoder, "peak_bytes", fail)
    with pytest.raises(ModelError, match="out of range; --image-cache-bytes 0 serves text alone"):
        load(tmp_path)


def test_the_fingerprint_says_how_images_are_encoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_vision(tmp_path, "qwen3_vl")
    usual = load(tmp_path).info.numerics_fingerprint
    assert usual == load(tmp_path).info.numerics_fingerprint
    assert usual not in ("", load(tmp_path, image_cache_bytes=0).info.numerics_fingerprint)
    process = ImageProcessor.process

    def otherwise(self: ImageProcessor, pixels: bytes, width: int, height: int) -> Any:
        return process(self, bytes([pixels[0] ^ 1]) + pixels[1:], width, height)

    monkeypatch.setattr(ImageProcessor, "process", otherwise)
    assert load(tmp_path).info.numerics_fingerprint not in ("", usual)


def test_an_encoder_that_does_not_repeat_itself_gives_no_fingerprint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_vision(tmp_path, "internvl")
    encode = Tower.encode

    def noisy(self: Tower, inputs: Any) -> ImageFeatures:
        made = encode(self, inputs)
        return ImageFeatures(made.rows + torch.rand_like(made.rows) * 1e-6)

    monkeypatch.setattr(Tower, "encode", noisy)
    assert load(tmp_path).info.numerics_fingerprint == ""


def test_a_model_whose_images_are_not_served_says_so_while_it_loads(tmp_path: Path) -> None:
    make_family(tmp_path, "lfm2_vl")
    config, lines = ShardConfig(device="cpu", dtype="float32", kv_blocks=64), list[str]()
    assert load_model_runner(config, tmp_path, progress=lines.append).images is None
    assert "its images are not served: those of models of type lfm2_vl are not" in lines


def test_images_of_requests_that_ended_leave_nothing(
    family: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, asked = family
    served = _Served(runner, monkeypatch)
    served.put(*asked)
    encoder, engine = runner.images, served.engine
    begun, go_on = threading.Event(), threading.Event()
    process = encoder._processor.process

    def wait(*args: Any) -> Any:
        begun.set()
        assert go_on.wait(10)
        return process(*args)

    monkeypatch.setattr(encoder._processor, "process", wait)
    request = msgspec.structs.replace(asked[2].sequence().request, request_id="left")
    engine.submit(request)
    engine.step()
    assert begun.wait(10)
    engine.abort("left", 0)
    assert engine.step()[0].finish_reason is FinishReason.ABORTED
    # One is in the middle of it, the others were not begun.
    assert len(encoder._encoding) == 1
    go_on.set()
    (outputs,) = served.run(asked[0].sequence())
    assert _tokens(outputs) == asked[0].expected
    assert (encoder._encoding, encoder._unwanted) == ({}, set())
    assert len(encoder._features) == 1
