"""A shard's Prometheus metrics: counters, and the engine's state at each scrape."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from penstock_common.certificates.expiry import CertificateDates
from penstock_common.kv_cache_labels import KV_CACHE_HELP, KV_CACHE_LABELS, kv_cache_labels
from penstock_common.metric_aliases import translate
from penstock_common.version import VERSION
from penstock_shard.config import ShardConfig
from penstock_shard.ipc.messages import Load
from penstock_shard.ipc.runner_info import RunnerInfo
from penstock_shard.server.observe.metrics_port import serve_in_threads
from penstock_shard.server.supervisor import EngineSupervisor

# Shown as they were counted: `Load.counts`, and what the server counts of images. A total is a
# counter, all else a gauge.
_COUNTS = {
    "kept_states": "States that are kept for others.",
    "state_hits_total": (
        "Sequences that began at a kept state: what came before it was not computed again."
    ),
    "kv_retained_blocks": "KV blocks that are retained for requests that have ended.",
    "kv_retained_taken_total": (
        "Retained KV blocks that were reused before their time: no other was free."
    ),
    "kv_copied_blocks": "KV blocks that host memory has copies of.",
    "kv_saved_blocks_total": "KV blocks copied to host memory.",
    "kv_loaded_blocks_total": "KV blocks copied back, which were not computed.",
    "kv_damaged_blocks_total": "Copies whose checksum was wrong: computed.",
    "kv_fetched_blocks_total": "KV blocks fetched from peers (--kv-peers).",
    "kv_refused_blocks_total": (
        "KV blocks of peers that were damaged, or not what was asked for. Above 0: an alert."
    ),
    "kv_exported_blocks_total": "KV blocks that went to peers.",
    "kv_disk_blocks": "KV blocks that the disk has.",
    "kv_disk_saved_blocks_total": "KV blocks written to disk.",
    "kv_disk_loaded_blocks_total": "KV blocks read from disk into host memory.",
    "kv_disk_damaged_blocks_total": "KV blocks whose checksum was wrong.",
    "kv_disk_dropped_blocks_total": "KV blocks that the disk did not take.",
    "preemptions_total": "Preemptions: sequences stopped, to be computed again.",
    "image_bytes": "Bytes of images' pixels that the engine has (--image-cache-bytes).",
    "images_put_total": "Images whose pixels were put, and were not here.",
    "images_encoded_total": "Images that were encoded.",
    "image_encode_seconds_total": "Seconds that encoding took, beside the steps.",
}


def serve_metrics(engine: EngineSupervisor, config: ShardConfig, dates: CertificateDates) -> None:
    """Serve metrics on `config.metrics_port`, in threads, until the process ends.

    Raises:
        OSError: the port is in use, or the address is not this machine's.
    """
    assert config.metrics_port is not None
    registry = CollectorRegistry()
    registry.register(ShardCollector(engine, config, dates))
    serve_in_threads(registry, config.host, config.metrics_port)


class ShardCollector(Collector):
    """Collects all metrics, under our names and those of other servers. Runs in a thread, so the
    values may be from different moments.
    """

    def __init__(
        self, engine: EngineSupervisor, config: ShardConfig, dates: CertificateDates
    ) -> None:
        self._engine = engine
        self._config = config
        self._dates = dates

    def collect(self) -> Iterator[Metric]:
        engine, config = self._engine, self._config
        families = chain(
            engine.metrics.registry.collect(),
            engine_state(engine, config),
            certificates(self._dates),
        )
        return translate(families, config.metrics_names, model=config.model_name)


def engine_state(engine: EngineSupervisor, config: ShardConfig) -> Iterator[Metric]:
    load = engine.load
    yield _gauge("serving", "1 while requests are served.", engine.serving)
    yield _gauge("draining", "1 while no new requests are accepted.", engine.draining)
    yield _gauge("running", "Sequences being computed.", load.running)
    yield _gauge("waiting", "Sequences waiting.", engine.num_waiting)
    queued_tokens = engine.queued_tokens + load.prefill_tokens_left
    text = "Tokens left to compute before the sequences that wait or prefill can decode."
    yield _gauge("queued_tokens", text, queued_tokens)
    yield _waiting(engine.num_waiting, load.waiting)
    info = None if engine.ready is None else engine.ready.info
    yield _cache_info(info)
    yield from _kv_cache(load, info)
    images = {"image_bytes": engine.images.num_bytes, "images_put_total": engine.images.num_put}
    yield from _counted({**load.counts, **images})
    yield _info(engine, config)


def certificates(dates: CertificateDates) -> Iterator[Metric]:
    """Yield when the certificates in use expire; nothing without TLS."""
    family = GaugeMetricFamily(
        "penstock_shard_certificate_expires_timestamp_seconds",
        "When the certificates in use expire (Unix time), by the flag that names their file: "
        "--tls-cert-file, of a chain the first that does; --tls-client-ca-file and "
        "--kv-peer-ca-file, of several authorities the last.",
        labels=("flag",),
    )
    for flag, expires_at in dates.expires_at.items():
        family.add_metric([flag], expires_at)
    yield family


def _waiting(num_waiting: int, num_queued: int) -> Metric:
    text = (
        "Sequences waiting, by reason: capacity (for room in a step), deferred (for what they need "
        "before: a constraint's check, images, KV blocks from elsewhere)."
    )
    family = GaugeMetricFamily("penstock_shard_waiting_by_reason", text, labels=("reason",))
    family.add_metric(["capacity"], num_queued)
    family.add_metric(["deferred"], max(0, num_waiting - num_queued))
    return family


def _cache_info(info: RunnerInfo | None) -> Metric:
    family = GaugeMetricFamily(
        "penstock_shard_kv_cache_info", KV_CACHE_HELP, labels=KV_CACHE_LABELS
    )
    if info is not None:
        cache = kv_cache_labels(info.block_size, info.num_blocks, info.kv_sequences, info.kv_dtype)
        family.add_metric(cache, 1)
    return family


def _counted(counts: Mapping[str, float]) -> Iterator[Metric]:
    for name, text in _COUNTS.items():
        value = counts.get(name, 0)
        if name.endswith("_total"):
            yield CounterMetricFamily(f"penstock_shard_{name}", text, value=value)
        else:
            yield _gauge(name, text, value)


def _kv_cache(load: Load, info: RunnerInfo | None) -> Iterator[Metric]:
    num_blocks = 0 if info is None else info.num_blocks
    yield _gauge("kv_blocks", "KV blocks in total.", num_blocks)
    yield _gauge("kv_used_blocks", "KV blocks held by sequences.", load.referenced_blocks)
    ratio = load.referenced_blocks / max(1, num_blocks)
    yield _gauge("kv_used_ratio", "Share of all KV blocks that sequences hold.", ratio)
    text = "Bytes of keys and values of a token in all layers; 0 where not known."
    yield _gauge("kv_bytes_per_token", text, 0 if info is None else info.kv_bytes_per_token)
    text = "Bytes of keys and values of a sequence as long as the context; 0 where not known."
    yield _gauge("kv_bytes_per_sequence", text, 0 if info is None else info.kv_bytes_per_sequence)
    text = "Sequences as long as the context that the KV cache has room for; 0 where not known."
    yield _gauge("kv_sequences", text, 0 if info is None else info.kv_sequences)
    text = "Bytes of one sequence's states; 0 for a model without."
    yield _gauge("state_bytes", text, 0 if info is None else info.state_bytes)
    text = "States that there is room for, of sequences and kept for others."
    yield _gauge("states", text, 0 if info is None else info.num_states)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"penstock_shard_{name}", text, value=value)


def _info(engine: EngineSupervisor, config: ShardConfig) -> Metric:
    ready = engine.ready
    labels = {
        "model": config.model_name,
        "version": VERSION,
        "dtype": "" if ready is None else ready.info.dtype,
        "device": "" if ready is None else ready.info.device,
        "instance_id": engine.instance_id,
    }
    text = "Always 1; the labels say what is served."
    info = GaugeMetricFamily("penstock_shard_info", text, labels=list(labels))
    info.add_metric(list(labels.values()), 1)
    return info
