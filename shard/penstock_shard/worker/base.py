"""The interface between the engine loop and the runner that computes tokens.

A runner turns batches of plain integers into sampled tokens. It owns weights, KV memory and the
sampler. This module must not import torch.
"""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass
from typing import Protocol

from penstock_proto.types import Logprobs, PromptImage
from penstock_shard.ipc.runner_info import RunnerInfo
from penstock_shard.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Batch:
    """Everything that one step computes, in columns with one value for each row.

    A row computes tokens [start, start + count) of the sequence in its slot. `new_blocks` has a
    column for each cache group: the KV blocks that the sequence got since its last row, so that it
    has enough for this row. Block 0 replaces a block that no later token sees.

    If the range ends with the sequence's last token (`samples`), the row samples the next token, or
    returns the vector of the prompt if the request has `pooling`. The previous step may not have
    sampled the last token of the range yet. The first `scored` tokens of the range predict prompt
    tokens whose log-probabilities are wanted.

    A row with `drafts` computes its sequence's last known token and the draft tokens after it. It
    samples a token at each of these positions, up to the first that differs from its draft or ends
    the sequence: 1 to `count` tokens. No other step may be launched for its slot until this step is
    collected.

    The step begins with `state_copies` of recurrent states, in order: pairs of source block and
    target block.

    Decode rows (`count` 1, sampling) come first, then rows with drafts, then other chunks. A slot
    gets another sequence (`admitted`) only after all steps with the slot were collected. A runner
    reads the tokens of an admitted sequence before its next token comes back.
    """

    slots: abc.Sequence[int] = ()
    starts: abc.Sequence[int] = ()
    counts: abc.Sequence[int] = ()
    samples: abc.Sequence[bool] = ()
    scored: abc.Sequence[int] = ()
    drafts: abc.Sequence[abc.Sequence[int]] = ()
    new_blocks: abc.Sequence[abc.Sequence[abc.Sequence[int]]] = ()
    admitted: abc.Sequence[Sequence] = ()
    state_copies: abc.Sequence[tuple[int, int]] = ()

    @property
    def num_rows(self) -> int:
        return len(self.slots)

    @property
    def num_tokens(self) -> int:
        return sum(self.counts)


@dataclass(slots=True)
class RowResult:
    """The result of one row of a step.

    `token_id` is None for a row that did not sample. `prompt_logprobs` covers the prompt tokens at
    indices start + 1 .. start + count (bounded by the prompt's end). `error` ends the sequence, but
    not the rest of the step. `is_callers` is true if the request asked for something impossible.

    For a row with drafts, `more_token_ids` are the tokens after `token_id`, and `logprobs` covers
    all of them. An error after the first token is not reported: the next step will raise it again.
    """

    token_id: int | None = None
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None
    error: str | None = None
    is_callers: bool = False
    # The prompt's mean or last hidden state, not truncated or normalized: float32, little-endian.
    embedding: bytes | None = None
    more_token_ids: abc.Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class ReadAdapter:
    """An adapter that was read and fits the model. `weights` are private to the store."""

    content_hash: str
    rank: int
    weights: object = None


class AdapterStore(Protocol):
    """A runner's adapters. The caller assigns their indices, from 1 on."""

    def read(self, source: str) -> ReadAdapter:
        """Find, read and check an adapter. Slow; any thread may call it.

        Raises:
            ModelError: one line that says what is wrong with the adapter.
        """

    def discard(self, adapter: ReadAdapter) -> None:
        """Forget an adapter that was read but not placed."""

    def place(self, index: int, adapter: ReadAdapter) -> None:
        """Put an adapter at an index that no sequence uses."""

    def drop(self, index: int) -> None:
        """Remove the adapter of an index that no sequence uses any more."""


class ImageEncoder(Protocol):
    """The images of requests, and the features that the model's encoder computes from their pixels.

    Called between steps. Only requests with the same `salt` share features. If `salt` is None, the
    KV cache has all of an image's tokens. Then only the image's positions are needed. They need no
    encoder, and are the same for every request.
    """

    # The token id that stands for a part of an image in a prompt.
    token_id: int

    def counts(self) -> dict[str, float]:
        """Return what is counted of encodings, by its name on /metrics."""

    def put(self, digest: bytes, pixels: bytes) -> None:
        """Keep the pixels of an image, RGB8 in rows."""

    def drop(self, digest: bytes) -> None:
        """Forget an image's pixels, because no request names it any more."""

    def num_rows(self, digest: bytes) -> int | None:
        """Return how many tokens stand for an image; None if it was never encoded."""

    def has(self, salt: str | None, image: PromptImage) -> bool:
        """Tell whether the image is encoded."""

    def encode(self, salt: str | None, image: PromptImage) -> bool:
        """Start to encode the image, in parallel with steps. True if it is already encoded. Raises
        `ImageUnusable` if it cannot be.
        """

    def cancel(self, salt: str | None, image: PromptImage) -> None:
        """Cancel the encoding of an image if it has not begun."""


class StepOutOfMemory(Exception):
    """A step ran out of device memory. All its results are void. The state of each sequence is as
    before or as after the step, never in between. The text gives the size of the allocation.

    All steps launched before this was raised are void too. The caller still collects them, and they
    may raise only this error. Steps launched later run as usual.
    """


class Runner(Protocol):
    """Computes steps in the order in which they are launched."""

    @property
    def info(self) -> RunnerInfo: ...

    @property
    def adapters(self) -> AdapterStore | None:
        """The runner's adapters; None if it serves none."""

    @property
    def images(self) -> ImageEncoder | None:
        """The runner's images; None if it serves none."""

    def launch(self, batch: Batch) -> None:
        """Start a step, and return before the step is over if the runner can."""

    def collect(self) -> abc.Sequence[RowResult]:
        """Wait for the oldest launched step, and return one result for each row, in the batch's
        order.

        Raises:
            StepOutOfMemory: the step is over, without results.
        """

    def release(self, slot: int) -> None:
        """Drop all state of the sequence in this slot. It has ended or will be admitted again."""

    def copy_states(self, copies: abc.Sequence[tuple[int, int]]) -> None:
        """Copy states, as `Batch.state_copies` does, while no step is running."""

    def read_block(self, group: int, block_id: int, into: memoryview) -> None:
        """Copy the `RunnerInfo.block_bytes` bytes of a group's block, as the finished steps left
        them.
        """

    def write_block(self, group: int, block_id: int, data: memoryview) -> None:
        """Replace the bytes of a block that no launched step uses."""
