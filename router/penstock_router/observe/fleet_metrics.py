"""Exports the shards' state, as last reported to the scraped worker. There are no counters here:
several workers would count a shard several times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from penstock_client import Fleet, ShardState
from penstock_common.kv_cache_labels import KV_CACHE_HELP, KV_CACHE_LABELS, kv_cache_labels
from penstock_proto.facts import LoadReport
from penstock_router.shard_states import model_of, state_of

_LABELS = ("shard", "model")
_GAUGES: tuple[tuple[str, str, Callable[[LoadReport], float]], ...] = (
    ("running", "Sequences being computed.", lambda load: load.running),
    ("waiting", "Sequences waiting.", lambda load: load.waiting),
    (
        "queued_tokens",
        "Tokens left to compute before the sequences that wait or prefill can decode.",
        lambda load: load.queued_prompt_tokens,
    ),
    ("kv_blocks", "KV blocks in total.", lambda load: load.num_blocks),
    ("kv_used_blocks", "KV blocks held by sequences.", lambda load: load.referenced_blocks),
    (
        "kv_used_ratio",
        "Share of all KV blocks that sequences hold.",
        lambda load: load.referenced_blocks / max(1, load.num_blocks),
    ),
)
_COUNTERS: tuple[tuple[str, str, Callable[[LoadReport], float]], ...] = (
    (
        "preemptions",
        "Preemptions: sequences stopped, to be computed again.",
        lambda load: load.preemptions_total,
    ),
    ("steps", "Steps of the engine.", lambda load: load.steps_total),
    ("step_seconds", "Duration of all steps together.", lambda load: load.steps_seconds_total),
    (
        "computed_tokens",
        "Tokens computed in steps, of prompts and outputs.",
        lambda load: load.computed_tokens_total,
    ),
)


class FleetCollector(Collector):
    def __init__(self, fleet: Fleet, shards_serving: Callable[[], Mapping[str, int]]) -> None:
        """`shards_serving` returns the number of serving shards of each known model,
        including 0.
        """
        self._fleet = fleet
        self._shards_serving = shards_serving

    def collect(self) -> Iterator[Metric]:
        shards = self._fleet.shards
        serving = sum(shard.ready for shard in shards)
        yield _gauge("shards_serving", "Shards that accept requests.", serving)
        yield _gauge("shards", "Shards known to the router.", len(shards))
        models = GaugeMetricFamily(
            "penstock_router_model_shards_serving",
            "Shards that accept requests for a model: 0 for one that is expected (--expect-model), "
            "or that the router has seen, while none does.",
            labels=("model",),
        )
        for model, count in self._shards_serving().items():
            models.add_metric([model], count)
        yield models
        states = GaugeMetricFamily(
            "penstock_router_shard_state",
            "1 for the state that a shard is in: serving, loading, draining or gone.",
            labels=(*_LABELS, "state"),
        )
        for shard in shards:
            states.add_metric([*_labels(shard), state_of(shard)], 1)
        yield states
        yield _cache_info(shards)
        for name, text, value in _GAUGES:
            gauge = GaugeMetricFamily(f"penstock_router_shard_{name}", text, labels=_LABELS)
            yield _filled(gauge, shards, value)
        for name, text, value in _COUNTERS:
            counter = CounterMetricFamily(f"penstock_router_shard_{name}", text, labels=_LABELS)
            yield _filled(counter, shards, value)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"penstock_router_{name}", text, value=value)


def _filled(
    family: GaugeMetricFamily | CounterMetricFamily,
    shards: Sequence[ShardState],
    value: Callable[[LoadReport], float],
) -> Metric:
    # A shard that is gone has no samples, rather than samples of 0.
    for shard in shards:
        if shard.info is not None:
            family.add_metric(_labels(shard), value(shard.load))
    return family


def _cache_info(shards: Sequence[ShardState]) -> Metric:
    family = GaugeMetricFamily(
        "penstock_router_shard_kv_cache_info", KV_CACHE_HELP, labels=(*_LABELS, *KV_CACHE_LABELS)
    )
    for shard in shards:
        if (info := shard.info) is not None:
            cache = kv_cache_labels(
                info.block_size, info.num_blocks, info.kv_sequences, info.kv_dtype
            )
            family.add_metric([*_labels(shard), *cache], 1)
    return family


def _labels(shard: ShardState) -> list[str]:
    return [shard.address, model_of(shard)]
