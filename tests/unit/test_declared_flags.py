"""The command lines of the processes do what is declared of each flag."""

from __future__ import annotations

import argparse
import math
import re
from dataclasses import MISSING, Field
from typing import Any

import pytest

from penstock_cli.serve.serve import ServeConfig
from penstock_common.flags import _names, flags_of, parser_of
from penstock_router.config import RouterConfig
from penstock_shard.config import ShardConfig

CONFIGURATIONS = (RouterConfig, ShardConfig, ServeConfig)
FLAGS = [
    pytest.param(config, field, id=f"{config.__name__}.{field.name}")
    for config in CONFIGURATIONS
    for field in flags_of(config)
]
# A value beyond each kind of bound.
BEYOND = {
    "at_least": lambda bound: bound - 1,
    "above": lambda bound: bound,
    "at_most": lambda bound: bound + 1,
}


def _parser(config: type[Any]) -> argparse.ArgumentParser:
    parser = parser_of(config, "penstock it", "")
    for action in parser._actions:
        action.required = False
    return parser


def _refusal(
    config: type[Any], flag: str, value: object, capsys: pytest.CaptureFixture[str]
) -> str:
    with pytest.raises(SystemExit) as ended:
        _parser(config).parse_args([f"{flag}={value}"])
    assert ended.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"penstock it: argument {flag}")
    assert line.endswith(" (see penstock it --help)")
    return line


@pytest.mark.parametrize(("config", "field"), FLAGS)
def test_a_flag_says_what_it_does_and_its_default(config: type[Any], field: Field[Any]) -> None:
    assert field.metadata["help"].strip()
    [action] = [each for each in _parser(config)._actions if each.dest == field.name]
    told = str(action.help)
    assert told.startswith(field.metadata["help"].replace("%", "%%"))
    if isinstance(field.default, int | float) and not isinstance(field.default, bool):
        assert "default: " in told


@pytest.mark.parametrize("config", CONFIGURATIONS)
def test_a_parser_has_no_defaults_of_its_own(config: type[Any]) -> None:
    assert vars(_parser(config).parse_args([])) == {}


@pytest.mark.parametrize(("config", "field"), FLAGS)
def test_a_default_is_within_its_bounds(config: type[Any], field: Field[Any]) -> None:
    how = field.metadata
    if field.default in (None, MISSING) or not how.keys() & BEYOND.keys():
        return
    assert how.get("at_least", -math.inf) <= field.default <= how.get("at_most", math.inf)
    assert how.get("above", -math.inf) < field.default


@pytest.mark.parametrize(("config", "field"), FLAGS)
def test_each_bound_is_refused_in_one_line_that_names_flag_value_and_bound(
    config: type[Any], field: Field[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    [flag, *_] = _names(field)
    bounds = {name: bound for name, bound in field.metadata.items() if name in BEYOND}
    for name, bound in bounds.items():
        values = (BEYOND[name](bound), "", "x", "nan", "inf", "1_000", "\u0661", " 1")
        for value in map(str, values):
            line = _refusal(config, flag, value, capsys)
            assert re.search(f"must be a .*{re.escape(str(bound))}.*, not {value!r} ", line)


@pytest.mark.parametrize(("config", "field"), FLAGS)
def test_a_word_that_is_no_choice_is_refused_with_those_there_are(
    config: type[Any], field: Field[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    if choices := field.metadata.get("choices"):
        [flag, *_] = _names(field)
        must = f"must be one of {', '.join(choices)}, not 'x' "
        assert must in _refusal(config, flag, "x", capsys)
