"""Examples: the tool of the recipe `calculator` and the environment of `guess_number`.

They import only the standard library and the environment protocol.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from grpo_cli.environments.protocol import Message, Observation


def multiply(a: int, b: int) -> int:
    """Multiplies two whole numbers.

    Args:
        a: the first number.
        b: the second number.
    """
    return a * b


def multiply_wrongly(a: int, b: int) -> int:
    """Returns a number that is not the product: a control, with which `calculator` must fail.

    Args:
        a: the first number.
        b: the second number.
    """
    return a * b + random.Random(f"{a}/{b}").randrange(1, 100)


class GuessNumber:
    """Guess a number from 0 to `below` - 1; the reply to each guess is higher or lower.

    The reward is 1 for a number that is found within `turns` guesses, else 0. With numbers below
    32 and five turns, blind guesses find 0.147 of them, random guesses among the remaining numbers
    0.533, and bisection 0.969.
    """

    def __init__(self, below: int = 32, turns: int = 5) -> None:
        self.below = below
        self.turns = turns

    def reset(self, row: Mapping[str, Any], seed: int) -> Observation:
        """Draws a number; the data set's prompt explains the game."""
        self.number = random.Random(seed).randrange(self.below)
        self.left = self.turns
        self.is_found = False
        return Observation()

    def step(self, message: Message) -> Observation:
        """Compares a guess with the number; an answer that is not a number also costs a turn."""
        text = message["content"].strip()
        guess = int(text) if text.isascii() and text.isdigit() and len(text) < 10 else None
        self.left -= 1
        self.is_found = guess == self.number
        if self.is_found or self.left == 0:
            return Observation(done=True)
        reply = "number?" if guess is None else "higher" if guess < self.number else "lower"
        return Observation([{"role": "user", "content": reply}])

    def get_reward(self) -> float:
        """Returns the reward, also for a truncated game, which would have no reward otherwise."""
        return float(self.is_found)
