"""Faults of a shard's server process: servicer, supervisor, the link to the engine."""

from __future__ import annotations

from faults.planting import Fault, becomes, left_out, never

FAULTS = [
    Fault(
        "A given 0 is taken for an absent value",
        "_sampling",
        becomes(
            "defaults.get(name, neutral) if given is None else given",
            "given or defaults.get(name, neutral)",
        ),
        caught_by="test_a_given_zero_is_not_an_absent_value",
    ),
    Fault(
        "An abort of an id that is not known yet is forgotten",
        "EarlyAborts.remember",
        becomes("(now_s + _MEMORY_S, attempt)", "(now_s + _MEMORY_S, -1)"),
        caught_by="test_an_abort_that_comes_before_its_submit_is_remembered",
        simulated=True,
    ),
    Fault(
        "The end of a call leaves its requests running",
        "ShardServicer.Generate",
        left_out("self._engine.abort(outbox.namespace + request_id, attempt)"),
        caught_by="test_ending_the_call_aborts_what_is_unfinished_on_it",
        simulated=True,
    ),
    Fault(
        "Requests of a dead engine are left waiting",
        "EngineSupervisor._died",
        left_out('self.end_all("the shard\'s engine died")'),
        caught_by="test_clients_of_a_killed_engine_see_a_retryable_error_and_it_serves_again",
        simulated=True,
    ),
    Fault(
        "The engine outlives its server",
        "_receive",
        becomes("logging.shutdown()", "return"),
        caught_by="test_a_killed_server_leaves_no_engine_behind",
    ),
    Fault(
        "Two shards may share one port",
        "server_options",
        becomes("('grpc.so_reuseport', 0)", "('grpc.so_reuseport', 1)"),
        caught_by="test_a_port_in_use_is_one_clear_line",
    ),
    Fault(
        "A death is charged to those beside a suspect too",
        "EngineSupervisor._died",
        never("route.suspect"),
        caught_by="test_a_death_is_charged_to_those_that_ran_and_to_a_suspect_alone",
        simulated=True,
    ),
    Fault(
        "A request is served by whatever engine is there",
        "ShardServicer._check_engine",
        never("instance_id and instance_id != self._engine.instance_id"),
        caught_by="test_a_request_meant_for_an_engine_that_is_gone_is_not_served_by_the_next_one",
        simulated=True,
    ),
    Fault(
        "Log-probabilities are lost where many requests share a response",
        "_is_one_token",
        left_out("output.logprobs is None"),
        caught_by="test_outputs_of_one_token_share_columns_where_the_caller_numbers_its_attempts",
        simulated=True,
    ),
    Fault(
        "Constraints go to the engine unchecked",
        "EngineSupervisor._check",
        becomes("self._checker.known(constraint)", "self._checker.known(constraint) or ''"),
        caught_by="test_a_refusal_is_an_invalid_argument_that_names_the_language",
    ),
]
