"""A model directory without weights, whose answers are written in it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Self

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

_TREE = Path(__file__).parents[3]
_SCRIPT, _ASKED = "script.json", "asked.jsonl"
_VOCABULARY = 8192
# As in models of the Qwen family: the first three are no text, the others are.
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>")
EOS = "<|im_end|>"


@dataclass(frozen=True)
class Script:
    """Answers in the order in which they are asked for, and, before those, answers to any prompt
    that holds the text that is their key.
    """

    turns: Sequence[str]
    whenever: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, model: Path) -> Self:
        return cls(**json.loads((model / _SCRIPT).read_text()))

    def write(self, model: Path) -> None:
        text = json.dumps({"turns": list(self.turns), "whenever": dict(self.whenever)})
        (model / _SCRIPT).write_text(text)


@dataclass(frozen=True)
class Asked:
    """A request as it reached the engine: the turn, or the key, that answered it; its prompt and
    the answer as token ids; how many tokens of the prompt the engine had in its cache.
    """

    answered_by: int | str
    prompt: list[int]
    answer: list[int]
    num_cached: int

    def append_to(self, model: Path) -> None:
        with (model / _ASKED).open("a") as file:
            file.write(json.dumps(vars(self)) + "\n")

    @classmethod
    def read_all(cls, model: Path) -> list[Self]:
        """Return the requests in the order in which they came."""
        if not (model / _ASKED).exists():
            return []
        return [cls(**json.loads(line)) for line in (model / _ASKED).read_text().splitlines()]


def make_scripted_model(
    model: Path, *, template: str, context_tokens: int, script: Script
) -> Tokenizer:
    """Write the directory; the tokenizer that is in it."""
    model.mkdir()
    tokenizer = _tokenizer()
    tokenizer.save(str(model / "tokenizer.json"))
    eos_id = tokenizer.token_to_id(EOS)
    config: dict[str, Any] = {"max_position_embeddings": context_tokens, "eos_token_id": eos_id}
    (model / "config.json").write_text(json.dumps(config))
    tokenizer_config = {"chat_template": template, "eos_token": EOS}
    (model / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    script.write(model)
    return tokenizer


@cache
def _tokenizer() -> Tokenizer:
    """Return a tokenizer that cuts English and code about as finely as released models do."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY,
        special_tokens=list(_SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(), trainer)
    marks: Iterable[str] = (*MARKS, "</think>")
    tokenizer.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in marks])
    return tokenizer


def _texts() -> Iterator[str]:
    for pattern in ("docs/**/*.md", "client/**/*.py"):
        for path in sorted(_TREE.glob(pattern)):
            yield path.read_text("utf-8")
