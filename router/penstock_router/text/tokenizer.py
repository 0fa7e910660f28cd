"""Turns text into token ids, and reads other facts from tokenizer.json.

The library's `encode` holds the interpreter lock, and so blocks the process. `encode_batch_fast`,
used here, releases it. Text that cannot fit is refused by its length, before tokenization.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec
from tokenizers import Tokenizer as FastTokenizer

from penstock_router.errors import BadRequest, ContextExceeded
from penstock_router.text.detokenizer import DetokenizerFactory, make_detokenizers, special_ids
from penstock_router.text.marks import Marks
from penstock_router.text.text_parts import PART_CHARS, TextParts

# More characters than fit any context.
MAX_TEXT_CHARS = 8_000_000

# Counting the tokens of a too long prompt stops at this multiple of the limit.
_MAX_COUNTED = 2

# Unicode's composition can turn four characters into one.
_COMPOSITION_FACTOR = 4


# A token's id, the index of its first character, and the index after its last.
TokenPlace = tuple[int, int, int]


class TokenizerUnusable(Exception):
    """Raised if tokenizer.json does not load; the text says why."""


@dataclass(frozen=True, slots=True)
class Truncation:
    """Keeps `max_tokens` of a prompt, and cuts off the rest at `side`, "left" or "right"."""

    max_tokens: int
    side: str

    def cut(self, token_ids: list[int]) -> list[int]:
        if self.side == "left":
            return token_ids[max(0, len(token_ids) - self.max_tokens) :]
        return token_ids[: self.max_tokens]


class _ModelPart(msgspec.Struct):
    type: str = ""
    byte_fallback: bool | None = False


class _TokenizerFile(msgspec.Struct):
    """The parts of tokenizer.json needed here; the vocabulary is skipped."""

    model: _ModelPart
    decoder: dict[str, Any] | None = None
    normalizer: dict[str, Any] | None = None
    pre_tokenizer: dict[str, Any] | None = None


_TOKENIZER_FILES = msgspec.json.Decoder(_TokenizerFile)


class Tokenizer:
    """The tokenizer of one model. It holds no state of requests."""

    def __init__(self, data: bytes, config: Mapping[str, Any] | None = None) -> None:
        """Load a tokenizer; `config` is the content of tokenizer_config.json."""
        # Texts are encoded one at a time, so the library's threads have nothing to do.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        try:
            self._parts = _TOKENIZER_FILES.decode(data)
            self._fast = FastTokenizer.from_buffer(data)
        except Exception as error:  # noqa: BLE001 - the library raises bare Exception
            raise TokenizerUnusable(f"tokenizer.json does not load: {error}") from None
        # tokenizer.json may carry settings from training, which would truncate or pad prompts.
        self._fast.no_truncation()
        self._fast.no_padding()
        self.config = dict(config or {})
        # The default is that of transformers: "right" cuts off the end.
        self.truncation_side = "left" if self.config.get("truncation_side") == "left" else "right"
        self._max_token_bytes: int | None = None
        self.detokenizers: DetokenizerFactory = make_detokenizers(self._fast, self._parts.decoder)
        self.special_ids = special_ids(self._fast)
        self._marks: dict[tuple[str, ...], frozenset[int]] = {}
        self._marks_among: dict[tuple[str, ...], Marks] = {}
        self._text_parts = TextParts(self._fast, self._parts.model.type)
        self.token_bytes = self.detokenizers.token_bytes
        if self._length_bounds_tokens:
            self._max_token_bytes = self._longest_token()

    @property
    def _length_bounds_tokens(self) -> bool:
        """Tell whether a text of n characters surely has at least n / (longest token) tokens.

        False if unknown characters or a whole word may become one token, or the normalizer may
        shorten the text.
        """
        if not _keeps_length(self._parts.normalizer):
            return False
        model, pre_tokenizer = self._parts.model, str(self._parts.pre_tokenizer)
        return model.type == "BPE" and (bool(model.byte_fallback) or "ByteLevel" in pre_tokenizer)

    def _longest_token(self) -> int:
        lengths = (
            len(self._fast.id_to_token(token_id) or "")
            for token_id in range(self._fast.get_vocab_size())
        )
        composes = "NF" in str(self._parts.normalizer)
        return max(lengths, default=1) * (_COMPOSITION_FACTOR if composes else 1)

    def max_chars(self, num_tokens: int) -> int | None:
        """The maximum characters of `num_tokens` tokens; None if there is no bound."""
        return None if self._max_token_bytes is None else num_tokens * self._max_token_bytes

    def encode(
        self,
        texts: Sequence[str],
        *,
        add_special_tokens: bool,
        max_tokens: int,
        truncation: Truncation | None = None,
    ) -> list[list[int]]:
        """Tokenize each text. Raises `ContextExceeded` for a text of more than `max_tokens`."""
        for text in texts:
            if truncation is None:
                self._refuse_by_length(text, max_tokens)
            if len(text) > MAX_TEXT_CHARS:
                raise BadRequest(
                    f"a text has {len(text)} characters; at most {MAX_TEXT_CHARS} are tokenized"
                )
        if truncation is not None:
            return [self._cut(text, add_special_tokens, truncation) for text in texts]
        return [self._whole(text, add_special_tokens, max_tokens) for text in texts]

    def _whole(self, text: str, add_special_tokens: bool, max_tokens: int) -> list[int]:
        if len(text) <= PART_CHARS:
            [encoding] = self._fast.encode_batch_fast([text], add_special_tokens=add_special_tokens)
            # Check before `ids`, which builds every integer under the interpreter lock.
            if len(encoding) > max_tokens:
                raise prompt_too_long(len(encoding), max_tokens)
            return encoding.ids
        before, after = self.special_around if add_special_tokens else ([], [])
        ids, num_tokens = [*before], len(before) + len(after)
        for part in self._text_parts.of(text):
            num_tokens += part.num_tokens
            if num_tokens > _MAX_COUNTED * max_tokens:
                raise prompt_too_long(num_tokens, max_tokens, at_least=True)
            if num_tokens <= max_tokens:
                ids += part.ids
        if num_tokens > max_tokens:
            raise prompt_too_long(num_tokens, max_tokens)
        return ids + after

    def _cut(self, text: str, add_special_tokens: bool, truncation: Truncation) -> list[int]:
        """Cut a text, then add special tokens, as transformers does. The library's own truncation
        would apply to all requests.
        """
        before, after = self.special_around if add_special_tokens else ([], [])
        room = Truncation(max(0, truncation.max_tokens - len(before) - len(after)), truncation.side)
        ids = self._text_parts.end_of(text, room.max_tokens, room.side)
        if ids is None:
            ids = []
            for part in self._text_parts.of(text):
                ids = room.cut(ids + part.ids)
        return truncation.cut([*before, *room.cut(ids), *after])

    @cached_property
    def special_around(self) -> tuple[list[int], list[int]]:
        """The ids that are added before and after a text."""
        bare = self._fast.encode("a", add_special_tokens=False).ids
        whole = self._fast.encode("a", add_special_tokens=True).ids
        num_added = len(whole) - len(bare)
        fits = (num for num in range(num_added + 1) if whole[num : num + len(bare)] == bare)
        num_before = next(fits, num_added)
        return whole[:num_before], whole[num_before + len(bare) :]

    def places(self, text: str, *, add_special_tokens: bool, at_most: int) -> list[TokenPlace]:
        """Return the place of each token of a text; slow for a long text. Raises `BadRequest` for
        more than `at_most` tokens.
        """
        # `encode_batch_fast` keeps no offsets.
        [encoding] = self._fast.encode_batch([text], add_special_tokens=add_special_tokens)
        check_num_shown(len(encoding), at_most)
        pairs = zip(encoding.ids, encoding.offsets, strict=True)
        return [(token_id, start, stop) for token_id, (start, stop) in pairs]

    def _refuse_by_length(self, text: str, max_tokens: int) -> None:
        max_chars = self.max_chars(max_tokens)
        if max_chars is not None and len(text) > max_chars:
            raise ContextExceeded(
                f"This model's maximum context length is {max_tokens} tokens. However, your "
                f"prompt contains {len(text)} characters, more than the {max_chars} that could "
                "fit. Please reduce the length of the input prompt.",
                limit_tokens=max_tokens,
                prompt_chars=len(text),
            )

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        known = [token_id for token_id in token_ids if token_id < 2**32]
        return self._fast.decode(known, skip_special_tokens=skip_special_tokens)

    def token_id(self, text: str) -> int | None:
        """Return the id of the token with exactly this text, or None."""
        return self._fast.token_to_id(text)

    def special_ids_of(self, texts: tuple[str, ...]) -> frozenset[int]:
        """Return the ids of the texts that are special tokens, which decoding would skip."""
        found = self._marks.get(texts)
        if found is None:
            ids = {self._fast.token_to_id(text) for text in texts}
            found = self._marks[texts] = self.special_ids & ids
        return found

    def marks_among(self, texts: tuple[str, ...]) -> Marks:
        """Return the texts that are added tokens, as marks."""
        found = self._marks_among.get(texts)
        if found is None:
            added = self._fast.get_added_tokens_decoder()
            tokens = {id_: token.content for id_, token in added.items() if token.content in texts}
            found = self._marks_among[texts] = Marks(tokens)
        return found

    def token_text(self, token_id: int) -> str:
        """The text of one token within a text, special tokens included."""
        return self.token_bytes(token_id).decode("utf-8", "replace")


def _keeps_length(normalizer: Mapping[str, Any] | None) -> bool:
    """Tell whether a normalizer is known not to change a text's length, except by composition."""
    if normalizer is None:
        return True
    kind = normalizer.get("type")
    if kind == "Sequence":
        return all(_keeps_length(step) for step in normalizer.get("normalizers", ()))
    if kind == "Replace":
        pattern = normalizer.get("pattern", {}).get("String")
        return bool(pattern) and len(normalizer.get("content", "")) >= len(pattern)
    return kind in ("NFC", "NFD", "NFKC", "NFKD", "Prepend")


def check_num_shown(num_tokens: int, at_most: int) -> None:
    """Raise `BadRequest` for more tokens than can be shown with their places."""
    if num_tokens > at_most:
        raise BadRequest(f"the text has {num_tokens} tokens; at most {at_most} are shown")


def prompt_too_long(num_tokens: int, max_tokens: int, *, at_least: bool = False) -> ContextExceeded:
    """Make the error, in words that clients of OpenAI-compatible servers recognise; with
    `at_least`, counting stopped at `num_tokens`.
    """
    given = f"at least {num_tokens}" if at_least else num_tokens
    return ContextExceeded(
        f"This model's maximum context length is {max_tokens} tokens. However, your prompt "
        f"contains {given} input tokens, which exceeds this limit even without any output "
        "tokens. Please reduce the length of the input prompt.",
        limit_tokens=max_tokens,
        prompt_tokens=num_tokens,
    )


def load_tokenizer(files: Mapping[str, bytes]) -> Tokenizer:
    if "tokenizer.json" not in files:
        raise TokenizerUnusable("the shard sent no tokenizer.json")
    try:
        config = msgspec.json.decode(files.get("tokenizer_config.json") or b"{}")
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        raise TokenizerUnusable("tokenizer_config.json is not valid JSON") from None
    return Tokenizer(files["tokenizer.json"], config if isinstance(config, dict) else {})
