"""Marks that are tokens of a tokenizer are told from the same text by other tokens."""

from __future__ import annotations

import pytest
from support.budget import budget, seeded
from support.router_doubles import byte_level_tokenizer, id_of, model_files
from tokenizers import AddedToken, Tokenizer

from penstock_router.text.marks import NO_MARKS, TOKEN, MarkingDetokenizer, Marks, plain
from penstock_router.text.tokenizer import Tokenizer as RouterTokenizer
from penstock_router.text.tokenizer import load_tokenizer

# The second is in the vocabulary and not special, the third is in no vocabulary.
SPECIAL, ADDED, NONE = "<call>", "</call>", "<other>"


@pytest.fixture(scope="module")
def fast() -> Tokenizer:
    fast = byte_level_tokenizer()
    fast.add_special_tokens([AddedToken(SPECIAL, special=True)])
    fast.add_tokens([AddedToken(ADDED, special=False)])
    return fast


@pytest.fixture(scope="module")
def tokenizer(fast: Tokenizer) -> RouterTokenizer:
    return load_tokenizer(model_files(fast))


@pytest.fixture
def marks(tokenizer: RouterTokenizer) -> Marks:
    return tokenizer.marks_among((SPECIAL, ADDED, NONE))


def started(tokenizer: RouterTokenizer, marks: Marks) -> MarkingDetokenizer:
    shown = tokenizer.special_ids_of((SPECIAL, ADDED, NONE))
    return MarkingDetokenizer(
        tokenizer.detokenizers.start(
            [5],
            skip_special_tokens=True,
            spaces_between_special_tokens=False,
            shown_ids=shown,
        ),
        marks,
    )


def spelled(text: str) -> list[int]:
    """The text by tokens of which none is a mark."""
    return byte_level_tokenizer().encode(text, add_special_tokens=False).ids


def test_marks_are_those_that_were_added_to_the_vocabulary(fast: Tokenizer, marks: Marks) -> None:
    assert marks.tokens == {id_of(fast, SPECIAL): SPECIAL, id_of(fast, ADDED): ADDED}
    assert marks.spelled(SPECIAL) == TOKEN + SPECIAL
    assert marks.spelled(ADDED) == TOKEN + ADDED
    assert marks.spelled(NONE) == NONE
    assert NO_MARKS.spelled(SPECIAL) == SPECIAL


def test_what_is_shown_has_no_sign_of_tokens() -> None:
    assert plain(f"a{TOKEN}<call>b{TOKEN}") == "a<call>b"
    assert plain("a<call>b") == "a<call>b"


def test_only_the_token_of_a_mark_is_told_apart(
    fast: Tokenizer, tokenizer: RouterTokenizer, marks: Marks
) -> None:
    ids = [
        *spelled(f"a {SPECIAL} b"),
        id_of(fast, SPECIAL),
        id_of(fast, ADDED),
        *spelled(f"c{ADDED}{NONE}"),
    ]
    wanted = f"a {SPECIAL} b{TOKEN}{SPECIAL}{TOKEN}{ADDED}c{ADDED}{NONE}"
    assert started(tokenizer, marks).feed(ids) == wanted
    one_by_one = started(tokenizer, marks)
    assert "".join([one_by_one.feed([token_id]) for token_id in ids]) == wanted


def test_a_special_token_that_is_no_mark_stays_hidden(
    fast: Tokenizer, tokenizer: RouterTokenizer, marks: Marks
) -> None:
    ids = [id_of(fast, "<|im_start|>"), id_of(fast, SPECIAL), id_of(fast, "<|im_end|>")]
    assert started(tokenizer, marks).feed(ids) == TOKEN + SPECIAL


def test_a_character_that_a_mark_breaks_off_stands_before_it(
    fast: Tokenizer, tokenizer: RouterTokenizer, marks: Marks
) -> None:
    first, *others = spelled("🌧")
    assert others
    detokenizer = started(tokenizer, marks)
    text = detokenizer.feed([first]) + detokenizer.feed([id_of(fast, SPECIAL)])
    assert text == f"\ufffd{TOKEN}{SPECIAL}"


def test_text_and_tokens_at_random_are_told_apart_however_they_are_bundled(
    fast: Tokenizer, tokenizer: RouterTokenizer, marks: Marks
) -> None:
    rng = seeded("bundles")
    for _ in range(budget(100, 5_000)):
        ids: list[int] = []
        wanted = ""
        for _ in range(rng.randint(0, 8)):
            mark = rng.choice([SPECIAL, ADDED])
            if rng.random() < 0.5:
                ids.append(id_of(fast, mark))
                wanted += TOKEN + mark
            else:
                text = rng.choice([mark, mark[:-1], mark[1:], "日", " a", "🌧\n"])
                ids += spelled(text)
                wanted += text
        cuts = sorted(rng.choices(range(len(ids) + 1), k=rng.randint(0, 5)))
        parts = [ids[a:b] for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True)]
        detokenizer = started(tokenizer, marks)
        assert "".join([detokenizer.feed(part) for part in parts]) == wanted, (ids, cuts)
