"""The base class of readers of answers that consist of channels.

Text is reasoning or content, depending on its channel. A family's reader reads one channel after
another. Marks that are tokens are never shown.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from penstock_router.request import Tool
from penstock_router.text.answer_pieces import Piece, PieceKind
from penstock_router.text.formats.reading.reader import CallParser, Reading, one_of
from penstock_router.text.marks import TOKEN, Marks, plain
from penstock_router.text.stop_strings import beginning


class ChannelReader(CallParser):
    # A reasoning channel may follow any other channel.
    is_over = False

    def __init__(self, tools: Sequence[Tool], marks: Marks, *, begun: bool = False) -> None:
        super().__init__(tools, marks)
        self.in_reasoning = self.has_reasoning = begun
        # The kind of the last shown piece. `_is_new` is true if a channel was opened since.
        self._shown_last: PieceKind | None = None
        self._is_new = False
        texts = sorted(marks.tokens.values(), key=len, reverse=True)
        self._tokens = re.compile(f"{TOKEN}(?:{'|'.join(map(re.escape, texts))})")

    # Output.

    def _open(self, *, is_reasoning: bool) -> None:
        self.in_reasoning = is_reasoning
        self.has_reasoning = self.has_reasoning or is_reasoning
        self._is_new = True

    def _content(self, text: str) -> None:
        """Show text of the open channel; a line break separates it from the previous channel."""
        if TOKEN in text:
            text = plain(self._tokens.sub("", text))
        if not text:
            return
        kind = PieceKind.REASONING if self.in_reasoning else PieceKind.CONTENT
        if self._is_new and self._shown_last is kind:
            text = "\n" + text
        self._is_new, self._shown_last = False, kind
        self._pieces.append(Piece(kind, text))

    def _call(self, name: str, arguments: str = "") -> None:
        self.in_reasoning, self._shown_last = False, PieceKind.CALL
        super()._call(name, arguments)

    # Input.

    def _is_token(self, mark: str) -> bool:
        """Tell whether the mark is a token, which counts as a mark anywhere."""
        return self._marks.spelled(mark) != mark

    def _text_until(self, *marks: str, show: Callable[[str], None]) -> Reading[str]:
        """Pass text to `show` until a mark comes; hold the mark, and return it."""
        self._fits = False
        by_spelling = {self._marks.spelled(mark): mark for mark in marks}
        spelled = tuple(by_spelling)
        pattern = one_of(spelled)
        while True:
            found = pattern.search(self._text, self._at)
            end = beginning(self._text, spelled, self._at) if found is None else found.start()
            text, self._at = self._text[self._at : end], end
            show(text)
            if found is not None:
                self._take(found.end())
                return by_spelling[found.group()]
            if self._over:
                text, self._at = self._text[self._at :], len(self._text)
                show(text)
            yield from self._more()
