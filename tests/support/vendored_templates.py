"""Chat templates of released models, where somebody has unpacked a folder of them.

The folder is named by PENSTOCK_TEMPLATES, or is `.venv-clients/chat-templates`; each file of it is
`NAME.jinja`.
"""

from __future__ import annotations

import os
from pathlib import Path

_FOLDER = Path(__file__).parents[2] / ".venv-clients" / "chat-templates"


def vendored_templates() -> dict[str, str]:
    """The texts of the templates by their names; none where there is no folder."""
    folder = Path(os.environ.get("PENSTOCK_TEMPLATES") or _FOLDER)
    return {path.stem: path.read_text("utf-8") for path in sorted(folder.glob("*.jinja"))}
