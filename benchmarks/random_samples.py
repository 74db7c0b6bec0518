"""Samples that nobody wrote: data for programs that measure training and teach nothing.

Used by online.py and the package paired. Lengths are lognormal; ids, lengths and their order are
the same at every call.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from trainer.online.batches import DataRecipe, Place
from trainer.online.packing import window_len
from trainer.online.walk import Walk, Window, trained_lengths

# Tokens of rows of 3,072, and in proportion of others; sigma of their logarithms.
MEAN_ANSWER, MEAN_PROMPT, SPREAD = 800, 150, 0.8


@dataclass(frozen=True, slots=True, eq=False)
class RandomSample:
    """What the walk asks of a sample."""

    prompt_key: str
    turn: int
    ids: np.ndarray
    prompt_len: int


class RandomWalk(Walk):
    """Endless windows of samples, made up before the clock runs."""

    def __init__(self, recipe: DataRecipe, num_samples: int, vocab_size: int) -> None:
        super().__init__(recipe, seed=0)
        random = np.random.default_rng(0)
        self._samples = [self._sample(random, n, vocab_size) for n in range(num_samples)]
        prompts = np.array([s.prompt_len for s in self._samples], np.int32)
        lengths = np.array([len(s.ids) for s in self._samples], np.int32)
        self._lengths = trained_lengths(prompts, lengths, recipe.max_len)

    def window(self, place: Place) -> Window:
        num = window_len(self._lengths, self.recipe, is_all=True) or len(self._lengths)
        rows = np.arange(num, dtype=np.int32)
        return Window(np.zeros_like(rows), rows, self._lengths[:num], None)

    def samples(self, epoch: int, shards: Collection[int]) -> dict[int, list]:  # type: ignore[type-arg]
        return {0: self._samples}

    def is_finished(self) -> bool:
        return True

    def digest(self) -> str:
        return ""

    def largest_id(self) -> int:
        return 0

    def _sample(self, random: np.random.Generator, number: int, vocab_size: int) -> RandomSample:
        scale = self.recipe.max_len / 3072
        prompt, answer = (
            4 + int(scale * mean * random.lognormal(-(SPREAD**2) / 2, SPREAD))
            for mean in (MEAN_PROMPT, MEAN_ANSWER)
        )
        prompt = min(prompt, self.recipe.max_len // 2)
        ids = random.integers(0, vocab_size - 1, prompt + answer).astype(np.int32)
        return RandomSample(f"{number:032x}", 0, ids, prompt)
