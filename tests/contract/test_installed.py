"""The packages that images install: pinned within pyproject's ranges, and none under the GPL."""

from __future__ import annotations

import email
import json
import re
import subprocess
import tomllib
from collections.abc import Mapping, Sequence
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from support.pins import PINS, pins_of

ROOT = Path(__file__).parents[2]
# Of a licence as its package states it: in words, as a classifier, or as an SPDX expression.
_ASKS_FOR_MORE = re.compile(r"GPL|General Public", re.IGNORECASE)


def pinned(*files: str) -> dict[str, str]:
    """Name -> version of what these files pin."""
    texts = [(PINS.FOLDER / f"{file}.txt").read_text() for file in files]
    return {name: version for text in texts for name, version, _ in pins_of(text)}


def fields_of(name: str) -> list[tuple[str, str]]:
    return email.message_from_string(distribution(name).read_text("METADATA") or "").items()


def licence_of(fields: Sequence[tuple[str, str]]) -> str:
    """Return the licence as a package's metadata state it; empty if they state none."""
    classifiers = [
        value for name, value in fields if name == "Classifier" and value.startswith("License ::")
    ]
    one = dict(fields)
    stated = one.get("License-Expression") or one.get("License") or ""
    # Some packages put the whole text there: its title is enough.
    return "; ".join([stated.partition("\n")[0], *classifiers]).strip("; ")


def objection(licence: str) -> str:
    if not licence or licence == "UNKNOWN":
        return "states none"
    return licence if _ASKS_FOR_MORE.search(licence) else ""


@pytest.mark.parametrize("file", PINS.FILES)
def test_each_file_pins_what_its_packages_ask_for_each_with_hashes(file: str) -> None:
    pins = pins_of((PINS.FOLDER / f"{file}.txt").read_text())
    names = [name for name, _, _ in pins]
    assert names == sorted(PINS.pins(PINS.FILES[file]))
    assert all(sorted(set(hashes)) == hashes for _, _, hashes in pins)


def test_there_is_no_other_file_of_pins_and_none_disagrees_with_another() -> None:
    assert {path.name for path in PINS.FOLDER.iterdir()} == {f"{name}.txt" for name in PINS.FILES}
    all_pins = [pins_of(path.read_text()) for path in PINS.FOLDER.iterdir()]
    one = {name: (version, hashes) for pins in all_pins for name, version, hashes in pins}
    assert all(one[name] == (version, h) for pins in all_pins for name, version, h in pins)


@pytest.mark.parametrize(
    "text",
    [
        "aiohttp==3.14.5\n",
        "aiohttp>=3.14.5 \\\n    --hash=sha256:" + "0" * 64,
        "aiohttp==3.14.5 \\\n    --hash=md5:" + "0" * 32,
        "aiohttp==3.14.5 \\\n    --hash=sha256:" + "0" * 63,
        "aiohttp \\\n    --hash=sha256:" + "0" * 64,
        "--index-url file:///elsewhere\n",
    ],
)
def test_a_line_that_pins_no_version_or_has_no_hash_is_found(text: str) -> None:
    with pytest.raises(AssertionError, match=r"pins no version|no hash|is no name"):
        pins_of(text)


def test_every_requirement_of_the_images_is_pinned_within_its_range() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    of_extras = ("client", "router", "fake", "shard", "otlp")
    asked_for = [requirement for extra in of_extras for requirement in extras[extra]]
    versions = pinned("router", "shard", "build")
    for requirement in map(Requirement, asked_for + project["build-system"]["requires"]):
        name = canonicalize_name(requirement.name)
        if not PINS.LEFT_OUT.fullmatch(name):
            assert requirement.specifier.contains(versions[name]), requirement


def test_packages_are_those_that_the_images_python_asks_for() -> None:
    text = (ROOT / "deploy" / "Dockerfile").read_text()
    assert f"\nARG PYTHON_IMAGE=python:{PINS.PYTHON['python_version']}-" in text


def test_what_a_router_and_a_shards_server_install_asks_for_no_torch() -> None:
    assert {"aiohttp", "tokenizers"} <= PINS.packages(PINS.FILES["router"]).keys()
    of_shards = {"torch", "transformers", "numpy"}
    assert of_shards <= PINS.packages(PINS.FILES["shard"]).keys()
    assert not of_shards & PINS.packages(PINS.FILES["router"]).keys()
    # Nor does a shard's server, beside an engine that has its own.
    assert {"grpcio", "llguidance"} <= PINS.packages(PINS.FILES["server"]).keys()
    assert not {"torch", "transformers"} & PINS.packages(PINS.FILES["server"]).keys()
    # torch comes with these, of its own index.
    for name in ("torch", "triton", "nvidia-cudnn-cu13", "cuda-bindings", "penstock-llm"):
        assert PINS.LEFT_OUT.fullmatch(name)


def test_a_package_that_is_not_installed_and_has_no_version_is_named() -> None:
    with pytest.raises(PINS.NotPinned, match=r"no-such-package: is not installed here"):
        PINS.pins(["no-such-package"])


def test_no_package_of_the_images_is_under_the_gpl() -> None:
    names = PINS.pins([*PINS.FILES["router"], *PINS.FILES["shard"]])
    licences = {name: licence_of(fields_of(name)) for name in names}
    assert {n: found for n, text in licences.items() if (found := objection(text))} == {}
    assert len(licences) > 30


@pytest.mark.parametrize(
    "fields",
    [
        {"License-Expression": "LGPL-3.0-only"},
        {"License-Expression": "MIT AND GPL-2.0-or-later"},
        {"License": "GNU General Public License"},
        {"License": "UNKNOWN"},
        {"Classifier": "License :: OSI Approved :: GNU Affero General Public License v3"},
        {},
    ],
)
def test_a_licence_that_asks_for_more_or_is_missing_is_found(fields: Mapping[str, str]) -> None:
    assert objection(licence_of(list(fields.items())))


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_the_bill_of_materials_names_what_the_routers_image_installs() -> None:
    bill = ROOT / "dist" / "sbom-router.cdx.json"
    bill.unlink(missing_ok=True)
    subprocess.run(["make", str(bill.relative_to(ROOT))], cwd=ROOT, check=True)
    content = json.loads(bill.read_text())
    assert content["bomFormat"] == "CycloneDX"
    found = {canonicalize_name(part["name"]): part["version"] for part in content["components"]}
    assert {"aiohttp", "grpcio", "tokenizers", "penstock-llm"} <= found.keys()
    assert "torch" not in found
    versions = pinned("router")
    assert {n: v for n, v in found.items() if n in versions and versions[n] != v} == {}
