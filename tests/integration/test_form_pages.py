"""The commands in the pages on structured output and on tools, run as they stand.

Most run against made-up tokens: each answer must have the right form, whatever text it has.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from integration.conftest import Pair, Served
from support.processes import ask

DOCS = Path(__file__).parents[2] / "docs"
_BLOCK = re.compile(r"^```sh\n(.*?)^```\n(?:\n```json\n(.*?)^```)?", re.DOTALL | re.MULTILINE)
# Set once, at the beginning of a page.
_PRELUDE = "url=http://127.0.0.1:8000 json='Content-Type: application/json'\n"
SCHEMA = r'\{\s*"kind"\s*:\s*"(router|shard)"(\s*,\s*"count"\s*:\s*\d)?\s*\}'
# What the text of an answer is, by words of its command; the first that are there count.
TEXTS = {
    '"json": {': SCHEMA,
    '"json_schema"': SCHEMA,
    '"regex": "v': r"v[0-9]\.[0-9]{1,2}",
    '"choice"': "text|tensors",
    '"grammar": "start': r"[1-9][0-9]?( \+ [1-9][0-9]?){1,3}",
    '"structural_tag"': "<kind>(router|shard)</kind>",
    '"grammar": {"type": "regex"': "text|tensors",
    '"tools"': r'\{\s*"shard"\s*:\s*[1-8]\s*\}',
}


def _commands(page: str) -> list[tuple[str, str]]:
    """Return each command that sends a request, and the answer that the page shows, or ""."""
    blocks = _BLOCK.findall((DOCS / page).read_text("utf-8"))
    return [block for block in blocks if block[0].startswith("curl")]


COMMANDS = [*_commands("structured-output.md"), *_commands("tools.md")]


def test_there_is_a_command_for_each_form() -> None:
    assert len(COMMANDS) >= 17
    for words in TEXTS:
        assert any(words in command for command, _ in COMMANDS), words


@pytest.mark.parametrize(("command", "shown"), COMMANDS, ids=map(str, range(len(COMMANDS))))
def test_a_command_of_the_pages_does_what_they_say(pair: Pair, command: str, shown: str) -> None:
    script = (_PRELUDE + command).replace("http://127.0.0.1:8000", pair.url)
    # The name of the toy model, which pairs of tests serve under another.
    script = script.replace("penstock-toy", _model(pair))
    run = subprocess.run(["bash", "-ec", script], capture_output=True, text=True, timeout=60)
    answer = json.loads(run.stdout)
    if answer.get("error"):
        _check_refusal(answer["error"], command, shown)
    elif wanted := next((text for words, text in TEXTS.items() if words in command), None):
        assert re.fullmatch(wanted, _text(answer)), answer


def test_no_answer_of_the_built_in_model_to_the_pages_is_cut_off(toy: Served) -> None:
    def ends(command: str) -> list[str]:
        script = (_PRELUDE + command).replace("http://127.0.0.1:8000", toy.url)
        run = subprocess.run(["bash", "-ec", script], capture_output=True, text=True, timeout=60)
        return re.findall(r'"(?:finish_reason|stop_reason|status)":"(\w+)"', run.stdout)

    # At once: the model computes them together.
    with ThreadPoolExecutor() as pool:
        found = pool.map(ends, (command for command, _ in COMMANDS))
    assert {end for some in found for end in some} == {
        "stop",
        "tool_calls",
        "end_turn",
        "tool_use",
        "completed",
    }


def test_the_class_of_the_page_is_parsed_with_the_built_in_model(toy: Served) -> None:
    page = (DOCS / "structured-output.md").read_text("utf-8")
    [(program, shown)] = re.findall(
        r"^```python\n(.*?)^```\n\n```text\n(.*?)^```", page, re.DOTALL | re.MULTILINE
    )
    program = program.replace("http://127.0.0.1:8000", toy.url)
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert run.returncode == 0, run.stderr
    # Which of them, with a temperature of 0, is a matter of the CPU.
    for printed in (shown, run.stdout):
        assert re.fullmatch(r"kind='(router|shard)' count=\d\n", printed)


def _model(pair: Pair) -> str:
    return str(json.loads(ask(f"{pair.url}/v1/models")[1])["data"][0]["id"])


def _check_refusal(error: dict[str, Any], command: str, shown: str) -> None:
    """Assert that a command is refused with the error that the page shows. One command has none on
    the page: only a model that reasons can serve it.
    """
    assert error["code"] == 400
    if "thinking_token_budget" in command:
        assert error["param"] == "thinking_token_budget"
    else:
        assert error == json.loads(shown)["error"]


def _text(answer: dict[str, Any]) -> str:
    """The text of an answer, or the arguments of its call, whichever API it came by."""
    if "generated_text" in answer:
        return str(answer["generated_text"])
    if "output" in answer:
        item = answer["output"][0]
        return str(item["arguments"] if "arguments" in item else item["content"][0]["text"])
    if "content" in answer:
        block = answer["content"][0]
        return json.dumps(block["input"]) if "input" in block else str(block["text"])
    choice = answer["choices"][0]
    if "text" in choice:
        return str(choice["text"])
    calls = choice["message"].get("tool_calls")
    return str(calls[0]["function"]["arguments"] if calls else choice["message"]["content"])


def test_the_page_has_the_totals_of_the_conformance_page() -> None:
    page = " ".join((DOCS / "structured-output.md").read_text("utf-8").split())
    table = (DOCS / "structured-output-conformance.md").read_text("utf-8")
    totals = re.findall(r"all: (\d+) % accepted\*\* \| (\d+) \| (\d+) \|", table)
    assert len(totals) == 2
    for percent, groups, accepted in totals:
        assert re.search(rf"\b{accepted} of {groups}\b[^(]*\({percent} %\)", page), (
            accepted,
            groups,
        )


def test_the_program_that_lets_a_model_call_a_function_gets_an_answer(pair: Pair) -> None:
    [program] = re.findall(
        r"```python\n(.*?)```", (DOCS / "tools.md").read_text("utf-8"), re.DOTALL
    )
    program = program.replace("http://127.0.0.1:8000", pair.url)
    # The fake runner writes at random, and ever the same with a seed.
    program = program.replace("temperature=0,", "seed=1,")
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert run.returncode == 0, run.stderr
    assert re.match(r'busy \{\s*"shard"\s*:\s*[1-8]\s*\} -> \{.running.: \d+\}\n.', run.stdout)
