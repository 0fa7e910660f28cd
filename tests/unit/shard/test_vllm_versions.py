"""The names of vLLM that are used, and versions that run by `generate()`; vLLM is not needed."""

from __future__ import annotations

import ast
import asyncio
import functools
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

import penstock_shard.vllm_engine
from penstock_proto.engine_request import EngineRequest
from penstock_proto.errors import Code
from penstock_proto.types import EngineSampling, FinishReason
from penstock_shard.cli import parse_config
from penstock_shard.vllm_engine import touched
from penstock_shard.vllm_engine.engine_arguments import engine_arguments
from penstock_shard.vllm_engine.generate_core import GenerateCore
from penstock_shard.vllm_engine.outputs import Progress, read_output
from penstock_shard.vllm_engine.requests import core_request, sampling_of

ROOM = Path(penstock_shard.vllm_engine.__file__).parent
REQUEST = EngineRequest(
    request_id="r",
    attempt=0,
    prompt=b"\5\0\0\0\6\0\0\0",
    sampling=EngineSampling(temperature=0.0),
    max_tokens=4,
)


def test_all_that_is_imported_of_vllm_is_listed() -> None:
    listed = {name.rstrip(".") for name in (*touched.CORE, *touched.GENERATE)}
    for file in ROOM.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm."):
                imported = {f"{node.module}:{each.name}" for each in node.names}
                assert imported <= listed, file.name


def test_all_fields_that_vllm_is_given_are_listed() -> None:
    sampling = set(sampling_of(REQUEST, as_output=False))
    assert sampling == set(touched.GENERATE["vllm.sampling_params:SamplingParams"])
    flags = (
        "--engine vllm --revision r --dtype bfloat16 --max-model-len 99 --kv-blocks 9 --enable-lora"
    )
    sizes = "--max-num-seqs 2 --max-num-batched-tokens 99 --block-size 16 --enable-lora"
    config = parse_config([*flags.split(), *sizes.split()])
    given = set(engine_arguments(config, Path("/m"), "last"))
    assert given <= set(touched.CORE["vllm.engine.arg_utils:AsyncEngineArgs"])


def _wrap(init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init)
    def wrapper(*arguments: object) -> None:
        init(*arguments)

    return wrapper


class Wrapped:
    @_wrap
    def __init__(self) -> None:
        self.set_by_what_is_wrapped = 1


def test_what_a_version_lacks_is_named() -> None:
    lacks = touched.missing(
        {
            "dataclasses:Field": ("name", "init", "no_such"),
            "argparse:ArgumentParser": ("parse_args", "namespace", "_mutually_exclusive_groups"),
            "argparse:Nothing": ("a",),
            "no_such_module:Class": (),
            f"{__name__}:Wrapped": ("set_by_what_is_wrapped",),
        }
    )
    assert lacks == [
        "dataclasses:Field.no_such",
        "argparse:Nothing",
        "no_such_module:Class",
    ]


# ---- By generate() -----------------------------------------------------------------------------


class FakeLLM:
    """Gives two tokens, with log-probabilities, and then waits."""

    def __init__(self) -> None:
        self.goes_on = asyncio.Event()
        self.aborted: list[str] = []
        self.errored = False

    async def generate(self, prompt: Any, params: Any, name: str, **_: Any) -> AsyncIterator[Any]:
        if prompt["prompt_token_ids"] == [99]:
            raise ValueError("no such prompt\nsecond line")
        if prompt["prompt_token_ids"] == [98]:
            raise KeyError("dead")
        yield _given([7, 8], num_cached_tokens=1, prompt_logprobs=[None, {6: _scored(-1.5, 2)}])
        await self.goes_on.wait()
        yield _given([9], finish_reason="stop", stop_reason=9)

    async def abort(self, names: list[str]) -> None:
        self.aborted += names


def _scored(logprob: float, rank: int) -> Any:
    return SimpleNamespace(logprob=logprob, rank=rank)


def _given(token_ids: list[int], **more: Any) -> Any:
    ends = {"finish_reason": None, "stop_reason": None}
    ends.update({name: more.pop(name) for name in list(ends) if name in more})
    rows = [{token_id: _scored(-2.0, 3), 1: _scored(-0.5, 1)} for token_id in token_ids]
    completion = SimpleNamespace(token_ids=token_ids, logprobs=rows, **ends)
    request = {"num_cached_tokens": None, "prompt_logprobs": None, **more}
    return SimpleNamespace(outputs=[completion], **request)


def make_core() -> Any:
    core: Any = GenerateCore.__new__(GenerateCore)
    core._make_sampling = lambda **fields: fields
    core._as_deltas = "deltas"
    core._llm = FakeLLM()
    core._adapters, core._tasks, core._failure = {}, {}, None
    core._news = asyncio.Queue()
    return core


def _asked(request: EngineRequest) -> Any:
    return core_request(request, as_output=False)


async def test_what_generate_yields_is_what_a_core_says_step_by_step() -> None:
    core = make_core()
    request = msgspec.structs.replace(REQUEST, logprobs=1, prompt_logprobs=1)
    await core.add(_asked(request), 0)
    progress = Progress(request, 0)
    (first,) = (await core.step()).outputs
    told = read_output(progress, first)
    assert (told.token_ids, told.cached_tokens, told.finish_reason) == ([7, 8], 1, None)
    assert told.logprobs is not None
    assert (told.logprobs.chosen, told.logprobs.ranks) == ([-2.0, -2.0], [3, 3])
    assert told.logprobs.best_ids == bytearray(b"\1\0\0\0" * 2)
    assert told.prompt_logprobs is not None
    assert told.prompt_logprobs.chosen == [-1.5]
    core._llm.goes_on.set()
    (last,) = (await core.step()).outputs
    told = read_output(progress, last)
    assert (told.first_position, told.finish_reason, told.stop_token_id) == (
        2,
        FinishReason.STOP,
        9,
    )


async def test_a_request_that_vllm_refuses_ends_alone() -> None:
    core = make_core()
    await core.add(_asked(msgspec.structs.replace(REQUEST, prompt=b"\x63\0\0\0")), 0)
    (refused,) = (await core.step()).outputs
    error = read_output(Progress(REQUEST, 0), refused).error
    assert error is not None
    assert (error.code, error.message) == (Code.INVALID_ARGUMENT, "vLLM: no such prompt")
    core.check_alive()


async def test_any_other_error_is_the_cores_end() -> None:
    core = make_core()
    await core.add(_asked(msgspec.structs.replace(REQUEST, prompt=b"\x62\0\0\0")), 0)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    with pytest.raises(KeyError, match="dead"):
        core.check_alive()


async def test_nothing_more_comes_of_an_aborted_request() -> None:
    core = make_core()
    await core.add(_asked(REQUEST), 0)
    await core.step()
    await core.abort(["r/0"])
    core._llm.goes_on.set()
    await asyncio.sleep(0.01)
    assert core._news.empty()
    assert (core._llm.aborted, core._tasks) == (["r/0"], {})
