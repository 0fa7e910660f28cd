"""Chats as clients send them, at random, and what has to stand in their prompts."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from unit.router.template_fit.fitted import call, calling, parts, result

from penstock_router.request import Message
from penstock_router.text.template_fit.traits import TemplateTraits


@dataclass(slots=True)
class RandomChat:
    """A chat under construction: each of its texts is a word that stands nowhere else."""

    rng: random.Random
    messages: list[Message] = field(default_factory=list)
    # Words that stand in the prompt in this order, each list by itself.
    chains: list[list[str]] = field(default_factory=lambda: [[]])
    # Those of instructions before all else.
    first: list[str] = field(default_factory=list)
    # Words of texts beside calls, which some templates cannot show.
    beside_calls: list[str] = field(default_factory=list)
    num_words: int = 0

    def word(self) -> str:
        """A word that was not there before."""
        self.num_words += 1
        return f"zq{self.num_words:03d}x"

    def say(self, role: str) -> None:
        """Add a message, in parts or not."""
        words = [self.word() for _ in range(self.rng.choice([1, 1, 2]))]
        self.chains[0] += words
        content = words[0] if len(words) == 1 else parts(*words)
        self.messages.append({"role": role, "content": content})

    def use_tools(self) -> None:
        """Add a message with calls, some of them malformed, and their results in any order."""
        rng = self.rng
        ids = [f"call_{rng.getrandbits(64):016x}" for _ in range(rng.choice([1, 1, 2, 3]))]
        given = [(call_id, self.word(), rng.random() < 0.1) for call_id in ids]
        calls = [
            call(call_id, arguments='{"at": "' if malformed else {"at": word})
            for call_id, word, malformed in given
        ]
        self.messages.append(calling(*calls, **self._beside()))
        answered = [(call_id, self.word()) for call_id in ids]
        shown = [word for _, word, malformed in given if not malformed]
        self.chains.append([*self.chains[0][-1:], *shown])
        for (_, word, malformed), (_, returned) in zip(given, answered, strict=True):
            self.chains.append([returned] if malformed else [word, returned])
        self.chains[0] += [returned for _, returned in answered]
        rng.shuffle(answered)
        self.messages += [result(returned, call_id) for call_id, returned in answered]

    def _beside(self) -> dict[str, Any]:
        """Return the other fields of a message with calls: content, reasoning, both or neither."""
        beside: dict[str, Any] = self.rng.choice(
            [{}, {}, {"content": ""}, {"content": self.word()}]
        )
        if beside.get("content"):
            self.beside_calls.append(beside["content"])
        if self.rng.random() < 0.5:
            name = self.rng.choice(["reasoning", "reasoning_content", "thinking"])
            beside = {**beside, name: "I think."}
        return beside

    def is_lost_in(self, text: str, traits: TemplateTraits) -> str:
        """A word that is not in its place in the prompt; "" if all are."""
        moved = self.first if traits.first_system == "in_last_turn" else []
        for chain in [moved, *self.chains]:
            place = 0
            for word in [word for word in chain if chain is moved or word not in moved]:
                place = text.find(word, place)
                if place < 0:
                    return word
        return ""


def random_chat(rng: random.Random) -> RandomChat:
    """A chat that begins with instructions, or not, and the user."""
    chat = RandomChat(rng)
    for _ in range(rng.choice([0, 1, 1, 2])):
        chat.say(rng.choice(["system", "system", "developer"]))
    chat.first = chat.chains[0].copy()
    chat.say("user")
    for _ in range(rng.randint(0, 6)):
        role = rng.choice(["tools", "tools", "assistant", "user", "user", "system", "developer"])
        if role == "tools":
            chat.use_tools()
        else:
            chat.say(role)
    return chat
