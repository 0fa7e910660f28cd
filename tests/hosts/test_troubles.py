"""Troubles of a network between hosts of their own, under 64 readers of every kind of answer: every
answer is the calm run's, and timeouts explain how long clients wait.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
from hosts.network import HostsUnavailable
from hosts.readers import Reading, jobs
from hosts.site import Site, site
from support.budget import seeded

from penstock_proto.transport import channel_options

pytestmark = [pytest.mark.soak, pytest.mark.timeout(180)]

# Without a report for so long, a shard's requests go on elsewhere.
STALL_S = 3.0
# A shard reports at least so often.
_REPORT_S = 1.0
_OPTIONS = {name: int(value) / 1000 for name, value in channel_options() if name.endswith("_ms")}
# What was sent and not acknowledged for so long ends a connection (TCP_USER_TIMEOUT).
_UNACKNOWLEDGED_S = _OPTIONS["grpc.keepalive_timeout_ms"]
# An attempt to connect, and the wait for the next one: gRPC makes it up to a fifth longer.
_CONNECT_S = _OPTIONS["grpc.min_reconnect_backoff_ms"]
_BACK_OFF_S = 1.2 * _OPTIONS["grpc.max_reconnect_backoff_ms"]
# While all is calm: arguments of calls come in pieces, and there are more processes than
# cores.
_CALM_S = 3.0
# Where the packet that opens a connection is lost twice.
_OPENED_S = 3.0
# The readers go on for so long after a trouble.
_AFTER_S = 4.0

_COLUMNS = (
    *("trouble", "longest gap of a stream (s)", "longest delay of an answer in one piece (s)"),
    *("answers", "went on elsewhere", "refused at first", "both shards ready after (s)"),
    *("bound (s)", "what explains it"),
)


@dataclass(frozen=True)
class Trouble:
    """A trouble of the network, and the longest time that clients may wait then."""

    name: str
    begin: Callable[[Site], None]
    lasts_s: float
    bound_s: float
    why: str
    # Whether requests go on at another shard; None if they may or may not.
    continues: bool | None
    end: Callable[[Site], None] = lambda site: site.network.calm()
    # Whether all clients can reach some shard all the time.
    serves: bool = True


@dataclass
class Table:
    """The measurements, one row for each trouble."""

    rows: list[str] = field(default_factory=list)

    def add(self, trouble: Trouble, gap_s: float, late_s: float, *others: object) -> None:
        cells = f"{gap_s:.1f}", f"{late_s:.1f}", *others, f"{trouble.bound_s:.1f}"
        self.rows.append("| " + " | ".join(map(str, (trouble.name, *cells, trouble.why))) + " |")

    def print(self) -> None:
        print(f"\n| {' | '.join(_COLUMNS)} |\n|{'---|' * len(_COLUMNS)}")
        print("\n".join(self.rows))


# ---- How long clients wait ---------------------------------------------------------------------


def _back_s(lasts_s: float) -> float:
    """Return how long after the end of a cut something comes through again, at most."""
    if lasts_s < _UNACKNOWLEDGED_S:
        # TCP doubles its waits between attempts. So the next attempt comes, at most, as long after
        # the end of the cut as the cut lasted.
        return lasts_s
    return _CONNECT_S + _BACK_OFF_S


# What a shard that hears nothing says arrives until it misses an acknowledgement: one report.
# A router that comes late to see the silence, as it had to wait for a core, waits for one more.
_ELSEWHERE_S = _REPORT_S + STALL_S + 2 * _REPORT_S + _CALM_S
_STALL = f"stall timeout {STALL_S:g} s"
_TCP = "TCP sends again"


def _of_one(name: str, begin: Callable[[Site], None], lasts_s: float) -> Trouble:
    """A trouble of one shard: after the stall timeout its requests go on at the other."""
    name = f"{name} for {lasts_s:g} s"
    if lasts_s < STALL_S:
        bound_s = lasts_s + _back_s(lasts_s) + _CALM_S
        return Trouble(name, begin, lasts_s, bound_s, _TCP, continues=False)
    continues = True if lasts_s > STALL_S else None
    return Trouble(name, begin, lasts_s, _ELSEWHERE_S, _STALL, continues)


def _of_all(
    name: str, begin: Callable[[Site], None], lasts_s: float, continues: bool | None
) -> Trouble:
    """A trouble of both shards, or of the clients: requests wait."""
    why = f"its time, then {_TCP}"
    if lasts_s >= _UNACKNOWLEDGED_S:
        why = f"its time, then connect timeout {_CONNECT_S:g} s and back-off {_BACK_OFF_S:g} s"
    bound_s = lasts_s + _back_s(lasts_s) + _CALM_S
    name = f"{name} for {lasts_s:g} s"
    return Trouble(name, begin, lasts_s, bound_s, why, continues, serves=lasts_s < STALL_S)


def _everywhere(delay_s: float, loss: float) -> Callable[[Site], None]:
    def begin(site: Site) -> None:
        for wire in site.network.wires():
            wire.delay_s, wire.loss = delay_s, loss

    return begin


def _all_at_once(site: Site) -> None:
    _everywhere(0.05, 0.02)(site)
    site.cut_off("one")


def _cut_off_both(site: Site) -> None:
    site.cut_off("one", "other")


def _vanish(site: Site) -> None:
    site.power_off("one")


def _return(site: Site) -> None:
    site.power_on("one")


def _move(site: Site) -> None:
    site.move("one")


def _take_over(site: Site) -> None:
    """Another host takes the address of the one that vanished, which returns without."""
    site.move("one")
    site.power_on("spare")


def _cuts() -> Iterator[Trouble]:
    for lasts_s in (1.0, 3.0, 5.0, 10.0, 20.0):
        yield _of_one("a shard is cut off", lambda site: site.cut_off("one"), lasts_s)
    for lasts_s in (1.0, 5.0, 20.0):
        yield _of_one("a shard hears nothing", lambda site: site.cut(receiver="one"), lasts_s)
        yield _of_one("a shard is not heard", lambda site: site.cut(sender="one"), lasts_s)
        continues = None if lasts_s > STALL_S else False
        yield _of_all("both shards are cut off", _cut_off_both, lasts_s, continues)
    # Those that speak gRPC lose both shards too.
    yield _of_all("clients are cut off", lambda site: site.cut_off("clients"), 5.0, False)
    yield _of_all("clients hear nothing", lambda site: site.cut(receiver="clients"), 5.0, False)
    yield _of_all("clients are not heard", lambda site: site.cut(sender="clients"), 5.0, False)


def _others() -> Iterator[Trouble]:
    below, bound_s = f"{_TCP}, below any timeout", _OPENED_S + _CALM_S
    yield Trouble("50 ms more each way", _everywhere(0.05, 0.0), 8.0, _CALM_S, "itself", False)
    yield Trouble("2 % loss", _everywhere(0.0, 0.02), 8.0, bound_s, below, False)
    yield _of_one("both of these, and a shard is cut off", _all_at_once, 5.0)
    yield Trouble("a host vanishes", _vanish, 12.0, _ELSEWHERE_S, _STALL, True, _return)
    name = "a host vanishes, and 5 s later another has its address"
    yield Trouble(name, _vanish, 5.0, _ELSEWHERE_S, _STALL, True, _take_over)
    why = f"the new host resets connections that are written to; else {_STALL}"
    yield Trouble("an address moves", _move, 5.0, _ELSEWHERE_S, why, True)


# ---- The tests ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Lab:
    """A site, and what its clients read when all was calm."""

    site: Site
    rng: random.Random
    calm: dict[int, Reading]
    streams: frozenset[int]
    table: Table

    def gap_s(self, readings: list[Reading]) -> float:
        """Return the longest time without an event in a stream."""
        return max(each.gap_s for each in readings if each.job in self.streams)

    def late_s(self, readings: list[Reading]) -> float:
        """Return the longest delay of an answer in one piece, compared with when all was calm."""
        pieces = (each for each in readings if each.job not in self.streams)
        return max(each.took_s - self.calm[each.job].took_s for each in pieces)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    rng = seeded("troubles of a network")
    seed = rng.getrandbits(32)
    table = Table()
    try:
        with site(tmp_path_factory.mktemp("site"), seed, STALL_S) as made:
            # The first of each are slower: grammars are compiled.
            made.read(0).result()
            calm = {each.job: each for each in made.read(0).result()}
            streams = (number for number, job in enumerate(jobs(seed)) if job.is_stream)
            yield Lab(made, rng, calm, frozenset(streams), table)
            table.print()
    except HostsUnavailable as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("trouble", [*_cuts(), *_others()], ids=lambda trouble: trouble.name)
def test_answers_are_the_calm_runs_and_timeouts_explain_how_late_they_are(
    lab: Lab, trouble: Trouble
) -> None:
    num_continued = lab.site.num_continued()
    before_s = lab.rng.uniform(0.0, 2.0)
    reading = lab.site.read(before_s + trouble.lasts_s + _AFTER_S)
    lab.site.wait_busy()
    time.sleep(before_s)
    trouble.begin(lab.site)
    try:
        time.sleep(trouble.lasts_s)
    finally:
        trouble.end(lab.site)
    ready_s = lab.site.wait_ready()
    readings = reading.result()
    num_continued = lab.site.num_continued() - num_continued
    num_refused = sum(each.num_refused for each in readings)
    gap_s, late_s = lab.gap_s(readings), lab.late_s(readings)
    lab.table.add(
        trouble, gap_s, late_s, len(readings), num_continued, num_refused, f"{ready_s:.1f}"
    )
    for each in readings:
        assert each.answer == lab.calm[each.job].answer, jobs(lab.site.seed)[each.job]
    assert max(gap_s, late_s) < trouble.bound_s
    assert ready_s < _back_s(trouble.lasts_s) + _CALM_S
    if trouble.continues is not None:
        assert (num_continued > 0) == trouble.continues
    if trouble.serves:
        assert num_refused == 0
    else:
        assert gap_s > trouble.lasts_s
