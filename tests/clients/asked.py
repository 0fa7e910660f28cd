"""The prompts and limits that every client sends, so that a plain HTTP request can send the same.

The tests and the scripts import this module. The scripts run in another environment, so the module
imports only the standard library.
"""

from __future__ import annotations

import os
from typing import Any

# The engine that computes: "" is penstock's own.
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
