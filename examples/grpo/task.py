"""What is learned: a task gives prompts and says how good an answer is. Another task is another class like this."""

from __future__ import annotations

import random
import re
from typing import Protocol

import msgspec


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """The text that the model continues, and the answer that is known to be right."""

    text: str
    answer: str


class Task(Protocol):
    """A source of prompts whose answers a program can check."""

    name: str
    end: str
    """The text that ends an answer, as the model's own end token does: one token in most vocabularies."""
    max_tokens: int
    """Longest completion that is sampled, end token included."""
    example: Prompt
    """A fixed prompt and its right answer: the text whose log-probabilities are compared after every refit."""

    def prompts(self, seed: int, n: int) -> list[Prompt]:
        """``n`` prompts; the same for the same ``seed``."""
        ...

    def reward(self, prompt: Prompt, completion: str) -> float:
        """How good ``completion`` (whatever the model wrote, without what ended it) is: 0 to 1."""
        ...


class Additions:
    """Add two one-digit numbers and say nothing but the sum.

    1.0 for the sum alone, 0.5 when the answer starts with the sum and goes on, 0 for anything else. SmolLM2-135M can
    add, but asked like this it gives the right sum in about one answer of five: there is room to learn.
    """

    name = "additions"
    end = "\n"
    max_tokens = 4
    example = Prompt(text="Question: What is 3 + 4?\nAnswer: ", answer="7")

    def prompts(self, seed: int, n: int) -> list[Prompt]:
        """``n`` additions drawn without repetition while there are enough (there are 81, from 1 + 1 to 9 + 9)."""
        rng = random.Random(seed)  # noqa: S311 - draws exercises, guards nothing
        pairs = [(a, b) for a in range(1, 10) for b in range(1, 10)]
        chosen = [pair for _ in range(-(-n // len(pairs))) for pair in rng.sample(pairs, len(pairs))]
        return [Prompt(text=f"Question: What is {a} + {b}?\nAnswer: ", answer=str(a + b)) for a, b in chosen[:n]]

    def reward(self, prompt: Prompt, completion: str) -> float:
        """See the class. Only ASCII digits count, and ``7`` inside ``70``, ``7.5`` or ``-7`` is not a 7."""
        text = completion.strip()
        if text == prompt.answer:
            return 1.0
        number = re.match(r"[0-9]+(?:[.,][0-9]+)*", text)
        return 0.5 if number and number.group() == prompt.answer else 0.0
