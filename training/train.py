"""Trains the built-in toy model: corpus -> tokenizer -> model -> package data, in one command.

Run from the root of the repository: python -m training.train

Knows the chat format of the toy (special tokens and template) and how to train a small Llama on CPU
cores. How conversations come about is known by `conversations.py` alone; nothing here judges
answers, which `evaluate.py` does.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional
from transformers import AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

from training.conversations import (
    Conversation,
    Corpus,
    Message,
    Sampler,
    leaks,
    load_corpus,
    load_held_out,
    normalise,
)

PACKAGE_DATA = Path(__file__).parents[1] / "shard" / "penstock_shard" / "builtin_model"
MAX_FOLDER_BYTES = 10_000_000
CONTEXT_TOKENS = 2_048

PAD, BEGIN, END = "<|pad|>", "<|begin|>", "<|end|>"
ROLE_MARKS = {"system": "<|system|>", "user": "<|user|>", "assistant": "<|assistant|>"}
SPECIAL_TOKENS = [PAD, BEGIN, END, *ROLE_MARKS.values()]

# Content may be a string or, as OpenAI clients send it, a list of parts of which the text counts.
CHAT_TEMPLATE = (
    "{{ '<|begin|>' }}{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('the roles are system, user and assistant, not ' + message['role']) }}"
    "{% endif %}"
    "{{ '<|' + message['role'] + '|>' }}"
    "{% if message['content'] is string %}{{ message['content'] | trim }}"
    "{% else %}{% for part in message['content'] or [] %}{{ part['text'] }}{% endfor %}{% endif %}"
    "{{ '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

# The user's words get a little of the loss: words that stand in the same places come to lie close
# together, which is what lets a question be understood in words that were not in the corpus.
USER_WEIGHT = 0.1
PLAIN_TEXT_SHARE = 0.03  # rows without chat marks, for /v1/completions
LONG_ROWS_SHARE = 0.004  # conversations of up to the whole context
CUT_ROWS_SHARE = 0.4  # rows that end early in an answer: more questions for the same time
CUT_AFTER_TOKENS = 14
SUBWORD_DROPOUT = 0.1  # on a third of the questions: unseen words fall apart in such pieces
EAGER_UP_TO_TOKENS = 256  # below, plain attention is the faster one on a CPU; above, the fused one


@dataclass(frozen=True, slots=True)
class Row:
    """One conversation as token ids, with the weight that predicting each id has in the loss."""

    ids: list[int]
    weights: list[float]


@dataclass(frozen=True, slots=True)
class Batch:
    ids: torch.Tensor  # [rows, tokens], padded on the right
    weights: torch.Tensor  # [rows, tokens], 0 where padded


# -------------------------------------------------------------------------------------------------
# Tokenizer


def train_tokenizer(corpus: Corpus, vocabulary: int, seed: int) -> Tokenizer:
    sampler = Sampler(corpus, seed)
    texts = [m.content for _ in range(12_000) for m in sampler.conversation()]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[AddedToken(t, special=True, normalized=False) for t in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def special_ids(tokenizer: Tokenizer) -> dict[str, int]:
    ids = {token: tokenizer.token_to_id(token) for token in SPECIAL_TOKENS}
    return {token: id_ for token, id_ in ids.items() if id_ is not None}


def save_tokenizer(tokenizer: Tokenizer, directory: Path) -> None:
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BEGIN,
        "eos_token": END,
        "pad_token": PAD,
        "model_max_length": CONTEXT_TOKENS,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    text = json.dumps(settings, indent=2) + "\n"
    (directory / "tokenizer_config.json").write_text(text, encoding="utf-8")


# -------------------------------------------------------------------------------------------------
# Rows and batches


class RowSource:
    """Draws training rows without end, and stops the training when a held-out question turns up."""

    def __init__(self, corpus: Corpus, tokenizer: Tokenizer, seed: int) -> None:
        self._sampler = Sampler(corpus, seed)
        self._rng = random.Random(seed)
        self._tokenizer = tokenizer
        self._model = tokenizer.model
        self._held_out = {normalise(h.question) for h in load_held_out()}
        self._plain_texts = list(corpus.answers())
        self._ids = special_ids(tokenizer)

    def row(self) -> Row:
        chance = self._rng.random()
        if chance < PLAIN_TEXT_SHARE:
            return self._plain_row()
        if chance < PLAIN_TEXT_SHARE + LONG_ROWS_SHARE:
            # Three and a half characters a token: from a quarter of the context to all of it.
            return self.encode(self._sampler.long_conversation(self._rng.randrange(1_800, 7_200)))
        row = self.encode(self._sampler.conversation())
        return self._cut(row) if self._rng.random() < CUT_ROWS_SHARE else row

    def _cut(self, row: Row) -> Row:
        """Ends the row some tokens into an answer: which answer it is shows in its first words."""
        mark = self._ids[ROLE_MARKS["assistant"]]
        answers = [index for index, token in enumerate(row.ids) if token == mark]
        end = self._rng.choice(answers) + 1 + CUT_AFTER_TOKENS
        return Row(row.ids[:end], row.weights[:end])

    def encode(self, conversation: Conversation) -> Row:
        row = Row([self._ids[BEGIN]], [0.0])
        for message in conversation:
            ids = [self._ids[ROLE_MARKS[message.role]], *self._message_ids(message)]
            weight = {"system": 0.0, "user": USER_WEIGHT, "assistant": 1.0}[message.role]
            row.ids.extend([*ids, self._ids[END]])
            row.weights.extend([0.0, *[weight] * (len(ids) - 1), float(weight == 1.0)])
        return Row(row.ids[:CONTEXT_TOKENS], row.weights[:CONTEXT_TOKENS])

    def _message_ids(self, message: Message) -> list[int]:
        if message.role == "user":
            if normalise(message.content) in self._held_out:
                raise AssertionError(f"a held-out question is in training: {message.content!r}")
            if self._rng.random() < 0.33:
                return self._in_pieces(message.content)
        return list(self._tokenizer.encode(message.content).ids)

    def _in_pieces(self, text: str) -> list[int]:
        self._model.dropout = SUBWORD_DROPOUT
        try:
            return list(self._tokenizer.encode(text).ids)
        finally:
            self._model.dropout = None

    def _plain_row(self) -> Row:
        text = "\n\n".join(self._rng.sample(self._plain_texts, self._rng.randint(1, 3)))
        ids = [*self._tokenizer.encode(text).ids, self._ids[END]]
        return Row(ids, [1.0] * len(ids))


def batches(source: RowSource, batch_tokens: int) -> Iterator[Batch]:
    """Collects rows of like length and gives out a batch whenever one length has enough of them.

    Every length has one batch shape. On a CPU few shapes matter: kernels are prepared for each.
    """
    waiting: dict[int, list[Row]] = defaultdict(list)
    while True:
        row = source.row()
        width = _padded_width(len(row.ids) - 1)  # one id fewer goes in: the last has no next
        waiting[width].append(row)
        if (len(waiting[width]) + 1) * width > batch_tokens:
            yield _pad(waiting.pop(width), width + 1)


def _padded_width(tokens: int) -> int:
    multiple = 8 if tokens <= 128 else 32 if tokens <= 512 else 256
    return -(-tokens // multiple) * multiple


def _pad(rows: list[Row], width: int) -> Batch:
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    weights = torch.zeros(len(rows), width)
    for index, row in enumerate(rows):
        ids[index, : len(row.ids)] = torch.tensor(row.ids)
        weights[index, : len(row.ids)] = torch.tensor(row.weights)
    return Batch(ids, weights)


# -------------------------------------------------------------------------------------------------
# Model and training


def build_model(vocabulary: int, ids: dict[str, int]) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT_TOKENS,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        rms_norm_eps=1e-5,
        bos_token_id=ids[BEGIN],
        eos_token_id=ids[END],
        pad_token_id=ids[PAD],
    )
    return LlamaForCausalLM(config)


def bfloat16_is_faster() -> bool:
    """Times a small matrix product both ways: bfloat16 pays only where the CPU has units for it."""
    times_s = {}
    for dtype in (torch.float32, torch.bfloat16):
        a, b = torch.randn(2_048, 512).to(dtype), torch.randn(512, 512).to(dtype)
        best_s = math.inf
        for _ in range(30):
            start_s = time.perf_counter()
            torch.mm(a, b)
            best_s = min(best_s, time.perf_counter() - start_s)
        times_s[dtype] = best_s
    ratio = times_s[torch.float32] / times_s[torch.bfloat16]
    used = "bfloat16" if ratio > 1.5 else "float32"
    print(f"matrix products: bfloat16 is {ratio:.1f} times as fast as float32; using {used}")
    return ratio > 1.5


def batch_loss(model: LlamaForCausalLM, batch: Batch, use_bfloat16: bool) -> torch.Tensor:
    """Weighted mean over the batch; scores are computed only where an id counts."""
    width = batch.ids.shape[1]
    model.set_attn_implementation("eager" if width <= EAGER_UP_TO_TOKENS else "sdpa")
    targets, weights = batch.ids[:, 1:].reshape(-1), batch.weights[:, 1:].reshape(-1)
    counted = weights.nonzero().squeeze(1)
    # Filled up with position 0 at weight 0: again so that shapes repeat.
    filling = (0, -len(counted) % 512)
    weights = functional.pad(weights[counted], filling)
    counted = functional.pad(counted, filling)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=use_bfloat16):
        # Causal attention never looks right, so padding on the right needs no mask.
        hidden = model.model(input_ids=batch.ids[:, :-1], use_cache=False).last_hidden_state
        scores = model.lm_head(hidden.flatten(0, 1)[counted])
    losses = functional.cross_entropy(scores.float(), targets[counted], reduction="none")
    return (losses * weights).sum() / weights.sum()


def learning_rate_at(step: int, steps: int, peak: float) -> float:
    """Linear warm-up, then a cosine down to a fiftieth of the peak."""
    warm_up_steps = min(100, steps // 10 + 1)
    if step < warm_up_steps:
        return peak * (step + 1) / warm_up_steps
    progress = (step - warm_up_steps) / max(1, steps - warm_up_steps)
    return peak * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress)))


def build_optimizer(model: LlamaForCausalLM) -> torch.optim.AdamW:
    matrices = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    groups = [
        {"params": matrices, "weight_decay": 0.1},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), fused=True)


def train(model: LlamaForCausalLM, rows: Iterator[Batch], args: argparse.Namespace) -> None:
    use_bfloat16 = bfloat16_is_faster()
    optimizer = build_optimizer(model)
    model.train()
    start_s, tokens, recent_loss = time.monotonic(), 0, 0.0
    for step in range(args.steps):
        batch = next(rows)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate_at(step, args.steps, args.learning_rate)
        loss = batch_loss(model, batch, use_bfloat16)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        tokens += batch.ids.numel()
        recent_loss = loss.item() if step == 0 else 0.95 * recent_loss + 0.05 * loss.item()
        if (step + 1) % args.report_every == 0 or step + 1 == args.steps:
            _report(step + 1, args.steps, recent_loss, tokens, time.monotonic() - start_s)


def _report(step: int, steps: int, loss: float, tokens: int, elapsed_s: float) -> None:
    left_s = elapsed_s / step * (steps - step)
    print(
        f"step {step:>5}/{steps}  loss {loss:.3f}  {tokens / elapsed_s:,.0f} tokens/s  "
        f"elapsed {elapsed_s / 60:.1f} min  left {left_s / 60:.1f} min",
        flush=True,
    )


# -------------------------------------------------------------------------------------------------
# Package data


def save_model(model: LlamaForCausalLM, directory: Path) -> None:
    model.set_attn_implementation("sdpa")
    model.generation_config = GenerationConfig(
        bos_token_id=model.config.bos_token_id,
        eos_token_id=model.config.eos_token_id,
        pad_token_id=model.config.pad_token_id,
        do_sample=True,
        temperature=0.3,
        top_p=0.95,
    )
    model.to(torch.bfloat16).save_pretrained(directory)


def check_package_data(directory: Path, source: RowSource) -> None:
    """What is shipped must be small, and its template must write what training has seen."""
    conversation = [
        Message("system", "Be brief."),
        Message("user", "Hi!"),
        Message("assistant", "Hello."),
    ]
    messages = [{"role": m.role, "content": m.content} for m in conversation]
    tokenizer = AutoTokenizer.from_pretrained(directory)
    rendered = tokenizer.apply_chat_template(messages, tokenize=False)
    expected = "".join(f"{ROLE_MARKS[m.role]}{m.content}{END}" for m in conversation)
    assert rendered == BEGIN + expected, f"the template writes {rendered!r}"
    assert len(tokenizer.encode(rendered, add_special_tokens=False)) <= len(
        source.encode(conversation).ids
    )
    size_bytes = sum(f.stat().st_size for f in directory.iterdir())
    assert size_bytes < MAX_FOLDER_BYTES, f"{size_bytes:,} bytes, allowed are {MAX_FOLDER_BYTES:,}"
    print(f"{directory}: {size_bytes:,} bytes, fewer than {MAX_FOLDER_BYTES:,}")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m training.train",
        description="Train penstock's built-in toy model and write it as package data.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=PACKAGE_DATA, help="folder to write to")
    parser.add_argument("--steps", type=int, default=3_200, help="optimizer steps")
    parser.add_argument("--batch-tokens", type=int, default=4_096, help="padded tokens a step")
    parser.add_argument("--learning-rate", type=float, default=2.5e-3, help="peak of the schedule")
    parser.add_argument("--vocabulary", type=int, default=3_072, help="tokens of the tokenizer")
    parser.add_argument("--threads", type=int, default=2, help="CPU cores to use")
    parser.add_argument("--seed", type=int, default=1, help="fixes tokenizer, weights and data")
    parser.add_argument("--report-every", type=int, default=50, help="steps between progress lines")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    corpus = load_corpus()
    leaked = leaks(corpus, load_held_out())
    assert not leaked, f"the corpus can produce held-out questions: {leaked}"
    tokenizer = train_tokenizer(corpus, args.vocabulary, args.seed)
    source = RowSource(corpus, tokenizer, args.seed + 1)
    model = build_model(tokenizer.get_vocab_size(), special_ids(tokenizer))
    parameters = sum(p.numel() for p in model.parameters())
    print(
        f"{len(corpus.topics)} topics, {tokenizer.get_vocab_size():,} tokens in the vocabulary, "
        f"{parameters:,} parameters"
    )
    train(model, batches(source, args.batch_tokens), args)
    args.out.mkdir(parents=True, exist_ok=True)
    save_tokenizer(tokenizer, args.out)
    save_model(model, args.out)
    check_package_data(args.out, source)
    print(f"CPU time {time.process_time() / 60:.1f} core-minutes")


if __name__ == "__main__":
    main()
