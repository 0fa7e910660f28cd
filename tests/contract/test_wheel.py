"""The wheel holds the packages with their data and nothing else, and has the right extras."""

from __future__ import annotations

import zipfile
from collections.abc import Iterable, Iterator, Sequence
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest
from contract.sources import PACKAGES
from packaging.requirements import Requirement
from support.wheels import build_wheel

BUILTIN_MODEL = PACKAGES["penstock_shard"] / "builtin_model"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[zipfile.ZipFile]:
    path = build_wheel(tmp_path_factory.mktemp("wheel"))
    with zipfile.ZipFile(path) as archive:
        yield archive


@pytest.fixture(scope="module")
def metadata(wheel: zipfile.ZipFile) -> Message:
    (name,) = (name for name in wheel.namelist() if name.endswith("dist-info/METADATA"))
    return Parser().parsestr(wheel.read(name).decode())


def test_the_wheel_holds_the_four_packages_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    assert content_problems(wheel.namelist()) == []


def test_every_source_file_is_in_the_wheel(wheel: zipfile.ZipFile) -> None:
    names = set(wheel.namelist())
    for package, folder in PACKAGES.items():
        # The kernels are compiled from what is installed.
        for pattern in ("*.py", "*.c", "*.h"):
            for path in folder.rglob(pattern):
                assert f"{package}/{path.relative_to(folder).as_posix()}" in names


@pytest.mark.skipif(not (BUILTIN_MODEL / "config.json").exists(), reason="no built-in model")
def test_the_builtin_model_is_in_the_wheel(wheel: zipfile.ZipFile) -> None:
    expected = {f"penstock_shard/builtin_model/{path.name}" for path in BUILTIN_MODEL.iterdir()}
    assert expected <= set(wheel.namelist())


def test_the_command_is_installed(wheel: zipfile.ZipFile) -> None:
    (name,) = (name for name in wheel.namelist() if name.endswith("entry_points.txt"))
    assert "penstock = penstock_cli.main:main" in wheel.read(name).decode()


def test_the_licence_is_in_the_wheel(wheel: zipfile.ZipFile, metadata: Message) -> None:
    assert metadata["License-Expression"] == "Apache-2.0"
    (name,) = (name for name in wheel.namelist() if name.endswith("licenses/LICENSE"))
    assert "Version 2.0, January 2004" in wheel.read(name).decode()


def test_without_an_extra_nothing_is_installed_besides(metadata: Message) -> None:
    assert requirements(metadata, "") == set()


@pytest.mark.parametrize("extra", ["client", "router", "fake", "shard", "flash", "dev"])
def test_an_extra_exists(metadata: Message, extra: str) -> None:
    assert extra in (metadata.get_all("Provides-Extra") or [])


@pytest.mark.parametrize(
    ("extra", "contains", "lacks"),
    [
        ("client", {"grpcio", "protobuf"}, {"torch", "transformers", "jinja2", "tokenizers"}),
        ("router", {"aiohttp", "tokenizers", "jinja2"}, {"torch", "transformers", "safetensors"}),
        ("fake", {"grpcio", "protobuf"}, {"torch", "transformers", "aiohttp"}),
        ("shard", {"torch", "transformers", "grpcio"}, {"aiohttp", "jinja2", "flash-attn"}),
        ("flash", {"flash-attn", "torch", "grpcio"}, {"aiohttp"}),
        ("otlp", {"opentelemetry-sdk"}, {"torch", "grpcio", "aiohttp"}),
    ],
)
def test_an_extra_brings_what_its_image_needs(
    metadata: Message, extra: str, contains: set[str], lacks: set[str]
) -> None:
    names = requirements(metadata, extra)
    assert contains <= names
    assert not lacks & names


@pytest.mark.parametrize(
    "doctored",
    [
        ["tests/unit/test_stop.py"],
        ["penstock_shard/conftest.py"],
        ["penstock_router/__pycache__/app.cpython-311.pyc"],
        ["benchmarks/serve.py"],
    ],
)
def test_a_file_that_does_not_belong_is_found(
    wheel: zipfile.ZipFile, doctored: Sequence[str]
) -> None:
    assert content_problems([*wheel.namelist(), *doctored]) != []


@pytest.mark.parametrize(
    "missing",
    [
        "penstock_proto/shard.proto",
        "penstock_client/py.typed",
        "penstock_proto/codec/requests.py",
        "penstock_shard/kernels/cpu.c",
        "penstock_router/static/docs.html",
    ],
)
def test_a_file_that_is_missing_is_found(wheel: zipfile.ZipFile, missing: str) -> None:
    assert content_problems(name for name in wheel.namelist() if name != missing) != []


def content_problems(names: Iterable[str]) -> list[str]:
    names = list(names)
    required = ["penstock_proto/shard.proto", "penstock_proto/shard_pb2.pyi"]
    required += [f"{package}/py.typed" for package in PACKAGES]
    required += ["penstock_proto/codec/requests.py", "penstock_proto/facts.py"]
    required += ["penstock_shard/kernels/cpu.c", "penstock_router/static/docs.html"]
    problems = [f"{name} is missing" for name in required if name not in names]
    for name in names:
        top, _, rest = name.partition("/")
        if top not in PACKAGES and not top.endswith(".dist-info"):
            problems.append(f"{name} is in none of the packages")
        if "__pycache__" in rest or "test" in Path(rest).stem.split("_") or "conftest" in rest:
            problems.append(f"{name} does not belong into a wheel")
    return problems


def requirements(metadata: Message, extra: str) -> set[str]:
    """Names of what is installed with an extra."""
    every = [Requirement(text) for text in metadata.get_all("Requires-Dist") or []]
    return {r.name for r in every if r.marker is None or r.marker.evaluate({"extra": extra})}
