"""Turns token ids into text, a few at a time. The joined pieces equal the text of all ids.

A token's text can depend on earlier tokens: the first word may lose its leading space, and a
character's bytes may span several tokens. So a detokenizer starts with the prompt's end, and emits
a character after its last byte.

Nearly every tokenizer decodes token by token into bytes (byte-level BPE, and sentencepiece with
byte fallback). For these, a table from id to bytes and an incremental UTF-8 decoder suffice, in a
fraction of a microsecond per token. One result differs from `tokenizers`: if a run of
sentencepiece's byte tokens is not valid UTF-8, `tokenizers` replaces even its complete characters
by U+FFFD; here they are shown. To match, whole runs would have to be held back. Other decoders
(WordPiece and others that look at neighbours) decode a small window again at each token.

An answer's text is the text of prompt and answer minus the prompt's. A character that is unfinished
at the prompt's end belongs to the prompt, as U+FFFD. If the prompt is echoed, `reopen_prompt` moves
it to the answer. At the end of a text, bytes of an unfinished character or a surrogate are left
out.

`tokenizers` has a DecodeStream, which is not used: it raises ("Invalid prefix") if a run of byte
tokens is not valid UTF-8, and emits nothing while a window ends in U+FFFD.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from tokenizers import Tokenizer

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

# Enough bytes to see whether a text ends within a UTF-8 character.
_UTF8_TAIL_BYTES = 4

# Tokens searched for text at a prompt's end; hidden tokens have no text.
_PROMPT_TAIL_TOKENS = 256

# Tokens of context in a window; only direct neighbours matter.
_WINDOW_TOKENS = 6
# A window that still ends in U+FFFD after this many tokens really has that character.
_MAX_HELD_TOKENS = 16


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return REPLACEMENT * (error.end - error.start), error.end


codecs.register_error("penstock-each-byte", _replace_each_byte)


class Detokenizer(Protocol):
    """Turns one sequence's ids into text. Bytes that never become a character are never shown."""

    def feed(self, token_ids: Sequence[int]) -> str: ...

    def reopen_prompt(self) -> int:
        """Move an unfinished character from the prompt's end to the answer, which emits it when
        complete.

        Return the number of U+FFFD that stand for it in the prompt's text.
        """


class DetokenizerFactory(Protocol):
    """A tokenizer's decoder, of single tokens and of growing sequences."""

    def token_bytes(self, token_id: int) -> bytes:
        """The token's own bytes in running text; b"" for an id outside the vocabulary."""

    def start(
        self,
        prompt_ids: Sequence[int],
        *,
        skip_special_tokens: bool,
        spaces_between_special_tokens: bool = True,
        shown_ids: frozenset[int] = frozenset(),
    ) -> Detokenizer:
        """Make a detokenizer for the tokens after the prompt.

        Without `spaces_between_special_tokens`, two special tokens have no space between them, even
        if the decoder puts spaces between tokens. Tokens in `shown_ids` are always shown.
        """


# ---- Decoders that work token by token ---------------------------------------------------------


class ByteTable:
    """The bytes of every token, filled in as tokens appear.

    With `per_byte`, each invalid byte becomes a U+FFFD, as in sentencepiece; otherwise each run of
    invalid bytes becomes one. `strip_left` is the number of spaces that the decoder strips from a
    text's beginning.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        byte_level: bool,
        replacements: Sequence[tuple[str, str]] = (),
        strip_left: int = 0,
    ) -> None:
        self._tokenizer = tokenizer
        self._byte_level = byte_level
        self._replacements = tuple(replacements)
        self._special_ids = special_ids(tokenizer)
        self._bytes: dict[int, bytes] = {}
        self._shown_bytes: dict[int, bytes] = {}
        # The keys are the sets of special tokens that are shown. A model has few such sets.
        self._showing: dict[frozenset[int], Callable[[int], bytes]] = {}
        self.per_byte = not byte_level
        self.strip_left = strip_left

    def token_bytes(self, token_id: int) -> bytes:
        data = self._bytes.get(token_id)
        if data is None:
            data = self._bytes[token_id] = self._convert(token_id)
        return data

    def shown_bytes(self, token_id: int) -> bytes:
        """Return `token_bytes`, but b"" for special tokens."""
        data = self._shown_bytes.get(token_id)
        if data is None:
            hidden = token_id in self._special_ids
            data = self._shown_bytes[token_id] = b"" if hidden else self.token_bytes(token_id)
        return data

    def start(
        self,
        prompt_ids: Sequence[int],
        *,
        skip_special_tokens: bool,
        spaces_between_special_tokens: bool = True,
        shown_ids: frozenset[int] = frozenset(),
    ) -> ByteDetokenizer:
        # Byte decoders add no spaces, so `spaces_between_special_tokens` has no effect.
        if not skip_special_tokens:
            return ByteDetokenizer(self, prompt_ids, self.token_bytes)
        bytes_of = self._showing_bytes(shown_ids) if shown_ids else self.shown_bytes
        return ByteDetokenizer(self, prompt_ids, bytes_of)

    def _showing_bytes(self, shown_ids: frozenset[int]) -> Callable[[int], bytes]:
        """Return a `shown_bytes` that also shows the tokens in `shown_ids`."""
        bytes_of = self._showing.get(shown_ids)
        if bytes_of is None:
            known: dict[int, bytes] = {}

            def bytes_of(token_id: int) -> bytes:
                data = known.get(token_id)
                if data is None:
                    one_of = self.token_bytes if token_id in shown_ids else self.shown_bytes
                    data = known[token_id] = one_of(token_id)
                return data

            self._showing[shown_ids] = bytes_of
        return bytes_of

    def _convert(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(token_id) if 0 <= token_id < 2**32 else None
        if token is None:
            return b""
        return _byte_level_bytes(token) if self._byte_level else self._fallback_bytes(token)

    def _fallback_bytes(self, token: str) -> bytes:
        for old, new in self._replacements:
            token = token.replace(old, new)
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            try:
                return bytes([int(token[3:5], 16)])
            except ValueError:
                pass
        return token.encode()


def _byte_characters() -> dict[str, int]:
    """Map each printable character to the byte that it stands for in byte-level BPE."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    characters = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in printable)
    characters.update((chr(0x100 + index), byte) for index, byte in enumerate(others))
    return characters


_BYTE_CHARACTERS = _byte_characters()


def _byte_level_bytes(token: str) -> bytes:
    try:
        return bytes([_BYTE_CHARACTERS[character] for character in token])
    except KeyError:
        # A token outside the byte characters is an added token, in plain text.
        return token.encode()


class ByteDetokenizer:
    __slots__ = ("_bytes_of", "_decoder", "_drop", "_strip")

    def __init__(
        self, table: ByteTable, prompt_ids: Sequence[int], bytes_of: Callable[[int], bytes]
    ) -> None:
        self._bytes_of = bytes_of
        errors = "penstock-each-byte" if table.per_byte else "replace"
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors)
        tail = self._prompt_tail(prompt_ids)
        self._decoder.decode(tail)
        # A prompt longer than the searched tail is assumed to have text before it.
        begins_text = not tail and len(prompt_ids) <= _PROMPT_TAIL_TOKENS
        self._strip = table.strip_left if begins_text else 0
        # The number of U+FFFD that the prompt shows for an unfinished character. The answer drops
        # them.
        self._drop = len(self._decoder.getstate()[0].decode("utf-8", errors))

    def _prompt_tail(self, prompt_ids: Sequence[int]) -> bytes:
        tail = b""
        for token_id in reversed(prompt_ids[-_PROMPT_TAIL_TOKENS:]):
            tail = self._bytes_of(token_id) + tail
            if len(tail) >= _UTF8_TAIL_BYTES:
                break
        return tail

    def feed(self, token_ids: Sequence[int]) -> str:
        bytes_of = self._bytes_of
        if len(token_ids) == 1:
            data = bytes_of(token_ids[0])
        else:
            data = b"".join([bytes_of(token_id) for token_id in token_ids])
        text = self._decoder.decode(data)
        if text and (self._strip or self._drop):
            return self._first_text(text)
        return text

    def reopen_prompt(self) -> int:
        drop, self._drop = self._drop, 0
        return drop

    def _first_text(self, text: str) -> str:
        text = _without_first(text, self.reopen_prompt())
        while self._strip and text.startswith(" "):
            text = text[1:]
            self._strip -= 1
        if text:
            self._strip = 0
        return text


def _without_first(text: str, shown: int) -> str:
    """Remove the first character, which began in the prompt and was shown there as `shown`
    U+FFFD.
    """
    broken = len(text) - len(text.lstrip(REPLACEMENT))
    return text[min(broken, shown) or 1 :] if shown else text


# ---- Decoders that look at neighbours ----------------------------------------------------------


class WindowTable:
    """Works with any decoder, because it calls the tokenizer with a few tokens of context."""

    def __init__(self, tokenizer: Tokenizer, *, has_bytes: bool) -> None:
        self.tokenizer = tokenizer
        # True if U+FFFD at the end of a window may be an incomplete character.
        self.has_bytes = has_bytes
        self._bytes: dict[int, bytes] = {}
        self._special_ids = special_ids(tokenizer)
        # A word put before a token, so that the token is not decoded as a text's first.
        self._anchor = list(tokenizer.encode("a", add_special_tokens=False).ids)

    def token_bytes(self, token_id: int) -> bytes:
        data = self._bytes.get(token_id)
        if data is None:
            anchor = self._anchor
            before = self.decode(anchor, skip_special=False)
            after = self.decode([*anchor, token_id], skip_special=False)
            data = self._bytes[token_id] = after[len(before) :].encode()
        return data

    def hides(
        self, token_id: int, *, skip_special: bool, shown_ids: frozenset[int] = frozenset()
    ) -> bool:
        if skip_special and token_id in self._special_ids and token_id not in shown_ids:
            return True
        return not 0 <= token_id < 2**32 or self.tokenizer.id_to_token(token_id) is None

    def decode(self, token_ids: Sequence[int], *, skip_special: bool) -> str:
        known = [token_id for token_id in token_ids if 0 <= token_id < 2**32]
        return self.tokenizer.decode(known, skip_special_tokens=skip_special)

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special_ids

    def start(
        self,
        prompt_ids: Sequence[int],
        *,
        skip_special_tokens: bool,
        spaces_between_special_tokens: bool = True,
        shown_ids: frozenset[int] = frozenset(),
    ) -> WindowDetokenizer:
        return WindowDetokenizer(
            self,
            prompt_ids,
            skip_special=skip_special_tokens,
            joins_special=not spaces_between_special_tokens,
            shown_ids=shown_ids,
        )


class WindowDetokenizer:
    """Decodes a window that ends with the new token, and emits the text that was not emitted
    before.

    It takes single tokens, so that the text does not depend on how tokens were bundled.
    """

    __slots__ = (
        "_after_special",
        "_context",
        "_context_text",
        "_drop",
        "_held",
        "_hides_special",
        "_joins_special",
        "_shown_ids",
        "_skip",
        "_table",
    )

    _context: list[int]
    _context_text: str
    _held: list[int]

    def __init__(
        self,
        table: WindowTable,
        prompt_ids: Sequence[int],
        *,
        skip_special: bool,
        joins_special: bool,
        shown_ids: frozenset[int],
    ) -> None:
        self._table = table
        self._hides_special, self._shown_ids = skip_special, shown_ids
        # Hidden tokens never enter a window. So if some special tokens are shown, the decoder
        # itself must skip none.
        self._skip = skip_special and not shown_ids
        self._joins_special = joins_special
        self._after_special = False
        visible = [
            token_id for token_id in prompt_ids[-_PROMPT_TAIL_TOKENS:] if not self._hides(token_id)
        ]
        self._drop = 0
        if table.has_bytes:
            self._begin_with_bytes(visible)
        else:
            self._remember(visible[-_WINDOW_TOKENS:])

    def _begin_with_bytes(self, visible: list[int]) -> None:
        """Separate the tokens of an unfinished character from the prompt's text."""
        for unfinished in range(min(_UTF8_TAIL_BYTES, len(visible) + 1)):
            end = len(visible) - unfinished
            self._remember(visible[:end])
            if not self._context_text.endswith(REPLACEMENT):
                self._held = visible[end:]
                self._drop = len(self._table.decode(self._held, skip_special=self._skip))
                return
        self._remember(visible)

    def feed(self, token_ids: Sequence[int]) -> str:
        if self._joins_special:
            return "".join([self._joined_step(token_id) for token_id in token_ids])
        return "".join([self._step(token_id) for token_id in token_ids])

    def reopen_prompt(self) -> int:
        drop, self._drop = self._drop, 0
        return drop

    def _hides(self, token_id: int) -> bool:
        hides, shown_ids = self._hides_special, self._shown_ids
        return self._table.hides(token_id, skip_special=hides, shown_ids=shown_ids)

    def _joined_step(self, token_id: int) -> str:
        text = self._step(token_id)
        if text:
            special = self._table.is_special(token_id)
            text = text.lstrip(" ") if special and self._after_special else text
            self._after_special = special
        return text

    def _step(self, token_id: int) -> str:
        if self._hides(token_id):
            return ""
        self._held.append(token_id)
        window = self._context + self._held
        text = self._table.decode(window, skip_special=self._skip)
        overdue = len(self._held) >= _MAX_HELD_TOKENS
        if self._table.has_bytes and text.endswith(REPLACEMENT) and not overdue:
            return ""
        new = text[_common_length(self._context_text, text) :]
        if new or overdue:
            # A run of byte tokens is decoded as a whole, so the context must not begin within a
            # character. The held tokens begin at a character's start.
            self._remember(self._held if self._table.has_bytes else window[-_WINDOW_TOKENS:])
        return _without_first(new, self.reopen_prompt()) if new and self._drop else new

    def _remember(self, context: Sequence[int]) -> None:
        """Begin a window with `context`, which is already emitted; the next tokens follow it."""
        self._held = []
        self._context = list(context)
        self._context_text = self._table.decode(self._context, skip_special=self._skip)


def _common_length(known: str, text: str) -> int:
    """Count the characters of `text` that were already emitted."""
    if text.startswith(known):
        return len(known)
    return next(
        (index for index, pair in enumerate(zip(known, text, strict=False)) if pair[0] != pair[1]),
        min(len(known), len(text)),
    )


# ---- Which implementation suits a tokenizer ----------------------------------------------------


def special_ids(tokenizer: Tokenizer) -> frozenset[int]:
    added = tokenizer.get_added_tokens_decoder()
    return frozenset(token_id for token_id, token in added.items() if token.special)


def make_detokenizers(
    tokenizer: Tokenizer, decoder: Mapping[str, Any] | None
) -> DetokenizerFactory:
    """Choose the implementation for `decoder`, a section of tokenizer.json."""
    steps = list(_flattened(decoder))
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        return ByteTable(tokenizer, byte_level=True)
    by_token = _sentencepiece_shape(steps)
    if by_token is not None:
        replacements, strip_left = by_token
        return ByteTable(
            tokenizer, byte_level=False, replacements=replacements, strip_left=strip_left
        )
    return WindowTable(tokenizer, has_bytes="ByteFallback" in kinds or "ByteLevel" in kinds)


def _flattened(decoder: Mapping[str, Any] | None) -> Iterable[Mapping[str, Any]]:
    if decoder is None:
        return
    if decoder.get("type") == "Sequence":
        for step in decoder.get("decoders", ()):
            yield from _flattened(step)
    else:
        yield decoder


def _sentencepiece_shape(
    steps: Sequence[Mapping[str, Any]],
) -> tuple[list[tuple[str, str]], int] | None:
    """Return (replacements, strip_left) if the steps are Replace*, ByteFallback, Fuse and perhaps
    Strip; else None.
    """
    rest = list(steps)
    replacements: list[tuple[str, str]] = []
    while rest and rest[0].get("type") == "Replace" and "String" in rest[0].get("pattern", {}):
        step = rest.pop(0)
        replacements.append((step["pattern"]["String"], step["content"]))
    kinds = [step.get("type") for step in rest]
    if kinds == ["ByteFallback", "Fuse"]:
        return replacements, 0
    if kinds == ["ByteFallback", "Fuse", "Strip"]:
        strip = rest[2]
        if strip.get("content") == " " and not strip.get("stop"):
            return replacements, int(strip.get("start", 0))
    return None
