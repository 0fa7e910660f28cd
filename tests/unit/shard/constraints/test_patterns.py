"""Patterns as sets of texts: read, combined, and written as patterns again."""

from __future__ import annotations

import random
import re
import time

import pytest
from support.budget import budget, seeded

from penstock_shard.structured_output.patterns.automaton import (
    all_found,
    all_texts_but,
    automaton,
    expression,
    without_looking,
)
from penstock_shard.structured_output.patterns.languages import Languages, TooLarge
from penstock_shard.structured_output.patterns.reader import language_of, may_match

# Patterns that mean the same in Python and in ECMA 262.
_PATTERNS = (
    *("", "a", "^a", "a$", "^a$", "^$", "a|b", "^a|b$", "^(a|b)$", "^(ab)*$", "^a+b?$"),
    *("^a{2}$", "^a{2,}$", "^(a|b){1,3}$", "a{0}b", "[ab]", "^[^ab]*$", "^[a-c]{2}$", "^[-a]$"),
    *(r"^\d\w$", r"\.a", r"^[\w.]+$", r"^\x61b$", "^.b$", r"\ba", r"a\b", r"\bab\b", r"^\Ba"),
    *("^(?!a)b", "^(?!ab).*$", "^(?!a$).+$", "^(?=ab).{2}$", "^((?!ab).)*$", "(?!a)b$"),
    *("^(?!a|b)", "^(?:(?!a)b)?c", "^(?=[ab]+$)(?=.*b).*$", "^(a(?=b)b|c)$", "^(?!.*aa)[ab]+$"),
    *("(^a|b)c", "a(b|$)", "^a*?b", "x*a", "[ab]{1,9}c"),
)
_LETTERS = "aabbc.-1 "


def _texts(rng: random.Random, count: int) -> list[str]:
    return ["".join(rng.choices(_LETTERS, k=rng.randint(0, 6))) for _ in range(count)]


@pytest.mark.parametrize("pattern", _PATTERNS)
def test_a_pattern_is_found_where_another_reader_finds_it(pattern: str) -> None:
    languages = Languages()
    language = language_of(languages, pattern)
    for text in _texts(seeded(pattern), budget(100, 5000)):
        assert languages.has(language, text) == bool(re.search(pattern, text)), text


@pytest.mark.parametrize("pattern", _PATTERNS)
def test_a_pattern_without_look_ahead_is_found_in_the_same_texts(pattern: str) -> None:
    try:
        plain = without_looking(pattern)
        others = all_texts_but(pattern)
    except TooLarge:
        # Every text is one, so that the others are none, or the other way about.
        assert pattern in ("", r"^\Ba")
        return
    # Python has no \u{...}, and no empty class.
    read = [re.compile(_python(each)) for each in (plain, others)]
    for text in _texts(seeded(pattern), budget(100, 5000)):
        found = bool(re.search(pattern, text))
        assert [bool(each.search(text)) for each in read] == [found, not found], text


def _python(pattern: str) -> str:
    pattern = pattern.replace("[^]", r"[\s\S]")
    return re.sub(r"\\u\{([0-9A-F]+)\}", lambda code: f"\\U{int(code[1], 16):08x}", pattern)


def test_patterns_are_combined() -> None:
    both = all_found(["^a", "b$", "c"])
    assert [may_match(both, text) for text in ("acb", "ab", "cb", "aacbb")] == [1, 0, 0, 1]


@pytest.mark.parametrize(
    ("pattern", "texts"),
    [
        ("^(a|bc)$", ["a", "bc"]),
        ("^[ab]?$", ["", "a", "b"]),
        ("^a{1,2}$", ["a", "aa"]),
        ("^(?!b$)[a-c]$", ["a", "c"]),
        ("^a+$", None),
        ("a", None),
        ("^[a-z]{2}$", None),
    ],
)
def test_the_texts_of_a_pattern_are_listed_if_they_are_few(
    pattern: str, texts: list[str] | None
) -> None:
    languages = Languages()
    assert automaton(languages, language_of(languages, pattern)).texts(64) == texts


@pytest.mark.parametrize(
    ("pattern", "told"),
    [
        ("(a", "a group is not closed"),
        ("a)", "unexpected ')'"),
        ("[a", "a class is not closed"),
        ("[b-a]", "is in no order"),
        ("*a", "nothing to repeat"),
        (r"(a)\1", r"\\1 is not served"),
        ("(?<=a)b", "look-behind"),
        ("a{3,2}", "bounds are in no order"),
        ("a{2000}", "over 1000"),
        ("^((?=a)b)+", "look-around in a repetition"),
    ],
)
def test_what_cannot_be_read_says_why(pattern: str, told: str) -> None:
    with pytest.raises(ValueError, match=told.replace("(", r"\(").replace(")", r"\)")):
        language_of(Languages(), pattern)


def test_a_language_that_would_take_long_is_given_up_early() -> None:
    languages = Languages()
    with pytest.raises(TooLarge):
        automaton(languages, language_of(languages, "^(a|b)*a(a|b){20}$"))
    few = automaton(languages, language_of(languages, "^(?!-)[-a-z0-9]{0,49}[a-z0-9]$"))
    with pytest.raises(TooLarge):
        expression(few)


def test_a_word_boundary_behind_many_parts_is_read_soon() -> None:
    languages = Languages()
    began_s = time.process_time()
    language = language_of(languages, "abcdefghijklmnopqrstuvwxyz" * 4 + r"\b[.-]\bx\b.\bend")
    assert languages.has(language, "abcdefghijklmnopqrstuvwxyz" * 4 + ".x-end")
    assert time.process_time() - began_s < 1.0


def test_random_patterns_are_found_where_another_reader_finds_them() -> None:
    rng = seeded("random patterns")
    for _ in range(budget(300, 20_000)):
        pattern = _random(rng, 3)
        languages = Languages()
        try:
            language = language_of(languages, pattern)
        except ValueError:
            continue
        for text in _texts(rng, 10):
            assert languages.has(language, text) == bool(re.search(pattern, text)), (pattern, text)


def _random(rng: random.Random, depth: int) -> str:
    if depth == 0:
        return rng.choice(["a", "b", ".", "[ab]", "[^a]", r"\w", "^", "$", r"\b", "-"])
    parts = [_random(rng, depth - 1) for _ in range(rng.randint(1, 3))]
    return rng.choice(
        [
            "".join(parts),
            "|".join(parts),
            f"(?:{parts[0]}){rng.choice(['*', '+', '?', '{1,2}', ''])}",
            f"(?{rng.choice('=!')}{parts[0]}){parts[-1]}",
        ]
    )
