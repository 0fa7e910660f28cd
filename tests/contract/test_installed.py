"""What the images install: pinned within pyproject's ranges, and nothing under the GPL."""

from __future__ import annotations

import email
import importlib.util
import json
import re
import subprocess
import tomllib
from collections.abc import Mapping, Sequence
from importlib.metadata import distribution
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
# Of a licence as its package states it: in words, as a classifier, or as an SPDX expression.
_ASKS_FOR_MORE = re.compile(r"GPL|General Public", re.IGNORECASE)


def load_pins() -> ModuleType:
    """deploy/pins.py is a script and belongs to no package."""
    spec = importlib.util.spec_from_file_location("pins", ROOT / "deploy" / "pins.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PINS = load_pins()


def pinned() -> dict[str, str]:
    lines = (ROOT / "deploy" / "constraints.txt").read_text().splitlines()
    pairs = (line.split("==") for line in lines if not line.startswith("#"))
    return dict(pairs)


def fields_of(name: str) -> list[tuple[str, str]]:
    return email.message_from_string(distribution(name).read_text("METADATA") or "").items()


def licence_of(fields: Sequence[tuple[str, str]]) -> str:
    """As the fields of a package's metadata state it; empty where they do not."""
    classifiers = [
        value for name, value in fields if name == "Classifier" and value.startswith("License ::")
    ]
    one = dict(fields)
    stated = one.get("License-Expression") or one.get("License") or ""
    # Some put the whole text there: its title is enough.
    return "; ".join([stated.partition("\n")[0], *classifiers]).strip("; ")


def objection(licence: str) -> str:
    if not licence or licence == "UNKNOWN":
        return "states none"
    return licence if _ASKS_FOR_MORE.search(licence) else ""


def test_every_requirement_of_the_images_is_pinned_within_its_range() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    versions = pinned()
    for extra in ("client", "router", "fake", "shard", "otlp"):
        for requirement in map(Requirement, extras[extra]):
            name = canonicalize_name(requirement.name)
            if name not in PINS.LEFT_OUT:
                assert requirement.specifier.contains(versions[name]), requirement


def test_what_the_routers_image_installs_asks_for_no_torch() -> None:
    assert {"aiohttp", "tokenizers"} <= PINS.packages(("router", "otlp")).keys()
    of_shards = {"torch", "transformers", "numpy"}
    assert of_shards <= PINS.packages(("shard",)).keys()
    assert not of_shards & PINS.packages(("router", "otlp")).keys()


def test_no_package_of_the_images_is_under_the_gpl() -> None:
    licences = {name: licence_of(fields_of(name)) for name in PINS.pins()}
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
    assert {"aiohttp", "grpcio", "tokenizers", "penstock"} <= found.keys()
    assert "torch" not in found
    versions = pinned()
    assert {n: v for n, v in found.items() if n in versions and versions[n] != v} == {}
