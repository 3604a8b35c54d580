"""Means over seeds, paired differences with their confidence interval, and what they decide."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

# Student's t at 97.5 %, for 1, 2, … degrees of freedom; beyond them that of 30 is a little too large.
T_975 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
    2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip

CAME_OUT, DID_NOT, UNDECIDED = "came out", "did not", "undecided"


class MeanStd(NamedTuple):
    """A mean over seeds, and the seeds' standard deviation (nan for one seed)."""

    mean: float
    std: float

    @classmethod
    def of(cls, values: Sequence[float]) -> MeanStd:
        return cls(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else math.nan)

    def __str__(self) -> str:
        digits = ".2f" if abs(self.mean) < 1e5 else ".2e"
        return format(self.mean, digits) if math.isnan(self.std) else f"{self.mean:{digits}} ± {self.std:{digits}}"


class Difference(NamedTuple):
    """The mean of a − b over seeds that both have, and its 95 % confidence interval (nan for one seed).

    The interval is Student's, for differences that are normal; it is about seeds, on these test images.
    """

    mean: float
    low: float
    high: float
    n: int

    @classmethod
    def of(cls, a: Sequence[float], b: Sequence[float]) -> Difference:
        """a and b: one value per seed, in the same order of seeds."""
        differences = [first - second for first, second in zip(a, b, strict=True)]
        n, mean = len(differences), statistics.fmean(differences)
        if n < 2:
            return cls(mean, math.nan, math.nan, n)
        half = T_975[min(n - 1, len(T_975)) - 1] * statistics.stdev(differences) / math.sqrt(n)
        return cls(mean, mean - half, mean + half, n)

    def above(self, limit: float = 0.0) -> str:
        """Is the difference above the limit? Undecided where the interval holds it, or there is none."""
        if self.low > limit:
            return CAME_OUT
        return DID_NOT if self.high < limit else UNDECIDED

    def __str__(self) -> str:
        if math.isnan(self.low):
            return f"{self.mean:+.2f}"
        return f"{self.mean:+.2f} [{self.low:+.2f}, {self.high:+.2f}]"


class Finding(NamedTuple):
    """Something a paper found, what was found here, and whether that decides it."""

    text: str
    source: str
    found: str
    verdict: str


def finding(text: str, source: str, difference: Difference, *, above: float = 0.0, unit: str = "points") -> Finding:
    """Of a claim that a difference is above a limit."""
    found = f"{difference} {unit}".strip()
    return Finding(text, source, f"{found}, n = {difference.n}", difference.above(above))
