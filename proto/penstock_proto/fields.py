"""Fields of messages by name: what both ends copy as it is, nobody but the proto lists."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, TypeVar

from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message

M = TypeVar("M", bound=Message)


@cache
def scalar_fields(descriptor: Descriptor) -> Mapping[str, bool]:
    """The fields that are one number, text or the like: by name, whether it may be absent."""
    fields = (each for each in descriptor.fields if not (each.is_repeated or each.message_type))
    return {each.name: each.has_presence for each in fields}


def scalars(message: Message) -> dict[str, Any]:
    """The values of these fields of a message, but for those that are absent."""
    return {
        name: getattr(message, name)
        for name, optional in scalar_fields(message.DESCRIPTOR).items()
        if not optional or message.HasField(name)
    }


def message_from(of: type[M], source: object, **given: Any) -> M:
    """A message with what the source has under the names of its fields, but for what is given."""
    names = [name for name in of.DESCRIPTOR.fields_by_name if name not in given]
    same = {name: getattr(source, name) for name in names if hasattr(source, name)}
    return of(**same, **given)
