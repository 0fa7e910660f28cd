"""Faults of the router."""

from __future__ import annotations

from faults.planting import Fault, always, becomes, left_out, never

FAULTS = [
    Fault(
        "Text that may become a stop string is shown",
        "StopMatcher.feed",
        becomes(
            "_before_last(text, max([pattern.matched for pattern in self._patterns]))", "len(text)"
        ),
        caught_by="test_a_stop_over_three_pieces_cuts_exactly_before_it",
    ),
    Fault(
        "A client that goes away leaves its generation running",
        "Generation.__aexit__",
        left_out("self.abandon(exc)"),
        caught_by="test_leaving_early_aborts_exactly_what_is_unfinished",
    ),
    Fault(
        "All choices of a request have its seed",
        "choice_seed",
        always("choice == 0"),
        caught_by="test_the_seeds_of_choices_never_change",
    ),
    Fault(
        "All prompts of a request without a seed draw alike",
        "sequence_seed",
        becomes("prompt << 32", "0"),
        caught_by="test_without_a_seed_answers_differ_also_within_a_batch",
    ),
    Fault(
        "Deltas are sent on while the one before is waited for",
        "_DeltaPump._on_output",
        never("self._wait is not None"),
        caught_by="test_deltas_gather_while_the_use_of_one_is_waited_for",
    ),
    Fault(
        "A sequence is told a deadline that counts from when it is submitted",
        "Generation._complete",
        becomes("self._ends_at_s - asyncio.get_running_loop().time()", "100.0"),
        caught_by="test_what_a_stream_s_deadline_is_does_not_depend_on_when_its_sequences_are_sent",
    ),
    Fault(
        "The halves of a character in a tool's text are shown one by one",
        "_escaped",
        never("0xDC00 <= low < 0xE000"),
        caught_by="test_the_text_is_the_string_wherever_its_json_is_cut",
    ),
    Fault(
        "A tool takes the name of another",
        "_free_name",
        never("name in taken"),
        caught_by="test_no_two_tools_are_shown_by_one_name",
    ),
    Fault(
        "A grammar counts as enforced where calls are JSON",
        "hold_to_grammars",
        never("tool_format is None or not tool_format.writes_plain_strings"),
        caught_by="test_a_grammar_that_is_not_enforced_is_named",
    ),
    Fault(
        "A field that does not work yet is ignored",
        "read_fields",
        never("entry.use is Use.REFUSED"),
        caught_by="test_a_known_field_that_does_not_work_yet_is_refused_by_name_unless_neutral",
    ),
    Fault(
        "An expired key is as good as any",
        "Keys.find",
        left_out("key.expires_at <= time.time()"),
        caught_by="test_a_key_is_none_from_the_moment_it_expires",
    ),
    Fault(
        "An event's id is believed",
        "CursorCodec.read",
        always("hmac.compare_digest(mac, self._mac(data))"),
        caught_by="test_no_bit_of_an_id_can_be_changed_and_no_other_key_reads_it",
    ),
    Fault(
        "Text that the client has is shown again",
        "_DeliveredPrefix.cut",
        left_out("delta.text = delta.text[self._skip(delta.text):]"),
        caught_by="test_from_every_event_on_the_rest_is_the_rest",
    ),
    Fault(
        "A greedy key is served in the order in which its requests came",
        "FairQueue.update",
        becomes("(share.in_flight, first.number, first)", "(0, first.number, first)"),
        caught_by="test_the_key_with_the_fewest_places_goes_first_and_equals_by_arrival",
    ),
    Fault(
        "A response in the background ends its record with its HTTP request",
        "Records.track",
        becomes("not record._holders", "record in self.running"),
        caught_by="test_a_response_in_the_background_outlives_the_request_that_asked_for_it",
    ),
    Fault(
        "Requests that nobody can serve yet are not held",
        "Models._resolved_in_time",
        always("self._shard_wait_s is None"),
        caught_by="test_a_request_is_held_until_a_shard_serves_its_model",
    ),
    Fault(
        "Text that was held for a call is dropped when it is none",
        "CallParser._give_back",
        left_out("self._content(''.join(self._held))"),
        caught_by="test_a_call_that_is_cut_off_before_its_name_is_given_back_as_text",
    ),
    Fault(
        "What looks like a call within reasoning is one",
        "_ReasoningAndCalls._with_calls",
        becomes("piece.kind is PieceKind.CONTENT", "piece.text"),
        caught_by="test_what_looks_like_a_call_within_reasoning_is_none",
    ),
    Fault(
        "A call that was cut off is completed",
        "TaggedCallParser._end_by_answer",
        becomes("self._was_cut", "False"),
        caught_by="test_a_call_that_was_cut_off_is_not_completed",
    ),
    Fault(
        "A mark that is a token counts however it is spelled",
        "Marks.spelled",
        becomes("TOKEN + mark", "mark"),
        caught_by="test_calls_whose_marks_are_spelled_by_other_tokens_are_content",
    ),
    Fault(
        "A call in reasoning counts without what its function requires",
        "CallsInReasoning._is_whole",
        becomes("required <= given.keys()", "True"),
        caught_by="test_what_is_quoted_unknown_lacking_or_not_closed_is_reasoning",
    ),
    Fault(
        "A form of the answer forbids the reasoning before it",
        "answer_constraint",
        becomes("style is None", "style is not None"),
        caught_by="test_reasoning_comes_before_what_is_constrained_or_not_at_all",
    ),
    Fault(
        "Images are fetched from any address",
        "Fetcher._make_socket",
        never("not is_allowed_address(address[0], self._networks)"),
        caught_by="test_no_connection_is_tried_to_where_a_name_must_not_lead",
    ),
    Fault(
        "Images are fetched from where clouds answer for their machines",
        "is_allowed_address",
        left_out("check_unicast(ip)"),
        caught_by="test_some_are_never_allowed",
    ),
    Fault(
        "Images are fetched from addresses that stand for others",
        "is_allowed_address",
        becomes("plain_address(ip)", "ip"),
        caught_by="test_no_form_of_an_address_that_is_not_public_is_allowed",
    ),
    Fault(
        "Images are fetched from wherever a redirect leads",
        "Fetcher._redirected",
        becomes("self._parse(str(url.join(URL(location))))", "url.join(URL(location))"),
        caught_by="test_each_redirect_is_checked_as_the_first_url_is",
    ),
    Fault(
        "Images are as large as their length says",
        "Incoming.add",
        left_out("check_size(self._num_bytes, self.max_bytes)"),
        caught_by="test_a_host_that_does_all_it_can_costs_one_request_a_clear_refusal",
    ),
    Fault(
        "Images in files outside of the folder are read",
        "_path_of",
        never("not path.is_relative_to(Path(folder).resolve(strict=True))"),
        caught_by="test_no_other_file_is_and_nothing_tells_what_is_there",
    ),
    Fault(
        "Images that say how large they are are decoded before that is looked at",
        "decode",
        left_out("_check_size(*image.size, max_pixels)"),
        caught_by="test_what_cannot_or_may_not_be_decoded_is_refused_in_bounds",
    ),
    Fault(
        "Images of a client that left keep their place in the line",
        "Turns._wait",
        left_out("del own.waiting[given]"),
        caught_by="test_a_place_whose_client_left_goes_to_the_next",
    ),
    Fault(
        "Images are charged to nobody once they were decoded",
        "Images._charge",
        left_out("holding.add(num_bytes)"),
        caught_by="test_memory_is_the_clients_until_nobody_has_the_image_or_its_pixels",
    ),
    Fault(
        "A later system message goes to a template that moves it to the front",
        "place_systems",
        never("traits.later_system_as_user"),
        caught_by="test_a_later_system_that_a_template_would_lose_or_move_is_the_users_in_its_place",
    ),
    Fault(
        "Results stay in the order in which they came",
        "_ordered",
        becomes("places[each['tool_call_id']]", "0"),
        caught_by="test_results_stand_in_the_order_of_their_calls",
    ),
    Fault(
        "Claude Code's accounting is part of the prompt",
        "without_billing",
        never("str(part.get('text', '')).startswith(_HEADER)"),
        caught_by="test_prompts_do_not_change_with_the_accounting",
    ),
    Fault(
        "A deferred tool is shown before a turn refers to it",
        "_read_tools",
        never("tool.name in deferred"),
        caught_by="test_a_deferred_tool_is_shown_where_it_was_found_and_nowhere_else",
    ),
    Fault(
        "A tool of Anthropic's servers is left out without a word",
        "_read_tools",
        never("entry.tool is None"),
        caught_by="test_tools_that_are_not_the_clients_are_left_out_and_named",
    ),
    Fault(
        "A system that was for one turn stays",
        "_read_system",
        never("is_past and clear_at == 'next_user_message'"),
        caught_by="test_a_system_for_one_turn_is_gone_when_the_user_speaks_again",
    ),
    Fault(
        "An answer that fills the context is said to have reached its limit",
        "MessageShape._note_end",
        becomes("self._ends_with_context", "False"),
        caught_by="test_an_answer_ends_with_the_context_or_with_its_limit",
    ),
    Fault(
        "A prompt that is too long is refused in words that Claude Code does not know",
        "_words",
        always("not isinstance(error, ContextExceeded)"),
        caught_by="test_a_prompt_that_is_too_long_is_refused_in_words_that_have_the_client_shorten_it",
    ),
]
