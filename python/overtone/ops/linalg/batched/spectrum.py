"""Weights composed of their spectrum and their gradients (MATH §4), as in csrc/cpu/linalg/inverse/kernels.h.

A matrix that is not finite has weights and gradients that are nan: saying so would make the host wait.
"""

from __future__ import annotations

import torch
from torch import Tensor

from overtone.ops.linalg.batched.orthogonal import orthogonalize
from overtone.ops.linalg.batched.precision import in_full_precision


@in_full_precision
def compose_symmetric(theta: Tensor, eigenvalues: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Q diag(λ) Qᵀ, exactly symmetric, with Q and R of theta."""
    q, r = orthogonalize(theta)
    weight = (q * eigenvalues[..., None, :]) @ q.mT
    return (weight + weight.mT) / 2, q, r


@in_full_precision
def compose_symmetric_backward(grad_weight: Tensor, eigenvalues: Tensor, q: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
    """∂Θ = Q stril(2 S ∘ (λ_j − λ_i)) R⁻ᵀ and ∂λ = diag S, with S = Qᵀ sym(∂H) Q."""
    s = q.mT @ ((grad_weight + grad_weight.mT) / 2) @ q
    inner = (2 * s * _gaps(eigenvalues)).tril(-1)
    grad_theta = q @ torch.linalg.solve_triangular(r.mT, inner, upper=False, left=False)
    return grad_theta, s.diagonal(dim1=-2, dim2=-1).contiguous()


@in_full_precision
def compose_general(v: Tensor, eigenvalues: Tensor) -> tuple[Tensor, Tensor]:
    """V diag(λ) V⁻¹, and V⁻¹ = R⁻¹ Qᵀ."""
    q, r = orthogonalize(v)
    inverse = torch.linalg.solve_triangular(r, q.mT, upper=True)
    return (v * eigenvalues[..., None, :]) @ inverse, inverse.contiguous()


@in_full_precision
def compose_general_backward(
    grad_weight: Tensor, v: Tensor, eigenvalues: Tensor, inverse: Tensor
) -> tuple[Tensor, Tensor]:
    """∂V = V⁻ᵀ (S ∘ (λ_j − λ_i)) and ∂λ = diag S, with S = Vᵀ ∂H V⁻ᵀ."""
    s = v.mT @ grad_weight @ inverse.mT
    return inverse.mT @ (s * _gaps(eigenvalues)), s.diagonal(dim1=-2, dim2=-1).contiguous()


def _gaps(eigenvalues: Tensor) -> Tensor:
    """[..., i, j]: λ_j − λ_i."""
    return eigenvalues[..., None, :] - eigenvalues[..., :, None]
