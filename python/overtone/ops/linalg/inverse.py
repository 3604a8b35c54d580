"""Weights composed of their spectrum (MATH §4), all layers of a model in one call; for overtone.spectrum's modules.

The gradients never divide by the distance of two eigenvalues, so equal ones are as good as any.
"""

from __future__ import annotations

import torch
from torch import Tensor

from overtone import _transforms as transforms
from overtone import _validate as validate
from overtone import reference
from overtone.backends import select
from overtone.ops import registry

__all__ = ["compose_general", "compose_symmetric"]


def compose_symmetric(theta: Tensor, eigenvalues: Tensor, *, backend: str | None = None) -> Tensor:
    """Q diag(λ) Qᵀ [..., n, n], exactly symmetric, with Q the orthonormal factor of theta [..., n, n]."""
    return _compose("compose_symmetric", "theta", theta, eigenvalues, backend)


def compose_general(v: Tensor, eigenvalues: Tensor, *, backend: str | None = None) -> Tensor:
    """V diag(λ) V⁻¹ [..., n, n] of invertible v [..., n, n]."""
    return _compose("compose_general", "v", v, eigenvalues, backend)


def invert(v: Tensor) -> Tensor:
    """V⁻¹ of invertible v [..., n, n] on the CPU kernels, as compose_general computes it; without a gradient."""
    return torch.ops.overtone.compose_general(v.detach(), v.new_zeros(v.shape[:-1]))[1]


def _compose(function: str, name: str, matrix: Tensor, eigenvalues: Tensor, backend: str | None) -> Tensor:
    validate.matrices(function, name, matrix, square=True)
    validate.matching(function, "eigenvalues", eigenvalues, tuple(matrix.shape[:-1]), matrix)
    if select(function, backend, matrix) == "reference":
        return getattr(reference.spectrum, function)(matrix, eigenvalues)
    return registry.call(function, matrix, eigenvalues.contiguous())[0]


def _fake(results: int):
    return lambda matrix, eigenvalues: tuple(matrix.new_empty(matrix.shape) for _ in range(results))


def _fake_backward(grad_weight, *tensors):
    return grad_weight.new_empty(grad_weight.shape), grad_weight.new_empty(grad_weight.shape[:-1])


registry.define(
    "compose_symmetric(Tensor theta, Tensor eigenvalues) -> (Tensor weight, Tensor q, Tensor r)",
    fake=_fake(3),
    batched="spectrum.compose_symmetric",
)
registry.define(
    "compose_symmetric_backward(Tensor grad_weight, Tensor eigenvalues, Tensor q, Tensor r)"
    " -> (Tensor theta, Tensor eigenvalues)",
    fake=_fake_backward,
    batched="spectrum.compose_symmetric_backward",
)
registry.define(
    "compose_general(Tensor v, Tensor eigenvalues) -> (Tensor weight, Tensor inverse)",
    fake=_fake(2),
    batched="spectrum.compose_general",
)
registry.define(
    "compose_general_backward(Tensor grad_weight, Tensor v, Tensor eigenvalues, Tensor inverse)"
    " -> (Tensor v, Tensor eigenvalues)",
    fake=_fake_backward,
    batched="spectrum.compose_general_backward",
)


def _save(ctx, inputs, output) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs, *output[1:])


def _symmetric_backward(ctx, grad_weight, *_):
    theta, eigenvalues, q, r = ctx.saved_tensors
    if grad_weight is None:
        return None, None
    if transforms.open_for(grad_weight):
        return registry.differentiable_gradient(
            reference.spectrum.compose_symmetric, (theta, eigenvalues), (grad_weight,)
        )
    return torch.ops.overtone.compose_symmetric_backward(grad_weight, eigenvalues, q, r)


def _general_backward(ctx, grad_weight, *_):
    v, eigenvalues, inverse = ctx.saved_tensors
    if grad_weight is None:
        return None, None
    if transforms.open_for(grad_weight):
        return registry.differentiable_gradient(reference.spectrum.compose_general, (v, eigenvalues), (grad_weight,))
    return torch.ops.overtone.compose_general_backward(grad_weight, v, eigenvalues, inverse)


def _with_nothing(compose, factors: int):
    """The reference, with empty results in place of the factors that the kernels' backward takes."""
    return lambda matrix, eigenvalues: (compose(matrix, eigenvalues), *(matrix.new_empty(0) for _ in range(factors)))


registry.differentiable(
    "compose_symmetric",
    setup=_save,
    backward=_symmetric_backward,
    reference=_with_nothing(reference.spectrum.compose_symmetric, 2),
    batched=(0, 1),
    contiguous=(1,),
)
registry.differentiable(
    "compose_general",
    setup=_save,
    backward=_general_backward,
    reference=_with_nothing(reference.spectrum.compose_general, 1),
    batched=(0, 1),
    contiguous=(1,),
)
