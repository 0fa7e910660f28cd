"""Faults that come and go, of a fleet that runs: a real Prometheus has the alert of each, and no
other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from integration.test_metrics import (
    DEPLOY,
    SCRAPE_S,
    Prometheus,
    complete,
    hurried,
    lose_engine,
    program,
    repeated,
)
from support.processes import Router, Shard, free_port, running, wait_until

_START_S = 60.0


class Fleet:
    """Two shards of the model `pair`, one of `single`, and a router. `ask_all` asks for both."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.models = {"first": "pair", "second": "pair", "only": "single"}
        self.ports = {name: free_port() for name in self.models}
        self.metrics_ports = {name: free_port() for name in self.models}
        self.shards = {name: self.start(name) for name in self.models}
        addresses = [shard.address for shard in self.shards.values()]
        self.router = Router(folder / "router", addresses, "--failover-timeout-s", "1")

    def start(self, name: str, *, metrics: bool = True) -> Shard:
        flags = ("--step-ms", "2", "--served-model-name", self.models[name])
        shown = ("--metrics-port", str(self.metrics_ports[name])) if metrics else ()
        return Shard(self.folder / f"shard-{name}", *flags, *shown, port=self.ports[name])

    def restart(self, name: str, *, metrics: bool = True) -> None:
        self.shards[name].close()
        self.shards[name] = self.start(name, metrics=metrics)
        self.shards[name].wait_healthy()

    def ask_all(self) -> None:
        for model in ("pair", "single"):
            complete(self.router, model=model, max_tokens=4)
        time.sleep(0.05)


class Watch:
    """The alerts that fire in a Prometheus whose rules have half a second for each minute."""

    def __init__(self, prometheus: Prometheus) -> None:
        self._prometheus = prometheus

    def firing(self) -> set[tuple[str, str]]:
        """Return the alerts that fire, without PenstockRouterLate, which a busy machine causes."""
        return {each for each in self._prometheus.firing() if each[0] != "PenstockRouterLate"}

    def wait_for(self, what: str, *firing: tuple[str, str], timeout_s: float = 45) -> None:
        try:
            wait_until(lambda: self.firing() == set(firing), timeout_s=timeout_s, what=what)
        except AssertionError as error:
            raise AssertionError(f"{error}; fires: {self.firing()}") from None

    def fires(
        self, alert: tuple[str, str], cause: Callable[[], None], *, slowly: tuple[str, str]
    ) -> None:
        """Repeat `cause` until `alert` fires. No other alert may fire but `slowly`: on a busy
        machine a restart takes as long as 15 minutes of these rules.
        """
        for _ in range(12):
            cause()
            time.sleep(2 * SCRAPE_S)
            now = self.firing()
            assert now <= {alert, slowly}
            if alert in now:
                return
        raise AssertionError(f"{alert} does not fire")

    def stays_quiet(self, for_s: float) -> None:
        until_s = time.monotonic() + for_s
        while time.monotonic() < until_s:
            assert self.firing() == set()
            time.sleep(SCRAPE_S)


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[tuple[Fleet, Watch]]:
    program("prometheus")
    fleet = Fleet(tmp_path)
    with running(fleet.router, *fleet.shards.values()):
        targets = {
            "penstock-router": [fleet.router.address],
            "penstock-shard": [f"127.0.0.1:{port}" for port in fleet.metrics_ports.values()],
        }
        rules = hurried((DEPLOY / "prometheus" / "alerts.yml").read_text())
        prometheus = Prometheus(tmp_path / "prometheus", targets, rules)
        try:
            wait_until(prometheus.scrapes_all, timeout_s=_START_S, what="all targets are up")
            with repeated(fleet.ask_all):
                yield fleet, Watch(prometheus)
        finally:
            prometheus.close()
            for shard in fleet.shards.values():
                shard.close()


@pytest.mark.timeout(180)
def test_a_shard_that_crashes_again_and_again_is_named_though_its_model_is_served(
    watched: tuple[Fleet, Watch],
) -> None:
    fleet, watch = watched
    lost = ("PenstockShardFlaps", fleet.shards["first"].address)
    fleet.restart("first")
    # Once is no fault.
    watch.stays_quiet(2)
    away = ("PenstockShardNotServing", fleet.shards["first"].address)
    watch.fires(lost, lambda: fleet.restart("first"), slowly=away)
    watch.wait_for("an hour later it is well", timeout_s=60)


@pytest.mark.timeout(180)
def test_a_model_whose_only_engine_dies_again_and_again_is_named(
    watched: tuple[Fleet, Watch],
) -> None:
    fleet, watch = watched
    died = ("PenstockEngineDied", f"127.0.0.1:{fleet.metrics_ports['only']}")
    lose_engine(fleet.shards["only"])
    until_s = time.monotonic() + 7.5
    while time.monotonic() < until_s:
        # Nobody hears of one death.
        assert watch.firing() <= {("PenstockModelDown", "single")}
        time.sleep(SCRAPE_S)
    seen: set[tuple[str, str]] = set()
    for _ in range(8):
        began_s = time.monotonic()
        lose_engine(fleet.shards["only"])
        # It serves at least half of the time.
        until_s = 2 * time.monotonic() - began_s
        while time.monotonic() < until_s:
            seen |= watch.firing()
            time.sleep(SCRAPE_S)
    # If it is slow to come back.
    slowly = {
        ("PenstockModelDown", "single"),
        ("PenstockShardNotServing", fleet.shards["only"].address),
    }
    assert seen - slowly == {("PenstockModelFlaps", "single"), died}
    watch.wait_for("it goes on")


@pytest.mark.timeout(180)
def test_a_shard_that_serves_and_cannot_be_scraped_is_named(watched: tuple[Fleet, Watch]) -> None:
    fleet, watch = watched
    unseen = ("PenstockShardNotScraped", f"127.0.0.1:{fleet.metrics_ports['second']}")
    fleet.restart("second", metrics=False)
    watch.wait_for("nobody sees the second", unseen)
    fleet.shards["first"].close()
    # Of a host with a shard that is away, its own alert tells.
    gone = ("PenstockShardNotServing", fleet.shards["first"].address)
    watch.wait_for("the first is away", gone)
    fleet.restart("first")
    fleet.restart("second")
    watch.wait_for("all is well")
