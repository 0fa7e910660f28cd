"""Deltas made from the outputs of one sequence: where it ends and why, and when text is made."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from support.router_doubles import INFO, fake_logprobs, id_of, model_files
from support.scores import logprobs_of
from tokenizers import Tokenizer

from penstock_proto.types import FinishReason, GenerationRequest, Output
from penstock_router.apis.base import Envelope
from penstock_router.apis.tgi.answers import GenerateRequest
from penstock_router.apis.tgi.requests import GENERATE_STREAM
from penstock_router.generation.choice import Choice, Delta, DeltaBuffer
from penstock_router.generation.job import Job
from penstock_router.observe.request_record import Usage
from penstock_router.request import CompletionRequest
from penstock_router.served_models import ServedModel
from penstock_router.text.answer_pieces import Piece, PieceKind
from penstock_router.text.model_conventions import Conventions
from penstock_router.text.prompts import PreparedPrompts, Prompt, TextModel
from penstock_router.text.tokenizer import load_tokenizer

EOS = INFO.eos_token_ids[0]


@pytest.fixture
def model(byte_level: Tokenizer) -> ServedModel:
    tokenizer = load_tokenizer(model_files(byte_level))
    text = TextModel(
        INFO.model, INFO.max_model_len, INFO.vocab_size, tokenizer, None, False, Conventions()
    )
    return ServedModel(INFO, text)


def choice_of(model: ServedModel, prompt: Prompt | None = None, **options: Any) -> Choice:
    prompt = prompt or Prompt([5], "$")
    asked = CompletionRequest(prompts=(list(prompt.token_ids),), **options)
    request = GenerationRequest(prompt_token_ids=prompt.token_ids)
    return Choice(Job(model, asked, PreparedPrompts((prompt,)), (request,)), 0)


def outputs_of(
    token_ids: Sequence[int], bundle: int, reason: FinishReason = FinishReason.LENGTH
) -> Iterator[Output]:
    """Yield outputs as a shard sends them. The last token is the stop token if `reason` is STOP."""
    for start in range(0, len(token_ids), bundle):
        ids = list(token_ids[start : start + bundle])
        output = Output(ids, start, logprobs=fake_logprobs(ids, 2))
        if start + bundle >= len(token_ids):
            output.finish_reason = reason
            output.stop_token_id = token_ids[-1] if reason is FinishReason.STOP else None
        yield output


def taken(choice: Choice, outputs: Iterator[Output]) -> Delta:
    """Return all deltas of a choice, joined into one."""
    whole = DeltaBuffer(Delta(0, "", []))
    for output in outputs:
        delta = choice.take(output)
        if delta is not None:
            whole.add(delta)
        if choice.finished:
            return whole.whole()
    raise AssertionError("the choice did not end")


def spelled(model: ServedModel, text: str) -> list[int]:
    """Return one token for each byte of the text, so that stop strings span many tokens."""
    return [
        next(i for i in range(3, 300) if model.tokenizer.token_bytes(i) == bytes([byte]))
        for byte in text.encode()
    ]


# ---- Stop strings ------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("bundle", [1, 3, 100])
def test_a_stop_string_ends_the_choice_at_the_token_that_completes_it(
    model: ServedModel, bundle: int, stream: bool
) -> None:
    choice = choice_of(model, stop=("END",), stream=stream)
    whole = taken(choice, outputs_of(spelled(model, "one END two"), bundle))
    assert (whole.text, whole.finish_reason, whole.stop_reason) == ("one ", "stop", "END")
    assert whole.token_ids == spelled(model, "one END")
    assert whole.logprobs == fake_logprobs(whole.token_ids, 2)


@pytest.mark.parametrize("bundle", [1, 100])
def test_the_stop_string_that_completes_first_wins_and_ties_go_by_the_list(
    model: ServedModel, bundle: int
) -> None:
    def stopped_by(text: str, *stops: str) -> tuple[str, object]:
        whole = taken(choice_of(model, stop=stops), outputs_of(spelled(model, text), bundle))
        return whole.text, whole.stop_reason

    assert stopped_by("xabcd", "abcd", "bc") == ("xa", "bc")
    assert stopped_by("xabc", "bc", "abc") == ("xa", "bc")
    assert stopped_by("xabc", "abc", "bc") == ("x", "abc")


def test_an_included_stop_string_is_the_end_of_the_text(model: ServedModel) -> None:
    token = id_of(Tokenizer.from_str(model_text(model)), "<tool call>")
    ids = [*spelled(model, "one "), token]
    choice = choice_of(model, stop=("tool",), include_stop_str_in_output=True)
    whole = taken(choice, outputs_of(ids, 1))
    # The token has more text than the stop string.
    assert (whole.text, whole.token_ids) == ("one <tool", ids)


def model_text(model: ServedModel) -> str:
    return model.tokenizer._fast.to_str()


def test_text_that_only_began_a_stop_string_is_shown_at_the_end(model: ServedModel) -> None:
    choice = choice_of(model, stop=("END",), stream=True)
    assert taken(choice, outputs_of(spelled(model, "one EN"), 1)).text == "one EN"


def test_stop_strings_are_not_looked_for_across_the_prompts_border(model: ServedModel) -> None:
    prompt = Prompt(spelled(model, "E"), "E")
    choice = choice_of(model, prompt, stop=("END",), echo=True)
    assert taken(choice, outputs_of(spelled(model, "ND"), 1)).text == "END"


@pytest.mark.parametrize("bundle", [1, 2, 100])
def test_the_first_min_tokens_tokens_end_nothing_however_they_are_bundled(
    model: ServedModel, bundle: int
) -> None:
    def text_of(text: str, min_tokens: int, stop: str = "ab") -> str:
        choice = choice_of(model, stop=(stop,), min_tokens=min_tokens, stream=True)
        return taken(choice, outputs_of(spelled(model, text), bundle)).text

    assert text_of("1ab2ab3", 0) == "1"
    assert text_of("1ab2ab3", 2) == "1"
    assert text_of("1ab2ab3", 3) == "1ab2"
    assert text_of("1ab2ab3", 7) == "1ab2ab3"
    # Begun within them, completed behind; also over a whole one that did not count.
    assert text_of("1aab2", 3) == "1a"
    assert text_of("1ababa2", 4, "aba") == "1ab"


# ---- Tokens that stop --------------------------------------------------------------------------


@pytest.mark.parametrize("stop", [(), ("zz",)])
def test_a_stop_token_counts_and_its_text_is_shown_only_when_asked_for(
    model: ServedModel, stop: tuple[str, ...]
) -> None:
    ids = spelled(model, "ab!")

    def ending(**options: Any) -> tuple[object, ...]:
        choice = choice_of(model, stop=stop, stop_token_ids=(ids[-1],), **options)
        whole = taken(choice, outputs_of(ids, 2, FinishReason.STOP))
        assert whole.token_ids == ids
        return whole.text, whole.finish_reason, whole.stop_reason

    assert ending() == ("ab", "stop", ids[-1])
    assert ending(include_stop_str_in_output=True) == ("ab!", "stop", ids[-1])


def test_the_eos_token_counts_and_is_no_reason_but_where_it_was_asked_for(
    model: ServedModel,
) -> None:
    ids = [*spelled(model, "ab"), EOS]

    def ending(**options: Any) -> tuple[object, ...]:
        choice = choice_of(model, skip_special_tokens=False, **options)
        whole = taken(choice, outputs_of(ids, 2, FinishReason.STOP))
        return whole.text, whole.stop_reason, len(whole.token_ids)

    assert ending() == ("ab", None, 3)
    assert ending(include_stop_str_in_output=True) == ("ab<|eos|>", None, 3)
    assert ending(ignore_eos=True, stop_token_ids=(EOS,)) == ("ab", EOS, 3)


def test_an_eos_token_that_is_ignored_is_a_token_like_others(model: ServedModel) -> None:
    ids = [*spelled(model, "a"), EOS, *spelled(model, "b")]
    for skip, text in ((True, "ab"), (False, "a<|eos|>b")):
        choice = choice_of(model, ignore_eos=True, skip_special_tokens=skip)
        whole = taken(choice, outputs_of(ids, 1))
        assert (whole.text, whole.finish_reason) == (text, "length")


# ---- When text is made -------------------------------------------------------------------------


def test_a_stream_is_decoded_as_it_comes(model: ServedModel) -> None:
    choice = choice_of(model, stream=True)
    deltas = [choice.take(output) for output in outputs_of(spelled(model, "fox"), 1)]
    assert [delta.text for delta in deltas if delta is not None] == ["f", "o", "x"]


def test_what_is_known_of_the_prompt_is_kept_until_there_is_a_token(model: ServedModel) -> None:
    choice = choice_of(model, echo=True, logprobs=0)
    assert not choice.take(Output([], 0, prompt_logprobs=logprobs_of([-1.0], [1]), cached_tokens=3))
    assert not choice.take(Output([], 0, prompt_logprobs=logprobs_of([-2.0], [1])))
    assert choice.cached_tokens == 3
    delta = choice.take(Output([6], 0, finish_reason=FinishReason.LENGTH))
    assert delta is not None
    assert delta.prompt_logprobs == logprobs_of([-1.0, -2.0], [1, 1])


def test_an_echoed_prompt_and_the_answer_share_the_character_between_them(
    model: ServedModel,
) -> None:
    ids = spelled(model, "a日b")
    for cut, broken in ((1, ""), (2, "\ufffd"), (3, "\ufffd"), (4, "")):
        prompt = Prompt(ids[:cut], model.tokenizer.decode(ids[:cut], skip_special_tokens=True))
        assert (prompt.text or "").endswith(broken)
        echoed = taken(choice_of(model, prompt, echo=True), outputs_of(ids[cut:], 1))
        assert echoed.text == "a日b"
        alone = taken(choice_of(model, prompt), outputs_of(ids[cut:], 1))
        assert alone.text == ("日b" if cut == 1 else "b")


def test_an_id_out_of_the_vocabulary_has_no_text(model: ServedModel) -> None:
    for stream in (True, False):
        choice = choice_of(model, stream=stream)
        assert taken(choice, outputs_of([10**6, 2**32 - 1, *spelled(model, "a")], 1)).text == "a"


def test_first_rows_cut_every_column() -> None:
    columns = logprobs_of(
        [-1.0, -2.0], [1, 2], 2, [(5, -0.1), (6, -0.2), (7, -0.3), (8, -0.4)], [-9.0] * 6
    )
    assert columns.first(1) == logprobs_of([-1.0], [1], 2, [(5, -0.1), (6, -0.2)], [-9.0] * 3)


# ---- Long answers ------------------------------------------------------------------------------


class Counted(str):
    """Text that counts the characters that adding copies: joining copies each just once."""

    copied = 0

    def __add__(self, other: str) -> str:
        Counted.copied += len(self) + len(other)
        return Counted(str.__add__(self, other))

    def __radd__(self, other: str) -> str:
        Counted.copied += len(self) + len(other)
        return Counted(str.__add__(other, self))


@pytest.mark.parametrize("with_pieces", [False, True])
def test_what_a_long_answer_copies_grows_with_its_length_and_no_faster(with_pieces: bool) -> None:
    def delta() -> Delta:
        pieces = [Piece(PieceKind.CONTENT, Counted("word "))] if with_pieces else None
        return Delta(0, Counted("word "), [5], pieces)

    for num_tokens in (100, 1000):
        Counted.copied = 0
        whole = DeltaBuffer(delta())
        for _ in range(num_tokens - 1):
            whole.add(delta())
        answer = whole.whole()
        assert answer.text == "word " * num_tokens
        assert answer.pieces is None or [piece.text for piece in answer.pieces] == [answer.text]
        assert Counted.copied == 0


def test_a_stream_of_tgi_copies_its_text_once_at_its_end(model: ServedModel) -> None:
    asked = GenerateRequest(prompts=("x",), samples=False, details=False, stream=True)
    prompt = Prompt([5], "$")
    job = Job(model, asked, PreparedPrompts((prompt,)), (GenerationRequest(prompt_token_ids=[5]),))
    shape = GENERATE_STREAM.make_shape(job, Envelope("r", 1, 0.0, Usage(1)))
    Counted.copied = 0
    for _ in range(1000):
        assert shape.chunk(Delta(0, Counted("word "), [5], logprobs=fake_logprobs([5], 0)))
    assert Counted.copied == 0
    end = Delta(0, Counted("end"), [5], logprobs=fake_logprobs([5], 0), finish_reason="length")
    last = shape.chunk(end)
    assert last is not None
    assert ("word " * 1000 + "end").encode() in last
