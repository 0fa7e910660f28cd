"""Traces of agents: sessions of many turns on one growing prompt, the same for the same seed.

A session begins with a system prompt and tools that others share, and its own task. Each answer
ends with a tool call. The next prompt adds the tool's result to all earlier texts. A turn may also
start subagents, which continue the same prefix with their own tasks; the session waits for them.

A trace has lengths, times and the keys of texts. `token_ids` and `words` make the texts: equal keys
give equal texts, so that prompts share the same prefixes as agents' prompts.
"""

from __future__ import annotations

import dataclasses
import random
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_WORDS = ("the", "and", "you", "for", "that", "with", "know", "only", "can", "one", "more", "this")
# Sessions are drawn from this time before the start on; hardly any lasts longer.
_BEFORE_S = 1800.0
# An answer's seconds, to estimate the progress of a session at the start.
_ANSWER_S = 4.0
# Sigma of lognormal lengths of answers and subagents' tasks; and of a session's number of turns.
_SIGMA, _TURNS_SIGMA = 0.7, 0.6


@dataclass(frozen=True, slots=True)
class Habits:
    """Habits of agents. Lengths are medians in tokens, of lognormal distributions by default."""

    # System prompts with tools, of uniform lengths; the n-th is chosen in proportion to n**-zipf.
    systems: int = 8
    zipf: float = 1.0
    least_system_tokens: int = 6_000
    most_system_tokens: int = 16_000
    task_tokens: int = 800
    turns: int = 24
    answer_tokens: int = 120
    result_tokens: int = 600
    result_sigma: float = 1.2
    # Seconds that a tool runs.
    pause_s: float = 5.0
    pause_sigma: float = 1.2
    # The probability that a turn starts one to three subagents, and their number of turns.
    branches: float = 0.02
    subagent_turns: int = 5
    # A session ends before its prompt and answer would be longer.
    most_tokens: int = 100_000


@dataclass(frozen=True, slots=True)
class Text:
    key: str
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Turn:
    """A request: the new texts in its prompt, and the pause since the last answer. After its
    answer, the subagents continue the same prompt; the next turn waits for them.
    """

    added: tuple[Text, ...]
    answer_tokens: int
    pause_s: float
    subagents: tuple[tuple[Turn, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Session:
    """An agent at work. Prompts begin with `system`. `said` has the texts before the first of these
    turns, if the session began before the start.
    """

    name: str
    start_s: float
    system: Text
    turns: Sequence[Turn]
    said: tuple[Text, ...] = ()


def token_ids(text: Text) -> array[int]:
    """Make the text's token ids, all below 65,536."""
    return array("I", array("H", random.Random(text.key).randbytes(2 * text.num_tokens)))


def words(text: Text) -> str:
    """Make the text's words, each one token in many vocabularies."""
    return " ".join(random.Random(text.key).choices(_WORDS, k=text.num_tokens))


def sessions(habits: Habits, *, per_s: float, seconds: float, seed: int = 0) -> list[Session]:
    """Draw sessions that begin as a Poisson process of rate `per_s` in [0, `seconds`), and those
    that are in progress at 0. The n-th session of either kind is the same at every rate.
    """
    systems = _systems(habits, seed)
    found = []
    for number, ago_s in enumerate(_poisson(f"{seed} before", per_s, _BEFORE_S)):
        session = _session(habits, systems, f"{seed} before {number}")
        found.append(_under_way(dataclasses.replace(session, start_s=-ago_s)))
    for number, at_s in enumerate(_poisson(f"{seed} after", per_s, seconds)):
        session = _session(habits, systems, f"{seed} {number}")
        found.append(dataclasses.replace(session, start_s=at_s))
    return [session for session in found if session.turns]


def _poisson(key: str, per_s: float, seconds: float) -> Iterator[float]:
    """Draw times of arrivals in [0, `seconds`). Another rate stretches the same times."""
    rng = random.Random(key)
    at_s = rng.expovariate(1) / per_s
    while at_s < seconds:
        yield at_s
        at_s += rng.expovariate(1) / per_s


def samples(habits: Habits, count: int, seed: int = 0) -> list[Session]:
    """Draw whole sessions."""
    systems = _systems(habits, seed)
    return [_session(habits, systems, f"{seed} sample {number}") for number in range(count)]


def _systems(habits: Habits, seed: int) -> list[Text]:
    rng = random.Random(f"{seed} systems")
    bounds = habits.least_system_tokens, habits.most_system_tokens
    return [Text(f"{seed} system {i}", rng.randint(*bounds)) for i in range(habits.systems)]


def _session(habits: Habits, systems: Sequence[Text], name: str) -> Session:
    rng = random.Random(name)
    weights = [(rank + 1) ** -habits.zipf for rank in range(len(systems))]
    (system,) = rng.choices(systems, weights)
    task = Text(f"{name} task", _length(rng, habits.task_tokens, _SIGMA))
    count = _length(rng, habits.turns, _TURNS_SIGMA)
    turns = _turns(habits, rng, name, (system, task), 0, count, can_branch=True)
    return Session(name, 0.0, system, tuple(turns))


def _turns(
    habits: Habits,
    rng: random.Random,
    name: str,
    first: tuple[Text, ...],
    said: int,
    count: int,
    *,
    can_branch: bool,
) -> Iterator[Turn]:
    """Draw turns after `said` tokens, while they fit."""
    added, pause_s = first, 0.0
    for index in range(count):
        answer = _length(rng, habits.answer_tokens, _SIGMA)
        said += sum(text.num_tokens for text in added) + answer
        if said > habits.most_tokens:
            return
        subagents: tuple[tuple[Turn, ...], ...] = ()
        if can_branch and rng.random() < habits.branches:
            subagents = _subagents(habits, rng, f"{name} {index}", said)
        yield Turn(added, answer, pause_s, subagents)
        result = _length(rng, habits.result_tokens, habits.result_sigma)
        added = (Text(f"{name} {index} result", result),)
        pause_s = habits.pause_s * rng.lognormvariate(0, habits.pause_sigma)


def _subagents(
    habits: Habits, rng: random.Random, name: str, said: int
) -> tuple[tuple[Turn, ...], ...]:
    found = []
    for number in range(rng.randint(1, 3)):
        own = f"{name} subagent {number}"
        task = Text(f"{own} task", _length(rng, habits.task_tokens, _SIGMA))
        count = _length(rng, habits.subagent_turns, _TURNS_SIGMA)
        found.append(tuple(_turns(habits, rng, own, (task,), said, count, can_branch=False)))
    return tuple(turns for turns in found if turns)


def _under_way(session: Session) -> Session:
    """Return the turns after 0 of a session that began before."""
    at_s, said = session.start_s, list[Text]()
    for index, turn in enumerate(session.turns):
        at_s += turn.pause_s
        if at_s >= 0:
            turns = (dataclasses.replace(turn, pause_s=0.0), *session.turns[index + 1 :])
            return dataclasses.replace(session, start_s=at_s, turns=turns, said=tuple(said))
        at_s += _lasts_s(turn)
        said += [*turn.added, Text(f"{session.name} {index} answer", turn.answer_tokens)]
    return dataclasses.replace(session, turns=())


def _lasts_s(turn: Turn) -> float:
    """Estimate the seconds of a turn's answer and subagents."""
    each_s = [sum(_ANSWER_S + sub.pause_s for sub in turns) for turns in turn.subagents]
    return _ANSWER_S + max(each_s, default=0.0)


def _length(rng: random.Random, median: float, sigma: float) -> int:
    return max(1, round(median * rng.lognormvariate(0, sigma)))
