"""Compiles constraints to matchers for a model's vocabulary; caches them by content."""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict, abc
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from penstock_proto.types import Constraint
from penstock_shard.config import ConstraintLimits
from penstock_shard.structured_output.distinct.distinct import Distinct
from penstock_shard.structured_output.distinct.vocabulary import Vocabulary
from penstock_shard.structured_output.distinct.watched import Watched
from penstock_shard.structured_output.grammars import grammar_of, holds_grammar, watched_of
from penstock_shard.structured_output.pace import Pace
from penstock_shard.structured_output.refusal import ConstraintRefused, reason_of

# Memory of a lexer state, by llguidance's documentation. We measured 360 to 1,830 bytes with
# expensive regexes.
_BYTES_PER_STATE = 2048
_MOST_STATES = 250_000
# Bounds of a grammar's positions (Earley items): those after the text so far, and those examined
# for one mask. In callers' ambiguous grammars, positions grow with the text; in other constraints
# their length bounds them. Work grows at least with the square; within these bounds, a token took
# at most about 10 ms. Of 400 schemas in use, one needs over 1,000 positions, none over 2,000 for
# one mask. With bounds on time, shards would end the same output at different tokens.
_MOST_POSITIONS, _MOST_POSITIONS_A_MASK = 1_000, 5_000
_MOST_POSITIONS_OF_GRAMMARS, _MOST_POSITIONS_A_MASK_OF_GRAMMARS = 500, 2_500
# Fuel is llguidance's unit of work; 50,000 units take a millisecond by its documentation.
_FUEL_PER_S = 2_000_000
# Bounds of the cached templates: number, text and memory. A 5 kB schema's template takes about 1
# MB. Its lexer grows with use; llguidance does not report the size, so the maximum counts.
_MOST_KEPT = 64
_KEPT_TEXT_BYTES = 8 << 20
_KEPT_MEMORY_BYTES = 4 << 30


class TokenizerUnusable(Exception):
    """llguidance cannot read the model's tokenizer; the message is one line."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split())[:300])


@dataclass(slots=True)
class _Kept:
    """A template that is copied for each request.

    `watched`: rules that no grammar can express. `wears_out`: an earlier template of this
    constraint has reached its limits.
    """

    template: LLMatcher
    watched: dict[str, Watched]
    pace: Pace
    wears_out: bool = False


class Compiler:
    """Compiles constraints for one model. Thread-safe."""

    def __init__(
        self,
        tokenizer_json: bytes,
        vocab_size: int,
        eos_token_ids: abc.Sequence[int],
        limits: ConstraintLimits,
    ) -> None:
        """Takes up to a second with a large vocabulary."""
        self._limits = limits
        self.special_tokens: dict[str, int] = {}
        self.tokenizer = self._made(tokenizer_json, vocab_size, eos_token_ids)
        self._most_kept = _most_kept(limits)
        self._kept: OrderedDict[Constraint, _Kept] = OrderedDict()
        self._kept_bytes = 0
        self._lock = threading.Lock()

    def compile(self, constraint: Constraint, *, goes_on: bool = False) -> LLMatcher:
        """A new matcher, which the caller owns. Raises ConstraintRefused.

        Matchers of equal constraints share a lexer and its limits: if one exceeds a limit, such as
        the number of lexer states, all fail. After that, a request that continues an output
        (`goes_on`) gets a matcher that shares nothing.
        """
        kept = self._find(constraint)
        if kept is None or is_worn_out(kept.template):
            kept = _Kept(
                self.compile_alone(constraint),
                self._watched(constraint),
                Pace() if kept is None else kept.pace,
                wears_out=kept is not None,
            )
            self._keep(constraint, kept)
        if goes_on and kept.wears_out:
            return self.compile_alone(constraint)
        return kept.template.deep_copy()

    def compile_alone(self, constraint: Constraint) -> LLMatcher:
        """A matcher that shares nothing. Raises ConstraintRefused, which names the kind."""
        try:
            return self._tried(constraint)
        except ConstraintRefused as error:
            raise ConstraintRefused(_named(constraint.kind, str(error))) from error

    def distinct(self, constraint: Constraint, beginning: LLMatcher) -> Distinct | None:
        """Return the `Distinct` of a constraint; None if it needs none. `beginning`: a matcher of
        the constraint that has consumed nothing.
        """
        kept = self._find(constraint)
        watched = self._watched(constraint) if kept is None else kept.watched
        return Distinct(watched, self.vocabulary, beginning.deep_copy()) if watched else None

    def pace(self, constraint: Constraint) -> Pace:
        """The pace shared by all sequences of a constraint."""
        kept = self._find(constraint)
        return Pace() if kept is None else kept.pace

    def _watched(self, constraint: Constraint) -> dict[str, Watched]:
        """Return the watched parts of a constraint. Refuse it if it has some and a sign of JSON is
        not one token.
        """
        found = watched_of(constraint, self.special_tokens)
        lacking = [sign for sign in '[]{},:"' if len(self.tokenizer.greedy_tokenize(sign)) != 1]
        if found and lacking:
            raise ConstraintRefused(f"{constraint.kind}: the vocabulary lacks a token {lacking[0]}")
        return found

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """The vocabulary, indexed. This takes half a second if it is large."""
        return Vocabulary(self.tokenizer)

    def _find(self, constraint: Constraint) -> _Kept | None:
        with self._lock:
            kept = self._kept.get(constraint)
            if kept is not None:
                self._kept.move_to_end(constraint)
            return kept

    def _tried(self, constraint: Constraint) -> LLMatcher:
        try:
            grammar = grammar_of(constraint, self.special_tokens)
        except RecursionError as error:
            raise ConstraintRefused("nests too deep") from error
        is_callers = holds_grammar(constraint, self.special_tokens)
        limits = _parser_limits(self._limits, is_callers=is_callers)
        matcher = LLMatcher(self.tokenizer, grammar, log_level=0, limits=limits)
        # Try two tokens now, to refuse a constraint that allows no text or exceeds the limits.
        allowed = _allowed(matcher)
        tried = matcher.deep_copy()
        if allowed:
            tried.consume_token(allowed[0])
            _allowed(tried)
        for each in (matcher, tried):
            if each.is_error():
                raise ConstraintRefused(reason_of(each.get_error()))
        if not allowed:
            raise ConstraintRefused("no text is allowed")
        return matcher

    def _keep(self, constraint: Constraint, kept: _Kept) -> None:
        with self._lock:
            if constraint not in self._kept:
                self._kept_bytes += _size(constraint)
            self._kept[constraint] = kept
            while len(self._kept) > self._most_kept or self._kept_bytes > _KEPT_TEXT_BYTES:
                oldest, _ = self._kept.popitem(last=False)
                self._kept_bytes -= _size(oldest)

    def _made(self, raw: bytes, vocab_size: int, eos_token_ids: abc.Sequence[int]) -> LLTokenizer:
        try:
            tokenizer = json.loads(raw)
            self.special_tokens = _marks_apart(tokenizer)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise TokenizerUnusable(f"tokenizer.json: {error}") from error
        if not eos_token_ids:
            raise TokenizerUnusable("the model has no token that ends a text")
        try:
            return LLTokenizer(
                json.dumps(tokenizer), n_vocab=vocab_size, eos_token=list(eos_token_ids)
            )
        except (ValueError, OverflowError) as error:
            raise TokenizerUnusable(str(error)) from error


def is_worn_out(template: LLMatcher) -> bool:
    """True if the template's lexer is at its limits. The template has consumed nothing."""
    tried = template.deep_copy()
    tried.compute_bitmask()
    return bool(tried.is_error())


def _allowed(matcher: LLMatcher) -> list[int]:
    """The allowed token with the lowest id, if any. This may put the matcher into an error."""
    if matcher.is_error():
        return []
    mask = int.from_bytes(matcher.compute_bitmask(), "little")
    return [(mask & -mask).bit_length() - 1] if mask else []


def _parser_limits(limits: ConstraintLimits, *, is_callers: bool) -> LLParserLimits:
    positions, a_mask = _MOST_POSITIONS, _MOST_POSITIONS_A_MASK
    if is_callers:
        positions, a_mask = _MOST_POSITIONS_OF_GRAMMARS, _MOST_POSITIONS_A_MASK_OF_GRAMMARS
    return LLParserLimits(
        max_items_in_row=positions,
        step_max_items=a_mask,
        initial_lexer_fuel=int(_FUEL_PER_S * limits.timeout_s),
        max_lexer_states=_most_states(limits),
        verbose_errors=False,
    )


def _most_states(limits: ConstraintLimits) -> int:
    return min(limits.memory_bytes // _BYTES_PER_STATE, _MOST_STATES)


def _most_kept(limits: ConstraintLimits) -> int:
    most_bytes = max(1, _most_states(limits)) * _BYTES_PER_STATE
    return max(1, min(_KEPT_MEMORY_BYTES // most_bytes, _MOST_KEPT))


def _marks_apart(tokenizer: dict[str, Any]) -> dict[str, int]:
    """Return text and id of the special tokens, which stand for themselves and never for text.

    llguidance treats every added token as special. But many tokenizers add letters or runs of
    spaces; such tokens are moved to the ordinary vocabulary.
    """
    marks, kept = {}, []
    for token in tokenizer.get("added_tokens") or []:
        if token["special"] or not _put_into_vocabulary(tokenizer, token):
            marks[token["content"]] = token["id"]
            kept.append(token)
    tokenizer["added_tokens"] = kept
    return marks


def _put_into_vocabulary(tokenizer: dict[str, Any], token: dict[str, Any]) -> bool:
    vocabulary = tokenizer["model"].get("vocab")
    content = token["content"]
    if _MARK.search(content) or not isinstance(vocabulary, dict):
        return False
    name = _spelled(tokenizer, content)
    return bool(vocabulary.setdefault(name, token["id"]) == token["id"])


# Added tokens with these characters are special: <think>, [INST], <|im_end|>, 「」.
_MARK = re.compile(r"[<>\[\]|｜「」]")


def _spelled(tokenizer: dict[str, Any], text: str) -> str:
    """Spell a text as the vocabulary does."""
    decoder = json.dumps(tokenizer.get("decoder"), ensure_ascii=False)
    if '"ByteLevel"' in decoder:
        return "".join(_BYTE_LETTERS[byte] for byte in text.encode())
    return text.replace(" ", "▁") if "▁" in decoder else text


def _byte_letters() -> list[str]:
    """Return the letter for each byte in byte-level vocabularies."""
    own = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in own)
    letters = {byte: chr(256 + index) for index, byte in enumerate(others)}
    return [letters.get(byte, chr(byte)) for byte in range(256)]


_BYTE_LETTERS = _byte_letters()


def _size(constraint: Constraint) -> int:
    texts = (constraint.value, *constraint.options)
    return sum(len(text.encode(errors="surrogatepass")) for text in texts)


def _named(kind: str, reason: str) -> str:
    return reason if reason.startswith(f"{kind}:") else f"{kind}: {reason}"
