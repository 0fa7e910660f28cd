"""The order in which sequences are served.

Within a priority class the sequence with the least slack is first. Slack is the time until its next
token must begin to meet the objective. Without an objective, a sequence is due after `aging_s`,
which keeps the order of arrival. After `aging_s` without a token, a sequence is aged and precedes
higher classes. In a long queue all sequences are aged and classes would mean nothing, so only some
admissions and steps are ordered by age.
"""

from __future__ import annotations

from penstock_proto.types import Objective
from penstock_shard.sequence import Sequence

# Seconds that `latency_sensitive` stands for if the objective gives none.
_SENSITIVE_FIRST_TOKEN_S = 0.5
_SENSITIVE_BETWEEN_TOKENS_S = 0.1

# Sorts aged sequences first, then by class, time the next token is due, arrival.
Urgency = tuple[bool, int, float, int]


def seconds_between_tokens(objective: Objective | None) -> float | None:
    """Return the longest wanted time between two tokens; None if unlimited."""
    if objective is None:
        return None
    if objective.seconds_between_tokens is not None:
        return objective.seconds_between_tokens
    return _SENSITIVE_BETWEEN_TOKENS_S if objective.latency_sensitive else None


def urgency(sequence: Sequence, now_s: float, aging_s: float, token_s: float) -> Urgency:
    """Return a key; the smallest is served first. Only deadlines need `token_s`, the seconds that a
    token takes.
    """
    since_s = sequence.last_token_s or sequence.arrived_s
    aged = now_s - since_s >= aging_s
    objective = sequence.request.objective
    due_s = since_s + aging_s
    if objective is None:
        return not aged, 0, due_s, sequence.arrival
    due_s = _due_s(sequence, objective, due_s, now_s, token_s)
    return not aged, 0 if aged else sequence.request.priority, due_s, sequence.arrival


def _due_s(
    sequence: Sequence, objective: Objective, latest_s: float, now_s: float, token_s: float
) -> float:
    """Return when the next token must begin to meet the whole objective."""
    if sequence.last_token_s:
        between_s = seconds_between_tokens(objective)
        if between_s is not None:
            latest_s = min(latest_s, sequence.last_token_s + between_s)
    elif objective.time_to_first_token_s is not None:
        latest_s = min(latest_s, sequence.arrived_s + objective.time_to_first_token_s)
    elif objective.latency_sensitive:
        latest_s = min(latest_s, sequence.arrived_s + _SENSITIVE_FIRST_TOKEN_S)
    if objective.deadline_s is not None:
        left = sequence.request.max_tokens - (sequence.num_tokens - sequence.num_prompt_tokens)
        begin_s = sequence.arrived_s + objective.deadline_s - left * token_s
        # A deadline too near for `max_tokens` tokens does not count, because few outputs get that
        # long.
        if begin_s > now_s:
            latest_s = min(latest_s, begin_s)
    return latest_s
