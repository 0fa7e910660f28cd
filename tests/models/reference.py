"""Tokens that transformers' `generate` gives, which ours are compared with. Needs no pytest."""

from __future__ import annotations

from collections import abc
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

OUTPUT_TOKENS = 20


def reference(directory: Path, prompts: abc.Sequence[abc.Sequence[int]]) -> list[list[int]]:
    """Generate what transformers appends to each prompt, end-of-sequence ignored."""
    # Eager, because sdpa in transformers 5.17 drops Gemma 2's softcap without a word.
    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )
    model.generation_config.eos_token_id = None
    outputs = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=OUTPUT_TOKENS,
            do_sample=False,
            pad_token_id=2,
        )
        outputs.append(output[0, len(prompt) :].tolist())
    return outputs
