"""Families of models, and how they write answers; a module for each kind of format."""

from __future__ import annotations

from support.families.family import Family
from support.families.json_families import FAMILIES as _JSON
from support.families.python_families import FAMILIES as _PYTHON
from support.families.tagged_families import FAMILIES as _TAGGED

FAMILIES: tuple[Family, ...] = (*_JSON, *_TAGGED, *_PYTHON)
