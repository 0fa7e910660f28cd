"""Grammars of tools that take text, enforced in calls as each family writes them."""

from __future__ import annotations

import json
from typing import Any

import llguidance.hf
import pytest
import transformers
from support.families import FAMILIES
from support.families.family import Family
from support.router_doubles import byte_level_tokenizer

from penstock_router.apis.responses.requests import parse_response
from penstock_router.apis.responses.tools.functions import hold_to_grammars
from penstock_router.text.formats.base import CallRule
from penstock_router.text.formats.registry import FORMATS
from penstock_router.text.structural_tag_builder import encoded
from penstock_shard.structured_output.structural_lark import written
from penstock_shard.structured_output.structural_tag import read

# What patches of Codex look like, in short.
GRAMMAR = """
start: begin hunk+ end
begin: "*** Begin Patch" LF
end: "*** End Patch" LF?
hunk: "*** Update File: " /(.+)/ LF change+
change: ("+" | "-" | " " | "@@") /(.*)/ LF -> line
%import common.LF
"""
TOOLS: Any = [
    {
        "type": "custom",
        "name": "patch",
        "format": {"type": "grammar", "syntax": "lark", "definition": GRAMMAR},
    },
    {"type": "function", "name": "look"},
]
GOOD = "*** Begin Patch\n*** Update File: a.txt\n@@\n-hello <b>\n+bye\n*** End Patch\n"
BAD = "*** Begin Patch\n+bye\n*** End Patch\n"
PLAIN = [family for family in FAMILIES if FORMATS[family.format].writes_plain_strings]


def accepts(grammar: str, text: str) -> bool:
    tokenizer = byte_level_tokenizer()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|eos|>")
    matcher = llguidance.LLMatcher(llguidance.hf.from_tokenizer(fast), grammar)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.mark.parametrize("required", [True, False])
@pytest.mark.parametrize("family", PLAIN, ids=lambda family: family.format)
def test_a_call_holds_the_text_of_its_grammar_and_no_other(family: Family, required: bool) -> None:
    asked = parse_response({"input": "Hello", "tools": TOOLS})
    call_format = FORMATS[family.format]
    tools, _ = hold_to_grammars(asked.tools, asked.served, call_format)
    answer = call_format.calls(tools, CallRule(required))
    grammar, _ = written(read(json.loads(encoded(answer))), {})
    assert accepts(grammar, family.write([("patch", {"input": GOOD})]))
    assert not accepts(grammar, family.write([("patch", {"input": BAD})]))


def test_a_regular_expression_is_held_to_too() -> None:
    tool = {**TOOLS[0], "format": {"type": "grammar", "syntax": "regex", "definition": "[0-9]+"}}
    asked = parse_response({"input": "Hello", "tools": [tool]})
    [family] = [family for family in PLAIN if family.format == "qwen_xml"]
    tools, _ = hold_to_grammars(asked.tools, asked.served, FORMATS["qwen_xml"])
    answer = FORMATS["qwen_xml"].calls(tools, CallRule(True))
    grammar, _ = written(read(json.loads(encoded(answer))), {})
    assert accepts(grammar, family.write([("patch", {"input": "123"})]))
    assert not accepts(grammar, family.write([("patch", {"input": "12a"})]))
