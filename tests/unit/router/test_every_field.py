"""No field of a completion or a chat is lost: each reaches the engine or changes the answer.

A field that a table has and this file does not fails a test here, so none is added without its
proof; and a bound that a field's schema states needs its two values, one that is taken and one
that is refused.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
from support.budget import budget, seeded
from support.checked_fleet import CheckedFleet
from support.router_doubles import (
    INFO,
    Answer,
    byte_level_tokenizer,
    id_of,
    memory_router,
    model_files,
    random_text,
    wordpiece_tokenizer,
)
from support.sampling_values import SAMPLING_VALUES
from tokenizers import Tokenizer, processors

from penstock_proto.engine_request import EngineRequest
from penstock_proto.limits import SAMPLING_RANGES
from penstock_proto.types import GenerationRequest
from penstock_router.apis.openai.fields import CHAT_FIELDS, COMPLETION_FIELDS
from penstock_router.apis.openai.other_servers import with_other_servers
from penstock_router.apis.openai.requests import parse_chat, parse_completion
from penstock_router.json_fields import Field, JsonObject, Use

# Those of other servers' clients are proved in `test_other_servers.py`.
OF_OTHERS = with_other_servers([]).keys()
ROUTES = {
    "completion": ("/v1/completions", COMPLETION_FIELDS),
    "chat": ("/v1/chat/completions", CHAT_FIELDS),
}
PARSERS: dict[str, Callable[[JsonObject], object]] = {
    "completion": parse_completion,
    "chat": parse_chat,
}
NEEDED: dict[str, JsonObject] = {
    "completion": {"prompt": "The lazy fox", "seed": 5, "max_tokens": 12},
    "chat": {"messages": [{"role": "user", "content": "The fox"}], "seed": 5, "max_tokens": 12},
}
# Shows every variable that a field can set.
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{{ mood }}{{ reasoning_effort }}{{ enable_thinking }}"
    "{% for document in documents or [] %}{{ document.text }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Of a model that reasons before it answers.
THINKING = TEMPLATE + "{# </think> #}"
SAID = "The quick brown fox<|im_end|> jumps over the lazy dog and stops there"


def bos_tokenizer() -> Tokenizer:
    """A byte-level one that begins a text with a special token."""
    tokenizer = byte_level_tokenizer()
    bos = id_of(tokenizer, "<|im_start|>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", bos)]
    )
    return tokenizer


def thinking_tokenizer() -> Tokenizer:
    """Return a byte-level tokenizer with special tokens that begin and end reasoning."""
    written = byte_level_tokenizer().to_str()
    return Tokenizer.from_str(
        written.replace("<|im_start|>", "<think>").replace("<|im_end|>", "</think>")
    )


BYTE_LEVEL = bos_tokenizer()
THINKER = thinking_tokenizer()
WORDPIECE = wordpiece_tokenizer()
# How JSON is written unless a body says otherwise.
COMPACT = '"x-guidance":{"whitespace_flexible":false}'
IDS = {text: BYTE_LEVEL.encode(text, add_special_tokens=False).ids for text in (SAID, "fox")}


def _deadline_s(request: EngineRequest) -> float:
    objective = request.objective
    return 0.0 if objective is None else objective.deadline_s or 0.0


@dataclass
class Seen:
    """The results of a request: the answer, what the router submitted, and what engines got."""

    answer: Answer
    requests: list[GenerationRequest]
    submits: list[EngineRequest]
    # For how many seconds KV blocks are to be retained.
    retained_s: list[float]

    @property
    def engine(self) -> EngineRequest:
        return self.submits[0]

    @property
    def prompt(self) -> str:
        ids = self.requests[0].prompt_token_ids
        return BYTE_LEVEL.decode(list(ids), skip_special_tokens=False)

    @property
    def choice(self) -> Any:
        return self.answer.json()["choices"][0]

    @property
    def text(self) -> Any:
        return self.choice["text"] if "text" in self.choice else self.choice["message"]["content"]


@dataclass
class Proof:
    """A value for a field: with it `view` shows `wanted`, without it something else."""

    value: Any
    view: Callable[[Seen], Any]
    wanted: Any
    # Other fields, which stand in both requests: with the field and without it.
    beside: JsonObject = field(default_factory=dict)
    # Whether the field must have no effect.
    inert: bool = False
    tokenizer: Tokenizer = BYTE_LEVEL
    template: str = TEMPLATE
    said: Sequence[int] = tuple(IDS[SAID])


def sampling(name: str, value: Any, wanted: Any = None, **beside: Any) -> Proof:
    """Reaches the engine among what tokens are drawn by."""
    expected = value if wanted is None else wanted
    return Proof(value, lambda seen: getattr(seen.engine.sampling, name), expected, beside)


def engine(name: str, value: Any, wanted: Any = None, **beside: Any) -> Proof:
    """Reaches the engine."""
    expected = value if wanted is None else wanted
    return Proof(value, lambda seen: getattr(seen.engine, name), expected, beside)


def constraint(value: Any, kind: str, wanted: Any, **beside: Any) -> Proof:
    """Reaches the engine as what the answer must be like."""

    def view(seen: Seen) -> Any:
        given = seen.engine.constraint
        return given and (given.kind, given.value or given.options)

    return Proof(value, view, (kind, wanted), beside)


def objective(name: str, value: Any, wanted: Any = None) -> Proof:
    """Reaches the scheduler."""
    expected = value if wanted is None else wanted
    return Proof(value, lambda seen: getattr(seen.engine.objective, name, None), expected)


def inert(value: Any) -> Proof:
    """Is taken, and the engine gets the same."""
    return Proof(value, lambda seen: (seen.answer.status, seen.engine), None, inert=True)


def event_sizes(seen: Seen) -> list[int]:
    """Tokens that each event carries."""
    chunks = [event for event in seen.answer.events if event != "[DONE]"]
    counts = [0, *(chunk["usage"]["completion_tokens"] for chunk in chunks)]
    return [later - earlier for earlier, later in pairwise(counts)]


def joins(seen: Seen) -> list[list[int]]:
    return [list(word) for word in seen.engine.sampling.bad_words]


def may_be_several(seen: Seen) -> bool:
    """True if the answer may be a list of calls."""
    constraint = seen.engine.constraint
    return constraint is not None and '"value":"["' in constraint.value


LOOK: JsonObject = {"type": "function", "function": {"name": "look"}}
ASSISTANT_LAST = [{"role": "user", "content": "Go"}, {"role": "assistant", "content": "Well"}]
FOX_STOP = "The quick brown "
USAGE: JsonObject = {
    "stream": True,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
}

COMMON: dict[str, Proof] = {
    "model": Proof("another", lambda seen: seen.answer.status, 404),
    "n": Proof(3, lambda seen: len(seen.answer.json()["choices"]), 3),
    **{name: sampling(name, value) for name, value in SAMPLING_VALUES.items()},
    "repeat_last_n": Proof(
        7,
        lambda seen: seen.engine.sampling.penalty_window_tokens,
        7,
        {"repetition_penalty": 1.5},
    ),
    "seed": sampling("seed", 77),
    "lora_path": Proof("another", lambda seen: seen.answer.status, 404),
    "logit_bias": sampling("logit_bias", {"7": 1.5, "3": -101}, ((3, -100.0), (7, 1.5))),
    "allowed_token_ids": sampling("allowed_token_ids", [4, 5], (4, 5)),
    "bad_words": Proof(["fox"], lambda seen: IDS["fox"] in joins(seen), True),
    "stop": Proof("fox", lambda seen: seen.text, FOX_STOP),
    "stop_token_ids": Proof([44], lambda seen: 44 in seen.engine.stop_token_ids, True),
    "include_stop_str_in_output": Proof(
        True, lambda seen: seen.text, FOX_STOP + "fox", {"stop": "fox"}
    ),
    "ignore_eos": Proof(True, lambda seen: seen.engine.stop_token_ids, frozenset()),
    "min_tokens": engine("min_tokens", 3),
    "skip_special_tokens": Proof(False, lambda seen: "<|im_end|>" in seen.text, True),
    "spaces_between_special_tokens": Proof(
        False,
        lambda seen: seen.text,
        " [CLS][SEP]",
        {"skip_special_tokens": False},
        tokenizer=WORDPIECE,
        said=(id_of(WORDPIECE, "[CLS]"), id_of(WORDPIECE, "[SEP]")),
    ),
    "prompt_logprobs": engine("prompt_logprobs", 2),
    "logprob_token_ids": engine("logprob_token_ids", [4, 9], (4, 9), logprobs=1),
    "truncate_prompt_tokens": Proof(3, lambda seen: len(seen.requests[0].prompt_token_ids), 3),
    "truncation_side": Proof(
        "left",
        lambda seen: seen.prompt[-3:],
        "fox",
        {"truncate_prompt_tokens": 3, "add_special_tokens": True},
    ),
    "return_token_ids": Proof(True, lambda seen: seen.choice.get("token_ids"), IDS[SAID][:12]),
    "return_tokens_as_token_ids": Proof(
        True, lambda seen: "token_id:" in json.dumps(seen.choice), True, {"logprobs": 1}
    ),
    "stream": Proof(
        True, lambda seen: seen.answer.headers["content-type"].split(";")[0], "text/event-stream"
    ),
    "stream_options": Proof(
        {"include_usage": True},
        lambda seen: seen.answer.events[-2].get("usage", {}).get("completion_tokens"),
        12,
        {"stream": True},
    ),
    "stream_interval": Proof(
        5, lambda seen: [size for size in event_sizes(seen) if size], [1, 5, 5, 1], USAGE
    ),
    "priority": objective("priority", 3),
    "slo": objective("seconds_between_tokens", 0.0625),
    "is_latency_sensitive": objective("latency_sensitive", "True", True),
    "cache_salt": engine("cache_salt", "sea"),
    "request_id": Proof("mine", lambda seen: "mine" in seen.answer.json()["id"], True),
    "kv_hints": Proof(
        {"actions": [{"action_type": "retain", "payload": {"ttl_seconds": 90}}]},
        lambda seen: seen.retained_s,
        [90.0],
    ),
    "session_id": Proof("ours", lambda seen: seen.requests[0].session, "ours"),
    # What is left when it is sent; a tenth of a second is for the router to end it.
    "timeout": Proof(60, lambda seen: round(_deadline_s(seen.engine)), 60),
    "response_format": constraint(
        {"type": "json_object"}, "json_schema", f'{{"type":"object",{COMPACT}}}'
    ),
    "structured_outputs": constraint({"regex": "a+"}, "regex", "a+"),
    "guided_json": constraint({"type": "array"}, "json_schema", f'{{"type":"array",{COMPACT}}}'),
    "guided_regex": constraint("a+", "regex", "a+"),
    "guided_choice": constraint(["a", "b"], "choice", ("a", "b")),
    "guided_grammar": constraint('start: "a"', "grammar", 'start: "a"'),
    "guided_whitespace_pattern": constraint(
        " ?", "json_schema", '{"x-guidance":{"whitespace_pattern":" ?"}}', guided_json={}
    ),
    "json_schema": constraint({"type": "array"}, "json_schema", f'{{"type":"array",{COMPACT}}}'),
    "regex": constraint("a+", "regex", "a+"),
    "ebnf": constraint('root ::= "a"', "grammar", 'root ::= "a"'),
    "grammar": constraint('root ::= "a"', "grammar", 'root ::= "a"'),
    "guided_decoding_backend": inert("xgrammar"),
    # Works for its neutral value only, and has a bound that says so.
    "length_penalty": inert(1.0),
}

COMPLETION: dict[str, Proof] = {
    **COMMON,
    "prompt": Proof("over", lambda seen: seen.prompt, "<|im_start|>over"),
    "max_tokens": engine("max_tokens", 9),
    "best_of": Proof(
        4, lambda seen: (len(seen.submits), len(seen.answer.json()["choices"])), (4, 1)
    ),
    "logprobs": engine("logprobs", 3),
    "echo": Proof(True, lambda seen: seen.text.startswith("The lazy foxThe quick"), True),
    "add_special_tokens": Proof(False, lambda seen: seen.prompt, "The lazy fox"),
}

CHAT: dict[str, Proof] = {
    **COMMON,
    "logprob_token_ids": engine("logprob_token_ids", [4, 9], (4, 9), logprobs=True),
    "return_tokens_as_token_ids": Proof(
        True, lambda seen: "token_id:" in json.dumps(seen.choice), True, {"logprobs": True}
    ),
    "truncation_side": Proof(
        "left",
        lambda seen: seen.prompt,
        "assistant\n",
        {"truncate_prompt_tokens": len(BYTE_LEVEL.encode("assistant\n").ids) - 1},
    ),
    "messages": Proof(
        [{"role": "user", "content": "over"}], lambda seen: "user\nover" in seen.prompt, True
    ),
    "max_tokens": engine("max_tokens", 9),
    "max_completion_tokens": engine("max_tokens", 8, max_tokens=9),
    "logprobs": Proof(True, lambda seen: seen.engine.logprobs, 0),
    "top_logprobs": engine("logprobs", 3, logprobs=True),
    "echo": Proof(
        True,
        lambda seen: seen.text.startswith("WellThe quick"),
        True,
        {"messages": ASSISTANT_LAST, "continue_final_message": True},
    ),
    "add_special_tokens": Proof(
        True, lambda seen: seen.prompt.startswith("<|im_start|>" * 2), True
    ),
    "add_generation_prompt": Proof(
        False, lambda seen: seen.prompt.endswith("<|im_start|>assistant\n"), False
    ),
    "continue_final_message": Proof(
        True,
        lambda seen: seen.prompt[-5:],
        "\nWell",
        {"messages": ASSISTANT_LAST},
    ),
    "chat_template": Proof("{{ messages[0].content }}", lambda seen: seen.prompt, "The fox"),
    "chat_template_kwargs": Proof(
        {"mood": "cheerful"}, lambda seen: "cheerful" in seen.prompt, True
    ),
    "documents": Proof([{"text": "a deed"}], lambda seen: "a deed" in seen.prompt, True),
    "reasoning_effort": Proof("high", lambda seen: "high" in seen.prompt, True),
    "enable_thinking": Proof(False, lambda seen: "False" in seen.prompt, True),
    "thinking": Proof({"type": "disabled"}, lambda seen: "False" in seen.prompt, True),
    "reasoning": Proof({"effort": "high"}, lambda seen: "high" in seen.prompt, True),
    "include_reasoning": Proof(
        False,
        lambda seen: "hm" in json.dumps(seen.choice),
        False,
        tokenizer=THINKER,
        template=THINKING,
        said=THINKER.encode("<think>hm</think>Well").ids,
    ),
    "thinking_token_budget": Proof(
        7,
        lambda seen: seen.engine.thinking_budget and seen.engine.thinking_budget.max_tokens,
        7,
        tokenizer=THINKER,
        template=THINKING,
    ),
    "tools": Proof([LOOK], lambda seen: "look" in seen.prompt, True),
    "tool_choice": Proof("none", lambda seen: "look" in seen.prompt, False, {"tools": [LOOK]}),
    "parallel_tool_calls": Proof(
        False, may_be_several, False, {"tools": [LOOK], "tool_choice": "required"}
    ),
}
PROOFS: dict[str, dict[str, Proof]] = {"completion": COMPLETION, "chat": CHAT}


async def all_seen(
    route: str,
    bodies: Sequence[Mapping[str, Any]],
    proof: Proof = COMMON["guided_decoding_backend"],
) -> list[Seen]:
    """Send each body to the route, and return what came of each."""
    fleet = CheckedFleet(
        model_files(proof.tokenizer, proof.template),
        script=lambda request: list(proof.said)[: request.max_tokens],
    )
    seen = []
    async with memory_router(fleet, trust_request_chat_template=True) as router:
        for body in bodies:
            fleet.requests, fleet.submits, fleet.retained = [], [], []
            answer = await router.post(ROUTES[route][0], body)
            retained_s = [retain.seconds for _, retain in fleet.retained]
            seen.append(Seen(answer, fleet.requests, fleet.submits, retained_s))
    return seen


@pytest.mark.parametrize("route", ROUTES)
def test_every_field_has_a_proof(route: str) -> None:
    served = {
        name
        for name, entry in ROUTES[route][1].items()
        if entry.use is Use.HONOURED and not entry.stands_for
    }
    proofs = PROOFS[route].keys()
    assert served - proofs == set(), "a field without a proof that it acts"
    assert proofs - ROUTES[route][1].keys() == set(), "a proof of a field that is not there"


@pytest.mark.parametrize(
    ("route", "name"), [(route, name) for route, proofs in PROOFS.items() for name in proofs]
)
async def test_a_field_acts(route: str, name: str) -> None:
    proof = PROOFS[route][name]
    without = {**NEEDED[route], **proof.beside}
    given = {**without, name: proof.value}
    seen, plain = await all_seen(route, [given, without], proof)
    assert seen.answer.status == (404 if proof.value == "another" else 200), seen.answer.body
    assert plain.answer.status == 200, plain.answer.body
    if proof.inert:
        assert proof.view(seen) == proof.view(plain)
    else:
        assert proof.view(seen) == proof.wanted
        assert proof.view(plain) != proof.wanted


# Values of fields that are not served, by which clients say that they do not want them.
ASKS_FOR_NOTHING: dict[str, tuple[Any, ...]] = {
    "length_penalty": (1.0,),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
    "suffix": ("",),
    "best_of": (1,),
    "tool_choice": ("none",),
    "functions": ([],),
    "function_call": ("none",),
    "modalities": (["text"],),
    "audio": ({},),
    "logits_processors": ([],),
    "watermarking": (False,),
    "return_prompt_text": (False,),
    "mm_processor_kwargs": ({},),
    "media_io_kwargs": ({},),
}
NOT_SERVED = [
    (route, entry)
    for route, (_, fields) in ROUTES.items()
    for entry in fields.values()
    if entry.use is Use.REFUSED and entry.name not in OF_OTHERS
]


@pytest.mark.parametrize(
    ("route", "entry"), NOT_SERVED, ids=lambda case: getattr(case, "name", case)
)
async def test_a_field_that_is_not_served_asks_for_nothing_or_is_refused(
    route: str, entry: Field
) -> None:
    assert entry.neutral == ASKS_FOR_NOTHING.get(entry.name, ())
    nothing = [NEEDED[route]]
    nothing += [{**NEEDED[route], entry.name: neutral} for neutral in (None, *entry.neutral)]
    plain, *same = await all_seen(route, nothing)
    assert plain.answer.status == 200
    for seen in same:
        assert (seen.answer.status, seen.engine) == (200, plain.engine)
    values = [True, False, 2, 0.5, "some", ["some"], [{"a": 1}], {"a": 1}]
    asking = [value for value in values if value not in entry.neutral]
    bodies = [{**NEEDED[route], entry.name: value} for value in asking]
    for value, seen in zip(asking, await all_seen(route, bodies), strict=True):
        assert (seen.answer.status, seen.answer.error["param"]) == (400, entry.name), value
        assert seen.submits == []


# ---- Bounds ------------------------------------------------------------------------------------


@dataclass
class Bound:
    """`inside` is taken, `outside` is refused in words that name the bound."""

    name: str
    inside: Any
    outside: Any
    words: str
    beside: JsonObject = field(default_factory=dict)
    # What is inside asks for more than one router does at a time.
    only_read: bool = False


def range_of(name: str, low: float, high: float, step: float = 1, **beside: Any) -> list[Bound]:
    """Return the two bounds of a range. The range includes both."""
    return [
        Bound(name, low, low - step, f"at least {low:g}", beside),
        Bound(name, high, high + step, f"at most {high:.20g}", beside),
    ]


def ends_of(name: str) -> list[Bound]:
    """Return the two bounds of a sampling parameter. They are the bounds that shards have, too."""
    allowed = SAMPLING_RANGES[name]
    low, high = range_of(name, allowed.low, allowed.high, 0.001)
    if allowed.above_low:
        low = Bound(name, allowed.low + 0.001, allowed.low, f"above {allowed.low:g}")
    if allowed.high > 1e30:
        high = Bound(name, 3.4e38, 3.5e38, "at most 3.40282e+38")
    return [low, high]


def ids_of(name: str, **beside: Any) -> list[Bound]:
    """Ids of the vocabulary, and not too many of them."""
    last = INFO.vocab_size - 1
    return [
        Bound(name, [last], [last + 1], f"0..{last} (the vocabulary)", beside),
        Bound(name, [0], [-1], "at least 0", beside),
        Bound(name, [4] * 1024, [4] * 1025, "at most 1024 ids; given: 1025", beside),
    ]


def scores_of(name: str, **beside: Any) -> list[Bound]:
    """Return the bounds of a number of scores. Shards give at most 20; the vocabulary is more."""
    return [
        Bound(name, 0, -2, "at least -1", beside),
        Bound(name, 20, 21, "at most 20 (--max-logprobs of the model's shards)", beside),
        Bound(name, 20, -1, "at most 20 (--max-logprobs of the model's shards)", beside),
    ]


INT32_MAX = 2**31 - 1
COMMON_BOUNDS = [
    # Nothing is done within a millisecond.
    Bound("timeout", 0.001, 0, "at least 0.001 and at most 4294967", only_read=True),
    Bound("timeout", 4294967, 4294968, "at most 4294967"),
    Bound("n", 1, 0, "at least 1"),
    Bound("n", 16384, 16385, "at most 16384", only_read=True),
    *range_of("temperature", 0, 2, 0.001),
    *range_of("top_k", -1, INT32_MAX),
    *(end for name in SAMPLING_RANGES if name != "temperature" for end in ends_of(name)),
    Bound("seed", -(2**63), -(2**63) - 1, f"at least {-(2**63)} (greater_than_equal)"),
    Bound("seed", 2**63 - 1, 2**63, f"at most {2**63 - 1} (less_than_equal)"),
    Bound("seed", -1, 1.5, "an integer"),
    Bound("logit_bias", {"499": 1}, {"500": 1}, "0..499 (the vocabulary)"),
    Bound(
        "logit_bias",
        {str(key): 1 for key in range(500)},
        {str(key): 1 for key in range(1025)},
        "at most 1024 ids",
    ),
    Bound("logit_bias", {"4": -1e300}, {"4": "much"}, "numbers"),
    *ids_of("allowed_token_ids")[:2],
    Bound("allowed_token_ids", [4], [], "at least 1"),
    Bound(
        "allowed_token_ids",
        [4] * 1_000_000,
        [4] * 1_000_001,
        "at most 1000000 ids",
        only_read=True,
    ),
    Bound("bad_words", ["fox"] * 128, ["fox"] * 129, "at most 128"),
    Bound("bad_words", ["x"], [""], "1 to"),
    Bound("stop", ["x"] * 4096, ["x"] * 4097, "at most 4096 characters in all strings"),
    Bound("stop", "x", "", "at least 1 character"),
    Bound("stop", "x" * 4096, ["x", "x" * 4096], "given: 4097"),
    Bound("repeat_last_n", -1, -2, "at least -1"),
    Bound("lora_path", [None], ["a", "b"], "a string", only_read=True),
    Bound("json_schema", "", 3, "an object or a string"),
    Bound("regex", "", 3, "a string"),
    Bound("ebnf", "", 3, "a string"),
    Bound("grammar", "", 3, "a string"),
    *ids_of("stop_token_ids"),
    Bound("min_tokens", 0, -1, "at least 0"),
    Bound("min_tokens", 12, 13, "12"),
    *scores_of("prompt_logprobs"),
    Bound("truncate_prompt_tokens", -1, -2, "at least -1"),
    Bound("truncate_prompt_tokens", 512, 513, "at most 512"),
    Bound("truncation_side", "left", "middle", "one of left, right"),
    Bound("stream_options", {"include_usage": False}, {"include_usage": 1}, "", {"stream": True}),
    Bound("stream_interval", 1, 0, "at least 1"),
    *range_of("priority", 0, 1000),
    Bound("slo", 1e-6, 9e-7, "at least 1e-06"),
    Bound("slo", 86_400, 86_400.1, "at most 86400"),
    Bound("is_latency_sensitive", "False", "maybe", "true or false"),
    Bound("cache_salt", "x", "", "1 to 128"),
    Bound("cache_salt", "é" * 128, "é" * 129, "1 to 128"),
    *(Bound("cache_salt", "a b", f"a{bad}b", repr(bad)) for bad in "@/\\\0"),
    Bound("session_id", "x" * 256, "x" * 257, "0 to 256"),
    Bound("guided_regex", "a", "", "1 to any"),
    Bound("guided_grammar", 'start: "a"', "", "1 to any"),
    Bound("guided_whitespace_pattern", " ", "", "1 to any", {"guided_json": {}}),
    Bound("guided_decoding_backend", "auto", "mine", "one of auto, xgrammar"),
    Bound("guided_choice", ["a"], [], "at least 1"),
    Bound("guided_choice", ["a"] * 1024, ["a"] * 1025, "at most 1024 choices; given: 1025"),
]


def looks(count: int) -> list[JsonObject]:
    """Return `count` tools."""
    return [{"type": "function", "function": {"name": f"f{index}"}} for index in range(count)]


CHAT_PROMPT = "<|im_start|>user\nThe fox<|im_end|>\n<|im_start|>assistant\n"
CHAT_ROOM = INFO.max_model_len - len(BYTE_LEVEL.encode(CHAT_PROMPT, add_special_tokens=False).ids)
LENGTH = f"maximum context length is {INFO.max_model_len} tokens"
BOUNDS: dict[str, list[Bound]] = {
    "completion": [
        *COMMON_BOUNDS,
        *ids_of("logprob_token_ids", logprobs=1),
        Bound("logprob_token_ids", [4], [], "at least 1", {"logprobs": 1}),
        Bound("max_tokens", 1, 0, "at least 1 without echo"),
        Bound("max_tokens", 0, -2, "at least 0", {"echo": True}),
        Bound("max_tokens", -1, 1.5, "an integer"),
        Bound("max_tokens", 12, 13, LENGTH, {"prompt": [5] * 500}),
        Bound("best_of", 1, 0, "at least 1"),
        Bound("best_of", 16384, 16385, "at most 16384", only_read=True),
        Bound("best_of", 2, 1, "at least n (2)", {"n": 2}),
        *scores_of("logprobs"),
        Bound("prompt", [499], [500], "Token id 500 is out of vocabulary"),
        Bound("prompt", [0], [-1], "Token id -1 is out of vocabulary"),
        Bound("prompt", "x", "", "non-empty"),
        Bound("prompt", [[5]], [], "non-empty"),
        Bound("prompt", ["x"] * 1024, ["x"] * 1025, "at most 1024", only_read=True),
    ],
    "chat": [
        *COMMON_BOUNDS,
        *ids_of("logprob_token_ids", logprobs=True),
        Bound("logprob_token_ids", [4], [], "at least 1", {"logprobs": True}),
        Bound("max_tokens", 1, 0, "at least 1"),
        Bound("max_tokens", -1, -2, "at least 1"),
        Bound("max_tokens", CHAT_ROOM, CHAT_ROOM + 1, LENGTH),
        Bound("max_completion_tokens", 1, 0, "at least 1"),
        Bound("max_completion_tokens", -1, -2, "at least 1"),
        *scores_of("top_logprobs", logprobs=True),
        Bound("tools", looks(16384), looks(16385), "at most 16384 tools", only_read=True),
        Bound("tool_choice", "auto", "some", "none, auto, required", {"tools": [LOOK]}),
        Bound("documents", [{}] * 1000, [{}] * 1001, "at most 1000"),
        Bound("messages", [{"role": "user", "content": ""}], [], "at least one message"),
    ],
}


def bounded_ends(schema: JsonObject) -> int:
    """Count the ends of a range that a schema states. Ends that are a number's width on the wire do
    not count.
    """
    limits = (
        *("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum", "minItems", "maxItems"),
        *("minLength", "maxLength", "maxProperties", "pattern", "enum"),
    )
    technical = (0, INT32_MAX, 2**32 - 1, "boolean")
    count = 0
    for part in (schema, *schema.get("anyOf", ())):
        # An `enum` beside other schemas lists the values that ask for nothing.
        ends = limits if part is schema else limits[:-1]
        count += sum(1 for name in ends if part.get(name, 0) not in technical)
    return count


@pytest.mark.parametrize("route", ROUTES)
def test_every_stated_bound_is_tried_from_both_sides(route: str) -> None:
    for name, entry in ROUTES[route][1].items():
        if entry.use is Use.HONOURED and not entry.stands_for:
            tried = [bound for bound in BOUNDS[route] if bound.name == name]
            assert len(tried) >= bounded_ends(entry.kind.schema), name


@pytest.mark.parametrize(
    ("route", "name"),
    [(route, name) for route in ROUTES for name in dict.fromkeys(b.name for b in BOUNDS[route])],
)
async def test_the_bounds_of_a_field_are_where_they_are_said_to_be(route: str, name: str) -> None:
    bounds = [bound for bound in BOUNDS[route] if bound.name == name]
    taken, refused = [], []
    for bound in bounds:
        base = {**NEEDED[route], **bound.beside}
        refused.append({**base, name: bound.outside})
        if bound.only_read:
            PARSERS[route]({**base, name: bound.inside})
        else:
            taken.append({**base, name: bound.inside})
    for seen in await all_seen(route, taken):
        assert seen.answer.status == 200, seen.answer.body[:300]
    for bound, seen in zip(bounds, await all_seen(route, refused), strict=True):
        error = seen.answer.error
        assert seen.answer.status == 400, bound
        assert error["param"].split(".")[0] == name
        assert bound.words in error["message"]
        assert name in error["message"] or name in ("prompt", "max_tokens")
        # What only the model knows the shard says, before its engine hears of it.
        assert seen.submits == []
        assert seen.requests == [] or "the vocabulary" in bound.words
        assert len(seen.answer.body) < 500


# ---- Nonsense ----------------------------------------------------------------------------------

MANY = 1_000_000
HUGE: list[Any] = [
    "x" * MANY,
    "\U0001f98a" * (MANY // 4),
    "\x01" * (MANY // 6),
    ["x" * MANY],
    ["x"] * (MANY // 4),
    [7] * (MANY // 2),
    [-1] * (MANY // 3),
    [[7] * 1000] * 500,
    {"x" * MANY: 1},
    {str(key): 1 for key in range(MANY // 10)},
    {"x": "y" * MANY},
    [{"role": "x" * MANY, "content": "y"}],
    [{"role": "user", "content": [{"type": "x" * MANY}]}],
    int("9" * 4000),
]


HUGE_JSON = [json.dumps(value).encode() for value in HUGE]
HUGE_JSON.append(b"[" * 500 + b"]" * 500)


def with_field(base: JsonObject, name: str, value: bytes) -> bytes:
    """A body; of a field that is there twice the last counts."""
    return json.dumps(base).encode()[:-1] + b',"%b":%b}' % (name.encode(), value)


@pytest.mark.parametrize("route", ROUTES)
async def test_a_megabyte_in_any_field_is_not_sent_back_in_an_error(route: str) -> None:
    rng = seeded("a megabyte in any field")
    path, fields = ROUTES[route]
    fleet = CheckedFleet(model_files(BYTE_LEVEL, TEMPLATE))
    async with memory_router(fleet, trust_request_chat_template=True) as router:
        headers = {"Content-Type": "application/json"}
        for name in rng.sample(list(fields), budget(60, len(fields))):
            for value in rng.sample(HUGE_JSON, budget(1, len(HUGE_JSON))):
                body = with_field(NEEDED[route], name, value)
                answer = await router.request("POST", path, body, headers)
                assert answer.status in (200, 400, 404, 413), (name, answer.body[:300])
                assert answer.status == 200 or len(answer.body) < 2000, (name, len(answer.body))


@pytest.mark.parametrize("route", ROUTES)
async def test_nonsense_in_any_field_is_never_a_500(route: str) -> None:
    rng = seeded("nonsense over HTTP")
    path, fields = ROUTES[route]
    values: list[Any] = [
        *(None, True, False, 0, 1, -1, 0.5, 1e308, -1e308, 5e-324, 2**31, 2**32, 2**63, -(2**63)),
        *("", "x", "\x00", "\ufffd", "\u202e", "True", "left", [], {}, [1], ["x"], [[1]], [[]]),
        *([None], [{}], {"a": None}, {"type": "text"}, {"type": "json_object"}, {"5": 1e308}),
        *([{"role": "assistant"}], [{"role": "user", "content": None}], {"x": {}}, [2**32 - 1]),
        *([{"role": "tool", "content": "x", "tool_call_id": 3}], ASSISTANT_LAST),
        *("{{ 1 / 0 }}", "{% for i in range(10**9) %}x{% endfor %}", "{{ messages.x.y }}", "{%"),
        *({"mood": [[[]]], "namespace": 3}, {"range": None}, {"self": 1, "loop": 2, "": 3}),
        random_text(rng, 3),
    ]
    fleet = CheckedFleet(model_files(BYTE_LEVEL, TEMPLATE))
    async with memory_router(fleet, trust_request_chat_template=True) as router:
        for _ in range(budget(200, 50_000)):
            names = rng.sample(sorted(fields), rng.randrange(1, 5))
            body = {**NEEDED[route], **{name: rng.choice(values) for name in names}}
            async with asyncio.timeout(20):
                answer = await router.post(path, body)
            assert answer.status in (200, 400, 404), (body, answer.body[:300])
