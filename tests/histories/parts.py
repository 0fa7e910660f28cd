"""Parts of a recording: which shards, and what they are asked."""

from __future__ import annotations

import hashlib
import json
import random
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from support.streams import CONSTRAINTS, any_request

from penstock_client import ConstraintKind, GenerationRequest, PromptImage, SamplingParams

# The ids below are words of each model here, and have no other meaning.
_WORDS = range(5, 250)
LONG_PROMPT_TOKENS = 256
_FAKE = ("--runner", "fake", "--step-ms", "4")
_CPU = (
    *("--runner", "model", "--device", "cpu", "--threads", "1"),
    *("--kv-memory", "64M", "--max-model-len", "512"),
)


@dataclass(frozen=True)
class Part:
    """Shards with `flags`, and requests by name. Those called "choice" and a number are long, and
    faults wait for their first tokens.
    """

    name: str
    flags: tuple[str, ...]
    requests: Mapping[str, GenerationRequest]
    pixels: Mapping[str, bytes] = field(default_factory=dict)
    stall_s: float = 1.0
    # It also has what is said on the wire by the shard alone.
    on_the_wire: bool = False


def _prompt(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.choice(_WORDS) for _ in range(length)]


def _requests(max_tokens: int) -> dict[str, GenerationRequest]:
    """Requests of every kind, but for images."""
    plain = GenerationRequest(
        _prompt(1, 40),
        SamplingParams(temperature=1.0, seed=7),
        max_tokens=max_tokens,
        ignore_eos=True,
    )
    return {
        # Choices of one prompt.
        **{
            f"choice {number}": replace(plain, sampling=SamplingParams(seed=100 + number))
            for number in range(4)
        },
        "greedy": replace(plain, sampling=SamplingParams(temperature=0.0, seed=1), logprobs=0),
        "scored": replace(plain, logprobs=3, prompt_logprobs=2, logprob_token_ids=[6, 9]),
        "long prompt": replace(plain, prompt_token_ids=_prompt(2, LONG_PROMPT_TOKENS + 40)),
        **{
            f"constrained by {ConstraintKind(each.kind).value}": replace(plain, constraint=each)
            for each in CONSTRAINTS
        },
        **{
            f"any {seed}": any_request(random.Random(seed), len(_WORDS), max_tokens=max_tokens)
            for seed in range(5)
        },
        "refused": replace(plain, sampling=SamplingParams(top_p=7.0, seed=1)),
        "of another model": replace(plain, model="nobody's"),
    }


def _image(seed: int, width: int, height: int) -> tuple[str, bytes]:
    """The digest and the pixels of an image of noise."""
    pixels = random.Random(seed).randbytes(3 * width * height)
    prefix = b"penstock image, RGB8\0" + struct.pack("<II", width, height)
    return hashlib.sha256(prefix + pixels).hexdigest(), pixels


def _with_images(
    request: GenerationRequest, image_id: int, *sizes: tuple[int, int]
) -> tuple[GenerationRequest, dict[str, bytes]]:
    """The request with images of these sizes before its prompt, and the pixels of each by digest;
    a token stands for 32 by 32 pixels.
    """
    token_ids, images, pixels = [7], list[PromptImage](), {}
    for seed, (width, height) in enumerate(sizes):
        digest, pixels[digest] = _image(seed, width, height)
        num_tokens = width * height // 32**2
        images.append(PromptImage(digest, width, height, len(token_ids), num_tokens))
        token_ids += [image_id] * num_tokens + [8]
    token_ids += request.prompt_token_ids
    return replace(request, prompt_token_ids=token_ids, images=images), pixels


def _fake(folder: Path) -> Part:
    """The fake runner, without torch."""
    # Long enough for a fault to strike while they run, on a busy machine too.
    requests = _requests(max_tokens=300)
    # To the fake runner any id may stand for an image.
    requests["images"], pixels = _with_images(requests["scored"], 9, (64, 64), (128, 96))
    return Part("fake", _FAKE, requests, pixels, on_the_wire=True)


def _model(folder: Path) -> Part:
    """The built-in model, on a processor."""
    return Part("model", _CPU, _requests(max_tokens=150), stall_s=4.0)


def _seeing(folder: Path) -> Part:
    """A tiny model that sees images, of random weights, on a processor."""
    from models.tiny_vision import make_whole_vision

    directory = folder / "sees"
    make_whole_vision(directory, "qwen3_vl")
    image_id = json.loads((directory / "config.json").read_text())["image_token_id"]
    plain = _requests(max_tokens=150)
    requests, pixels = dict[str, GenerationRequest](), dict[str, bytes]()
    sizes: Sequence[tuple[int, int]] = ((64, 64), (128, 96), (96, 160))
    for number, name in enumerate(("choice 0", "choice 1", "greedy", "scored", "long prompt")):
        requests[name], new = _with_images(plain[name], image_id, *sizes[: 1 + number % 3])
        pixels |= new
    flags = (*_CPU, "--model", str(directory), "--dtype", "float32")
    return Part("seeing", flags[2:], requests, pixels, stall_s=4.0)


# Each is made in a folder of its own.
PARTS: Mapping[str, Callable[[Path], Part]] = {"fake": _fake, "model": _model, "seeing": _seeing}
