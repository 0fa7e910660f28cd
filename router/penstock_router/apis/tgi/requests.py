"""text-generation-inference's own API: parses bodies to requests.

The API is frozen, and clients rely on its bounds and error texts. So they are kept even where this
server could do more.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from penstock_router.apis.base import TIMEOUT, Api
from penstock_router.apis.images import split_markdown
from penstock_router.apis.structured_output import Wish, constraint_options, wish_of_format
from penstock_router.apis.tgi.answers import (
    ERRORS,
    GenerateAnswer,
    GenerateRequest,
    GenerateShape,
    StreamEvent,
)
from penstock_router.errors import BadRequest
from penstock_router.json_fields import (
    ANY_NUMBER,
    BOOLEAN,
    FLOAT_MAX,
    INT32_MAX,
    STRING,
    UINT32_MAX,
    WARNINGS,
    Field,
    JsonObject,
    Kind,
    Table,
    array_of,
    body_schema,
    integer,
    not_served,
    number,
    read_array,
    read_fields,
    read_object,
    string,
    table,
)
from penstock_router.request import TextWithImages
from penstock_router.text.prompts import PreparedPrompts, TextModel, prepare_prompts

MAX_BEST_OF = 16384
MAX_STOPS = 4
MAX_STOP_CHARS = 1024
MAX_TOP_N_TOKENS = 5
UINT64_MAX = 2**64 - 1


def _reword(any_kind: Kind, kind: Kind, text: str) -> Kind:
    """Return `kind` with `text` as the error for values out of bounds; `any_kind` has no bounds."""

    def read(name: str, value: Any) -> Any:
        given = any_kind.read(name, value)
        try:
            return kind.read(name, given)
        except BadRequest:
            raise BadRequest(text.format(given), param=name) from None

    return Kind(read, kind.schema)


_ANY_INTEGER = integer(-(2**127), 2**127)


def _integer(low: int, high: int, text: str) -> Kind:
    return _reword(_ANY_INTEGER, integer(low, high), text)


def _positive_number(text: str) -> Kind:
    return _reword(ANY_NUMBER, number(0, FLOAT_MAX, above_low=True), text)


def _proportion(text: str) -> Kind:
    return _reword(ANY_NUMBER, number(0, 1, above_low=True, below_high=True), text)


_GRAMMARS = ("json", "json_object", "regex", "json_schema")


def _read_grammar(name: str, value: Any) -> Wish | None:
    given = read_object(name, value)
    if given.get("type") not in _GRAMMARS:
        raise BadRequest("grammar is not supported", param=name)
    if given.get("value") is None:
        raise BadRequest(f"grammar is not valid: {name}.value: required", param=name)
    try:
        # TGI's `json_schema` has only the form with `value`.
        return wish_of_format(name, {"type": given["type"], "value": given["value"]})
    except BadRequest as error:
        raise BadRequest(f"grammar is not valid: {error.message}", param=name) from None


_SCHEMA: JsonObject = {"anyOf": [{"type": "object"}, {"type": "string"}]}
_NAMED_SCHEMA: JsonObject = {
    "type": "object",
    "properties": {"schema": _SCHEMA},
    "required": ["schema"],
}


def _grammar_form(value: JsonObject, *types: str) -> JsonObject:
    properties = {"type": {"enum": list(types)}, "value": value}
    return {"type": "object", "properties": properties, "required": ["type", "value"]}


_GRAMMAR = Kind(
    _read_grammar,
    {
        "anyOf": [
            _grammar_form(_SCHEMA, "json", "json_object"),
            _grammar_form({"type": "string", "minLength": 1}, "regex"),
            _grammar_form(_NAMED_SCHEMA, "json_schema"),
        ]
    },
)
_STOPS = array_of(string(1, MAX_STOP_CHARS), at_most=MAX_STOPS, unit="stop sequences")


def _read_stops(name: str, value: Any) -> tuple[str, ...]:
    given = len(read_array(name, value))
    if given > MAX_STOPS:
        text = f"`stop` supports up to {MAX_STOPS} stop sequences. Given: {given}"
        raise BadRequest(text, param=name)
    stops: tuple[str, ...] = _STOPS.read(name, value)
    return stops


PARAMETERS = table(
    [
        Field(
            "best_of",
            _integer(1, MAX_BEST_OF, f"`best_of` must be > 0 and <= {MAX_BEST_OF}. Given: {{}}"),
            "Generate so many and show the likeliest; needs sampling, no seed, no stream.",
        ),
        Field(
            "temperature",
            _positive_number("`temperature` must be strictly positive"),
            "Like top_k, top_p and typical_p it asks for sampling.",
        ),
        Field(
            "repetition_penalty",
            _positive_number("`repetition_penalty` must be strictly positive"),
            "1 is none.",
        ),
        Field(
            "frequency_penalty",
            _reword(ANY_NUMBER, number(-2, 2), "`frequency_penalty` must be >= -2.0 and <= 2.0"),
            "For each time that the answer has a token already.",
        ),
        Field(
            "top_k",
            _integer(1, INT32_MAX, "`top_k` must be strictly positive"),
            "Sample among so many of the likeliest.",
        ),
        Field(
            "top_p",
            _proportion("`top_p` must be > 0.0 and < 1.0"),
            "Nucleus sampling: the likeliest tokens that add up to this.",
        ),
        Field(
            "typical_p",
            _proportion("`typical_p` must be > 0.0 and < 1.0"),
            "Sample among the most typical that add up to this.",
        ),
        Field("do_sample", BOOLEAN, "Draw tokens; default: only where there are no parameters."),
        Field(
            "max_new_tokens",
            _integer(1, UINT32_MAX, "`max_new_tokens` must be strictly positive"),
            "Default: up to the end of the context.",
        ),
        Field(
            "stop",
            Kind(_read_stops, _STOPS.schema),
            "Strings that end the text, and stay in it.",
        ),
        Field(
            "truncate",
            _integer(
                1,
                UINT32_MAX,
                "`truncate` must be strictly positive and less than the model's context. Given: {}",
            ),
            "Keep the last so many tokens of the inputs.",
        ),
        not_served("watermark", BOOLEAN, False),
        Field("details", BOOLEAN, "Show the tokens, how the text ended, and the seed."),
        Field("decoder_input_details", BOOLEAN, "Show the inputs' tokens; no streams."),
        Field(
            "seed",
            integer(0, UINT64_MAX),
            "The same request with the same seed gets the same answer.",
        ),
        Field(
            "top_n_tokens",
            _integer(
                0,
                MAX_TOP_N_TOKENS,
                f"`top_n_tokens` must be >= 0 and <= {MAX_TOP_N_TOKENS}. Given: {{}}",
            ),
            "Show so many of the likeliest beside each token.",
        ),
        Field("grammar", _GRAMMAR, "What the text must be: JSON by a schema, or by a regex."),
        Field("return_full_text", BOOLEAN, "Begin the text with the inputs."),
        Field("adapter_id", STRING, "The adapter to use; none is the model itself."),
        # TGI does not have this field.
        TIMEOUT,
    ]
)


def _read_parameters(name: str, value: Any) -> JsonObject:
    return read_fields(PARAMETERS, read_object(name, value))


_NOT_EMPTY = _reword(STRING, string(1), "`inputs` cannot be empty")


INPUTS = _NOT_EMPTY
FIELDS = table(
    [
        Field("inputs", INPUTS, "The text to go on after.", required=True),
        Field(
            "parameters",
            Kind(_read_parameters, body_schema(PARAMETERS)),
            "How to generate, and what to show.",
        ),
    ]
)
COMPAT_FIELDS = table(
    [*FIELDS.values(), Field("stream", BOOLEAN, "Answer with events as tokens come.")]
)


# Each of these fields turns sampling on.
_SAMPLERS = ("temperature", "top_k", "top_p", "typical_p")
# This API ignores the model's sampling defaults.
_NEUTRAL_SAMPLING = {
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "typical_p": 1.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}


def parse_generate(body: JsonObject) -> GenerateRequest:
    return _request(read_fields(FIELDS, body), stream=False)


def parse_generate_stream(body: JsonObject) -> GenerateRequest:
    return _request(read_fields(FIELDS, body), stream=True)


def parse_compat(body: JsonObject) -> GenerateRequest:
    """Parse a body of POST /. The answer repeats the inputs, unless return_full_text is false."""
    values = read_fields(COMPAT_FIELDS, body)
    stream = values.get("stream", False)
    return _request(values, stream=stream, full_text=True, as_list=True)


def _request(
    values: JsonObject, *, stream: bool, full_text: bool = False, as_list: bool = False
) -> GenerateRequest:
    parameters = values.get("parameters", {})
    do_sample = parameters.get("do_sample", "parameters" not in values)
    samples = do_sample or any(name in parameters for name in _SAMPLERS)
    best_of = parameters.get("best_of", 1)
    _check(parameters, best_of, samples=samples, stream=stream)
    prefill = parameters.get("decoder_input_details", False)
    details = parameters.get("details", False) or prefill
    top_n = parameters.get("top_n_tokens", 0)
    full_text = parameters.get("return_full_text", full_text)
    sampling = {name: parameters.get(name, off) for name, off in _NEUTRAL_SAMPLING.items()}
    if not samples:
        sampling["temperature"] = 0.0
    constraint = constraint_options(parameters)
    texts, images = split_markdown("inputs", values["inputs"])
    return GenerateRequest(
        prompts=(TextWithImages(tuple(texts)) if images else values["inputs"],),
        images=images,
        # An adapter is requested by name, like a model.
        model=parameters.get("adapter_id", ""),
        n=best_of,
        best_of=best_of,
        max_tokens=parameters.get("max_new_tokens"),
        seed=parameters.get("seed"),
        stop=parameters.get("stop", ()),
        include_stop_str_in_output=True,
        logprobs=top_n if details or stream or best_of > 1 else None,
        prompt_logprobs=0 if prefill else None,
        truncate_prompt_tokens=parameters.get("truncate"),
        truncation_side="left",
        stream=stream,
        timeout_s=parameters.get("timeout"),
        warnings=(*values.get(WARNINGS, ()), *parameters.get(WARNINGS, ())),
        **constraint,
        samples=samples,
        details=details,
        full_text=full_text,
        num_chars=len(values["inputs"]),
        as_list=as_list,
        **sampling,
    )


def _check(parameters: JsonObject, best_of: int, *, samples: bool, stream: bool) -> None:
    if stream and parameters.get("decoder_input_details"):
        text = "`decoder_input_details` == true is not supported when streaming tokens"
        raise BadRequest(text, param="decoder_input_details")
    if best_of == 1:
        return
    if stream:
        text = "`best_of` != 1 is not supported when streaming tokens"
        raise BadRequest(text, param="best_of")
    if not samples:
        raise BadRequest("you must use sampling when `best_of` is > 1", param="best_of")
    if "seed" in parameters:
        raise BadRequest("`seed` must not be set when `best_of` > 1", param="seed")


def _prepare(asked: GenerateRequest, model: TextModel) -> PreparedPrompts:
    prepared = prepare_prompts(asked, model)
    [inputs] = asked.prompts
    if isinstance(inputs, TextWithImages):
        # Leave out the images' data.
        inputs = "![]()".join(inputs.texts)
    assert isinstance(inputs, str)
    return dataclasses.replace(prepared, full_text=inputs) if asked.full_text else prepared


def _api(
    name: str,
    fields: Table,
    parse: Callable[[JsonObject], GenerateRequest],
    answer: Any,
    event: Any,
) -> Api[GenerateRequest]:
    return Api(
        name=name,
        request_type=GenerateRequest,
        fields=fields,
        parse=parse,
        work=_prepare,
        make_shape=GenerateShape,
        name_answer=lambda request_id, named_by_client: request_id,
        errors=ERRORS,
        answer=answer,
        event=event,
    )


GENERATE = _api("generate", FIELDS, parse_generate, GenerateAnswer, None)
GENERATE_STREAM = _api("generate_stream", FIELDS, parse_generate_stream, None, StreamEvent)
COMPAT = _api("compat", COMPAT_FIELDS, parse_compat, list[GenerateAnswer], StreamEvent)
