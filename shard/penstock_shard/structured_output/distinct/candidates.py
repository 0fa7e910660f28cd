"""Computes the texts by which an unfinished value may become equal to an earlier one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from penstock_shard.structured_output.distinct.position import (
    AFTER,
    COLON,
    DIGITS,
    FIRST,
    Container,
    Position,
    Value,
)

# 1, 1.0 and 1.00 are equal. Longer runs of zeros are not considered.
ZEROS = b"0000"


def all_ways(position: Position) -> list[bytes]:
    """Texts by which an unfinished item or name may become equal to an earlier one from which it
    must differ. A text ends with the next name, plain value or sign.
    """
    if not position.is_strict:
        return []
    strict = (level for level, each in enumerate(position.containers) if each.is_strict)
    return [way for level in strict for way in _ways(position, level)]


def level_at_stake(position: Position) -> int | None:
    """The outermost container whose unfinished item or name may still become equal to another."""
    if position.is_strict:
        for level, container in enumerate(position.containers):
            if container.is_strict and _ways(position, level):
                return level
    return None


def _ways(position: Position, level: int) -> list[bytes]:
    """Texts by which the next item or name at `level` may equal an earlier one."""
    container = position.containers[level]
    if level < len(position.containers) - 1:
        inner = position, level + 1
        return [way for value in container.items for way in _inside(*inner, value)]
    if position.phase in (AFTER, COLON):
        return []
    if container.is_object:
        return _texts(position.text, container.names) if position.in_name else []
    return _texts(position.text, list(map(_first, container.items)))


def _inside(position: Position, level: int, value: Value) -> list[bytes]:
    """Texts by which the value begun at this level may become `value`."""
    if level == len(position.containers):
        return _texts(position.text, [_first(value)])
    container = position.containers[level]
    if container.is_object != isinstance(value, dict) or isinstance(value, bytes):
        return []
    if not container.is_object:
        done = len(container.items)
        return _left(position, level, value[done:]) if value[:done] == container.items else []
    if any(value.get(name) != member for name, member in container.members):
        return []
    names = {name for name, _ in container.members}
    left = [name for name in value if name not in names]
    if container.name is None:
        return _left(position, level, left)
    if container.name not in left:
        return []
    if position.phase == COLON and level == len(position.containers) - 1:
        return [b":"]
    return _inside(position, level + 1, value[container.name])


def _left(position: Position, level: int, left: Value) -> list[bytes]:
    """Texts by which a container may go on to get the items or names in `left`."""
    is_object = position.containers[level].is_object
    is_inner = level == len(position.containers) - 1
    end = b"}" if is_object else b"]"
    if is_inner and position.phase == AFTER:
        return [b"," if left else end]
    if not left:
        return [end] if is_inner and position.phase == FIRST and not position.text else []
    return _texts(position.text, left) if is_object else _inside(position, level + 1, left[0])


def _first(value: Value) -> bytes:
    if isinstance(value, bytes):
        return value
    return b"{" if isinstance(value, dict) else b"["


def _texts(begun: bytes, texts: Iterable[bytes]) -> list[bytes]:
    """Return the rests of the `texts` that `begun` may still become."""
    if begun[:1] == b'"':
        return [text[len(begun) :] for text in texts if text.startswith(begun)]
    if begun:
        # Filter first, because this is cheap. The number 0 stays, because -0 is equal to it.
        texts = [
            text
            for text in texts
            if text.startswith(begun) or begun.startswith(text) or text == b"0"
        ]
    return [way for text in texts for way in _plain_ways(begun, text)]


def _plain_ways(begun: bytes, text: bytes) -> Iterator[bytes]:
    if text[0] not in DIGITS:
        if text.startswith(begun):
            yield text[len(begun) :]
        return
    for each in (text, b"-0") if text == b"0" else (text,):
        whole = each if b"." in each else each + b"."
        if whole.startswith(begun):
            yield (whole + ZEROS)[len(begun) :]
        elif begun.startswith(whole) and not begun[len(whole) :].strip(b"0"):
            yield ZEROS


def ended(container: Container, level: int, later: Position) -> bool:
    """True if at `later` the container has ended, or has one more item or name."""
    if len(later.containers) <= level:
        return True
    return len(later.containers[level].used) > len(container.used)
