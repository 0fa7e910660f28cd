"""A sequence of a job: a shard's outputs in, text in deltas out, and its own end.

Text is searched for stop strings as it arrives. Where it may hold reasoning or tool calls, it is
then split into pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from penstock_client import FleetStream
from penstock_proto.errors import ShardFailed
from penstock_proto.types import FinishReason, Logprobs, Output
from penstock_router.generation.answer_parser import make_parser
from penstock_router.generation.job import Job
from penstock_router.text.answer_pieces import Piece, PieceKind, content_of, join_pieces
from penstock_router.text.detokenizer import REPLACEMENT, Detokenizer
from penstock_router.text.marks import MarkingDetokenizer
from penstock_router.text.prompts import Prompt
from penstock_router.text.stop_strings import StopMatcher
from penstock_router.text.tokenizer import Tokenizer

# With this many tokens in an output, a notification costs little beside processing them.
_TOKENS_AT_ONCE = 64
# What a log-probability takes in an answer, with its token's text; and those of a delta.
LOGPROB_BYTES = 64
_MOST_SCORES_BYTES = 8 * 2**20

# The finish reasons of a choice; an aborted choice has none to show.
EndReason = Literal["length", "stop", "tool_calls"]


@dataclass(slots=True)
class Delta:
    """The gain of one choice. Only the last delta of a choice has a `finish_reason`.

    `prompt_logprobs` is on the first delta, where the request asked for them.
    """

    index: int
    # Content only: no reasoning, no calls.
    text: str
    token_ids: list[int]
    # `text`, reasoning and calls, in order; None where the answer can only be text.
    pieces: list[Piece] | None = None
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None
    finish_reason: EndReason | None = None
    stop_reason: str | int | None = None
    # The ids before `token_ids` that were delivered before the stream was resumed.
    known_token_ids: Sequence[int] = ()


class DeltaBuffer:
    """The gain of one choice so far, as one delta. Texts are kept apart until then: adding each to
    all before it would copy a long answer once for each of its tokens.
    """

    __slots__ = ("_delta", "_pieces", "_texts")

    def __init__(self, first: Delta) -> None:
        self._delta = first
        self._texts = [first.text]
        self._pieces = first.pieces

    @property
    def num_tokens(self) -> int:
        """Count the tokens that came."""
        return len(self._delta.token_ids)

    def add(self, later: Delta) -> None:
        """Append the delta that came next."""
        delta = self._delta
        self._texts.append(later.text)
        delta.token_ids += later.token_ids
        if later.pieces is not None:
            self._pieces = self._pieces or []
            self._pieces += later.pieces
        if delta.logprobs is not None and later.logprobs is not None:
            delta.logprobs.extend(later.logprobs)
        else:
            delta.logprobs = delta.logprobs or later.logprobs
        delta.prompt_logprobs = delta.prompt_logprobs or later.prompt_logprobs
        delta.finish_reason = later.finish_reason
        delta.stop_reason = later.stop_reason

    def whole(self) -> Delta:
        """Join all of it; called once, at the end."""
        self._delta.text = "".join(self._texts)
        if self._pieces is not None:
            self._delta.pieces = join_pieces(self._pieces)
        return self._delta


class Choice:
    """A sequence of a job: turns a shard's outputs into deltas and finds its own end."""

    # Set once the choice is submitted.
    stream: FleetStream

    def __init__(self, job: Job, index: int) -> None:
        options, prompt = job.options, job.prompt_of(index)
        self.index = index
        self.finished = False
        # `stream` has an output that was not taken yet.
        self.has_output = False
        # `stream.progress` at the last check, and how many checks in a row found no progress.
        self._seen_progress, self._silent_looks = -1, 0
        # The first attempt's: later ones find what it cached.
        self.cached_tokens: int | None = None
        self.last_arrival_s: float | None = None
        # Tokens received, shown or not.
        self.num_tokens = 0
        # Attempts (shards tried) at `last_arrival_s`.
        self.num_attempts = 0
        self._options = options
        self._eos_ids = () if options.ignore_eos else job.model.info.eos_token_ids
        # None where the answer can only be text.
        self._reader = make_parser(job)
        self._detokenizer = self._make_detokenizer(job.model.tokenizer, prompt)
        self._stop = StopMatcher(options.stop, include_stop=options.include_stop_str_in_output)
        # How many tokens are still to be read before stop strings count (`min_tokens`).
        self._unstoppable_tokens = options.min_tokens or 0
        # How many tokens `stream` gathers before it notifies. An answer that is not streamed and
        # has no stop strings needs no notification for each token.
        self.tokens_at_once = 1 if options.stream or options.stop else _TOKENS_AT_ONCE
        # How many tokens a delta has at most, so that its log-probabilities take little memory.
        scores_bytes = LOGPROB_BYTES * (options.best_logprobs or 0)
        self.most_tokens = max(1, _MOST_SCORES_BYTES // scores_bytes) if scores_bytes else None
        if self.most_tokens is not None:
            self.tokens_at_once = min(self.tokens_at_once, self.most_tokens)
        self._echo = self._echoed(prompt.text) if options.echo and prompt.text else ""
        self._prompt_logprobs: Logprobs | None = None

    def _make_detokenizer(self, tokenizer: Tokenizer, prompt: Prompt) -> Detokenizer:
        detokenizer = tokenizer.detokenizers.start(
            prompt.token_ids,
            skip_special_tokens=self._options.skip_special_tokens,
            spaces_between_special_tokens=self._options.spaces_between_special_tokens,
            shown_ids=frozenset() if self._reader is None else self._reader.shown_ids,
        )
        if self._reader is None or not self._reader.marks.tokens:
            return detokenizer
        return MarkingDetokenizer(detokenizer, self._reader.marks)

    @property
    def reasoning_tokens(self) -> int | None:
        """Count received tokens of reasoning; None if it is not separated from content."""
        return None if self._reader is None else self._reader.reasoning_tokens

    def is_silent_for(self, looks: int) -> bool:
        """Check for progress; whether this many checks in a row found none."""
        progress = self.stream.progress
        if progress != self._seen_progress or self.has_output:
            self._seen_progress, self._silent_looks = progress, 0
        else:
            self._silent_looks += 1
        return self._silent_looks >= looks

    def take(self, output: Output) -> Delta | None:
        """Take the output and return what it adds; None if it adds nothing to show yet."""
        if output.cached_tokens is not None or output.prompt_logprobs is not None:
            self._note_prompt(output)
        if not output.token_ids and output.finish_reason is None:
            return None
        if output.finish_reason is FinishReason.ABORTED:
            raise ShardFailed("the shard ended the request before it was finished")
        if self._options.max_tokens == 0:
            return self._scores_only()
        delta = Delta(self.index, "", output.token_ids, logprobs=output.logprobs)
        texts = self._read(output, delta)
        self._show(texts, delta)
        delta.prompt_logprobs, self._prompt_logprobs = self._prompt_logprobs, None
        self.finished = delta.finish_reason is not None
        return delta

    def _show(self, texts: list[str], delta: Delta) -> None:
        """Fill in `text` and `pieces`; an echoed prompt goes first."""
        echo, self._echo = self._echo, ""
        if self._reader is None:
            delta.text = echo + "".join(texts)
            return
        is_last = delta.finish_reason is not None
        was_cut = delta.finish_reason == "length" or delta.stop_reason is not None
        pieces = self._reader.read(texts, delta.token_ids, is_last=is_last, was_cut=was_cut)
        if delta.finish_reason == "stop" and self._reader.ends_with_calls(was_cut=was_cut):
            delta.finish_reason = "tool_calls"
        if echo:
            pieces = [Piece(PieceKind.CONTENT, echo), *pieces]
        # Nearly always there is one piece, and nothing to join.
        delta.pieces = pieces if len(pieces) == 1 and pieces[0].text else join_pieces(pieces)
        delta.text = content_of(delta.pieces)

    def _echoed(self, prompt: str) -> str:
        """The prompt's text, without a character whose last bytes are in the output: that one is
        shown with the output.
        """
        unfinished = REPLACEMENT * self._detokenizer.reopen_prompt()
        return prompt.removesuffix(unfinished)

    def _note_prompt(self, output: Output) -> None:
        if self.cached_tokens is None:
            self.cached_tokens = output.cached_tokens
        if output.prompt_logprobs is not None:
            if self._prompt_logprobs is None:
                self._prompt_logprobs = output.prompt_logprobs
            else:
                self._prompt_logprobs.extend(output.prompt_logprobs)
            output.prompt_logprobs = None

    def _scores_only(self) -> Delta:
        self.finished = True
        scores = self._prompt_logprobs
        return Delta(self.index, self._echo, [], prompt_logprobs=scores, finish_reason="length")

    def _read(self, output: Output, delta: Delta) -> list[str]:
        """The text of the output, in one part for each token or in one for all. Fills in the finish
        reason if the choice ends here.
        """
        token_ids, shown = output.token_ids, len(output.token_ids)
        stopped_by_id = output.stop_token_id is not None
        if stopped_by_id and not self._options.include_stop_str_in_output:
            shown -= 1
        token_ids = token_ids[:shown] if stopped_by_id else token_ids
        if self._stop.active:
            texts = self._read_until_stop(token_ids, delta)
            if self._stop.stopped_by is not None:
                delta.finish_reason, delta.stop_reason = "stop", self._stop.stopped_by
                return texts
        elif self._reader is not None and self._reader.counts:
            texts = [self._detokenizer.feed((token_id,)) for token_id in token_ids]
        else:
            texts = [self._detokenizer.feed(token_ids)]
        if output.finish_reason is not None:
            texts.append(self._stop.flush())
            is_length = output.finish_reason is FinishReason.LENGTH
            delta.finish_reason = "length" if is_length else "stop"
            if stopped_by_id and output.stop_token_id not in self._eos_ids:
                delta.stop_reason = output.stop_token_id
        return texts

    def _read_until_stop(self, token_ids: Sequence[int], delta: Delta) -> list[str]:
        """Read one token at a time, so that the stop does not depend on how tokens were bundled."""
        texts, unstoppable = [], self._unstoppable_tokens
        for count, token_id in enumerate(token_ids, 1):
            may_stop = count > unstoppable
            texts.append(self._stop.feed(self._detokenizer.feed((token_id,)), may_stop))
            if self._stop.stopped_by is not None:
                delta.token_ids = delta.token_ids[:count]
                if delta.logprobs is not None:
                    delta.logprobs = delta.logprobs.first(count)
                break
        if unstoppable:
            self._unstoppable_tokens = max(unstoppable - len(token_ids), 0)
        return texts
