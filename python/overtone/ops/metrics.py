"""Metrics of convergence: the ones that follow from the low- and high-frequency norms reuse their kernels."""

from __future__ import annotations

from torch import Tensor

from overtone import _validate as validate
from overtone import reference
from overtone.ops.frequency import frequency_norms
from overtone.reference import metrics

__all__ = [
    "cosine_similarity",
    "effective_rank",
    "escalation_rate",
    "stable_rank",
    "token_diversity",
    "token_similarity",
]


def token_similarity(x: Tensor, *, mask: Tensor | None = None, backend: str | None = None) -> Tensor:
    """‖LFC[x]‖²/‖x‖² of tokens [..., N, C]: one if all tokens are equal (zero tokens included), zero if their mean is.

    Like every metric here: mask (bool, broadcastable to [..., N]) marks valid tokens, the result is [...] in float32
    (float64 for float64 tokens) and differentiable.
    """
    x, mask = _checked("token_similarity", x, mask)
    return metrics.similarity_from_norms(frequency_norms(x, mask=mask, backend=backend))


def token_diversity(x: Tensor, *, mask: Tensor | None = None, backend: str | None = None) -> Tensor:
    """‖HFC[x]‖²/‖x‖² = 1 − token_similarity, accurate also where it is tiny."""
    x, mask = _checked("token_diversity", x, mask)
    return metrics.diversity_from_norms(frequency_norms(x, mask=mask, backend=backend))


def escalation_rate(x: Tensor, y: Tensor, *, mask: Tensor | None = None, backend: str | None = None) -> Tensor:
    """token_diversity(x) / token_diversity(y): above one if the step from x to y made the tokens more similar.

    Equal tokens in y give inf; equal tokens in both give nan, the rate is not defined. x and y may differ in C only.
    """
    x, x_mask = _checked("escalation_rate", x, mask)
    y = validate.matching("escalation_rate", "y", y, (*x.shape[:-1], "C"), x)
    before = metrics.diversity_from_norms(frequency_norms(x, mask=x_mask, backend=backend))
    return before / metrics.diversity_from_norms(frequency_norms(y, mask=x_mask, backend=backend))


def cosine_similarity(x: Tensor, *, mask: Tensor | None = None, backend: str | None = None) -> Tensor:
    """The mean cosine over all pairs of different tokens, in O(NC); a zero token has cosine zero with every other.

    Fewer than two tokens give nan: there is no pair.
    """
    x, mask = _checked("cosine_similarity", x, mask)
    norms = frequency_norms(metrics.unit_tokens(x, mask), mask=mask, backend=backend)
    return metrics.cosine_of_norms(norms, metrics.token_count(x, mask))


def effective_rank(x: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """exp(−Σ p log p), p = σ/Σσ over the singular values of tokens [..., N, C]: between 1 and min(N, C).

    Zero tokens give zero; a sample that is not finite gives nan and leaves the others alone. From the Gram matrix of
    the smaller side in float64, which has every digit of float32 tokens; from singular values for float64 tokens, whose
    smallest ones a Gram matrix would lose.
    """
    x, mask = _checked("effective_rank", x, mask)
    return reference.effective_rank(x, mask=mask)


def stable_rank(x: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """Σσ²/σ₁² over the singular values of tokens [..., N, C]: between 1 and min(N, C).

    Zero tokens give zero; a sample that is not finite gives nan and leaves the others alone. From the Gram matrix of
    the smaller side in float64, for every dtype: its largest eigenvalue and its trace keep all their digits.
    """
    x, mask = _checked("stable_rank", x, mask)
    return reference.stable_rank(x, mask=mask)


def _checked(function: str, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
    x = validate.tokens(function, "x", x)
    return x, validate.token_mask(function, mask, x)
