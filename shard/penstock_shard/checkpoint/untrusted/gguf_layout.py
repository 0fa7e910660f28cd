"""Checks that a GGUF file holds what its header claims, before the package gguf makes as many
objects as the header claims.

The format is: "GGUF", version, counts of tensors and of fields; for each field a name, a type and a
value; for each tensor its name, sizes, type and offset. Strings begin with their length, arrays
with the type and number of their elements.
"""

from __future__ import annotations

import mmap
import os
import struct
from pathlib import Path

from penstock_shard.checkpoint.untrusted.files import open_regular
from penstock_shard.errors import ModelError

_MAGIC = b"GGUF"
# The bytes of a number, by GGUF's type ids.
_NUMBERS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_STRING, _ARRAY = 8, 9
# The smallest size in bytes of a field and of a tensor's entry.
_FIELD_BYTES, _TENSOR_BYTES = 13, 32
# The most bytes in the name of a field or tensor.
_NAME_BYTES = 400
# The most bytes of a string in an array; their sum is also bounded. transformers splits a token at
# each place and copies both parts.
_ELEMENT_BYTES = 2048
_MOST_ELEMENT_BYTES = 2**25
_DIMENSIONS = 4
# The largest number of elements in all arrays together. gguf makes two objects for each, in 10 s
# for all. A vocabulary of 262,144 tokens, with types and merges, has three quarters of this.
_MOST_ELEMENTS = 2**20
_MOST_FIELDS, _MOST_TENSORS = 4096, 65_536
# No quantized value takes less than an eighth of a bit.
_VALUES_PER_BYTE = 64


class _Unreadable(Exception):
    """The file is not GGUF; the message says why."""


def check_gguf(path: Path) -> None:
    """Raise ModelError for a file that is not GGUF, or claims more than it holds or than is
    supported; OSError if the system refuses.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if not size:
            raise ModelError(f"{path}: is no GGUF file, or is cut short: it is empty")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            try:
                _Layout(mapped, size).check()
            except (_Unreadable, struct.error) as error:
                raise ModelError(f"{path}: is no GGUF file, or is cut short: {error}") from error


class _Layout:
    def __init__(self, mapped: mmap.mmap, size: int) -> None:
        self._mapped = mapped
        self._size = size
        self._at = 0
        self._num_elements = self._num_string_bytes = 0
        self._order = "<"

    def check(self) -> None:
        if self._mapped[:4] != _MAGIC:
            raise _Unreadable("it does not begin as one")
        self._at = 4
        version = self._number("I")
        if version & 0xFFFF == 0:
            # The file was written on a machine with the other byte order.
            self._order = ">"
        num_tensors, num_fields = self._number("Q"), self._number("Q")
        self._check_count("tensors", num_tensors, _MOST_TENSORS, _TENSOR_BYTES)
        self._check_count("fields", num_fields, _MOST_FIELDS, _FIELD_BYTES)
        for _ in range(num_fields):
            self._skip_string(_NAME_BYTES, "name")
            self._skip_value(self._number("I"))
        for _ in range(num_tensors):
            self._skip_tensor()

    def _skip_value(self, kind: int) -> None:
        if kind in _NUMBERS:
            self._skip(_NUMBERS[kind])
        elif kind == _STRING:
            self._skip_string()
        elif kind == _ARRAY:
            self._skip_array()
        else:
            raise _Unreadable(f"there is no type {kind} of fields")

    def _skip_array(self) -> None:
        kind, count = self._number("I"), self._number("Q")
        if kind != _STRING and kind not in _NUMBERS:
            raise _Unreadable(f"arrays of the type {kind} are not served")
        self._num_elements += count
        self._check_count("elements of arrays", self._num_elements, _MOST_ELEMENTS, 1)
        if kind == _STRING:
            begin = self._at
            for _ in range(count):
                self._skip_string(_ELEMENT_BYTES, "string in an array")
            self._num_string_bytes += self._at - begin
            if self._num_string_bytes > _MOST_ELEMENT_BYTES:
                raise _Unreadable(
                    f"{self._num_string_bytes} bytes of strings in arrays; {_MOST_ELEMENT_BYTES} "
                    "are served"
                )
        else:
            self._skip(count * _NUMBERS[kind])

    def _skip_tensor(self) -> None:
        self._skip_string(_NAME_BYTES, "name")
        num_dimensions = self._number("I")
        if not 1 <= num_dimensions <= _DIMENSIONS:
            raise _Unreadable(f"a tensor of {num_dimensions} dimensions")
        num_values = 1
        for _ in range(num_dimensions):
            num_values *= self._number("Q")
        if num_values > self._size * _VALUES_PER_BYTE:
            raise _Unreadable(f"a tensor of {num_values} values in a file of {self._size} bytes")
        self._number("I")
        if self._number("Q") > self._size:
            raise _Unreadable("a tensor begins behind its end")

    def _check_count(self, name: str, count: int, most: int, least_bytes: int) -> None:
        if count > most:
            raise _Unreadable(f"{count} {name}; {most} are served")
        if count * least_bytes > self._size:
            raise _Unreadable(f"{count} {name} in {self._size} bytes")

    def _skip_string(self, most: int | None = None, kind: str = "") -> None:
        length = self._number("Q")
        if most is not None and length > most:
            raise _Unreadable(f"a {kind} of {length} bytes; {most} are served")
        self._skip(length)

    def _number(self, code: str) -> int:
        begin = self._at
        self._skip(struct.calcsize(self._order + code))
        value: int = struct.unpack_from(self._order + code, self._mapped, begin)[0]
        return value

    def _skip(self, num_bytes: int) -> None:
        self._at += num_bytes
        if self._at > self._size:
            raise _Unreadable(f"{self._at} bytes are named, and there are {self._size}")
