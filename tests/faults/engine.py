"""Faults of a shard's engine: scheduling, blocks, constraints, models."""

from __future__ import annotations

from faults.planting import Fault, always, becomes, left_out, never

FAULTS = [
    Fault(
        "Blocks of one image are found for another",
        "extend_hashes",
        becomes('image_marks(images, start, start + block_size) if images else b""', 'b""'),
        caught_by="test_blocks_that_an_image_touches_are_found_for_the_same_image_in_the_same_place",
    ),
    Fault(
        "A chunk ends within an image whose tokens see all of it",
        "BlockManager.chunk_limit",
        never("self._keeps_images_whole"),
        caught_by="test_chunks_end_before_an_image_or_behind_it",
    ),
    Fault(
        "A prefix hit ends within an image whose tokens see all of it",
        "BlockManager._longest",
        becomes("self._keeps_images_whole", "False"),
        caught_by="test_a_prefix_is_found_up_to_where_an_image_begins",
    ),
    Fault(
        "Blocks and slots come free at an abort while a launched step refers to them",
        "Scheduler._leave",
        never("sequence.num_steps_in_flight"),
        caught_by="test_blocks_of_an_aborted_request_stay_its_own_until_its_steps_are_collected",
    ),
    Fault(
        "A cached prefix may cover the last known token",
        "BlockManager._find_chain",
        becomes(
            "(sequence.num_tokens - 1) // self.block_size", "sequence.num_tokens // self.block_size"
        ),
        caught_by="test_an_equal_prompt_finds_the_full_blocks_but_never_the_last_token",
    ),
    Fault(
        "A hash alone decides what is shared",
        "PrefixTree.find",
        becomes(
            "prefix is None or prefix.parent is not parent or prefix.token_ids != token_ids",
            "prefix is None",
        ),
        caught_by="test_a_forged_hash_shares_nothing",
    ),
    Fault(
        "A block is given back while the next token still sees it",
        "BlockManager.slide",
        becomes("self._first_visible(group, start)", "self._first_visible(group, start + 16)"),
        caught_by="test_tokens_depend_on_nothing_but_the_request",
    ),
    Fault(
        "A prefix is found though layers with a window lack blocks that the next token sees",
        "PrefixCache.longest",
        becomes("count -= 1", "return count"),
        caught_by="test_a_prefix_ends_where_every_group_has_what_the_next_token_sees",
    ),
    Fault(
        "A name is forgotten with its first blocks, though longer prefixes have theirs",
        "PrefixTree.prune",
        becomes("not prefix.num_users and prefix.is_empty", "prefix.is_empty"),
        caught_by="test_a_prefix_is_found_where_its_last_blocks_are_though_its_first_are_gone",
    ),
    Fault(
        "A state is published under the tokens of the step that goes on from it",
        "BlockManager._keep_states",
        becomes("count = start // self.block_size", "count = start // self.block_size + 1"),
        caught_by="test_kept_states_stay_in_their_bound_under_random_conversations",
    ),
    Fault(
        "Who begins at a kept state goes on with whatever its own block held",
        "BlockManager._begin_state",
        left_out("self._copy_state(blocks.ids[0], own)"),
        caught_by="test_a_prompt_begins_at_the_state_of_an_earlier_ones_last_full_block",
    ),
    Fault(
        "A block of other tokens than were asked for is taken over",
        "Fetches._is_asked_for",
        becomes("found == wanted and name.is_salted == progress.prefix.is_salted", "True"),
        caught_by="test_blocks_of_other_tokens_than_were_asked_for_are_refused",
    ),
    Fault(
        "What a peer sends is put where copies are found, whatever it is",
        "_is_asked_for",
        becomes("found == (prefix.digests[name.index], parent, tuple(packed))", "True"),
        caught_by="test_a_block_that_was_not_asked_for_is_not_put_anywhere",
    ),
    Fault(
        "A peer's last block is taken as it came",
        "ImportChecks.compare",
        becomes("checksum == self._arena.checksum(slot, group)", "True"),
        caught_by="test_a_peer_whose_block_differs_is_given_up_with_all_of_its_blocks",
    ),
    Fault(
        "What is computed on a peer's blocks counts as right",
        "BlockManager._cache_block",
        becomes("parent.doubt if is_proven(table.doubt) else table.doubt", "None"),
        caught_by="test_one_wrong_bit_of_a_peer_shows_in_the_last_block",
    ),
    Fault(
        "A block is copied before the step that fills it is over",
        "Scheduler.num_computed_insertions",
        becomes("self._launched[0].num_insertions", "self._blocks.num_insertions"),
        caught_by="test_a_block_is_copied_only_once_the_step_that_fills_it_is_over",
    ),
    Fault(
        "A copy is used whatever its checksum says",
        "Arena.read",
        becomes("zlib.crc32(block) == checksum", "True"),
        caught_by="test_a_damaged_copy_is_computed_again",
    ),
    Fault(
        "A state begins anew with each chunk",
        "_sequences",
        becomes("count == length", "True"),
        caught_by="test_plain_torch_computes_what_the_kernels_compute",
    ),
    Fault(
        "The oldest request is preempted instead of the latest",
        "PriorityPolicy.choose_victim",
        becomes("max(running, key=preemption_key)", "min(running, key=preemption_key)"),
        caught_by="test_the_latest_arrival_is_preempted_when_blocks_run_out",
    ),
    Fault(
        "A prompt's chunk goes before the decodes",
        "Scheduler.schedule",
        always("row.count == 1 and row.samples"),
        caught_by="test_decodes_come_before_chunks_of_prompts",
    ),
    Fault(
        "Positions count the prompt",
        "token_output",
        becomes(
            "count - len(token_ids)",
            "len(sequence.token_ids) - len(token_ids)",
        ),
        caught_by="test_positions_count_every_token_once",
        simulated=True,
    ),
    Fault(
        "Prompt log-probabilities are sent again after a preemption",
        "Sequence.take_unsent",
        never("known > 0"),
        caught_by="test_prompt_logprobs_arrive_once_in_order_in_spite_of_chunks_and_preemption",
    ),
    Fault(
        "A running lower attempt is left running",
        "Engine.submit",
        left_out("self._end(present, finish=FinishReason.ABORTED)"),
        caught_by="test_a_higher_attempt_ends_the_lower_and_takes_over",
    ),
    Fault(
        "The mean of a prompt is taken over what was not in the cache",
        "Sequence.needs_whole_prompt",
        left_out("self.request.pooling is Pooling.MEAN"),
        caught_by="test_a_mean_reads_no_cached_prefix_and_a_last_token_does",
    ),
    Fault(
        "A constraint begins anew at the shard that goes on",
        "_follow",
        becomes(
            "not _consume(matcher, distinct, some)",
            "matcher.is_error()",
        ),
        caught_by="test_a_request_taken_up_anywhere_in_its_constraint_gives_the_rest",
    ),
    Fault(
        "What is worn out of a constraint while an output is followed ends it",
        "state_after_output",
        becomes("compiler.compile_alone(constraint)", "beginning"),
        caught_by="test_what_is_worn_out_while_an_output_is_followed_costs_that_output_nothing",
    ),
    Fault(
        "Requests share the matcher that is kept",
        "Compiler.compile",
        becomes("kept.template.deep_copy()", "kept.template"),
        caught_by="test_each_request_has_a_matcher_of_its_own",
    ),
    Fault(
        "White space in JSON may go on and on",
        "json_writing",
        left_out("writing.setdefault('whitespace_pattern', WHITESPACE)"),
        caught_by="test_whitespace_does_not_go_on_and_on",
    ),
    Fault(
        "Reasoning gets a token beyond its budget",
        "Thinking.forced_id",
        becomes(
            "self._num_tokens >= self._budget.max_tokens",
            "self._num_tokens > self._budget.max_tokens",
        ),
        caught_by="test_reasoning_ends_when_its_budget_is_spent",
    ),
    Fault(
        "Among equal logits the sampler takes whichever comes",
        "ordered_topk",
        becomes(
            "torch.arange(values.shape[1], device=keys.device)",
            "torch.randperm(values.shape[1], device=keys.device)",
        ),
        caught_by="test_ordered_topk_equals_a_full_stable_sort",
    ),
    Fault(
        "A kernel keeps one token more than top-p does",
        "_rank_kernel",
        becomes("kept = before + number * weight", "kept = before + (number + 1) * weight"),
        caught_by="test_by_rank_the_kernel_draws_what_sorting_draws",
    ),
    Fault(
        "Experts get the rows of their tokens in another order",
        "_sort_kernel",
        becomes(
            "tl.cumsum(counts, axis=0) - counts",
            "tl.sum(counts, axis=0) - tl.cumsum(counts, axis=0)",
        ),
        caught_by="test_tokens_go_to_the_experts_that_plain_torch_chooses",
    ),
    Fault(
        "A sliding window is forgotten",
        "_attention_function",
        becomes("window=sliding_window", "window=None"),
        caught_by="test_mixed_steps_give_the_tokens_of_generate",
    ),
    Fault(
        "Our decoder forgets a sliding window",
        "HeadAttention.__call__",
        becomes("window=spec.window", "window=None"),
        caught_by="test_decoder::test_logits_are_those_of_transformers",
    ),
    Fault(
        "Every model is called batch invariant",
        "_Watched.is_as_expected",
        becomes("torch.equal(_bits(logits), _bits(expected))", "logits.shape == expected.shape"),
        caught_by="test_attention_whose_bits_depend_on_chunks_is_found",
    ),
    Fault(
        "A configuration may say what our decoder does not know",
        "refuse_unknown",
        never("not says_nothing"),
        caught_by="test_a_configuration_that_says_more_is_left_to_transformers",
    ),
    Fault(
        "Pages of a checkpoint are kept after they were read",
        "give_back_pages",
        never("last > first"),
        caught_by="test_loading_takes_little_more_than_the_packed_weights",
    ),
    Fault(
        "A link in a model's directory may lead to any file of the host",
        "check_file",
        never(
            "path.suffix not in _WEIGHTS and "
            "(not any(map(found.is_relative_to, _allowed(directory))))"
        ),
        caught_by="test_no_link_publishes_a_file_of_the_host",
    ),
    Fault(
        "A cache is used below a directory that others may write to",
        "_check_directory_above",
        never("status.st_mode & writers and (not is_sticky)"),
        caught_by="test_a_cache_is_not_used_below_what_others_may_write_to",
    ),
    Fault(
        "A GGUF file may claim elements that it does not hold",
        "_Layout._check_count",
        never("count * least_bytes > self._size"),
        caught_by="test_a_gguf_file_that_claims_what_it_does_not_hold_is_refused_at_once",
    ),
]
