"""The Python examples, run as they stand. The Node one: tests/clients/test_node.py."""

from __future__ import annotations

import asyncio
import re
import runpy
from collections.abc import Iterator
from pathlib import Path

import PIL.Image
import pytest
from support.image_models import IMAGE_MODELS
from support.processes import Router, Shard, running

EXAMPLES = Path(__file__).parents[2] / "examples" / "python"


@pytest.fixture(scope="module")
def stream():
    return runpy.run_path(str(EXAMPLES / "stream.py"))["stream"]


def test_the_python_example_streams_text(pair, stream, capsys) -> None:
    asyncio.run(stream(pair.shard.address, "What is a shard?"))
    printed = capsys.readouterr()
    assert len(printed.out) > 20
    assert printed.err == ""


def test_the_python_example_names_a_field_that_is_wrong(pair, stream, capsys) -> None:
    asyncio.run(stream(pair.shard.address, "What is a shard?", temperature=-3.0))
    assert capsys.readouterr().err == "temperature is -3.0; it must be 0..100\n"


def test_the_python_example_keeps_to_its_deadline(pair, stream) -> None:
    with pytest.raises(TimeoutError):
        asyncio.run(stream(pair.shard.address, "What is a shard?", limit_s=0.05))


def test_the_constrained_example_prints_what_matches_or_the_reason(pair, capsys) -> None:
    ask = runpy.run_path(str(EXAMPLES / "constrained.py"))["ask"]
    ask(pair.shard.address, "The parts are", "(router|shard)s?( and (router|shard)s?)?")
    assert re.fullmatch("(router|shard)s?( and (router|shard)s?)?", capsys.readouterr().out)
    ask(pair.shard.address, "The parts are", "(a")
    assert capsys.readouterr() == ("", "regex: error: unclosed group\n")


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Router, Shard]]:
    """A model that sees, as far as a router can tell."""
    folder = tmp_path_factory.mktemp("seeing")
    for name, content in IMAGE_MODELS["qwen3_vl"].files().items():
        (folder / name).write_bytes(content)
    shard = Shard(folder / "shard.log", "--runner", "fake", "--model", str(folder))
    router = Router(folder / "router.log", [shard.address])
    with running(shard, router):
        yield router, shard


def test_the_examples_with_images_print_an_answer(seeing, tmp_path, capsys) -> None:
    router, shard = seeing
    file = tmp_path / "picture.png"
    PIL.Image.effect_noise((100, 57), 60).convert("RGB").save(file)
    runpy.run_path(str(EXAMPLES / "image.py"))["ask"](router.url, str(file), "What is this?")
    assert len(capsys.readouterr().out) > 20
    ask = runpy.run_path(str(EXAMPLES / "image_direct.py"))["ask"]
    asyncio.run(ask(shard.address, str(file), "What is this?"))
    assert len(capsys.readouterr().out) > 20
