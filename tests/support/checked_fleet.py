"""A fleet whose requests go all the way to what a shard's engine gets: message, checks, Request."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

from penstock_client import FleetStream
from penstock_proto import codec
from penstock_proto import shard_pb2 as pb
from penstock_proto.engine_request import EngineRequest
from penstock_proto.errors import PenstockError
from penstock_proto.types import GenerationRequest, RequestOutput
from penstock_shard.config import ShardConfig
from penstock_shard.server.validation import Refusal, check
from support.engines import runner_info
from support.router_doubles import INFO, FakeFleet

RUNNER_INFO = dataclasses.replace(
    runner_info(max_model_len=INFO.max_model_len),
    vocab_size=INFO.vocab_size,
    eos_token_ids=INFO.eos_token_ids,
)
CONFIG = ShardConfig(served_model_names=(INFO.model, *INFO.model_aliases))


def at_the_engine(request: GenerationRequest) -> EngineRequest:
    """Over the wire and through the shard's checks; raises what the client raises."""
    message = codec.generate_request(request, "id")
    incoming = codec.submission(pb.GenerateRequest.FromString(message.SerializeToString()))
    try:
        return check(incoming, RUNNER_INFO, CONFIG)
    except Refusal as refusal:
        [response] = codec.responses(
            [RequestOutput([], 0, request_id="id", attempt=0, error=refusal.error)]
        )
        error = codec.output(response.outputs[0])
        assert isinstance(error, PenstockError)
        raise error from None


@dataclass
class CheckedFleet(FakeFleet):
    """Answers from its script what a real shard would take, and refuses what it would refuse."""

    submits: list[EngineRequest] = field(default_factory=list)

    async def _feed(self, request: GenerationRequest, stream: FleetStream) -> None:
        try:
            self.submits.append(at_the_engine(request))
        except PenstockError as error:
            stream.fail(error)
            return
        await super()._feed(request, stream)
