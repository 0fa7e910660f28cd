"""The interface between the engine loop and what computes tokens.

A runner turns batches of plain integers into sampled tokens. It owns weights, KV memory and the
sampler; it knows nothing of queues, block accounting or the wire. Importing this module must not
import torch.
"""

from __future__ import annotations

from array import array
from collections import abc
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from penstock_shard.ipc.logprobs import Logprobs
from penstock_shard.ipc.request import PlacedImage, Request
from penstock_shard.ipc.runner_info import RunnerInfo

if TYPE_CHECKING:
    from penstock_shard.structured_output.matcher_state import ConstraintState


@dataclass(frozen=True, slots=True)
class Admission:
    """What a runner has to know of a sequence, told once: when it is given a slot.

    `token_ids` are its prompt and its output so far. `adapter_index` says where the runner has its
    adapter; 0 without one. `constraint` is how far its constraint has got, if it has one.
    """

    slot: int
    request: Request
    token_ids: array[int]
    adapter_index: int = 0
    constraint: ConstraintState | None = None


@dataclass(frozen=True, slots=True)
class Batch:
    """Everything one step computes, in columns with one value for each row.

    A row computes tokens [start, start + count) of the sequence in its slot. `new_blocks` has a
    column for each cache group: the KV blocks that the sequence got since its last row, and with
    them it has enough for all those tokens; 0 stands for a block that no later token sees. If the
    range ends with the sequence's last token (`samples`), the row samples the next one; a request
    with `pooling` gets the vector of its prompt instead. The last token of the range may be one
    that the step before, which has not been collected, samples. The first `scored` tokens of the
    range predict prompt tokens whose log-probabilities are wanted.

    A row with `drafts` computes its sequence's last known token and the draft tokens after it. A
    token is sampled at each of these positions, up to the first that differs from its draft or ends
    the sequence. So the row gives 1 to `count` tokens, and no other step may be launched for its
    slot until it is collected.

    Where layers have states, the step begins with `state_copies`, in this order: from which block
    to which.

    Decode rows (`count` 1, sampling) come first, then rows with drafts, then other chunks. A slot
    is given to another sequence (`admitted`) only after every step with a row of it was collected.
    """

    slots: abc.Sequence[int] = ()
    starts: abc.Sequence[int] = ()
    counts: abc.Sequence[int] = ()
    samples: abc.Sequence[bool] = ()
    scored: abc.Sequence[int] = ()
    drafts: abc.Sequence[abc.Sequence[int]] = ()
    new_blocks: abc.Sequence[abc.Sequence[abc.Sequence[int]]] = ()
    admitted: abc.Sequence[Admission] = ()
    state_copies: abc.Sequence[tuple[int, int]] = ()

    @property
    def num_rows(self) -> int:
        return len(self.slots)

    @property
    def num_tokens(self) -> int:
        return sum(self.counts)


@dataclass(slots=True)
class RowResult:
    """What one row of a step gave.

    `token_id` is None for a row that did not sample. `prompt_logprobs` covers the prompt tokens at
    indices start + 1 .. start + count (bounded by the prompt's end): those that the row's logits
    predict. `error` ends the sequence (NaN logits, say) and leaves the rest of the step alone;
    `is_callers` says that the sequence itself is the cause: it asked for something impossible.

    For a row with drafts, `more_token_ids` are the tokens after `token_id`, and `logprobs` covers
    all of them. An error after the first token is not reported: the next step meets it again.
    """

    token_id: int | None = None
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None
    error: str | None = None
    is_callers: bool = False
    # The prompt's pooled final hidden states, neither cut nor normalized: float32, little-endian.
    embedding: bytes | None = None
    more_token_ids: abc.Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class ReadAdapter:
    """An adapter that was read and fits the model; `weights` are opaque to all but the store."""

    content_hash: str
    rank: int
    weights: object = None


class AdapterStore(Protocol):
    """Where a runner keeps adapters, under indices from 1 on that its caller assigns."""

    def read(self, source: str) -> ReadAdapter:
        """Find, read and check an adapter. Slow; may be called from any thread.

        Raises:
            ModelError: one line that says what is wrong with it.
        """

    def place(self, index: int, adapter: ReadAdapter) -> None:
        """Put an adapter under an index that no sequence uses."""

    def drop(self, index: int) -> None:
        """Remove the adapter of an index that no sequence uses any more."""


class ImageEncoder(Protocol):
    """Images of requests: their pixels, and what the model's encoder makes of them. Called between
    steps. `salt` is the request's: what is encoded serves only requests of the same one. None
    stands for what positions need of an image, for a request whose KV blocks hold all of it: that
    takes no encoder, and serves everybody.
    """

    # In a prompt the id of each token that stands for a part of an image.
    token_id: int
    # Images that were encoded so far, and the seconds that it took.
    num_encoded: int
    encode_s: float

    def put(self, digest: bytes, pixels: bytes) -> None:
        """Keep the pixels of an image, RGB8 in rows."""

    def drop(self, digest: bytes) -> None:
        """Forget the pixels of an image that no request names any more."""

    def num_rows(self, digest: bytes) -> int | None:
        """For how many tokens an image stands; None if it was never encoded."""

    def has(self, salt: str | None, image: PlacedImage) -> bool:
        """Whether it is encoded."""

    def encode(self, salt: str | None, image: PlacedImage) -> bool:
        """Have it encoded, beside the steps; whether it is. Raises `ImageUnusable`."""

    def cancel(self, salt: str | None, image: PlacedImage) -> None:
        """It need not be encoded any more, if that has not begun."""


class StepOutOfMemory(Exception):
    """A step ran out of device memory. Nothing of it counts. The runner's state of its sequences
    may be that before the step or that after it, never in between. The text says what was asked
    for.

    All other steps launched before this was raised are void too: they are still collected, may
    raise this again, and their results are thrown away. They must not fail in any other way, though
    tokens that they need were never sampled. Steps launched later run as usual.
    """


class Runner(Protocol):
    """Computes steps, in the order they were launched."""

    @property
    def info(self) -> RunnerInfo: ...

    @property
    def adapters(self) -> AdapterStore | None:
        """None if sequences with adapters are not served."""

    @property
    def images(self) -> ImageEncoder | None:
        """None if sequences with images are not served."""

    def launch(self, batch: Batch) -> None:
        """Start a step. Returns before the step is over where the runner can."""

    def collect(self) -> abc.Sequence[RowResult]:
        """Wait for the oldest launched step; one result a row, in the batch's order.

        Raises:
            StepOutOfMemory: that step is over, without results.
        """

    def release(self, slot: int) -> None:
        """Drop what is kept for the sequence in this slot: it has ended, or will be admitted again
        before its next row.
        """

    def copy_states(self, copies: abc.Sequence[tuple[int, int]]) -> None:
        """Copy states while no step is launched, as a step does that begins with these copies."""

    def read_block(self, group: int, block_id: int, into: memoryview) -> None:
        """Copy the bytes of a block of a cache group, `RunnerInfo.block_bytes` of them, as steps
        that are over have left them.
        """

    def write_block(self, group: int, block_id: int, data: memoryview) -> None:
        """Replace the bytes of a block, which no launched step reads or writes, before any step
        that is launched later.
        """
