"""Vercel's AI SDK as it is released, over both APIs that it has a provider for.

The model says what a script holds, in the calls and the reasoning of its own format.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from clients.agents import Call, Turn, as_json_calls
from clients.environments import TIMEOUT_S, node_packages
from support.processes import Router, running
from support.scripted.model import Script, make_scripted_model
from support.scripted.shard import ScriptedShard
from support.vendored_templates import vendored_templates

pytestmark = pytest.mark.soak

SCRIPT = Path(__file__).parent / "scripts" / "with_vercel.mjs"
MODEL = "scripted"
# Long enough that it cannot come as one piece, however slow the machine is.
GREETING = "Good day to you. " * 20 + "Good day."
CITY = {"city": "Paris", "people": 2}
# By what a prompt holds: a result of the tool before what asks for its call.
ANSWERS = {
    '"total"': Turn("So it is.", "It is 5."),
    "ADD": Turn("I add.", "Let me see.", [Call("add", {"a": 2, "b": 3})]),
    "CHAT": Turn("A greeting.", GREETING),
    # The provider forces a call of a tool of this name.
    "OBJECT for anthropic": Turn("", "", [Call("json", CITY)]),
    "OBJECT for openai-compatible": Turn("", json.dumps(CITY, separators=(",", ":"))),
}


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Router]:
    template = vendored_templates().get("Qwen-Qwen3-0.6B")
    if template is None:
        pytest.skip("no chat templates: make .venv-clients/chat-templates/.done")
    folder = tmp_path_factory.mktemp("scripted")
    answers = {key: as_json_calls(turn) for key, turn in ANSWERS.items()}
    script = Script([], answers)
    make_scripted_model(folder / "model", template=template, context_tokens=4096, script=script)
    flags = ("--served-model-name", MODEL, "--step-ms", "5")
    shard = ScriptedShard(folder / "shard", folder / "model", *flags)
    router = Router(folder / "router", [shard.address])
    with running(shard, router):
        yield router


@pytest.fixture(scope="module", params=["openai-compatible", "anthropic"])
def observed(
    request: pytest.FixtureRequest, router: Router, tmp_path_factory: pytest.TempPathFactory
) -> Any:
    packages = node_packages()
    folder = tmp_path_factory.mktemp("vercel")
    shutil.copy(SCRIPT, folder)
    (folder / "node_modules").symlink_to(packages / "node_modules")
    ended = subprocess.run(
        ["node", SCRIPT.name, request.param, router.url, MODEL],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    return json.loads(ended.stdout.splitlines()[-1])


def test_a_chat_has_text_reasoning_and_usage(observed) -> None:
    chat = observed["chat"]
    assert (chat["text"], chat["reasoning"]) == (GREETING, "A greeting.")
    assert chat["reason"] == "stop"
    assert all(chat["tokens"])


def test_a_stream_says_the_same_in_pieces(observed) -> None:
    chat, stream = observed["chat"], observed["stream"]
    pieces = stream.pop("pieces")
    assert len(pieces) > 1
    assert "".join(pieces) == stream["text"]
    # It has no system message.
    assert stream["tokens"][0] < chat["tokens"][0]
    assert {**stream, "tokens": chat["tokens"]} == chat


@pytest.mark.parametrize("how", ["calls", "streamed_calls"])
def test_a_call_is_run_and_its_result_answered(observed, how) -> None:
    seen = observed[how]
    assert seen["called"] == [["add", {"a": 2, "b": 3}]]
    assert seen["results"] == [{"total": 5}]
    assert (seen["text"], seen["reasoning"]) == ("It is 5.", "So it is.")
    assert seen["reason"] == "stop"


def test_an_object_is_of_its_schema(observed) -> None:
    assert observed["object"] == CITY
