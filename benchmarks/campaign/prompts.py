"""The prompts of a campaign: any of them from its number alone, so that nobody has to keep one.

    python -m benchmarks.campaign.prompts SEED FIRST COUNT BYTES TWO_TURNS | dflash-fleet enqueue -

Written as a stream to the producer, and made again by oracle.py, which compares them with what
stands in S3. A text is a piece of one long text of a few words, found by a hash of seed, number and
turn, after words that name them: so all are distinct.
"""

from __future__ import annotations

import hashlib
import random
import re
import sys
from dataclasses import dataclass
from functools import cached_property

import orjson

# Each one token of the tiny model's, so that a prompt has about as many ids as a real one would.
WORDS = (
    "add",
    "adds",
    "and",
    "arguments",
    "assistant",
    "content",
    "def",
    "description",
    "function",
    "in",
    "is",
    "name",
    "numbers",
    "parameters",
    "return",
    "sunny",
    "that",
    "the",
    "today",
    "tool",
    "two",
    "user",
    "warm",
    "weather",
)
TEXT_BYTES = 1 << 18


@dataclass(frozen=True)
class Source:
    """All prompts of one campaign."""

    seed: int
    num_bytes: int  # of a prompt's texts together, on average; each half to 1.5 times that
    two_turns: float  # share

    def texts(self, number: int) -> list[str]:
        """What the user says in a prompt, turn by turn."""
        drawn = hashlib.blake2b(f"{self.seed}/{number}".encode(), digest_size=20).digest()
        num_turns = 1 + (int.from_bytes(drawn[:4], "big") < self.two_turns * (1 << 32))
        spread = int.from_bytes(drawn[4:8], "big") / (1 << 32)
        num_bytes = int(self.num_bytes * (0.5 + spread) / num_turns)
        texts = []
        for turn in range(num_turns):
            at = int.from_bytes(drawn[8 + 4 * turn : 12 + 4 * turn], "big") % TEXT_BYTES
            head = f"prompt {number} turn {turn + 1}: "
            texts.append(head + self._long_text[at : at + max(0, num_bytes - len(head))])
        return texts

    def row(self, number: int) -> bytes:
        """As a line of JSON."""
        messages = [{"role": "user", "content": text} for text in self.texts(number)]
        for place in range(1, len(messages)):  # recorded answers, which the target's replace
            messages.insert(2 * place - 1, {"role": "assistant", "content": "noted"})
        row = {"id": f"p{number}", "messages": messages}
        return orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE)

    @cached_property
    def _long_text(self) -> str:
        """Longer than TEXT_BYTES by the longest prompt, so that any place has a whole text."""
        dice = random.Random(self.seed)
        wanted = TEXT_BYTES + 2 * self.num_bytes
        words = dice.choices(WORDS, k=wanted // 4)
        return " ".join(words)[:wanted].ljust(wanted, "a")


def number_of(text: str) -> int | None:
    """The number of the prompt that a text is of; None: of no campaign's."""
    found = re.match(r"p(\d+)$", text) or re.search(r"prompt (\d+) turn \d: ", text)
    return int(found[1]) if found else None


def main(arguments: list[str]) -> None:
    """The rows, on stdout."""
    seed, first, count, num_bytes = map(int, arguments[:4])
    source = Source(seed, num_bytes, float(arguments[4]))
    out = sys.stdout.buffer
    for number in range(first, first + count):
        out.write(source.row(number))


if __name__ == "__main__":
    main(sys.argv[1:])
