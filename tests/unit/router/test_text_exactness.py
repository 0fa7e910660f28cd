"""Random requests over HTTP: streamed, not streamed, and as worked out here by brute force.

A case is a seed: of a tokenizer, a request, and what the shard answers. The reference decodes whole
sequences, looks for every stop string at every place, and shares no code with the router.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import pytest
from support.budget import budget, seeded
from support.router_doubles import (
    CHATML,
    CORPUS,
    INFO,
    Answer,
    FakeFleet,
    MemoryRouter,
    byte_level_tokenizer,
    fake_logprobs,
    memory_router,
    model_files,
    random_text,
    sentencepiece_tokenizer,
)
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from penstock_proto.types import GenerationRequest
from penstock_router.generation.job import choice_seed

# Of cases that failed once, each for another reason.
RECORDED_SEEDS = [
    # Two bytes of a surrogate at the end.
    3340651954,
]

REPLACEMENT = "\ufffd"
EOS = INFO.eos_token_ids[0]

# ---- Tokenizers: the same ones in every process, or a seed would not say which case ------------


def wordpiece_tokenizer() -> Tokenizer:
    """Return a tokenizer like BERT's. Its vocabulary is fixed: a trainer would vary it."""
    letters = sorted(set("".join(CORPUS)) - {" "})
    words = ["Hello", "world", "the", "fox", "stop", "STOP", "dog", "##ing", "##og", "##s"]
    tokens = ["[UNK]", "[CLS]", "[SEP]", *letters, *(f"##{letter}" for letter in letters), *words]
    vocabulary = {token: token_id for token_id, token in enumerate(dict.fromkeys(tokens))}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(["[UNK]", "[CLS]", "[SEP]"])
    return tokenizer


@dataclass
class Kind:
    """A tokenizer, and what its single tokens stand for, found without the router's code."""

    name: str
    tokenizer: Tokenizer

    @cached_property
    def special_ids(self) -> set[int]:
        added = self.tokenizer.get_added_tokens_decoder()
        return {token_id for token_id, token in added.items() if token.special}

    @cached_property
    def shows_each_byte(self) -> bool:
        """True if each byte that belongs to no character is one U+FFFD. Else a whole run is one."""
        return self.name == "sentencepiece"

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, token_ids: Sequence[int], skip: bool) -> str:
        known = [token_id for token_id in token_ids if token_id < 2**32]
        return self.tokenizer.decode(known, skip_special_tokens=skip)

    def token_bytes(self, token_id: int) -> bytes:
        token = self.tokenizer.id_to_token(token_id) if token_id < 2**32 else None
        if token is None:
            return b""
        if self.name == "byte-level":
            return _byte_level_bytes(token)
        if self.shows_each_byte:
            if len(token) == 6 and token.startswith("<0x"):
                return bytes.fromhex(token[3:5])
            return token.replace("▁", " ").encode()
        anchor = self.encode("the", add_special_tokens=False)
        before = self.decode(anchor, False)
        return self.decode([*anchor, token_id], False).removeprefix(before).encode()

    def token_text(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode("utf-8", "replace")


def _byte_level_bytes(token: str) -> bytes:
    # The alphabet in the order of its bytes: printable ones first stand for themselves.
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    shifted = sorted(letter for letter in alphabet if ord(letter) >= 0x100)
    plain = {letter: ord(letter) for letter in alphabet if ord(letter) < 0x100}
    others = sorted(set(range(256)) - set(plain.values()))
    table = {**plain, **dict(zip(shifted, others, strict=True))}
    if all(letter in table for letter in token):
        return bytes(table[letter] for letter in token)
    return token.encode()


# ---- The reference -----------------------------------------------------------------------------

# Bytes that may stand behind the first of a character, one of each kind.
_CONTINUATIONS = [bytes([byte]) for byte in (0x80, 0x90, 0xA0, 0xBF)]
_ENDINGS = [
    b"".join(ending)
    for count in (1, 2, 3)
    for ending in itertools.product(_CONTINUATIONS, repeat=count)
]


def unfinished_bytes(data: bytes) -> int:
    """Count the bytes at the end that begin a character which more bytes could complete."""
    for count in (3, 2, 1):
        tail = data[-count:]
        if len(tail) == count and any(_is_character(tail + ending) for ending in _ENDINGS):
            return count
    # Two bytes of a surrogate begin no character, but Python's decoder waits for the third.
    return 2 if data[-2:-1] == b"\xed" and data[-1] in range(0xA0, 0xC0) else 0


def _is_character(data: bytes) -> bool:
    try:
        return len(data.decode()) == 1
    except UnicodeDecodeError:
        return False


def characters(data: bytes) -> str:
    """Every whole character, and U+FFFD for each other byte."""
    text, position = "", 0
    while position < len(data):
        for length in (1, 2, 3, 4):
            if _is_character(data[position : position + length]):
                text += data[position : position + length].decode()
                position += length
                break
        else:
            text, position = text + REPLACEMENT, position + 1
    return text


@dataclass
class Decoded:
    """A whole text, and how many characters at its end stand for bytes of an unfinished one."""

    text: str
    unfinished: int

    @property
    def finished(self) -> str:
        return self.text[: len(self.text) - self.unfinished]


def decoded(kind: Kind, token_ids: Sequence[int], skip: bool) -> Decoded:
    if kind.name == "wordpiece":
        return Decoded(kind.decode(token_ids, skip), 0)
    shown = [i for i in token_ids if not (skip and i in kind.special_ids)]
    data = b"".join(kind.token_bytes(token_id) for token_id in shown)
    count, text = unfinished_bytes(data), kind.decode(token_ids, skip)
    if not kind.shows_each_byte:
        return Decoded(text, len(data[len(data) - count :].decode("utf-8", "replace")))
    # The one place where the router does not do what the library does: in a run of byte tokens
    # that is not UTF-8 as a whole, whole characters are shown.
    scanned = characters(data).removeprefix(" ")
    assert scanned == text or REPLACEMENT in text, (scanned, text)
    return Decoded(scanned, count)


def continuation(kind: Kind, prompt: list[int], out: list[int], skip: bool, open_end: bool) -> str:
    """The text of `out` behind the prompt's.

    `open_end`: a character that the prompt began belongs to it, as the prompt is echoed with it.
    """
    before, whole = decoded(kind, prompt, skip), decoded(kind, [*prompt, *out], skip)
    rest = whole.finished[len(before.finished) :]
    assert whole.finished.startswith(before.finished)
    if open_end or not before.unfinished:
        return rest
    broken = len(rest) - len(rest.lstrip(REPLACEMENT))
    rest = rest[min(broken, before.unfinished) or 1 :]
    if kind.name == "byte-level":
        assert rest == whole.finished[len(before.text) :]
    return rest


@dataclass
class Expected:
    """The choice that an answer should have."""

    text: str
    token_ids: list[int]
    finish_reason: str
    stop_reason: str | int | None = None


def expected_choice(case: Case, prompt: Prompt, out: list[int]) -> Expected:
    """Return the choice that should be made of `out`, the tokens that the shard sent."""
    body = case.body
    stop_ids = {*body.get("stop_token_ids", []), *([] if body.get("ignore_eos") else [EOS])}
    ending = next((i for i, token_id in enumerate(out) if token_id in stop_ids), None)
    result = Expected("", out, "length")
    shown = len(out)
    if ending is not None:
        result = Expected("", out[: ending + 1], "stop", out[ending])
        if out[ending] == EOS and not body.get("ignore_eos"):
            result.stop_reason = None
        shown = ending + bool(body.get("include_stop_str_in_output"))

    def text_of(count: int) -> str:
        open_end = prompt.is_ids and bool(body.get("echo"))
        return case.shown_text(prompt.token_ids, out[:count], open_end)

    result.text = text_of(shown)
    found = first_stop(result.text, case.stops, len(text_of(min(case.min_tokens, shown))))
    if found is not None:
        stop, end = found
        included = body.get("include_stop_str_in_output")
        text = result.text[: end if included else end - len(stop)]
        # The number of tokens with which the text first reaches the stop string's end.
        used = next(count for count in range(shown + 1) if len(text_of(count)) >= end)
        return Expected(text, out[:used], "stop", stop)
    return result


def first_stop(text: str, stops: Sequence[str], after: int) -> tuple[str, int] | None:
    """Return the stop string that ends first behind the character `after`, and where it ends."""
    for end in range(after + 1, len(text) + 1):
        for stop in stops:
            if text[:end].endswith(stop):
                return stop, end
    return None


# ---- Cases -------------------------------------------------------------------------------------


@dataclass
class Prompt:
    """A prompt as it is sent, and what the router makes of it."""

    sent: str | list[int]
    token_ids: list[int]
    # Its text in an answer that echoes it.
    echoed: str

    @property
    def is_ids(self) -> bool:
        return not isinstance(self.sent, str)


class Case:
    """A request and what the shard answers, drawn from a seed."""

    def __init__(self, seed: int, kinds: Sequence[Kind]) -> None:
        self.seed = seed
        self.rng = rng = random.Random(seed)
        self.kind = rng.choice(kinds)
        self.is_chat = rng.random() < 0.35
        self.body: dict[str, Any] = {"seed": rng.randrange(2**32), "n": rng.choice([1, 1, 2, 3])}
        self.min_tokens = 0
        self.stops: list[str] = []
        self._draw_flags()
        self.prompts = [self._chat_prompt()] if self.is_chat else self._completion_prompts()
        self.outputs = [
            [self._output() for _ in range(self.body["n"])] for _ in range(len(self.prompts))
        ]
        self._draw_stops()
        # What is drawn later changes nothing before: recorded seeds stay the cases they were.
        if rng.random() < 0.3:
            self._put_special_tokens_side_by_side()
        self._keep_min_tokens()
        if rng.random() < 0.2:
            self.body["stream_interval"] = rng.randrange(1, 10)

    def __repr__(self) -> str:
        prompts = [prompt.token_ids for prompt in self.prompts]
        return f"seed {self.seed}: {self.kind.name} {self.body} {prompts=} {self.outputs=}"

    @property
    def skip(self) -> bool:
        return bool(self.body.get("skip_special_tokens", True))

    def _draw_flags(self) -> None:
        rng, body = self.rng, self.body
        names = ["include_stop_str_in_output", "skip_special_tokens", "ignore_eos"]
        names += ["spaces_between_special_tokens", "return_token_ids", "echo"]
        for name in names:
            if rng.random() < 0.4:
                body[name] = rng.random() < 0.5
        if rng.random() < 0.5:
            body["logprobs"] = True if self.is_chat else rng.randrange(3)
        body["max_tokens"] = rng.choice([1, 2, 5, 12, 24])
        if not self.is_chat and body.get("echo") and rng.random() < 0.1:
            body["max_tokens"] = 0
        elif rng.random() < 0.25:
            self.min_tokens = body["min_tokens"] = rng.randrange(body["max_tokens"] + 1)

    def _text(self) -> str:
        return "the " + random_text(self.rng, self.rng.randrange(1, 6))

    def _completion_prompts(self) -> list[Prompt]:
        prompts = [self._completion_prompt() for _ in range(self.rng.choice([1, 1, 1, 2]))]
        if prompts[0].token_ids == prompts[-1].token_ids:
            # They could not be told apart by the shard.
            prompts = prompts[:1]
        sent = [prompt.sent for prompt in prompts]
        self.body["prompt"] = sent if len(sent) > 1 else sent[0]
        return prompts

    def _completion_prompt(self) -> Prompt:
        rng, text = self.rng, self._text()
        ids = self.kind.encode(text, add_special_tokens=True)
        if rng.random() < 0.4:
            return Prompt(text, ids, text)
        if rng.random() < 0.3:
            ids = self._random_ids(rng.randrange(1, 10), limit=INFO.vocab_size)
        # Often within a character.
        ids = ids[: rng.randrange(1, len(ids) + 1)]
        whole = self.kind.decode(ids, self.skip)
        unfinished = decoded(self.kind, ids, self.skip).unfinished
        return Prompt(ids, ids, whole[: len(whole) - unfinished])

    def _chat_prompt(self) -> Prompt:
        messages = [{"role": "user", "content": self._text()}]
        echoed = ""
        if self.body.get("echo") and self.rng.random() < 0.5:
            echoed = self._text()
            messages.append({"role": "assistant", "content": echoed})
        self.body["messages"] = messages
        rendered = "".join(
            f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n"
            for message in messages
        )
        rendered += "<|im_start|>assistant\n"
        return Prompt("", self.kind.encode(rendered, add_special_tokens=False), echoed)

    def _random_ids(self, count: int, limit: int) -> list[int]:
        """Return random ids. Many are special tokens, and some are beyond the vocabulary."""
        size = min(self.kind.tokenizer.get_vocab_size() + 4, limit)
        special = sorted(self.kind.special_ids)
        return [
            self.rng.choice(special) if self.rng.random() < 0.2 else self.rng.randrange(size)
            for _ in range(count)
        ]

    def _output(self) -> list[int]:
        rng, wanted = self.rng, max(self.body["max_tokens"], 1)
        ids: list[int] = []
        while len(ids) < wanted:
            if rng.random() < 0.6:
                real = self.kind.encode(random_text(rng, 4), add_special_tokens=False)
                ids += real[rng.randrange(3) :]
            else:
                ids += self._random_ids(rng.randrange(1, 4), limit=2**32)
        return [i if i != EOS or rng.random() < 0.5 else i + 5 for i in ids[:wanted]]

    def _draw_stops(self) -> None:
        rng = self.rng
        out = rng.choice(rng.choice(self.outputs))
        if rng.random() < 0.3:
            self.body["stop_token_ids"] = [rng.choice(out), rng.randrange(400)]
        if rng.random() < 0.55:
            return
        text = self.shown_text(self.prompts[0].token_ids, out, False) + "the STOP"
        for _ in range(rng.randrange(1, 5)):
            start = rng.randrange(len(text))
            stop = text[start : start + rng.randrange(1, 7)]
            self.stops.append(stop if rng.random() < 0.8 else stop[::-1])
        one = len(self.stops) == 1 and rng.random() < 0.5
        self.body["stop"] = self.stops[0] if one else self.stops

    def _put_special_tokens_side_by_side(self) -> None:
        special = sorted(self.kind.special_ids - {EOS})
        for out in (out for outputs in self.outputs for out in outputs):
            start = self.rng.randrange(len(out))
            for position in range(start, min(start + 3, len(out))):
                out[position] = self.rng.choice(special)

    def _keep_min_tokens(self) -> None:
        """A shard gives none that ends the answer among the first."""
        ends = {EOS, *self.body.get("stop_token_ids", [])}
        other = next(i for i in range(5, 500) if i not in ends)
        for out in (out for outputs in self.outputs for out in outputs):
            for position in range(self.min_tokens):
                out[position] = other if out[position] in ends else out[position]

    def script(self, request: GenerationRequest) -> list[int]:
        """Return what the shard gives for a request of this case."""
        seeds = [choice_seed(self.body["seed"], choice) for choice in range(self.body["n"])]
        choice = seeds.index(request.sampling.seed or 0)
        place = [prompt.token_ids for prompt in self.prompts].index(list(request.prompt_token_ids))
        return self.outputs[place][choice]

    def shown_text(self, prompt: list[int], out: list[int], open_end: bool) -> str:
        spaces = self.body.get("spaces_between_special_tokens", True)
        if self.kind.name != "wordpiece" or spaces or self.skip:
            return continuation(self.kind, prompt, out, self.skip, open_end)
        text, after_special = "", False
        for count, token_id in enumerate(out):
            before, after = [*prompt, *out[:count]], [*prompt, *out[: count + 1]]
            piece = self.kind.decode(after, False).removeprefix(self.kind.decode(before, False))
            special = token_id in self.kind.special_ids
            text += piece.removeprefix(" ") if special and after_special else piece
            after_special = special if piece else after_special
        return text


# ---- Answers, brought to one form --------------------------------------------------------------

COLUMNS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


@dataclass
class Shown:
    """A choice as an answer shows it, streamed or not."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    rows: dict[str, list[Any]] = field(default_factory=lambda: {name: [] for name in COLUMNS})
    content: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    def add(self, choice: dict[str, Any]) -> None:
        assert self.finish_reason is None, "nothing comes after the end"
        message = choice.get("message") or choice.get("delta") or {}
        self.text += choice.get("text") or message.get("content") or ""
        self.token_ids += choice.get("token_ids") or []
        logprobs = choice.get("logprobs") or {}
        self.content += logprobs.get("content") or []
        for name in COLUMNS:
            self.rows[name] += logprobs.get(name) or []
        self.finish_reason = choice["finish_reason"]
        self.stop_reason = choice.get("stop_reason")


def shown_choices(payloads: Sequence[dict[str, Any]], count: int) -> list[Shown]:
    shown = [Shown() for _ in range(count)]
    for payload in payloads:
        for choice in payload["choices"]:
            shown[choice["index"]].add(choice)
    return shown


def expected_rows(case: Case, prompt: Prompt, out: list[int]) -> dict[str, list[Any]]:
    """The columns of a completion's log-probabilities."""
    echoed = prompt.token_ids if case.body.get("echo") else []
    ids = [*echoed, *out]
    texts = [case.kind.token_text(token_id) for token_id in ids]
    offsets = [sum(map(len, texts[:row])) for row in range(len(texts))]
    chosen: list[float | None] = list(fake_logprobs(ids, 0).chosen)
    if echoed:
        chosen[0] = None
    return {"tokens": texts, "text_offset": offsets, "token_logprobs": chosen}


def check_choice(case: Case, prompt: Prompt, out: list[int], shown: Shown) -> int:
    """Compare one choice with the reference; how many tokens it has."""
    body = case.body
    wanted = Expected("", [], "length")
    if body["max_tokens"]:
        wanted = expected_choice(case, prompt, out)
    echoed = prompt.echoed if body.get("echo") else ""
    assert shown.text == echoed + wanted.text
    assert (shown.finish_reason, shown.stop_reason) == (wanted.finish_reason, wanted.stop_reason)
    if body.get("return_token_ids"):
        assert shown.token_ids == wanted.token_ids
    if "logprobs" in body and not case.is_chat:
        for name, column in expected_rows(case, prompt, wanted.token_ids).items():
            assert shown.rows[name] == column, name
    elif "logprobs" in body:
        data = [bytes(entry["bytes"]) for entry in shown.content]
        assert data == [case.kind.token_bytes(token_id) for token_id in wanted.token_ids]
    return len(wanted.token_ids)


def check_answer(case: Case, choices: list[Shown], usage: dict[str, Any]) -> None:
    n, completion_tokens = case.body["n"], 0
    for index, shown in enumerate(choices):
        prompt, out = case.prompts[index // n], case.outputs[index // n][index % n]
        completion_tokens += check_choice(case, prompt, out, shown)
    assert usage["completion_tokens"] == completion_tokens
    assert usage["prompt_tokens"] == sum(len(prompt.token_ids) for prompt in case.prompts)


def payloads_of(answer: Answer, *, streamed: bool) -> list[dict[str, Any]]:
    assert answer.status == 200, answer.body
    if not streamed:
        return [answer.json()]
    events = answer.events
    assert events[-1] == "[DONE]"
    return events[:-1]


async def check_case(case: Case, router: MemoryRouter) -> None:
    fleet = router.fleet
    fleet.script = case.script
    fleet.bundle = lambda: case.rng.choice([1, 1, 1, 2, 3, 7])
    path = "/v1/chat/completions" if case.is_chat else "/v1/completions"
    both = []
    for streamed in (True, False):
        more = {"stream": True, "stream_options": {"include_usage": True}} if streamed else {}
        answer = await router.post(path, {**case.body, **more})
        payloads = payloads_of(answer, streamed=streamed)
        choices = shown_choices(payloads, len(case.prompts) * case.body["n"])
        check_answer(case, choices, payloads[-1]["usage"])
        both.append((choices, payloads[-1]["usage"]))
    assert both[0] == both[1]


# ---- The tests ---------------------------------------------------------------------------------

Check = Callable[[int], Any]


@pytest.fixture(scope="module")
def kinds() -> list[Kind]:
    return [
        Kind("byte-level", byte_level_tokenizer()),
        Kind("sentencepiece", sentencepiece_tokenizer()),
        Kind("wordpiece", wordpiece_tokenizer()),
    ]


@pytest.fixture
async def check(kinds: list[Kind]) -> Any:
    """Checks the case of a seed, with a router for each tokenizer."""
    async with AsyncExitStack() as stack:
        routers = {}
        for kind in kinds:
            fleet = FakeFleet(model_files(kind.tokenizer, CHATML))
            routers[kind.name] = await stack.enter_async_context(memory_router(fleet))

        async def check(seed: int) -> None:
            case = Case(seed, kinds)
            try:
                await check_case(case, routers[case.kind.name])
            except AssertionError as error:
                raise AssertionError(f"{case!r}\n{error}") from error

        yield check


@pytest.mark.parametrize("seed", RECORDED_SEEDS)
async def test_a_case_that_failed_once_passes(seed: int, check: Check) -> None:
    await check(seed)


@pytest.mark.timeout(1800)
async def test_streams_whole_answers_and_the_offline_reference_are_equal(check: Check) -> None:
    rng = seeded("text exactness")
    for _ in range(budget(150, 10_000)):
        await check(rng.randrange(2**32))
