"""Rules for another server's flags: a flag of ours, nothing to do, a loss, or a refusal."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from fnmatch import fnmatchcase

from penstock_common.flags import as_size


class Takes(Enum):
    """The values that a flag takes."""

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
    # How often the model is there: the product of all such flags.
    COPIES = "how many shards"
    # And of how many devices each is: a product too.
    DEVICES = "how many GPUs of a shard"
    ENVIRONMENT = "the environment"


class Loss(Enum):
    """The harm done where a flag has no counterpart."""

    NONE = "nothing to do"
    # There is a counterpart, but it needs to be told what the flag does not say.
    BY_HAND = "by hand"
    LOST = "no counterpart"
    # Answers would differ and nobody would notice: not served in its place.
    REFUSED = "refused"


class NotTranslatable(Exception):
    """A flag's value that has no counterpart; the text says why and what to do instead."""

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
    # The value as ours; None where the flag is to be left out, as its default is the same.
    convert: Convert = str
    why: str = ""
    loss: Loss = Loss.NONE
    # Values that ask for nothing: no loss.
    harmless: frozenset[str] = frozenset()
    # Whether it may be given several times, for several values, as ours may.
    repeats: bool = False
    # The separator of several values in one; "" if it takes one value.
    separator: str = ""
    # Whether several become one, with commas.
    joins: bool = False


# By name; in an environment also by family, a name with a * for any letters.
Table = dict[str, Rule]


def rule_of(variable: str, table: Table) -> Rule | None:
    """The variable's own rule, or that of the first family which it is of."""
    families = (name for name in table if "*" in name and fnmatchcase(variable, name))
    return table.get(variable) or table.get(next(families, ""))


def named(text: str, rule: Rule) -> Table:
    """Give one rule to several names: `name` takes a value, `name!` none, `name+` several, `name?`
    one or none. One that takes none has a `--no-name` too."""
    return {
        word.rstrip("!+?"): replace(rule, takes=Takes(word[len(word.rstrip("!+?")) :]))
        for word in text.split()
    }


def same(text: str, part: Part = Part.SHARD) -> Table:
    """Flags of the same name and meaning."""
    table: Table = {}
    for word in text.split():
        name = word.rstrip("!+?")
        table |= named(word, Rule(to=f"--{name}", part=part))
    return table


def becomes(text: str, to: str, part: Part = Part.SHARD, convert: Convert = str) -> Table:
    """Flags of another name here, or with other values."""
    return named(text, Rule(to=to, part=part, convert=convert))


def needless(text: str, why: str) -> Table:
    """Flags that change nothing here: it is so anyway, or there is nothing that they could tune."""
    return named(text, Rule(why=why))


def lost(text: str, why: str, harmless: str = "") -> Table:
    """Flags without a counterpart; clients or operators notice."""
    return named(text, Rule(why=why, loss=Loss.LOST, harmless=frozenset(harmless.split())))


def by_hand(text: str, why: str, harmless: str = "") -> Table:
    """Flags whose counterpart needs to be told what they do not say."""
    return named(text, Rule(why=why, loss=Loss.BY_HAND, harmless=frozenset(harmless.split())))


def refused(text: str, why: str, harmless: str = "") -> Table:
    """Flags without which answers would differ, and nobody would notice."""
    return named(text, Rule(why=why, loss=Loss.REFUSED, harmless=frozenset(harmless.split())))


# Variables of the hub's library, of CUDA and of proxies, which penstock's processes read too.
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
    """`1k` is 1000 and `1K` is 1024, as vLLM reads them."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a whole number")
    base = 1024 if match[2].isupper() else 1000
    if not match[2]:
        return str(int(match[1]))
    return str(int(float(match[1]) * base ** _POWERS[match[2].lower()]))


def readable_bytes(text: str) -> str:
    """Bytes in the form that our flags take them: in whole KiB, one at least."""
    return as_size(max(1, int(readable_int(text)) >> 10) << 10)


def one_of(values: dict[str, str | None], otherwise: str, loss: Loss = Loss.LOST) -> Convert:
    """Values with a counterpart each (None: leave the flag out); why others have none."""

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
# What a checkpoint has is seen from its files.
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
    """The endpoint of a collector; theirs is for OTLP over gRPC, which has a port of its own."""
    if text.rstrip("/").endswith(":4317"):
        raise NotTranslatable(
            f"{text}: spans are sent by HTTP; name the collector's port for that (4318)",
            Loss.BY_HAND,
        )
    return text


def at_least(low: int, otherwise: str) -> Convert:
    """A whole number; below `low` it meant something that is not here."""

    def convert(text: str) -> str:
        value = readable_int(text)
        if float(value) < low:
            raise NotTranslatable(f"{text}: {otherwise}")
        return value

    return convert
