"""The Embed call: what is refused, what comes back, and that it is all of a call or none of it."""

from __future__ import annotations

import asyncio
import dataclasses

import numpy as np
import pytest
from support.engines import VOCAB_SIZE, make_engine, make_request, packed, runner_info

from penstock_proto import codec
from penstock_proto import shard_pb2 as pb
from penstock_proto.engine_request import EngineRequest
from penstock_proto.errors import Code
from penstock_proto.types import EmbeddingRequest, Error, FinishReason, Pooling, RequestOutput
from penstock_shard.config import ShardConfig
from penstock_shard.ipc import messages
from penstock_shard.server.last_outputs import last_outputs, vector_of
from penstock_shard.server.live_requests import Deliver
from penstock_shard.server.shard_info import shard_info
from penstock_shard.server.supervisor import EngineSupervisor
from penstock_shard.server.validation import Refusal, check_embedding

INFO = runner_info()


def checked(message: pb.EmbedRequest) -> list[EngineRequest]:
    read = pb.EmbedRequest.FromString(message.SerializeToString())
    return check_embedding(codec.embedding_request(read), read.request_id, INFO, "call")


def message(*inputs: list[int], **fields: object) -> pb.EmbedRequest:
    ids = [pb.TokenIds(token_ids=each) for each in inputs]
    return pb.EmbedRequest(request_id="r", inputs=ids, **fields)  # type: ignore[arg-type]


# ---- checks ----


def test_each_input_becomes_a_request_of_its_own() -> None:
    asked = message([1, 2], [3], pooling=pb.EmbedRequest.POOLING_MEAN)
    first, second = checked(asked)
    assert (first.prompt, second.prompt) == (packed([1, 2]), packed([3]))
    assert first.request_id != second.request_id
    assert (first.pooling, first.max_tokens) == (Pooling.MEAN, 1)


def test_pooling_that_is_left_open_is_the_models_own() -> None:
    assert [submit.pooling for submit in checked(message([1]))] == [Pooling.LAST]


@pytest.mark.parametrize(
    ("asked", "field", "value", "bound"),
    [
        (message(), "inputs", "0 inputs", "1..1024 inputs"),
        (message(*[[1]] * 1025), "inputs", "1025 inputs", "1..1024 inputs"),
        (message([1], []), "inputs[1]", "0 tokens", "1..512 tokens (the context)"),
        (message([1] * 513), "inputs[0]", "513 tokens", "1..512 tokens (the context)"),
        (message([1], [VOCAB_SIZE]), "inputs", "1000", "0..999 (the vocabulary)"),
        (message([1], dimensions=0), "dimensions", "0", "1..64"),
        (message([1], dimensions=65), "dimensions", "65", "1..64"),
    ],
)
def test_what_is_out_of_bounds_is_refused_by_field_value_and_bound(
    asked: pb.EmbedRequest, field: str, value: str, bound: str
) -> None:
    with pytest.raises(Refusal) as caught:
        checked(asked)
    error = caught.value.error
    assert (error.code, error.field, error.value, error.bound) == (3, field, value, bound)
    assert all(part in error.message for part in (field, value, bound))


def test_what_is_just_within_bounds_is_taken() -> None:
    inputs = [[VOCAB_SIZE - 1] * 512, *([[0]] * 1023)]
    assert len(checked(message(*inputs, dimensions=64))) == 1024


def test_vectors_so_long_that_an_answer_would_not_fit_lower_the_number_of_inputs() -> None:
    assert INFO.embedding is not None
    long = dataclasses.replace(INFO, embedding=dataclasses.replace(INFO.embedding, size=2**20))
    asked = codec.embedding_request(message(*[[1]] * 9))
    with pytest.raises(Refusal, match=r"9 inputs is out of bounds; allowed: 1\.\.8 inputs"):
        check_embedding(asked, "r", long, "call")


def test_a_shard_without_embeddings_says_what_to_do() -> None:
    info = dataclasses.replace(INFO, embedding=None)
    with pytest.raises(Refusal, match="--embeddings last") as caught:
        check_embedding(codec.embedding_request(message([1])), "r", info, "call")
    assert caught.value.error.code == 9


# ---- vectors ----


def values(vector: list[float], dimensions: int | None, normalize: bool) -> list[float]:
    packed = np.array(vector, dtype="<f4").tobytes()
    output = RequestOutput([], 0, request_id="r", attempt=0, embedding=packed)
    asked = EmbeddingRequest([[1]], dimensions=dimensions, normalize=normalize)
    return vector_of(output, asked)


def test_vectors_are_cut_and_then_scaled() -> None:
    assert values([3, 4, 12], None, False) == [3, 4, 12]
    assert values([3, 4, 12], 2, False) == [3, 4]
    assert values([3, 4, 12], 2, True) == pytest.approx([0.6, 0.8])
    assert values([3, 4, 12], None, True) == pytest.approx([3 / 13, 4 / 13, 12 / 13])


def test_a_vector_of_zeros_stays_one() -> None:
    assert values([0, 0], None, True) == [0, 0]
    assert values([0, 0, 5], 2, True) == [0, 0]


@pytest.mark.parametrize("size", [3e38, 1e-44])
def test_the_largest_and_smallest_numbers_are_scaled_too(size: float) -> None:
    given = float(np.float32(size))
    assert values([given, given, -given], None, True) == pytest.approx(
        [3**-0.5, 3**-0.5, -(3**-0.5)]
    )


def test_the_defaults_are_told() -> None:
    ready = messages.Ready(INFO, {}, "", "")
    told = codec.info_message(shard_info(ready, ShardConfig(), "")).embedding
    assert (told.pooling, told.normalize, told.size) == (pb.EmbedRequest.POOLING_LAST, True, 64)


# ---- the engine ----


def test_the_engine_gives_a_vector_and_no_token() -> None:
    under_test = make_engine()
    under_test.engine.submit(make_request("token", range(100), max_tokens=20))
    under_test.engine.submit(make_request("last", range(150), max_tokens=1, pooling=Pooling.LAST))
    under_test.engine.submit(make_request("mean", range(150), max_tokens=1, pooling=Pooling.MEAN))
    under_test.run()
    assert len(under_test.tokens("token")) == 20
    vectors = []
    for request_id in ("last", "mean"):
        (output,) = (o for o in under_test.outputs if o.request_id == request_id)
        assert (output.finish_reason, output.token_ids) == (FinishReason.STOP, [])
        assert output.embedding is not None
        vectors.append(output.embedding)
    assert len(vectors[0]) == 4 * 64
    assert vectors[0] != vectors[1]
    assert under_test.blocks.num_referenced == 0


def test_a_mean_reads_no_cached_prefix_and_a_last_token_does() -> None:
    under_test = make_engine()
    requests = [
        make_request("first", range(100)),
        make_request("mean", range(100), max_tokens=1, pooling=Pooling.MEAN),
        make_request("last", range(100), max_tokens=1, pooling=Pooling.LAST),
    ]
    cached = []
    for request in requests:
        under_test.engine.submit(request)
        (sequence,) = under_test.scheduler.sequences
        under_test.run()
        cached.append(sequence.cached_tokens)
    assert cached == [0, 0, 96]


def test_an_aborted_embedding_gives_its_blocks_back() -> None:
    under_test = make_engine()
    under_test.engine.submit(make_request("r", range(300), max_tokens=1, pooling=Pooling.MEAN))
    under_test.step()
    assert under_test.blocks.num_referenced
    under_test.engine.abort("r", 0)
    under_test.run()
    assert [o.finish_reason for o in under_test.endings("r")] == [FinishReason.ABORTED]
    assert under_test.blocks.num_referenced == 0


def test_a_prompt_may_fill_the_whole_context() -> None:
    under_test = make_engine(num_blocks=32, max_model_len=512)
    under_test.engine.submit(make_request("r", range(512), max_tokens=1, pooling=Pooling.LAST))
    under_test.run()
    assert under_test.endings("r")[0].embedding is not None


# ---- a call ----


class Supervisor(EngineSupervisor):
    """Says that its engine is up; tests say what the engine says."""

    def __init__(self, **settings: int) -> None:
        super().__init__(ShardConfig(**settings))  # type: ignore[arg-type]
        self.aborted: list[str] = []
        self._became_ready(messages.Ready(INFO, {}, "", ""))

    def _flush(self) -> None:
        self._flush_scheduled = False
        self.aborted += [request_id for request_id, _ in self._inbox.aborts]
        self._inbox = messages.Inbox([], [])

    def says(self, request_id: str, **fields: object) -> None:
        output = RequestOutput([], 0, request_id=request_id, attempt=0, **fields)  # type: ignore[arg-type]
        self._take_step(messages.StepOutputs([output], messages.Load()))


async def test_vectors_come_in_the_order_of_the_inputs() -> None:
    supervisor = Supervisor()
    call = asyncio.create_task(last_outputs(supervisor, checked(message([1], [2]))))
    await asyncio.sleep(0.01)
    supervisor.says("call/1", embedding=b"two", finish_reason=FinishReason.STOP)
    await asyncio.sleep(0.01)
    assert not call.done()
    supervisor.says("call/0", embedding=b"one", finish_reason=FinishReason.STOP)
    assert [output.embedding for output in await call] == [b"one", b"two"]
    await asyncio.sleep(0.01)
    assert supervisor.aborted == []


async def test_one_that_fails_ends_the_call_and_aborts_the_others() -> None:
    supervisor = Supervisor()
    call = asyncio.create_task(last_outputs(supervisor, checked(message([1], [2], [3]))))
    await asyncio.sleep(0.01)
    supervisor.says("call/2", embedding=b"three", finish_reason=FinishReason.STOP)
    supervisor.says("call/1", error=Error(Code.INTERNAL, "the model gave nothing"))
    with pytest.raises(Refusal, match="the model gave nothing"):
        await call
    await asyncio.sleep(0.01)
    assert supervisor.aborted == ["call/0"]


async def test_a_cancelled_call_aborts_what_is_live() -> None:
    supervisor = Supervisor()
    call = asyncio.create_task(last_outputs(supervisor, checked(message([1], [2]))))
    await asyncio.sleep(0.01)
    supervisor.says("call/0", embedding=b"one", finish_reason=FinishReason.STOP)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await asyncio.sleep(0.01)
    assert supervisor.aborted == ["call/1"]
    supervisor.says("call/1", finish_reason=FinishReason.ABORTED)
    assert supervisor.num_live == 0


async def test_a_full_queue_refuses_the_whole_call_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    supervisor = Supervisor(max_num_seqs=1, max_queued_requests=2)
    tried: list[str] = []
    submit = supervisor.submit

    def counted(request: EngineRequest, deliver: Deliver) -> None:
        tried.append(request.request_id)
        submit(request, deliver)

    monkeypatch.setattr(supervisor, "submit", counted)
    with pytest.raises(Refusal, match="--max-queued-requests 2") as caught:
        await last_outputs(supervisor, checked(message([1], [2], [3], [4], [5])))
    assert caught.value.error.code == 8
    await asyncio.sleep(0.01)
    assert sorted(supervisor.aborted) == ["call/0", "call/1", "call/2"]
    assert tried == ["call/0", "call/1", "call/2", "call/3"]
    # What never reached the engine is not remembered as aborted.
    assert not supervisor._early_aborts._aborts


async def test_a_dead_engine_ends_the_call_as_retryable() -> None:
    supervisor = Supervisor()
    call = asyncio.create_task(last_outputs(supervisor, checked(message([1], [2]))))
    await asyncio.sleep(0.01)
    supervisor._died()
    with pytest.raises(Refusal, match="engine died") as caught:
        await call
    assert caught.value.error.code == 14
