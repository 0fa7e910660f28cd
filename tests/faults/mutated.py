"""The code that is mutated, and the mutants that no test can notice, each with the reason."""

from __future__ import annotations

from faults.mutation import Mutant, Target

TARGETS = {
    "block manager": Target(
        ("BlockManager", "PrefixCache", "BlockPool", "PrefixTree", "Boundaries"),
        ("test_kv_blocks", "test_cache_groups", "test_kept_states"),
    ),
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
        ("Scheduler", "FcfsPolicy", "PriorityPolicy", "StepBudget"),
        (
            "test_scheduler",
            "test_engine",
            "test_objectives",
            "test_speculation",
            "test_out_of_memory",
            "test_kept_states",
            "test_urgency",
            "test_step_budget",
            "test_scheduling_policy",
        ),
    ),
}

# Why a mutant changes nothing that anybody can see.
SHORTCUT = "a shortcut: without it, or where it is taken at other times, there is nothing to do"
FALSY = "as false, or as true, as what it replaces"
UNUSED = "the value is never looked at"
BELOW_ALL = "below every attempt, as what it replaces"
BOUNDARY = "another answer at one moment of a clock only"
ORDER = "only the order of these numbers counts"

EQUIVALENT: dict[Mutant, str] = {
    Mutant(function, old, new): reason
    for reason, mutants in {
        SHORTCUT: [
            (
                "Scheduler._decode_rows",
                "preemptions_before = self.preemptions_total",
                "preemptions_before = None",
            ),
            ("BlockManager.slide", "if first > blocks.first:", "if first >= blocks.first:"),
            ("_runs", "runs = [0]", "runs = [1]"),
            (
                "BlockManager.cache_full_blocks",
                "if count >= (table.num_cached + 1) * block_size:",
                "if count >= (table.num_cached + 1) / block_size:",
            ),
            (
                "BlockManager.cache_full_blocks",
                "if count >= (table.num_cached + 1) * block_size:",
                "if count >= (table.num_cached - 1) * block_size:",
            ),
            (
                "BlockManager.cache_full_blocks",
                "if sequence.num_computed < count:",
                "if sequence.num_computed <= count:",
            ),
            # None is waiting or running then that has an objective.
            ("PriorityPolicy.__init__", "self._num_objectives = 0", "self._num_objectives = 1"),
            (
                "PriorityPolicy.add",
                "self._num_objectives += sequence.request.objective is not None",
                "self._num_objectives -= sequence.request.objective is not None",
            ),
            (
                "PriorityPolicy.remove",
                "self._num_objectives -= sequence.request.objective is not None",
                "self._num_objectives += sequence.request.objective is not None",
            ),
            (
                "PriorityPolicy.bound",
                "time_s = self._time_s(decodes, starts_s) if self._num_objectives else UNBOUNDED_S",
                "time_s = self._time_s(decodes, starts_s) if self._num_objectives or True "
                "else UNBOUNDED_S",
            ),
            (
                "TimedBudget.most_prompt_tokens",
                "if self.aged_tokens > most and self.is_aged(sequence):",
                "if self.aged_tokens >= most and self.is_aged(sequence):",
            ),
            (
                "Scheduler.update",
                "if leaving and (not sequence.num_steps_in_flight):",
                "if leaving or not sequence.num_steps_in_flight:",
            ),
            (
                "Scheduler._admitted_rows",
                "if not free_seqs or not self._waiting:",
                "if not free_seqs and (not self._waiting):",
            ),
            # The hash that is put there is there already.
            (
                "Continuations._send_to",
                "if request.adapter and (not request.adapter_hash):",
                "if request.adapter or not request.adapter_hash:",
            ),
            ("GenerationStream._align", "if known > 0:", "if known >= 0:"),
            ("GenerationStream._align_prompt", "if known > 0:", "if known >= 0:"),
        ],
        FALSY: [
            (
                "BlockPool.take",
                "block_id, _ = self._free.popitem(last=False)",
                "block_id, _ = self._free.popitem(last=None)",
            ),
            (
                "Scheduler._preempt",
                "self._waiting.move_to_end(sequence, last=False)",
                "self._waiting.move_to_end(sequence, last=None)",
            ),
            ("Outbox.__init__", "self._closed = False", "self._closed = None"),
            ("Continuations.__init__", "self._closed = False", "self._closed = None"),
            (
                "Continuations._send_all_due",
                "stream, _ = self._due.popitem(last=False)",
                "stream, _ = self._due.popitem(last=None)",
            ),
            (
                "EarlyAborts.remember",
                "self._aborts.popitem(last=False)",
                "self._aborts.popitem(last=None)",
            ),
        ],
        UNUSED: [
            (
                "Scheduler.__init__",
                "self._turned_away = (-1, 0, 0)",
                "self._turned_away = (+1, 0, 0)",
            ),
            (
                "Scheduler.__init__",
                "self._turned_away = (-1, 0, 0)",
                "self._turned_away = (-2, 0, 0)",
            ),
            (
                "Scheduler.__init__",
                "self._turned_away = (-1, 0, 0)",
                "self._turned_away = (-1, 1, 0)",
            ),
            (
                "Scheduler.__init__",
                "self._turned_away = (-1, 0, 0)",
                "self._turned_away = (-1, 0, 1)",
            ),
            ("PriorityPolicy._urgency", "token_s = 0.0", "token_s = None"),
            ("PriorityPolicy._urgency", "token_s = 0.0", "token_s = 1.0"),
            ("BlockPool.release", "self._free[block_id] = None", "self._free[block_id] = ''"),
            (
                "BlockManager._share",
                "blocks.ids = [0] * blocks.first",
                "blocks.ids = [1] * blocks.first",
            ),
            (
                "PrefixTree.add",
                "num_blocks = 0 if parent is None else self._num_groups",
                "num_blocks = 0 if parent is None and False else self._num_groups",
            ),
            (
                "PrefixTree.add",
                "num_blocks = 0 if parent is None else self._num_groups",
                "num_blocks = 1 if parent is None else self._num_groups",
            ),
            ("Scheduler.lose", "parts[sequence] = None", "parts[sequence] = ''"),
            (
                "Continuations._send_to",
                "self._running.setdefault(shard.address, {})[stream] = None",
                "self._running.setdefault(shard.address, {})[stream] = ''",
            ),
            ("Continuations._wait", "self._waiting[stream] = None", "self._waiting[stream] = ''"),
            ("Scheduler._start", "self._running[sequence] = None", "self._running[sequence] = ''"),
            (
                "Outbox.__init__",
                "self.last_error: Error | None = None",
                "self.last_error: Error | None = ''",
            ),
            (
                "EarlyAborts.remember",
                "attempt = max(attempt, self._aborts.get(request_id, (0.0, -1))[1])",
                "attempt = max(attempt, self._aborts.get(request_id, (1.0, -1))[1])",
            ),
            (
                "EarlyAborts.include",
                "until_s, last_aborted = self._aborts.get(request_id, (0.0, -1))",
                "until_s, last_aborted = self._aborts.get(request_id, (1.0, -1))",
            ),
            (
                "EarlyAborts.include",
                "until_s, last_aborted = self._aborts.get(request_id, (0.0, -1))",
                "until_s, last_aborted = self._aborts.get(request_id, (0.0, +1))",
            ),
        ],
        BELOW_ALL: [
            (
                "EarlyAborts.remember",
                "attempt = max(attempt, self._aborts.get(request_id, (0.0, -1))[1])",
                "attempt = max(attempt, self._aborts.get(request_id, (0.0, -2))[1])",
            ),
            (
                "EarlyAborts.include",
                "until_s, last_aborted = self._aborts.get(request_id, (0.0, -1))",
                "until_s, last_aborted = self._aborts.get(request_id, (0.0, -2))",
            ),
        ],
        BOUNDARY: [
            (
                "Continuations._send_all_due",
                "if self._clock() >= turn_ends_s:",
                "if self._clock() > turn_ends_s:",
            ),
            (
                "Continuations._waited",
                "if self._patience_left_s(stream) <= 0:",
                "if self._patience_left_s(stream) < 0:",
            ),
            (
                "Continuations._last_words",
                "if stream.deadline_s is not None and self._clock() >= stream.deadline_s:",
                "if stream.deadline_s is not None and self._clock() > stream.deadline_s:",
            ),
            (
                "EarlyAborts.remember",
                "while next(iter(self._aborts.values()))[0] <= now_s:",
                "while next(iter(self._aborts.values()))[0] < now_s:",
            ),
        ],
        ORDER: [
            ("Scheduler.__init__", "self._arrivals = 0", "self._arrivals = 1"),
            ("Scheduler.add", "self._arrivals += 1", "self._arrivals += 2"),
        ],
        "which of the steps are special is arbitrary": [
            (
                "Scheduler._chunk_limit",
                "probes = self._steps % _PROBE_STEPS == 0",
                "probes = self._steps % _PROBE_STEPS == 1",
            ),
            ("Scheduler.__init__", "self._steps = 0", "self._steps = 1"),
            ("Scheduler.schedule", "self._steps += 1", "self._steps -= 1"),
        ],
        "a block has more tokens than that": [
            (
                "Scheduler._grow_or_preempt",
                "while not self._blocks.grow(sequence, sequence.num_computed + 1):",
                "while not self._blocks.grow(sequence, sequence.num_computed + 2):",
            ),
        ],
        "either both are there or neither is": [
            (
                "Continuations._note_progress",
                "if stream.shard is None or stream.info is None:",
                "if stream.shard is None and stream.info is None:",
            ),
        ],
        "only how soon others are sent after a defect": [
            (
                "Continuations._put_due",
                "sending = run_lasting(self._send_all_due, 'sending a request on', pause_s=0.0)",
                "sending = run_lasting(self._send_all_due, 'sending a request on', pause_s=1.0)",
            ),
            (
                "Continuations._put_due",
                "sending = run_lasting(self._send_all_due, 'sending a request on', pause_s=0.0)",
                "sending = run_lasting(self._send_all_due, 'sending a request on')",
            ),
        ],
        "names are told apart by any bytes between them that they do not contain": [
            (
                "_namespace",
                "return hashlib.blake2b(b'\\n'.join(sorted(names)), digest_size=8).hexdigest() + '/'",
                "return hashlib.blake2b(b'XX\\nXX'.join(sorted(names)), digest_size=8).hexdigest() + '/'",
            ),
        ],
    }.items()
    for function, old, new in mutants
}
