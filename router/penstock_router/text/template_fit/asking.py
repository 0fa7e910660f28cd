"""Tests by rendering which messages a chat template accepts."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from penstock_router.errors import BadRequest
from penstock_router.request import Message
from penstock_router.text.contents import Content, text_part
from penstock_router.text.template_fit import scenes
from penstock_router.text.template_fit.fit import fit
from penstock_router.text.template_fit.scenes import TOOL, Scene
from penstock_router.text.template_fit.traits import TemplateTraits

# New values of traits, by name.
Change = dict[str, Any]


class Template(Protocol):
    """The probed template: renders messages, or raises `BadRequest`."""

    def render(
        self,
        messages: list[Message],
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        kwargs: Mapping[str, Any] | None = None,
    ) -> str: ...


# A template that renders none of these chats is not tested further.
_HELLO = scenes.user("zqhello")
_CHATS: tuple[list[Message], ...] = (
    [_HELLO],
    [scenes.in_two_parts(_HELLO, "zqhello", "zqagain")],
    [scenes.system("zqsystem"), _HELLO],
    [_HELLO, scenes.answer("zqanswer"), _HELLO],
)


class Asker:
    """Tests one template, and remembers the results."""

    def __init__(self, template: Template, source: str, tools: Sequence[bool]) -> None:
        self._template = template
        self._source = source
        self._found = TemplateTraits(names_results=True)
        self._notes: list[str] = []
        self._texts: dict[tuple[str, bool, bool], str | None] = {}
        asked = [
            with_tools
            for with_tools in tools
            if any(self._render(chat, with_tools) is not None for chat in _CHATS)
        ]
        for with_tools in set(tools) - set(asked) if asked else ():
            self.lacks(f"refuses chats {'with' if with_tools else 'without'} tools")
        # Ways to render: with tools, without, or both, which is tried first.
        self._ways = [tuple(asked), *([(True,), (False,)] if len(asked) > 1 else ())]

    @property
    def renders_any(self) -> bool:
        return bool(self._ways[0])

    def traits(self) -> TemplateTraits:
        return replace(self._found, notes=tuple(self._notes))

    def settle(
        self,
        asked: Sequence[Scene],
        *changes: Change,
        accepts: Callable[[str], bool] = lambda text: True,
        kwargs: Mapping[str, Any] | None = None,
    ) -> bool:
        """Adopt the first change with which all scenes are rendered without loss; return false if
        none works.
        """
        for ways in self._ways:
            for change in changes:
                traits = replace(self._found, **change)
                if all(
                    self._shows(each, traits, with_tools, accepts, kwargs)
                    for with_tools in ways
                    for each in asked
                ):
                    self._found = traits
                    return True
        return False

    def take(self, **change: Any) -> None:
        self._found = replace(self._found, **change)

    def _shows(
        self,
        asked: Scene,
        traits: TemplateTraits,
        with_tools: bool,
        accepts: Callable[[str], bool],
        kwargs: Mapping[str, Any] | None,
    ) -> bool:
        text = self._render(fit(list(asked.messages), traits), with_tools, kwargs)
        return text is not None and asked.is_shown_in(text) and accepts(text)

    def texts(self, messages: Sequence[Message], **change: Any) -> list[str | None]:
        """Render the fitted messages, with and without tools if both are tested."""
        fitted = fit(list(messages), replace(self._found, **change))
        return [self._render(fitted, with_tools) for with_tools in self._ways[0]]

    def _render(
        self, messages: list[Message], with_tools: bool, kwargs: Mapping[str, Any] | None = None
    ) -> str | None:
        # Different changes often make the same messages.
        key = repr(messages), with_tools, kwargs is None
        if key not in self._texts:
            tools = [TOOL] if with_tools else None
            try:
                self._texts[key] = self._template.render(messages, tools=tools, kwargs=kwargs)
            except BadRequest:
                self._texts[key] = None
        return self._texts[key]

    def lacks(self, what: str) -> None:
        self._notes.append(f"the chat template {what}")

    def names(self, word: str) -> bool:
        """Tell whether the template has this word in quotes; templates quote the roles that they
        know.
        """
        return re.search(rf"""(["']){word}\1""", self._source) is not None

    def reads(self, key: str) -> bool:
        """Tell whether the template reads this key of a message."""
        return self.names(key) or re.search(rf"\.{key}\b", self._source) is not None

    def mentions(self, text: str) -> bool:
        return text in self._source

    def parts_of(self, role: str) -> Change:
        """The change that makes a role's contents lists of parts."""
        return {"parts_only": self._found.parts_only | {role}}

    def joint(self, role: str, messages: Sequence[Message]) -> str | None:
        """Return the text that the template puts between two text parts; None if it takes no
        parts.
        """
        [message] = [each for each in messages if each["role"] == role][:1]
        fitted = fit(list(messages), self._found)
        places = [at for at, each in enumerate(fitted) if each.get("content") == message["content"]]
        if not places:
            return None
        joints = {self._joint(fitted, places[0], with_tools) for with_tools in self._ways[0]}
        return joints.pop() if len(joints) == 1 else None

    def _joint(self, fitted: list[Message], place: int, with_tools: bool) -> str | None:
        def rendered(content: Content) -> str:
            message = {**fitted[place], "content": content}
            return self._render([*fitted[:place], message, *fitted[place + 1 :]], with_tools) or ""

        first, second = "zqone", "zqtwo"
        text = rendered([text_part(first), text_part(second)])
        joint = text.partition(first)[2].partition(second)[0]
        if second not in text or joint.strip() or rendered(first + joint + second) != text:
            return None
        return joint

    def keeps_prefixes(self, messages: list[Message], **change: Any) -> bool:
        """Tell whether each prompt begins with the previous turn's prompt, up to that turn's last
        text.
        """
        asked = [at + 1 for at, each in enumerate(messages) if each["role"] in ("user", "tool")]
        prompts = [self.texts(messages[:end], **change) for end in asked]
        for end, before, after in zip(asked, prompts, prompts[1:], strict=False):
            last = messages[end - 1]["content"]
            for one, next_ in zip(before, after, strict=True):
                if one is None or next_ is None:
                    return False
                if not next_.startswith(one[: one.rfind(last) + len(last)]):
                    return False
        return True

    @property
    def found(self) -> TemplateTraits:
        return self._found
