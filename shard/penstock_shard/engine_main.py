"""The engine process: loads a runner, then runs the engine between an inbox and an outbox.

Started by `engine_supervisor` with one end of a socket pair. It never sees TCP, and it ends itself
when the server is gone. Three threads: this one steps, one receives, one beats.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import logging
import os
import queue
import signal
import socket
import sys
import threading
import time
from array import array
from collections.abc import Callable
from typing import NoReturn

from penstock_proto.logs import set_up_logging
from penstock_shard.config import ShardConfig
from penstock_shard.constraints.compiler import Compiler, TokenizerUnusable
from penstock_shard.constraints.matchers import PendingMatchers
from penstock_shard.engine import Engine
from penstock_shard.engine_adapters import NO_ADAPTER, EngineAdapters, PlacedAdapter
from penstock_shard.kv_blocks import BlockManager
from penstock_shard.link import (
    Beat,
    EngineEnd,
    Inbox,
    Load,
    LoadFailed,
    Progress,
    Ready,
    Start,
    Started,
    StepOutputs,
    Submit,
)
from penstock_shard.loading import LoadedRunner, ModelError, load_runner
from penstock_shard.prompt_lookup import Drafter
from penstock_shard.request import CONSTRAINT_KINDS, NO_OBJECTIVE, Request
from penstock_shard.scheduler import Scheduler, SchedulerLimits
from penstock_shard.tokenizer_files import tokenizer_hash

logger = logging.getLogger(__name__)

_BEAT_S = 0.25
_SWITCH_S = 0.0005
# A beat that is later than this means that the whole process was held up, its step included.
_LATEST_BEAT_S = 1.0


def run() -> NoReturn:
    """Run `main`, then end the process at once. Otherwise Python would wait for the threads that
    read adapters, while the beats go on and tell the server that the engine lives.
    """
    status = 1
    try:
        status = main()
    finally:
        if sys.exc_info()[0] is not None:
            logger.critical("the engine cannot go on", exc_info=True)
        logging.shutdown()
        os._exit(status)


def main() -> int:
    """Run until the server is gone; the exit status. The only argument is a socket's descriptor."""
    # Service managers signal all processes at once; the server drains, and decides when we end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # The thread that steps waits no longer than this for the interpreter lock, say while another
    # compiles a schema.
    sys.setswitchinterval(_SWITCH_S)
    link = EngineEnd(socket.socket(fileno=int(sys.argv[1])))
    start = link.receive()
    if not isinstance(start, Start):
        return 0
    set_up_logging(start.config.log_format, start.config.log_level)
    inbox: queue.SimpleQueue[Inbox] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(link, inbox), daemon=True).start()
    try:
        loaded = load_runner(start.config, lambda text: link.send(Progress(text)))
    except ModelError as error:
        link.send(LoadFailed(str(error)))
        return 1
    adapters = EngineAdapters(
        loaded.runner.adapters, start.config.max_loras, lambda: inbox.put(Inbox([], []))
    )
    try:
        _load_adapters(link, start, adapters)
    except ModelError as error:
        link.send(LoadFailed(f"--lora {error}"))
        return 1
    info = loaded.runner.info
    if loaded.runner.adapters is not None:
        capabilities = info.capabilities | {"adapter"}
        info = dataclasses.replace(info, capabilities=capabilities, adapters=adapters.loaded)
    matchers = _matchers(loaded, start.config, lambda: inbox.put(Inbox([], [])))
    if matchers is None:
        capabilities = info.capabilities - CONSTRAINT_KINDS
        info = dataclasses.replace(info, capabilities=capabilities)
    engine = _build_engine(loaded, start.config, lambda ids: link.send(Started(ids)), matchers)
    threading.Thread(target=_beat, args=(link, engine), daemon=True).start()
    # All objects so far live as long as the process: keep the garbage collector from walking them.
    gc.collect()
    gc.freeze()
    files = loaded.tokenizer_files
    # The server may be gone at any time; then there is nobody to report to.
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        link.send(Ready(info, files, tokenizer_hash(files), loaded.revision))
        checks = start.config.check_integrity
        return _run_or_say(link, engine, inbox, adapters, checks=checks)
    return 0


def _load_adapters(link: EngineEnd, start: Start, adapters: EngineAdapters) -> None:
    """Load the configured adapters, or after a restart those of the engine before. Raises
    ModelError.
    """
    for name, source in start.config.loras if start.adapters is None else start.adapters:
        try:
            adapters.load(name, source)
        except ModelError as error:
            if start.adapters is None:
                raise ModelError(f"{name}: {error}") from error
            link.send(Progress(f"adapter {name} is left out: {error}"))
    for adapter in adapters.loaded:
        link.send(Progress(f"adapter {adapter.name}: rank {adapter.rank}"))


def _matchers(
    loaded: LoadedRunner, config: ShardConfig, on_done: Callable[[], None]
) -> PendingMatchers | None:
    """None if the model's tokenizer is of a kind that constraints do not support."""
    info = loaded.runner.info
    try:
        compiler = Compiler(
            loaded.tokenizer_files["tokenizer.json"],
            info.vocab_size,
            info.eos_token_ids,
            config.constraint_limits,
        )
    except TokenizerUnusable as error:
        logger.warning("outputs cannot be constrained: %s", error)
        return None
    return PendingMatchers(compiler, on_done, config.constraint_threads)


def _build_engine(
    loaded: LoadedRunner,
    config: ShardConfig,
    tell_started: Callable[[list[str]], None],
    matchers: PendingMatchers | None = None,
) -> Engine:
    info = loaded.runner.info
    blocks = BlockManager(
        info.num_blocks,
        info.block_size,
        weights_hash=info.weights_hash,
        enable_prefix_caching=config.enable_prefix_caching,
    )
    limits = SchedulerLimits(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.batched_tokens(info.device),
        max_prefill_tokens=config.prefill_tokens(info.device),
        aging_s=config.aging_s,
    )
    drafter = Drafter(config.speculative_tokens) if config.speculative_tokens else None
    return Engine(
        loaded.runner,
        Scheduler(limits, blocks, drafter),
        blocks,
        tell_started=tell_started,
        matchers=matchers,
    )


def _run_or_say(
    link: EngineEnd,
    engine: Engine,
    inbox: queue.SimpleQueue[Inbox],
    adapters: EngineAdapters,
    *,
    checks: bool = False,
) -> int:
    """`_run`; if the model fails for good, the last line of the log is its error."""
    try:
        _run(link, engine, inbox, adapters, checks=checks)
    except ModelError as error:
        logger.critical("%s", error)
        return 1


def _run(
    link: EngineEnd,
    engine: Engine,
    inbox: queue.SimpleQueue[Inbox],
    adapters: EngineAdapters,
    *,
    checks: bool = False,
) -> NoReturn:
    """Step for ever. With `checks`, the records are checked whenever the last request has ended."""
    sent = Load()
    while True:
        is_idle = not engine.has_work
        if is_idle and checks:
            engine.check_integrity()
        _take_inbox(engine, inbox, adapters, wait=is_idle)
        for answer in adapters.settle(engine.adapter_indices):
            link.send(answer)
        outputs = engine.step()
        load = engine.load()
        if outputs or load != sent:
            link.send(StepOutputs(outputs, load))
            sent = load


def _take_inbox(
    engine: Engine, inbox: queue.SimpleQueue[Inbox], adapters: EngineAdapters, *, wait: bool
) -> None:
    """Handle all messages in the inbox; with `wait`, wait for one first."""
    try:
        while True:
            message = inbox.get(block=wait)
            wait = False
            for submit in message.submits:
                engine.submit(_request(submit, adapters.find(submit.adapter)))
            for request_id, attempt in message.aborts:
                engine.abort(request_id, attempt)
            for change in message.adapter_changes:
                adapters.change(change)
    except queue.Empty:
        return


def _request(submit: Submit, placed: PlacedAdapter = NO_ADAPTER) -> Request:
    prompt = array("I", submit.prompt)
    output = array("I", submit.output)
    return Request(
        request_id=submit.request_id,
        attempt=submit.attempt,
        token_ids=prompt.tolist() + output.tolist(),
        num_prompt_tokens=len(prompt),
        num_delivered=len(output),
        sampling=submit.sampling,
        max_tokens=submit.max_tokens,
        stop_token_ids=frozenset(submit.stop_token_ids),
        min_tokens=submit.min_tokens,
        logprobs=submit.logprobs,
        prompt_logprobs=submit.prompt_logprobs,
        logprob_token_ids=submit.logprob_token_ids,
        cache_salt=submit.cache_salt,
        adapter=placed.adapter.content_hash,
        adapter_index=placed.index,
        pooling=submit.pooling,
        constraint=submit.constraint,
        reluctant_stop_ids=frozenset(submit.reluctant_stop_ids),
        thinking_budget=submit.thinking_budget,
        # Decoding makes a new object, but the scheduler compares with `NO_OBJECTIVE` by identity.
        hand_back=submit.hand_back,
        objective=NO_OBJECTIVE if submit.objective == NO_OBJECTIVE else submit.objective,
    )


def _receive(link: EngineEnd, inbox: queue.SimpleQueue[Inbox]) -> None:
    """Queue what the server sends; the server bounds the number of live requests."""
    while isinstance(message := link.receive(), Inbox):
        inbox.put(message)
    # The server is gone or a message was invalid: flush the log, and drop the step in progress, as
    # nobody waits for its outputs.
    logging.shutdown()
    os._exit(0)


def _beat(link: EngineEnd, engine: Engine) -> None:
    """Send beats from a thread outside the step, so that a long step does not look like a hang."""
    step_s, stopped_s, late_s = None, 0.0, 0.0
    while True:
        started_s = engine.step_started_s
        # Time for which this process was stopped does not count as running time of the step.
        stopped_s = stopped_s + late_s if started_s == step_s else late_s
        step_s = started_s
        running_s = 0.0 if started_s is None else time.monotonic() - started_s - stopped_s
        try:
            link.send(Beat(max(0.0, running_s), engine.step_expected_s))
        except OSError:
            return
        slept_at_s = time.monotonic()
        time.sleep(_BEAT_S)
        late_s = max(0.0, time.monotonic() - slept_at_s - _LATEST_BEAT_S)


if __name__ == "__main__":
    run()
