"""Text to ids: limits before work, no state between requests."""

from __future__ import annotations

import asyncio
import functools
import json

import pytest
from support.budget import budget, seeded
from support.router_doubles import random_text
from tokenizers import Regex, normalizers
from tokenizers import Tokenizer as FastTokenizer

from penstock_router.errors import BadRequest
from penstock_router.text.tokenizer import (
    Tokenizer,
    TokenizerUnusable,
    load_tokenizer,
)


def loaded(fast: FastTokenizer) -> Tokenizer:
    return Tokenizer(fast.to_str().encode())


def test_short_and_long_texts_get_the_librarys_ids(
    byte_level: FastTokenizer, sentencepiece: FastTokenizer
) -> None:
    rng = seeded("encode")
    for fast in (byte_level, sentencepiece):
        tokenizer = loaded(fast)
        texts = [random_text(rng, 10), "the fox " * 2000, "x"]
        for special in (True, False):
            got = tokenizer.encode(texts, add_special_tokens=special, max_tokens=10**6)
            assert got == [fast.encode(text, add_special_tokens=special).ids for text in texts]


def test_text_that_cannot_fit_is_refused_before_it_is_tokenized(
    byte_level: FastTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = loaded(byte_level)
    limit = tokenizer.max_chars(100)
    assert limit is not None
    monkeypatch.setattr(tokenizer, "_fast", None)
    with pytest.raises(BadRequest, match=r"maximum context length is 100 tokens.*characters"):
        tokenizer.encode(["x" * (limit + 1)], add_special_tokens=True, max_tokens=100)


def test_no_text_has_fewer_tokens_than_its_length_promises(
    byte_level: FastTokenizer, sentencepiece: FastTokenizer
) -> None:
    rng = seeded("length")
    for fast in (byte_level, sentencepiece):
        tokenizer = loaded(fast)
        for _ in range(budget(300, 10_000)):
            text = random_text(rng, rng.randrange(1, 40))
            limit = tokenizer.max_chars(len(fast.encode(text, add_special_tokens=False)))
            assert limit is not None
            assert len(text) <= limit


def test_where_length_promises_nothing_nothing_is_refused_by_it(
    wordpiece: FastTokenizer, metaspace: FastTokenizer
) -> None:
    # A word of a thousand unknown characters is one token here.
    assert len(wordpiece.encode("ξ" * 1000)) == 1
    assert loaded(wordpiece).max_chars(1) is None
    assert loaded(metaspace).max_chars(1) is None


@pytest.mark.parametrize(
    ("normalizer", "bounds"),
    [
        (normalizers.NFC(), True),
        (normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]), True),
        (normalizers.Replace("ab", "a"), False),
        (normalizers.Replace(Regex(r"\s+"), " "), False),
        (normalizers.Strip(), False),
        (normalizers.Sequence([normalizers.NFC(), normalizers.Strip()]), False),
        (normalizers.StripAccents(), False),
    ],
)
def test_where_text_may_become_shorter_its_length_promises_nothing(
    byte_level: FastTokenizer,
    normalizer: normalizers.Normalizer,
    bounds: bool,
) -> None:
    fast = FastTokenizer.from_str(byte_level.to_str())
    fast.normalizer = normalizer
    assert (loaded(fast).max_chars(1) is not None) == bounds


def test_too_many_tokens_are_refused_with_their_number(byte_level: FastTokenizer) -> None:
    tokenizer = loaded(byte_level)
    count = len(byte_level.encode("a b c d e f"))
    with pytest.raises(BadRequest, match=f"contains {count} input tokens"):
        tokenizer.encode(["a b c d e f"], add_special_tokens=True, max_tokens=count - 1)


def test_truncation_and_padding_of_training_do_not_apply(byte_level: FastTokenizer) -> None:
    fast = FastTokenizer.from_str(byte_level.to_str())
    fast.enable_truncation(3)
    fast.enable_padding(length=64)
    tokenizer = loaded(fast)
    got = tokenizer.encode(["a b c d e f"], add_special_tokens=True, max_tokens=99)
    assert got == [byte_level.encode("a b c d e f").ids]


async def test_requests_at_once_do_not_disturb_one_another(byte_level: FastTokenizer) -> None:
    tokenizer = loaded(byte_level)
    texts = [f"number {n} " * (500 if n % 2 else 20) for n in range(10)]
    encode = functools.partial(tokenizer.encode, add_special_tokens=True, max_tokens=10**6)
    got = await asyncio.gather(*(asyncio.to_thread(encode, [text]) for text in texts))
    assert [ids for [ids] in got] == [byte_level.encode(text).ids for text in texts]


@pytest.mark.parametrize("data", [b"", b"{}", b"not json", b'{"model": {"type": "BPE"}}'])
def test_files_that_do_not_load_say_so(data: bytes) -> None:
    with pytest.raises(TokenizerUnusable, match=r"tokenizer\.json does not load"):
        Tokenizer(data)


def test_a_shard_without_a_tokenizer_is_named() -> None:
    with pytest.raises(TokenizerUnusable, match=r"no tokenizer\.json"):
        load_tokenizer({"tokenizer_config.json": json.dumps({}).encode()})
