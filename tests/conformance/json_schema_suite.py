"""The official JSON Schema Test Suite against the compiler of constraints.

For each group of a draft: is its schema accepted, and is each of its instances, written down
plainly, a text that the constraint allows? Run as a script it writes the page of the docs.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llguidance import LLMatcher

import penstock_shard
from penstock_shard.config import ShardConfig
from penstock_shard.constraints.compiler import Compiler
from penstock_shard.constraints.refusal import ConstraintRefused
from penstock_shard.request import Constraint

ROOT = Path(__file__).parents[2]
SUITE = ROOT / ".venv-clients" / "json-schema-test-suite"
PAGE = ROOT / "docs" / "structured-output-conformance.md"
DRAFTS = {
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
    "draft7": "http://json-schema.org/draft-07/schema#",
}
_COLUMNS = ("groups", "accepted", "refused", "wrong", "narrower")
_MODEL = Path(penstock_shard.__file__).parent / "builtin_model"
_VOCAB_SIZE = 3072
_HEAD = """\
# Structured output: conformance

<!-- Made by tests/conformance/json_schema_suite.py: change that. -->

A schema is either honoured, so that a constrained output that has ended is valid, or refused with
the reason.
The official [JSON Schema Test Suite](https://github.com/json-schema-org/JSON-Schema-Test-Suite), as
jsonschema {version} carries it, is run against the compiler of constraints in every `make test`.

- **accepted**: groups of tests whose schema is compiled; **refused**: groups whose schema is
  refused by name, before anything is generated.
- **wrong**: instances that the schema forbids and the constraint allows. There are none.
- **narrower**: instances that are valid and would not be written: properties in another order
  than the schema's, `1.0` for an integer, texts that break a `format` (which the standard lets
  pass), and a few of those that keywords about other keywords' results allow.

"""
_TAIL = """
## What is refused, and why

| groups | reason |
|---|---|
"""


@dataclass(slots=True)
class Result:
    """What became of the tests of one keyword."""

    counts: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    mistakes: list[str] = field(default_factory=list)


def compiler() -> Compiler:
    """With the built-in tokenizer, whose vocabulary has every byte."""
    raw = (_MODEL / "tokenizer.json").read_bytes()
    return Compiler(raw, _VOCAB_SIZE, [2], ShardConfig().constraint_limits)


def files(draft: str, folder: str = "") -> Iterator[Path]:
    yield from sorted((SUITE / "json" / "tests" / draft / folder).glob("*.json"))


def result_of(path: Path, draft: str, compiler: Compiler) -> Result:
    """The tests of one file."""
    result = Result()
    for group in json.loads(path.read_text()):
        result.counts["groups"] += 1
        schema = group["schema"]
        if isinstance(schema, dict):
            schema = {"$schema": DRAFTS[draft], **schema}
        try:
            matcher = compiler.compile(Constraint("json_schema", json.dumps(schema)))
        except ConstraintRefused as refusal:
            result.counts["refused"] += 1
            result.reasons[_reason(str(refusal))] += 1
            continue
        result.counts["accepted"] += 1
        for test in group["tests"]:
            _note(result, group, test, allows(matcher, compiler, test["data"]))
    return result


def allows(matcher: LLMatcher, compiler: Compiler, instance: Any) -> bool:
    """Whether the matcher, which stays as it is, takes the instance as a whole."""
    text = json.dumps(instance, ensure_ascii=False)
    matcher = matcher.deep_copy()
    return matcher.consume_tokens(compiler.tokenizer.tokenize_str(text)) and matcher.is_accepting()


def _note(result: Result, group: Any, test: Any, allowed: bool) -> None:
    if allowed and not test["valid"]:
        result.counts["wrong"] += 1
        result.mistakes.append(f"{group['description']}: {test['description']}")
    if test["valid"] and not allowed:
        result.counts["narrower"] += 1
    if test["valid"] and allowed:
        result.counts["written"] += 1


def _reason(message: str) -> str:
    """A reason without the values of this schema."""
    keyword = message.removeprefix("json_schema: ").partition(":")[0]
    for told in _TOLD:
        if told in message:
            return _TOLD[told].format(keyword=keyword)
    return message.removeprefix("json_schema: ")


_TOLD = {
    "outside of the schema": "`$ref` to another document: nothing is fetched",
    "no value is valid": "no value is valid: there is nothing to write",
    "may mean several": "`$dynamicRef` that means another schema in another place",
    "cannot be held while": "`uniqueItems` of values without a short list",
    "not disjoint": "`patternProperties` whose patterns match the same name",
    "control character": "`const` or `enum` with a control character",
    "none of the drafts": "`$schema` of one's own",
    "too many digits": "`multipleOf` with very many digits",
    "of unknown names": "`minProperties` over 1 of unknown names: one might be written twice",
}


def page() -> str:
    """The tables of all drafts."""
    used = compiler()
    version = (ROOT / "tests" / "conformance" / "suite.txt").read_text().partition("==")[2].strip()
    parts = [_HEAD.format(version=version)]
    reasons: Counter[str] = Counter()
    for draft in DRAFTS:
        results = {path.stem: result_of(path, draft, used) for path in files(draft)}
        for result in results.values():
            reasons += result.reasons
        parts.append(_table(draft, results))
    parts.append(_TAIL)
    parts += [f"| {count} | {reason} |\n" for reason, count in sorted_by_count(reasons)]
    return "".join(parts)


def sorted_by_count(counts: Counter[str]) -> list[tuple[str, int]]:
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))


def _table(draft: str, results: dict[str, Result]) -> str:
    total: Counter[str] = Counter()
    lines = [f"| {draft} | {' | '.join(_COLUMNS)} |", "|---|" + "---|" * len(_COLUMNS)]
    for keyword, result in results.items():
        total += result.counts
        lines.append(_line(f"`{keyword}`", result.counts))
    share = 100 * total["accepted"] // max(1, total["groups"])
    lines.append(_line(f"**all: {share} % accepted**", total))
    return "\n".join(lines) + "\n\n"


def _line(name: str, counts: Counter[str]) -> str:
    return f"| {name} | {' | '.join(str(counts[column]) for column in _COLUMNS)} |"


if __name__ == "__main__":
    PAGE.write_text(page())
