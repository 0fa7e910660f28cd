"""Requests to vLLM's core and what comes of them, without vLLM: its objects by their fields."""

from __future__ import annotations

import asyncio
import dataclasses
import enum
from array import array
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.adapters import make_adapter
from support.submissions import submission

from penstock_proto.engine_request import EngineRequest
from penstock_proto.errors import Code
from penstock_proto.facts import EmbeddingDefaults
from penstock_proto.limits import MAX_BAD_WORD_TOKENS
from penstock_proto.types import EngineSampling, FinishReason, Pooling, RequestOutput
from penstock_shard.cli import parse_config
from penstock_shard.config import ShardConfig
from penstock_shard.engine.adapter_slots import EngineAdapters
from penstock_shard.ipc.messages import (
    AdapterChange,
    AdapterChanged,
    FromEngine,
    Inbox,
    Started,
    StepOutputs,
)
from penstock_shard.ipc.runner_info import RunnerInfo
from penstock_shard.server.validation import Refusal, check
from penstock_shard.vllm_engine.adapters import CoreAdapters
from penstock_shard.vllm_engine.bridge import Bridge
from penstock_shard.vllm_engine.core import ENVIRONMENT
from penstock_shard.vllm_engine.engine_arguments import engine_arguments
from penstock_shard.vllm_engine.outputs import Progress, read_output
from penstock_shard.vllm_engine.requests import (
    CAPABILITIES,
    COUNTED,
    MOST_BAD_WORDS,
    CoreRequest,
    bounds,
    prompt_of,
)
from penstock_shard.vllm_engine.requests import sampling_of as sampling_with
from penstock_shard.vllm_engine.silence import BASE_S, FIRST_S, Silence


def sampling_of(request: EngineRequest) -> dict[str, Any]:
    return sampling_with(request, as_output=False)


INFO = RunnerInfo(
    architecture="Fake",
    weights_hash="w",
    vocab_size=100,
    max_model_len=64,
    eos_token_ids=(2,),
    default_sampling={},
    block_size=16,
    pools=(100,),
    dtype="float32",
    kv_dtype="float32",
    device="cpu",
    attention_backend="vllm",
    capabilities=CAPABILITIES,
)


class Reason(enum.IntEnum):
    """A finish reason like vLLM's, which is known by its text."""

    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3

    def __str__(self) -> str:
        return self.name.lower()


def ids(*token_ids: int) -> bytes:
    return array("I", token_ids).tobytes()


def request(**changes: Any) -> EngineRequest:
    given: dict[str, Any] = {
        "request_id": "r",
        "attempt": 0,
        "prompt": ids(5, 6, 7),
        "sampling": EngineSampling(temperature=0.0),
        "max_tokens": 10,
        "stop_token_ids": frozenset({2}),
    }
    return EngineRequest(**{**given, **changes})


def given(**changes: Any) -> Any:
    """Return what the core says of one request after a step, with these fields changed."""
    fields: dict[str, Any] = {
        "request_id": "r/0",
        "new_token_ids": [],
        "new_logprobs": None,
        "new_prompt_logprobs_tensors": None,
        "finish_reason": None,
        "stop_reason": None,
        "events": None,
        "pooling_output": None,
        "prefill_stats": None,
    }
    return SimpleNamespace(**{**fields, **changes})


# ---- Requests ----------------------------------------------------------------------------------


def test_every_field_of_a_request_that_vllm_honours_reaches_it() -> None:
    sampling = EngineSampling(
        temperature=0.7,
        top_k=5,
        top_p=0.9,
        min_p=0.1,
        seed=7,
        repetition_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=0.3,
        logit_bias=((4, 1.5),),
        allowed_token_ids=(4, 5),
    )
    asked = request(sampling=sampling, min_tokens=3, logprobs=2, prompt_logprobs=1, cache_salt="s")
    assert sampling_of(asked) == {
        "temperature": 0.7,
        "top_k": 5,
        "top_p": 0.9,
        "min_p": 0.1,
        "seed": 7,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "logit_bias": {4: 1.5},
        "allowed_token_ids": [4, 5],
        "max_tokens": 10,
        "min_tokens": 3,
        "stop_token_ids": [2],
        "ignore_eos": True,
        "logprobs": 2,
        "prompt_logprobs": 1,
        "detokenize": False,
        "skip_clone": True,
        "extra_args": None,
    }
    assert prompt_of(asked) == {
        "type": "token",
        "prompt_token_ids": [5, 6, 7],
        "cache_salt": "s",
    }


def test_every_sampling_parameter_is_honoured_or_no_capability() -> None:
    honoured = set(sampling_of(request())) | {"bad_words"}
    fields = {field.name for field in dataclasses.fields(EngineSampling)}
    assert fields & CAPABILITIES == fields & honoured


@pytest.mark.parametrize(
    ("seed", "theirs"),
    [(0, 0), (2**63 - 1, 2**63 - 1), (2**63, -(2**63)), (2**64 - 2, -2), (2**64 - 1, 0)],
)
def test_a_seed_is_a_signed_number_that_does_not_stand_for_none(seed: int, theirs: int) -> None:
    sampling = EngineSampling(temperature=1.0, seed=seed)
    assert sampling_of(request(sampling=sampling))["seed"] == theirs


def test_a_continuation_goes_on_as_a_prompt_with_what_is_left_and_a_seed_of_its_own() -> None:
    first = request(sampling=EngineSampling(temperature=1.0, seed=7), min_tokens=3)
    later = request(
        sampling=EngineSampling(temperature=1.0, seed=7), min_tokens=3, output=ids(8, 9, 10, 11)
    )
    told = sampling_of(later)
    assert (told["max_tokens"], told["min_tokens"]) == (6, 0)
    assert told["seed"] != sampling_of(first)["seed"]
    assert sampling_of(later)["seed"] == told["seed"]
    assert prompt_of(later)["prompt_token_ids"] == [5, 6, 7, 8, 9, 10, 11]


_OUTPUT = [8]


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("temperature", {"temperature": 2.5}),
        ("temperature", {"temperature": 0.001}),
        ("logit_bias", {"logit_bias": dict.fromkeys(range(1025), 1.0)}),
        ("allowed_token_ids", {"allowed_token_ids": range(1025)}),
        ("bad_words", {"bad_words": [_OUTPUT] * 129}),
        ("stop_token_ids", {"stop_token_ids": range(128)}),
        ("typical_p", {"typical_p": 0.5}),
        ("presence_penalty", {"output_token_ids": _OUTPUT, "presence_penalty": 0.5}),
        ("frequency_penalty", {"output_token_ids": _OUTPUT, "frequency_penalty": 0.5}),
        ("bad_words", {"output_token_ids": _OUTPUT, "bad_words": [_OUTPUT]}),
    ],
)
def test_what_would_end_vllm_or_go_on_wrongly_is_refused_by_the_server(
    field: str, fields: dict[str, Any]
) -> None:
    with pytest.raises(Refusal) as refused:
        check(submission(**fields), _VLLM, ShardConfig(served_model_names=("m",)))
    error = refused.value.error
    assert (error.code, error.field) == (Code.FAILED_PRECONDITION, field)
    assert error.bound in error.message


def test_what_is_within_vllms_bounds_is_not_refused() -> None:
    fields: dict[str, Any] = {
        "temperature": float(np.float32(0.01)),
        "logit_bias": dict.fromkeys(range(1024), 1.0),
        "bad_words": [range(MAX_BAD_WORD_TOKENS)] * MOST_BAD_WORDS,
        "stop_token_ids": range(3, 130),
        "min_tokens": 2,
    }
    asked = check(submission(**fields), _VLLM, ShardConfig(served_model_names=("m",)))
    # vLLM's worker has so many places for the ids that end a request, and for those of bad words.
    assert len(asked.stop_token_ids) == 128
    tokens = sum(map(len, asked.sampling.bad_words))
    assert tokens == int(ENVIRONMENT["VLLM_MAX_BAD_WORDS_TOTAL_TOKENS"])


_VLLM = dataclasses.replace(
    INFO, vocab_size=2000, bounds=bounds(len(INFO.eos_token_ids)), uncontinued=COUNTED
)


# ---- Outputs -----------------------------------------------------------------------------------


def test_outputs_have_the_positions_and_log_probabilities_of_their_tokens() -> None:
    progress = Progress(request(logprobs=2, output=ids(8)), num_output=1)
    columns = (
        np.array([[30, 30, 31], [32, 33, 32]]),
        np.array([[-0.1, -0.1, -2.0], [-1.0, -0.5, -1.0]], dtype=np.float32),
        np.array([1, 2]),
        None,
    )
    output = read_output(progress, given(new_token_ids=[30, 32], new_logprobs=columns))
    assert (output.first_position, output.token_ids) == (1, [30, 32])
    assert output.logprobs is not None
    assert output.logprobs.chosen == pytest.approx([-0.1, -1.0])
    assert output.logprobs.ranks == [1, 2]
    assert output.logprobs.top_token_ids == [30, 31, 33, 32]
    assert output.logprobs.top_logprobs == pytest.approx([-0.1, -2.0, -0.5, -1.0])
    assert read_output(progress, given(new_token_ids=[34])).first_position == 3


def test_log_probabilities_of_a_prompt_go_on_where_the_chunk_before_ended() -> None:
    progress = Progress(request(prompt_logprobs=0), num_output=0)
    starts = []
    for rows in ([[6], [7]], [[8]]):
        tensors = (np.array(rows), np.zeros((len(rows), 1)), np.array([1] * len(rows)))
        output = read_output(progress, given(new_prompt_logprobs_tensors=(*tensors, None)))
        assert output.prompt_logprobs is not None
        starts.append((output.prompt_logprobs_start, len(output.prompt_logprobs.chosen)))
    assert starts == [(1, 2), (3, 1)]


@pytest.mark.parametrize(
    ("reason", "stop_reason", "finish", "stop"),
    [
        (Reason.STOP, 2, FinishReason.STOP, 2),
        # Of an eos id vLLM tells nothing.
        (Reason.STOP, None, FinishReason.STOP, 30),
        (Reason.LENGTH, None, FinishReason.LENGTH, None),
        (Reason.ABORT, None, FinishReason.ABORTED, None),
    ],
)
def test_a_request_ends_as_vllm_says(
    reason: Reason, stop_reason: int | None, finish: FinishReason, stop: int | None
) -> None:
    said = given(new_token_ids=[30], finish_reason=reason, stop_reason=stop_reason)
    output = read_output(Progress(request(), 0), said)
    assert (output.finish_reason, output.stop_token_id, output.error) == (finish, stop, None)


def test_an_end_that_is_an_error_of_vllms_is_one_of_ours() -> None:
    output = read_output(Progress(request(), 0), given(finish_reason=Reason.ERROR))
    assert output.finish_reason is None
    assert output.error is not None
    assert output.error.code is Code.INTERNAL


# ---- The bridge --------------------------------------------------------------------------------


class DeadCore(Exception):
    pass


class FakeCore:
    """Says what the test puts in."""

    keeps_output = False
    max_step_tokens = 64

    def __init__(self) -> None:
        self.steps: asyncio.Queue[Any] = asyncio.Queue()
        self.added: list[tuple[str, Any, int]] = []
        self.adapters: set[int] = set()
        self.aborted: list[str] = []
        self.is_dead = False

    async def add(self, asked: CoreRequest, adapter: int) -> None:
        if asked.prompt["prompt_token_ids"] == [99]:
            raise ValueError("no such prompt\nsecond line")
        self.added.append((asked.name, asked.bad_words, adapter))

    async def load_adapter(self, number: int, path: str) -> None:
        if "broken" in path:
            raise ValueError("rank 64 is too high")
        self.adapters.add(number)

    async def unload_adapter(self, number: int) -> None:
        self.adapters.remove(number)

    async def abort(self, names: list[str]) -> None:
        self.aborted += names

    async def step(self) -> Any:
        return await self.steps.get()

    def check_alive(self) -> None:
        if self.is_dead:
            raise DeadCore


class Running:
    """A bridge that runs, and what it has sent."""

    def __init__(self, info: RunnerInfo = INFO) -> None:
        self.core: Any = FakeCore()
        self.info = info
        self.sent: list[FromEngine] = []

    async def __aenter__(self) -> Running:
        loop = asyncio.get_running_loop()
        store = CoreAdapters(self.core, loop, Path)

        def settle() -> None:
            loop.call_soon_threadsafe(self.bridge.take, Inbox([], []))

        adapters = EngineAdapters(store, 1, settle)
        number_of = store.number_of
        self.bridge = Bridge(self.core, adapters, number_of, self.info, self.sent.append)
        self.task = asyncio.create_task(self.bridge.run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)

    async def submit(
        self, *requests: EngineRequest, aborts: list[tuple[str, int]] | None = None
    ) -> None:
        self.bridge.take(Inbox(list(requests), aborts or []))
        await self.settle()

    async def step(self, *outputs: Any) -> None:
        stats = SimpleNamespace(kv_cache_usage=0.5)
        self.core.steps.put_nowait(SimpleNamespace(outputs=outputs, scheduler_stats=stats))
        await self.settle()

    async def settle(self) -> None:
        for _ in range(10):
            await asyncio.sleep(0)

    async def change(self, change: AdapterChange) -> AdapterChanged:
        """Have the bridge change an adapter. Returns the answer, from another thread."""
        self.bridge.take(Inbox([], [], [change]))
        async with asyncio.timeout(5):
            while True:
                await asyncio.sleep(0.01)
                for sent in self.sent:
                    if isinstance(sent, AdapterChanged) and sent.number == change.number:
                        return sent

    @property
    def outputs(self) -> list[RequestOutput]:
        return [
            each for sent in self.sent if isinstance(sent, StepOutputs) for each in sent.outputs
        ]


async def test_a_request_goes_to_the_core_and_its_tokens_come_back_until_it_ends() -> None:
    async with Running() as running:
        await running.submit(request(sampling=EngineSampling(bad_words=((1, 2),))))
        assert running.core.added == [("r/0", [[1, 2]], 0)]
        assert running.sent == [Started(["r"])]
        await running.step(given(new_token_ids=[30]))
        await running.step(given(new_token_ids=[2], finish_reason=Reason.STOP, stop_reason=2))
        assert [(each.first_position, each.token_ids) for each in running.outputs] == [
            (0, [30]),
            (1, [2]),
        ]
        loads = [sent.load for sent in running.sent if isinstance(sent, StepOutputs)]
        assert [(load.running, load.running_tokens) for load in loads] == [(1, 4), (0, 0)]
        assert (loads[-1].referenced_blocks, loads[-1].decode_tokens_total) == (50, 2)


async def test_a_request_that_was_aborted_ends_as_such_and_nothing_more_comes_of_it() -> None:
    async with Running() as running:
        await running.submit(request())
        await running.submit(aborts=[("r", 0), ("unknown", 0)])
        assert running.core.aborted == ["r/0"]
        await running.step(given(new_token_ids=[30]))
        (output,) = running.outputs
        assert (output.request_id, output.finish_reason) == ("r", FinishReason.ABORTED)


async def test_an_adapter_is_loaded_used_and_unloaded_once_nothing_runs_with_it(
    tmp_path: Path,
) -> None:
    source = str(make_adapter(tmp_path / "one"))
    async with Running() as running:
        loaded = await running.change(AdapterChange(1, "one", source))
        assert loaded.adapter is not None
        assert (loaded.adapter.name, running.core.adapters) == ("one", {1})
        await running.submit(request(adapter="one"))
        assert running.core.added[-1][2] == 1
        assert await running.change(AdapterChange(2, "one")) == AdapterChanged(2)
        assert running.core.adapters == {1}
        await running.step(given(new_token_ids=[2], finish_reason=Reason.STOP))
        assert running.core.adapters == set()


async def test_an_adapter_that_is_refused_is_in_no_worker(tmp_path: Path) -> None:
    sources = [str(make_adapter(tmp_path / name, seed=7)) for name in ("one", "two", "broken")]
    async with Running() as running:
        await running.change(AdapterChange(1, "one", sources[0]))
        full = await running.change(AdapterChange(2, "two", sources[1]))
        assert full.error is not None
        assert "1 adapters are loaded" in full.error.message
        broken = await running.change(AdapterChange(3, "three", sources[2]))
        assert broken.error is not None
        assert "broken: vLLM cannot load it: rank 64 is too high" in broken.error.message
        assert running.core.adapters == {1}


async def test_two_attempts_of_one_request_are_two_in_the_core() -> None:
    async with Running() as running:
        await running.submit(request(), request(attempt=1))
        await running.step(given(new_token_ids=[30]), given(request_id="r/1", new_token_ids=[31]))
        assert [(each.attempt, each.token_ids) for each in running.outputs] == [
            (0, [30]),
            (1, [31]),
        ]


async def test_what_is_refused_ends_alone_in_one_line_and_never_reaches_the_core() -> None:
    async with Running() as running:
        await running.submit(
            request(request_id="odd", prompt=ids(99)),
            request(),
        )
        assert [name for name, _, _ in running.core.added] == ["r/0"]
        errors = {each.request_id: each.error for each in running.outputs}
        assert errors["odd"] is not None
        assert (errors["odd"].code, errors["odd"].message) == (
            Code.INVALID_ARGUMENT,
            "vLLM: no such prompt",
        )


async def test_an_engine_of_embeddings_serves_them_alone_and_another_none() -> None:
    defaults = EmbeddingDefaults(Pooling.LAST, normalize=True, size=2)
    async with Running(dataclasses.replace(INFO, embedding=defaults)) as running:
        await running.submit(
            request(request_id="last", pooling=Pooling.LAST),
            request(request_id="mean", pooling=Pooling.MEAN),
            request(),
        )
        vector = SimpleNamespace(float=lambda: SimpleNamespace(numpy=lambda: np.array([0.5, 2.0])))
        ends = {"finish_reason": Reason.STOP, "pooling_output": vector}
        await running.step(given(request_id="last/0", **ends))
        *refused, last = running.outputs
    assert (last.request_id, last.finish_reason) == ("last", FinishReason.STOP)
    assert np.frombuffer(last.embedding or b"", dtype="<f4").tolist() == [0.5, 2.0]
    assert {each.request_id for each in refused} == {"mean", "r"}
    for each in refused:
        assert each.error is not None
        assert "serves embeddings with pooling last and nothing else" in each.error.message
    async with Running() as running:
        await running.submit(request(pooling=Pooling.MEAN))
        (refusal,) = running.outputs
        assert refusal.error is not None
        assert "serves generated tokens and nothing else" in refusal.error.message


async def test_a_core_that_dies_between_steps_ends_the_bridge() -> None:
    async with Running() as running:
        await running.settle()
        running.core.is_dead = True
        with pytest.raises(ExceptionGroup) as ended:
            async with asyncio.timeout(5):
                await running.task
        assert isinstance(ended.value.exceptions[0], DeadCore)


async def test_silence_is_counted_only_while_there_is_something_to_do() -> None:
    async with Running() as running:
        assert running.bridge.beat().step_running_s == 0.0
        await running.submit(request())
        await asyncio.sleep(0.05)
        assert 0.04 < running.bridge.beat().step_running_s < 5
        await running.step(given(new_token_ids=[2], finish_reason=Reason.STOP))
        assert running.bridge.beat().step_running_s == 0.0


def test_a_size_of_step_that_was_not_met_may_take_as_long_as_compiling_does() -> None:
    silence = Silence(max_step_tokens=64)
    silence.begin(50)
    assert silence.allowed_s == FIRST_S
    silence.note_step(0, 50, is_busy=True)
    assert silence.allowed_s == BASE_S
    silence.begin(5)
    assert silence.allowed_s == FIRST_S
    silence.begin(5000)
    silence.note_step(0, 5000, is_busy=True)
    silence.begin(70)
    assert silence.allowed_s == BASE_S


def test_prompts_that_wait_may_take_what_the_rate_so_far_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = 100.0
    monkeypatch.setattr("penstock_shard.vllm_engine.silence.time.monotonic", lambda: now_s)
    silence = Silence(max_step_tokens=64)
    silence.begin(128)
    for computed, left in ((0, 128), (128, 0)):
        now_s += 16.0
        silence.note_step(computed, left, is_busy=True)
    assert silence.allowed_s == FIRST_S  # no step of decodes alone so far
    silence.note_step(0, 0, is_busy=True)
    assert silence.allowed_s == BASE_S
    silence.begin(1000)
    # A step of 64 tokens at four tokens a second takes 16 s.
    assert silence.allowed_s == BASE_S + 4 * 16.0
    now_s += 20.0
    assert silence.silent_s == 20.0


def test_requests_that_come_while_the_core_hangs_do_not_excuse_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = 100.0
    monkeypatch.setattr("penstock_shard.vllm_engine.silence.time.monotonic", lambda: now_s)
    silence = Silence(max_step_tokens=64)
    silence.begin(5)
    for _ in range(2):
        silence.note_step(0, 0, is_busy=True)
    now_s += 0.5
    silence.begin(50)
    # The step that begins now has it.
    assert silence.allowed_s == FIRST_S
    silence.note_step(0, 0, is_busy=True)
    now_s += 1.5
    silence.begin(20)
    assert silence.allowed_s == BASE_S


# ---- Flags -------------------------------------------------------------------------------------


def test_flags_that_mean_the_same_become_vllms_arguments() -> None:
    flags = "--engine vllm --max-model-len 512 --kv-blocks 100 --engine-arg swap_space=4"
    attention = '--engine-arg attention_config={"backend":"TRITON_ATTN"} --engine-arg seed=x'
    config = parse_config([*flags.split(), *attention.split()])
    arguments = engine_arguments(config, Path("/model"))
    assert arguments["model"] == "/model"
    assert arguments["max_model_len"] == 512
    assert arguments["num_gpu_blocks_override"] == 100
    assert arguments["swap_space"] == 4
    assert arguments["attention_config"] == {"backend": "TRITON_ATTN"}
    assert arguments["seed"] == "x"
    assert not {"block_size", "enable_lora", "runner"} & arguments.keys()


def test_places_for_adapters_have_a_rank_that_vllm_makes_and_one_is_left_to_read_into() -> None:
    flags = "--engine vllm --enable-lora --max-loras 3 --max-lora-rank 65"
    arguments = engine_arguments(parse_config(flags.split()), Path("/model"))
    told = {name: arguments[name] for name in arguments if "lora" in name}
    places = {"max_loras": 3, "max_cpu_loras": 4}
    assert told == {"enable_lora": True, "max_lora_rank": 128, **places}


def test_a_model_of_embeddings_gets_vllms_pooling_runner() -> None:
    arguments = engine_arguments(parse_config(["--engine", "vllm"]), Path("/m"), "mean")
    assert arguments["runner"] == "pooling"
    assert arguments["pooler_config"] == {"pooling_type": "MEAN"}


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--engine vllm --runner fake", "--runner: with --engine vllm"),
        ("--engine vllm --quantization fp8", "--quantization: with --engine vllm"),
        ("--engine vllm --speculative-tokens 4", "--speculative-tokens: with --engine vllm"),
        ("--engine vllm --engine-arg max_model_len=4", "give --max-model-len"),
        ("--engine vllm --engine-arg hf_overrides={}", "--engine-arg hf_overrides: it changes"),
        ("--engine vllm --engine-arg scheduler_cls=a.B", "--engine-arg scheduler_cls: it changes"),
        ("--engine vllm --engine-arg nothing", "must be NAME=VALUE"),
        ("--engine-python /usr/bin/python3", "give --engine vllm"),
        ("--engine-arg a=1", "give --engine vllm"),
    ],
)
def test_a_flag_that_vllm_cannot_honour_is_refused_by_name(
    flags: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse_config(flags.split())
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


def test_each_flag_of_an_engine_is_passed_on_refused_or_the_servers_own() -> None:
    from penstock_shard.vllm_engine import engine_arguments as table

    known = {*table._SAME, *table._REFUSED}
    fields = {field.name for field in dataclasses.fields(ShardConfig)}
    assert known <= fields
    start = [field.name for field in dataclasses.fields(ShardConfig)].index("runner")
    of_engine = [field.name for field in dataclasses.fields(ShardConfig)][start:]
    assert [name for name in of_engine if name not in known and name not in _SERVERS_OWN] == []


# What the server does for any engine, and what changes nothing where vLLM computes.
_SERVERS_OWN = {
    *("engine", "engine_python", "engine_args", "device", "load_cache_bytes", "master_addr"),
    *("node_rank", "master_port", "aging_s", "enable_chunked_prefill", "max_queued_requests"),
    *("max_queued_tokens", "image_cache_bytes", "kv_disk_bytes", "kv_disk_age_s"),
    *("kv_disk_salted", "kv_peer_key", "kv_peer_ca_file", "kv_peer_server_name"),
    *("max_constraint_bytes", "constraint_timeout_s", "constraint_memory_bytes"),
    *("constraint_threads", "keep_loras", "step_ms"),
    *("loras", "enable_lora", "max_loras", "max_lora_rank", "embeddings"),
    *("fake_eos_rate", "fake_weights", "fake_crash_on", "exact", "nnodes"),
}
