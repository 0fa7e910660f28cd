"""Fields of requests that an engine may not honour, and how far it does: a router places requests
and a shard refuses them by the same reading of what `GetInfo` tells.
"""

from __future__ import annotations

from collections.abc import Mapping, Sized
from dataclasses import dataclass, fields
from typing import Any, Protocol

from penstock_proto.facts import FieldBound
from penstock_proto.types import EngineSampling, GenerationRequest

# Sampling that every engine has.
_OF_EVERY_ENGINE = frozenset(("temperature", "top_k", "top_p", "min_p", "seed"))
# Fields that need a capability of the same name unless they have this value, which changes nothing,
# or () and are empty.
_NEUTRAL: Mapping[str, object] = {
    **{
        parameter.name: parameter.default
        for parameter in fields(EngineSampling)
        if parameter.name not in _OF_EVERY_ENGINE
    },
    "min_tokens": 0,
    "priority": 0,
    "time_to_first_token_s": None,
    "seconds_between_tokens": None,
    "latency_sensitive": False,
    "adapter": "",
    "thinking_budget": None,
    "logprobs": None,
    "prompt_logprobs": None,
    "logprob_token_ids": (),
    "images": (),
}


class Serves(Protocol):
    """Facts that an engine tells of itself; `uncontinued` are fields that it honours only in
    requests without output.
    """

    @property
    def capabilities(self) -> frozenset[str]: ...

    @property
    def bounds(self) -> tuple[FieldBound, ...]: ...

    @property
    def uncontinued(self) -> frozenset[str]: ...


@dataclass(frozen=True, slots=True)
class Unserved:
    """A field that an engine does not honour; `bound` is empty if it never does."""

    field: str
    value: str
    bound: str = ""

    def text(self, by: str) -> str:
        """The line that tells it, of the shard or shards that `by` names."""
        if self.bound:
            return f"{self.field}: {self.value} is not served by {by}: {self.bound}"
        return f"{self.field} is not served by {by}"


class Asked:
    """Fields that a request asks an engine to honour; `has_output` if there is output besides what
    it brings.
    """

    def __init__(self, request: GenerationRequest, *, has_output: bool = False) -> None:
        self._parts = (request, request.sampling, request.objective)
        self._is_continued = has_output or bool(len(request.output_token_ids))
        constraint = request.constraint
        self._fields: dict[str, object] = {constraint.kind: "a constraint"} if constraint else {}
        for name, neutral in _NEUTRAL.items():
            value = self._value_of(name)
            if value is not None and (len(value) if neutral == () else value != neutral):
                self._fields[name] = value

    def unserved_by(self, engine: Serves) -> Unserved | None:
        """A field of this request that the engine does not honour; None if it honours all."""
        for name, value in self._fields.items():
            if name not in engine.capabilities:
                return Unserved(name, _told(value))
            if self._is_continued and name in engine.uncontinued:
                return Unserved(name, _told(value), "it does not go on from a request's output")
        for bound in engine.bounds:
            value = self._value_of(bound.field)
            if value is not None and not bound.holds(value):
                return Unserved(bound.field, _told(value), str(bound))
        return None

    def _value_of(self, name: str) -> Any:
        """The field's value, wherever in the request it is; None if the request says nothing."""
        return next((getattr(part, name) for part in self._parts if hasattr(part, name)), None)


def _told(value: object) -> str:
    if isinstance(value, Sized) and not isinstance(value, str):
        return f"{len(value)} entries"
    return str(value)
