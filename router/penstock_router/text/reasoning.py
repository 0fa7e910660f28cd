"""Separates a model's reasoning from the content that follows, by marks.

Only reasoning at the beginning of an answer counts: it follows a begin mark with at most whitespace
before it, or the prompt has begun it. All text after the end mark is content, even if it looks like
a mark. A repeated mark is ignored, and so is an end mark at the beginning of an answer. Whitespace
after the begin mark and around the end mark is dropped; at the end of unfinished reasoning it is
kept. The pieces do not depend on how the text is cut.

Some models put the answer between two more marks, which are dropped too. In some styles, the end
mark of reasoning is also the first of these two.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from penstock_router.text.answer_pieces import Piece, PieceKind
from penstock_router.text.marks import Marks
from penstock_router.text.stop_strings import beginning


@dataclass(frozen=True, slots=True)
class ReasoningStyle:
    """The marks around a model's reasoning."""

    name: str
    begin: str
    end: str
    # The marks around an answer; "" where there are none.
    answer: tuple[str, str] = ("", "")
    # The template must have one of these texts; needed if styles share an end mark.
    signs: tuple[str, ...] = ("",)
    # True if templates of this style show a sign but not the end mark.
    hides_end: bool = False
    # True if answers begin within reasoning without any begin mark.
    is_silent: bool = False
    # A title that may follow the begin mark, and is dropped.
    title: str = ""

    def spelled(self, marks: Marks) -> ReasoningStyle:
        """Return the style with its marks as an answer's text has them."""
        begin, end, opens, closes = map(marks.spelled, (self.begin, self.end, *self.answer))
        return replace(self, begin=begin, end=end, answer=(opens, closes))

    def is_of(self, template_source: str) -> bool:
        """Tell whether a model with this chat template uses this style."""
        has_sign = any(sign in template_source for sign in self.signs)
        return has_sign and (self.hides_end or self.end in template_source)

    @property
    def marks(self) -> tuple[str, str]:
        return self.begin, self.end

    @property
    def texts(self) -> tuple[str, ...]:
        return tuple(filter(None, (*self.marks, *self.answer)))


_THINK = ReasoningStyle("think", "<think>", "</think>")
_GRANITE = ReasoningStyle("granite", "Here is my thought process:", "Here is my response:")
_MISTRAL = ReasoningStyle("mistral", "[THINK]", "[/THINK]")
_SEED = ReasoningStyle("seed", "<seed:think>", "</seed:think>")
_GEMMA = ReasoningStyle("gemma4", "<|channel>", "<channel|>", title="thought\n")
_KIMI = ReasoningStyle("kimi", "◁think▷", "◁/think▷")
_MINIMAX_M3 = ReasoningStyle("minimax_m3", "<mm:think>", "</mm:think>")
_STEP3 = ReasoningStyle(
    "step3", "<think>", "</think>", signs=("<steptml:",), hides_end=True, is_silent=True
)
# The suffix of its marks differs between checkpoints.
_HUNYUAN = ReasoningStyle("hy_v3", "<think>", "</think>", signs=("</think{}>",), hides_end=True)
_SUFFIXED = re.compile(r"</think(:[\w.-]+)>")
_SUFFIX = re.compile(r"""['"](:[\w.-]+)['"]""")

# `_RESPONSE` is for ERNIE 4.5 and Granite 3.3, `_ANSWER` for Hunyuan A13B.
_RESPONSE = ReasoningStyle(
    "think_response",
    "<think>",
    "</think>",
    ("<response>", "</response>"),
    signs=("<response></response>", "</global_setting>"),
)
_ANSWER = ReasoningStyle(
    "think_answer", "<think>", "</think>", ("<answer>", "</answer>"), signs=("<answer>",)
)
# `_COHERE` is for Command R7B and Command A, `_COHERE_TEXT` for later models.
_COHERE = ReasoningStyle(
    "cohere",
    "<|START_THINKING|>",
    "<|END_THINKING|>",
    ("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    signs=("<|START_RESPONSE|>",),
)
_COHERE_TEXT = ReasoningStyle(
    "cohere_text",
    "<|START_THINKING|>",
    "<|END_THINKING|>",
    ("<|START_TEXT|>", "<|END_TEXT|>"),
)
_APRIEL = ReasoningStyle(
    "apriel",
    "Here are my reasoning steps:",
    "[BEGIN FINAL RESPONSE]",
    ("", "[END FINAL RESPONSE]"),
)
_APERTUS = ReasoningStyle("apertus", "<|inner_prefix|>", "<|inner_suffix|>")

_ALL = (
    *(_STEP3, _HUNYUAN, _MINIMAX_M3),
    *(_RESPONSE, _ANSWER, _THINK, _GRANITE, _MISTRAL, _SEED, _KIMI, _GEMMA),
    *(_COHERE, _COHERE_TEXT, _APRIEL, _APERTUS),
)
# Styles by their names, and by the names that other servers use.
STYLES = {style.name: style for style in _ALL} | {
    "ernie45": _RESPONSE,
    "hunyuan_a13b": _ANSWER,
    "hunyuan": _HUNYUAN,
    "cohere_command3": _COHERE,
    "cohere_command4": _COHERE_TEXT,
    "deepseek_r1": _THINK,
    "deepseek_v3": _THINK,
    "qwen3": _THINK,
    "glm45": _THINK,
    "minimax_m2": _THINK,
    "olmo3": _THINK,
    "magistral": _MISTRAL,
    "seed_oss": _SEED,
    "hy_v4": _HUNYUAN,
    "minimax-m3": _MINIMAX_M3,
}
AUTO, NONE = "auto", "none"


def style_of(template_source: str, name: str = AUTO) -> ReasoningStyle | None:
    """Return the style of this name; "auto": the first style that fits the chat template.

    A template that only strips old reasoning counts too, because its model reasons (DeepSeek R1's
    first template). A wrong match does no harm: an answer without a begin mark is all content.
    Raises `KeyError` for an unknown name.
    """
    if name == NONE:
        return None
    if name != AUTO:
        return _as_written(STYLES[name], template_source)
    for style in STYLES.values():
        if style.is_of(template_source):
            return _as_written(style, template_source)
    found = _SUFFIXED.search(template_source)
    return None if found is None else _with_suffix(_HUNYUAN, found.group(1))


def _as_written(style: ReasoningStyle, template_source: str) -> ReasoningStyle:
    """Give the style the suffix that the template adds to its marks."""
    if style is not _HUNYUAN:
        return style
    found = _SUFFIXED.search(template_source)
    if found is None and style.is_of(template_source):
        found = _SUFFIX.search(template_source)
    return style if found is None else _with_suffix(style, found.group(1))


def _with_suffix(style: ReasoningStyle, suffix: str) -> ReasoningStyle:
    begin, end = (f"{mark[:-1]}{suffix}>" for mark in style.marks)
    return replace(style, begin=begin, end=end)


# ---- Reasoning in a prompt ---------------------------------------------------------------------


def reasoning_begun(prompt_text: str, style: ReasoningStyle, continued: str = "") -> bool:
    """Tell whether the prompt ends within reasoning.

    The begin mark must be at the prompt's end, or in or directly before `continued`, the message
    that the answer continues. Marks that users wrote elsewhere do not count.
    """
    _, mark, since = prompt_text.rpartition(style.begin)
    if style.is_silent and not continued:
        return not reasoning_over(prompt_text, style)
    if not mark or style.end in since:
        return False
    since = since.removeprefix(style.title).strip()
    return not since or continued.rstrip().endswith(since)


def reasoning_over(prompt_text: str, style: ReasoningStyle) -> bool:
    """Tell whether the prompt has ended the reasoning, so that none follows."""
    return prompt_text.rstrip().endswith(style.end)


# ---- Reasoning in an answer --------------------------------------------------------------------


class ReasoningSplitter:
    is_open = False

    __slots__ = (
        "_answer_marks",
        "_begin_mark",
        "_end_mark",
        "_held",
        "_is_content",
        "_space",
        "_title",
        "has_reasoning",
        "in_reasoning",
    )

    def __init__(self, style: ReasoningStyle, begun: bool) -> None:
        """Start a splitter; with `begun`, the prompt ends within reasoning."""
        self._begin_mark, self._end_mark = style.marks
        self.in_reasoning = self.has_reasoning = begun
        # True once only content and the marks around it can follow.
        self._is_content = False
        self._answer_marks = _AnswerMarks(*style.answer) if any(style.answer) else None
        # The title, until it is seen after the begin mark.
        self._title = style.title
        # Text that may be the beginning of a mark.
        self._held = ""
        # Whitespace that may stand before a mark; None: the next whitespace is dropped.
        self._space: list[str] | None = None if begun else []

    @property
    def is_over(self) -> bool:
        return (self.has_reasoning and not self.in_reasoning) or self._is_content

    def feed(self, text: str) -> list[Piece]:
        if self._is_content:
            return self._content(text)
        if self.in_reasoning:
            return self._reason(text)
        return self._answer(text) if self.has_reasoning else self._begin(text)

    def flush(self, *, was_cut: bool = False) -> list[Piece]:
        """End the text; held text is text of the current kind."""
        text = "".join(self._space or ()) + self._held
        is_reasoning, over = self.in_reasoning, self.has_reasoning and not self.in_reasoning
        self._held, self._space = "", None
        if is_reasoning:
            return [Piece(PieceKind.REASONING, text)] if text else []
        return self._content("" if over and not text.strip() else text, is_last=True)

    def _content(self, text: str, *, is_last: bool = False) -> list[Piece]:
        if self._answer_marks is not None:
            text = self._answer_marks.feed(text)
            text += self._answer_marks.flush() if is_last else ""
        return [Piece(PieceKind.CONTENT, text)] if text else []

    def _begin(self, text: str) -> list[Piece]:
        assert self._space is not None
        begin, end = self._begin_mark, self._end_mark
        seen = self._held + text
        if not self._held:
            seen = text.lstrip()
            self._space.append(text[: len(text) - len(seen)])
        if seen.startswith(begin):
            self._held, self._space = "", None
            self.in_reasoning = self.has_reasoning = True
            return self._reason(seen[len(begin) :])
        if seen.startswith(end):
            self._held, self._space = "", None
            self.has_reasoning = True
            return self._answer(seen[len(end) :])
        if begin.startswith(seen) or end.startswith(seen):
            self._held = seen
            return []
        self._is_content = True
        seen = "".join(self._space) + seen
        self._held, self._space = "", None
        return self._content(seen)

    def _reason(self, text: str) -> list[Piece]:
        text, self._held = self._held + text, ""
        end = self._end_mark
        if self._space is None:
            text = self._without_begin(text)
            if self._begin_mark.startswith(text) or self._title.startswith(text):
                self._held = text
                return []
        body, mark, rest = text.partition(end)
        if mark:
            shown = self._reasoning(body)
            self.in_reasoning, self._space = False, None
            return shown + self._answer(rest)
        sure = beginning(text, (end,))
        self._held = text[sure:]
        return self._reasoning(text[:sure])

    def _without_begin(self, text: str) -> str:
        while True:
            text = text.lstrip()
            if self._title and text.startswith(self._title):
                text, self._title = text[len(self._title) :], ""
            elif text.startswith(self._begin_mark):
                text = text[len(self._begin_mark) :]
            else:
                return text

    def _reasoning(self, text: str) -> list[Piece]:
        """Show reasoning; whitespace at its end is held back until more text follows."""
        if self._space is None:
            text = text.lstrip()
            if not text:
                return []
            self._space = []
        body = text.rstrip()
        if not body:
            self._space.append(text)
            return []
        shown = "".join([*self._space, body])
        self._space = [text[len(body) :]]
        return [Piece(PieceKind.REASONING, shown)]

    def _answer(self, text: str) -> list[Piece]:
        """Read text after reasoning: drop whitespace and repeated end marks."""
        text, self._held = self._held + text, ""
        end = self._end_mark
        while (text := text.lstrip()).startswith(end):
            text = text[len(end) :]
        if text and end.startswith(text):
            self._held = text
            return []
        self._is_content = bool(text)
        return self._content(text) if text else []


class _AnswerMarks:
    """Drops the marks around an answer, and whitespace inside and after them."""

    __slots__ = ("_begin", "_end", "_held", "_is_begun", "_is_inside", "_skips_space", "_spaces")

    def __init__(self, begin: str, end: str) -> None:
        self._begin, self._end = begin, end
        self._held = ""
        # Whitespace after `_held`, kept separately so that a long run is read only once.
        self._spaces: list[str] = []
        self._is_begun = self._is_inside = False
        # True directly after a mark.
        self._skips_space = False

    def feed(self, text: str) -> str:
        if text.isspace() and (self._spaces or self._held.isspace()):
            self._spaces.append(text)
            return ""
        text = self.flush() + text
        if not self._is_begun:
            stripped = text.lstrip()
            if self._begin.startswith(stripped) and stripped != self._begin:
                self._held = text
                return ""
            self._is_begun = True
            self._is_inside = stripped.startswith(self._begin)
            if self._is_inside and self._begin:
                self._skips_space = True
                text = stripped[len(self._begin) :]
        if self._skips_space:
            text = text.lstrip()
            self._skips_space = not text
        if not self._is_inside:
            return text
        body, mark, rest = text.partition(self._end)
        if mark:
            self._is_inside = False
            rest = rest.lstrip()
            self._skips_space = not rest
            return body.rstrip() + rest
        sure = len(text[: beginning(text, (self._end,))].rstrip())
        self._held = text[sure:]
        return text[:sure]

    def flush(self) -> str:
        """End the text; held text is ordinary text."""
        held = "".join((self._held, *self._spaces))
        self._held, self._spaces = "", []
        return held
