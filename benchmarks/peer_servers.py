"""The servers that `peers.py` compares, and their requests."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Contender:
    """A server: its command line, and how to call it.

    In `command` and `environment`, {peers}, {model}, {port}, {port2}, {threads}, {cpus}, {slots}
    and {context} are replaced. The server is left out if `needs` is not in the folder of the peers.
    """

    name: str
    command: str
    needs: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    model: str = "bench"
    body: dict[str, Any] = field(default_factory=dict)
    bench_flags: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Case:
    """A model's requests: prompt and output tokens, and numbers of streams."""

    prompt_tokens: int
    output_tokens: int
    streams: tuple[int, ...]

    def requests(self, streams: int) -> int:
        """Return the number of requests: few, so that a run ends before a neighbor disturbs it."""
        return max(4, 2 * streams)


CASES = {
    "130m": Case(prompt_tokens=128, output_tokens=64, streams=(1, 16)),
    "1b": Case(prompt_tokens=128, output_tokens=64, streams=(1, 16)),
    "3m": Case(prompt_tokens=64, output_tokens=128, streams=(64, 256)),
}

_SERVE = (
    "--port {port} --shard-port {port2} --threads {threads} --max-num-seqs {slots} "
    "--served-model-name bench"
)
_LLAMA = (
    "{peers}/llama-build/bin/llama-server --alias bench --host 127.0.0.1 --port {port} "
    "-c {context} -np {slots} -t {threads}"
)
_VLLM = (
    "{peers}/vllm/bin/vllm serve {model} --served-model-name bench --host 127.0.0.1 "
    "--port {port} --max-model-len 2048 --max-num-seqs {slots} --enforce-eager"
)
_VLLM_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "2",
    # By default, it leaves a core to HTTP.
    "VLLM_CPU_OMP_THREADS_BIND": "{cpus}",
    "VLLM_NO_USAGE_STATS": "1",
    # By its documentation.
    "LD_PRELOAD": "{peers}/tcmalloc/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4:"
    "{peers}/vllm/lib/libiomp5.so",
}
_TRANSFORMERS = (
    "{peers}/tf/bin/transformers serve {model} --device cpu --dtype float32 --host 127.0.0.1 "
    "--port {port} --continuous-batching --cb-max-memory-percent 0.15 --log-level warning"
)


def _llama(weights: str) -> Contender:
    return Contender(
        f"llama.cpp {weights}",
        f"{_LLAMA} -m {{model}}-{weights}.gguf",
        needs="llama-build/bin/llama-server",
        # It silently closes a connection after a stream.
        bench_flags=("--no-keepalive",),
    )


def _vllm(weights: str, dtype: str) -> Contender:
    return Contender(
        f"vLLM {weights}",
        f"{_VLLM} --dtype {dtype}",
        needs="vllm/bin/vllm",
        environment=_VLLM_ENVIRONMENT,
    )


def _penstock(weights: str, model: str = "{model}", flags: str = "") -> Contender:
    serve = f"{sys.executable} -m penstock_cli.main serve"
    return Contender(f"penstock {weights}", f"{serve} {model} {_SERVE} {flags}")


def _vllm_in_shard(weights: str, dtype: str) -> Contender:
    serve = f"{sys.executable} -m penstock_cli.main serve"
    engine = f"--engine vllm --engine-python {{peers}}/vllm/bin/python --dtype {dtype}"
    ports = _SERVE.replace("--threads {threads} ", "")
    return Contender(
        f"penstock vLLM {weights}",
        f"{serve} {{model}} {ports} {engine} --max-model-len 2048 --enforce-eager",
        needs="vllm/bin/vllm",
        environment=_VLLM_ENVIRONMENT,
    )


CONTENDERS = (
    _penstock("f16", flags="--dtype float16"),
    _penstock("bf16", flags="--dtype bfloat16"),
    _penstock("int8", flags="--quantization int8"),
    _penstock("int4", flags="--quantization int4"),
    _penstock("q8_0", "{model}-q8_0.gguf"),
    _penstock("q4_k_m", "{model}-q4_k_m.gguf"),
    _llama("f16"),
    _llama("f32"),
    _llama("q8_0"),
    _llama("q4_0"),
    _llama("q4_k_m"),
    _vllm("f32", "float32"),
    _vllm_in_shard("f32", "float32"),
    _vllm("bf16", "bfloat16"),
    Contender(
        "transformers f32",
        _TRANSFORMERS,
        needs="tf/bin/transformers",
        environment={"HF_HUB_CACHE": "{peers}", "OMP_NUM_THREADS": "{threads}"},
        model="{model}",
        # It cannot ignore the end of sequence, and sends no [DONE].
        body={"ignore_eos": None},
        bench_flags=("--no-done",),
    ),
)
