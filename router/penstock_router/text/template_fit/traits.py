"""The demands of a chat template on messages. By default there are none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

# The text between a message's text parts if the template takes no parts.
LINE = "\n"
# The text between messages that become one.
BLANK_LINE = "\n\n"

# Names under which clients send reasoning, and templates read it.
REASONING_NAMES = ("reasoning_content", "reasoning", "thinking")

# Developer messages that the template renders: all, those before the user's first message, only the
# chat's first message, or none.
Developer = Literal["kept", "leading", "first", "as_system"]
# The place of the first system message: its own, or the beginning of the user's first or last turn.
FirstSystem = Literal["kept", "in_first_turn", "in_last_turn"]
# The content of a message with tool calls and no text: as the client gave it, or one of these.
EmptyContent = Literal["as_given", "empty", "absent", "null"]
# Ids of tool calls: any, or exactly nine letters and digits.
CallIds = Literal["any", "nine"]
# The user need not speak, must speak at some time, or must speak before the assistant.
UserSpeaks = Literal["any", "ever", "first"]


@dataclass(frozen=True, slots=True)
class TemplateTraits:
    """The form that messages need so that this template renders them without loss."""

    # The text between a message's text parts, by role.
    joints: Mapping[str, str] = field(default_factory=dict)
    # The roles whose contents must be lists of parts.
    parts_only: frozenset[str] = frozenset()

    developer: Developer = "as_system"
    # `one_first_system`: the template takes only one system message at the beginning.
    # `later_system_as_user`: it loses or moves later ones.
    first_system: FirstSystem = "kept"
    one_first_system: bool = False
    later_system_as_user: bool = False
    # Consecutive messages of one role must be one message.
    merges_users: bool = False
    merges_assistants: bool = False
    # The user may not speak right after a result.
    joins_user_to_result: bool = False
    user_speaks: UserSpeaks = "any"
    # An answer may not be empty.
    fills_answers: bool = False

    # The template renders no tool calls, or no results: they become texts.
    calls_in_words: bool = False
    results_in_words: bool = False
    empty_content: EmptyContent = "as_given"
    # The template wants arguments as JSON text, not as an object.
    arguments_as_text: bool = False
    one_call: bool = False
    call_ids: CallIds = "any"
    fills_ids: bool = False
    names_results: bool = False
    # The template takes no result without its call, or no call without a result.
    orphans_in_words: bool = False
    fills_results: bool = False
    # The template loses text beside tool calls, but not in a message before them.
    text_apart: bool = False

    # The template shows reasoning, at least in some turns.
    shows_reasoning: bool = False
    # The names under which reasoning is given; () leaves a message as it is.
    reasoning_names: tuple[str, ...] = ()
    # Reasoning is a part of the content, of type "thinking".
    reasoning_as_part: bool = False
    # Beside tool calls the template takes either text or reasoning: the text joins the reasoning.
    text_into_reasoning: bool = False

    # The template's texts between items and after keys where it writes arguments, or their values,
    # as JSON.
    argument_separators: tuple[str, str] | None = None
    # True if that JSON escapes characters beyond ASCII.
    argument_ascii: bool = False

    # Sentences that name the remaining losses.
    notes: tuple[str, ...] = ()
