"""Rules for another server's flags. A rule translates a flag to ours, drops it, reports it as lost,
or refuses it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from fnmatch import fnmatchcase

from penstock_common.flags import as_size


class Takes(Enum):
    VALUE = ""
    NOTHING = "!"
    VALUES = "+"
    MAYBE_VALUE = "?"


class Part(Enum):
    """The command that a flag is for, in `penstock serve MODEL FLAGS -- FLAGS OF THE ROUTER`."""

    MODEL = "the model"
    SERVE = "penstock serve"
    SHARD = "shards"
    ROUTER = "the router"
    BOTH = "shards and the router"
    # Values of several such flags are multiplied.
    COPIES = "how many shards"
    # Values of several such flags are multiplied.
    DEVICES = "how many GPUs of a shard"
    ENVIRONMENT = "the environment"


class Loss(Enum):
    NONE = "nothing to do"
    # The counterpart needs information that the flag does not have.
    BY_HAND = "by hand"
    LOST = "no counterpart"
    # Without the flag, answers would differ unnoticed, so the server does not start.
    REFUSED = "refused"


class NotTranslatable(Exception):
    """A flag's value has no counterpart; the text says why and what to do instead."""

    def __init__(self, text: str, loss: Loss = Loss.LOST) -> None:
        super().__init__(text)
        self.loss = loss


Convert = Callable[[str], str | None]


@dataclass(frozen=True, slots=True)
class Rule:
    """The translation of a flag. Either `to` is set, or `why` with `loss`."""

    takes: Takes = Takes.VALUE
    to: str = ""
    part: Part = Part.SHARD
    # Converts to our value; None: leave the flag out, because our default is the same.
    convert: Convert = str
    why: str = ""
    loss: Loss = Loss.NONE
    # Values for which no loss is reported.
    harmless: frozenset[str] = frozenset()
    # True if the flag is given once for each of its values; our flag for the same purpose is too.
    repeats: bool = False
    # The separator of several values in one argument; "" if the flag takes one value.
    separator: str = ""
    joins: bool = False


# Rules by name. In the name of a family of variables, * stands for any letters.
Table = dict[str, Rule]


def rule_of(variable: str, table: Table) -> Rule | None:
    """Return the rule of the variable, or of the first family that it belongs to."""
    families = (name for name in table if "*" in name and fnmatchcase(variable, name))
    return table.get(variable) or table.get(next(families, ""))


def named(text: str, rule: Rule) -> Table:
    """Give several names one rule. `name` takes one value, `name!` no value, `name+` several,
    `name?` at most one. A flag without a value also has the form `--no-name`.
    """
    return {
        word.rstrip("!+?"): replace(rule, takes=Takes(word[len(word.rstrip("!+?")) :]))
        for word in text.split()
    }


def same(text: str, part: Part = Part.SHARD) -> Table:
    """Flags that have the same name and meaning here."""
    table: Table = {}
    for word in text.split():
        name = word.rstrip("!+?")
        table |= named(word, Rule(to=f"--{name}", part=part))
    return table


def becomes(text: str, to: str, part: Part = Part.SHARD, convert: Convert = str) -> Table:
    """Flags that have another name or other values here."""
    return named(text, Rule(to=to, part=part, convert=convert))


def needless(text: str, why: str) -> Table:
    """Flags that change nothing here: penstock always does so, or has nothing to tune."""
    return named(text, Rule(why=why))


def lost(text: str, why: str, harmless: str = "") -> Table:
    """Flags without a counterpart; clients or operators notice the loss."""
    return named(text, Rule(why=why, loss=Loss.LOST, harmless=frozenset(harmless.split())))


def by_hand(text: str, why: str, harmless: str = "") -> Table:
    """Flags whose counterpart needs more information than the flag has."""
    return named(text, Rule(why=why, loss=Loss.BY_HAND, harmless=frozenset(harmless.split())))


def refused(text: str, why: str, harmless: str = "") -> Table:
    """Flags without which answers would differ unnoticed."""
    return named(text, Rule(why=why, loss=Loss.REFUSED, harmless=frozenset(harmless.split())))


# Variables that penstock reads too.
_SHARED = """
HF_TOKEN HF_HOME HF_HUB_CACHE HF_HUB_OFFLINE HF_ENDPOINT HF_HUB_DOWNLOAD_TIMEOUT
HF_HUB_ETAG_TIMEOUT HF_HUB_DISABLE_XET HF_XET_HIGH_PERFORMANCE CUDA_VISIBLE_DEVICES
NVIDIA_VISIBLE_DEVICES NVIDIA_DRIVER_CAPABILITIES OMP_NUM_THREADS HTTP_PROXY HTTPS_PROXY NO_PROXY
OTEL_EXPORTER_OTLP_ENDPOINT OTEL_SERVICE_NAME
"""
HUB: Table = {name: Rule(to=name, part=Part.ENVIRONMENT) for name in _SHARED.split()}
HUB |= becomes("HUGGING_FACE_HUB_TOKEN", "HF_TOKEN", Part.ENVIRONMENT)

# ---- values ------------------------------------------------------------------------------------

_SIZE = re.compile(r"(\d+(?:\.\d+)?)([kKmMgGtT]?)")
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def readable_int(text: str) -> str:
    """Parse a whole number in vLLM's form, where `1k` is 1000 and `1K` is 1024."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a whole number")
    base = 1024 if match[2].isupper() else 1000
    if not match[2]:
        return str(int(match[1]))
    return str(int(float(match[1]) * base ** _POWERS[match[2].lower()]))


def readable_bytes(text: str) -> str:
    """Write a number of bytes in our flags' form: whole KiB, at least 1."""
    return as_size(max(1, int(readable_int(text)) >> 10) << 10)


def one_of(values: dict[str, str | None], otherwise: str, loss: Loss = Loss.LOST) -> Convert:
    """Convert values to their counterparts (None: leave the flag out). `otherwise` says why other
    values have no counterpart.
    """

    def convert(text: str) -> str | None:
        if text.lower() not in values:
            raise NotTranslatable(f"{text}: {otherwise}", loss)
        return values[text.lower()]

    return convert


log_level = one_of(
    {
        **{level: level for level in ("debug", "info", "warning", "error")},
        **{"trace": "debug", "warn": "warning", "critical": "error"},
    },
    "levels are debug, info, warning and error, for the whole router",
)
# A checkpoint's files state its quantization.
quantization = one_of(
    {
        "fp8": "fp8",
        **dict.fromkeys(("none", "compressed-tensors", "awq", "awq_marlin")),
        **dict.fromkeys(("gptq", "gptq_marlin", "marlin")),
    },
    "not served; give --quantization fp8, or a checkpoint of AWQ, GPTQ or compressed-tensors; on "
    "a CPU --quantization int8",
    Loss.REFUSED,
)


def otlp_over_http(text: str) -> str:
    """Refuse the port of OTLP over gRPC: penstock sends over HTTP."""
    if text.rstrip("/").endswith(":4317"):
        raise NotTranslatable(
            f"{text}: spans are sent by HTTP; name the collector's port for that (4318)",
            Loss.BY_HAND,
        )
    return text


def at_least(low: int, otherwise: str) -> Convert:
    """Refuse whole numbers below `low` with the text `otherwise`."""

    def convert(text: str) -> str:
        value = readable_int(text)
        if float(value) < low:
            raise NotTranslatable(f"{text}: {otherwise}")
        return value

    return convert
