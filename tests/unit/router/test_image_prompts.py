"""Images in prompts: where they stand, what is refused, and text that spells a placeholder."""

from __future__ import annotations

import dataclasses
import json
import random
import time
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from support.budget import budget, seeded
from support.image_models import IMAGE_MODELS, PARTS_ONLY_TEMPLATE, TEXT_TEMPLATE, ImageModel
from support.router_doubles import FakeFleet, memory_router
from tokenizers import Tokenizer, processors

from penstock_common.child_process.framing import HEADER_BYTES
from penstock_router.errors import BadRequest, ContextExceeded
from penstock_router.offload.body_kinds import KINDS, work
from penstock_router.offload.text_messages import (
    ModelFacts,
    Work,
    decode_outcome,
    decode_task,
    encode_outcome,
    encode_task,
)
from penstock_router.offload.text_process import TextWorker
from penstock_router.request import ChatRequest, CompletionRequest, TextWithImages, Tool, ToolChoice
from penstock_router.text.chat_template import load_chat_template
from penstock_router.text.image_tokens.base import ImagePlace, ImagesUnusable
from penstock_router.text.image_tokens.registry import load_image_tokens, read_image_tokens
from penstock_router.text.model_conventions import conventions_of
from penstock_router.text.prompts import (
    PreparedPrompts,
    Prompt,
    TextModel,
    prepare_prompts,
)
from penstock_router.text.tokenizer import load_tokenizer

QWEN = IMAGE_MODELS["qwen2_5_vl"]
MARKS = list(map(chr, range(0xFDD0, 0xFDF0)))
IMAGE = {"type": "image"}


def text(value: str) -> dict[str, str]:
    return {"type": "text", "text": value}


def model_of(files: Mapping[str, bytes], max_model_len: int = 1_000_000) -> TextModel:
    tokenizer, template = load_tokenizer(files), load_chat_template(files)
    return TextModel(
        "m",
        max_model_len,
        500,
        tokenizer,
        template,
        False,
        conventions_of(template, "auto", "auto"),
        *load_image_tokens(files, tokenizer),
    )


def chat(
    messages: Sequence[Any], sizes: Sequence[tuple[int, int]] = (), **more: Any
) -> ChatRequest:
    listed = [{"role": "user", "content": each} if not isinstance(each, dict) else each
              for each in messages]  # fmt: skip
    options: dict[str, Any] = {"add_special_tokens": False, "image_sizes": tuple(sizes)}
    return ChatRequest(messages=listed, **options | more)


def prompt_of(request: ChatRequest | CompletionRequest, model: TextModel) -> Prompt:
    [prompt] = prepare_prompts(request, model).prompts
    return prompt


def id_of(model: TextModel, token: str) -> int:
    token_id = model.tokenizer.token_id(token)
    assert token_id is not None
    return token_id


def shown(model: TextModel, prompt: Prompt) -> str:
    """A prompt's text, with `{size}` for each image of so many tokens."""
    ids, texts, begin = list(prompt.token_ids), [], 0
    for place in prompt.images:
        before = model.tokenizer.decode(ids[begin : place.offset], skip_special_tokens=False)
        texts += [before, f"{{{place.num_tokens}}}"]
        begin = place.offset + place.num_tokens
    return "".join(texts) + model.tokenizer.decode(ids[begin:], skip_special_tokens=False)


# ---- Where images stand ------------------------------------------------------------------------


def test_each_image_stands_where_its_part_was() -> None:
    model = model_of(QWEN.files())
    turns = [
        [text("one "), IMAGE, text(" two "), IMAGE],
        {"role": "assistant", "content": "seen"},
        [IMAGE, text("three")],
    ]
    prompt = prompt_of(chat(turns, [(28, 56), (280, 28), (56, 56)]), model)
    begin, end = "<|vision_start|>", "<|vision_end|>"
    assert shown(model, prompt) == (
        f"<|im_start|>user\none {begin}{{6}}{end} two {begin}{{10}}{end}<|im_end|>\n"
        "<|im_start|>assistant\nseen<|im_end|>\n"
        f"<|im_start|>user\n{begin}{{4}}{end}three<|im_end|>\n<|im_start|>assistant\n"
    )
    pad = model.tokenizer.token_id("<|image_pad|>")
    for place in prompt.images:
        of_it = prompt.token_ids[place.offset : place.offset + place.num_tokens]
        assert set(of_it) == {pad}


def test_a_template_of_texts_gets_the_anchor_in_the_place_of_the_part() -> None:
    model = model_of(IMAGE_MODELS["llava_next"].files(TEXT_TEMPLATE))
    prompt = prompt_of(chat([[text("look:"), IMAGE, text("and?")]], [(336, 336)]), model)
    assert shown(model, prompt) == "USER: look:\n{1176}\nand?\nASSISTANT:"


def test_a_template_of_parts_alone_gets_texts_as_parts() -> None:
    model = model_of(IMAGE_MODELS["llava_next"].files(PARTS_ONLY_TEMPLATE))
    assert shown(model, prompt_of(chat(["hello"]), model)) == "USER: hello\nASSISTANT:"
    prompt = prompt_of(chat([[text("look"), IMAGE], "and?"], [(336, 336)]), model)
    assert shown(model, prompt) == "USER: {1176}\nlook\nUSER: and?\nASSISTANT:"
    begun = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    asked = chat(begun, continue_final_message=True, add_generation_prompt=False)
    assert shown(model, prompt_of(asked, model)) == "USER: a\nASSISTANT: b"


def test_what_a_template_takes_does_not_depend_on_who_asks_first() -> None:
    template = "{{ tools[0].function.missing.name if tools else '' }}" + TEXT_TEMPLATE
    model = model_of(QWEN.files(template.replace("{{ message.content }}", "{% for part in "
                     "message.content %}{{ part.text or 'IMAGE' }}{% endfor %}")))  # fmt: skip
    tool = Tool("look", shown={"function": {"name": "look"}})
    failing = chat([[IMAGE]], [(56, 56)], tools=(tool,), tool_choice=ToolChoice("auto"))
    assert refusal(failing, model).startswith("the chat template")
    prompt = prompt_of(chat([[IMAGE, text("?")]], [(56, 56)]), model)
    assert shown(model, prompt) == "USER: <|vision_start|>{4}<|vision_end|>?ASSISTANT:"


def test_the_tokens_around_an_image_are_not_its_own() -> None:
    model = model_of(IMAGE_MODELS["gemma3"].files())
    prompt = prompt_of(chat([[IMAGE, text("?")]], [(5, 5)]), model)
    assert shown(model, prompt) == (
        "<|im_start|>user\n\n\n<start_of_image>{256}<end_of_image>\n\n?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_images_stand_in_a_text_to_complete() -> None:
    model = model_of(with_ends(QWEN).files())
    prompts = (
        TextWithImages(("a ", " b ", "")),
        "plain",
        [5, 6],
        TextWithImages(("", " <|image_pad|>")),
    )
    sizes = ((28, 56), (56, 56), (28, 28))
    asked = CompletionRequest(prompts=prompts, image_sizes=sizes, echo=True)
    first, plain, ids, last = prepare_prompts(asked, model).prompts
    begin, end = "<|vision_start|>", "<|vision_end|>"
    assert shown(model, first) == f"<s>a {begin}{{6}}{end} b {begin}{{4}}{end}</s>"
    assert (plain.text, plain.images, ids.token_ids) == ("plain", (), [5, 6])
    assert shown(model, last) == f"<s>{begin}{{4}}{end} <|image_pad|></s>"
    assert last.images == (ImagePlace(2, 4),)
    assert list(last.token_ids).count(id_of(model, "<|image_pad|>")) == 4


def with_ends(model: ImageModel) -> ImageModel:
    """The model, whose tokenizer adds a token at both ends."""

    class WithEnds(ImageModel):
        def tokenizer(self) -> Tokenizer:
            made = super().tokenizer()
            ends = [(end, made.token_to_id(end) or 0) for end in ("<s>", "</s>")]
            made.post_processor = processors.TemplateProcessing(
                single="<s> $A </s>", special_tokens=ends
            )
            return made

    return WithEnds(**vars(model))


def test_results_of_tools_may_be_images_where_the_template_has_no_tools() -> None:
    model = model_of(QWEN.files())
    call = {"id": "1", "function": {"name": "look", "arguments": {}}}
    turns = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "U"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": [text("seen:"), IMAGE]},
        {"role": "user", "content": [text("and"), IMAGE]},
    ]
    tools = (Tool("look", shown={"function": {"name": "look"}}),)
    asked = chat(turns, [(28, 56), (56, 56)], tools=tools, tool_choice=ToolChoice("auto"))
    told = shown(model, prompt_of(asked, model))
    begin, end = "<|vision_start|>", "<|vision_end|>"
    assert f"Result of look:\nseen:{begin}{{6}}{end}\n\nand{begin}{{4}}{end}<|im_end|>" in told
    assert "<|im_start|>system\nS\n\nYou can call" in told


def test_results_of_tools_are_texts_where_the_template_takes_no_parts_of_them() -> None:
    template = (
        "{{ tools | length if tools }}{% for message in messages %}{% if message.role == 'tool' %}"
        "<result>{{ message.content }}</result>{% elif message.content is string %}"
        "{{ message.content }}{% else %}{% for part in message.content %}"
        "{{ part.text or 'IMAGE' }}{% endfor %}{% endif %}{% endfor %}"
    )
    model = model_of(QWEN.files(template))
    call = {"id": "1", "function": {"name": "look", "arguments": {}}}
    turns = [
        {"role": "user", "content": [text("a"), IMAGE]},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": [text("<|image_pad|>"), IMAGE]},
    ]
    tools = (Tool("look", shown={"function": {"name": "look"}}),)
    sizes = [(28, 56), (56, 56)]
    asked = chat(turns, sizes, tools=tools, tool_choice=ToolChoice("auto"))
    begin, end = "<|vision_start|>", "<|vision_end|>"
    told = '{"name": "look", "arguments": {}}'
    assert shown(model, prompt_of(asked, model)) == (
        f"1a{begin}{{6}}{end}{told}<result><|image_pad|>\n{begin}{{4}}{end}</result>"
    )


# ---- What is refused ---------------------------------------------------------------------------


def refusal(request: ChatRequest | CompletionRequest, model: TextModel) -> str:
    with pytest.raises(BadRequest) as caught:
        prepare_prompts(request, model)
    return caught.value.message


def test_images_that_the_template_does_not_show_are_refused() -> None:
    drops = QWEN.files("{% for message in messages %}{% if loop.last %}{% for part in "
                       "message.content %}{{ part.text or 'IMAGE' }}{% endfor %}{% endif %}"
                       "{% endfor %}")  # fmt: skip
    asked = chat([[IMAGE], [IMAGE]], [(56, 56), (56, 56)])
    assert refusal(asked, model_of(drops)).startswith("the chat template shows 1 of the 2 images")


def test_places_without_images_are_refused() -> None:
    asked = chat([[IMAGE, IMAGE]], [(56, 56)])
    assert refusal(asked, model_of(QWEN.files())) == (
        "the prompt has 2 places for images, and 1 were given"
    )
    several = CompletionRequest(prompts=("a",), image_sizes=((56, 56),))
    assert refusal(several, model_of(QWEN.files())).startswith("prompt: it has no place for 1")


def test_models_that_take_no_images_say_so() -> None:
    files = QWEN.files()
    blind = model_of({name: files[name] for name in files if "tokenizer" in name})
    asked = chat([[IMAGE]], [(56, 56)])
    assert refusal(asked, blind) == "the model m takes no images"
    piece = CompletionRequest(prompts=(TextWithImages(("a", "b")),), image_sizes=((56, 56),))
    assert refusal(piece, blind) == "the model m takes no images"
    broken = model_of(files | {"preprocessor_config.json": b"{"})
    assert refusal(asked, broken) == (
        "the model m takes no images (preprocessor_config.json: it is not valid JSON)"
    )
    # Texts are served all the same.
    assert shown(broken, prompt_of(chat(["hi"]), broken)).startswith("<|im_start|>user\nhi")


def test_proportions_that_a_model_does_not_take_are_refused() -> None:
    asked = chat([[IMAGE]], [(1, 201)])
    assert refusal(asked, model_of(QWEN.files())) == (
        "an image of 1 x 201 pixels: its longer side may have at most 200 times the pixels of "
        "the shorter one"
    )
    thin = refusal(chat([[IMAGE]], [(1, 5000)]), model_of(IMAGE_MODELS["pixtral"].files()))
    assert thin.startswith("an image of 1 x 5000 pixels: shrunk to sides of at most 1024 pixels")


def test_images_count_for_the_context() -> None:
    limit = len(
        prompt_of(request := chat([[IMAGE]], [(280, 280)]), model_of(QWEN.files())).token_ids
    )
    assert len(prompt_of(request, model_of(QWEN.files(), limit)).token_ids) == limit
    with pytest.raises(ContextExceeded, match=f"your prompt contains {limit} input tokens"):
        prepare_prompts(request, model_of(QWEN.files(), limit - 1))


def test_many_large_images_are_refused_before_they_become_ids() -> None:
    many = chat([[IMAGE] * 5_000], [(4032, 3024)] * 5_000)
    begun = time.monotonic()
    with pytest.raises(ContextExceeded) as caught:
        prepare_prompts(many, model_of(QWEN.files(), 32_768))
    assert caught.value.prompt_tokens == 3 * 15_552
    assert time.monotonic() - begun < 5


@pytest.mark.parametrize("kept", [None, 10])
def test_a_text_that_spells_more_placeholders_than_fit_is_not_tokenized(
    kept: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(QWEN.files(), 32_768)
    asked = chat(["<|image_pad|>" * 40_000], truncate_prompt_tokens=kept)
    monkeypatch.setattr(type(model.tokenizer), "encode", None)
    with pytest.raises(ContextExceeded):
        prepare_prompts(asked, model)


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_prompt_is_cut_beside_its_images_and_never_through_one(side: str) -> None:
    model = model_of(QWEN.files())
    turn = [text("before" * 3), IMAGE, text("after" * 3)]
    whole = prompt_of(request := chat([turn], [(280, 28)]), model)
    [place] = whole.images
    num_tokens = len(whole.token_ids)
    fits = place.offset + place.num_tokens if side == "right" else num_tokens - place.offset
    for kept in range(1, num_tokens + 5):
        asked = dataclasses.replace(request, truncate_prompt_tokens=kept, truncation_side=side)
        if kept < fits:
            assert refusal(asked, model) == (
                f"truncate_prompt_tokens: keeping {kept} of the prompt's {num_tokens} tokens would "
                "cut off an image, or a part of one"
            )
            continue
        cut = prompt_of(asked, model)
        gone = max(0, num_tokens - kept)
        ids = list(whole.token_ids)
        assert cut.token_ids == (ids[gone:] if side == "left" else ids[:kept])
        assert cut.images == (ImagePlace(place.offset - (gone if side == "left" else 0), 10),)


# ---- Text that spells what stands for an image -------------------------------------------------


def random_text(rng: random.Random, reserved: Sequence[str]) -> str:
    """Return a text of reserved words, parts of them, marks and other letters, drawn at random."""
    pieces = []
    for _ in range(rng.randint(0, 6)):
        spelled = rng.choice(reserved)
        cut = rng.randint(0, len(spelled))
        choices = [
            spelled,
            spelled,
            spelled[:cut],
            spelled[cut:],
            rng.choice(MARKS),
            "ü ",
            "a",
            "<",
        ]
        pieces.append(rng.choice(choices))
    return "".join(pieces)


def random_turns(rng: random.Random, reserved: Sequence[str]) -> list[Any]:
    """Contents: texts, and lists of parts in any order."""
    return [
        random_text(rng, reserved)
        if rng.random() < 0.3
        else [
            IMAGE if rng.random() < 0.4 else text(random_text(rng, reserved))
            for _ in range(rng.randint(1, 6))
        ]
        for _ in range(rng.randint(1, 4))
    ]


def neutral(value: Any) -> Any:
    """Contents with nothing spelled in their texts."""
    if isinstance(value, str):
        return "".join(character if character.isalpha() else "." for character in value)
    return [text(neutral(part["text"])) if "text" in part else part for part in value]


@pytest.mark.parametrize("template", [None, TEXT_TEMPLATE, PARTS_ONLY_TEMPLATE])
@pytest.mark.parametrize("family", IMAGE_MODELS)
def test_text_never_becomes_a_placeholder(family: str, template: str | None) -> None:
    rng, kind = seeded(family), IMAGE_MODELS[family]
    model = model_of(kind.files() if template is None else kind.files(template))
    assert model.image_tokens is not None
    ids_of_images = [id_of(model, each) for each in kind.special_tokens]
    for _ in range(budget(25, 1_000)):
        turns = random_turns(rng, sorted(model.image_tokens.reserved))
        num_images = sum(part is IMAGE for turn in turns for part in turn)
        sizes = [(rng.randint(100, 900), rng.randint(100, 900)) for _ in range(num_images)]
        made = prompt_of(chat(turns, sizes), model)
        plain = prompt_of(chat([neutral(turn) for turn in turns], sizes), model)
        for token_id in ids_of_images:
            assert made.token_ids.count(token_id) == plain.token_ids.count(token_id)
        for place, size in zip(made.images, sizes, strict=True):
            of_it = made.token_ids[place.offset : place.offset + place.num_tokens]
            assert of_it == list(model.image_tokens.token_ids(*size))
        # What users wrote is there, letter for letter.
        letters = iter(shown(model, made))
        for turn in turns:
            for part in [text(turn)] if isinstance(turn, str) else turn:
                assert all(letter in letters for letter in part.get("text", "")) or (
                    template == PARTS_ONLY_TEMPLATE
                )


def test_what_is_spelled_anywhere_in_a_request_stays_text() -> None:
    template = (
        "{{ tools | tojson }}{{ documents | tojson(indent=1) }}{{ more }}{% for message in messages"
        " %}{{ message.content if message.content is string else 'IMAGE' }}{{ message.tool_calls |"
        " tojson if message.tool_calls else '' }}{% endfor %}"
    )
    model = model_of(QWEN.files(template))
    spelled = "<|image_pad|>"
    call = {"function": {"name": spelled, "arguments": {spelled: [spelled]}}}
    parameters = {"properties": {spelled: {"description": spelled}}}
    asked = chat(
        [[IMAGE], {"role": "assistant", "content": spelled, "tool_calls": [call]}],
        [(56, 56)],
        tools=(Tool("look", parameters, shown={"function": {"parameters": parameters}}),),
        tool_choice=ToolChoice("auto"),
        documents=[{"title": spelled, spelled: "a"}],
        template_kwargs={"more": spelled},
    )
    prompt = prompt_of(asked, model)
    assert list(prompt.token_ids).count(id_of(model, spelled)) == 4
    assert shown(model, prompt).count(spelled) == 9
    assert not set(MARKS) & set(shown(model, prompt))
    # The request is as it was.
    assert asked.messages[1]["content"] == spelled


def test_text_of_two_parts_does_not_become_a_placeholder() -> None:
    model = model_of(QWEN.files())
    turn = [text("<|ima"), text("ge"), text("_pad|>"), IMAGE, text("<|image_pad|>")]
    prompt = prompt_of(chat([turn], [(56, 56)]), model)
    assert "user\n<|image_pad|><|vision_start|>{4}<|vision_end|><|image_pad|>" in shown(
        model, prompt
    )
    assert len(prompt.images) == 1


def test_text_that_the_template_makes_a_placeholder_of_is_refused() -> None:
    template = "{% for message in messages %}{{ message.content | lower }}{% endfor %}"
    model = model_of(QWEN.files(template))
    assert refusal(chat(["<|IMAGE_PAD|>"]), model).startswith("the prompt has 1 places for images")


def test_text_that_is_no_token_of_the_model_is_tokenized_as_a_whole() -> None:
    words = ImageModel.tokenizer

    class WithWords(ImageModel):
        def tokenizer(self) -> Tokenizer:
            made = words(self)
            made.add_tokens(["<vid"])
            return made

    llava = IMAGE_MODELS["llava_next"]
    model = model_of(WithWords(**vars(llava)).files())
    ids = prompt_of(chat(["<video>"]), model).token_ids
    assert id_of(model, "<vid") in ids
    # Where it is a token it stays text.
    known = dataclasses.replace(llava, special_tokens=(*llava.special_tokens, "<video>"))
    model = model_of(known.files())
    assert id_of(model, "<video>") not in prompt_of(chat(["<video>"]), model).token_ids


def test_every_noncharacter_may_be_in_a_text_but_not_all_beside_a_placeholder() -> None:
    model = model_of(QWEN.files())
    for texts in ("".join(MARKS), "<|image_pad|>" + "".join(MARKS[:-1])):
        assert texts in shown(model, prompt_of(chat([texts]), model))
    assert "noncharacters" in refusal(chat(["<|image_pad|>" + "".join(MARKS)]), model)


def test_a_model_without_images_gets_texts_as_they_are() -> None:
    files = QWEN.files()
    blind = model_of({name: files[name] for name in files if "tokenizer" in name})
    prompt = prompt_of(chat(["<|image_pad|>"]), blind)
    assert list(prompt.token_ids).count(id_of(blind, "<|image_pad|>")) == 1


def test_a_text_to_complete_stays_text() -> None:
    model = model_of(with_ends(QWEN).files())
    asked = CompletionRequest(prompts=("see <|image_pad|>",), echo=True)
    prompt = prompt_of(asked, model)
    assert prompt.text == "see <|image_pad|>"
    assert shown(model, prompt) == "<s>see <|image_pad|></s>"
    assert model.tokenizer.token_id("<|image_pad|>") not in prompt.token_ids
    for kept in range(1, 25):
        cut = dataclasses.replace(asked, truncate_prompt_tokens=kept, truncation_side="left")
        plain = dataclasses.replace(cut, prompts=("see .|image_pad|.",))
        assert len(prompt_of(cut, model).token_ids) == len(prompt_of(plain, model).token_ids)


# ---- Files -------------------------------------------------------------------------------------

UNUSABLE = [
    ("qwen2_vl", "preprocessor_config.json", None, "preprocessor_config.json: the model has none"),
    ("qwen2_vl", "config.json", {"image_token_id": None},
     "config.json: image_token_index is missing"),
    ("qwen2_vl", "config.json", {"image_token_id": 9999},
     "config.json: image_token_id ('9999') is no token of tokenizer.json"),
    ("qwen2_vl", "config.json", {"model_type": "qwen9_vl"},
     "preprocessor_config.json: models of type qwen9_vl with a Qwen2VLImageProcessor are not "
     "implemented"),
    ("qwen3_vl", "preprocessor_config.json", {"size": {"shortest_edge": 1}},
     "preprocessor_config.json: size: longest_edge is missing"),
    ("qwen3_vl", "preprocessor_config.json", {"size": 3},
     "preprocessor_config.json: size ('3') is no object"),
    ("qwen3_vl", "preprocessor_config.json", {"patch_size": 1.5},
     "preprocessor_config.json: patch_size ('1.5') must be a whole number from 1 to 2147483647"),
    ("qwen3_vl", "preprocessor_config.json", {"do_resize": False},
     "preprocessor_config.json: do_resize ('False') is not implemented"),
    ("gemma3", "preprocessor_config.json", {"do_pan_and_scan": True},
     "preprocessor_config.json: do_pan_and_scan ('True') is not implemented"),
    ("llava_next", "processor_config.json", {"patch_size": None},
     "processor_config.json: patch_size is missing"),
    ("llava_next", "preprocessor_config.json", {"crop_size": {"height": 224, "width": 336}},
     "preprocessor_config.json: crop_size: height ('224') is not implemented beside a size of 336"),
    ("llava_next", "preprocessor_config.json", {"image_grid_pinpoints": [[1]]},
     "preprocessor_config.json: image_grid_pinpoints ('[[1]]') must be pairs of numbers of at "
     "least 336"),
    ("internvl", "preprocessor_config.json", {"max_patches": 100_000},
     "preprocessor_config.json: max_patches ('100000') must be a whole number from 1 to 256"),
    ("internvl", "tokenizer_config.json", {"extra_special_tokens": {"start_image_token": "<x>"}},
     "tokenizer.json: it has no token '<x>' (start_image_token)"),
    ("gemma4", "preprocessor_config.json", {"max_soft_tokens": 300},
     "preprocessor_config.json: max_soft_tokens ('300') is not implemented"),
    ("llava", "processor_config.json", {"patch_size": 400},
     "processor_config.json: patch_size ('400') makes 0 tokens of an image"),
    ("idefics3", "preprocessor_config.json", {"max_image_size": {"longest_edge": 10}},
     "preprocessor_config.json: max_image_size (\"{'longest_edge': 10}\") makes 146 tiles of an "
     "image's longer side"),
    ("pixtral", "processor_config.json", {"image_break_token": ""},
     "processor_config.json: image_break_token ('') must be a string"),
]  # fmt: skip


@pytest.mark.parametrize(("family", "name", "change", "told"), UNUSABLE)
def test_what_is_wrong_with_the_files_is_told_in_a_line(
    family: str, name: str, change: dict[str, Any] | None, told: str
) -> None:
    files = IMAGE_MODELS[family].files()
    if change is None:
        del files[name]
    else:
        files[name] = json.dumps(json.loads(files[name]) | change).encode()
    with pytest.raises(ImagesUnusable) as caught:
        read_image_tokens(files, load_tokenizer(files))
    assert str(caught.value) == told


def test_settings_may_be_part_of_the_processors_file() -> None:
    files = IMAGE_MODELS["internvl"].files()
    processor = json.loads(files["processor_config.json"])
    processor["image_processor"] = json.loads(files.pop("preprocessor_config.json"))
    files["processor_config.json"] = json.dumps(processor).encode()
    tokens = read_image_tokens(files, load_tokenizer(files))
    assert tokens is not None
    assert len(tokens.token_ids(1024, 768)) == 3_328


async def test_a_model_whose_images_are_not_understood_serves_texts() -> None:
    files = QWEN.files() | {"preprocessor_config.json": b"[]"}
    async with memory_router(FakeFleet(files)) as router:
        assert (await router.chat("hello")).status == 200


# ---- Between processes -------------------------------------------------------------------------


async def test_sizes_reach_a_text_process_and_places_come_back() -> None:
    facts = ModelFacts("m", "t", 512, 500, False, "", "")
    task, sizes = decode_task(
        encode_task(Work(1, "chat", facts, image_sizes=((56, 28),)), [5])[HEADER_BYTES:]
    )
    assert isinstance(task, Work)
    assert (task.image_sizes, sizes) == (((56, 28),), [5])
    model = model_of(QWEN.files())
    kind = KINDS["chats"]
    made = work(kind, chat([[IMAGE]]), model, b"", task.image_sizes)  # type: ignore[arg-type]
    assert isinstance(made, PreparedPrompts)
    there = await decode_outcome(encode_outcome(made)[HEADER_BYTES:])
    assert isinstance(there, PreparedPrompts)
    assert there.prompts[0].images == made.prompts[0].images
    assert list(there.prompts[0].token_ids) == made.prompts[0].token_ids


async def test_a_text_process_knows_what_images_take() -> None:
    files = QWEN.files()
    facts = ModelFacts("m", "t", 512, 500, False, "auto", "auto")
    task = Work(1, "chats", facts, tuple(files), image_sizes=((56, 28),))
    body = json.dumps({"messages": [{"role": "user", "content": "hi"}]}).encode()
    worker = TextWorker()
    worker.load(task, [body, b"", *files.values()])
    with pytest.raises(BadRequest, match="shows 0 of the 1 images"):
        await decode_outcome(worker.do(task, [body, b"", *files.values()])[HEADER_BYTES:])
