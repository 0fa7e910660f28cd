"""A small random model, whose answers are noise and end after some eighty tokens."""

from __future__ import annotations

from pathlib import Path

from support.scripted.model import EOS, Script, make_scripted_model

# Any of these tokens, of some eight thousand, ends an answer; no mark is among them.
_ENDS = range(4000, 4100)


def make_noise_model(model: Path, *, template: str, context_tokens: int) -> None:
    """Write the directory. Drawn answers end by themselves, greedy ones do not."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = make_scripted_model(
        model, template=template, context_tokens=context_tokens, script=Script([])
    )
    ends = [tokenizer.token_to_id(EOS), *_ENDS]
    torch.manual_seed(0)
    made = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=tokenizer.get_vocab_size(), hidden_size=128, intermediate_size=256,
            num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
            max_position_embeddings=context_tokens, eos_token_id=ends,
        )
    )  # fmt: skip
    # As likely as the others, and never the likeliest.
    made.lm_head.weight.data[ends] = 0.0
    made.save_pretrained(model)
