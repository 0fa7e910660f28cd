"""Lists the fields of chats for other APIs' routes, so that none is silently ignored there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock_router.apis.openai.fields import CHAT_FIELDS, OF_CHATS
from penstock_router.apis.openai.other_servers import with_other_servers
from penstock_router.json_fields import ANYTHING, Field, Table, Use, not_served

# Values with which a field of chats has no effect. Other routes accept them.
_NOTHING: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "response_format": ({"type": "text"},),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "echo": (False,),
    "documents": ([],),
    "include_reasoning": (True,),
    "thinking_token_budget": (-1,),
    "parallel_tool_calls": (True,),
    "add_special_tokens": (False,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
}


def with_fields_of_chats(fields: Sequence[Field]) -> Table:
    """Return a route's own fields with their other names, and fields of chats (refused if they
    would change an answer).
    """
    own = with_other_servers(fields)
    others = [_elsewhere(entry) for name, entry in CHAT_FIELDS.items() if name not in own]
    return {**own, **{entry.name: entry for entry in others}}


def _elsewhere(entry: Field) -> Field:
    if entry.use is not Use.HONOURED:
        return entry
    nothing = _NOTHING.get(entry.stands_for or entry.name, ())
    return not_served(entry.name, ANYTHING, *nothing, help=OF_CHATS)
