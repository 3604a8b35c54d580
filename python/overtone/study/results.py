"""The runs of a study put together: means over seeds with their deviation, and the claims that must come out."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from overtone.study.at_init import Untrained
from overtone.study.corruptions import SEVERITIES
from overtone.study.measure import Measures
from overtone.study.plan import REGIMES, Plan, Run
from overtone.study.stats import MeanStd

# Token similarity that is zero but for the rounding of float32.
ZERO = torch.finfo(torch.float32).eps


class Claim(NamedTuple):
    """Something the papers prove, and whether it came out here."""

    text: str
    found: str
    holds: bool


@dataclass(frozen=True)
class Results:
    """Everything that tables, figures and the page are made of."""

    plan: Plan
    runs: dict[Run, Measures]
    untrained: Untrained

    def of(self, regime: str, fraction: float = 1.0) -> list[Measures]:
        """A regime's runs, one per seed."""
        return self.select("regimes", REGIMES[regime], fraction=fraction)

    def select(self, part: str, variant: str, *, depth: int | None = None, fraction: float = 1.0) -> list[Measures]:
        """The runs of a variant, one per seed, in the order of seeds; depth: default, the plan's."""
        depth = self.plan.config.model.depth if depth is None else depth
        found = {
            run.seed: measures
            for run, measures in self.runs.items()
            if (run.part, run.variant, run.depth, run.fraction) == (part, variant, depth, fraction)
        }
        return [found[seed] for seed in sorted(found)]

    def accuracies(self, part: str, variant: str, *, depth: int | None = None, fraction: float = 1.0) -> list[float]:
        """On the test images, in %, one per seed."""
        return [100 * m["accuracy"] for m in self.select(part, variant, depth=depth, fraction=fraction)]

    def variants(self, part: str) -> list[str]:
        """Of a part, in the plan's order."""
        return list(dict.fromkeys(run.variant for run in self.plan.runs_of(part)))

    def accuracy(self, regime: str, fraction: float) -> MeanStd:
        """On the test images, in %."""
        return MeanStd.of([100 * m["accuracy"] for m in self.of(regime, fraction)])

    def corrupted(self, regime: str, severity: int) -> MeanStd:
        """Accuracy in %, the mean over the kinds of corruption; severity 0: none."""
        if severity == 0:
            return self.accuracy(regime, 1.0)
        return MeanStd.of(self.corrupted_accuracies(regime, severity))

    def corrupted_accuracies(self, regime: str, severity: int) -> list[float]:
        """Accuracy in % at a severity of 1 or more, the mean over the kinds of corruption, one per seed."""
        place = SEVERITIES.index(severity)
        return [100 * statistics.fmean(k[place] for k in m["corrupted"].values()) for m in self.of(regime)]

    def corrupted_by(self, regime: str, kind: str) -> MeanStd:
        """Accuracy in %, the mean over severities 1 … 5 of one kind."""
        return MeanStd.of([100 * statistics.fmean(m["corrupted"][kind]) for m in self.of(regime)])

    def share(self, regime: str, state: str, *verdicts: str) -> MeanStd:
        """% of cases (image, layer, head) with one of these verdicts; state: "init" or "trained"."""
        return MeanStd.of([share_of(m[state]["verdicts"], *verdicts) for m in self.of(regime)])

    def curve(self, regime: str, state: str, metric: str) -> list[MeanStd]:
        """A metric of tokens before the first layer and after each."""
        return [MeanStd.of(v) for v in zip(*(m[state]["curves"][metric] for m in self.of(regime)), strict=True)]

    def eigenvalues(self, regime: str, state: str) -> np.ndarray:
        """Of every head's H in all layers of all seeds, complex."""
        pairs = np.array([pair for m in self.of(regime) for pair in m[state]["eigenvalues"]])
        return pairs[:, 0] + 1j * pairs[:, 1]

    def claims(self) -> list[Claim]:
        base = self.untrained.vit_base
        return [
            Claim(
                "A ViT-B/16 with random weights: the Perron eigenvalue dominates in every case",
                f"{base['perron']} of {sum(base.values())} cases",
                base["perron"] == sum(base.values()),
            ),
            self._trained_claim("smooth", "perron", "the Perron eigenvalue dominates in every case"),
            self._trained_claim("sharpen", "other", "it dominates in no case, and every case is decided"),
            self._zero_similarity(),
            self._swapped_signs(),
        ]

    def _trained_claim(self, regime: str, verdict: str, claim: str) -> Claim:
        counts = [m["trained"]["verdicts"] for m in self.of(regime)]
        right, cases = sum(c[verdict] for c in counts), sum(sum(c.values()) for c in counts)
        word = "Perron" if verdict == "perron" else "another one"
        return Claim(f"{REGIMES[regime]}, trained: {claim}", f"{word} in {right} of {cases} cases", right == cases)

    def _zero_similarity(self) -> Claim:
        largest = max(self.untrained.de_escalated[1.0][1:])
        claim = "De-escalation with τ = 1 keeps token similarity at zero after every block"
        return Claim(claim, f"at most {largest:.1e}", largest <= ZERO)

    def _swapped_signs(self) -> Claim:
        """With positive LayerNorm weights smoothing shrinks HFC/LFC and sharpening grows it, with negative ones not."""
        curves = {key[1:]: curve for key, curve in self.untrained.norm_signs.items() if key[0] == "pre"}
        is_swapped = all(
            (curve[-1] > curve[0]) == ((regime == "sharpen") == (sign == 1)) for (regime, sign), curve in curves.items()
        )
        ends = {key: curve[-1] for key, curve in curves.items()}
        found = (
            f"smooth {ends['smooth', 1]:.3g} → {ends['smooth', -1]:.3g}, "
            f"sharpen {ends['sharpen', 1]:.3g} → {ends['sharpen', -1]:.3g}"
        )
        claim = "Negative LayerNorm weights before attention swap smoothing and sharpening (HFC/LFC at the end, + → −)"
        return Claim(claim, found, is_swapped)


def share_of(counts: dict[str, int], *verdicts: str) -> float:
    """% of the cases."""
    return 100 * sum(counts[name] for name in verdicts) / sum(counts.values())
