"""The interface of a format: how one family of models writes tool calls."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from penstock_router.json_fields import JsonObject
from penstock_router.request import Tool
from penstock_router.text.answer_pieces import Piece
from penstock_router.text.marks import NO_MARKS, Marks

# A function's name, and a tool call's arguments as JSON.
NamedArguments = tuple[str, str]


class ToolParser(Protocol):
    """Reads the tool calls out of one answer's text."""

    @property
    def is_open(self) -> bool:
        """True if a tool call is unfinished."""

    def feed(self, text: str) -> list[Piece]:
        """Read text, and return the pieces that can be shown now."""

    def flush(self, *, was_cut: bool = False) -> list[Piece]:
        """End the text, and return the remaining pieces.

        `was_cut`: a limit, a stop string or an error ended the text, not the model. An unfinished
        tool call then stays unfinished.
        """


@dataclass(frozen=True, slots=True)
class CallRule:
    """The constraint on tool calls in an answer.

    If `required`, an answer has only tool calls: exactly one unless `parallel`. Otherwise it has
    free text and tool calls. The arguments of a strict tool obey its schema.
    """

    required: bool
    parallel: bool = True
    # The template's texts between items and after keys in JSON arguments; None allows any.
    separators: tuple[str, str] | None = None


class CallFormat(ABC):
    """A family's way to write tool calls. Subclasses are frozen dataclasses."""

    # The format's name in command-line flags.
    name: str
    # Texts that mark tool calls and their parts. If a mark is a token, only the token counts, and
    # the detokenizer must show it.
    marks: tuple[str, ...]
    # True if strings in a tool call have no escapes, so that a grammar can constrain their text.
    writes_plain_strings: ClassVar[bool] = False

    @abstractmethod
    def is_of(self, template: str) -> bool:
        """Tell whether a model with this chat template writes tool calls in this format."""

    @abstractmethod
    def parser(self, tools: Sequence[Tool], marks: Marks = NO_MARKS) -> ToolParser:
        """Make a parser for one answer; `marks` has the marks that are tokens."""

    @abstractmethod
    def calls(self, tools: Sequence[Tool], rule: CallRule) -> JsonObject:
        """Return the constraint on answers as the format of a structural tag."""

    def begins(self) -> tuple[str, ...]:
        """Return the marks that begin a tool call anywhere; () if there are none."""
        return ()

    def for_template(self, template: str) -> CallFormat:
        """Return the format as a model with this chat template writes it."""
        return self

    def call_id(self, name: str, number: int) -> str | None:
        """Return the model's own id for the conversation's call `number`, from 0; None if it writes
        no ids or random ids.
        """
        return None

    def calls_in_words(self, calls: Sequence[NamedArguments]) -> str | None:
        """Write tool calls as text, for templates that render none; None: JSON is used instead."""
        return None
