"""From the corpus to chats: reads the topic files and draws random conversations from them.

Knows the plain format of `corpus/` (described in README.md) and nothing about tokens, models or
torch. A question is drawn from a pattern, wrapped and roughened (openers, casing, typos, lost
words), so that the model has to find the meaning in other wordings than those written down.
Answers are never changed.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

CORPUS_DIR = Path(__file__).parent / "corpus"
HELD_OUT_PATH = Path(__file__).parent / "held_out.txt"

CONTRACTIONS = {
    "what is": "what's",
    "do not": "don't",
    "does not": "doesn't",
    "cannot": "can't",
    "it is": "it's",
    "I am": "I'm",
    "I would": "I'd",
    "I have": "I've",
    "is not": "isn't",
    "who is": "who's",
    "that is": "that's",
    "you are": "you're",
}
QUESTION_WORDS = re.compile(
    r"(wh(at|o)('s)?|which|where|when|why|how|is|are|was|do|does|did|can|could|will|would|should"
    r"|may|must|has|have|am|whose)"
)


@dataclass(frozen=True, slots=True)
class Message:
    role: str
    content: str


Conversation = list[Message]


# -------------------------------------------------------------------------------------------------
# Patterns: "how [do|can] I <start> it" stands for several wordings.


@dataclass(frozen=True, slots=True)
class Pattern:
    """A sequence of parts; a part is literal text or a choice between patterns."""

    parts: tuple[str | tuple[Pattern, ...], ...]

    def sample(self, rng: random.Random) -> str:
        drawn = (p if isinstance(p, str) else _any_of(p, rng).sample(rng) for p in self.parts)
        return re.sub(r"\s+", " ", "".join(drawn)).strip()

    def wordings(self) -> int:
        """How many texts the pattern stands for."""
        count = 1
        for part in self.parts:
            if not isinstance(part, str):
                count *= sum(alternative.wordings() for alternative in part)
        return count

    def regex(self) -> str:
        """Matches the normalised form of every text of the pattern, with spaces left free."""
        return "".join(
            " *".join(map(re.escape, _split_keeping_edges(part)))
            if isinstance(part, str)
            else "(?:" + "|".join(alternative.regex() for alternative in part) + ")"
            for part in self.parts
        )


def _any_of(choices: tuple[Pattern, ...], rng: random.Random) -> Pattern:
    return choices[rng.randrange(len(choices))]


def _split_keeping_edges(literal: str) -> list[str]:
    """Words of the normalised literal, with empty ones at the edges: spaces are free there too."""
    words = normalise(literal).split()
    return ["", *words, ""]


def parse_pattern(text: str, names: dict[str, Pattern]) -> Pattern:
    pattern, rest = _parse_sequence(text, names)
    if rest:
        raise ValueError(f"unbalanced bracket in pattern {text!r}, before {rest!r}")
    return pattern


def _parse_sequence(text: str, names: dict[str, Pattern]) -> tuple[Pattern, str]:
    parts: list[str | tuple[Pattern, ...]] = []
    while text and text[0] not in "|]":
        if text[0] == "[":
            choices, text = _parse_choices(text[1:], names)
            parts.append(choices)
        elif match := re.match(r"<([a-z-]+)>", text):
            parts.append((names[match[1]],))
            text = text[match.end() :]
        else:
            literal = re.match(r"[^\[\]|<]+|<", text)
            assert literal is not None
            parts.append(literal[0])
            text = text[literal.end() :]
    return Pattern(tuple(parts)), text


def _parse_choices(text: str, names: dict[str, Pattern]) -> tuple[tuple[Pattern, ...], str]:
    choices: list[Pattern] = []
    while True:
        choice, text = _parse_sequence(text, names)
        choices.append(choice)
        if not text:
            raise ValueError("a bracket is never closed")
        mark, text = text[0], text[1:]
        if mark == "]":
            return tuple(choices), text


def normalise(text: str) -> str:
    """Lower case, contractions written out, words only, without "please"."""
    text = text.lower()
    for full, short in CONTRACTIONS.items():
        text = re.sub(rf"\b{re.escape(short)}\b", full.lower(), text)
    return " ".join(word for word in re.findall(r"\w+", text) if word != "please")


# -------------------------------------------------------------------------------------------------
# The corpus


@dataclass(slots=True)
class Topic:
    """Questions that mean the same, and answers that all fit them."""

    name: str
    weight: float = 1.0
    questions: list[Pattern] = field(default_factory=list)
    answers: list[str] = field(default_factory=list)
    more: list[str] = field(default_factory=list)
    is_table: bool = False  # questions differ in one word that must not get lost

    def question(self, rng: random.Random) -> str:
        # A pattern of many wordings comes more often, but not so often that the others drown.
        weights = [min(p.wordings(), 60) ** 0.5 for p in self.questions]
        return rng.choices(self.questions, weights)[0].sample(rng)


@dataclass(frozen=True, slots=True)
class Corpus:
    topics: list[Topic]
    phrases: dict[str, Pattern]
    systems: list[str]

    def answers(self) -> Iterator[str]:
        for topic in self.topics:
            yield from topic.answers
            yield from topic.more


def load_corpus(directory: Path = CORPUS_DIR) -> Corpus:
    phrases = _load_phrases(directory / "phrases.txt")
    systems = _lines(directory / "systems.txt")
    topics: list[Topic] = []
    for path in sorted(directory.glob("*.txt")):
        if path.name not in ("phrases.txt", "systems.txt"):
            topics += _load_topics(path, phrases)
    return Corpus(topics, phrases, systems)


def _lines(path: Path) -> list[str]:
    lines = (line.strip() for line in path.read_text(encoding="utf-8").splitlines())
    return [line for line in lines if line and not line.startswith("# ")]


def _load_phrases(path: Path) -> dict[str, Pattern]:
    phrases: dict[str, Pattern] = {}
    for line in _lines(path):
        name, _, alternatives = line.partition(" = ")
        choices = tuple(parse_pattern(a.strip(), phrases) for a in alternatives.split(" | "))
        phrases[name] = Pattern((choices,))
    return phrases


def _load_topics(path: Path, phrases: dict[str, Pattern]) -> list[Topic]:
    topics: list[Topic] = []
    for block in "\n".join(_lines(path)).split("== ")[1:]:
        name, *lines = block.splitlines()
        fields: dict[str, list[str]] = {key: [] for key in "QNVAMRW"}
        for line in lines:
            key, separator, value = line.partition(": ")
            if not separator or key not in fields:
                raise ValueError(f"{path.name}, topic {name}: line {line!r} is not KEY: text")
            fields[key].append(value)
        topics += _topics_of(name, fields, phrases)
    return topics


def _topics_of(name: str, fields: dict[str, list[str]], phrases: dict[str, Pattern]) -> list[Topic]:
    rows = [row.split(" | ") for row in fields["R"]]
    weight = float(fields["W"][0]) if fields["W"] else 1.0
    if not rows:
        return [_topic(name, weight, fields, phrases)]
    filled = [
        {key: [_fill(line, row) for line in lines] for key, lines in fields.items()} for row in rows
    ]
    topics = [_topic(f"{name}/{row[0]}", weight / len(rows), f, phrases)
              for row, f in zip(rows, filled, strict=True)]  # fmt: skip
    for topic in topics:
        topic.is_table = True
    return topics


def _fill(line: str, row: list[str]) -> str:
    for index, value in enumerate(row):
        line = line.replace(f"{{{index}}}", value)
    return line


def _topic(
    name: str, weight: float, fields: dict[str, list[str]], phrases: dict[str, Pattern]
) -> Topic:
    questions = [parse_pattern(line, phrases) for line in fields["Q"]]
    for key, wrapper in (("N", "what"), ("V", "how")):
        if fields[key]:
            choices = "|".join("|".join(line.split(" | ")) for line in fields[key])
            questions.append(parse_pattern(f"<{wrapper}> [{choices}]", phrases))
            if key == "N":
                questions.append(parse_pattern(f"[{choices}]", phrases))
                questions.append(parse_pattern(f"how [does|do] [{choices}] work", phrases))
    unescape = [line.replace("\\n", "\n") for line in fields["A"]]
    return Topic(name, weight, questions, unescape, fields["M"])


# -------------------------------------------------------------------------------------------------
# Questions kept out of training


@dataclass(frozen=True, slots=True)
class HeldOut:
    """A question no training text may contain, and the groups of words an answer needs."""

    question: str
    needs: tuple[tuple[str, ...], ...]

    def on_topic(self, answer: str) -> bool:
        lowered = answer.lower()
        return all(any(word in lowered for word in group) for group in self.needs)


def load_held_out(path: Path = HELD_OUT_PATH) -> list[HeldOut]:
    questions = []
    for line in _lines(path):
        if line.startswith("#"):
            continue
        question, _, needs = line.partition(" => ")
        groups = tuple(
            tuple(word.strip().lower() for word in _alternatives(group))
            for group in needs.split(" + ")
        )
        questions.append(HeldOut(question, groups))
    return questions


def _alternatives(group: str) -> list[str]:
    """Splits at "/", but leaves the slash that begins a route such as /metrics."""
    return re.split(r"(?<=\w)/", group.strip())


def leaks(corpus: Corpus, questions: list[HeldOut]) -> list[str]:
    """Which of the questions the corpus can produce, wrapped in an opener and a closer or not."""
    opener, closer = (re.compile(corpus.phrases[name].regex()) for name in ("opener", "closer"))
    bodies = [re.compile(p.regex()) for topic in corpus.topics for p in topic.questions]
    return [
        held_out.question
        for held_out in questions
        if any(
            body.fullmatch(text)
            for text in _unwrapped(normalise(held_out.question), opener, closer)
            for body in bodies
        )
    ]


def _unwrapped(text: str, opener: re.Pattern[str], closer: re.Pattern[str]) -> set[str]:
    """The text as it is, and without each opener and closer it may begin and end with."""
    words = text.split()
    starts = [i for i in range(len(words)) if i == 0 or opener.fullmatch(" ".join(words[:i]))]
    ends = [
        i for i in range(1, len(words) + 1)
        if i == len(words) or closer.fullmatch(" ".join(words[i:]))
    ]  # fmt: skip
    return {" ".join(words[start:end]) for start in starts for end in ends if start < end}


# -------------------------------------------------------------------------------------------------
# Drawing conversations


class Sampler:
    """Draws conversations without end; the same seed draws the same ones."""

    def __init__(self, corpus: Corpus, seed: int) -> None:
        self.corpus = corpus
        self.rng = random.Random(seed)
        self._weights = [topic.weight for topic in corpus.topics]
        self._words = self._question_words()

    def _question_words(self) -> list[str]:
        rng = random.Random(0)
        texts = [t.question(rng) for t in self.corpus.topics for _ in range(20)]
        return sorted({word for text in texts for word in text.split() if word.isalpha()})

    def conversation(self) -> Conversation:
        turns = self.rng.choices([1, 2, 3, 4, 6], [55, 25, 12, 6, 2])[0]
        return self._with_system([m for _ in range(turns) for m in self._turn()])

    def long_conversation(self, length_chars: int) -> Conversation:
        """Turns until the text is that long, so that positions far from the start are seen."""
        messages: Conversation = []
        while sum(len(m.content) + 2 for m in messages) < length_chars:
            messages += self._turn()
        return self._with_system(messages)

    def _with_system(self, messages: Conversation) -> Conversation:
        if self.rng.random() < 0.3:
            return [Message("system", self.rng.choice(self.corpus.systems)), *messages]
        return messages

    def _turn(self) -> Conversation:
        rng = self.rng
        topic = rng.choices(self.corpus.topics, self._weights)[0]
        messages = [
            Message("user", self._roughen(topic.question(rng), topic.is_table)),
            Message("assistant", rng.choice(topic.answers)),
        ]
        if topic.more and rng.random() < 0.3:
            follow_up = self._punctuate(self.corpus.phrases["more"].sample(rng))
            messages.append(Message("user", follow_up))
            messages.append(Message("assistant", rng.choice(topic.more)))
        return messages

    def _roughen(self, text: str, keep_words: bool) -> str:
        rng = self.rng
        if not keep_words and rng.random() < 0.4:
            text = self._disturb_words(text)
        if rng.random() < 0.3:
            text = f"{self.corpus.phrases['opener'].sample(rng)} {text}"
        if rng.random() < 0.12:
            text = f"{text} {self.corpus.phrases['closer'].sample(rng)}"
        if rng.random() < 0.4:
            text = self._contract(text)
        if rng.random() < 0.06:
            text = self._mistype(text)
        return self._punctuate(text)

    def _disturb_words(self, text: str) -> str:
        """Loses, adds or changes a few words: no single word may carry the meaning alone."""
        words = text.split()
        if len(words) < 4:
            return text
        kept: list[str] = []
        for word in words:
            chance = self.rng.random()
            if chance < 0.07:
                continue
            kept.append(self.rng.choice(self._words) if chance < 0.10 else word)
            if chance > 0.96:
                kept.append(self.rng.choice(self._words))
        return " ".join(kept) or text

    def _contract(self, text: str) -> str:
        for full, short in CONTRACTIONS.items():
            text = re.sub(rf"\b{full}\b", short, text)
        return text

    def _mistype(self, text: str) -> str:
        words = text.split()
        index = self.rng.randrange(len(words))
        word = words[index]
        if len(word) > 4 and word.isalpha():
            at = self.rng.randrange(1, len(word) - 1)
            words[index] = self.rng.choice(
                [
                    word[:at] + word[at + 1 :],
                    word[:at] + word[at + 1] + word[at] + word[at + 2 :],
                    word[:at] + word[at] + word[at:],
                ]
            )
        return " ".join(words)

    def _punctuate(self, text: str) -> str:
        rng = self.rng
        words = re.findall(r"[\w']+", text.lower())[:6]
        asks = any(QUESTION_WORDS.fullmatch(word) for word in words)
        text += rng.choices(["?" if asks else ".", "", "!"], [75, 22, 3])[0]
        style = rng.random()
        if style < 0.15:
            return text.lower()
        return text if style < 0.25 else text[:1].upper() + text[1:]
