"""Tell whether an answer is of a form, asked of the grammar that shards get."""

from __future__ import annotations

import json

from llguidance import LLMatcher, LLTokenizer

from penstock_proto.types import Constraint
from penstock_router.json_fields import JsonObject
from penstock_shard.structured_output.grammars import grammar_of

_BYTES = LLTokenizer("byte")


def grammar_of_form(form: JsonObject) -> str:
    """The grammar of a structural tag's format."""
    tag = json.dumps({"type": "structural_tag", "format": form})
    return grammar_of(Constraint("structural_tag", tag), {})


def is_of_form(grammar: str, answer: str) -> bool:
    """Tell whether the answer, and its end there, are of the form."""
    matcher = LLMatcher(_BYTES, grammar)
    assert not matcher.is_error(), matcher.get_error()
    tokens = list(answer.encode())
    return (
        matcher.validate_tokens(tokens) == len(tokens)
        and matcher.consume_tokens(tokens)
        and (matcher.is_accepting() or matcher.is_stopped())
    )
