"""Messages between server and engine about KV blocks that go to other shards or come from them.

The blocks' bytes are not in the messages: both processes map the memory that holds them, in slots.
A `Slot` is a pool and the slot's number in that pool.
"""

from __future__ import annotations

import msgspec

from penstock_proto.types import PrefixNames

Slot = tuple[int, int]


class Export(msgspec.Struct, array_like=True, frozen=True):
    """Another shard asks for the blocks of a prefix; it has the first `num_known`. The answer has
    the same `number`.
    """

    number: int
    prefix: PrefixNames
    num_known: int


class Arrival(msgspec.Struct, array_like=True, frozen=True):
    """Slots with blocks that a `Fetch` received. Nothing comes after the one with `is_last`.
    `is_damaged`: a block was damaged, which ended the fetch.
    """

    number: int
    slots: list[Slot]
    is_last: bool = False
    is_damaged: bool = False


# ---- engine -> server ----


class Exported(msgspec.Struct, array_like=True, frozen=True, tag="exported"):
    """Slots with the blocks that an `Export` asked for, parents first. They do not change until the
    server says that it has read them.
    """

    number: int
    slots: list[Slot]


class Fetch(msgspec.Struct, array_like=True, frozen=True, tag="fetch"):
    """Fetch the blocks of a prefix that the shard at `source` has; the first `num_known` are here.
    Within `deadline_s` seconds an `Arrival` with `is_last` follows, whatever happens.
    """

    number: int
    source: str
    prefix: PrefixNames
    num_known: int
    deadline_s: float


class FetchOver(msgspec.Struct, array_like=True, frozen=True, tag="fetch_over"):
    """A fetch that no request waits for any more."""

    number: int


class Distrust(msgspec.Struct, array_like=True, frozen=True, tag="distrust"):
    """A report that the shard at `source` sent a block that differs from what is computed here."""

    source: str


class InboundSlots(msgspec.Struct, array_like=True, frozen=True, tag="inbound_slots"):
    """Slots that the server may write into until it names them in an `Arrival`."""

    slots: list[Slot]
