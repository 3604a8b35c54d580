"""Weights parameterized by their eigenvalues (MATH §4): W = basis_in · diag(λ) · basis_out.

W multiplies tokens on the right, so it is W_V W_proj, and the H of vec(X) ← (I + H ⊗ A) vec(X) is its transpose:
W_V W_proj = Hᵀ. Both have the same eigenvalues. Regimes: "sharpen" has λ ≤ 0, "smooth" has λ ≥ 0.
"""

from __future__ import annotations

from torch import Tensor

from overtone.reference.linalg import inverse, qr
from overtone.types import SIGNS, Spectrum


def symmetric(theta: Tensor, psi: Tensor, regime: str = "sharpen", bounded: bool = False) -> Spectrum:
    """W = V Λ Vᵀ with V the orthonormal factor of theta (QR with diag R > 0) and Λ = ±ψ².

    bounded: Λ = ±1/(1 + ψ²), smooth in ψ and inside (0, 1] or [−1, 0) for every ψ: never zero, which would be a tie
    between smoothing and sharpening, and never beyond one, where sharpening is no longer guaranteed. To start at a
    chosen |λ| take ψ = √(1/|λ| − 1).
    """
    magnitude = 1 / (1 + psi.square()) if bounded else psi.square()
    v = qr(theta).Q
    return Spectrum(v, _sign(regime) * magnitude, v.mT)


def general(v: Tensor, eigenvalues: Tensor, regime: str = "sharpen") -> Spectrum:
    """W = V Λ V⁻¹ with Λ clipped to [−1, 0] or [0, 1]. Outside the interval the gradient is zero: start inside."""
    low, high = sorted((0, _sign(regime)))
    return Spectrum(v, eigenvalues.clamp(low, high), inverse(v))


def compose(spectrum: Spectrum) -> Tensor:
    """W = basis_in · diag(λ) · basis_out, the weight that tokens are multiplied with: Y = X W; H = Wᵀ."""
    return (spectrum.basis_in * spectrum.eigenvalues[..., None, :]) @ spectrum.basis_out


def _sign(regime: str) -> int:
    if regime not in SIGNS:
        raise ValueError(f"regime: got {regime!r}, wanted one of {', '.join(map(repr, SIGNS))}")
    return SIGNS[regime]
