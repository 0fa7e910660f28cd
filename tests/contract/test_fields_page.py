"""docs/http-api.md names every field of other servers' clients under what comes of it."""

from __future__ import annotations

import re
from pathlib import Path

from penstock_router.apis.openai.fields import CHAT_FIELDS, COMPLETION_FIELDS
from penstock_router.json_fields import Use

PAGE = (Path(__file__).parents[2] / "docs" / "http-api.md").read_text()
FIELDS = {**COMPLETION_FIELDS, **CHAT_FIELDS}
# Fields of one of the two routes, which the other refuses: no other server's.
OF_ONE_ROUTE = {"best_of", "max_completion_tokens", "top_logprobs", "tools", "tool_choice"}


def names_between(begin: str, end: str) -> set[str]:
    section = PAGE.partition(begin)[2].partition(end)[0]
    assert section
    return set(re.findall(r"`([a-z_.]+)`", section))


def test_each_name_that_is_refused_is_in_the_table_of_those_and_no_other() -> None:
    refused = {
        name
        for name, entry in FIELDS.items()
        if entry.use is Use.REFUSED and name not in OF_ONE_ROUTE
    }
    assert names_between("Refused by name, unless", "Taken without effect") == refused


def test_each_name_that_is_taken_is_in_the_table_of_those_and_no_other() -> None:
    taken = {name for name, entry in FIELDS.items() if entry.use is Use.TAKEN}
    labels = {"user", "metadata", "safety_identifier"}
    assert names_between("Taken without effect", "`user`, `metadata`") == taken - labels
    assert labels <= taken


def test_each_other_name_of_a_field_is_in_the_table_of_those() -> None:
    others = {name for name, entry in FIELDS.items() if entry.stands_for}
    assert others <= names_between("Served under their own names", "Refused by name, unless")
