"""inverse: public function → schema → kernel. With X = A⁻¹ and G = ∂L/∂X: ∂A = −Xᵀ G Xᵀ."""

from __future__ import annotations

import torch
from torch import Tensor

from overtone import _validate as validate
from overtone import reference
from overtone._precision import autocast_disabled
from overtone.backends import select
from overtone.ops import registry
from overtone.ops.linalg import batched
from overtone.reference.linalg import InverseExResult, raise_unsolved

__all__ = ["inverse", "inverse_ex"]


def inverse(A: Tensor, *, backend: str | None = None) -> Tensor:
    """A⁻¹ of invertible matrices [..., n, n]."""
    A = validate.matrices("inverse", "A", A, square=True)
    if select("inverse", backend, A) == "reference":
        return reference.linalg.inverse(A)
    return registry.call("inverse", A, "inverse")[0]


def inverse_ex(A: Tensor, *, backend: str | None = None) -> InverseExResult:
    """inverse that returns an info per matrix instead of raising."""
    A = validate.matrices("inverse_ex", "A", A, square=True)
    if select("inverse", backend, A) == "reference":
        return reference.linalg.inverse_ex(A)
    return InverseExResult(*registry.call("inverse_ex", A))


def _fake(A: Tensor) -> tuple[Tensor, Tensor]:
    return A.new_empty(A.shape), A.new_empty(A.shape[:-2], dtype=torch.int32)


def _save(ctx, inputs, output) -> None:
    inverse, info = output
    ctx.mark_non_differentiable(info)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(inverse, info)
    ctx.others = len(inputs) - 1


def _backward(ctx, grad: Tensor | None, _grad_info):
    inverse, info = ctx.saved_tensors
    if grad is None:
        return None, *(None,) * ctx.others
    return _gradient(grad, inverse, info), *(None,) * ctx.others


def _gradient(grad: Tensor, inverse: Tensor, info: Tensor) -> Tensor:
    """∂A, zero for matrices that have no inverse. In terms of X, so that it can be differentiated again."""
    solved = (info == 0)[..., None, None]
    x = inverse.where(solved, 0).mT
    with autocast_disabled(x):
        return -(x @ grad.where(solved, 0) @ x)


_SOLVER = registry.Op(
    schema="inverse_ex(Tensor A) -> (Tensor inverse, Tensor info)",
    fake=_fake,
    cuda=batched.inverse_ex,
    save=_save,
    backward=_backward,
    reference=lambda A: tuple(reference.linalg.inverse_ex(A)),
    vmap=registry.Vmap(batched=(0,)),
)
registry.register(_SOLVER)
registry.register_strict(_SOLVER, "inverse", raise_unsolved)
