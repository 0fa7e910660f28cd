"""oneOf as anyOf: each alternative together with the negation of all others.

If a property tells them apart, as in unions with a discriminator, no negation is needed.
"""

from __future__ import annotations

from penstock_shard.structured_output.json_schema.combine import Place, Schema, all_of, any_of
from penstock_shard.structured_output.json_schema.values import listed_values, target_of
from penstock_shard.structured_output.refusal import ConstraintRefused

_MOST_ALTERNATIVES = 64


def one_of(place: Place, parts: list[Schema], base: str) -> Schema:
    """Values that meet exactly one alternative."""
    name = _telling_apart(place, parts, base)
    if name is not None:
        return any_of(_with(place, name, part, base) for part in parts)
    if len(parts) > _MOST_ALTERNATIVES:
        raise ConstraintRefused(
            f"oneOf: more than {_MOST_ALTERNATIVES} alternatives that no property tells apart"
        )
    negatives = [place.negative(part, base) for part in parts]
    return any_of(
        all_of([place.positive(part, base), *negatives[:index], *negatives[index + 1 :]])
        for index, part in enumerate(parts)
    )


def _with(place: Place, name: str, part: Schema, base: str) -> Schema:
    """An alternative with the property required, as without it values could not be told apart."""
    schema = target_of(place, part, base)
    there = place.positive(part, base)
    if schema.get("type") == "object" and name in schema.get("required", ()):
        # Returned as it is: only a reference by itself may be recursive.
        return there
    return all_of([there, {"type": "object", "required": [name]}])


def _telling_apart(place: Place, parts: list[Schema], base: str) -> str | None:
    """A property of which all alternatives list the values, no value twice; None: there is none."""
    properties = [_properties(place, part, base) for part in parts]
    for name in properties[0] if len(parts) > 1 else ():
        listed = [listed_values(place, some.get(name), base) for some in properties]
        if all(listed) and len(set().union(*listed)) == sum(map(len, listed)):
            return name
    return None


def _properties(place: Place, part: Schema, base: str) -> dict[str, Schema]:
    part = target_of(place, part, base)
    properties = part.get("properties") if isinstance(part, dict) else None
    return properties if isinstance(properties, dict) else {}
