"""Families of models, by how they write answers. Tests of formats are made from them.

A family's writer follows what its models write, not the reader that is tested.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

# A call: the function's name and its arguments.
Call = tuple[str, dict[str, Any]]


@dataclass(frozen=True)
class Family:
    """A family whose calls one format reads."""

    # The format's name.
    format: str
    # Calls as a well-behaved model writes them, with all that stands around and between them.
    write: Callable[[Sequence[Call]], str]
    # Whether text may stand before calls, and how it is written there: alone, or before calls.
    says_before: Callable[[str], str] | None = lambda text: text
    # How an answer of nothing but text is written, where it is not just the text.
    says_alone: Callable[[str], str] = lambda text: text
    # Reasoning as it is written before an answer, "" where the family has none; None: as `<think>`
    # or not at all.
    reasons: Callable[[str], str] | None = None
    # Whether calls have a mark of their own: then one of an unknown function is a call too.
    has_marks: bool = True
    # Whether several calls may stand in one answer.
    is_parallel: bool = True
    # Whether arguments are JSON or Python, in which strings have quotes.
    has_quotes: bool = True
    # Texts that begin calls, one of which may be written twice by mistake; and the last text of a
    # call or of all calls, which may be missing at the end of an answer. "": there is none.
    begin: str = ""
    end: str = ""
    # A pattern of what calls have besides names and arguments, as ids: it is not shown.
    besides: str = ""
