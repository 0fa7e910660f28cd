"""The problem that is told of a shard that is away: its cause, until something better is known."""

from __future__ import annotations

import pytest

from penstock_client.fleet.outage import Outage

BROKE, REFUSED, HANGS, STRANGE = "the connection broke", "refused", "hangs", "FD Shutdown"
CAUSES = (REFUSED, HANGS)


def told(*said: tuple[float, str]) -> tuple[str, list[str]]:
    """Return the problem at the end of an outage, and each problem that was news on the way. `said`
    has the times in seconds, each with its text.
    """
    outage, news = Outage(), []
    for now_s, text in said:
        if outage.take(text, now_s, names_cause=text in CAUSES):
            news.append(outage.problem)
    return outage.problem, news


def test_a_cause_takes_the_place_of_a_symptom_at_once() -> None:
    assert told((0, BROKE), (0.3, REFUSED)) == (REFUSED, [BROKE, REFUSED])


def test_a_later_symptom_takes_no_cause_s_place() -> None:
    assert told((0, HANGS), (5, STRANGE), (10, HANGS), (15, STRANGE)) == (HANGS, [HANGS])


def test_of_symptoms_that_come_and_go_the_first_stays() -> None:
    said = [(5.0 * turn, (BROKE, STRANGE)[turn % 2]) for turn in range(40)]
    assert told(*said) == (BROKE, [BROKE])


def test_a_symptom_that_stays_is_said_in_the_end() -> None:
    assert told((0, REFUSED), (1, STRANGE), (5, STRANGE), (10.9, STRANGE))[0] == REFUSED
    said = told((0, REFUSED), (1, STRANGE), (5, STRANGE), (11, STRANGE), (12, STRANGE))
    assert said == (STRANGE, [REFUSED, STRANGE])


def test_causes_follow_each_other_and_each_is_news_once() -> None:
    said = [(float(turn), CAUSES[turn % 2]) for turn in range(9)]
    assert told(*said) == (REFUSED, [REFUSED, HANGS])


def test_an_outage_of_ever_new_texts_is_no_flood_of_news() -> None:
    _, news = told(*((100.0 * turn, f"{turn}") for turn in range(0, 200)))
    assert len(news) == 1
    _, news = told(*((50.0 * turn, f"{turn // 2}") for turn in range(200)))
    assert len(news) == 16


@pytest.mark.parametrize("names_cause", [False, True])
def test_what_is_said_first_is_said(names_cause: bool) -> None:
    outage = Outage()
    assert outage.take(STRANGE, 0.0, names_cause=names_cause)
    assert outage.problem == STRANGE
