"""The shard whose model says a script: what it says, and what it tells of what it was asked."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.processes import Router, running
from support.scripted.model import Asked, Script, make_scripted_model
from support.scripted.shard import ScriptedShard

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SCRIPT = Script(["The first answer.", "The second."], {"WHENEVER": "That one."})
BLOCK_TOKENS = 16
USER = {"role": "user", "content": "A question of some length, so that it fills a few blocks. " * 3}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("scripted") / "model"
    make_scripted_model(path, template=TEMPLATE, context_tokens=2048, script=SCRIPT)
    return path


@pytest.fixture(scope="module")
def router(model: Path) -> Iterator[Router]:
    shard = ScriptedShard(model.parent / "shard", model)
    router = Router(model.parent / "router", [shard.address])
    with running(shard, router):
        yield router


def ask(router: Router, *messages: object, **fields: object) -> tuple[str, int]:
    """The answer's text, and how many cached tokens its usage tells of."""
    status, text = router.ask("/v1/chat/completions", {"messages": messages, **fields})
    assert status == 200, text
    answer = json.loads(text)
    cached: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return answer["choices"][0]["message"]["content"], cached


def test_it_says_its_turns_and_tells_which_prompts_came_and_what_was_cached(router, model) -> None:
    first, _ = ask(router, USER)
    other, _ = ask(router, {"role": "user", "content": "WHENEVER it is asked"})
    said = {"role": "assistant", "content": first}
    second, cached = ask(router, USER, said, {"role": "user", "content": "And?"})
    assert (first, other, second) == ("The first answer.", "That one.", "The second.")
    asked = Asked.read_all(model)
    assert [each.answered_by for each in asked] == [0, "WHENEVER", 1]
    before, _, after = asked
    shared = [*before.prompt, *before.answer]
    assert after.prompt[: len(shared)] == shared
    assert after.num_cached == cached == len(shared) // BLOCK_TOKENS * BLOCK_TOKENS


def test_what_a_constraint_forbids_is_an_error(router) -> None:
    body = {"messages": [{"role": "user", "content": "WHENEVER"}], "regex": "[0-9]+"}
    status, text = router.ask("/v1/chat/completions", body)
    assert status == 400
    assert "no token to draw at position 0" in text
