"""How far tokens [..., N, C] have converged, one number per sample (MATH §6).

Results are float32, float64 for float64 tokens. A mask marks valid tokens; padding counts for nothing.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from overtone.reference.frequency import frequency_norms, power_near_largest, widen, zero_masked
from overtone.reference.linalg import eigvals
from overtone.types import FrequencyNorms


def token_similarity(x: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """t_sim = ‖LFC‖²/‖X‖², one for equal tokens. Tokens that are all zero are equal tokens: one."""
    return similarity_from_norms(frequency_norms(x, mask=mask))


def token_diversity(x: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """t_div = ‖HFC‖²/‖X‖² = 1 − t_sim, without that subtraction, which would round a small diversity away."""
    return diversity_from_norms(frequency_norms(x, mask=mask))


def escalation_rate(x: Tensor, y: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """r = t_div(x)/t_div(y), above one where the step from x to y made tokens more similar.

    Equal tokens in y: inf. Equal tokens in x and in y: nan, the rate is not defined.
    """
    return token_diversity(x, mask=mask) / token_diversity(y, mask=mask)


def cosine_similarity(x: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """The mean cosine of two different tokens, in O(NC). A zero token has cosine zero with every other.

    Fewer than two tokens: nan, there is no pair.
    """
    return cosine_of_norms(frequency_norms(unit_tokens(x, mask), mask=mask), token_count(x, mask))


def similarity_from_norms(norms: FrequencyNorms) -> Tensor:
    low, high = _squares(norms)
    total = low + high
    return torch.where(total == 0, 1, low / _nonzero(total))


def diversity_from_norms(norms: FrequencyNorms) -> Tensor:
    low, high = _squares(norms)
    return high / _nonzero(low + high)


def cosine_of_norms(norms: FrequencyNorms, count: Tensor | int) -> Tensor:
    """From the norms of unit tokens: Σ_{i≠j} x̂_i·x̂_j = n·low² − (low² + high²), over n(n − 1) pairs."""
    low, high = norms.low.square(), norms.high.square()
    count = torch.as_tensor(count, dtype=low.dtype, device=low.device)
    others = torch.where(count > 1, count - 1, math.nan)
    return (low - high / others) / count


def unit_tokens(x: Tensor, mask: Tensor | None = None) -> Tensor:
    """Every token divided by its length; zero tokens stay zero."""
    x = zero_masked(widen(x), mask)
    x = x / power_near_largest(x, (-1,))
    return x / _nonzero(torch.linalg.vector_norm(x, dim=-1, keepdim=True))


def token_count(x: Tensor, mask: Tensor | None) -> Tensor | int:
    return x.shape[-2] if mask is None else mask.expand(x.shape[:-1]).sum(-1)


def effective_rank(x: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """exp(−Σ p log p), p = σ/Σσ (Roy and Vetterli). Zero for zero tokens; nan where a token is not finite.

    Singular values that are zero to rounding count as zero and send no gradient back; the true one is infinite there.
    """
    sigma, finite = _singular_values(x, mask)
    share = sigma / _nonzero(sigma.sum(-1, keepdim=True))
    entropy = -(share * _nonzero(share).log()).sum(-1)
    rank = torch.where((sigma > 0).any(-1), entropy.exp(), 0)
    return torch.where(finite, rank, math.nan).to(widen(x).dtype)


def stable_rank(x: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """Σσ²/σ₁² = ‖X‖²_F/‖X‖²₂. Zero for zero tokens; nan where a token is not finite.

    σ₁² is the largest eigenvalue of the Gram matrix, which a Gram matrix in float64 has to full relative accuracy, and
    Σσ² is its trace: no dtype loses digits.
    """
    tokens, finite = _finite_tokens(x, mask)
    gram = _gram(tokens.double())
    if gram.shape[-1] == 0:
        return tokens.new_zeros(x.shape[:-2])
    largest = torch.linalg.eigvalsh(gram)[..., -1]
    trace = gram.diagonal(dim1=-2, dim2=-1).sum(-1)
    return torch.where(finite, trace / _nonzero(largest), math.nan).to(tokens.dtype)


def spectral_gap(attention: Tensor) -> Tensor:
    """1 − |λ₂| of attention matrices [..., N, N], λ₂ the second largest eigenvalue in modulus; one if N < 2."""
    moduli = eigvals(attention).abs().sort(-1, descending=True).values
    return 1 - moduli[..., 1] if attention.shape[-1] > 1 else torch.ones_like(moduli.sum(-1))


def _squares(norms: FrequencyNorms) -> tuple[Tensor, Tensor]:
    """low² and high² up to a common factor, which neither overflow nor vanish; nan where a norm is not finite."""
    pair = torch.stack(norms, -1)
    squares = (pair / power_near_largest(pair, (-1,))).square()
    low, high = torch.where(pair.isfinite().all(-1, keepdim=True), squares, math.nan).unbind(-1)
    return low, high


def _nonzero(x: Tensor) -> Tensor:
    """x with ones for zeros: a divisor (or a logarithm's argument) whose value and gradient are finite."""
    return torch.where(x == 0, 1, x)


def _finite_tokens(x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Valid tokens over a power of two, which ranks do not see, and which samples are finite; zeros for the others (no
    solver takes those)."""
    tokens = zero_masked(widen(x), mask)
    finite = tokens.isfinite().all(-1).all(-1)
    tokens = torch.where(finite[..., None, None], tokens, 0)
    return tokens / power_near_largest(tokens, (-2, -1)), finite


def _gram(x: Tensor) -> Tensor:
    """The Gram matrix of the smaller side."""
    return x @ x.mT if x.shape[-2] <= x.shape[-1] else x.mT @ x


def _singular_values(x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Singular values in float64 with those below rounding set to zero, and which samples are finite.

    A Gram matrix squares the singular values, so it gives them to an absolute error of about 1e-8·σ₁ in float64: below
    what float32 tokens themselves carry (6e-8·σ₁), but half the digits of float64 tokens, which go to `svdvals`.
    """
    tokens, finite = _finite_tokens(x, mask)
    if min(tokens.shape[-2:]) == 0:
        return tokens.new_zeros(*tokens.shape[:-2], 1, dtype=torch.float64), finite
    noise = max(tokens.shape[-2:]) * torch.finfo(torch.float64).eps
    if tokens.dtype == torch.float64:
        sigma = torch.linalg.svdvals(tokens)
        return torch.where(sigma > noise * sigma[..., :1], sigma, 0), finite
    squared = torch.linalg.eigvalsh(_gram(tokens.double()))
    kept = squared > noise * squared[..., -1:]
    return torch.where(kept, torch.where(kept, squared, 1).sqrt(), 0), finite
