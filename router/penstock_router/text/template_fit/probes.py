"""Finds the traits of a chat template, by rendering short conversations.

Each question has several changes to try, the smallest first. A change is made to a scene's
messages, and the template renders them. The first change with which all texts appear in order is
taken.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence

from penstock_router.request import Message
from penstock_router.text.template_fit import scenes
from penstock_router.text.template_fit.asking import Asker, Change, Template
from penstock_router.text.template_fit.scenes import KEY, NAME, Scene, scene
from penstock_router.text.template_fit.traits import LINE, REASONING_NAMES, TemplateTraits

_THINKING = {"enable_thinking": True, "thinking": True, "preserve_thinking": True}


def probe(template: Template, source: str, tools: Sequence[bool]) -> TemplateTraits:
    """Find a template's traits. `tools` has True (requests with tools), False (without), or
    both.
    """
    asker = Asker(template, source, tools)
    if not asker.renders_any:
        return TemplateTraits(notes=("the chat template refuses plain chats",))
    for ask in _QUESTIONS:
        ask(asker)
    return asker.traits()


# ---- Turns -------------------------------------------------------------------------------------

_U1, _U2, _U3 = (scenes.user(f"zquser{number}") for number in range(3))
_A1, _A2 = (scenes.answer(f"zqanswer{number}") for number in range(2))
_S1, _S2, _S3 = (scenes.system(f"zqsystem{number}") for number in range(3))
_D1, _D2 = (scenes.developer(f"zqdeveloper{number}") for number in range(2))


def _turns(of: Asker) -> None:
    of.settle([scene(_U1)], {}, of.parts_of("user"))
    of.settle([scene(_U1, _A1, _U2)], {}, of.parts_of("assistant"))
    of.settle([scene(_U1, _U2, _A1, _U3)], {}, {"merges_users": True})
    of.settle([scene(_U1, _A1, _A2, _U2)], {}, {"merges_assistants": True})


def _systems(of: Asker) -> None:
    chat = (_S1, _U1, _A1, _U2)
    if not (
        of.settle([scene(*chat)], {}, of.parts_of("system"))
        or _is_in_last_turn(of, chat)
        or of.settle([scene(*chat)], {"first_system": "in_first_turn"})
    ):
        of.lacks("loses system messages")
    of.settle([scene(_S1, _S2, _U1)], {}, {"one_first_system": True})
    first = () if of.found.first_system == "in_last_turn" else (_S1,)
    later = [
        scene(*first, _U1, _S2, _A1, _U2, _A2, _S3, _U3),
        scene(_U1, _A1, _S1, _U2, _S2),
    ]
    as_user = {"later_system_as_user": True}
    if not of.settle(later, {}, as_user):
        of.lacks("loses or moves system messages after the first")
    # Some templates begin with their own text if no message is a system message.
    added = [_U1, _A1, _S1, _U2]
    if not of.keeps_prefixes(added) and of.keeps_prefixes(added, **as_user):
        of.take(**as_user)


def _is_in_last_turn(of: Asker, chat: Sequence[Message]) -> bool:
    """Tell whether the template itself moves the system message into the user's last turn. It does
    so only if the chat ends with that turn.
    """
    told: Change = {"first_system": "in_last_turn"}
    moved = Scene(chat, (("zquser0", "zqanswer0", "zqsystem0", "zquser1"),))
    return of.texts(chat) == of.texts(chat, **told) and of.settle([moved], told)


def _developers(of: Asker) -> None:
    if not of.names("developer"):
        return
    first, second = scene(_D1, _U1, _A1, _U2), scene(_S1, _D1, _U1)
    later = scene(_S1, _D1, _U1, _A1, _D2, _U2)
    for place, asked in (
        ("kept", [first, second, later]),
        ("leading", [first, second]),
        ("first", [first]),
    ):
        if of.settle(asked, {"developer": place}):
            return


# ---- Calls -------------------------------------------------------------------------------------

_CALL, _RESULT = scenes.call("zqvalue1"), scenes.result("zqresult1")
_CALLED = scenes.calling(_CALL)
_LONG_IDS = "call_0123456789abcdef01234567", "call_76543210fedcba9876543210"


def _calls(of: Asker) -> None:
    told: list[tuple[Message, ...]] = [
        (_U1, _CALLED, _RESULT),
        (_U1, {**_CALLED, "content": ""}, _RESULT),
        (_U1, _CALLED, _RESULT, _A1, _U2),
    ]
    whole = [
        Scene(each, (tuple(scenes.shown(*each)), ("zquser0", NAME, "zqresult1"))) for each in told
    ]
    # A template may show only arguments that the function's schema describes.
    named = [Scene(_with_name("zqname", each), (("zquser0", "zqname", "zqresult1"),))
             for each in told]  # fmt: skip
    forms, in_words = _call_forms(of)
    if not (
        of.settle(whole, *forms, accepts=_is_clean)
        or of.settle(whole, *forms, accepts=_has_no_none)
        or (of.mentions("tool") and of.settle(named, *forms, accepts=_has_no_none))
        or of.settle(whole, *in_words, accepts=_is_clean)
    ):
        of.lacks("loses tool calls or their results")
    without, empty = (of.texts(each) for each in told[:2])
    if without != empty:
        of.settle(whole, {"empty_content": "empty"}, accepts=_has_no_none)


def _with_name(name: str, messages: Sequence[Message]) -> list[Message]:
    function = {"name": name, "arguments": _CALL["function"]["arguments"]}
    return [
        {**each, "tool_calls": [{**_CALL, "function": function}]} if "tool_calls" in each else each
        for each in messages
    ]


def _call_forms(of: Asker) -> tuple[list[Change], list[Change]]:
    """Return the changes that keep calls, and those that turn them into text, each with the
    smallest first.
    """
    forms: list[Change] = [
        {"arguments_as_text": as_text, "empty_content": empty, **parts}
        for parts, as_text, empty in itertools.product(
            ({}, of.parts_of("tool")), (False, True), ("as_given", "empty", "absent", "null")
        )
    ]
    told: Change = {"calls_in_words": True}
    results_told: Change = {"results_in_words": True}
    # If the template never mentions "tool", it only copies a result's role, which the model never
    # saw.
    with_results = [told, told | of.parts_of("tool")]
    if not of.mentions("tool"):
        return [form | results_told for form in forms], [told | results_told]
    return forms, [
        *with_results,
        *(form | results_told for form in forms),
        told | results_told,
    ]


def _has_no_none(text: str) -> bool:
    """Return false if missing content was rendered as "None"."""
    begin, end = text.find("zquser0"), text.find("zqresult1")
    return "None" not in text[begin:end]


def _is_clean(text: str) -> bool:
    """Tell whether the arguments are neither JSON in a string nor a Python literal."""
    before = text[: text.find("zqvalue1")].rpartition(KEY)[0]
    return _has_no_none(text) and not before.endswith(('\\"', "{'", "'{\"", '"{"'))


def _call_ids(of: Asker) -> None:
    if of.found.calls_in_words:
        return
    first, _ = _LONG_IDS
    with_ids = scene(_U1, scenes.calling(scenes.call("zqvalue1", first)),
                     scenes.result("zqresult1", first))  # fmt: skip
    of.settle([with_ids], {}, {"call_ids": "nine"})
    function = {key: value for key, value in _CALL.items() if key != "id"}
    nameless = {key: value for key, value in _RESULT.items() if key != "tool_call_id"}
    of.settle([scene(_U1, scenes.calling(function), nameless)], {}, {"fills_ids": True})


def _several_calls(of: Asker) -> None:
    first, second = _LONG_IDS
    both = scenes.calling(scenes.call("zqvalue1", first), scenes.call("zqvalue2", second))
    messages = (_U1, both, scenes.result("zqresult1", first), scenes.result("zqresult2", second),
                _A1, _U2)  # fmt: skip
    chains = (
        ("zquser0", "zqvalue1", "zqvalue2", "zqresult2", "zqanswer0", "zquser1"),
        ("zqvalue1", "zqresult1", "zqresult2"),
    )
    if not of.settle([Scene(messages, chains)], {}, {"one_call": True}):
        of.lacks("loses all but one of several tool calls in a message")


def _text_beside_calls(of: Asker) -> None:
    messages = (_U1, {**_CALLED, "content": "zqtext"}, _RESULT)
    later = (*messages, _A1, _U2)
    if of.settle([scene(*messages)], {}):
        if not of.settle([scene(*later)], {}):
            of.lacks("loses the text of a message that calls tools when the next answer is there")
    elif not (
        of.settle([scene(*messages), scene(*later)], {"text_apart": True})
        or of.settle([Scene(later, (("zqtext",), ("zqvalue1", "zqresult1")))], {})
    ):
        of.lacks("loses the text of a message that calls tools")


def _after_results(of: Asker) -> None:
    answered = scene(_U1, _CALLED, _RESULT, _U2, _A1, _U3)
    if not of.settle([answered], {}, {"joins_user_to_result": True}):
        of.lacks("loses what the user says right after a tool result")
    messages = (_U1, _CALLED, _RESULT)
    if of.texts(messages) == of.texts(messages, names_results=False):
        of.take(names_results=False)


def _results_and_calls_alone(of: Asker) -> None:
    orphans = [scene(_U1, _RESULT, _A1, _U2), scene(_U1, _A1, _U2, _RESULT)]
    of.settle(orphans, {}, {"orphans_in_words": True})
    of.settle([scene(_U1, _CALLED, _U2, _A1, _U3)], {}, {"fills_results": True})


def _silence(of: Asker) -> None:
    first, ever = ({"user_speaks": when} for when in ("first", "ever"))
    for asked in ((_A1, _U1), (_S1, _A1, _U1), (_CALLED, _RESULT, _U1)):
        of.settle([scene(*asked)], {}, first)
    of.settle([scene(_S1)], {}, ever)
    of.settle([scene(_U1, scenes.answer(""), _U2)], {}, {"fills_answers": True})


# ---- Reasoning ---------------------------------------------------------------------------------


def _reasoning(of: Asker) -> None:
    reason = {"reasoning_content": "zqreason"}
    asked = [
        Scene((_U1, _CALLED | reason, _RESULT), (("zquser0", "zqreason", "zqvalue1"),)),
        Scene((_U1, _A1 | reason), (("zquser0", "zqreason", "zqanswer0"),)),
        Scene((_U1, _A1 | reason, _U2), (("zquser0", "zqreason", "zqanswer0"),)),
    ]
    places: list[Change] = [
        *({"reasoning_names": (name,)} for name in REASONING_NAMES),
        *([{"reasoning_as_part": True}] if of.names("thinking") else ()),
    ]
    for kwargs, each in itertools.product((None, _THINKING), asked):
        if of.settle([each], *places, accepts=_is_no_repr, kwargs=kwargs):
            of.take(shows_reasoning=True)
            break
    else:
        # The template reads reasoning in a case that no scene has, or not at all.
        names = tuple(filter(of.reads, REASONING_NAMES))
        of.settle([Scene(each.messages, ()) for each in asked], {"reasoning_names": names}, {})
    both = (_U1, {**_CALLED, "content": "zqtext"} | reason, _RESULT)
    said = "zquser0", "zqtext", "zqresult1"
    if of.found.shows_reasoning:
        of.settle([Scene(both, (said,))], {}, {"text_into_reasoning": True})


def _is_no_repr(text: str) -> bool:
    return not text[: text.find("zqreason")].endswith(("'", '"'))


# ---- Parts of text, and JSON -------------------------------------------------------------------


def _joints(of: Asker) -> None:
    told = {
        "user": (_U1, _A1, _U2),
        "assistant": (_U1, _A1, _U2),
        "system": (_S1, _U1),
        "tool": (_U1, _CALLED, _RESULT),
    }
    joints = {role: of.joint(role, messages) for role, messages in told.items()}
    found = {role: joint for role, joint in joints.items() if joint not in (None, LINE)}
    of.take(joints=found)


def _json(of: Asker) -> None:
    nested = scenes.call("")
    nested["function"] = {"name": NAME, "arguments": {KEY: {"zqb": 1, "zqc": [1, 2], "zqd": "é"}}}
    [text, *_] = of.texts((_U1, scenes.calling(nested), _RESULT))
    if found := re.search(r'\{"zqb"(:\s*)1(,\s*)"zqc"', text or ""):
        of.take(argument_separators=(found[2], found[1]), argument_ascii="\\u00e9" in (text or ""))


# ---- Earlier turns stay as they were ------------------------------------------------------------


def _prefixes(of: Asker) -> None:
    result2 = scenes.result("zqresult2", "callzq002")
    again = scenes.calling(scenes.call("zqvalue2", "callzq002"))
    told: list[list[Message]] = [
        [_S1, _U1, _A1, _U2, _A2, _U3],
        [_S1, _U1, _A1, _S2, _U2, _A2, _U3],
        [_S1, _U1, _CALLED, _RESULT, again, result2],
    ]
    if not all(map(of.keeps_prefixes, told)):
        of.lacks("changes earlier turns when a turn is added")


_QUESTIONS: tuple[Callable[[Asker], None], ...] = (
    _turns,
    _systems,
    _developers,
    _calls,
    _call_ids,
    _several_calls,
    _text_beside_calls,
    _after_results,
    _results_and_calls_alone,
    _silence,
    _reasoning,
    _joints,
    _json,
    _prefixes,
)
