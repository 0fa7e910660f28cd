"""Changes the messages of a chat so that its template renders them without loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from penstock_router.request import Message
from penstock_router.text.template_fit import calls, contents, results, turns
from penstock_router.text.template_fit.calls import CallsInWords, NativeCallId
from penstock_router.text.template_fit.traits import TemplateTraits


@dataclass(frozen=True, slots=True)
class _Case:
    """A chat, its template's traits, and how its model writes tool calls."""

    traits: TemplateTraits
    native_call_id: NativeCallId | None
    calls_in_words: CallsInWords | None
    keep_last: bool
    # Facts about the messages follow.
    roles: frozenset[str]
    has_parts: bool
    has_silence: bool
    has_calls: bool
    has_reasoning: bool

    @property
    def has_results(self) -> bool:
        return "tool" in self.roles

    @property
    def tells_results(self) -> bool:
        return self.has_results and self.traits.results_in_words


_Rule = tuple[Callable[[_Case], bool], Callable[[list[Message], _Case], list[Message]]]

# Rules have a condition and a change. The order matters: messages get a common form, then calls and
# turns get their places, then contents get the template's form.
_RULES: tuple[_Rule, ...] = (
    (lambda of: of.has_parts, lambda given, of: contents.join_texts(given, of.traits)),
    (lambda of: of.has_silence, lambda given, _: contents.fill_silence(given)),
    (
        lambda of: of.traits.fills_answers,
        lambda given, of: contents.fill_answers(given, keep_last=of.keep_last),
    ),
    (lambda of: of.has_calls, lambda given, _: calls.read_arguments(given)),
    (lambda of: of.has_results, lambda given, _: results.match_results(given)),
    (
        lambda of: of.has_calls and of.traits.fills_results,
        lambda given, _: results.fill_results(given),
    ),
    (lambda of: of.has_calls and of.has_results, lambda given, _: calls.order_results(given)),
    (
        lambda of: of.has_results and of.traits.orphans_in_words,
        lambda given, _: results.orphans_in_words(given),
    ),
    (
        lambda of: of.has_results and (of.traits.names_results or of.traits.results_in_words),
        lambda given, _: calls.name_results(given),
    ),
    (
        lambda of: of.has_reasoning and of.traits.shows_reasoning,
        lambda given, of: contents.split_reasoning(given, keep_last=of.keep_last),
    ),
    (
        lambda of: "developer" in of.roles,
        lambda given, of: turns.name_developers(given, of.traits),
    ),
    (
        lambda of: not of.roles.isdisjoint(("system", "developer")),
        lambda given, of: turns.place_systems(given, of.traits),
    ),
    (
        lambda of: of.traits.user_speaks != "any",
        lambda given, of: turns.let_user_speak(given, of.traits),
    ),
    (
        lambda of: of.has_calls and of.traits.calls_in_words,
        lambda given, of: calls.calls_in_words(given, of.calls_in_words),
    ),
    (lambda of: of.tells_results, lambda given, _: calls.results_in_words(given)),
    (
        lambda of: of.has_calls and of.traits.one_call,
        lambda given, _: calls.one_call_each(given),
    ),
    (
        lambda of: of.has_calls and of.traits.text_apart,
        lambda given, _: calls.text_before_calls(given),
    ),
    (
        lambda of: (
            (of.has_calls or of.has_results)
            and (
                of.traits.fills_ids or of.traits.call_ids != "any" or of.native_call_id is not None
            )
        ),
        lambda given, of: calls.fit_ids(given, of.traits, of.native_call_id),
    ),
    (
        lambda of: of.has_calls and of.traits.arguments_as_text,
        lambda given, _: calls.arguments_as_text(given),
    ),
    (lambda of: of.traits.merges_users, lambda given, _: turns.merge_users(given)),
    (lambda of: of.traits.merges_assistants, lambda given, _: turns.merge_assistants(given)),
    (
        lambda of: (of.has_results or of.traits.fills_results) and of.traits.joins_user_to_result,
        lambda given, _: turns.join_users_to_results(given),
    ),
    (
        lambda of: (
            of.has_reasoning and (bool(of.traits.reasoning_names) or of.traits.reasoning_as_part)
        ),
        lambda given, of: contents.place_reasoning(given, of.traits),
    ),
    (
        lambda of: of.has_calls and of.traits.empty_content != "as_given",
        lambda given, of: calls.empty_contents(given, of.traits.empty_content),
    ),
    (lambda of: bool(of.traits.parts_only), lambda given, of: contents.in_parts(given, of.traits)),
)


def fit(
    messages: list[Message],
    traits: TemplateTraits,
    *,
    native_call_id: NativeCallId | None = None,
    calls_in_words: CallsInWords | None = None,
    keep_last: bool = False,
) -> list[Message]:
    """Change messages so that a template with these traits renders them without loss.

    `native_call_id` makes ids as the model writes them; `calls_in_words` writes calls as text if
    the template renders none. With `keep_last`, the last message stays whole, because the answer
    continues it.
    """
    case = _case(messages, traits, native_call_id, calls_in_words, keep_last)
    for applies, rule in _RULES:
        if applies(case):
            messages = rule(messages, case)
    return messages


def _case(
    messages: list[Message],
    traits: TemplateTraits,
    native_call_id: NativeCallId | None,
    calls_in_words: CallsInWords | None,
    keep_last: bool,
) -> _Case:
    roles: set[str] = set()
    has_parts = has_silence = has_calls = has_reasoning = False
    for message in messages:
        roles.add(role := message["role"])
        content = message.get("content")
        has_parts = has_parts or type(content) is list
        has_silence = has_silence or (content is None and "tool_calls" not in message)
        if role == "assistant":
            has_calls = has_calls or "tool_calls" in message
            has_reasoning = has_reasoning or contents.has_reasoning(message)
    return _Case(
        traits,
        native_call_id,
        calls_in_words,
        keep_last,
        frozenset(roles),
        has_parts,
        has_silence,
        has_calls,
        has_reasoning,
    )
