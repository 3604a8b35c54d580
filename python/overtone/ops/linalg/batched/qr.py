"""The gradient of QR, as in csrc/cpu/linalg/qr/params.h. Not finite where R's diagonal has a zero."""

from __future__ import annotations

import torch
from torch import Tensor

from overtone.ops.linalg.batched.precision import in_full_precision


@in_full_precision
def qr_backward(grad_Q: Tensor | None, grad_R: Tensor | None, Q: Tensor, R: Tensor) -> Tensor:
    """(∂Q + Q copyltu(R ∂Rᵀ − ∂Qᵀ Q)) R⁻ᵀ; zero for matrices that have no decomposition."""
    solved = R.isfinite().all(-1).all(-1)[..., None, None]
    identity = torch.eye(R.shape[-1], dtype=R.dtype, device=R.device)
    Q, R = Q.where(solved, 0), R.where(solved, identity)
    inner = torch.zeros_like(R)
    if grad_R is not None:
        inner = inner + R @ grad_R.where(solved, 0).mT
    if grad_Q is not None:
        grad_Q = grad_Q.where(solved, 0)
        inner = inner - grad_Q.mT @ Q
    mirrored = inner.tril() + inner.tril(-1).mT
    grad = Q @ mirrored if grad_Q is None else grad_Q + Q @ mirrored
    return torch.linalg.solve_triangular(R.mT, grad, upper=False, left=False).contiguous()
