"""`python -m support.scripted.engine`: the engine process of a shard, with a runner that says a
script. Scheduling, KV blocks and their prefix cache are the engine's own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tokenizers import Tokenizer

from penstock_shard.config import ShardConfig
from penstock_shard.engine import main as engine_main
from penstock_shard.engine import run_engine as engine_process
from penstock_shard.model_loader import load_runner as loading
from penstock_shard.sequence import Sequence
from penstock_shard.worker.base import Batch
from penstock_shard.worker.fake_runner import FakeRunner
from support.scripted.model import Asked, Script


class ScriptedRunner(FakeRunner):
    """Says the script's answers, each to its end."""

    def __init__(self, model: Path, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._model = model
        self._script = Script.read(model)
        self._tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        self._num_turns = 0
        # By request: what it is answered.
        self._answers: dict[str, list[int]] = {}

    def launch(self, batch: Batch) -> None:
        for sequence in batch.admitted:
            if sequence.request.request_id not in self._answers:
                start = batch.starts[list(batch.slots).index(sequence.slot)]
                self._take(sequence, start)
        super().launch(batch)

    def _take(self, sequence: Sequence, num_cached: int) -> None:
        prompt = list(sequence.token_ids[: sequence.num_prompt_tokens])
        key, text = self._choose(self._tokenizer.decode(prompt, skip_special_tokens=False))
        answer = self._tokenizer.encode(text, add_special_tokens=False).ids
        self._answers[sequence.request.request_id] = answer
        Asked(key, prompt, answer, num_cached).append_to(self._model)

    def _choose(self, prompt: str) -> tuple[int | str, str]:
        for key, text in self._script.whenever.items():
            if key in prompt:
                return key, text
        turn, self._num_turns = self._num_turns, self._num_turns + 1
        if turn < len(self._script.turns):
            return turn, self._script.turns[turn]
        return turn, "The script has no such turn."

    def _token(self, sequence: Any, draw: bytes, position: int) -> int | None:
        """Return the script's token; None, which is an error, if a constraint forbids it."""
        answer = self._answers[sequence.request.request_id]
        token_id = answer[position] if position < len(answer) else self.info.eos_token_ids[0]
        if sequence.constraint is None:
            return token_id
        return self._constrained(sequence, sequence.constraint, draw, set(), (token_id,))


def _load(config: ShardConfig, progress: Callable[[str], None]) -> loading.LoadedRunner:
    assert config.model is not None
    scripted = partial(ScriptedRunner, Path(config.model))
    with patch.object(loading, "FakeRunner", scripted):
        return loading.load_runner(config, progress)


if __name__ == "__main__":
    with patch.object(engine_process, "load_runner", _load):
        engine_main.run()
