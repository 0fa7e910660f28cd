"""`truncate_prompt_tokens` leaves what transformers leaves, and cuts nobody else's prompt."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from support.budget import budget, seeded
from support.router_doubles import (
    CHATML,
    INFO,
    FakeFleet,
    MemoryRouter,
    byte_level_tokenizer,
    id_of,
    memory_router,
    metaspace_tokenizer,
    random_text,
    sentencepiece_tokenizer,
    wordpiece_tokenizer,
)
from tokenizers import AddedToken, Regex, Tokenizer, normalizers, pre_tokenizers, processors

from penstock_router.errors import BadRequest
from penstock_router.text import text_parts
from penstock_router.text import tokenizer as tokenizing
from penstock_router.text.tokenizer import Tokenizer as TextTokenizer
from penstock_router.text.tokenizer import Truncation, load_tokenizer

pytest.importorskip("transformers")
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<|eos|>", "<|im_start|>", "<|im_end|>", "<ü b>", "<tool call>", "<s>", "[SEP]", "</s>"]


def with_ends(tokenizer: Tokenizer, first: str, last: str) -> Tokenizer:
    """Special tokens at both ends of a text."""
    ids = [(text, id_of(tokenizer, text)) for text in (first, last)]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{first} $A {last}", special_tokens=ids
    )
    return tokenizer


def with_bytes_trimmed(tokenizer: Tokenizer) -> Tokenizer:
    """Give the tokenizer GPT-2's post-processor, which adds nothing."""
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    return tokenizer


TOKENIZERS = {
    "byte level": byte_level_tokenizer(),
    "byte level, nothing added": with_bytes_trimmed(byte_level_tokenizer()),
    "byte level, both ends": with_ends(byte_level_tokenizer(), "<|im_start|>", "<|eos|>"),
    "sentencepiece": sentencepiece_tokenizer(),
    "wordpiece, both ends": with_ends(wordpiece_tokenizer(), "[CLS]", "[SEP]"),
    "metaspace": metaspace_tokenizer(),
}


def files_of(tokenizer: Tokenizer, side: str) -> dict[str, bytes]:
    config = {"eos_token": "<|eos|>", "chat_template": CHATML, "truncation_side": side}
    return {
        "tokenizer.json": tokenizer.to_str().encode(),
        "tokenizer_config.json": json.dumps(config).encode(),
    }


def as_transformers(
    tokenizer: Tokenizer, text: str, most: int, side: str, added: bool
) -> list[int]:
    copy = Tokenizer.from_str(tokenizer.to_str())
    theirs = PreTrainedTokenizerFast(tokenizer_object=copy, truncation_side=side)
    ids: list[int] = theirs(text, truncation=True, max_length=most, add_special_tokens=added)[
        "input_ids"
    ]
    return ids


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_what_is_added_around_a_text_is_known(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]
    files = files_of(tokenizer, "right")
    before, after = load_tokenizer(files).special_around
    for text in ("a", "Hello <ü b> world", "日本"):
        bare = tokenizer.encode(text, add_special_tokens=False).ids
        assert [*before, *bare, *after] == tokenizer.encode(text).ids


@pytest.fixture(params=TOKENIZERS)
async def served(request: pytest.FixtureRequest) -> AsyncIterator[tuple[MemoryRouter, Tokenizer]]:
    tokenizer = TOKENIZERS[request.param]
    fleet = FakeFleet(files_of(tokenizer, "right"))
    async with memory_router(fleet) as router:
        yield router, tokenizer


async def test_what_is_left_is_what_transformers_leaves(
    served: tuple[MemoryRouter, Tokenizer],
) -> None:
    router, tokenizer = served
    rng = seeded("truncation")
    for _ in range(budget(20, 3000)):
        text = "".join(
            rng.choice(SPECIAL) if rng.random() < 0.2 else random_text(rng, 1)
            for _ in range(rng.randrange(1, 30))
        )
        most, side, added = rng.randrange(3, 40), rng.choice(["left", "right"]), rng.random() < 0.5
        wanted = as_transformers(tokenizer, text, most, side, added)
        if not wanted:
            continue
        router.fleet.requests.clear()
        answer = await router.complete(
            text,
            truncate_prompt_tokens=most,
            truncation_side=side,
            add_special_tokens=added,
            max_tokens=1,
        )
        assert answer.status == 200, answer.body
        assert list(router.fleet.requests[0].prompt_token_ids) == wanted, (text, most, side, added)


async def test_chats_are_cut_as_their_text_is() -> None:
    tokenizer = byte_level_tokenizer()
    async with memory_router(FakeFleet(files_of(tokenizer, "left"))) as router:
        text = "<|im_start|>user\nThe quick fox<|im_end|>\n<|im_start|>assistant\n"
        for most in (1, 2, 5, 9, 300):
            for side in ("left", "right", None):
                router.fleet.requests.clear()
                fields = {"truncate_prompt_tokens": most, "truncation_side": side, "max_tokens": 1}
                assert (await router.chat("The quick fox", **fields)).status == 200
                wanted = as_transformers(tokenizer, text, most, side or "left", False)
                assert list(router.fleet.requests[0].prompt_token_ids) == wanted


@pytest.mark.parametrize(("side", "kept"), [("left", [7, 8, 9]), ("right", [5, 6, 7])])
async def test_ids_are_cut_too_and_the_tokenizers_side_is_the_default(
    side: str, kept: list[int]
) -> None:
    async with memory_router(FakeFleet(files_of(byte_level_tokenizer(), side))) as router:
        answer = await router.complete([5, 6, 7, 8, 9], truncate_prompt_tokens=3, echo=True)
        assert list(router.fleet.requests[0].prompt_token_ids) == kept
        assert answer.json()["usage"]["prompt_tokens"] == 3


@pytest.mark.parametrize(
    ("fields", "kept", "follow"),
    [
        # Room for the tokens that completions get when nobody says how many.
        ({}, INFO.max_model_len - 16, 16),
        ({"max_tokens": 1}, INFO.max_model_len - 1, 1),
        ({"max_tokens": 300}, INFO.max_model_len - 300, 300),
        ({"max_tokens": 0, "echo": True}, INFO.max_model_len - 1, 1),
    ],
)
async def test_minus_one_keeps_what_fits_beside_what_may_follow(
    router: MemoryRouter, fields: dict[str, Any], kept: int, follow: int
) -> None:
    for prompt in ([5] * 2000, "fox " * 2000):
        router.fleet.requests.clear()
        answer = await router.complete(prompt, truncate_prompt_tokens=-1, **fields)
        assert answer.status == 200, answer.body
        [request] = router.fleet.requests
        assert (len(request.prompt_token_ids), request.max_tokens) == (kept, follow)


async def test_minus_one_in_a_chat_leaves_room_for_an_answer(router: MemoryRouter) -> None:
    assert (await router.chat("fox " * 2000, truncate_prompt_tokens=-1)).status == 200
    [request] = router.fleet.requests
    assert (len(request.prompt_token_ids), request.max_tokens) == (INFO.max_model_len - 1, 1)


async def test_more_tokens_than_the_context_holds_are_refused_however_the_prompt_is_cut(
    router: MemoryRouter,
) -> None:
    for prompt in ([5] * 2000, "fox " * 2000):
        for side in ("left", "right"):
            answer = await router.complete(
                prompt, truncate_prompt_tokens=-1, truncation_side=side, max_tokens=600
            )
            assert answer.status == 400
            assert "This model's maximum context length is" in answer.error["message"]
    assert router.fleet.requests == []


async def test_truncation_does_not_leak_into_requests_beside_it(router: MemoryRouter) -> None:
    rng = seeded("truncation leaks")
    bodies: list[dict[str, Any]] = []
    for number in range(200):
        # Long ones are tokenized by threads, short ones on the event loop.
        pieces = rng.choice([5, 80, 900]) if number % 2 else rng.choice([5, 30, 80])
        body: dict[str, Any] = {
            "prompt": random_text(rng, pieces),
            "max_tokens": 1,
            "seed": number,
            "return_token_ids": True,
        }
        if number % 2:
            body["truncate_prompt_tokens"] = rng.randrange(1, 30)
            body["truncation_side"] = rng.choice(["left", "right"])
        bodies.append(body)

    async def kept(body: dict[str, Any]) -> Any:
        answer = await router.post("/v1/completions", body)
        assert answer.status == 200, answer.body
        return answer.json()["choices"][0]["prompt_token_ids"]

    alone = [await kept(body) for body in bodies]
    together = await asyncio.gather(*(kept(body) for body in bodies))
    assert together == alone
    lengths = [len(ids) for ids in alone]
    assert max(lengths[::2]) > 30 >= max(lengths[1::2])


# ---- an end of a long text is tokenized without the rest ---------------------------------------

# Kinds of patterns that models split by: digits by threes, runs of white space, words of any case.
PATTERNS = {
    "threes": r"(?i:'s|'t|'re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    "single digits": r"\p{N}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "cases": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}]*[\p{Ll}\p{M}]+|\p{N}{1,3}|[\p{Lu}]+"
    r"| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+|\s+(?!\S)|\s+",
    # None of the above: words are not apart.
    "two words": r"\p{L}+ \p{L}+|\s|\S",
}


def split_by(pattern: str) -> Tokenizer:
    tokenizer = byte_level_tokenizer()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return tokenizer


def normalized(tokenizer: Tokenizer, *steps: normalizers.Normalizer) -> Tokenizer:
    tokenizer.normalizer = normalizers.Sequence(list(steps))
    return tokenizer


def with_greedy_token() -> Tokenizer:
    """Return a tokenizer with a token that takes the space behind it."""
    tokenizer = byte_level_tokenizer()
    tokenizer.add_tokens([AddedToken("quick", rstrip=True), AddedToken("fox", single_word=True)])
    return tokenizer


def sentencepiece_of_words() -> Tokenizer:
    """Return a tokenizer like Llama 2's: no token has a space behind something else."""
    parts = json.loads(sentencepiece_tokenizer().to_str())
    vocabulary = parts["model"]["vocab"]
    crossing = {token for token in vocabulary if "▁" in token.lstrip("▁")}
    assert crossing
    kept = [token for token in vocabulary if token not in crossing]
    parts["model"]["vocab"] = {token: number for number, token in enumerate(kept)}
    merges = [
        merge if isinstance(merge, list) else merge.split(" ") for merge in parts["model"]["merges"]
    ]
    parts["model"]["merges"] = [
        merge for merge in merges if not {*merge, "".join(merge)} & crossing
    ]
    return Tokenizer.from_str(json.dumps(parts))


# Whose tokens reach over spaces.
WHOLE = ("sentencepiece", "a token that takes spaces")
MORE_TOKENIZERS = {
    **TOKENIZERS,
    **{name: split_by(pattern) for name, pattern in PATTERNS.items()},
    "composed": normalized(split_by(PATTERNS["threes"]), normalizers.NFC()),
    "lower case": normalized(byte_level_tokenizer(), normalizers.NFKD(), normalizers.Lowercase()),
    "stripped": normalized(byte_level_tokenizer(), normalizers.Strip()),
    "sentencepiece, of words": sentencepiece_of_words(),
    "a token that takes spaces": with_greedy_token(),
}
PIECES = [
    *("the quick", " fox", "Fox", " ", "  ", "\n", " \n", "12345", " 7", "a", "e\u0301", "\u0301"),
    *("日本", "東京 ", "😀", ".", ", ", "'s", "don't", "tool call", "<tool call>", "<ü b>", "ü b"),
    *("<|eos|>", "▁", "x y z ", "over the lazy dog ", "quick ", "Ünï "),
]


@pytest.mark.parametrize("kind", MORE_TOKENIZERS)
def test_what_is_left_does_not_depend_on_how_much_was_tokenized(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_parts, "_LEAST_CHARS", 4)
    monkeypatch.setattr(text_parts, "_CHARS_A_TOKEN", 1)
    fast = MORE_TOKENIZERS[kind]
    tokenizer, rng = load_tokenizer(files_of(fast, "right")), seeded(f"ends {kind}")
    wanted_parts = 0
    for _ in range(budget(400, 4_000)):
        text = "".join(rng.choice(PIECES) for _ in range(rng.randrange(1, 80)))
        most, side = rng.randrange(0, 30), rng.choice(["left", "right"])
        truncation = Truncation(most, side)
        wanted = truncation.cut(fast.encode(text, add_special_tokens=False).ids)
        wanted_parts += tokenizer._text_parts.end_of(text, most, side) is not None
        found = tokenizer.encode(
            [text], add_special_tokens=False, max_tokens=10, truncation=truncation
        )
        assert found == [wanted], (text, truncation)
    assert (wanted_parts == 0) is (kind in WHOLE), wanted_parts


@pytest.mark.parametrize("kind", MORE_TOKENIZERS)
def test_a_text_has_the_same_tokens_in_parts_as_at_once(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (text_parts, tokenizing):
        monkeypatch.setattr(module, "PART_CHARS", 24)
    monkeypatch.setattr(text_parts, "_BEFORE_CHARS", 16)
    fast = MORE_TOKENIZERS[kind]
    tokenizer, rng = load_tokenizer(files_of(fast, "right")), seeded(f"parts {kind}")
    most_parts = 0
    for _ in range(budget(25, 500)):
        text = "".join(rng.choice(PIECES) for _ in range(rng.randrange(20, 150)))
        added = rng.random() < 0.5
        wanted = fast.encode(text, add_special_tokens=added).ids
        most_parts = max(most_parts, sum(1 for _ in tokenizer._text_parts.of(text)))
        found = tokenizer.encode([text], add_special_tokens=added, max_tokens=10_000)
        assert found == [wanted], text
    assert (most_parts == 1) is (kind in WHOLE), most_parts


def test_a_pattern_that_counts_words_is_not_taken_for_one_that_does_not() -> None:
    fast, rng = MORE_TOKENIZERS["two words"], seeded("pairs of words")
    tokenizer = load_tokenizer(files_of(fast, "right"))
    for _ in range(50):
        words = ["".join(rng.choices("abcdef", k=rng.randrange(1, 9))) for _ in range(900)]
        [left] = tokenizer.encode(
            [" ".join(words)],
            add_special_tokens=False,
            max_tokens=10,
            truncation=Truncation(50, "left"),
        )
        assert left == fast.encode(" ".join(words), add_special_tokens=False).ids[-50:]


class Counting:
    """Counts the characters that are tokenized."""

    def __init__(self, fast: Any) -> None:
        self._fast = fast
        self.num_chars = 0
        self.most_chars = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fast, name)

    def encode_batch_fast(self, texts: list[str], *, add_special_tokens: bool) -> Any:
        self.num_chars += sum(map(len, texts))
        self.most_chars = max(self.most_chars, sum(map(len, texts)))
        return self._fast.encode_batch_fast(texts, add_special_tokens=add_special_tokens)


@pytest.mark.parametrize("kind", sorted(set(MORE_TOKENIZERS) - {*WHOLE, "stripped", "two words"}))
@pytest.mark.parametrize("side", ["left", "right"])
def test_of_a_megabyte_of_which_a_hundred_tokens_are_kept_little_is_tokenized(
    kind: str, side: str
) -> None:
    tokenizer = load_tokenizer(files_of(MORE_TOKENIZERS[kind], side))
    counting = tokenizer._fast = tokenizer._text_parts._fast = Counting(tokenizer._fast)  # type: ignore[assignment]
    text = "the quick brown fox jumps over the lazy dog, and so on. " * 20_000
    truncation = Truncation(100, side)
    [kept] = tokenizer.encode(
        [text], add_special_tokens=True, max_tokens=100, truncation=truncation
    )
    assert len(kept) == 100
    assert counting.num_chars < 10_000
    # What cannot be cut is tokenized as a whole.
    counting.num_chars = 0
    tokenizer.encode(["x" * 9000], add_special_tokens=True, max_tokens=9, truncation=truncation)
    assert counting.num_chars == 9000


def counted(fast: Tokenizer) -> tuple[TextTokenizer, Counting]:
    tokenizer = load_tokenizer(files_of(fast, "left"))
    counting: Any = Counting(tokenizer._fast)
    tokenizer._fast = tokenizer._text_parts._fast = counting
    return tokenizer, counting


# Of which each character is a token, or nearly; without a space between words, or a space at all.
DENSE = ["x, y; ", "日本。東京、", '{"a":1},', "aGVsbG8gd29ybGQ5", "<|eos|>x;"]


@pytest.mark.parametrize("piece", DENSE)
@pytest.mark.parametrize("kind", ["byte level, both ends", "threes"])
def test_tokens_of_a_long_text_are_never_in_memory_at_once(kind: str, piece: str) -> None:
    fast = MORE_TOKENIZERS[kind]
    tokenizer, counting = counted(fast)
    tokenizer._max_token_bytes = None
    text = piece * (400_000 // len(piece))
    [found] = tokenizer.encode([text], add_special_tokens=True, max_tokens=10**7)
    assert found == fast.encode(text, add_special_tokens=True).ids
    assert counting.most_chars < 2 * text_parts.PART_CHARS
    # A prompt far too long is not counted to its end.
    counting.num_chars = 0
    with pytest.raises(BadRequest, match=r"contains at least \d+ input tokens"):
        tokenizer.encode([text], add_special_tokens=True, max_tokens=1000)
    assert counting.num_chars < 3 * text_parts.PART_CHARS
    # Of one to be cut no more is there at once either, though all of it may have to be tokenized.
    for side in ("left", "right"):
        truncation = Truncation(len(found) // 2, side)
        [kept] = tokenizer.encode(
            [text], add_special_tokens=False, max_tokens=10**7, truncation=truncation
        )
        assert kept == truncation.cut(fast.encode(text, add_special_tokens=False).ids)
    assert counting.most_chars < 2 * text_parts.PART_CHARS


def test_a_prompt_a_little_too_long_is_counted_to_its_end() -> None:
    tokenizer, _ = counted(byte_level_tokenizer())
    text = "x, y; " * 30_000
    given = len(byte_level_tokenizer().encode(text, add_special_tokens=False).ids)
    with pytest.raises(BadRequest, match=f"contains {given} input tokens"):
        tokenizer.encode([text], add_special_tokens=False, max_tokens=given - 1)


@pytest.mark.parametrize("kind", ["byte level", "metaspace", "sentencepiece"])
@pytest.mark.parametrize("truncation", [None, Truncation(10, "left")])
def test_a_text_of_megabytes_that_cannot_be_cut_is_refused_before_it_is_tokenized(
    kind: str, truncation: Truncation | None
) -> None:
    tokenizer, counting = counted(MORE_TOKENIZERS[kind])
    tokenizer._max_token_bytes = None
    for text in ("x" * (text_parts.MAX_UNCUT_BYTES + 1), "本" * 400_000):
        with pytest.raises(BadRequest, match=r"a text has \d+ bytes .* at most 1048576"):
            tokenizer.encode(
                [text], add_special_tokens=False, max_tokens=10**7, truncation=truncation
            )
    assert counting.num_chars == 0
