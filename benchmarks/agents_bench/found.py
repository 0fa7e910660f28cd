"""Counts the prompt tokens of a trace that one cache without evictions finds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.agents_bench.trace import Session, Turn


def found_by_all(known_tokens: int, prompt_tokens: int, block_size: int) -> int:
    """Count the tokens that the cache finds of a prompt, if the first `known_tokens` were computed
    before: whole blocks, without the prompt's last token.
    """
    return min(known_tokens, prompt_tokens - 1) // block_size * block_size


def known_after(turn: Turn, said: int) -> int:
    """Count the tokens until the end of this turn that are computed when requests continue it. The
    answer's last token is not, unless one of several continuations has computed it.
    """
    return said if turn.subagents else said - 1


@dataclass(frozen=True, slots=True)
class Step:
    """A turn, with the length of its prompt and of the prefix that was computed before."""

    turn: Turn
    prompt_tokens: int
    known_tokens: int

    @property
    def mean_tokens(self) -> float:
        """Estimate the sequence's mean length while it decodes."""
        return self.prompt_tokens + self.turn.answer_tokens / 2


def steps_of(session: Session) -> Iterator[Step]:
    """List the requests of a session and its subagents; the system prompt is cached."""
    yield from _steps(session.turns, 0, session.system.num_tokens)


def _steps(turns: Sequence[Turn], said: int, known: int) -> Iterator[Step]:
    for turn in turns:
        prompt = said + sum(text.num_tokens for text in turn.added)
        yield Step(turn, prompt, known)
        said = prompt + turn.answer_tokens
        known = known_after(turn, said)
        for subagent in turn.subagents:
            yield from _steps(subagent, said, known)
