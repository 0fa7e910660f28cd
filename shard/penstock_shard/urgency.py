"""In which order requests are served. Pure functions of a request and the time.

Inside a class of priority, whoever has the least slack goes first: the time until its next token is
due, less what it still has to compute by then. A request that states no wish is due when it has
waited `aging_s`, so that such requests keep the order of their arrival. Whoever has waited that
long for its next token goes before all others, whatever its class.
"""

from __future__ import annotations

from penstock_shard.request import NO_OBJECTIVE, Objective, Request

# What latency_sensitive means where nothing more exact is said.
_SENSITIVE_FIRST_TOKEN_S = 0.5
_SENSITIVE_BETWEEN_TOKENS_S = 0.1

# Compared as a tuple: aged first, then class, when the next token is due, arrival.
Urgency = tuple[bool, int, float, int]


def seconds_between_tokens(objective: Objective) -> float | None:
    """How far apart the tokens may be; None: as it comes."""
    if objective.seconds_between_tokens is not None:
        return objective.seconds_between_tokens
    return _SENSITIVE_BETWEEN_TOKENS_S if objective.latency_sensitive else None


def urgency(request: Request, now_s: float, aging_s: float, token_s: float) -> Urgency:
    """Smaller is served first. `token_s` is what a token of one request takes at present."""
    since_s = request.last_token_s or request.arrived_s
    aged = now_s - since_s >= aging_s
    objective = request.objective
    due_s = since_s + aging_s
    if objective is not NO_OBJECTIVE:
        due_s = _due_s(request, due_s, token_s)
    return not aged, 0 if aged else objective.priority, due_s, request.arrival


def _due_s(request: Request, latest_s: float, token_s: float) -> float:
    """When the next token must begin for every wish to be met."""
    objective = request.objective
    if request.last_token_s:
        between_s = seconds_between_tokens(objective)
        if between_s is not None:
            latest_s = min(latest_s, request.last_token_s + between_s)
    elif objective.time_to_first_token_s is not None:
        latest_s = min(latest_s, request.arrived_s + objective.time_to_first_token_s)
    elif objective.latency_sensitive:
        latest_s = min(latest_s, request.arrived_s + _SENSITIVE_FIRST_TOKEN_S)
    if objective.deadline_s is not None:
        left = request.max_tokens - (request.num_tokens - request.num_prompt_tokens)
        latest_s = min(latest_s, request.arrived_s + objective.deadline_s - left * token_s)
    return latest_s
