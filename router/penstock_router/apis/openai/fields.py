"""Fields of completions and chats: OpenAI's, those that vLLM added, and other servers'.

Bounds that depend on a model are checked once the model is known.
"""

from __future__ import annotations

from penstock_proto.limits import (
    HTTP_PRIORITY,
    MAX_HTTP_BAD_WORDS,
    MAX_LOGPROB_TOKEN_IDS,
    MAX_STOP_TOKEN_IDS,
    OPENAI_TEMPERATURE,
    SAMPLING_RANGES,
)
from penstock_router.apis.base import TIMEOUT
from penstock_router.apis.chat_messages import MESSAGES
from penstock_router.apis.kv_hints import KV_HINTS
from penstock_router.apis.openai.kinds import (
    LOGIT_BIAS,
    LORA,
    NUM_LOGPROBS,
    STOPS,
    STREAM_OPTIONS,
    length,
    prompts,
)
from penstock_router.apis.openai.other_servers import with_other_servers
from penstock_router.apis.openai.thinking import THINKING_FIELDS
from penstock_router.apis.structured_output import CONSTRAINT_FIELDS
from penstock_router.apis.tools import CHOICE, TOOLS
from penstock_router.json_fields import (
    ANY_NUMBER,
    ANYTHING,
    ARRAY,
    BOOLEAN,
    INT32_MAX,
    INT64,
    OBJECT,
    POSITIVE,
    STRING,
    WORD_OR_BOOLEAN,
    Field,
    Table,
    array_of,
    integer,
    integers_within,
    label,
    not_served,
    number,
    one_of,
    string,
    taken,
    token_ids,
    unless,
    within,
)
from penstock_router.request import MAX_SESSION_CHARS

MAX_CHOICES = 16384
MAX_WORD_CHARS = 1024
MAX_LOGPROBS = 20
MAX_PROMPTS = 1024
# No vocabulary has more tokens.
MAX_ALLOWED_TOKEN_IDS = 1_000_000
DEFAULT_COMPLETION_TOKENS = 16
NO_PROMPT = "Either prompt or prompt_embeds must be provided and non-empty."


# Fields that completions, chats and responses share.
SAMPLING = (
    Field(
        "temperature",
        within(OPENAI_TEMPERATURE),
        "Randomness; below 1e-5 always the likeliest token.",
    ),
    Field("top_p", within(SAMPLING_RANGES["top_p"]), "Nucleus sampling: likeliest up to this sum."),
    Field("top_k", integer(-1, INT32_MAX), "Sample among so many of the likeliest; 0 and -1: all."),
    Field(
        "min_p",
        within(SAMPLING_RANGES["min_p"]),
        "Drop tokens less likely than this times the likeliest.",
    ),
    Field(
        "repetition_penalty",
        within(SAMPLING_RANGES["repetition_penalty"]),
        "Above 1 makes tokens less likely that occurred; 1: none.",
    ),
    Field(
        "presence_penalty",
        within(SAMPLING_RANGES["presence_penalty"]),
        "Subtracted for tokens that the answer has already.",
    ),
    Field(
        "frequency_penalty",
        within(SAMPLING_RANGES["frequency_penalty"]),
        "The same for each time that the answer has them.",
    ),
    Field(
        "repeat_last_n",
        unless(integer(-1, INT32_MAX), -1),
        "The penalties count the last so many tokens, as in llama.cpp; 0: none, -1: all.",
    ),
    Field(
        "seed",
        unless(INT64, -1),
        "The same request with the same seed gets the same answer; -1: any seed.",
    ),
    Field(
        "typical_p",
        within(SAMPLING_RANGES["typical_p"]),
        "Sample among the most typical tokens that add up to this.",
    ),
)

_COMMON = (
    Field("model", STRING, "One of /v1/models; may be left out if there is only one."),
    Field("lora_path", LORA, "SGLang's name of an adapter, which is asked for like a model."),
    Field("n", integer(1, MAX_CHOICES), "How many choices; the first has the seed itself."),
    *SAMPLING,
    Field("logit_bias", LOGIT_BIAS, "Added to the logits of tokens by id, cut to -100..100."),
    Field(
        "allowed_token_ids",
        token_ids(at_least=1, at_most=MAX_ALLOWED_TOKEN_IDS),
        "Sample among these only.",
    ),
    Field(
        "bad_words",
        array_of(string(1, MAX_WORD_CHARS), at_most=MAX_HTTP_BAD_WORDS, unit="words"),
        "Token sequences that are never completed.",
    ),
    Field("stop", STOPS, "Strings that end a choice; they are cut off."),
    Field(
        "stop_token_ids",
        token_ids(at_most=MAX_STOP_TOKEN_IDS),
        "Tokens that end a choice.",
    ),
    Field("include_stop_str_in_output", BOOLEAN, "Keep the stop string in the text."),
    Field("ignore_eos", BOOLEAN, "Continue after the model's end-of-sequence tokens."),
    Field(
        "min_tokens",
        integer(0, INT32_MAX),
        "Nothing but a constraint that leaves no more ends a choice before so many tokens.",
    ),
    Field("skip_special_tokens", BOOLEAN, "Leave special tokens out of the text; default true."),
    Field("spaces_between_special_tokens", BOOLEAN, "If they are shown; default true."),
    Field("echo", BOOLEAN, "Begin with the prompt; a chat: with a last message of the assistant."),
    Field(
        "prompt_logprobs",
        NUM_LOGPROBS,
        "Log-probabilities of the prompt's tokens, at most the shards' --max-logprobs; -1: of the "
        "whole vocabulary; of streams only a completion's has any, of 0.",
    ),
    Field(
        "logprob_token_ids",
        token_ids(at_least=1, at_most=MAX_LOGPROB_TOKEN_IDS),
        "Report these in place of the likeliest; needs logprobs.",
    ),
    Field(
        "truncate_prompt_tokens",
        integer(-1, INT32_MAX),
        "Keep so many tokens of a prompt; -1: as many as fit.",
    ),
    Field(
        "truncation_side",
        one_of("left", "right"),
        "Which end is cut off; default: the tokenizer's.",
    ),
    Field("add_special_tokens", BOOLEAN, "Add the tokenizer's own; default true, in chats false."),
    Field("return_token_ids", BOOLEAN, "Return the token ids of prompt and answer."),
    Field("return_tokens_as_token_ids", BOOLEAN, "Name tokens of log-probabilities by their ids."),
    Field("stream", BOOLEAN, "Answer with events as tokens come."),
    Field("stream_options", STREAM_OPTIONS, "Only in streams: whether events contain the usage."),
    Field("stream_interval", POSITIVE, "Least number of tokens in an event of a stream."),
    Field("priority", integers_within(HTTP_PRIORITY), "Lower runs first."),
    Field("slo", number(1e-6, 86_400), "Seconds between tokens to aim for."),
    Field("is_latency_sensitive", WORD_OR_BOOLEAN, "Prefer it to requests that are not."),
    Field(
        "cache_salt",
        string(1, 128, without="@/\\\0"),
        "Share cached prefixes with requests of the same salt only.",
    ),
    Field("request_id", STRING, "The request's id, if there is no X-Request-Id."),
    Field(
        "session_id",
        string(0, MAX_SESSION_CHARS),
        "Requests with the same value go to the same shard, and its prefix cache.",
    ),
    KV_HINTS,
    TIMEOUT,
    label("user"),
    label("metadata"),
    label("safety_identifier"),
    taken("store", False, help="Answers are kept by /v1/responses only."),
    taken("service_tier", "auto", "default", help="There is one tier."),
    taken("prompt_cache_retention", help="Cached prefixes stay as long as there is room."),
    taken("prediction", help="It would change the speed, never the answer."),
    *CONSTRAINT_FIELDS,
    not_served("length_penalty", ANY_NUMBER, 1.0, help="For beam search, which is not served."),
    not_served("use_beam_search", BOOLEAN, False),
    not_served("kv_transfer_params", OBJECT),
    not_served("ec_transfer_params", OBJECT),
    not_served("vllm_xargs", OBJECT, {}),
    not_served("logits_processors", ANYTHING, []),
    not_served("repetition_detection", OBJECT),
    not_served("watermarking", BOOLEAN, False),
    not_served("return_prompt_text", BOOLEAN, False),
)

OF_CHATS = "A field of chats, refused here."
OF_IMAGES = "How images are resized is the model's, not a request's."
OF_TOOLS = "The older format of tools; not served."

COMPLETION_FIELDS: Table = with_other_servers(
    [
        Field(
            "prompt",
            prompts(MAX_PROMPTS, NO_PROMPT),
            "A text, token ids, or an array of either.",
            required=True,
        ),
        *_COMMON,
        Field(
            "max_tokens",
            length(0),
            "Default 16; 0 with echo: scores only; -1: up to the end of the context.",
        ),
        Field("best_of", integer(1, MAX_CHOICES), "Generate so many, return the n likeliest."),
        Field(
            "logprobs",
            NUM_LOGPROBS,
            "Return those of each token, and of so many alternatives, at most the shards' "
            "--max-logprobs; -1: of the whole vocabulary.",
        ),
        not_served("suffix", STRING, ""),
        not_served("prompt_embeds", ANYTHING),
        # Fields of chats that would change the answer are refused: ignoring them would mislead.
        not_served("max_completion_tokens", POSITIVE, help=OF_CHATS),
        not_served("top_logprobs", NUM_LOGPROBS, help=OF_CHATS),
        not_served("tools", ARRAY, help=OF_CHATS),
        not_served("tool_choice", ANYTHING, "none", help=OF_CHATS),
        not_served("thinking_token_budget", ANYTHING, help=OF_CHATS),
    ]
)

CHAT_FIELDS: Table = with_other_servers(
    [
        Field("messages", MESSAGES, "The chat so far; text only.", required=True),
        *_COMMON,
        Field("max_tokens", length(1), "Default, and -1: up to the end of the context."),
        Field("max_completion_tokens", length(1), "Newer name of max_tokens; counts before it."),
        Field("logprobs", BOOLEAN, "Return the log-probability of each token."),
        Field(
            "top_logprobs",
            NUM_LOGPROBS,
            "Alternatives to return for each token, at most --max-logprobs of the shards; -1: the "
            "whole vocabulary; needs logprobs.",
        ),
        Field("add_generation_prompt", BOOLEAN, "Let the template begin the answer; default true."),
        Field("continue_final_message", BOOLEAN, "Continue the last message."),
        Field("chat_template", STRING, "Refused unless the operator allows it."),
        Field("chat_template_kwargs", OBJECT, "More variables of the template."),
        Field(
            "documents", array_of(OBJECT, at_most=1000, unit="documents"), "Passed to the template."
        ),
        *THINKING_FIELDS,
        Field("include_reasoning", BOOLEAN, "Return the reasoning; default true."),
        Field(
            "thinking_token_budget",
            integer(0, INT32_MAX),
            "End the reasoning after so many tokens; the answer follows.",
        ),
        Field("tools", TOOLS, "Functions that the answer may call."),
        Field(
            "tool_choice",
            CHOICE,
            "none, auto (the default with tools), required, a function, or those allowed.",
        ),
        Field("parallel_tool_calls", BOOLEAN, "Several calls in one answer; default true."),
        not_served("best_of", integer(1, MAX_CHOICES), 1),
        not_served("functions", ARRAY, [], help=OF_TOOLS),
        not_served("function_call", ANYTHING, "none", help=OF_TOOLS),
        not_served("modalities", ARRAY, ["text"]),
        not_served("audio", ANYTHING, {}),
        taken("verbosity", "medium", help="No template reads it."),
        not_served("web_search_options", ANYTHING),
        not_served("mm_processor_kwargs", OBJECT, {}, help=OF_IMAGES),
        not_served("media_io_kwargs", OBJECT, {}, help=OF_IMAGES),
    ]
)
