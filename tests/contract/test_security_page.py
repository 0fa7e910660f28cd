"""The tests, flags and variables that docs/security.md names exist."""

from __future__ import annotations

import re

from contract.sources import ROOT

from penstock_common.flags import parser_of
from penstock_router.config import RouterConfig
from penstock_shard.config import ShardConfig

PAGE = (ROOT / "docs" / "security.md").read_text("utf-8")
PACKAGES = ("router/penstock_router", "shard/penstock_shard", "client/penstock_client")


def test_every_test_that_the_security_page_names_exists() -> None:
    named = set(re.findall(r"`(?:[\w/]+/)?(test_\w+\.py)`", PAGE))
    paths = set(re.findall(r"`(tests/[\w/]+\.py)`", PAGE))
    there = {path.name for path in (ROOT / "tests").rglob("test_*.py")}
    assert named - there == set()
    assert [path for path in sorted(paths) if not (ROOT / path).is_file()] == []
    assert len(named) > 15


def test_every_flag_and_variable_that_the_security_page_names_exists() -> None:
    sources = "".join(
        path.read_text("utf-8") for package in PACKAGES for path in (ROOT / package).rglob("*.py")
    )
    parsers = [parser_of(config, "", "") for config in (RouterConfig, ShardConfig)]
    actions = [action for parser in parsers for action in parser._actions]
    there = {name for action in actions for name in action.option_strings}
    flags = set(re.findall(r"`(--[a-z][a-z-]+)", PAGE))
    variables = set(re.findall(r"PENSTOCK_\w+", PAGE))
    assert flags - there == set()
    assert [name for name in sorted(variables) if name not in sources] == []
    assert len(flags) > 10
