"""The report of a script to the test that runs it: one JSON object, on the last line it prints."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any


def report(observed: dict[str, Any]) -> None:
    print(json.dumps(observed))


def error_of(expected: type[Exception], call: Callable[[], object]) -> dict[str, Any]:
    """The names of the classes of what `call` raises, its text, and the code that OpenAI's clients
    read of it; no names without an error.

    Only what is an `expected` is caught: each client promises errors of a class of its own.
    """
    try:
        call()
    except expected as error:
        kinds = [kind.__name__ for kind in type(error).__mro__]
        return {"kinds": kinds, "text": str(error), "code": getattr(error, "code", None)}
    return {"kinds": [], "text": "no error"}
