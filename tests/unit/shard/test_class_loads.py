"""The counts that a shard's server keeps of its live requests, by class."""

from __future__ import annotations

import random
from collections import Counter

from penstock_proto.facts import ClassLoad
from penstock_shard.server.live_requests import MAX_CLASSES, ClassLoads, Route


def route(name: str, priority: int, num_tokens: int = 10) -> Route:
    return Route(name, 1, lambda output: None, num_tokens, priority, 0.0)


def counted(routes: list[Route]) -> list[ClassLoad]:
    """Count the requests anew, by class."""
    loads = []
    for priority in sorted({each.priority for each in routes}):
        its = [each for each in routes if each.priority == priority]
        running = sum(each.started_s is not None for each in its)
        tokens = sum(each.num_tokens for each in its if not each.num_given)
        loads.append(ClassLoad(priority, running, len(its) - running, tokens))
    return loads


def test_counts_are_those_of_the_live_requests_whatever_became_of_them() -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    chance = random.Random(seed)
    classes = ClassLoads()
    live: list[Route] = []
    for number in range(2000):
        if not live or chance.random() < 0.3:
            live.append(route(str(number), chance.choice([-1, 0, 1, 7]), chance.randrange(1, 99)))
            classes.add(live[-1])
        one = chance.choice(live)
        what = chance.randrange(3)
        if what == 0:
            # An engine may begin with a request anew.
            classes.start(one)
            one.started_s = float(number)
        elif what == 1 and not one.num_given:
            classes.end_prompt(one)
            one.num_given = 3
        elif what == 2:
            live.remove(one)
            classes.remove(one)
        default_alone = all(each.priority == 0 for each in live)
        assert classes.report(10**9) == ([] if default_alone else counted(live))
    for one in live:
        classes.remove(one)
    assert classes.report(10**9) == []
    assert not classes._classes


def test_requests_of_the_default_class_alone_are_not_reported() -> None:
    classes = ClassLoads()
    classes.add(route("one", 0))
    assert classes.report(10**9) == []
    classes.add(route("two", 1))
    assert [each.priority for each in classes.report(10**9)] == [0, 1]


def test_tokens_that_the_engine_need_not_compute_count_for_no_class() -> None:
    classes = ClassLoads()
    classes.add(route("one", 0, num_tokens=3000))
    classes.add(route("two", 1, num_tokens=1000))
    tokens = [each.queued_prompt_tokens for each in classes.report(100)]
    assert tokens == [75, 25]
    assert [each.queued_prompt_tokens for each in classes.report(0)] == [0, 0]


def test_a_report_has_eight_classes_at_most_and_leaves_no_request_out() -> None:
    classes = ClassLoads()
    for priority in range(100):
        classes.add(route(str(priority), priority, num_tokens=priority))
    report = classes.report(10**9)
    assert [each.priority for each in report] == list(range(MAX_CLASSES))
    total: Counter[str] = Counter()
    for each in report:
        total.update(waiting=each.waiting, tokens=each.queued_prompt_tokens)
    assert total == {"waiting": 100, "tokens": sum(range(100))}
