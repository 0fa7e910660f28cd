"""A published way to start such servers and to ask them, flag for flag and field for field."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import aiohttp
import psutil
import pytest
from support.processes import free_port, is_alive, wait_until

pytest.importorskip("torch")

FLAGS = [
    *("--max-num-seqs", "500", "--trust-remote-code", "--enforce-eager"),
    *("--max-num-batched-tokens", "512", "--enable-chunked-prefill"),
    *("--tensor-parallel-size", "1"),
]
# A toy on two cores: small, and of one thread.
SMALL = ["--runner", "model", "--device", "cpu", "--threads", "1", "--kv-memory", "32M"]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    log_file = tmp_path_factory.mktemp("serve") / "log"
    port, shard_port = free_port(), free_port()
    ports = ["--port", str(port), "--shard-port", str(shard_port)]
    with log_file.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "penstock_client.cli", "serve", *ports, *FLAGS, *SMALL],
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"},
        )
    children: list[psutil.Process] = []
    try:

        def is_ready() -> bool:
            assert process.poll() is None, log_file.read_text()[-2000:]
            return "Try:" in log_file.read_text()

        wait_until(is_ready, timeout_s=90, what="penstock serve is ready")
        children = psutil.Process(process.pid).children(recursive=True)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for child in children:
            if is_alive(child):
                child.kill()


async def ask(session: aiohttp.ClientSession, **fields: Any) -> tuple[int, Any]:
    body = {
        "messages": [{"role": "user", "content": "Tell me about the sea."}],
        "temperature": 0.7,
        "length_penalty": 1.0,
        "max_tokens": 100,
        "min_tokens": 100,
        "is_latency_sensitive": "True",
        "slo": 0.05,
        **fields,
    }
    async with session.post("/v1/chat/completions", json=body) as response:
        return response.status, await response.json()


async def test_the_request_runs_as_it_is_written(url: str) -> None:
    async with aiohttp.ClientSession(url) as session:
        async with session.get("/v1/models") as response:
            model = (await response.json())["data"][0]["id"]
        status, body = await ask(session, model=model)
    assert status == 200, body
    [choice] = body["choices"]
    assert body["usage"]["completion_tokens"] == 100
    assert choice["finish_reason"] == "length"
    assert choice["message"]["content"]


async def test_many_of_them_with_and_without_an_objective_run_beside_each_other(url: str) -> None:
    objectives: list[dict[str, Any]] = [
        {},
        {"is_latency_sensitive": "False", "slo": 0.5},
        {"is_latency_sensitive": True},
        {"is_latency_sensitive": None, "slo": None},
    ]
    async with aiohttp.ClientSession(url) as session:
        asked = [ask(session, **objectives[number % 4]) for number in range(24)]
        for status, body in await asyncio.gather(*asked):
            assert (status, body["usage"]["completion_tokens"]) == (200, 100)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("length_penalty", 1.5),
        ("slo", 0),
        ("slo", 1e300),
        ("is_latency_sensitive", "yes"),
        ("min_tokens", 101),
        ("allowed_token_ids", [4_000_000]),
        ("logit_bias", {"4000000": 1}),
        ("stop_token_ids", [4_000_000]),
    ],
)
async def test_what_is_out_of_bounds_is_refused_by_its_own_name(
    url: str, field: str, value: object
) -> None:
    async with aiohttp.ClientSession(url) as session:
        status, body = await ask(session, **{field: value})
        assert (status, body["error"]["param"]) == (400, field)
        assert field in body["error"]["message"]
        # And the next one works.
        assert (await ask(session, max_tokens=2, min_tokens=0))[0] == 200
