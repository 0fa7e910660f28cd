"""A small random model, whose answers are noise that ends after some hundreds of tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from support.scripted.model import EOS, MARKS, Script, make_scripted_model

# Any of these tokens, of some eight thousand, ends an answer.
_ENDS = range(4000, 4030)


def make_noise_model(model: Path, *, template: str, context_tokens: int, seed: int = 0) -> None:
    """Write the directory. Drawn answers end by themselves; greedy ones only where a constraint
    lets them, so that a call that is required is whole, and the only one.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = make_scripted_model(
        model, template=template, context_tokens=context_tokens, script=Script([])
    )
    ends = [tokenizer.token_to_id(EOS), *_ENDS]
    torch.manual_seed(seed)
    made = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=tokenizer.get_vocab_size(), hidden_size=128, intermediate_size=256,
            num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
            max_position_embeddings=context_tokens, eos_token_id=ends,
        )
    )  # fmt: skip
    head = made.lm_head.weight.data
    _have_constant(made)
    # As likely as others where tokens are drawn, and never the likeliest of all.
    head[ends] = 0.0
    head[:, 0] = 0.0
    head[_rare(tokenizer), 0] = -1.0
    made.save_pretrained(model)


def _have_constant(made: Any) -> None:
    """Have the first number of each hidden state say nothing of the text: its weight is a bias."""
    made.model.embed_tokens.weight.data[:, 0] = 0.2
    for layer in made.model.layers:
        layer.self_attn.o_proj.weight.data[0] = 0.0
        layer.mlp.down_proj.weight.data[0] = 0.0


def _rare(tokenizer: Any) -> list[int]:
    """White space, which a constraint may allow without end, and what begins a call."""
    ids = range(tokenizer.get_vocab_size())
    return [i for i in ids if (text := tokenizer.decode([i])).isspace() or text in MARKS]
