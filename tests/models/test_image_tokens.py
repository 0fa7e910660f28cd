"""The tokens of an image are those of the checkpoint's own processor, whatever the image's size."""

from __future__ import annotations

import dataclasses
import importlib
import json
import random
import sys
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from support.budget import budget, seeded
from support.image_models import IMAGE_MODELS, ImageModel

from penstock_router.errors import BadRequest
from penstock_router.text.image_tokens.base import ImageTokens
from penstock_router.text.image_tokens.expand import encode_with_images
from penstock_router.text.image_tokens.registry import read_image_tokens
from penstock_router.text.tokenizer import Tokenizer, load_tokenizer

np = pytest.importorskip("numpy")
pytest.importorskip("PIL")
processing_utils = pytest.importorskip("transformers.processing_utils")
processing_backends = pytest.importorskip("transformers.image_processing_backends")

# Of `transformers.models`: the module of the image processor, and the processor's with its name.
PROCESSORS = {
    "qwen2_vl": ("qwen2_vl", "qwen2_vl", "Qwen2VLProcessor"),
    "qwen2_5_vl": ("qwen2_vl", "qwen2_5_vl", "Qwen2_5_VLProcessor"),
    "qwen3_vl": ("qwen2_vl", "qwen3_vl", "Qwen3VLProcessor"),
    "qwen3_5": ("qwen2_vl", "qwen3_vl", "Qwen3VLProcessor"),
    "glm4v": ("glm4v", "glm4v", "Glm4vProcessor"),
    "glm46v": ("glm46v", "glm46v", "Glm46VProcessor"),
    "gemma4": ("gemma4", "gemma4", "Gemma4Processor"),
    "llava": ("clip", "llava", "LlavaProcessor"),
    "idefics3": ("idefics3", "idefics3", "Idefics3Processor"),
    "smolvlm": ("smolvlm", "smolvlm", "SmolVLMProcessor"),
    "pixtral": ("pixtral", "pixtral", "PixtralProcessor"),
    "mistral3": ("pixtral", "pixtral", "PixtralProcessor"),
    "internvl": ("got_ocr2", "internvl", "InternVLProcessor"),
    "llava_next": ("llava_next", "llava_next", "LlavaNextProcessor"),
    "gemma3": ("gemma3", "gemma3", "Gemma3Processor"),
}

Size = tuple[int, int]


@cache
def processor_of(family: str) -> Any:
    """The processor of a family's released checkpoints."""
    return make_processor(family, IMAGE_MODELS[family])


def make_processor(family: str, model: ImageModel) -> Any:
    """The family's processor on Pillow. Its class would not take its parts without torchvision,
    which only videos need.
    """
    from transformers import PreTrainedTokenizerFast

    images, own, name = PROCESSORS[family]
    on_pillow = f"transformers.models.{images}.image_processing_pil_{images}"
    image_classes = importlib.import_module(on_pillow)
    image_class = getattr(image_classes, f"{model.images['image_processor_type']}Pil")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=model.tokenizer(),
        extra_special_tokens=model.named_tokens,
        pad_token="</s>",
    )
    parts = {"image_processor": image_class(**model.images), "tokenizer": tokenizer}
    mixin = processing_utils.ProcessorMixin
    with pytest.MonkeyPatch.context() as patch:
        if own == "pixtral":
            # It takes a function of the module for torchvision.
            in_its_place = f"transformers.models.{images}.image_processing_{images}"
            patch.setitem(sys.modules, in_its_place, image_classes)
        module = importlib.import_module(f"transformers.models.{own}.processing_{own}")
        patch.setattr(mixin, "check_argument_for_proper_class", lambda self, name, part: type(part))
        if own == "gemma4":
            parts |= {"feature_extractor": None, "video_processor": None}
        if own == "smolvlm":
            # It spells numbers, in what it says of videos.
            patch.setattr(module, "num2words", str)
            parts["video_processor"] = None
        return getattr(module, name)(**parts, **model.processor)


def image_tokens_of(model: ImageModel) -> tuple[ImageTokens, Tokenizer]:
    files = model.files()
    tokenizer = load_tokenizer(files)
    tokens = read_image_tokens(files, tokenizer)
    assert tokens is not None
    return tokens, tokenizer


def random_size(rng: random.Random) -> Size:
    """Return a random size. Half have proportions near those of photos, the others any; many are
    exactly on a boundary.
    """
    kind = rng.random()
    if kind < 0.5:
        side = round(2 ** rng.uniform(0, 12.5))
        return max(1, round(side * 2 ** rng.uniform(-2, 2))), side
    if kind < 0.8:
        whole = rng.choice([14, 16, 28, 32, 336, 448, 896])
        return rng.randint(1, 30) * whole + rng.choice([-1, 0, 0, 1]), rng.randint(1, 30) * whole
    return round(2 ** rng.uniform(0, 14)), round(2 ** rng.uniform(0, 14))


def refused_or(count: Callable[[int, int], int], size: Size) -> int:
    """A count; 0 where the size is refused."""
    try:
        return count(*size)
    except (BadRequest, ValueError):
        return 0


def check_counts(family: str, model: ImageModel, sizes: Iterable[Size]) -> None:
    """Check that all counts are those of the family's processor with the model's settings."""
    processor, (tokens, _) = make_processor(family, model), image_tokens_of(model)

    def theirs(width: int, height: int) -> int:
        if PROCESSORS[family][1] == "pixtral":
            count = pixtral_tokens(processor, width, height)
            if height in (1, 3) or not count:
                # Pixtral's own count takes a height of 1 or 3 for the channels. It also counts the
                # ends of rows without patches, but no image can be resized to such rows.
                return count
        if PROCESSORS[family][0] in ("idefics3", "smolvlm"):
            return idefics_tokens(processor, width, height)
        counted = processor._get_num_multimodal_tokens([(height, width)])
        # InternVL's count includes the two tokens around those of the image.
        return int(counted["num_image_tokens"][0]) - (2 if family == "internvl" else 0)

    def ours(width: int, height: int) -> int:
        return len(tokens.token_ids(width, height))

    for size in sizes:
        assert refused_or(ours, size) == refused_or(theirs, size), (size, model.images)


@pytest.mark.parametrize("family", PROCESSORS)
def test_counts_are_the_processors_for_any_size(family: str) -> None:
    rng = seeded(family)
    sizes = [
        *((1, 1), (1, 200), (1, 201), (100_000, 1)),
        *(random_size(rng) for _ in range(budget(396, 1_996))),
    ]
    check_counts(family, IMAGE_MODELS[family], sizes)


def other_settings(family: str, rng: random.Random) -> ImageModel:
    """The family's model with other settings, as somebody may have written them."""
    model = IMAGE_MODELS[family]
    images, processor = dict(model.images), dict(model.processor)
    if family in ("pixtral", "mistral3"):
        images["size"] = {"longest_edge": rng.randint(100, 2000)}
        processor = {"patch_size": rng.randint(8, 20), "spatial_merge_size": rng.randint(1, 3)}
    elif family == "internvl":
        images |= {"min_patches": rng.randint(1, 4), "max_patches": rng.randint(1, 16)}
        images["size"] = {"height": rng.randint(100, 500), "width": rng.randint(100, 500)}
        processor["image_seq_length"] = rng.randint(1, 300)
    elif family == "llava_next":
        tile = rng.choice([224, 336, 384])
        images |= {"size": {"shortest_edge": tile}, "crop_size": {"height": tile, "width": tile}}
        pairs = [[tile * rng.randint(1, 6), tile * rng.randint(1, 6)] for _ in range(8)]
        images["image_grid_pinpoints"] = pairs
        processor = {"patch_size": 14, "num_additional_image_tokens": rng.randint(0, 1)}
    elif family in ("idefics3", "smolvlm"):
        tile = rng.randint(200, 500)
        images["size"] = {"longest_edge": rng.randint(tile // 2, tile * 6)}
        images["max_image_size"] = {"longest_edge": tile}
        images["do_image_splitting"] = rng.random() < 0.9
        processor["image_seq_len"] = rng.randint(1, 200)
    elif family == "llava":
        size = rng.randint(200, 500)
        images |= {"size": {"shortest_edge": size}, "crop_size": {"height": size, "width": size}}
        processor = {"patch_size": rng.randint(8, 20)}
    elif family == "gemma4":
        images["max_soft_tokens"] = rng.choice([70, 140, 280, 560, 1120])
    elif family in ("glm4v", "glm46v"):
        fewest = rng.randint(1, 100_000)
        images["size"] = {
            "shortest_edge": fewest,
            "longest_edge": fewest + rng.randint(0, 5_000_000),
        }
        images |= {"patch_size": rng.randint(8, 20), "merge_size": rng.randint(1, 3)}
    elif family.startswith("qwen"):
        fewest = rng.randint(1, 100_000)
        images["size"] = {
            "shortest_edge": fewest,
            "longest_edge": fewest + rng.randint(0, 5_000_000),
        }
        images |= {"patch_size": rng.randint(8, 20), "merge_size": rng.randint(1, 3)}
        if rng.random() < 0.5:
            images |= {"min_pixels": None, "max_pixels": rng.randint(fewest, 2_000_000)}
        else:
            images = {name: images[name] for name in images if not name.endswith("_pixels")}
    return dataclasses.replace(model, images=images, processor=processor)


@pytest.mark.parametrize("family", PROCESSORS)
def test_counts_follow_the_settings_in_the_files(family: str) -> None:
    rng = seeded(family)
    for _ in range(budget(6, 100)):
        model = other_settings(family, rng)
        check_counts(family, model, [random_size(rng) for _ in range(30)])


def pixtral_tokens(processor: Any, width: int, height: int) -> int:
    image_classes = sys.modules[type(processor.image_processor).__module__]
    longest = processor.image_processor.size.longest_edge
    square = processor.patch_size * processor.spatial_merge_size
    shown_height, shown_width = image_classes.get_resize_output_image_size(
        np.empty((height, width, 3)), longest, square, "channels_last"
    )
    return int((shown_width // square + 1) * (shown_height // square)) if shown_width else 0


def idefics_tokens(processor: Any, width: int, height: int) -> int:
    """Count tokens as the processor does when it processes an image, but without pixels. Its own
    count differs for some proportions.
    """

    def resize(self: Any, image: Any, size: Any, **more: Any) -> Any:
        return np.broadcast_to(np.uint8(0), (3, size.height, size.width))

    nothing = np.broadcast_to(np.uint8(0), (height, width, 3))
    left_out = dict.fromkeys(("do_rescale", "do_normalize", "do_pad"), False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processing_backends.PilBackend, "resize", resize)
        made = processor.image_processor(
            nothing, **left_out, return_row_col_info=True, input_data_format="channels_last"
        )
    text = processor.replace_image_token(made, 0)
    return len(tokenized(processor, text)) - 2


@cache
def tokenized(processor: Any, text: str) -> list[int]:
    ids: list[int] = processor.tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


@pytest.mark.parametrize("family", PROCESSORS)
def test_prompts_have_the_ids_that_the_processor_makes(family: str) -> None:
    rng, processor = seeded(family), processor_of(family)
    tokens, tokenizer = image_tokens_of(IMAGE_MODELS[family])
    # It enlarges all images, which takes long.
    few = family in ("idefics3", "smolvlm")
    for _ in range(budget(1 if few else 3, 5 if few else 40)):
        sizes = [small_size(rng) for _ in range(rng.randint(1, 2 if few else 4))]
        texts = [rng.choice(["", "a", " b ", "\n", "Wörter, 2"]) for _ in range(len(sizes) + 1)]
        text = tokens.anchor.join(texts)
        pictures = [np.zeros((height, width, 3), np.uint8) for width, height in sizes]
        # Of one pixel in height it would guess that they are channels.
        made = processor(
            images=pictures, text=[text], return_tensors=None, input_data_format="channels_last"
        )
        theirs = [int(each) for each in made["input_ids"][0]]
        ids, places = encode_with_images(
            tokenizer, [text], tokens, tuple(sizes), add_special_tokens=True, max_tokens=1_000_000
        )
        assert ids == theirs, sizes
        for place, size in zip(places, sizes, strict=True):
            of_it = ids[place.offset : place.offset + place.num_tokens]
            assert of_it == list(tokens.token_ids(*size))
        assert sum(place.num_tokens for place in places) >= ids.count(tokens.token_id)


def small_size(rng: random.Random) -> Size:
    while True:
        width, height = rng.randint(1, 900), rng.randint(1, 900)
        if max(width, height) < 100 * min(width, height):
            return width, height


@pytest.mark.parametrize("family", PROCESSORS)
def test_files_as_transformers_writes_them_give_the_same_counts(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, processor = IMAGE_MODELS[family], processor_of(family)
    written = classmethod(lambda cls: ["image_processor", "tokenizer"])
    monkeypatch.setattr(type(processor), "get_attributes", written)
    processor.save_pretrained(tmp_path)
    saved = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert "image_processor" in json.loads(saved["processor_config.json"])
    files = saved | {"config.json": model.files()["config.json"]}
    tokens = read_image_tokens(files, load_tokenizer(files))
    assert tokens is not None
    known, _ = image_tokens_of(model)
    rng = seeded(family)
    for size in [small_size(rng) for _ in range(50)]:
        assert tokens.token_ids(*size) == known.token_ids(*size)
    as_known = dataclasses.replace(tokens, token_ids=known.token_ids, token_id=known.token_id)
    assert as_known == known
