"""In which order requests are served. Knows a request's objective and the time, nothing of steps.

Inside a priority class the request with the least slack goes first: the time until its next token
must begin for its objective to be met. A request without an objective is due when it has waited
`aging_s`, so that such requests keep their order of arrival. A request that has waited that long
for its next token is aged and goes before higher classes. In a long queue all requests are aged and
classes would mean nothing, so only every other request is admitted by age.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator

from penstock_shard.request import NO_OBJECTIVE, Objective, Request

# What `latency_sensitive` means where the objective gives no seconds.
_SENSITIVE_FIRST_TOKEN_S = 0.5
_SENSITIVE_BETWEEN_TOKENS_S = 0.1

# Compared as a tuple: aged requests first, then by class, by when the next token is due, by arrival
# number.
Urgency = tuple[bool, int, float, int]


def seconds_between_tokens(objective: Objective) -> float | None:
    """The most seconds wanted between two tokens; None: no limit."""
    if objective.seconds_between_tokens is not None:
        return objective.seconds_between_tokens
    return _SENSITIVE_BETWEEN_TOKENS_S if objective.latency_sensitive else None


def urgency(request: Request, now_s: float, aging_s: float, token_s: float) -> Urgency:
    """The smallest is served first. `token_s`: seconds a token takes; used with a deadline only."""
    since_s = request.last_token_s or request.arrived_s
    aged = now_s - since_s >= aging_s
    objective = request.objective
    due_s = since_s + aging_s
    if objective is not NO_OBJECTIVE:
        due_s = _due_s(request, due_s, now_s, token_s)
    return not aged, 0 if aged else objective.priority, due_s, request.arrival


def _due_s(request: Request, latest_s: float, now_s: float, token_s: float) -> float:
    """When the next token must begin for the whole objective to be met."""
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
        # A deadline too near for `max_tokens` tokens does not count: most are generous, and come
        # with a max_tokens that is never reached.
        if begin_s > now_s:
            latest_s = min(latest_s, begin_s)
    return latest_s


def expendable(request: Request) -> tuple[int, bool, int]:
    """The largest is preempted first: by lowest class, then no objective, then latest arrival."""
    return request.objective.priority, _is_indifferent(request.objective), request.arrival


def _is_indifferent(objective: Objective) -> bool:
    return objective is NO_OBJECTIVE or objective == Objective(priority=objective.priority)


class RequestGroup:
    """Waiting or running requests in the order they joined, with counts of their kinds."""

    def __init__(self) -> None:
        # Values: the number of tokens that the request had when it joined.
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
        # The number that was added, and not the current one: pending tokens may have been dropped.
        self.num_tokens_joined -= self._requests.pop(request)
        self.num_objectives -= request.objective is not NO_OBJECTIVE
        self._classes[request.objective.priority] -= 1
        if not self._classes[request.objective.priority]:
            del self._classes[request.objective.priority]

    @property
    def highest_class(self) -> int:
        """The highest class (lowest number) in the group, which must not be empty."""
        return min(self._classes)

    @property
    def lowest_class(self) -> int:
        return max(self._classes)
