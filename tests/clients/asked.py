"""What every client asks, so that a plain HTTP request can ask the same.

Read by the tests and by the scripts, which run in another environment: imports only Python's own.
"""

from __future__ import annotations

import os
from typing import Any

# What computes: "" is penstock's own engine.
ENGINE = os.environ.get("PENSTOCK_CLIENTS_ENGINE", "")
MODEL = "penstock-toy"
NO_MODEL = "gpt-4"
KEY = "a-key"
PROMPT = "Hello"
PROMPTS = ["One", "Two", "Three"]
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Tell me something."},
]
MAX_TOKENS = 24
SEED = 7
# More than the context of 2048 tokens, in the fake runner's tokenizer and in any other.
TOO_LONG = "word " * 3000
