"""The demands of a chat template on messages. The default asks for nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

# How the text parts of a message are joined where its template takes no parts.
LINE = "\n"
# What stands between texts that become one.
BLANK_LINE = "\n\n"

# The names under which clients send reasoning, and templates read it.
REASONING_NAMES = ("reasoning_content", "reasoning", "thinking")

# Where a developer's messages are rendered as such: everywhere, before the user's first, as the
# first message only, or nowhere.
Developer = Literal["kept", "leading", "first", "as_system"]
# Where the template has the first system: as such, or as what the user's first turn begins with, or
# the user's last.
FirstSystem = Literal["kept", "in_first_turn", "in_last_turn"]
# The content of a message that has calls and no text: as the client gave it, or made one of these.
EmptyContent = Literal["as_given", "empty", "absent", "null"]
# Ids of calls: any, or exactly nine letters and digits.
CallIds = Literal["any", "nine"]
# Whether the user has to speak: not, at some time, or before the assistant does.
UserSpeaks = Literal["any", "ever", "first"]


@dataclass(frozen=True, slots=True)
class TemplateTraits:
    """The form that messages need so that this template renders them without loss."""

    # By role: what joins the text parts of a message.
    joints: Mapping[str, str] = field(default_factory=dict)
    # The roles whose contents have to be lists of parts.
    parts_only: frozenset[str] = frozenset()

    developer: Developer = "as_system"
    # Systems: only one may stand first, later ones are lost or moved.
    first_system: FirstSystem = "kept"
    one_first_system: bool = False
    later_system_as_user: bool = False
    # Neighbours of one role that have to be one message.
    merges_users: bool = False
    merges_assistants: bool = False
    # The user may not speak right after a result.
    joins_user_to_result: bool = False
    user_speaks: UserSpeaks = "any"
    # An answer may not be empty.
    fills_answers: bool = False

    # The template renders no calls, or no results: they become texts.
    calls_in_words: bool = False
    results_in_words: bool = False
    empty_content: EmptyContent = "as_given"
    # The template wants a call's arguments as JSON text, not as the object.
    arguments_as_text: bool = False
    one_call: bool = False
    call_ids: CallIds = "any"
    fills_ids: bool = False
    names_results: bool = False
    # The template takes no result without its call, or no call without a result.
    orphans_in_words: bool = False
    fills_results: bool = False
    # The template loses the text of a message that has calls, but not that of one before it.
    text_apart: bool = False

    # Reasoning beside a text is shown, of some turns at least.
    shows_reasoning: bool = False
    # The names under which reasoning is given; () leaves a message as it is.
    reasoning_names: tuple[str, ...] = ()
    # Reasoning is a part of the content, of type "thinking".
    reasoning_as_part: bool = False
    # The template takes only one of the two beside calls: the text is added to the reasoning.
    text_into_reasoning: bool = False

    # Between items, and after a key, where the template writes arguments, or their values, as JSON.
    argument_separators: tuple[str, str] | None = None
    # That JSON writes characters beyond ASCII as escapes.
    argument_ascii: bool = False

    # What is lost all the same, a sentence each.
    notes: tuple[str, ...] = ()
