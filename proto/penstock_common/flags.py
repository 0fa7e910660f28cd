"""Command lines declared by the fields of a frozen dataclass; and parsers of flag values.

A field with the default `flag(...)` is a flag of that name, with its type, default, bounds and
help. `parser_of` makes the parser, `read_flags` reads the fields.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import math
import os
import sys
import typing
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NoReturn, TypedDict, TypeVar

T = TypeVar("T")
Number = TypeVar("Number", int, float)

# The last word of a flag's name -> the name of its value.
_METAVARS = {"s": "S", "ms": "MS", "file": "FILE", "port": "PORT", "dir": "DIR"}


class OneLineParser(argparse.ArgumentParser):
    """Reports an error in one line, and names a similar flag for an unknown one. Accepts no
    shortened flags: a new flag could change their meaning.
    """

    def __init__(self, **given: Any) -> None:
        super().__init__(allow_abbrev=False, **given)
        self._typed: list[str] = []

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self._typed = list(sys.argv[1:] if args is None else args)
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        # A required argument may be present under a wrong name.
        is_of_names = message.startswith((UNKNOWN_FLAGS, "the following arguments are required"))
        meant = did_you_mean(self._typed, self.flags) if is_of_names else ""
        self.exit(2, f"{self.prog}: {message}{meant} (see {self.prog} --help)\n")

    @property
    def flags(self) -> list[str]:
        """The flags, including those of subcommands."""
        found = list(self._option_string_actions)
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                for parser in action.choices.values():
                    found += parser._option_string_actions
        return found


# The beginning of argparse's error.
UNKNOWN_FLAGS = "unrecognized arguments: "


def did_you_mean(typed: Iterable[str], known: Collection[str]) -> str:
    """Return the end of an error, with the known flag that the first unknown one resembles; "" if
    none does.
    """
    flags = (word.partition("=")[0] for word in typed if word.startswith("--"))
    unknown = next((flag for flag in flags if flag not in known), None)
    if unknown is None:
        return ""
    from difflib import get_close_matches

    close = get_close_matches(unknown, known, n=1)
    return f"; did you mean {close[0]}?" if close else ""


# ---- flags as fields ---------------------------------------------------------------------------


class FlagOptions(TypedDict, total=False):
    # Heading in --help for this flag and those up to the next heading.
    group: str
    # Replaces the field's name.
    name: str
    alias: str
    metavar: str
    at_least: float
    above: float
    at_most: float
    # Reads the value if the field's type cannot; raises `ArgumentTypeError`.
    read: Callable[[str], Any]
    choices: Sequence[str]
    # Environment variables. The first one that is set replaces a missing flag.
    variables: Sequence[str]
    # Makes the field's value from all values of a repeatable flag.
    gather: Callable[[list[Any]], Any]
    # The flag takes one or more values; the field is a tuple.
    several: bool
    negatable: bool
    # Hidden when the object is printed.
    secret: bool


def flag(default: T, help: str, **how: typing.Unpack[FlagOptions]) -> T:
    secret = how.get("secret", False)
    return dataclasses.field(default=default, repr=not secret, metadata={"help": help, **how})


def required(help: str, **how: typing.Unpack[FlagOptions]) -> Any:
    """Declare a flag that must be given."""
    return dataclasses.field(metadata={"help": help, **how})


def flags_of(config: type[Any]) -> list[dataclasses.Field[Any]]:
    """Return the fields that are flags; fields of base classes come last."""
    own = inspect.get_annotations(config)
    fields = (field for field in dataclasses.fields(config) if "help" in field.metadata)
    return sorted(fields, key=lambda field: field.name not in own)


def parser_of(config: type[Any], prog: str, description: str) -> OneLineParser:
    parser = OneLineParser(prog=prog, description=description)
    types = typing.get_type_hints(config)
    group: argparse._ActionsContainer = parser
    groups: dict[str, argparse._ArgumentGroup] = {}
    for field in flags_of(config):
        if title := field.metadata.get("group"):
            if title not in groups:
                groups[title] = parser.add_argument_group(title)
            group = groups[title]
        group.add_argument(
            *_names(field),
            dest=field.name,
            default=argparse.SUPPRESS,
            help=_help(field).replace("%", "%%"),
            **_taking(field, types[field.name]),
        )
    return parser


def read_flags(config: type[Any], parser: OneLineParser, argv: Sequence[str]) -> dict[str, Any]:
    """Return the fields given by the command line, else by the environment. A bad value prints one
    line and exits with status 2.
    """
    given = vars(parser.parse_args(argv))
    for field in flags_of(config):
        how = field.metadata
        variable = first_set(how.get("variables", ()))
        if field.name not in given and variable is not None:
            try:
                given[field.name] = how["read"](os.environ[variable])
            except argparse.ArgumentTypeError as error:
                parser.error(f"{variable}: {error}")
        if field.name in given and ("gather" in how or "several" in how):
            given[field.name] = how.get("gather", tuple)(given[field.name])
    return given


def words_of(config: Any, declared: type[Any]) -> list[str]:
    """Return command-line words for the flags that `declared` has, with their values in
    `config`.
    """
    values = ((field, getattr(config, field.name)) for field in flags_of(declared))
    given = ((_names(field)[0], str(value)) for field, value in values if value is not None)
    return [word for pair in given for word in pair]


def _names(field: dataclasses.Field[Any]) -> list[str]:
    name = field.metadata.get("name") or f"--{field.name.replace('_', '-')}"
    return [name, field.metadata["alias"]] if "alias" in field.metadata else [name]


def _help(field: dataclasses.Field[Any]) -> str:
    """Return the help, with the default if the text does not mention it."""
    text: str = field.metadata["help"]
    default: Any = field.default
    if "negatable" in field.metadata:
        default = "on" if default else "off"
    untold = isinstance(default, bool) or default in (dataclasses.MISSING, None, "", ())
    if untold or "default" in text:
        return text
    if field.metadata.get("read") in (size, size_with_unit):
        default = as_size(default)
    return f"{text} (default: {default})"


def _taking(field: dataclasses.Field[Any], annotation: Any) -> dict[str, Any]:
    how = field.metadata
    if annotation is bool:
        if how.get("negatable"):
            return {"action": argparse.BooleanOptionalAction}
        return {"action": "store_false" if field.default else "store_true"}
    # The X of `X | None` and `tuple[X, ...]`.
    [kind, *_] = typing.get_args(annotation) or [annotation]
    kind = how.get("read", kind)
    metavar = _METAVARS.get(_names(field)[0].split("-")[-1])
    if kind in _NUMBERS:
        bounds = {name: how[name] for name in ("at_least", "above", "at_most") if name in how}
        kind, metavar = number(kind, **bounds), metavar or "N"
    taking = {"type": kind, "metavar": how.get("metavar", metavar)}
    if "choices" in how:
        taking = choice(how["choices"])
    if field.default is dataclasses.MISSING:
        taking["required"] = True
    if "several" in how:
        return taking | {"nargs": "+"}
    return taking | {"action": "append"} if "gather" in how else taking


# ---- values ------------------------------------------------------------------------------------


def number(
    kind: Callable[[str], Number],
    *,
    at_least: float = -math.inf,
    above: float = -math.inf,
    at_most: float = math.inf,
) -> Callable[[str], Number]:
    """Make a parser for a number between bounds. `kind` is one of `_NUMBERS`."""
    must = _rule(_NUMBERS[kind], at_least, above, at_most)

    def read(text: str) -> Number:
        value = _plain(kind, text)
        if value is None or not at_least <= value <= at_most or value <= above:
            raise argparse.ArgumentTypeError(f"must be {must}, not {short(text)}")
        return value

    return read


def _rule(what: str, at_least: float, above: float, at_most: float) -> str:
    if math.isfinite(at_least) and math.isfinite(at_most):
        return f"{what} from {at_least} to {at_most}"
    bounds = {"at least": at_least, "above": above, "at most": at_most}
    told = [f"{word} {bound}" for word, bound in bounds.items() if math.isfinite(bound)]
    return ", ".join([what, *told])


def _plain(kind: Callable[[str], Number], text: str) -> Number | None:
    """Parse a finite number; refuse notations that only Python has, such as 1_000."""
    if not text.isascii() or "_" in text or text != text.strip():
        return None
    try:
        value = kind(text)
    except (ValueError, OverflowError):
        return None
    return value if abs(value) < math.inf else None


_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}


def size(text: str) -> int:
    """Parse a number of bytes, with or without a unit. Raise `ValueError`."""
    unit = _UNITS.get(text[-1:].upper(), 1)
    digits = text[:-1] if unit > 1 else text
    if not digits.isdigit():
        raise ValueError(text)
    return int(digits) * unit


def size_with_unit(text: str) -> int:
    """Parse a number of bytes with a unit, for a flag whose name does not say bytes. Raise
    `ArgumentTypeError` for a number without a unit, except 0; otherwise like `size`.
    """
    num_bytes = size(text)
    if text.isdigit() and num_bytes > 0:
        written = as_size(num_bytes)
        meant = "" if written == text else f"; as many bytes are {written}"
        raise argparse.ArgumentTypeError(
            f"must have its unit, K, M or G, as in 512M or 2G, not {short(text)}{meant}"
        )
    return num_bytes


def as_size(num_bytes: int) -> str:
    """Write a number of bytes for a flag, in the largest unit that divides it."""
    fitting = (
        f"{num_bytes // unit}{name}" for name, unit in _UNITS.items() if num_bytes % unit == 0
    )
    return list(fitting)[-1] if num_bytes else "0"


_NUMBERS: dict[Callable[[str], Any], str] = {
    int: "a whole number",
    float: "a number",
    size: "a size such as 512M or 2G",
    size_with_unit: "a size such as 512M or 2G",
}


def one_of(names: Iterable[str]) -> Callable[[str], str]:
    known = tuple(names)

    def read(text: str) -> str:
        if text not in known:
            must = f"must be one of {', '.join(known)}"
            raise argparse.ArgumentTypeError(f"{must}, not {short(text)}")
        return text

    return read


def choice(names: Collection[str]) -> dict[str, Any]:
    return {"type": one_of(names), "metavar": f"{{{','.join(names)}}}"}


def first_set(variables: Iterable[str]) -> str | None:
    return next((name for name in variables if name in os.environ), None)


def usable_key(text: str, source: str = "a key") -> str:
    """Check that a header can carry a key. An empty key is an error: it would switch authentication
    off. The error does not repeat the key, which may be secret.
    """
    if not (text and text.isascii() and text.isprintable() and text == text.strip()):
        raise argparse.ArgumentTypeError(
            f"{source} is printable ASCII, not empty, without spaces around it; "
            "leave it out to do without"
        )
    return text


def short(text: str) -> str:
    return repr(text if len(text) <= 40 else f"{text[:37]}...")
