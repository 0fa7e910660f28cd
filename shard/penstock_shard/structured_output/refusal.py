"""The exception for a constraint that cannot be honoured."""

from __future__ import annotations

LONGEST_MESSAGE = 300


class ConstraintRefused(Exception):
    """A constraint cannot be honoured; the message is one short line, for the caller."""

    def __init__(self, message: str) -> None:
        line = " ".join(message.split())
        if len(line) > LONGEST_MESSAGE:
            line = line[: LONGEST_MESSAGE - 3] + "..."
        super().__init__(line)


def shown(value: object, longest: int = 60) -> str:
    """A caller's value as text for a message, cut to `longest` characters."""
    text = repr(value)
    return text if len(text) <= longest else text[: longest - 3] + "..."
