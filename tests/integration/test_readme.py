"""The README's own code, run as it stands against a running pair."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

README = (Path(__file__).parents[2] / "README.md").read_text()
SNIPPETS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_the_snippets_are_as_short_as_they_should_be() -> None:
    assert [len(snippet.strip().splitlines()) for snippet in SNIPPETS] == [5, 8]


@pytest.mark.parametrize("snippet", SNIPPETS, ids=["openai", "grpc"])
def test_a_snippet_prints_an_answer(pair, snippet: str) -> None:
    code = snippet.replace("127.0.0.1:8000", pair.url.removeprefix("http://"))
    code = code.replace("127.0.0.1:20051", pair.shard.address)
    # The fake runner never ends a chat by itself.
    code = code.replace("stream=True", "stream=True, max_tokens=20")
    printed = io.StringIO()
    names: dict[str, object] = {}
    try:
        with contextlib.redirect_stdout(printed):
            exec(code, names)
        assert printed.getvalue().strip()
    finally:
        for name in ("stream", "client"):
            if name in names:
                names[name].close()  # type: ignore[attr-defined]
