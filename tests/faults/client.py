"""Faults of the client library."""

from __future__ import annotations

from faults.planting import Fault, becomes, left_out, never

FAULTS = [
    Fault(
        "A reader does not drop tokens it has",
        "GenerationStream._align",
        never("known > 0 and output.token_ids"),
        caught_by="test_known_tokens_are_dropped_with_their_logprobs",
    ),
    Fault(
        "Cancelling a stream aborts nothing",
        "GenerationStream.cancel",
        left_out("self._on_cancel(self)"),
        caught_by="test_cancelling_frees_every_block",
        simulated=True,
    ),
    Fault(
        "A field is lost between the client and the wire",
        "_set_sampling",
        becomes("_SAMPLING_SCALARS", "[name for name in _SAMPLING_SCALARS if name != 'min_p']"),
        caught_by="test_every_field_of_a_request_is_set_on_the_wire",
    ),
    Fault(
        "Another attempt goes without the output so far",
        "_request_now",
        left_out("*stream.token_ids"),
        caught_by="test_a_request_goes_on_at_another_shard_with_its_output_and_the_next_attempt",
        simulated=True,
    ),
    Fault(
        "Each attempt draws a seed of its own",
        "Continuations.start",
        never("request.sampling.seed is None"),
        caught_by="test_every_attempt_has_the_same_seed_also_where_none_was_given",
        simulated=True,
    ),
    Fault(
        "Other weights may give a later token",
        "same_model",
        left_out("first.weights_hash == second.weights_hash"),
        caught_by="test_no_other_weights_give_a_later_token",
        simulated=True,
    ),
    Fault(
        "Defaults are those of the shard that goes on",
        "complete_request",
        becomes("_with_defaults(request.sampling, info.default_sampling)", "request.sampling"),
        caught_by="test_what_the_first_model_s_defaults_said_holds_at_the_next_shard",
        simulated=True,
    ),
    Fault(
        "Vectors of one request come from several models",
        "Embeddings._fitting",
        becomes("same_model(shard.info, info)", "shard.info.model == info.model"),
        caught_by="test_only_shards_that_embed_are_asked_and_only_those_of_the_same_weights",
    ),
    Fault(
        "A failed-over answer's record knows its last shard only",
        "Continuations._send_to",
        becomes("stream.attempts.append(record)", "stream.attempts[:] = [record]"),
        caught_by="test_a_request_that_outlives_its_shard_is_still_one_trace",
    ),
]
