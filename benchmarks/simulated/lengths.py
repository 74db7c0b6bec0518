"""How long answers are: lognormal, with a tail that some hundredths of them stand in.

Drawn by answers.py from a question's hash, so that it takes shares of the distribution and has no
dice of its own. The tail is Pareto's, as of models that think on and on; the mean asked for is
that of all answers, the tail included.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from statistics import NormalDist

LONGEST = 1 << 16  # ids that an answer may have
TAIL_START = 4.0  # means
TAIL_POWER = 1.5
MAX_TAIL_SHARE = 0.05  # more, and the tail alone would be longer than the mean of all
SHORTEST = 2  # one and the stop id

_NORMAL = NormalDist()


@dataclass(frozen=True, slots=True)
class Lengths:
    """Of answers, in ids, the stop id included."""

    mean: float
    variation: float  # standard deviation over mean, of those outside the tail; 0: all alike
    tail_share: float = 0.0
    longest: int = LONGEST
    _mu: float = field(init=False, repr=False)  # of the body's logarithm
    _sigma: float = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not 0 <= self.tail_share <= MAX_TAIL_SHARE:
            raise ValueError(f"tail_share {self.tail_share} is not in 0 to {MAX_TAIL_SHARE}")
        if not SHORTEST <= self.mean <= self.longest <= LONGEST:
            raise ValueError(f"a mean of {self.mean} ids, at most {self.longest}")
        sigma2 = math.log(1 + self.variation**2)
        object.__setattr__(self, "_sigma", math.sqrt(sigma2))
        object.__setattr__(self, "_mu", math.log(self._body_mean) - sigma2 / 2)

    def at(self, share: float, tail: float) -> int:
        """The length below which `share` of its kind are; `tail`, 0 to 1, chooses the kind."""
        if tail < self.tail_share:
            length = TAIL_START * self.mean * math.pow(1 - share, -1 / TAIL_POWER)
        else:
            length = math.exp(self._mu + self._sigma * _NORMAL.inv_cdf(share))
        return min(max(round(length), SHORTEST), self.longest)

    @property
    def _body_mean(self) -> float:
        """Of those outside the tail; the tail's own is that of a Pareto cut at the longest."""
        start, power = TAIL_START * self.mean, TAIL_POWER
        if not self.tail_share or start >= self.longest:
            return self.mean
        cut = math.pow(start, power) * math.pow(self.longest, 1 - power)
        tail_mean = (start * power - cut) / (power - 1)
        return (self.mean - self.tail_share * tail_mean) / (1 - self.tail_share)
