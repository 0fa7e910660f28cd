"""Prompts of Ollama's API: made to fit the context, and continued by ids."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from support.budget import budget, seeded
from support.router_doubles import INFO, model_files
from tokenizers import Tokenizer

from penstock_router.apis.ollama import prompts
from penstock_router.apis.ollama import requests as ollama
from penstock_router.errors import BadRequest, ContextExceeded
from penstock_router.text.chat_template import load_chat_template
from penstock_router.text.model_conventions import Conventions
from penstock_router.text.prompts import PreparedPrompts, TextModel, chat_prompt
from penstock_router.text.reasoning import STYLES
from penstock_router.text.tokenizer import load_tokenizer

LIMIT = INFO.max_model_len
SYSTEM = {"role": "system", "content": "Be brief."}
CALL = {"function": {"name": "look", "arguments": {}}}


def turn(number: int, role: str = "user", words: int = 30) -> dict[str, Any]:
    return {"role": role, "content": f"number {number}:" + " dog" * words}


@pytest.fixture(scope="module")
def model(byte_level: Tokenizer) -> TextModel:
    files = model_files(byte_level)
    return TextModel(
        *(INFO.model, LIMIT, INFO.vocab_size, load_tokenizer(files), load_chat_template(files)),
        trusts_templates=False,
        conventions=Conventions(),
    )


def prepare(model: TextModel, messages: list[Any], **fields: Any) -> PreparedPrompts:
    asked = ollama.parse_chat({"model": "m", "messages": messages, **fields})
    return prompts.prepare(asked, model)


def generate(model: TextModel, prompt: str, **fields: Any) -> PreparedPrompts:
    body = {"model": "m", "prompt": prompt, **fields}
    kind = ollama.GENERATE.choose(body)
    return prompts.prepare(kind.parse(body), model)


def ids_of(made: PreparedPrompts) -> list[int]:
    [prompt] = made.prompts
    return list(prompt.token_ids)


def text_of(model: TextModel, made: PreparedPrompts) -> str:
    return model.tokenizer.decode(ids_of(made), skip_special_tokens=False)


def test_a_chat_that_fits_is_left_as_it_is(model: TextModel) -> None:
    made = prepare(model, [SYSTEM, turn(1), turn(2, "assistant"), turn(3)])
    assert made.warnings == ()
    assert all(f"number {number}:" in text_of(model, made) for number in (1, 2, 3))


def test_of_a_chat_that_is_too_long_the_oldest_messages_are_left_out(model: TextModel) -> None:
    messages = [SYSTEM, *(turn(number, "user") for number in range(40)), turn(40)]
    made = prepare(model, messages)
    text, kept = text_of(model, made), LIMIT - LIMIT // 4
    assert len(ids_of(made)) <= kept
    assert text.startswith("<|im_start|>system\nBe brief.")
    shown = [number for number in range(41) if f"number {number}:" in text]
    assert shown == list(range(shown[0], 41))
    # One more would have been too many.
    more = prepare(model, [SYSTEM, *messages[shown[0] :]], truncate=False)
    assert len(ids_of(more)) > kept
    assert made.warnings == ("messages: the oldest are left out, as the prompt was too long",)


def test_what_is_left_out_does_not_depend_on_how_it_is_found(model: TextModel) -> None:
    rng = seeded("ollama's truncation")
    for _ in range(budget(20, 500)):
        roles = ("user", "assistant", "system", "tool")
        messages = [
            turn(number, rng.choice(roles), rng.randrange(60))
            for number in range(rng.randrange(1, 60))
        ]
        wanted = rng.choice([-1, 5, 100, 4000])
        made = prepare(model, messages, options={"num_predict": wanted})
        asked = ollama.parse_chat({"model": "m", "messages": messages})
        room = LIMIT // 4 if wanted < 0 else min(wanted, LIMIT // 2)
        whole = dataclasses.replace(asked, truncates=False)
        if not made.warnings:
            assert ids_of(made) == ids_of(prompts.prepare(whole, model))
            continue
        assert len(ids_of(made)) <= LIMIT - room
        # Each in turn, as Ollama tries them.
        starts = [0, *(at for at in range(1, len(messages)) if messages[at]["role"] != "tool")]
        for start in starts:
            systems = [each for each in messages[:start] if each["role"] == "system"]
            one = ollama.parse_chat({"model": "m", "messages": [*systems, *messages[start:]]})
            try:
                expected = prompts.prepare(dataclasses.replace(one, truncates=False), model)
            except ContextExceeded:
                continue
            if len(ids_of(expected)) <= LIMIT - room:
                assert ids_of(made) == ids_of(expected)
                break
        else:
            assert len(ids_of(made)) == LIMIT - room


def test_a_result_is_not_parted_from_its_call(model: TextModel) -> None:
    rounds = []
    for number in range(20):
        rounds += [
            turn(number),
            {"role": "assistant", "content": f"call {number}:", "tool_calls": [CALL]},
            {"role": "tool", "content": f"result {number}:" + " fox" * 30},
        ]
    text = text_of(model, prepare(model, rounds))
    for number in range(20):
        assert (f"result {number}:" in text) <= (f"call {number}:" in text)
    assert "result 19:" in text


def test_the_answer_has_room_where_a_prompt_is_shortened(model: TextModel) -> None:
    messages = [turn(number) for number in range(40)]
    lengths = {
        wanted: len(ids_of(prepare(model, messages, options={"num_predict": wanted})))
        for wanted in (1, 100, LIMIT, 100_000)
    }
    assert LIMIT - 80 < lengths[1] < LIMIT
    assert lengths[100] <= LIMIT - 100
    assert LIMIT // 2 - 80 < lengths[LIMIT] == lengths[100_000] <= LIMIT // 2


def test_one_message_that_is_too_long_loses_its_beginning(model: TextModel) -> None:
    made = prepare(model, [SYSTEM, turn(1), {"role": "user", "content": "fox " * 900 + "the end"}])
    assert len(ids_of(made)) == LIMIT - LIMIT // 4
    assert text_of(model, made).endswith("the end<|im_end|>\n<|im_start|>assistant\n")
    assert made.warnings == ("the beginning of the prompt is cut off, as it was too long",)


@pytest.mark.parametrize("raw", [False, True])
def test_a_prompt_that_is_too_long_loses_its_beginning(model: TextModel, raw: bool) -> None:
    made = generate(model, "fox " * 900 + "the end", raw=raw)
    assert len(ids_of(made)) == LIMIT - LIMIT // 4
    assert "the end" in text_of(model, made)
    with pytest.raises(ContextExceeded):
        generate(model, "fox " * 900, raw=raw, truncate=False)


def test_a_prompt_that_just_fits_is_not_shortened(model: TextModel) -> None:
    word = model.tokenizer.encode([" the"], add_special_tokens=False, max_tokens=9)[0]
    assert len(word) == 1
    fits = generate(model, " the" * (LIMIT - 1), raw=True, options={"num_predict": 300})
    assert (len(ids_of(fits)), fits.warnings) == (LIMIT - 1, ())
    full = generate(model, " the" * LIMIT, raw=True, options={"num_predict": 300})
    assert len(ids_of(full)) == LIMIT - LIMIT // 2


def test_finding_what_fits_takes_few_renderings(
    model: TextModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    rendered = 0

    def count(*args: Any) -> Any:
        nonlocal rendered
        rendered += 1
        return chat_prompt(*args)

    monkeypatch.setattr("penstock_router.apis.ollama.prompts.chat_prompt", count)
    prepare(model, [turn(number, words=1) for number in range(4000)])
    assert rendered <= 13


def test_thinking_is_refused_where_the_model_does_not_think(model: TextModel) -> None:
    with pytest.raises(BadRequest, match='think: "fake-model" does not support thinking'):
        prepare(model, [turn(1)], think=True)
    prepare(model, [turn(1)], think=False)
    thinks = dataclasses.replace(model, conventions=Conventions(None, STYLES["think"]))
    prepare(thinks, [turn(1)], think="high")


def test_a_context_comes_before_the_prompt(model: TextModel) -> None:
    alone = ids_of(generate(model, "Hello"))
    assert ids_of(generate(model, "Hello", context=[7, 8, 9])) == [7, 8, 9, *alone]
    assert ids_of(generate(model, "Hello", context=[])) == alone
    long = list(range(400)) * 2
    made = generate(model, "Hello", context=long)
    kept = LIMIT - LIMIT // 4
    assert ids_of(made) == [*long, *alone][-kept:]
    assert made.warnings == ("context: its first ids are left out, as the prompt was too long",)
    with pytest.raises(ContextExceeded):
        generate(model, "Hello", context=long, truncate=False)
    with pytest.raises(BadRequest, match="context: Token id 500 is out of vocabulary"):
        generate(model, "Hello", context=[1, 500])
    with pytest.raises(BadRequest, match="context: not together with raw"):
        generate(model, "Hello", context=[1], raw=True)


def test_a_model_without_a_chat_template_completes_a_prompt(model: TextModel) -> None:
    bare = dataclasses.replace(model, chat_template=None)
    assert ids_of(generate(bare, "Hello")) == ids_of(generate(bare, "Hello", raw=True))
    for fields in ({"system": "Be brief."}, {"context": [1]}):
        with pytest.raises(BadRequest, match="no chat template"):
            generate(bare, "Hello", **fields)


def test_a_conversation_begins_once(byte_level: Tokenizer) -> None:
    template = "{{ bos_token }}{{ messages[0].content }}"
    files = model_files(byte_level, template)
    begin = "<|im_start|>"
    files["tokenizer_config.json"] = (
        b'{"bos_token": "<|im_start|>", "chat_template": "%s"}' % template.encode()
    )
    model = TextModel(
        *("m", LIMIT, INFO.vocab_size, load_tokenizer(files), load_chat_template(files)),
        trusts_templates=False,
        conventions=Conventions(),
    )
    bos = model.tokenizer.token_id(begin)
    first = ids_of(generate(model, "Hello"))
    assert first[0] == bos
    assert ids_of(generate(model, "Hello", context=first)) == [*first, *first[1:]]
