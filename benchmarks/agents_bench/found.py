"""Counts what one cache that forgets nothing finds of the prompts of a trace."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.agents_bench.trace import Session, Turn


def found_by_all(known_tokens: int, prompt_tokens: int, block_size: int) -> int:
    """The tokens it finds of a prompt whose first `known_tokens` were computed before: whole
    blocks, without the prompt's last token.
    """
    return min(known_tokens, prompt_tokens - 1) // block_size * block_size


def known_after(turn: Turn, said: int) -> int:
    """Count the tokens said by the end of this turn that are computed when others go on from there:
    all but the last of the answer, unless one of several that go on has computed that.
    """
    return said if turn.subagents else said - 1


@dataclass(frozen=True, slots=True)
class Step:
    """A turn in its place: the lengths of its prompt, and of what was computed of that before."""

    turn: Turn
    prompt_tokens: int
    known_tokens: int

    @property
    def mean_tokens(self) -> float:
        """Estimate the sequence's length while it decodes."""
        return self.prompt_tokens + self.turn.answer_tokens / 2


def steps_of(session: Session) -> Iterator[Step]:
    """List the requests of a session and its subagents, whose system prompt is known."""
    yield from _steps(session.turns, 0, session.system.num_tokens)


def _steps(turns: Sequence[Turn], said: int, known: int) -> Iterator[Step]:
    for turn in turns:
        prompt = said + sum(text.num_tokens for text in turn.added)
        yield Step(turn, prompt, known)
        said = prompt + turn.answer_tokens
        known = known_after(turn, said)
        for subagent in turn.subagents:
            yield from _steps(subagent, said, known)
