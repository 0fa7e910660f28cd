"""Messages between server and engine about KV blocks that go to other shards, or come from them.

Their bytes do not pass the link: both processes map the memory in whose slots they are. A slot is
named by its pool and its number there.
"""

from __future__ import annotations

import msgspec

from penstock_proto.types import PrefixNames

Slot = tuple[int, int]


class Export(msgspec.Struct, array_like=True, frozen=True):
    """Another shard asks for the blocks of a prefix, of which it has the first `num_known`. The
    answer has the same `number`.
    """

    number: int
    prefix: PrefixNames
    num_known: int


class Arrival(msgspec.Struct, array_like=True, frozen=True):
    """Slots with what came of a `Fetch`; `is_last` after which nothing more comes, as something
    came that is damaged perhaps.
    """

    number: int
    slots: list[Slot]
    is_last: bool = False
    is_damaged: bool = False


# ---- engine -> server ----


class Exported(msgspec.Struct, array_like=True, frozen=True, tag="exported"):
    """Slots with the blocks that were asked for, parents first: they stay as they are until the
    server says that it has read them.
    """

    number: int
    slots: list[Slot]


class Fetch(msgspec.Struct, array_like=True, frozen=True, tag="fetch"):
    """Fetch from the shard at `source` what it has of a prefix, of which the first `num_known`
    blocks are here. Whatever happens, within `deadline_s` an `Arrival` is the last.
    """

    number: int
    source: str
    prefix: PrefixNames
    num_known: int
    deadline_s: float


class FetchOver(msgspec.Struct, array_like=True, frozen=True, tag="fetch_over"):
    """Nobody waits for a fetch any more."""

    number: int


class Distrust(msgspec.Struct, array_like=True, frozen=True, tag="distrust"):
    """A block that the shard at `source` sent is not what is computed here."""

    source: str


class InboundSlots(msgspec.Struct, array_like=True, frozen=True, tag="inbound_slots"):
    """Slots that are the server's to write into, until it names them in an `Arrival`."""

    slots: list[Slot]
