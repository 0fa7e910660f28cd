"""In which order requests are served. Knows a request's wishes and the time, nothing of steps.

Inside a class of priority, whoever has the least slack goes first: the time until its next token is
due, less what it still has to compute by then. A request that states no wish is due when it has
waited `aging_s`, so that such requests keep the order of their arrival. Whoever has waited that
long for its next token is aged and goes before its betters; so that a long queue does not make
everybody aged and classes mean nothing, only every other place is given by age.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator

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
    """Smaller is served first. `token_s`: what a token takes; matters only with a deadline."""
    since_s = request.last_token_s or request.arrived_s
    aged = now_s - since_s >= aging_s
    objective = request.objective
    due_s = since_s + aging_s
    if objective is not NO_OBJECTIVE:
        due_s = _due_s(request, due_s, now_s, token_s)
    return not aged, 0 if aged else objective.priority, due_s, request.arrival


def _due_s(request: Request, latest_s: float, now_s: float, token_s: float) -> float:
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
        begin_s = request.arrived_s + objective.deadline_s - left * token_s
        # Nobody is served first for a deadline that all its tokens cannot meet anyway: most
        # generous ones come with a max_tokens that is never reached.
        if begin_s > now_s:
            latest_s = min(latest_s, begin_s)
    return latest_s


def expendable(request: Request) -> tuple[int, bool, int]:
    """The largest is preempted first: the lowest class, no objective, the latest arrival."""
    return request.objective.priority, _is_indifferent(request.objective), request.arrival


def _is_indifferent(objective: Objective) -> bool:
    return objective is NO_OBJECTIVE or objective == Objective(priority=objective.priority)


class RequestGroup:
    """Requests that wait, or that run, in the order they joined; and what kinds are among them."""

    def __init__(self) -> None:
        # With the number of tokens each had when it joined.
        self._requests: OrderedDict[Request, int] = OrderedDict()
        self._classes: Counter[int] = Counter()
        self.num_objectives = 0
        self.num_tokens_joined = 0

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def add(self, request: Request, *, first: bool = False) -> None:
        self._requests[request] = request.num_tokens
        if first:
            self._requests.move_to_end(request, last=False)
        self.num_tokens_joined += request.num_tokens
        self.num_objectives += request.objective is not NO_OBJECTIVE
        self._classes[request.objective.priority] += 1

    def remove(self, request: Request) -> None:
        # What was added, not what it has now: pending tokens may have come to nothing.
        self.num_tokens_joined -= self._requests.pop(request)
        self.num_objectives -= request.objective is not NO_OBJECTIVE
        self._classes[request.objective.priority] -= 1
        if not self._classes[request.objective.priority]:
            del self._classes[request.objective.priority]

    @property
    def highest_class(self) -> int:
        """Of a group that is not empty; the highest class has the lowest number."""
        return min(self._classes)

    @property
    def lowest_class(self) -> int:
        return max(self._classes)
