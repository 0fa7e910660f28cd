"""Resolves references within one document: URIs, pointers and anchors. Never fetches anything."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from urllib.parse import unquote, urljoin

from penstock_common.json_schema.keywords import subschemas
from penstock_shard.structured_output.json_schema.combine import Schema
from penstock_shard.structured_output.refusal import ConstraintRefused, shown

_DRAFTS = {
    "json-schema.org/draft-04/schema": 4,
    "json-schema.org/draft-06/schema": 6,
    "json-schema.org/draft-07/schema": 7,
    "json-schema.org/draft/2019-09/schema": 2019,
    "json-schema.org/draft/2020-12/schema": 2020,
}
REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
_DEEPEST = 80


class Document:
    def __init__(self, root: Schema) -> None:
        self.draft = _draft(root)
        self._resources: dict[str, Schema] = {"": root}
        self._anchors: dict[tuple[str, str], tuple[Schema, str]] = {}
        self._names: Counter[str] = Counter()
        self._index(root, "", 0)

    @property
    def references_stand_alone(self) -> bool:
        """True up to draft 7, which ignores keywords beside a `$ref`."""
        return self.draft is not None and self.draft <= 7

    def base(self, schema: Schema, base: str) -> str:
        """The base URI inside `schema`. `base` is the one outside."""
        name = self._id(schema)
        return base if name is None else _joined(base, name).rstrip("#")

    def resolve(self, keyword: str, reference: object, base: str) -> tuple[Schema, str]:
        """The schema that a reference (`REFERENCES`) means, and its base URI."""
        if not isinstance(reference, str):
            raise ConstraintRefused(f"{keyword}: {shown(reference)} is no text")
        if keyword != "$ref":
            self._check_dynamic(keyword, reference)
        address, _, fragment = _joined(base, reference).partition("#")
        if address not in self._resources and reference.startswith("#"):
            address = ""
        if address not in self._resources:
            raise ConstraintRefused(f"$ref: {shown(reference)} is outside of the schema")
        fragment = unquote(fragment)
        if fragment and not fragment.startswith("/"):
            if (address, fragment) not in self._anchors:
                raise ConstraintRefused(f"$ref: {shown(reference)} names nothing in the schema")
            return self._anchors[address, fragment]
        return self._pointed(reference, address, fragment)

    def _check_dynamic(self, keyword: str, reference: str) -> None:
        """Refuse a dynamic reference whose meaning may depend on the place."""
        name = reference.rpartition("#")[2]
        is_named = bool(name) or keyword == "$recursiveRef"
        if self._names[name] > 1 or not is_named or len(self._resources) > 2:
            raise ConstraintRefused(f"{keyword}: {shown(reference)} may mean several schemas")

    def _pointed(self, reference: str, address: str, pointer: str) -> tuple[Schema, str]:
        # Many schemas give their parts URIs, which makes them documents of their own; but their
        # pointers are meant for the whole document.
        for document in (address, *([""] if reference.startswith("#") else [])):
            found = self._followed(self._resources[document], document, pointer)
            if found is not None:
                return found
        raise ConstraintRefused(f"$ref: {shown(reference)} names nothing in the schema")

    def _followed(self, schema: Schema, base: str, pointer: str) -> tuple[Schema, str] | None:
        for part in pointer.split("/")[1:]:
            base = self.base(schema, base)
            key = part.replace("~1", "/").replace("~0", "~")
            if isinstance(schema, dict) and key in schema:
                schema = schema[key]
            elif isinstance(schema, list) and key.isdecimal() and int(key) < len(schema):
                schema = schema[int(key)]
            else:
                return None
        return schema, base

    def _id(self, schema: Schema) -> str | None:
        if not isinstance(schema, dict) or (self.references_stand_alone and "$ref" in schema):
            return None
        name = schema.get("id" if self.draft == 4 else "$id")
        if not isinstance(name, str) or name.startswith("#"):
            return None
        return name

    def _index(self, schema: Schema, base: str, depth: int) -> None:
        if depth > _DEEPEST:
            raise ConstraintRefused(f"json_schema: nests deeper than {_DEEPEST} schemas")
        if not isinstance(schema, dict):
            return
        base = self.base(schema, base)
        if self._id(schema) is not None:
            if self._resources.get(base, schema) is not schema:
                raise ConstraintRefused(f"$id: {shown(base)} is there twice")
            self._resources[base] = schema
        id_key = ("id" if self.draft == 4 else "$id") if self.references_stand_alone else None
        for name in _anchor_names(schema, id_key):
            self._anchors[base, name] = (schema, base)
            self._names[name] += 1
        for inner in subschemas(schema):
            self._index(inner, base, depth + 1)


def _joined(base: str, reference: str) -> str:
    # urljoin does not support URNs.
    try:
        return base + reference if reference.startswith("#") else urljoin(base, reference)
    except ValueError as error:
        raise ConstraintRefused(f"{shown(reference)} is no URI: {error}") from error


def _anchor_names(schema: dict[str, Schema], id_key: str | None) -> Iterator[str]:
    """Yield a schema's anchors. Up to draft 7, the value of `id_key` may have one."""
    for key in ("$anchor", "$dynamicAnchor"):
        if isinstance(schema.get(key), str):
            yield schema[key]
    name = schema.get(id_key) if id_key is not None else None
    if isinstance(name, str) and "#" in name and "$ref" not in schema:
        yield name.partition("#")[2]


def _draft(root: Schema) -> int | None:
    """Return the draft; None if unknown, which allows the keywords of all drafts."""
    named = root.get("$schema") if isinstance(root, dict) else None
    address = str(named).removeprefix("http://").removeprefix("https://").rstrip("#")
    return _DRAFTS.get(address)
