"""Says how a value that is being written may still become equal to an earlier one."""

from __future__ import annotations

from collections.abc import Iterator

from penstock_shard.structured_output.distinct.position import (
    AFTER,
    COLON,
    DIGITS,
    FIRST,
    Container,
    Position,
    Value,
)

# 1, 1.0 and 1.00 are equal; a number that goes on with more zeros than these is given up.
_ZEROS = 4


def ways(position: Position, level: int) -> Iterator[bytes]:
    """Texts that may follow now, up to the end of the next name, plain value or sign, so that the
    item or name of this container that is being written may still become equal to an earlier one.
    """
    container = position.containers[level]
    is_inner = level == len(position.containers) - 1
    if is_inner and position.phase in (AFTER, COLON):
        return
    if container.is_object:
        if is_inner and position.in_name:
            yield from _texts(position.text, container.used)
        return
    for value in container.used:
        yield from _inside(position, level + 1, value)


def _inside(position: Position, level: int, value: Value) -> Iterator[bytes]:
    """How what is written from this level on may become `value`."""
    if level == len(position.containers):
        yield from _texts(position.text, [_first(value)])
        return
    container = position.containers[level]
    is_inner = level == len(position.containers) - 1
    if container.is_object != isinstance(value, dict) or isinstance(value, bytes):
        return
    if not container.is_object:
        done = len(container.items)
        if value[:done] == container.items:
            yield from _left(position, level, is_inner, value[done:])
    elif all(value.get(name) == member for name, member in container.members):
        names = dict(container.members)
        left = [name for name in value if name not in names]
        if container.name is None:
            yield from _left(position, level, is_inner, left)
        elif container.name in left:
            if is_inner and position.phase == COLON:
                yield b":"
            else:
                yield from _inside(position, level + 1, value[container.name])


def _left(position: Position, level: int, is_inner: bool, left: Value) -> Iterator[bytes]:
    """How a container goes on whose value has these items, or names, left."""
    is_object = position.containers[level].is_object
    if is_inner and position.phase == AFTER:
        yield b"," if left else (b"}" if is_object else b"]")
    elif is_inner and position.phase == FIRST and not position.text and not left:
        yield b"}" if is_object else b"]"
    elif left and is_object:
        yield from _texts(position.text, left)
    elif left:
        yield from _inside(position, level + 1, left[0])


def _first(value: Value) -> bytes:
    if isinstance(value, bytes):
        return value
    return b"{" if isinstance(value, dict) else b"["


def _texts(begun: bytes, texts: tuple[bytes, ...] | list[bytes]) -> Iterator[bytes]:
    """What is missing at the end of `begun` to equal one of the texts."""
    for text in texts:
        if text[0] in DIGITS:
            yield from _numbers(begun, text)
        elif text.startswith(begun):
            yield text[len(begun) :]


def _numbers(begun: bytes, number: bytes) -> Iterator[bytes]:
    for text in (number, b"-0") if number == b"0" else (number,):
        point = b"" if b"." in text else b"."
        whole = text + point
        if whole.startswith(begun):
            yield (whole + b"0" * _ZEROS)[len(begun) :]
        elif begun.startswith(whole) and not begun[len(whole) :].strip(b"0"):
            yield b"0" * _ZEROS


def level_at_stake(position: Position) -> int | None:
    """The outermost container of which an item, or name, may still become equal to an earlier
    one.
    """
    for level, container in enumerate(position.containers):
        if container.is_strict and container.used and _any(ways(position, level)):
            return level
    return None


def _any(found: Iterator[bytes]) -> bool:
    return next(found, None) is not None


def ended(container: Container, level: int, later: Position) -> bool:
    """Whether an item or name of the container has ended since."""
    if len(later.containers) <= level:
        return True
    return len(later.containers[level].used) > len(container.used)
