"""Asks the built-in model the held-out questions and writes the transcript with a verdict on each.

Run from the root of the repository: python -m training.evaluate

Plain transformers, greedy, one question at a time; no part of penstock's serving code takes part.
An answer counts as on topic when it ends by itself and holds the words that `held_out.txt` asks
for. That rule is crude, so it is printed beside each answer: readers can judge for themselves.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from training.conversations import HELD_OUT_PATH, HeldOut, leaks, load_corpus, load_held_out
from training.train import PACKAGE_DATA

TRANSCRIPT = Path(__file__).parent / "transcript.md"
MAX_NEW_TOKENS = 300


@dataclass(frozen=True, slots=True)
class Verdict:
    asked: HeldOut
    answer: str
    ended: bool  # with the end token, rather than at the limit

    @property
    def on_topic(self) -> bool:
        return self.ended and self.asked.on_topic(self.answer)


class Toy:
    """The model behind one function from a question to its answer."""

    def __init__(self, directory: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(directory)
        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()

    @torch.inference_mode()
    def answer(self, messages: list[dict[str, str]], temperature: float = 0.0) -> tuple[str, bool]:
        """The answer's text, and whether it ended by itself."""
        text = self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        prompt = self.tokenizer(text, add_special_tokens=False, return_tensors="pt")
        output = self.model.generate(
            **prompt,
            max_new_tokens=MAX_NEW_TOKENS,
            do_sample=temperature > 0,
            # None rather than 0: greedy decoding warns about settings it does not use.
            temperature=temperature or None,
            top_p=1.0 if temperature else None,
        )
        ids = output[0, prompt["input_ids"].shape[1] :].tolist()
        ended = ids[-1] == self.tokenizer.eos_token_id
        return self.tokenizer.decode(ids, skip_special_tokens=True), ended


def ask_all(toy: Toy, questions: list[HeldOut]) -> list[Verdict]:
    verdicts = []
    for asked in questions:
        verdict = Verdict(asked, *toy.answer([{"role": "user", "content": asked.question}]))
        label = "on topic " if verdict.on_topic else "OFF TOPIC"
        print(f"{label}  {asked.question}\n  {verdict.answer}")
        verdicts.append(verdict)
    return verdicts


def render(verdicts: list[Verdict]) -> str:
    score = sum(v.on_topic for v in verdicts)
    lines = [
        "# Transcript of the built-in model",
        "",
        f"**{score} of {len(verdicts)}** held-out questions answered on topic. Written by",
        "`python -m training.evaluate`: greedy, one question a chat, no system prompt. None of the",
        "questions can be produced by the training corpus. An answer counts when it ends by itself",
        "and holds at least one word of each group under *needs*, which was written before any",
        "answer was seen. How far the score can be trusted is said in README.md.",
    ]
    for number, verdict in enumerate(verdicts, 1):
        needs = "; ".join(" or ".join(group) for group in verdict.asked.needs)
        lines += [
            "",
            f"## {number}. {verdict.asked.question}",
            "",
            *(f"> {line}".rstrip() for line in verdict.answer.splitlines()),
            "",
            f"{'**on topic**' if verdict.on_topic else '**off topic**'} (needs: {needs})",
        ]
    return "\n".join(lines) + "\n"


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m training.evaluate",
        description="Ask the built-in model the held-out questions and write the transcript.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--model", type=Path, default=PACKAGE_DATA, help="folder of the model")
    parser.add_argument("--questions", type=Path, default=HELD_OUT_PATH, help="what to ask")
    parser.add_argument("--out", type=Path, default=TRANSCRIPT, help="transcript to write")
    parser.add_argument("--threads", type=int, default=1, help="CPU cores to use")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    torch.set_num_threads(args.threads)
    questions = load_held_out(args.questions)
    leaked = leaks(load_corpus(), questions)
    assert not leaked, f"the corpus can produce held-out questions: {leaked}"
    verdicts = ask_all(Toy(args.model), questions)
    args.out.write_text(render(verdicts), encoding="utf-8")
    print(f"{sum(v.on_topic for v in verdicts)} of {len(verdicts)} on topic; written to {args.out}")


if __name__ == "__main__":
    main()
