"""Solvers of batched eigenproblems, QR and inverses."""

from __future__ import annotations

import torch
from torch import Tensor


def between_eigenvalues(inner: Tensor, values: Tensor) -> Tensor:
    """M_ij / (λ_j − λ_i) of M [..., n, n], zero on the diagonal: how a change turns eigenvectors into one another."""
    diagonal = torch.eye(values.shape[-1], dtype=torch.bool, device=values.device)
    gaps = values[..., None, :] - values[..., :, None]
    return (inner / gaps.masked_fill(diagonal, 1)).masked_fill(diagonal, 0)
