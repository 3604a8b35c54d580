"""What an `Analysis` found, in sentences: what was measured, and apart from it what eigenvalues alone predict."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from overtone.analysis.result import Analysis

RATIO = "‖HFC‖/‖LFC‖"


def measured(analysis: Analysis) -> str:
    """How far apart the tokens are before the first layer and after the last."""
    curve = analysis.curve("ratio").double()
    first, last = (float(curve[place].mean()) for place in (0, -1))
    change = f"from {first:.3g} before the first layer to {last:.3g} after the last"
    if not (math.isfinite(first) and math.isfinite(last)):
        return f"Measured: {RATIO} goes {change}; where it is not finite, the mean over tokens is zero."
    factor = max(first, last) / min(first, last) if first > 0 and last > 0 else math.inf
    if f"{factor:.3g}" == "1" or first == last:
        return f"Measured: {RATIO} goes {change}: it hardly changes."
    falls = last < first
    agreeing = int((curve[-1] < curve[0] if falls else curve[-1] > curve[0]).sum())
    by = f", by a factor of {factor:.3g}" if math.isfinite(factor) else ""
    of = f"{agreeing} of {analysis.samples} {analysis.unit}"
    return (
        f"Measured: {RATIO} {'falls' if falls else 'rises'} {change}{by} (the mean; in {of}): "
        f"tokens become {'more' if falls else 'less'} alike."
    )


def predicted(analysis: Analysis) -> str:
    """Which eigenvalue dominates, and what acts in the model beside eigenvalues."""
    counts = analysis.verdicts()
    cases = sum(counts.values())
    undecided = cases - counts["perron"] - counts["other"]
    sentence = (
        f"Predicted by the eigenvalues of {_operator(analysis)} alone: they make tokens equal in "
        f"{percent(counts['perron'], cases)} of cases and not in {percent(counts['other'], cases)}"
    )
    sentence += f"; {percent(undecided, cases)} are undecided." if undecided else "."
    beside = list(dict.fromkeys(name for layer in analysis.layers for name in layer.update.beside))
    if beside:
        sentence += f" Not in the eigenvalues: {_listed(beside)}."
    return sentence + _difference(analysis, counts, cases)


def _operator(analysis: Analysis) -> str:
    updates = [layer.update for layer in analysis.layers]
    gains = {update.gain for update in updates} - {1.0}
    parts = ["centered attention" if any(update.is_centered for update in updates) else "attention", "weights"]
    if gains:
        parts.append(f"de-escalation (τ = {', '.join(f'{1 - gain:.3g}' for gain in sorted(gains))})")
    return _listed(parts)


def _difference(analysis: Analysis, counts: dict[str, int], cases: int) -> str:
    """Where most verdicts say one thing and the tokens did another, that is said."""
    change = torch.diff(analysis.curve("ratio").double().mean(1)[[0, -1]])
    if (counts["perron"] > cases / 2 and change > 0) or (counts["other"] > cases / 2 and change < 0):
        return " This model's tokens did otherwise: the measurement counts, a prediction leaves out much."
    return ""


def percent(count: int, cases: int) -> str:
    """A share that says 0 % and 100 % only where it is that."""
    share = 100 * count / max(1, cases)
    shown = f"{share:.3g}"
    if shown == "100" and count < cases:
        return "over 99.9 %"
    return f"{shown} %"


def _listed(names: list[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else names[0]
