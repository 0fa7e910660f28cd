"""The interface of a format: how one family of models writes calls."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from penstock_router.json_fields import JsonObject
from penstock_router.request import Tool
from penstock_router.text.answer_pieces import Piece
from penstock_router.text.marks import NO_MARKS, Marks

# A function's name, and the arguments of a call of it as JSON.
NamedArguments = tuple[str, str]


class ToolParser(Protocol):
    """Reads the calls out of one answer's text."""

    @property
    def is_open(self) -> bool:
        """Tell whether the latest call has not come to its end."""

    def feed(self, text: str) -> list[Piece]:
        """The pieces that can be shown now: content, calls, arguments."""

    def flush(self, *, was_cut: bool = False) -> list[Piece]:
        """The text has ended: the remaining pieces.

        `was_cut`: not the model ended it, but a limit, a stop string or an error. Then a call that
        has not come to its end stays as it is.
        """


@dataclass(frozen=True, slots=True)
class CallRule:
    """The calls that an answer is held to.

    Required: calls and nothing else, exactly one where not parallel. Otherwise free text and calls;
    the arguments of a strict tool obey its schema.
    """

    required: bool
    parallel: bool = True
    # The separators of items and of keys in arguments that are JSON, as the model's template writes
    # them; None: as the model likes.
    separators: tuple[str, str] | None = None


class CallFormat(ABC):
    """A family's way to write calls. Subclasses are frozen dataclasses."""

    # Its name in command-line flags.
    name: str
    # Texts that mark calls and their parts: each that is a token of the model's tokenizer counts
    # only as that token, and the detokenizer must not leave it out.
    marks: tuple[str, ...]
    # Whether a string stands in a call as it is, without escapes, so that a grammar of the string
    # is one of what the model writes.
    writes_plain_strings: ClassVar[bool] = False

    @abstractmethod
    def is_of(self, template: str) -> bool:
        """Tell whether a chat template makes its model write calls in this format."""

    @abstractmethod
    def parser(self, tools: Sequence[Tool], marks: Marks = NO_MARKS) -> ToolParser:
        """A parser for one answer to a request with these tools; `marks`: those that are tokens."""

    @abstractmethod
    def calls(self, tools: Sequence[Tool], rule: CallRule) -> JsonObject:
        """The constraint on answers in this format, as the format of a structural tag."""

    def begins(self) -> tuple[str, ...]:
        """Marks of its own that begin calls, wherever they stand; () where calls have none."""
        return ()

    def for_template(self, template: str) -> CallFormat:
        """The format as a model with this chat template writes it."""
        return self

    def call_id(self, name: str, number: int) -> str | None:
        """The id that the model itself gives to a call in a conversation, the first being number 0;
        None where it writes none, or any.
        """
        return None

    def calls_in_words(self, calls: Sequence[NamedArguments]) -> str | None:
        """Calls as the model writes them, for templates that do not render them; None: as JSON."""
        return None
