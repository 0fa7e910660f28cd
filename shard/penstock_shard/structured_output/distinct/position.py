"""Follows JSON byte by byte: which containers are open, and their contents so far.

Equal JSON compares equal: an array is a tuple, an object a dict, and any other value its text (a
number its shortest text), without whitespace.
"""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

from penstock_shard.structured_output.distinct.watched import Node

Value = Any
# What comes next, before a name or plain value begins. At `FIRST`, the container may end.
FIRST, NEXT, COLON, VALUE, AFTER = range(5)
BLANKS, DIGITS = b" \t\r\n", b"-0123456789"
_OPENS, _CLOSES, _QUOTE, _COMMA, _COLON, _BACKSLASH = b"[{", b"]}", 0x22, 0x2C, 0x3A, 0x5C
_WITHIN = re.compile(rb'(?:[^"\\]|\\.)*', re.DOTALL)


class Container(NamedTuple):
    node: Node
    is_object: bool
    # True for a set, or within one: its contents are compared with others.
    is_kept: bool
    # True for a set, or an object with name patterns: different items or names may run out.
    is_strict: bool
    # True for a strict container, or within one.
    is_within: bool
    length: int = 0
    items: tuple[Value, ...] = ()
    # Names of a watched object; below, members of a kept object, and its unfinished member's name.
    names: tuple[bytes, ...] = ()
    members: tuple[tuple[bytes, Value], ...] = ()
    name: bytes | None = None

    @property
    def used(self) -> tuple[Value, ...]:
        """The items or names from which the next one must differ."""
        return self.names if self.is_object else self.items

    @property
    def value(self) -> Value:
        return dict(self.members) if self.is_object else self.items


class Position:
    __slots__ = ("_is_escaped", "_is_kept", "_root", "containers", "phase", "text")

    def __init__(self, root: Node | None) -> None:
        """Begin before a value. Without `root` there is no JSON."""
        self._root = root
        self.containers: list[Container] = []
        self.phase = AFTER if root is None else VALUE
        # Text of the unfinished name or plain value, if any.
        self.text = b""
        self._is_escaped = False
        self._is_kept = False

    def copy(self) -> Position:
        other = Position(self._root)
        other.containers, other.phase, other.text = self.containers[:], self.phase, self.text
        other._is_escaped, other._is_kept = self._is_escaped, self._is_kept
        return other

    @property
    def is_strict(self) -> bool:
        """True within a strict container."""
        return bool(self.containers) and self.containers[-1].is_within

    @property
    def is_over(self) -> bool:
        """True if the JSON has ended; whatever follows is not JSON."""
        return self.phase == AFTER and not self.containers

    @property
    def in_string(self) -> bool:
        return self.text[:1] == b'"'

    @property
    def in_name(self) -> bool:
        return self.phase <= NEXT and bool(self.containers) and self.containers[-1].is_object

    def feed(self, data: bytes) -> bool:
        """Read these bytes. False if a value equals an earlier one from which it must differ."""
        at = 0
        while at < len(data) and not self.is_over:
            if self.in_string:
                at = self._string(data, at)
                if at < 0:
                    return False
            elif not self._take(data[at]):
                return False
            else:
                at += 1
        return True

    def _string(self, data: bytes, start: int) -> int:
        """Return the end of the string's text in `data`; -1 if the string may not end there."""
        found = _WITHIN.match(data, start + self._is_escaped)
        assert found is not None
        end = found.end()
        self._is_escaped = data[end:] == b"\\"
        end += self._is_escaped
        closes = data[end : end + 1] == b'"' and not self._is_escaped
        end += closes
        if self._is_kept:
            self.text += data[start:end]
        if closes and not self._finish():
            return -1
        return end

    def _take(self, byte: int) -> bool:
        if self.text and (byte in BLANKS or byte in b",]}") and not self._finish():
            return False
        if byte in _OPENS:
            self._open(byte == _OPENS[1])
        elif byte in _CLOSES:
            return self._close()
        elif byte == _COMMA:
            self.phase = NEXT
        elif byte == _COLON:
            self.phase = VALUE
        elif byte not in BLANKS and byte != _QUOTE and not self.containers:
            # The whole JSON is one plain value.
            self.phase = AFTER
        elif byte not in BLANKS:
            self._is_kept = self.in_name or (bool(self.containers) and self.containers[-1].is_kept)
            self.text += bytes((byte,))
        return True

    def _open(self, is_object: bool) -> None:
        node = self._node()
        above = self.containers[-1].is_kept if self.containers else False
        is_strict = node.has_patterns if is_object else node.is_set
        is_kept = above or (is_strict and not is_object)
        is_within = is_strict or self.is_strict
        self.containers.append(Container(node, is_object, is_kept, is_strict, is_within))
        self.phase = FIRST

    def _node(self) -> Node:
        if not self.containers:
            assert self._root is not None
            return self._root
        top = self.containers[-1]
        if not top.is_object:
            return top.node.item(top.length)
        assert top.name is not None
        return top.node.member(_text(top.name))

    def _close(self) -> bool:
        closed = self.containers.pop()
        return self._add(closed.value if closed.is_kept else None)

    def _finish(self) -> bool:
        text, self.text = self.text, b""
        if not self.in_name:
            return self._add(plain(text))
        top = self.containers[-1]
        names = (*top.names, text) if top.node.is_open else ()
        self.containers[-1] = top._replace(name=text, names=names)
        self.phase = COLON
        return text not in top.names

    def _add(self, value: Value) -> bool:
        self.phase = AFTER
        if not self.containers:
            return True
        top = self.containers[-1]
        if top.is_object:
            members = (*top.members, (top.name or b"", value)) if top.is_kept else ()
            self.containers[-1] = top._replace(members=members, name=None, length=top.length + 1)
            return True
        items = (*top.items, value) if top.is_kept else ()
        self.containers[-1] = top._replace(items=items, length=top.length + 1)
        return not top.is_strict or value not in top.items


def plain(text: bytes) -> bytes:
    """The text by which a plain value is compared: 1.5 for 1.50, and 0 for -0."""
    if text[0] in DIGITS and not text.strip(b"-0."):
        return b"0"
    return text.rstrip(b"0").rstrip(b".") if text[0] in DIGITS and b"." in text else text


def _text(name: bytes) -> str:
    return str(json.loads(name)) if b"\\" in name else name[1:-1].decode(errors="replace")
