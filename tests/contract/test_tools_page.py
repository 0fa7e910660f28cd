"""docs/tools.md names every format there is, and says which of them every served model has."""

from __future__ import annotations

import re
from pathlib import Path

from models.family_outcomes import OUTCOMES, SERVED

from penstock_router.text.formats.registry import CHANNELS, FORMATS
from penstock_router.text.reasoning import STYLES

PAGE = (Path(__file__).parents[2] / "docs" / "tools.md").read_text()
MARK = "<!-- calls -->"


def section(begin: str, end: str) -> str:
    return PAGE.partition(begin)[2].partition(end)[0]


def in_code(text: str) -> set[str]:
    return set(re.findall(r"`([\w-]+)`", text))


def columns(table: str) -> list[list[str]]:
    rows = [line.replace("\\|", "/") for line in table.splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def test_every_served_type_of_model_has_a_row_with_a_format() -> None:
    served = {family for family, outcome in OUTCOMES.items() if outcome in SERVED}
    _, *rows = columns(section(MARK, MARK))
    assert {name for row in rows for name in in_code(row[0])} == served
    for types, calls, _, template in rows:
        assert in_code(calls) & FORMATS.keys() or "text model" in calls, types
        assert "real" in template or "own" in template, types


def test_every_format_of_calls_is_in_the_table_with_its_other_names() -> None:
    rows = columns(section("### Tool call parsers", "### Which models"))
    names = {name for row in rows for cell in row[:2] for name in in_code(cell)}
    assert names == FORMATS.keys()


def test_every_style_of_reasoning_is_in_the_table_with_its_other_names() -> None:
    rows = columns(PAGE.partition("| name | also | markers |")[2].partition("\n\n")[0])
    names = {name for row in rows for cell in row[:2] for name in in_code(cell)}
    assert names == STYLES.keys() | (CHANNELS.keys() & names)
    assert {channel.name for channel in CHANNELS.values()} <= names
