"""Continuation: sends a request to a shard and, when that shard fails it, to another.

A token depends on nothing but its request, so a request that a shard drops goes on at another one:
prompt, output so far and the next attempt number are sent there, and the reader sees only a pause.
A crash, a hang, a drain and a full KV cache take the same path.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from penstock_client.fleet import request_checks as checks
from penstock_client.fleet.compatibility import same_adapter, same_model, same_numerics
from penstock_client.fleet.fleet_stream import FleetStream
from penstock_client.fleet.placement.image_puts import PIXELS, ImagePuts, given_up
from penstock_client.fleet.placement.moves import Moves, Plan
from penstock_client.fleet.placement.rebalancing import REBALANCE, Rebalancing, has_room
from penstock_client.fleet.placement.roles import (
    PREFILL_TOKENS,
    Roles,
    suits_decode,
    wants_to_leave,
)
from penstock_client.fleet.poison_requests import POISON_DEATHS, RefusedRequests
from penstock_client.fleet.shard_state import ShardState, serving
from penstock_client.load_balancing.base import Policy
from penstock_client.rpc.generation_stream import GenerationStream
from penstock_client.rpc.shard_client import new_request_id
from penstock_common.clock import Clock
from penstock_common.tasks import run_lasting
from penstock_common.tracing.spans import SpanContext
from penstock_proto.errors import (
    DeadlineExceeded,
    InvalidRequest,
    NoShardAvailable,
    NotServed,
    Overloaded,
    PenstockError,
    ShardFailed,
    ShardUnavailable,
    Unauthenticated,
    cause_of,
)
from penstock_proto.features import Asked
from penstock_proto.limits import TRIAL_TOKENS
from penstock_proto.types import (
    Attempt,
    AttemptRecord,
    GenerationRequest,
    Output,
    PixelSource,
    random_seed,
)

# After sending for this long, give the event loop a turn.
_TURN_S = 0.0005
# In this many first attempts a shard without free KV blocks may hand the request back; in later
# ones the request waits there.
_HAND_BACK_ATTEMPTS = 2
_CLOSED = "the fleet was closed"

# Called with an event and its reason, for metrics: "sent" (why this shard), "continued" (why the
# last shard failed), "moved", "approximate", "given_up", "refused".
Observe = Callable[[str, str], None]
# Called with the stream of every request that has ended, however it did.
Ended = Callable[[FleetStream], None]


@dataclass(frozen=True, slots=True)
class Patience:
    """Limits of how long, and how often, a request is tried.

    It fails after `wait_s` without a shard that can take it, or after `attempts` in a row that gave
    no token. When engines died of a request, its like is refused for `refuse_s`.
    """

    wait_s: float = 60.0
    attempts: int = 16
    refuse_s: float = 600.0


class Continuations:
    """Sends a fleet's requests to shards, and on to other shards.

    A stream runs on a shard, waits for one, or has ended.
    """

    def __init__(
        self,
        shards: Mapping[str, ShardState],
        policy: Policy,
        patience: Patience,
        observe: Observe,
        ended: Ended,
        *,
        prefill_tokens: int = PREFILL_TOKENS,
        traces_attempts: bool = False,
        clock: Clock = time.monotonic,
    ) -> None:
        self._shards = shards
        self._policy = policy
        self._roles = Roles(prefill_tokens)
        self._patience = patience
        self._observe = observe
        self._ended = ended
        self._traces_attempts = traces_attempts
        self._clock = clock
        self._refused = RefusedRequests(patience.refuse_s)
        # Sets in the order in which streams came: who has waited longest is sent first.
        self._running: dict[str, dict[FleetStream, None]] = {}
        # The running streams that are suspects: each is tried alone.
        self._suspects: set[FleetStream] = set()
        self._waiting: dict[FleetStream, None] = {}
        # Those to send, or to move, in the next turns of the event loop.
        self._due: OrderedDict[FleetStream, None] = OrderedDict()
        self._sender: asyncio.Task[None] | None = None
        self._moves = Moves(self._plan_move, self._put_due, clock)
        self._rebalancing = Rebalancing(shards, self._on, self._put_due)
        self._images = ImagePuts(self._put_due, self._on_failed_put)
        self._closed = False

    def start(
        self,
        request: GenerationRequest,
        pixels: PixelSource | None = None,
        deadline_s: float | None = None,
    ) -> FleetStream:
        """Send a request to the shard that the policy chooses, or let it wait. `pixels` gives its
        images' pixels. `deadline_s` replaces the request's. Raises what `Fleet.submit` raises.
        """
        if self._closed:
            raise ShardUnavailable(_CLOSED)
        if request.sampling.seed is None:
            sampling = dataclasses.replace(request.sampling, seed=random_seed())
            request = dataclasses.replace(request, sampling=sampling)
        limit_s = request.objective.deadline_s if deadline_s is None else deadline_s
        stream = FleetStream(
            *(new_request_id(), -1, len(request.output_token_ids), self._on_cancel),
            request=request,
            _on_arrival=self._on_output,
            _on_failure=self._on_failure,
            deadline_s=None if limit_s is None else self._clock() + limit_s,
            pixels=pixels,
        )
        if not self._send(stream):
            checks.check_known(self._shards, request)
            self._wait(stream)
        return stream

    def num_running(self, shard: ShardState) -> int:
        """The number of streams that run on a shard."""
        return len(self._on(shard))

    def close(self) -> None:
        """Send nothing more; fail the streams that wait for a shard."""
        self._closed = True
        self._due.clear()
        self._moves.close()
        self._rebalancing.close()
        self._images.close()
        for stream in list(self._waiting):
            self._end(stream, ShardUnavailable(_CLOSED))

    def on_shard_change(self, shard: ShardState) -> None:
        """A shard became ready or unready, or wants to hand its requests over to others."""
        if shard.ready:
            self._put_due(self._waiting)
        for left in self._shards.values() if shard.ready else [shard]:
            self._put_due(stream for stream in self._on(left) if self._why_to_move(stream))

    # ---- called by streams ----

    def _on_output(self, stream: FleetStream, output: Output) -> None:
        """A shard gave something."""
        if stream.made_by is not stream.info or stream.waited_s:
            self._note_progress(stream, output)
        if stream.engine_deaths and len(stream.token_ids) - stream.taken_up_at >= TRIAL_TOKENS:
            self._clear(stream)
        if output.cached_tokens is not None and stream.shard is not None:
            stream.attempts[-1].cached_tokens = output.cached_tokens
        if stream.ended:
            self._forget(stream)
            self._ended(stream)
        else:
            self._moves.on_output(stream)

    def _note_progress(self, stream: FleetStream, output: Output) -> None:
        """The first outputs of an attempt; tokens that were known before it are already cut off."""
        if stream.shard is None or stream.info is None:
            return
        stream.shard.breaker.record_success()
        if stream.attempts[-1].first_output_s is None:
            stream.attempts[-1].first_output_s = time.perf_counter()
            if wants_to_leave(stream):
                self._put_due([stream])
        if not output.token_ids and output.prompt_logprobs is None:
            return
        stream.attempts_in_vain = 0
        stream.back_off.reset()
        stream.waited_s = 0.0
        stream.avoided.clear()
        if stream.made_by is not None and not same_numerics(stream.made_by, stream.info):
            stream.approximate = True
            self._observe("approximate", "numerics")
        stream.made_by = stream.info
        stream.begun_by = stream.begun_by or stream.info
        if stream.info.numerics_fingerprint not in stream.fingerprints:
            stream.fingerprints.append(stream.info.numerics_fingerprint)

    def _clear(self, stream: FleetStream) -> None:
        """A suspect got past where engines died, and is one no more: another may be tried now."""
        stream.engine_deaths = 0
        if stream in self._suspects:
            self._suspects.discard(stream)
            self._put_due([other for other in self._waiting if other.is_suspect])

    def _on_failure(self, stream: FleetStream, error: PenstockError) -> None:
        """A shard dropped the request: it goes on, or ends."""
        shard = stream.shard
        if stream.info is not None:
            if isinstance(error, InvalidRequest) and error.field == PIXELS:
                self._images.forget(stream, stream.info.instance_id)
            else:
                stream.avoided.add(stream.info.instance_id)
        self._leave(stream, cause_of(error))
        stream.last_error = error
        if isinstance(error, Overloaded):
            # A full shard is no failed attempt: the time in its queue counts as waiting.
            stream.waited_s += self._clock() - stream.waiting_since_s
        else:
            stream.attempts_in_vain += 1
        final = self._verdict(stream, shard, error)
        if final is not None:
            self._end(stream, final)
            return
        self._observe("continued", cause_of(error))
        self._wait(stream)
        self._put_due([stream])

    def _on_failed_put(self, stream: FleetStream, shard: ShardState, error: PenstockError) -> None:
        """The images of a stream cannot be put where it was to go."""
        if stream.shard is not None:
            # It runs elsewhere, and goes on there.
            return
        stream.info = shard.info
        self._on_failure(stream, error)

    def _on_cancel(self, stream: GenerationStream) -> None:
        """The reader left, or an output had a gap: abort the request at its shard."""
        assert isinstance(stream, FleetStream)
        if stream.shard is not None:
            stream.shard.client.detach(stream)
        self._forget(stream)
        if stream.ended:
            self._ended(stream)

    def _verdict(
        self, stream: FleetStream, shard: ShardState | None, error: PenstockError
    ) -> PenstockError | None:
        """The error to end with; None to try again."""
        if self._closed:
            return error
        if isinstance(error, ShardUnavailable):
            stream.was_dropped = True
            if shard is not None:
                shard.breaker.record_failure(self._clock())
            if error.engine_died:
                stream.engine_deaths += 1
                if stream.engine_deaths >= POISON_DEATHS:
                    self._observe("refused", "poison")
                    return self._refused.add(stream.kind, self._clock())
        elif isinstance(error, Overloaded | NotServed | Unauthenticated | InvalidRequest):
            # Another shard may take it. A request that some shard had taken is valid, so this one
            # has other limits: such a request also waits. Any other is tried only at shards that
            # fit now, and not at all when invalid.
            taken = stream.was_dropped or stream.made_by is not None
            # But an adapter that was just unloaded here may be loaded elsewhere.
            # Nor do dropped pixels make a request invalid.
            wrong = isinstance(error, InvalidRequest) and error.field not in ("adapter", PIXELS)
            if not taken and (wrong or not self.fitting(stream)):
                return error
        else:
            return error
        if stream.attempts_in_vain >= self._patience.attempts:
            self._observe("given_up", "attempts")
            return given_up(error)
        made_by = stream.made_by
        if stream.request.exact and made_by is not None and not made_by.numerics_fingerprint:
            self._observe("given_up", "not_exact")
            return error
        return None

    # ---- choosing ----

    def _choose(self, stream: FleetStream, among: Sequence[ShardState]) -> Plan:
        """The policy's choice among these shards, of which there is one at least."""
        request, source = stream.request, self._kv_source(stream)
        suited = self._roles.prefer(
            stream,
            among,
            source,
            lambda shard: self._policy.held_tokens(shard.candidate(), request),
        )
        candidates = [shard.candidate(request.priority) for shard in suited]
        decision = self._policy.choose(candidates, request, request.session)
        reason = "pinned" if request.shard else decision.reason
        source = source or decision.kv_source
        source = "" if source == decision.address else source
        return Plan(self._shards[decision.address], reason, source, decision.held_tokens)

    def _kv_source(self, stream: FleetStream) -> str:
        """The shard where it ran last and has KV blocks, if that can still be asked for them."""
        last = self._shards.get(stream.attempts[-1].shard) if stream.attempts else None
        return last.address if last is not None and (last.ready or last.handing_over) else ""

    def fitting(self, stream: FleetStream) -> list[ShardState]:
        """List the shards that may take a request now, with its output so far."""
        now_s, request = self._clock(), stream.request
        shards = serving(self._shards.values(), request.model, request.tokenizer_hash)
        asked = Asked(request, has_output=bool(stream.token_ids))
        return [shard for shard in shards if self._fits(stream, asked, shard, now_s)]

    def _fits(self, stream: FleetStream, asked: Asked, shard: ShardState, now_s: float) -> bool:
        """Tell whether the request may go to this shard, which serves its model, now."""
        request, info = stream.request, shard.info
        assert info is not None  # it serves the model
        if request.shard and request.shard != shard.address:
            return False
        if request.numerics and request.numerics != info.numerics_fingerprint:
            return False
        if asked.unserved_by(info) is not None:
            return False
        if not info.has_adapter(request.adapter, stream.adapter_hash):
            return False
        if info.instance_id in stream.avoided or not shard.breaker.allows(now_s):
            return False
        if stream.is_suspect and any(
            other.shard is shard or other.kind == stream.kind for other in self._suspects
        ):
            return False
        made_by = stream.made_by
        if made_by is None:
            return True
        return same_model(made_by, info) and (not request.exact or same_numerics(made_by, info))

    def _on(self, shard: ShardState) -> Collection[FleetStream]:
        return self._running.get(shard.address, ())

    # ---- sending ----

    def _send(self, stream: FleetStream) -> bool:
        """Send to the shard that the policy chooses; False if none fits, or if it waits for images.

        Raises `PoisonousRequest`, and what `ShardClient.attach` raises.
        """
        self._refused.check(stream.request, self._clock())
        fitting = self.fitting(stream)
        if not fitting:
            return False
        target = self._images.target(stream)
        plan = self._choose(stream, [target] if target in fitting else fitting)
        if stream.request.images and self._images.hold(stream, plan.shard):
            return False
        self._send_to(stream, plan)
        return True

    def _send_waiting(self, stream: FleetStream) -> None:
        """Do as `_send` does; raise an error if waiting longer is pointless."""
        if self._send(stream):
            return
        if stream.attempt < 0:
            # Never sent: the caller loses nothing by tokenizing anew. One that was sent waits: its
            # shard may restart, or another of the same kind join.
            checks.check_tokenizer(self._shards, stream.request)
        checks.check_adapter(self._shards, stream.request, stream.adapter_hash)

    def _send_to(self, stream: FleetStream, plan: Plan) -> None:
        shard, info = plan.shard, plan.shard.info
        assert info is not None  # it fits
        now_s = self._clock()
        self._observe("sent", plan.reason)
        record = AttemptRecord(shard.address, plan.reason, time.perf_counter())
        request, traceparent = stream.request_now(), ""
        if request.adapter and not request.adapter_hash:
            # The shard was chosen for the adapter it has under this name; with its hash in the
            # request, the shard refuses if it has another by then.
            content = info.adapter_hash(request.adapter)
            request = dataclasses.replace(request, adapter_hash=content)
        context = SpanContext.parse(request.traceparent) if self._traces_attempts else None
        if context is not None:
            context = context.child()
            record.span_id = context.span_id
            traceparent = context.traceparent
        stream.attempt += 1
        attempt = Attempt(
            number=stream.attempt,
            instance_id=info.instance_id,
            hand_back=stream.attempt < _HAND_BACK_ATTEMPTS
            and self._has_room_elsewhere(shard, request.adapter),
            suspect=stream.is_suspect,
            kv_source=plan.kv_source,
            left_s=stream.left_s(now_s),
            traceparent=traceparent,
        )
        shard.client.attach(stream, request, attempt)
        record.num_tokens = len(request.prompt_token_ids) + len(request.output_token_ids)
        record.kv_source = plan.kv_source
        shard.record_sent(max(0, record.num_tokens - plan.held_tokens), now_s, request.priority)
        self._stop_waiting(stream)
        self._images.discard(stream)
        stream.waiting_since_s = now_s
        stream.shard, stream.info = shard, info
        stream.attempts.append(record)
        stream.taken_up_at = len(stream.token_ids)
        self._running.setdefault(shard.address, {})[stream] = None
        if stream.is_suspect:
            self._suspects.add(stream)

    def _has_room_elsewhere(self, shard: ShardState, adapter: str) -> bool:
        """Tell whether another shard has free KV blocks and would give the same tokens."""
        info = shard.info
        return info is not None and any(
            other is not shard
            and other.ready
            and other.info is not None
            and not other.half_full
            and same_numerics(info, other.info)
            and same_adapter(info, other.info, adapter)
            for other in self._shards.values()
        )

    def _plan_move(self, stream: FleetStream, target: ShardState | None = None) -> Plan | None:
        """Plan where to move a stream from its shard, to `target` if it fits: to one that gives the
        same tokens; None if none does.
        """
        made_by = stream.made_by
        others = [
            shard
            for shard in self.fitting(stream)
            if shard is not stream.shard
            and (made_by is None or (shard.info and same_numerics(made_by, shard.info)))
        ]
        why, left = self._why_to_move(stream), stream.shard
        if why == "role":
            others = [shard for shard in others if suits_decode(shard)]
        elif why == REBALANCE and left is not None:
            others = [shard for shard in others if has_room(shard, left)]
        if not others:
            return None
        return self._choose(stream, [target] if target in others else others)

    def _why_to_move(self, stream: FleetStream) -> str:
        """Say why a running stream should go on at another shard; empty if it should not."""
        if stream.shard is not None and stream.shard.handing_over:
            return "drain"
        if wants_to_leave(stream):
            return "role"
        return REBALANCE if self._rebalancing.is_chosen(stream) else ""

    def _move(self, stream: FleetStream, left: ShardState, why: str) -> None:
        """Move a stream from a shard that drains, that has computed its prompt, or where it waits,
        once its KV blocks are where it goes.
        """
        target = self._moves.target(stream)
        plan = self._plan_move(stream, target)
        if plan is None:
            self._rebalancing.discard(stream)
            return
        if stream.request.images and self._images.hold(stream, plan.shard):
            return
        has_begun = why != REBALANCE or stream.attempts[-1].first_output_s is not None
        if has_begun and self._moves.hold(stream, plan):
            return
        if why == "role" and plan.shard is not target:
            # Without them it is better off here.
            return
        left.client.detach(stream)
        self._leave(stream, why)
        self._observe("moved", why)
        self._send_to(stream, plan)

    def _put_due(self, streams: Iterable[FleetStream]) -> None:
        """Have the streams sent, or moved, in the next turns of the event loop."""
        self._due.update(dict.fromkeys(streams))
        if self._sender is None or self._sender.done():
            sending = run_lasting(self._send_all_due, "sending a request on", pause_s=0.0)
            self._sender = asyncio.get_running_loop().create_task(sending)

    async def _send_all_due(self) -> None:
        turn_ends_s = self._clock() + _TURN_S
        while self._due:
            stream, _ = self._due.popitem(last=False)
            try:
                if stream in self._waiting:
                    self._send_waiting(stream)
                elif stream.shard is not None and (why := self._why_to_move(stream)):
                    self._move(stream, stream.shard, why)
            except PenstockError as error:
                self._end(stream, error)
            except Exception as error:  # a defect ends the request that it shows on
                self._end(stream, ShardFailed(f"it cannot be sent on: {type(error).__name__}"))
                raise
            if self._clock() >= turn_ends_s:
                await asyncio.sleep(0)
                turn_ends_s = self._clock() + _TURN_S

    # ---- waiting ----

    def _wait(self, stream: FleetStream) -> None:
        """Let the stream wait until a shard changes, or until its back-off ends; not if none of
        those that may come goes on with it.
        """
        self._stop_waiting(stream)
        if stream.token_ids and (error := checks.goes_on_nowhere(self._shards, stream.request)):
            self._observe("given_up", "not_served")
            self._end(stream, error)
            return
        self._waiting[stream] = None
        stream.waiting_since_s = self._clock()
        delay_s = max(0.0, min(stream.back_off.wait_s, self._patience_left_s(stream)))
        stream.timer = asyncio.get_running_loop().call_later(delay_s, self._waited, stream)

    def _patience_left_s(self, stream: FleetStream) -> float:
        left_s = self._patience.wait_s - stream.waited_s
        if stream.deadline_s is not None:
            left_s = min(left_s, stream.deadline_s - self._clock())
        return left_s

    def _waited(self, stream: FleetStream) -> None:
        self._stop_waiting(stream)
        if self._patience_left_s(stream) <= 0:
            self._observe("given_up", "no_shard")
            self._end(stream, self._last_words(stream))
            return
        # After the back-off, shards that failed it may be tried again.
        stream.avoided.clear()
        stream.back_off.lengthen()
        self._wait(stream)
        self._put_due([stream])

    def _stop_waiting(self, stream: FleetStream) -> None:
        if stream in self._waiting:
            del self._waiting[stream]
            stream.waited_s += self._clock() - stream.waiting_since_s
        if stream.timer is not None:
            stream.timer.cancel()
            stream.timer = None

    def _last_words(self, stream: FleetStream) -> PenstockError:
        if stream.deadline_s is not None and self._clock() >= stream.deadline_s:
            return DeadlineExceeded("the request's deadline passed while it waited for a shard")
        asked = Asked(stream.request, has_output=bool(stream.token_ids))
        problems = "; ".join(
            f"{shard.address}: {shard.problem or checks.misfit(shard, asked)}"
            for shard in self._shards.values()
        )
        after = "" if stream.last_error is None else f", after: {stream.last_error}"
        return NoShardAvailable(
            f"no shard could take the request in {self._patience.wait_s:g} s ({problems}){after}"
        )

    # ---- ending ----

    def _end(self, stream: FleetStream, error: PenstockError) -> None:
        self._forget(stream)
        stream.end(error)
        self._ended(stream)

    def _leave(self, stream: FleetStream, because: str = "") -> None:
        """The stream runs on no shard any more."""
        shard, stream.info = stream.shard, None
        if shard is None:
            return
        self._moves.discard(stream)
        self._rebalancing.discard(stream)
        stream.attempts[-1].ended_s = time.perf_counter()
        stream.attempts[-1].ended_because = because
        running = self._running[shard.address]
        del running[stream]
        if not running:
            del self._running[shard.address]
        self._suspects.discard(stream)
        stream.shard = None

    def _forget(self, stream: FleetStream) -> None:
        self._stop_waiting(stream)
        self._images.discard(stream)
        self._leave(stream)
