"""Keeps users' text plain where it spells the reserved texts of images.

A mark is put within each reserved text. The chat template copies the marks, and the rendered text
is cut at them. The pieces are tokenized separately, and none has a reserved text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from penstock_router.errors import BadRequest

# Unicode's noncharacters, which programs may use internally.
_MARKS = tuple(map(chr, range(0xFDD0, 0xFDF0)))


def cut_spelled(values: Any, reserved: Iterable[str]) -> tuple[Any, str]:
    """Copy the JSON `values`, with a mark in each `reserved` text in a string, or across
    consecutive text parts.

    Return the copy and the mark, or the values and "" if nothing must be cut.
    """
    written = "\0".join(_texts(values))
    found = [text for text in reserved if text in written]
    if not found:
        return values, ""
    mark = next((mark for mark in _MARKS if mark not in written), None)
    if mark is None:
        raise BadRequest("the text has every one of Unicode's noncharacters U+FDD0 to U+FDEF")
    return _map_texts(values, lambda several: _cut(several, found, mark)), mark


def _is_text_part(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("text"), str)


def _texts(value: Any) -> Iterator[str]:
    """Yield all strings, and consecutive text parts as one: a template may join them."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield str(key)
            yield from _texts(item)
    elif isinstance(value, list | tuple):
        yield "".join(part["text"] for part in value if _is_text_part(part))
        for item in value:
            yield from _texts(item)


def _map_texts(value: Any, change: Callable[[Sequence[str]], list[str]]) -> Any:
    if isinstance(value, str):
        return change([value])[0]
    if isinstance(value, dict):
        return {_map_texts(key, change): _map_texts(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        changed = iter(change([part["text"] for part in value if _is_text_part(part)]))
        joined = [
            {**part, "text": next(changed)} if _is_text_part(part) else part for part in value
        ]
        return [_map_texts(item, change) for item in joined]
    return value


def _cut(texts: Sequence[str], reserved: Iterable[str], mark: str) -> list[str]:
    """Insert a mark after the first character of each `reserved` text in the joined texts."""
    whole = "".join(texts)
    places = sorted({place + 1 for text in reserved for place in _occurrences(whole, text)})
    cut, begin, remaining = [], 0, iter([*places, len(whole) + 1])
    place = next(remaining)
    for text in texts:
        end, pieces = begin + len(text), []
        while place <= end:
            pieces.append(whole[begin:place])
            begin, place = place, next(remaining)
        cut.append(mark.join([*pieces, whole[begin:end]]))
        begin = end
    return cut


def _occurrences(whole: str, text: str) -> Iterator[int]:
    place = whole.find(text)
    while place >= 0:
        yield place
        place = whole.find(text, place + 1)
