"""Claude Code and Codex as they are released work through a session with a model's own calls.

The model says what a script holds; router, shard, engine and prefix cache are those that serve.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from clients.agents import (
    MODELS,
    WRITINGS,
    Agent,
    Call,
    Claude,
    ClaudeOfKnownContext,
    Codex,
    CodexOfKnownModel,
    Turn,
    as_json_calls,
)
from hosts.network import Host, HostsUnavailable
from support.image_files import png_of_zeros
from support.processes import Router
from support.scripted.model import Asked, Script, make_scripted_model
from support.scripted.shard import ScriptedShard
from support.vendored_templates import vendored_templates

pytestmark = pytest.mark.soak

BLOCK_TOKENS = 16
# Of the blocks that a turn has in common with the one before, so many are found at least.
FOUND = 0.95

# ---- Sessions: what is in the folder before and after, and what the model does -------------------

LIST = "# Files\n\n* notes.txt: 'three' lines & <more>\n"
BEFORE = {"notes.txt": "one\ntwo\nthree\n", "greeting.py": 'print("hello")\n', "old.txt": "old\n"}
AFTER = {
    "notes.txt": "one\nTWO\nthree\n",
    "greeting.py": 'print("good day")\n',
    "old.txt": "old\n",
    "sum.txt": "5\n",
    "list.md": LIST,
    "numbers.txt": "1\n2\n3\n",
}
PROMPTS = ("Put the notes right.", "And the greeting.")
# The turn that answers the second one.
SECOND_PROMPT = 7
ADD = Turn("", "", [Call("mcp__adding__add", {"a": 2, "b": 3})])


def command(text: str) -> Call:
    """Return the tool call by which Codex runs a command."""
    return Call("exec_command", {"cmd": text})


def bash(text: str) -> Call:
    """Return the tool call by which Claude Code runs a command."""
    return Call("Bash", {"command": text, "description": "Run it"})


def claude_session(work: Path) -> list[Turn]:
    def of_file(name: str, file: str, **arguments: str) -> Call:
        return Call(name, {"file_path": f"{work}/{file}", **arguments})

    return [
        Turn("I look first.", "I read the notes.", [of_file("Read", "notes.txt")]),
        Turn("Both.", "", [of_file("Read", "greeting.py"), of_file("Read", "old.txt")]),
        Turn("Now.", "", [of_file("Edit", "notes.txt", old_string="two", new_string="TWO")]),
        Turn(
            "What adds?",
            "A command.",
            [
                bash("seq 3 > numbers.txt; cat notes.txt"),
                Call("ToolSearch", {"query": "select:mcp__adding__add"}),
            ],
        ),
        Turn("A new file.", "", [of_file("Write", "list.md", content=LIST)]),
        ADD,
        Turn("That is it.", "The notes are right."),
        Turn(
            "Two at once.",
            "",
            [
                of_file("Edit", "greeting.py", old_string="hello", new_string="good day"),
                bash("echo 5 > sum.txt && wc -l *"),
            ],
        ),
        Turn("Is it right?", "", [bash("cat greeting.py")]),
        Turn("Yes.", "All done."),
    ]


def codex_session(work: Path) -> list[Turn]:
    return [
        Turn("I look first.", "I read the notes.", [command("cat notes.txt")]),
        Turn("Both.", "", [command("cat greeting.py"), command("cat old.txt")]),
        Turn("Now.", "", [command("sed -i s/two/TWO/ notes.txt")]),
        Turn("", "A command.", [command("seq 3 > numbers.txt; cat notes.txt")]),
        Turn("A new file.", "", [command(f"cat > list.md <<'END'\n{LIST}END")]),
        ADD,
        Turn("That is it.", "The notes are right."),
        Turn(
            "Two at once.",
            "",
            [
                command("sed -i 's/hello/good day/' greeting.py"),
                command("echo 5 > sum.txt && wc -l *"),
            ],
        ),
        Turn("Is it right?", "", [command("cat greeting.py")]),
        Turn("Yes.", "All done."),
    ]


PATCH = """*** Begin Patch
*** Update File: notes.txt
@@
 one
-two
+TWO
 three
*** Add File: list.md
{}
*** End Patch
""".format("\n".join(f"+{line}" for line in LIST.splitlines()))


def patching_session(work: Path) -> list[Turn]:
    def patch(text: str) -> Call:
        return Call("apply_patch", {"input": text})

    change = '*** Update File: greeting.py\n@@\n-print("hello")\n+print("good day")\n'
    return [
        Turn("I look first.", "I read the notes.", [command("cat notes.txt")]),
        Turn("Both.", "", [command("cat greeting.py"), command("cat old.txt")]),
        Turn("Now.", "I change them.", [patch(PATCH)]),
        Turn("", "A command.", [command("seq 3 > numbers.txt; cat notes.txt")]),
        Turn("What adds?", "", [Call("tool_search", {"query": "add two numbers"})]),
        ADD,
        Turn("That is it.", "The notes are right."),
        Turn(
            "Two at once.",
            "",
            [
                patch(f"*** Begin Patch\n{change}*** End Patch\n"),
                command("echo 5 > sum.txt && wc -l *"),
            ],
        ),
        Turn("Is it right?", "", [command("cat greeting.py")]),
        Turn("Yes.", "All done."),
    ]


# A text of some four thousand tokens.
LONG = "".join(
    f"Line {number} of it is about as long as a line of prose.\n" for number in range(240)
)


READINGS = 7


def long_session(run: Callable[[str], Call]) -> list[Turn]:
    """Reads more than its context holds."""
    readings = [
        Turn("", f"Part {i}.", [run(f"cat long.txt; echo {i} >> parts.txt")])
        for i in range(READINGS)
    ]
    return [*readings, Turn("", "All is read.")]


# ---- Serving them --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    """A host that no network leads away from."""
    try:
        secluded = Host(1, has_address=False)
    except HostsUnavailable as reason:
        pytest.skip(str(reason))
    yield secluded
    secluded.close()


@dataclass(frozen=True)
class Served:
    """A router, and the model behind it."""

    router: Router
    model: Path
    host: Host

    @property
    def asked(self) -> list[Asked]:
        return Asked.read_all(self.model)

    @property
    def answered(self) -> Counter[tuple[str, int]]:
        """The number of requests that ended, by route and status."""
        counts: Counter[tuple[str, int]] = Counter()
        for route, status, count in _REQUESTS.findall(self._metrics):
            # Until the shard is there, requests for /health end with an error.
            if route != "/health":
                counts[route, int(status)] += round(float(count))
        return counts

    @property
    def num_cached(self) -> int:
        """Cached tokens that usage told of."""
        return round(sum(map(float, _CACHED.findall(self._metrics))))

    @property
    def _metrics(self) -> str:
        return self.host.run(self.router.ask, "/metrics")[1]


_CACHED = re.compile(r"^penstock_router_cached_tokens_total\{.*\} (\S+)$", re.MULTILINE)
_REQUESTS = re.compile(
    r'^penstock_router_requests_total\{.*route="([^"]*)",status="(\d+)"\} (\S+)$', re.MULTILINE
)


@contextmanager
def served(
    host: Host, folder: Path, writing: str, script: Script, *, context_tokens: int = 200_000
) -> Iterator[Served]:
    template = vendored_templates().get(WRITINGS[writing].template)
    if template is None:
        pytest.skip("no chat templates: make .venv-clients/chat-templates/.done")
    model = folder / "model"
    make_scripted_model(model, template=template, context_tokens=context_tokens, script=script)
    flags = ("--served-model-name", *MODELS, "--max-num-batched-tokens", "8192")
    shard = host.run(ScriptedShard, folder / "shard", model, *flags)
    router = host.run(Router, folder / "router", [shard.address])
    try:
        for each in (shard, router):
            host.run(each.wait_healthy)
        yield Served(router, model, host)
    finally:
        for each in (router, shard):
            each.close()


# ---- What must come of them ----------------------------------------------------------------------


def files_of(agent: Agent) -> dict[str, str]:
    return {path.name: path.read_text() for path in agent.work.iterdir()}


def num_common(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the length of the longest common prefix, in ids."""
    pairs = enumerate(zip(one, other, strict=False))
    differ = (index for index, (a, b) in pairs if a != b)
    return next(differ, min(len(one), len(other)))


def blocks_of(earlier: Asked, later: Asked) -> tuple[int, int, int]:
    """Return three counts of whole blocks: those in the earlier turn's prompt; those at the
    beginning of the later prompt that repeat the earlier prompt and answer; and those of the later
    prompt that the engine had cached.
    """
    common = num_common([*earlier.prompt, *earlier.answer], later.prompt)
    # The engine always computes the last token of a prompt.
    common = min(common, len(later.prompt) - 1)
    return (
        len(earlier.prompt) // BLOCK_TOKENS,
        common // BLOCK_TOKENS,
        later.num_cached // BLOCK_TOKENS,
    )


@pytest.mark.parametrize("writing", WRITINGS)
@pytest.mark.parametrize(
    ("kind", "session"),
    [
        pytest.param(Claude, claude_session, id="claude"),
        pytest.param(Codex, codex_session, id="codex"),
        pytest.param(CodexOfKnownModel, patching_session, id="codex of a known model"),
    ],
)
def test_a_session_of_ten_turns_leaves_the_files_as_they_should_be(
    kind, session, writing, host, tmp_path
) -> None:
    """The prompt of the user's second turn need not begin with the one before: it leaves out what
    was thought until then.
    """
    turns = session(tmp_path / "agent" / "work")
    script = Script([WRITINGS[writing].write(turn) for turn in turns])
    with served(host, tmp_path, writing, script) as there:
        agent = kind(host, there.router.url, tmp_path / "agent")
        for name, text in BEFORE.items():
            (agent.work / name).write_text(text)
        for prompt, last, goes_on in zip(PROMPTS, (turns[6], turns[9]), (False, True), strict=True):
            ended = agent.run(prompt, goes_on=goes_on)
            assert ended.status == 0, (ended, there.router.log[-2000:])
            assert last.text in str(ended.events[-2:])
            assert goes_on or "the sum is 5" in str(ended.events)
        asked, answered, num_cached = there.asked, there.answered, there.num_cached
    assert files_of(agent) == AFTER
    assert answered == {(kind.route, 200): len(turns)}
    assert [each.answered_by for each in asked] == list(range(len(turns)))
    assert num_cached == sum(each.num_cached for each in asked)
    blocks = [blocks_of(*pair) for pair in itertools.pairwise(asked)]
    print(f"blocks of the earlier prompt, in common, found: {blocks}")
    _, common, found = (sum(column) for column in zip(*blocks, strict=True))
    assert found >= FOUND * common
    going_on = [each for turn, each in enumerate(blocks, 1) if turn != SECOND_PROMPT]
    assert all(common >= FOUND * before for before, common, _ in going_on)


@pytest.mark.parametrize("writing", WRITINGS)
@pytest.mark.parametrize(
    ("kind", "run", "context_tokens", "summary_asked_by", "refusals"),
    [
        pytest.param(Claude, bash, 32_768, "Respond with TEXT ONLY", {400}, id="claude"),
        pytest.param(
            # It keeps sixteen thousand tokens free.
            *(ClaudeOfKnownContext, bash, 49_152, "Respond with TEXT ONLY", set()),
            id="claude that is told of the context",
        ),
        pytest.param(Codex, command, 32_768, "CONTEXT CHECKPOINT COMPACTION", set(), id="codex"),
    ],
)
def test_what_outgrows_the_context_is_summarized_and_the_session_goes_on(
    kind, run, context_tokens, summary_asked_by, refusals, writing, host, tmp_path
) -> None:
    turns, write = long_session(run), WRITINGS[writing].write
    summary = write(Turn("", "<summary>Parts of long.txt were read.</summary>"))
    script = Script([write(turn) for turn in turns], {summary_asked_by: summary})
    with served(host, tmp_path, writing, script, context_tokens=context_tokens) as there:
        folder = tmp_path / "agent"
        agent = kind(host, there.router.url, folder, context_tokens=context_tokens)
        (agent.work / "long.txt").write_text(LONG)
        ended = agent.run("Read all of it.")
        asked, answered, log = there.asked, there.answered, there.router.log
    print(answered, [(each.answered_by, len(each.prompt), each.num_cached) for each in asked])
    assert ended.status == 0, (ended.events[-3:], ended.said, log[-3000:])
    assert "All is read." in str(ended.events[-2:])
    assert (agent.work / "parts.txt").read_text() == "".join(f"{i}\n" for i in range(READINGS))
    summaries = [each for each in asked if each.answered_by == summary_asked_by]
    assert summaries
    assert len(asked) - len(summaries) == len(turns)
    assert set(answered) - {(kind.route, 200)} == {(kind.route, status) for status in refusals}
    assert answered[kind.route, 200] == len(asked)


@pytest.mark.parametrize(
    ("kind", "tool", "argument"),
    [
        pytest.param(Claude, "Read", "file_path", id="claude"),
        pytest.param(Codex, "view_image", "path", id="codex"),
    ],
)
def test_an_image_that_the_model_cannot_see_does_not_end_the_session(
    kind, tool, argument, host, tmp_path
) -> None:
    image = tmp_path / "agent" / "work" / "red.png"
    turns = [
        Turn("", "I look.", [Call(tool, {argument: str(image)})]),
        Turn("", "I cannot see it."),
    ]
    script = Script([as_json_calls(turn) for turn in turns])
    with served(host, tmp_path, "json calls", script) as there:
        agent = kind(host, there.router.url, tmp_path / "agent")
        image.write_bytes(png_of_zeros(8, 8))
        ended = agent.run("What is red.png?")
        answered = there.answered
    assert ended.status == 0, ended
    assert "I cannot see it." in str(ended.events[-2:])
    assert answered == {(kind.route, 200): 2}
