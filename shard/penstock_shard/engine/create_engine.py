"""Makes an engine from its parts."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from penstock_common.clock import Clock
from penstock_shard.config import ShardConfig
from penstock_shard.engine.block_moves import BlockMoves
from penstock_shard.engine.engine import Engine
from penstock_shard.engine.matchers import PendingMatchers
from penstock_shard.engine.pending_fetches import PendingFetches
from penstock_shard.engine.pending_images import PendingImages
from penstock_shard.engine.pending_reads import PendingReads
from penstock_shard.ipc.messages import FromBlocks
from penstock_shard.kv_cache.block_manager import BlockManager
from penstock_shard.kv_transfer.arena import Arena
from penstock_shard.kv_transfer.disk_tier import DiskTier
from penstock_shard.kv_transfer.exports import Exports
from penstock_shard.kv_transfer.fetches import Fetches
from penstock_shard.kv_transfer.host_tier import HostTier
from penstock_shard.kv_transfer.import_checks import ImportChecks
from penstock_shard.model_loader.load_runner import LoadedRunner
from penstock_shard.scheduler.priority_policy import PriorityPolicy
from penstock_shard.scheduler.scheduler import Scheduler
from penstock_shard.scheduler.slow_masks import SlowMasks
from penstock_shard.scheduler.speculation import Speculation
from penstock_shard.scheduler.step_budget import SchedulerLimits
from penstock_shard.scheduler.step_time import StepTime
from penstock_shard.spec_decode.prompt_lookup import Drafter
from penstock_shard.structured_output.compiler import Compiler, TokenizerUnusable
from penstock_shard.structured_output.following import compiling_threads
from penstock_shard.worker.base import Runner

logger = logging.getLogger(__name__)

# Bytes to read from disk in a turn.
_READ_BYTES = 32 * 2**20


def create_engine(
    loaded: LoadedRunner,
    config: ShardConfig,
    tell_started: Callable[[list[str]], None],
    matchers: PendingMatchers | None = None,
    arena: Arena | None = None,
    disk: DiskTier | None = None,
    send: Callable[[FromBlocks], None] | None = None,
) -> Engine:
    """Make the engine of a loaded runner. `arena` holds copies of blocks; `disk` holds copies of
    the arena's. `send` sends messages about other shards' blocks to the server.
    """
    info = loaded.runner.info
    max_tokens = config.batched_tokens(info.device)
    blocks = BlockManager.of(
        info,
        max_tokens,
        enable_prefix_caching=config.enable_prefix_caching,
        host_slots=() if arena is None else arena.num_slots,
        retained_share=config.retained_kv_share,
    )
    limits = SchedulerLimits(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=max_tokens,
        max_prefill_tokens=config.prefill_tokens(info.device),
        max_scored_tokens=info.max_scored_tokens,
        prompts_first=config.role == "prefill",
    )
    drafter = Drafter(config.speculative_tokens) if config.speculative_tokens else None
    masks = None
    if matchers is not None:
        masks = SlowMasks(info.vocab_size, matchers.on_done, compiling_threads(1))
    scheduler = create_scheduler(limits, blocks, drafter, aging_s=config.aging_s, masks=masks)
    moves = None
    if arena is not None:
        moves = create_moves(arena, loaded.runner, scheduler, blocks, disk, send)
    encoder = loaded.runner.images
    return Engine(
        loaded.runner,
        scheduler,
        blocks,
        tell_started=tell_started,
        matchers=matchers,
        moves=moves,
        images=None if encoder is None else PendingImages(encoder, blocks),
    )


def create_moves(
    arena: Arena,
    runner: Runner,
    scheduler: Scheduler,
    blocks: BlockManager,
    disk: DiskTier | None = None,
    send: Callable[[FromBlocks], None] | None = None,
    clock: Clock = time.monotonic,
) -> BlockMoves:
    """Make `BlockMoves` for copies in host memory. `disk` adds copies on disk, and `send` those at
    other shards. Restores the copies that an earlier engine left in `arena`.
    """
    tier = HostTier(arena, blocks.prefixes, runner, disk)
    restored = tier.restore()
    if restored:
        logger.info("%d KV blocks of the engine before are found in host memory", restored)
    moves = BlockMoves(tier, scheduler, blocks, clock)
    if disk is not None:
        blocks.prefixes.held.disk = disk
        most = max(1, _READ_BYTES // max(1, *runner.info.block_bytes))
        moves.reads = PendingReads(disk, tier, blocks, scheduler.compute_s, most_blocks=most)
    if send is not None:
        prefixes, size = blocks.prefixes, blocks.block_size
        moves.exports = Exports(prefixes, size, send)
        tier.checks = ImportChecks(arena, prefixes, moves.distrust)
        fetches = Fetches(arena, prefixes, size, send, tier.checks)
        moves.fetches = PendingFetches(fetches, blocks, scheduler.compute_s, send)
        moves.send = send
        fetches.give_slots()
    return moves


def create_scheduler(
    limits: SchedulerLimits,
    blocks: BlockManager,
    drafter: Drafter | None = None,
    *,
    aging_s: float = 30.0,
    masks: SlowMasks | None = None,
) -> Scheduler:
    """Make a scheduler that aims for requests' objectives. With `masks`, no step waits for slow
    constraints.
    """
    step_time = StepTime()
    policy = PriorityPolicy(blocks, step_time, aging_s)
    speculation = None
    if drafter is not None:
        speculation = Speculation(drafter, blocks, limits.max_num_seqs)
    return Scheduler(limits, blocks, step_time, policy, speculation, masks)


def create_matchers(
    loaded: LoadedRunner, config: ShardConfig, on_done: Callable[[], None]
) -> PendingMatchers | None:
    """Make the matchers of constraints; None if the model's tokenizer is not supported."""
    info = loaded.runner.info
    try:
        compiler = Compiler(
            loaded.tokenizer_files["tokenizer.json"],
            info.vocab_size,
            info.eos_token_ids,
            config.constraint_limits,
        )
        # Build the vocabulary before any step waits for it.
        _ = compiler.vocabulary
    except TokenizerUnusable as error:
        logger.warning("outputs cannot be constrained: %s", error)
        return None
    return PendingMatchers(compiler, on_done, compiling_threads(config.constraint_threads))
