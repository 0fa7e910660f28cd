"""Chat templates in the styles of families, by the name of the format that each shows."""

from __future__ import annotations

from support.families.channel_templates import TEMPLATES as _CHANNELS
from support.families.json_templates import TEMPLATES as _JSON
from support.families.python_templates import TEMPLATES as _PYTHON
from support.families.tagged_templates import TEMPLATES as _TAGGED

TEMPLATES: dict[str, str] = {**_CHANNELS, **_JSON, **_TAGGED, **_PYTHON}
