"""Released clients for Node, and coding agents, at a router whose shard's engine is vLLM.

The model's answers are noise: what counts is that they are read to their end, and that nothing is
computed any more for who has left.
"""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from clients.agents import MODEL, MODELS, Agent, Claude, Codex, CodexOfKnownModel
from clients.environments import TIMEOUT_S, node_packages
from hosts.network import Host, HostsUnavailable
from support.noise_model import make_noise_model
from support.processes import Router, Shard, wait_until
from support.vendored_templates import vendored_templates
from support.vllm_shards import INSTALLED, START_S, start

from penstock_client import LoadReport, ShardClient

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900), INSTALLED]

SCRIPT = Path(__file__).parents[1] / "clients" / "scripts" / "with_noise.mjs"
# More than an agent says of itself and its tools.
CONTEXT_TOKENS = 65_536
# Clients of the script, and what each calls an answer that its limit ends, and one that is a call.
REASONS = {
    "ai with openai-compatible": ("length", "tool-calls"),
    "ai with anthropic": ("length", "tool-calls"),
    "openai chat": ("length", "tool_calls"),
    "openai responses": ("max_output_tokens", "completed"),
    "anthropic": ("max_tokens", "tool_use"),
}
MAX_TOKENS = 150


class Place:
    """A router and its shard, on a host that no network leads away from."""

    def __init__(self, folder: Path) -> None:
        """Raises `HostsUnavailable`."""
        self.host = Host(1, has_address=False)
        template = vendored_templates()["Qwen-Qwen2.5-7B-Instruct"]
        make_noise_model(folder / "model", template=template, context_tokens=CONTEXT_TOKENS)
        named = ("--model", str(folder / "model"), "--served-model-name", *MODELS)
        flags = (*named, "--max-model-len", str(CONTEXT_TOKENS))
        self.shard: Shard = self.host.run(start, folder / "vllm", *flags)
        self.router: Router = self.host.run(Router, folder / "router", [self.shard.address])

    def wait(self) -> None:
        for each in (self.shard, self.router):
            self.host.run(each.wait_healthy, START_S)

    def load(self) -> LoadReport:
        """What vLLM has to do, and has done."""
        return self.host.run(lambda: asyncio.run(self._load()))

    async def _load(self) -> LoadReport:
        async with ShardClient(self.shard.address) as client, aclosing(client.watch_load()) as told:
            return await anext(told)

    def statuses(self, route: str) -> set[str]:
        """Of all answers so far on a route."""
        metrics = self.host.run(self.router.ask, "/metrics")[1]
        answered = rf'^penstock_router_requests_total{{.*route="{route}",status="(\d+)"}}'
        return set(re.findall(answered, metrics, re.MULTILINE))

    def close(self) -> None:
        self.router.close()
        self.shard.close()
        self.host.close()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    if not vendored_templates():
        pytest.skip("no chat templates: make .venv-clients/chat-templates/.done")
    try:
        place = Place(tmp_path_factory.mktemp("noise"))
    except HostsUnavailable as reason:
        pytest.skip(str(reason))
    try:
        place.wait()
        yield place
    finally:
        place.close()


# ---- Clients for Node ----------------------------------------------------------------------------


@pytest.mark.parametrize("client", REASONS)
def test_a_client_reads_its_answers_and_what_it_leaves_ends_in_vllm(
    client: str, place: Place, tmp_path: Path
) -> None:
    shutil.copy(SCRIPT, tmp_path)
    (tmp_path / "node_modules").symlink_to(node_packages() / "node_modules")
    process: subprocess.Popen[str] = place.host.run(
        subprocess.Popen,
        ["node", SCRIPT.name, client, place.router.url, MODEL],
        cwd=tmp_path,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        printed = process.stdout.readline()
        assert printed, process.communicate(timeout=TIMEOUT_S)[1]
        _check_answers(json.loads(printed), *REASONS[client])
        assert process.stdout.readline() == "begun\n"
        assert place.load().running == 1
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "left\n"
        _wait_until_idle(place)
        assert process.poll() is None
        said = process.communicate(timeout=TIMEOUT_S)[1]
        assert (process.returncode, said) == (0, "")
    finally:
        process.kill()
        process.wait()


def _check_answers(seen: dict[str, Any], limited: str, called: str) -> None:
    for kind in ("", " with a tool", " call"):
        whole, streamed = seen[f"whole{kind}"], seen[f"streamed{kind}"]
        assert "".join(streamed.pop("pieces")) == whole["text"]
        assert streamed == whole
        assert whole["tokens"][0] > 0
    for kind in ("", " with a tool"):
        whole = seen[f"whole{kind}"]
        assert whole["text"]
        assert (whole["reason"], whole["calls"]) == (limited, [])
        assert whole["tokens"][1] == MAX_TOKENS
    assert seen["whole with a tool"]["tokens"][0] > seen["whole"]["tokens"][0]
    call = seen["whole call"]
    ((name, arguments),) = call["calls"]
    assert (call["text"], call["reason"], name) == ("", called, "take")
    assert 0 < call["tokens"][1] < MAX_TOKENS
    assert set(arguments) == {"which", "sure"}
    assert arguments["which"] in ("left", "right")
    assert isinstance(arguments["sure"], bool)


def _wait_until_idle(place: Place) -> None:
    """Until two reports show no request, and no step between them."""
    seen = [place.load()]

    def is_idle() -> bool:
        seen.append(place.load())
        before, now = seen[-2:]
        requests = now.running + now.waiting + now.referenced_blocks
        return requests == 0 and before.steps_total == now.steps_total

    wait_until(is_idle, timeout_s=10, what="vLLM is idle")


# ---- Coding agents -------------------------------------------------------------------------------


# The last event of a turn that went well: Claude Code's, Codex's.
ENDS = [("result", False), ("turn.completed", False)]


@pytest.mark.parametrize("kind", [Claude, Codex, CodexOfKnownModel])
def test_an_agent_gets_its_answer_and_ends(kind: type[Agent], place: Place, tmp_path: Path) -> None:
    agent = kind(place.host, place.router.url, tmp_path / "agent", context_tokens=CONTEXT_TOKENS)
    ended = agent.run("Say something.")
    assert ended.status == 0, (ended, place.router.log[-3000:])
    last = ended.events[-1]
    assert (last["type"], last.get("is_error", False)) in ENDS, ended
    assert last["usage"]["output_tokens"] > 0
    assert place.statuses(kind.route) == {"200"}
