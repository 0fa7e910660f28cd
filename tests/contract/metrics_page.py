"""Every family of metrics there is, its labels, and the tables of docs/metrics.md.

Run it to write the tables again: `python -m contract.metrics_page` in tests/.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.metrics import MetricWrapperBase
from support.router_doubles import FakeFleet

from penstock_common.certificates.expiry import CertificateDates
from penstock_common.metric_aliases import SETS
from penstock_router.observe.ended_request_metrics import RequestMetrics
from penstock_router.observe.fleet_metrics import FleetCollector
from penstock_router.observe.key_usage import families_of
from penstock_router.observe.metrics import Metrics
from penstock_shard.config import ShardConfig
from penstock_shard.server.observe.metrics_collector import certificates, engine_state
from penstock_shard.server.supervisor import EngineSupervisor

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


@dataclass(frozen=True, slots=True)
class Family:
    """A family of metrics as a page shows it. The name of a counter has its ending."""

    name: str
    kind: str
    labels: tuple[str, ...]
    text: str

    @property
    def series(self) -> tuple[str, ...]:
        """The names of the family's series, as queries use them."""
        if self.kind == "histogram":
            return tuple(f"{self.name}_{part}" for part in ("bucket", "sum", "count"))
        return (self.name,)


def router_families() -> list[Family]:
    metrics = Metrics()
    RequestMetrics(metrics.registry)
    fleet = FleetCollector(FakeFleet({}), dict)
    counted = _of_registry(metrics.registry)
    return [*counted, *_of_samples(fleet.collect()), *_of_samples(families_of([]))]


def shard_families() -> list[Family]:
    config = ShardConfig()
    supervisor = EngineSupervisor(config)
    state = engine_state(supervisor, config)
    dates = certificates(CertificateDates())
    counted = _of_registry(supervisor.metrics.registry)
    return [*counted, *_of_samples(state), *_of_samples(dates)]


def _of_registry(registry: CollectorRegistry) -> Iterable[Family]:
    for counted in registry._collector_to_names:
        assert isinstance(counted, MetricWrapperBase)
        (family,) = counted.describe()
        yield _family(family, counted._labelnames)


def _of_samples(families: Iterable[Metric]) -> Iterable[Family]:
    for family in families:
        labels = family._labelnames or ()  # type: ignore[attr-defined]
        yield _family(family, labels)


def _family(family: Metric, labels: Sequence[str]) -> Family:
    ending = "_total" if family.type == "counter" else ""
    return Family(family.name + ending, family.type, tuple(labels), family.documentation)


# ---- the page ----------------------------------------------------------------------------------


def tables() -> Mapping[str, str]:
    """Return the tables, each by the name in the comments that stand before and after it."""
    return {
        "router": _table(router_families()),
        "shard": _table(shard_families()),
        **{names: _names(names) for names in SETS},
    }


def _table(families: Iterable[Family]) -> str:
    rows = [
        f"| `{family.name}` | {family.kind} | {', '.join(f'`{each}`' for each in family.labels)} | "
        f"{family.text} |"
        for family in families
    ]
    return "\n".join(["| name | kind | labels | what it is |", "|---|---|---|---|", *rows])


def _names(names: str) -> str:
    rows = []
    for name in SETS[names]:
        ours = " + ".join(f"`{_bare(each)}`" for each in name.ours if "_router_" in each)
        shards = " + ".join(f"`{_bare(each)}`" for each in name.ours if "_shard_" in each[:15])
        labels = ", ".join(f"`{each}`" for each in name.labels.values())
        rows.append(f"| `{name.theirs}` | {labels} | {ours} | {shards} |")
    head = "| name | labels | at a router: `penstock_router_…` | at a shard: `penstock_shard_…` |"
    return "\n".join([head, "|---|---|---|---|", *rows])


def _bare(name: str) -> str:
    return re.sub(r"^penstock_(router|shard)_", "", name)


def with_tables(page: str) -> str:
    for name, table in tables().items():
        mark = f"<!-- {name} -->"
        before, _, rest = page.partition(f"{mark}\n")
        _, found, after = rest.partition(mark)
        assert found, f"{mark} must stand before and after its table"
        page = f"{before}{mark}\n{table}\n{mark}{after}"
    return page


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
