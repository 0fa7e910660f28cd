"""Text to ids: limits before work, no state between requests, off the loop when long."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from router_doubles import random_text
from support.budget import budget, seeded
from tokenizers import Regex, normalizers
from tokenizers import Tokenizer as FastTokenizer

from penstock_router.errors import BadRequest
from penstock_router.tokenizer import (
    INLINE_CHARS,
    Tokenizer,
    TokenizerUnusable,
    load_tokenizer,
)


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as made:
        yield made


def loaded(fast: FastTokenizer, executor: ThreadPoolExecutor) -> Tokenizer:
    return Tokenizer(fast.to_str().encode(), executor)


async def test_short_and_long_texts_get_the_librarys_ids(
    byte_level: FastTokenizer, sentencepiece: FastTokenizer, executor: ThreadPoolExecutor
) -> None:
    rng = seeded("encode")
    for fast in (byte_level, sentencepiece):
        tokenizer = loaded(fast, executor)
        texts = [random_text(rng, 10), "the fox " * INLINE_CHARS, "x"]
        for special in (True, False):
            got = await tokenizer.encode(texts, add_special_tokens=special, max_tokens=10**6)
            assert got == [fast.encode(text, add_special_tokens=special).ids for text in texts]


async def test_only_long_texts_leave_the_thread(
    byte_level: FastTokenizer, executor: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = loaded(byte_level, executor)
    threads: list[threading.Thread] = []
    encode = tokenizer._encode

    def noted(*args: object) -> list[list[int]]:
        threads.append(threading.current_thread())
        return encode(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(tokenizer, "_encode", noted)
    await tokenizer.encode(["x" * INLINE_CHARS], add_special_tokens=True, max_tokens=10**6)
    await tokenizer.encode(["x" * INLINE_CHARS, "x"], add_special_tokens=True, max_tokens=10**6)
    assert [thread is threading.main_thread() for thread in threads] == [True, False]


async def test_text_that_cannot_fit_is_refused_before_it_is_tokenized(
    byte_level: FastTokenizer, executor: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = loaded(byte_level, executor)
    limit = tokenizer.max_chars(100)
    assert limit is not None
    monkeypatch.setattr(tokenizer, "_encode", None)
    with pytest.raises(BadRequest, match=r"maximum context length is 100 tokens.*characters"):
        await tokenizer.encode(["x" * (limit + 1)], add_special_tokens=True, max_tokens=100)


def test_no_text_has_fewer_tokens_than_its_length_promises(
    byte_level: FastTokenizer, sentencepiece: FastTokenizer, executor: ThreadPoolExecutor
) -> None:
    rng = seeded("length")
    for fast in (byte_level, sentencepiece):
        tokenizer = loaded(fast, executor)
        for _ in range(budget(300, 10_000)):
            text = random_text(rng, rng.randrange(1, 40))
            limit = tokenizer.max_chars(len(fast.encode(text, add_special_tokens=False)))
            assert limit is not None
            assert len(text) <= limit


def test_where_length_promises_nothing_nothing_is_refused_by_it(
    wordpiece: FastTokenizer, metaspace: FastTokenizer, executor: ThreadPoolExecutor
) -> None:
    # A word of a thousand unknown characters is one token here.
    assert len(wordpiece.encode("ξ" * 1000)) == 1
    assert loaded(wordpiece, executor).max_chars(1) is None
    assert loaded(metaspace, executor).max_chars(1) is None


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
    executor: ThreadPoolExecutor,
    normalizer: normalizers.Normalizer,
    bounds: bool,
) -> None:
    fast = FastTokenizer.from_str(byte_level.to_str())
    fast.normalizer = normalizer
    assert (loaded(fast, executor).max_chars(1) is not None) == bounds


async def test_too_many_tokens_are_refused_with_their_number(
    byte_level: FastTokenizer, executor: ThreadPoolExecutor
) -> None:
    tokenizer = loaded(byte_level, executor)
    count = len(byte_level.encode("a b c d e f"))
    with pytest.raises(BadRequest, match=f"contains {count} input tokens"):
        await tokenizer.encode(["a b c d e f"], add_special_tokens=True, max_tokens=count - 1)


async def test_truncation_and_padding_of_training_do_not_apply(
    byte_level: FastTokenizer, executor: ThreadPoolExecutor
) -> None:
    fast = FastTokenizer.from_str(byte_level.to_str())
    fast.enable_truncation(3)
    fast.enable_padding(length=64)
    tokenizer = loaded(fast, executor)
    got = await tokenizer.encode(["a b c d e f"], add_special_tokens=True, max_tokens=99)
    assert got == [byte_level.encode("a b c d e f").ids]


async def test_requests_at_once_do_not_disturb_one_another(
    byte_level: FastTokenizer, executor: ThreadPoolExecutor
) -> None:
    tokenizer = loaded(byte_level, executor)
    texts = [f"number {n} " * (INLINE_CHARS // (4 if n % 2 else 100)) for n in range(10)]
    got = await asyncio.gather(
        *(tokenizer.encode([text], add_special_tokens=True, max_tokens=10**6) for text in texts)
    )
    assert [ids for [ids] in got] == [byte_level.encode(text).ids for text in texts]


@pytest.mark.parametrize("data", [b"", b"{}", b"not json", b'{"model": {"type": "BPE"}}'])
def test_files_that_do_not_load_say_so(data: bytes, executor: ThreadPoolExecutor) -> None:
    with pytest.raises(TokenizerUnusable, match=r"tokenizer\.json does not load"):
        Tokenizer(data, executor)


def test_a_shard_without_a_tokenizer_is_named(executor: ThreadPoolExecutor) -> None:
    with pytest.raises(TokenizerUnusable, match=r"no tokenizer\.json"):
        load_tokenizer({"tokenizer_config.json": json.dumps({}).encode()}, executor)
