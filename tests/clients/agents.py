"""Coding agents as they are released, and what a model writes that drives them.

An agent runs on a host that no network leads away from, with a home, a folder to work in and a
server of tools of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest
from clients.environments import agent_packages
from hosts.network import Host

# That of a model that no agent knows, and that of one that Codex knows: for it, it has other tools.
MODELS = (MODEL, KNOWN_MODEL) = ("the-model", "gpt-5.5")
TIMEOUT_S = 120.0
_TOOL_SERVER = Path(__file__).parent / "scripts" / "adding_server.py"


# ---- What a model writes -------------------------------------------------------------------------


@dataclass(frozen=True)
class Call:
    """A call of a tool, with its arguments."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class Turn:
    """A turn of the model: its reasoning, its text and its calls."""

    thought: str = ""
    text: str = ""
    calls: Sequence[Call] = ()


def as_json_calls(turn: Turn) -> str:
    """Return the text that Qwen 3 writes for a turn. Its prompt ends before the reasoning."""
    calls = [
        "<tool_call>\n"
        + json.dumps({"name": call.name, "arguments": call.arguments}, ensure_ascii=False)
        + "\n</tool_call>"
        for call in turn.calls
    ]
    return f"<think>\n{turn.thought}\n</think>\n\n" + "\n".join(filter(None, [turn.text, *calls]))


def as_xml_calls(turn: Turn) -> str:
    """Return the text that Qwen 3.5 writes for a turn. Its prompt begins the reasoning."""
    calls = [_xml_call(call) for call in turn.calls]
    answer = "\n\n".join(filter(None, [turn.text, "\n".join(calls)]))
    return f"{turn.thought}\n</think>\n\n{answer}"


def _xml_call(call: Call) -> str:
    texts = {
        name: value if isinstance(value, str) else json.dumps(value)
        for name, value in call.arguments.items()
    }
    parameters = [f"<parameter={name}>\n{text}\n</parameter>" for name, text in texts.items()]
    return "\n".join(
        ["<tool_call>", f"<function={call.name}>", *parameters, "</function>", "</tool_call>"]
    )


@dataclass(frozen=True)
class Writing:
    """A way to write turns, and the chat template of models that write so."""

    template: str
    write: Callable[[Turn], str]


WRITINGS = {
    "json calls": Writing("Qwen-Qwen3-0.6B", as_json_calls),
    "xml calls": Writing("Qwen3.5-4B", as_xml_calls),
}


# ---- The programs --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ended:
    """The end of an agent's run: the JSON objects that it printed, one a line, its stderr and its
    exit status.
    """

    events: Sequence[Mapping[str, Any]]
    said: str
    status: int


@dataclass
class Agent(ABC):
    """A coding agent that is set up to ask the router at an address."""

    # The path of the router's API that the agent uses.
    route: ClassVar[str]

    host: Host
    url: str
    folder: Path
    # The length of the context that the agent assumes if it does not ask the router, in tokens.
    context_tokens: int = 200_000
    home: Path = field(init=False)
    work: Path = field(init=False)

    def __post_init__(self) -> None:
        self.home, self.work = self.folder / "home", self.folder / "work"
        for each in (self.home, self.work):
            each.mkdir(parents=True)
        self.set_up()

    @abstractmethod
    def set_up(self) -> None:
        """Write the files that the agent reads at its start."""

    @abstractmethod
    def command(self, prompt: str, *, goes_on: bool) -> list[str]:
        """Return the agent's command line. With `goes_on` it continues the session before."""

    @abstractmethod
    def variables(self) -> dict[str, str]:
        """Return the environment variables that the agent needs beside the usual ones."""

    def run(self, prompt: str, *, goes_on: bool = False) -> Ended:
        """Run the agent with the prompt, and wait until it exits."""
        usual = {"PATH": os.environ["PATH"], "HOME": str(self.home), "TMPDIR": str(self.folder)}
        ended = self.host.run(
            subprocess.run,
            self.command(prompt, goes_on=goes_on),
            cwd=self.work,
            env={**usual, **self.variables()},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
        lines = [line for line in ended.stdout.splitlines() if line.startswith("{")]
        return Ended([json.loads(line) for line in lines], ended.stderr, ended.returncode)


class Claude(Agent):
    """Claude Code."""

    route = "/v1/messages"

    def set_up(self) -> None:
        server = {"command": sys.executable, "args": [str(_TOOL_SERVER)]}
        (self.folder / "tools.json").write_text(json.dumps({"mcpServers": {"adding": server}}))

    def command(self, prompt: str, *, goes_on: bool) -> list[str]:
        return [
            str(_program("@anthropic-ai/claude-code-*/claude")),
            *("--print", "--output-format", "stream-json", "--verbose", "--model", MODEL),
            *("--dangerously-skip-permissions", "--mcp-config", str(self.folder / "tools.json")),
            *(["--continue"] if goes_on else []),
            *("--", prompt),
        ]

    def variables(self) -> dict[str, str]:
        quiet = ("CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC", "DISABLE_AUTOUPDATER")
        # Root may skip permissions where it says so.
        return {
            **dict.fromkeys((*quiet, "DISABLE_TELEMETRY", "IS_SANDBOX"), "1"),
            "ANTHROPIC_BASE_URL": self.url,
            "ANTHROPIC_API_KEY": "no-key",
        }


class ClaudeOfKnownContext(Claude):
    """Summarizes before anything is refused."""

    def variables(self) -> dict[str, str]:
        return {
            **super().variables(),
            "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(self.context_tokens),
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "4096",
        }


class Codex(Agent):
    """OpenAI's Codex."""

    route = "/v1/responses"
    model = MODEL

    def set_up(self) -> None:
        (self.home / "config.toml").write_text(
            f"""
model = "{self.model}"
model_provider = "here"
model_context_window = {self.context_tokens}
model_auto_compact_token_limit = {self.context_tokens * 3 // 4}
[model_providers.here]
name = "here"
base_url = "{self.url}/v1"
wire_api = "responses"
env_key = "KEY_OF_HERE"
[mcp_servers.adding]
command = "{sys.executable}"
args = ["{_TOOL_SERVER}"]
"""
        )

    def command(self, prompt: str, *, goes_on: bool) -> list[str]:
        return [
            str(_program("@openai/codex-*/vendor/*/bin/codex")),
            *("exec", "--json", "--skip-git-repo-check"),
            "--dangerously-bypass-approvals-and-sandbox",
            *(["resume", "--last"] if goes_on else []),
            prompt,
        ]

    def variables(self) -> dict[str, str]:
        return {"CODEX_HOME": str(self.home), "KEY_OF_HERE": "no-key"}


class CodexOfKnownModel(Codex):
    """Edits by patches, which are calls without JSON, and searches for other tools."""

    model = KNOWN_MODEL


def _program(pattern: str) -> Path:
    """The one for this platform; skips without."""
    found = sorted((agent_packages() / "node_modules").glob(pattern))
    if not found:
        pytest.skip(f"no {pattern} for this platform")
    return found[0]
