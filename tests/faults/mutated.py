"""What is mutated, and which mutants nobody can notice, each with the reason."""

from __future__ import annotations

from faults.mutation import Mutant, Target

TARGETS = {
    "block manager": Target(("BlockManager",), ("test_kv_blocks",)),
    "fences": Target(
        ("Outbox", "_align_prompt", "EarlyAborts"),
        ("test_fencing", "test_stream", "test_servicer"),
        (
            "EarlyAborts.",
            "GenerationStream.",
            "Outbox.",
            "ShardServicer.Abort",
            "ShardServicer.Generate",
            "ShardServicer._check_engine",
            "ShardServicer._submit",
            "_close",
            "_namespace",
        ),
    ),
    "continuation": Target(("Continuations",), ("test_continuation", "test_suspects")),
    "scheduler": Target(
        ("Scheduler",),
        (
            "test_scheduler",
            "test_engine",
            "test_objectives",
            "test_speculation",
            "test_out_of_memory",
            "test_urgency",
        ),
    ),
}

_SHORTCUT = "a shortcut: without it, or where it is taken less often, there is nothing to do"
_FALSY = "as false as what it replaces"
_UNUSED = "nobody reads the value"

EQUIVALENT: dict[Mutant, str] = {
    Mutant(
        "BlockManager.cache_full_blocks",
        "if known < (request.num_cached_blocks + 1) * self.block_size:",
        "if known < (request.num_cached_blocks + 1) / self.block_size:",
    ): _SHORTCUT,
    Mutant(
        "BlockManager.cache_full_blocks",
        "if known < (request.num_cached_blocks + 1) * self.block_size:",
        "if known < (request.num_cached_blocks - 1) * self.block_size:",
    ): _SHORTCUT,
    Mutant(
        "BlockManager.release",
        "self._free[block_id] = None",
        "self._free[block_id] = ''",
    ): _UNUSED,
    Mutant(
        "BlockManager._take",
        "block_id, _ = self._free.popitem(last=False)",
        "block_id, _ = self._free.popitem(last=None)",
    ): _FALSY,
}
