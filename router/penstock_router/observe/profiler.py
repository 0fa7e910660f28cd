"""Where this process spends its time: stacks taken by a thread, a tree of them, a picture of that.

Knows no HTTP. A thread that waits is left out: what is shown is work, also work that waits for a
core. The sampler needs the lock that all Python threads share, and gets it where the others give it
away: what runs in C is seen at the next Python function that it calls or returns to, and what an
event loop in C does between callbacks cannot be told from its waiting. The CPU time beside the
picture says how much that may be.
"""

from __future__ import annotations

import html
import random
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import NamedTuple

# How soon the sampler is let in when it wakes. With Python's own 5 ms, callbacks would end before,
# and all work that comes in short pieces would go unseen.
_SWITCH_INTERVAL_S = 1e-6

# Functions that do nothing but wait when no other is called by them: the end of a path, and a name.
_WAITING = (
    ("/selectors.py", "select"),
    ("/threading.py", "wait"),
    ("/threading.py", "_wait_for_tstate_lock"),
    # Threads of libraries in C, which sleep there.
    ("/threading.py", "run"),
    ("/queue.py", "get"),
    ("/concurrent/futures/thread.py", "_worker"),
    # uvloop has no Python frames of its own.
    ("/asyncio/runners.py", "run"),
)


class Frame(NamedTuple):
    """A function; `line` is where it begins. The root of a thread has its name and no path."""

    function: str
    path: str
    line: int


# The outermost first.
Stack = tuple[Frame, ...]


@dataclass(frozen=True, slots=True)
class Profile:
    """Samples of the stacks of threads that were not waiting."""

    stacks: Mapping[Stack, int]
    # Samples of the main thread, which is in no stack while it waits.
    num_samples: int
    num_waiting: int
    duration_s: float
    # Processor time of the whole process.
    cpu_s: float


# ---- Samples -----------------------------------------------------------------------------------


class Sampler:
    """Takes the stacks of all threads of this process, from `start` to `stop`."""

    def __init__(self, rate_hz: float) -> None:
        self._interval_s = 1 / rate_hz
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="profiler", daemon=True)
        self._main = threading.main_thread().ident or 0
        # The outermost code of the main thread.
        self._root = 0
        # By thread and ids of code, as hashes of code itself are slow; the code keeps its id.
        self._counts: Counter[tuple[int, tuple[int, ...]]] = Counter()
        self._codes: dict[int, CodeType] = {}
        self._waiting: dict[int, bool] = {}
        self._names: dict[int | None, str] = {}
        self._num_samples = self._num_waiting = 0
        self._started_s = self._cpu_started_s = 0.0

    def start(self) -> None:
        """Begin; at most one sampler of a process runs at a time."""
        self._started_s, self._cpu_started_s = time.perf_counter(), time.process_time()
        self._names = _thread_names()
        self._root = self._ids(sys._current_frames()[self._main])[-1]
        self._thread.start()

    def stop(self) -> Profile:
        """End, within a sample's time, and tell."""
        self._stopped.set()
        self._thread.join()
        self._names |= _thread_names()
        return Profile(
            self._stacks(),
            num_samples=self._num_samples,
            num_waiting=self._num_waiting,
            duration_s=time.perf_counter() - self._started_s,
            cpu_s=time.process_time() - self._cpu_started_s,
        )

    def _run(self) -> None:
        due_s = time.perf_counter()
        while not self._wait(max(0.0, due_s - time.perf_counter())):
            self._sample()
            # One that comes late moves those after it: they are not caught up with.
            due_s = max(due_s, time.perf_counter() - self._interval_s)
            # Not in step with what comes at regular times, as tokens do.
            due_s += self._interval_s * random.uniform(0.5, 1.5)

    def _wait(self, timeout_s: float) -> bool:
        """Whether this is the end."""
        usual_s = sys.getswitchinterval()
        sys.setswitchinterval(_SWITCH_INTERVAL_S)
        try:
            return self._stopped.wait(timeout_s)
        finally:
            # Threads should not run on while their stacks are walked.
            sys.setswitchinterval(usual_s)

    def _sample(self) -> None:
        for thread_id, frame in sys._current_frames().items():
            if thread_id == self._thread.ident:
                continue
            waits = self._waits(frame.f_code)
            if thread_id == self._main:
                self._num_samples += 1
                self._num_waiting += waits
            if waits:
                continue
            ids = self._ids(frame)
            # Else it ran on while it was walked.
            if thread_id != self._main or ids[-1] == self._root:
                self._counts[thread_id, ids] += 1

    def _waits(self, code: CodeType) -> bool:
        known = self._waiting.get(id(code))
        if known is None:
            self._codes[id(code)] = code
            known = self._waiting[id(code)] = is_waiting(code.co_filename, code.co_name)
        return known

    def _ids(self, innermost: FrameType) -> tuple[int, ...]:
        """The ids of a stack's code objects, innermost first."""
        ids, frame = [], innermost
        while frame is not None:
            code = frame.f_code
            self._codes[id(code)] = code
            ids.append(id(code))
            frame = frame.f_back  # type: ignore[assignment]
        return tuple(ids)

    def _stacks(self) -> Mapping[Stack, int]:
        stacks: Counter[Stack] = Counter()
        for (thread_id, ids), count in self._counts.items():
            thread = Frame(self._names.get(thread_id, "a thread"), "", 0)
            codes = (self._codes[number] for number in reversed(ids))
            frames = (Frame(c.co_qualname, c.co_filename, c.co_firstlineno) for c in codes)
            stacks[thread, *frames] += count
        return stacks


def is_waiting(path: str, function: str) -> bool:
    """Whether a thread waits whose innermost function this is."""
    return any(function == name and path.endswith(end) for end, name in _WAITING)


def _thread_names() -> dict[int | None, str]:
    return {thread.ident: thread.name for thread in threading.enumerate()}


# ---- The tree ----------------------------------------------------------------------------------


@dataclass(slots=True)
class Node:
    """A function as it was called on one way from the root, and how many samples saw it."""

    frame: Frame
    num_samples: int = 0
    children: dict[Frame, Node] = field(default_factory=dict)

    @property
    def num_own(self) -> int:
        """Samples that saw it call nothing."""
        return self.num_samples - sum(child.num_samples for child in self.children.values())


def build_tree(stacks: Mapping[Stack, int]) -> Node:
    """Stacks put together where they begin alike."""
    root = Node(Frame("all that ran", "", 0))
    for stack, count in stacks.items():
        node = root
        node.num_samples += count
        for frame in stack:
            node = node.children.setdefault(frame, Node(frame))
            node.num_samples += count
    return root


class Box(NamedTuple):
    """A node's place: `left` and `width` are shares of the root's width."""

    node: Node
    depth: int
    left: float
    width: float


def lay_out(root: Node, min_width: float = 0.0) -> Iterator[Box]:
    """Callers above what they call, what was seen most to the left; no box below `min_width`."""
    total = root.num_samples or 1
    pending = [(root, 0, 0)]
    while pending:
        node, depth, before = pending.pop()
        width = node.num_samples / total
        if width < min_width:
            continue
        yield Box(node, depth, before / total, width)
        for child in sorted(node.children.values(), key=lambda child: -child.num_samples):
            pending.append((child, depth + 1, before))
            before += child.num_samples


# ---- The picture -------------------------------------------------------------------------------

_WIDTH_PX = 1400
_MARGIN_PX = 16
_ROW_PX = 18
# The width of a character in the font below.
_CHARACTER_PX = 6.7
_TOP_PX = 86
# A box that is narrower is left out.
_MIN_BOX_PX = 0.5
_NUM_OWN = 20

STYLE = """
svg { color-scheme: light dark; background: #ffffff; font: 11px ui-monospace, monospace; }
text { fill: #1c2530; }
.title { font-size: 15px; font-weight: 700; }
.quiet { fill: #5a6675; }
rect { stroke: #ffffff; stroke-width: .6; }
.ours { fill: #9cc8f2; }
.library { fill: #f1d9a7; }
.standard { fill: #d6e3c9; }
.other { fill: #dfe3e8; }
g:hover rect { stroke: #1c2530; stroke-width: 1.2; }
@media (prefers-color-scheme: dark) {
  svg { background: #12171d; }
  text { fill: #e3e8ee; }
  .quiet { fill: #9aa7b6; }
  rect { stroke: #12171d; }
  .ours { fill: #1d4f80; }
  .library { fill: #5f4a1c; }
  .standard { fill: #3a4f2c; }
  .other { fill: #343f4c; }
  g:hover rect { stroke: #e3e8ee; }
}
"""

_LEGEND = (
    ("ours", "penstock"),
    ("library", "libraries"),
    ("standard", "Python's own"),
    ("other", "threads, generated code"),
)
# Which part of the program a path belongs to, and the part of the path that is shown.
_PLACES = (
    ("ours", re.compile(r".*/(penstock_\w+/.*)")),
    ("library", re.compile(r".*/(?:site|dist)-packages/(.*)")),
    ("standard", re.compile(r".*/lib/python\d[\d.]*/(.*)|(<frozen .*>)")),
)
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def render(profile: Profile, title: str) -> str:
    """A flame graph as an SVG that needs nothing else; its only style is `STYLE`."""
    root = build_tree(profile.stacks)
    inner_px = _WIDTH_PX - 2 * _MARGIN_PX
    boxes = list(lay_out(root, _MIN_BOX_PX / inner_px)) if root.num_samples else []
    below_px = _TOP_PX + _ROW_PX * (max((box.depth for box in boxes), default=0) + 1)
    own = _own_times(profile)
    height_px = below_px + _ROW_PX * (len(own) + 4)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH_PX}" height="{height_px}" '
        f'viewBox="0 0 {_WIDTH_PX} {height_px}">',
        f"<style>{STYLE}</style>",
        _text(_MARGIN_PX, 26, title, "title"),
        _text(_MARGIN_PX, 46, _summary(profile)),
        *_legend(),
        *(_box(box, inner_px, profile) for box in boxes),
        *_own_list(own, below_px, root.num_samples),
        "</svg>\n",
    ]
    return "\n".join(parts)


def _summary(profile: Profile) -> str:
    waited = profile.num_waiting / max(profile.num_samples, 1)
    used = profile.cpu_s / profile.duration_s if profile.duration_s else 0.0
    return (
        f"{profile.duration_s:.1f} s, {profile.num_samples} samples. The main thread waited in "
        f"{waited:.1%} of them, which are not shown. The process used {used:.1%} of a core."
    )


def _legend() -> Iterator[str]:
    left_px = _MARGIN_PX
    for kind, words in _LEGEND:
        yield f'<rect class="{kind}" x="{left_px}" y="58" width="12" height="12"/>'
        yield _text(left_px + 17, 68, words, "quiet")
        left_px += 40 + round(len(words) * _CHARACTER_PX)


def _box(box: Box, inner_px: float, profile: Profile) -> str:
    node = box.node
    kind, place = shown_place(node.frame)
    left_px, top_px = _MARGIN_PX + box.left * inner_px, _TOP_PX + box.depth * _ROW_PX
    width_px = box.width * inner_px
    of_time = node.num_samples / max(profile.num_samples, 1)
    own = node.num_own / node.num_samples
    tooltip = (
        f"{node.frame.function}\n{place}\n{box.width:.1%} of what ran, {of_time:.1%} of the time "
        f"({node.num_samples} samples); itself {own * box.width:.1%}"
    )
    label = cut_label(node.frame.function, f"{place} {box.width:.1%}", width_px)
    return (
        f"<g><title>{_escaped(tooltip)}</title>"
        f'<rect class="{kind}" x="{left_px:.2f}" y="{top_px}" width="{width_px:.2f}" '
        f'height="{_ROW_PX}"/>{_text(left_px + 4, top_px + 13, label) if label else ""}</g>'
    )


def cut_label(function: str, place: str, width_px: float) -> str:
    """As much of a label as fits in a box: all, the function, its beginning, or nothing."""
    num_fitting = int((width_px - 8) / _CHARACTER_PX)
    whole = f"{function} {place}".strip()
    if len(whole) <= num_fitting:
        return whole
    if len(function) <= num_fitting:
        return function
    return f"{function[: num_fitting - 1]}…" if num_fitting >= 3 else ""


def shown_place(frame: Frame) -> tuple[str, str]:
    """Whose code it is, and its file and line without the folders it is installed in."""
    if not frame.path:
        return "other", ""
    for kind, pattern in _PLACES:
        if match := pattern.fullmatch(frame.path):
            return kind, f"{match[1] or match[0]}:{frame.line}"
    return "other", f"{'/'.join(frame.path.split('/')[-2:])}:{frame.line}"


def _own_times(profile: Profile) -> list[tuple[Frame, int]]:
    own: Counter[Frame] = Counter()
    for stack, count in profile.stacks.items():
        own[stack[-1]] += count
    return own.most_common(_NUM_OWN)


def _own_list(own: list[tuple[Frame, int]], top_px: int, num_samples: int) -> Iterator[str]:
    if not own:
        yield _text(_MARGIN_PX, top_px, "Nothing ran when samples were taken.", "quiet")
        return
    top_px += 2 * _ROW_PX
    yield _text(_MARGIN_PX, top_px, "Functions by the time they took themselves", "title")
    for row, (frame, count) in enumerate(own, start=1):
        y_px = top_px + 4 + row * _ROW_PX
        yield _text(_MARGIN_PX, y_px, f"{count / num_samples:.1%}")
        yield _text(_MARGIN_PX + 56, y_px, frame.function)
        yield _text(_MARGIN_PX + 560, y_px, shown_place(frame)[1], "quiet")


def _text(x_px: float, y_px: float, text: str, style: str = "") -> str:
    named = f' class="{style}"' if style else ""
    return f'<text{named} x="{x_px:.2f}" y="{y_px}">{_escaped(text)}</text>'


def _escaped(text: str) -> str:
    """Also without characters that XML does not have at all."""
    return html.escape(_NOT_XML.sub("\N{REPLACEMENT CHARACTER}", text))
