"""Odd constraints over HTTP, checked by a real shard: refused or answered, within a second."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from typing import Any

from integration.conftest import Pair
from support.budget import budget, seeded
from unit.router.test_odd_values import ODD, encoded

# The machine does much besides in `make test`.
MAX_S = budget(5, 1)
NAMES = (
    *("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice"),
    *("guided_grammar", "json_schema", "regex", "ebnf", "grammar", "tools", "tool_choice"),
    *("logit_bias", "repeat_last_n", "typical_p", "stop", "thinking", "reasoning"),
)
# What is meant to be hard, or is nearly right.
HARD: tuple[Any, ...] = (
    *("(a|b)*c", "[a-z", "a{1,100000}", "(a{1,1000}){1,1000}", r"\p{Han}+", "(?<=a)b"),
    *("root ::= root", 'root ::= "a" root | ', "start: /./", r"root ::= [^\x00]*", "root ::= <a>"),
    {"type": "array", "items": {"$ref": "#"}},
    {"$ref": "#"},
    {"anyOf": [{}] * 500},
    {"enum": list(range(5000))},
    {"minLength": 10**9, "type": "string"},
    {"type": "object", "required": ["a"] * 400},
    {"type": "json_object"},
    {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}},
    {"json": {"type": "integer"}},
    {"choice": ["a", "b"]},
    {"structural_tag": {"format": {"type": "any_text"}}},
)


def post(url: str, body: dict[str, Any]) -> tuple[int, bytes]:
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, encoded(body), headers)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


def test_odd_constraints_are_refused_or_answered_within_a_second(pair: Pair) -> None:
    rng = seeded("odd constraints")
    longest_s = 0.0
    statuses: dict[int, int] = {}
    for _ in range(budget(100, 3_000)):
        asked = {rng.choice(NAMES): rng.choice((*ODD, *HARD, *HARD)), "max_tokens": 4}
        if rng.random() < 0.5:
            path, body = "completions", {"prompt": "hi", **asked}
        else:
            path = "chat/completions"
            body = {"messages": [{"role": "user", "content": "hi"}], **asked}
        begun_s = time.perf_counter()
        status, answer = post(f"{pair.url}/v1/{path}", body)
        longest_s = max(longest_s, time.perf_counter() - begun_s)
        statuses[status] = statuses.get(status, 0) + 1
        told = f"{json.dumps(asked)[:300]}: {status} {answer[:300]!r}"
        assert status < 500, told
        assert longest_s < MAX_S, told
    print(f"{statuses}; longest {longest_s * 1e3:.0f} ms")
