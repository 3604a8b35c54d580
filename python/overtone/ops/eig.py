"""eig and eigvals: public function → contract → kernel.

With V the right eigenvectors, W the left ones scaled so that WᴴV has ones on its diagonal, and g the gradients:
    ∂A = W [diag(g_λ) + (Vᴴg_V − VᴴV Re diag(Vᴴg_V)) / conj(λ_j − λ_i)] Vᴴ
Losses of eigenvalues alone have the first term only and divide by no gap.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from overtone import reference
from overtone.backends import select
from overtone.ops import checks, library
from overtone.reference.linalg import EigExResult, EigResult, EigvalsExResult, perron_first

__all__ = ["eig", "eig_ex", "eigvals", "eigvals_ex"]


def eig(A: Tensor, *, backend: str | None = None) -> EigResult:
    """A V = V diag(λ) of square matrices [..., n, n]: complex, in no particular order, eigenvectors of length one."""
    A = checks.matrices("eig", "A", A, square=True)
    if select("eig", backend, A) == "reference":
        return reference.linalg.eig(A)
    values, vectors, _, _ = torch.ops.overtone.eig(A, False, True, _needs_gradient(A), "eig")
    return EigResult(values, vectors)


def eigvals(A: Tensor, *, row_stochastic: bool = False, backend: str | None = None) -> Tensor:
    """The eigenvalues of square matrices [..., n, n]: complex, in no particular order.

    row_stochastic: every row of A sums to one, as in attention. The Perron eigenvalue, whose eigenvector is constant,
    is split off beforehand and comes first, computed, not assumed: its distance from 1 is a measure of the error. A
    matrix whose rows do not sum to one within rounding is an error.
    """
    A = checks.matrices("eigvals", "A", A, square=True)
    row_stochastic = checks.flag("eigvals", "row_stochastic", row_stochastic)
    if select("eig", backend, A) == "reference":
        return reference.linalg.eigvals(A, row_stochastic=row_stochastic)
    return _solve_values("eig", A, row_stochastic, "eigvals")[0]


def eig_ex(A: Tensor, *, backend: str | None = None) -> EigExResult:
    """eig that returns an info per matrix instead of raising."""
    A = checks.matrices("eig_ex", "A", A, square=True)
    if select("eig", backend, A) == "reference":
        return reference.linalg.eig_ex(A)
    values, vectors, _, info = torch.ops.overtone.eig_ex(A, False, True, _needs_gradient(A))
    return EigExResult(values, vectors, info)


def eigvals_ex(A: Tensor, *, row_stochastic: bool = False, backend: str | None = None) -> EigvalsExResult:
    """eigvals that returns an info per matrix instead of raising; 2 means that its rows do not sum to one."""
    A = checks.matrices("eigvals_ex", "A", A, square=True)
    row_stochastic = checks.flag("eigvals_ex", "row_stochastic", row_stochastic)
    if select("eig", backend, A) == "reference":
        return reference.linalg.eigvals_ex(A, row_stochastic=row_stochastic)
    values, _, _, info = _solve_values("eig_ex", A, row_stochastic)
    return EigvalsExResult(values, info)


def _needs_gradient(A: Tensor) -> bool:
    """Gradients take the left eigenvectors too."""
    return A.requires_grad and torch.is_grad_enabled()


def _solve_values(op: str, A: Tensor, row_stochastic: bool, *function: str) -> tuple[Tensor, ...]:
    vectors = _needs_gradient(A)
    values, *rest = getattr(torch.ops.overtone, op)(A, row_stochastic, vectors, vectors, *function)
    if row_stochastic and vectors:  # then nothing is split off
        values = perron_first(values)
    return values, *rest


def _fake_eig(A: Tensor, row_stochastic: bool, right: bool, left: bool) -> tuple[Tensor, ...]:
    dtype = torch.complex128 if A.dtype == torch.float64 else torch.complex64
    return (
        A.new_empty(A.shape[:-1], dtype=dtype),
        A.new_empty(A.shape if right else (0, 0), dtype=dtype),
        A.new_empty(A.shape if right and left else (0, 0), dtype=dtype),
        A.new_empty(A.shape[:-2], dtype=torch.int32),
    )


# Vectors that are not wanted come back empty; without both there is no gradient.
_ARGUMENTS = "Tensor A, bool row_stochastic, bool right, bool left"
_RESULTS = "(Tensor eigenvalues, Tensor right, Tensor left, Tensor info)"
library.define(f"eig_ex({_ARGUMENTS}) -> {_RESULTS}", fake=_fake_eig)
library.define_raising(f"eig({_ARGUMENTS}, str function) -> {_RESULTS}", solver="eig_ex", fake=_fake_eig)


def _gradient(grad_values, grad_vectors, norm, values, right, left, info) -> Tensor:
    """∂A, real; zero for matrices that were not solved."""
    solved = (info == 0)[..., None, None]
    values, right, left = values.where(solved[..., 0], 0), right.where(solved, 0), left.where(solved, 0)
    grad_values = None if grad_values is None else grad_values.where(solved[..., 0], 0)
    _raise_defective(grad_values, grad_vectors, norm, values, left)
    inner = _inner_gradient(grad_values, None if grad_vectors is None else grad_vectors.where(solved, 0), values, right)
    left = left.where(left.isfinite(), 0)  # of eigenvalues without a derivative that the loss does not use
    return (left @ inner @ right.mH).real.contiguous()


def _inner_gradient(grad_values: Tensor | None, grad_vectors: Tensor | None, values: Tensor, right: Tensor) -> Tensor:
    """What stands between W and Vᴴ."""
    inner = torch.zeros_like(right) if grad_values is None else torch.diag_embed(grad_values)
    if grad_vectors is None or grad_vectors.numel() == 0:
        return inner
    turned = right.mH @ grad_vectors
    own = turned.diagonal(dim1=-2, dim2=-1)
    if (own.imag.abs() > 1e-2 * (1 + own.real.abs())).any():  # torch's tolerance
        raise RuntimeError(
            "eig: the loss depends on the phase of the eigenvectors, which are determined up to a factor e^{iφ} only:"
            " it has no gradient"
        )
    turned = turned - right.mH @ (right * own.real[..., None, :])
    gaps = (values[..., None, :] - values[..., :, None]).conj()
    n = values.shape[-1]
    diagonal = torch.eye(n, dtype=torch.bool, device=values.device)
    equal = (gaps.abs() <= n * torch.finfo(values.dtype).eps * _size(values)[..., None, None]) & ~diagonal
    needed = turned.abs() > math.sqrt(torch.finfo(values.dtype).eps) * grad_vectors.abs().amax((-2, -1), keepdim=True)
    if (equal & needed).any():
        *member, i, j = (equal & needed).nonzero()[0].tolist()
        raise torch.linalg.LinAlgError(
            f"eig: eigenvalues {i} and {j}{_of_matrix(member)} are equal to rounding: their eigenvectors have no"
            " derivative. Losses of eigenvalues alone (eigvals) always have one, unless a matrix is defective"
        )
    return inner + torch.where(equal | diagonal, 0, turned / gaps.masked_fill(equal | diagonal, 1))


def _size(values: Tensor) -> Tensor:
    return values.abs().amax(-1) if values.shape[-1] else values.abs().sum(-1)


def _of_matrix(member: list[int]) -> str:
    return f" of matrix {tuple(member)}" if member else ""


def _raise_defective(
    grad_values: Tensor | None, grad_vectors: Tensor | None, norm: Tensor, values: Tensor, left: Tensor
) -> None:
    """An eigenvalue whose left and right eigenvectors are orthogonal to rounding has no derivative.

    ‖w‖ is its condition number. Near a defective matrix it is at least of the size of 1/√ε, and eigenvalues are closer
    than their errors: A + E with ‖E‖ = e spreads m equal ones over a circle of radius δ = e^(1/m), where their
    condition number is δ/(m e) and their distance 2δ sin(π/m), at most 2π e times it. e is up to 2 ε ‖A‖.
    """
    n, eps = values.shape[-1], torch.finfo(values.dtype).eps
    condition = torch.linalg.vector_norm(left, dim=-2)
    gaps = (values[..., None, :] - values[..., :, None]).abs()
    gaps = gaps.masked_fill(torch.eye(n, dtype=torch.bool, device=values.device), math.inf)
    nearest = gaps.amin(-1) if n else gaps.sum(-1)
    blurred = 2 * math.pi * 2 * eps * norm[..., None] * condition >= nearest
    defective = ~(condition <= 1 / eps) | ((condition >= 0.1 / math.sqrt(eps)) & blurred)
    used = torch.zeros_like(defective) if grad_values is None else grad_values != 0
    if grad_vectors is not None:  # an eigenvector's gradient goes through every eigenvalue of its matrix
        used = used | (grad_vectors != 0).flatten(-2).any(-1, keepdim=True)
    if (defective & used).any():
        place = tuple((defective & used).nonzero()[0].tolist())
        *member, k = place
        raise torch.linalg.LinAlgError(
            f"eig: A{_of_matrix(member)} is defective to rounding (eigenvalue {k} has condition number"
            f" {condition[place]:.1e}): the eigenvalue has no derivative"
        )


def _fake_gradient(grad_values, grad_vectors, norm, values, right, left, info) -> Tensor:
    return right.new_empty(right.shape, dtype=torch.float64 if right.dtype == torch.complex128 else torch.float32)


# An op of its own, opaque to torch.compile, because it may raise.
library.define(
    "eig_gradient(Tensor? grad_eigenvalues, Tensor? grad_eigenvectors, Tensor norm, Tensor eigenvalues, Tensor right,"
    " Tensor left, Tensor info) -> Tensor grad_A",
    fake=_fake_gradient,
)
library.LIBRARY.impl("eig_gradient", _gradient, "CompositeExplicitAutograd")


def _save(ctx, inputs, output) -> None:
    values, right, left, info = output
    ctx.mark_non_differentiable(left, info)
    ctx.set_materialize_grads(False)
    norm = _size(inputs[0].detach().abs().sum(-1))
    ctx.save_for_backward(norm, values, right, left, info)
    ctx.others = len(inputs) - 1


def _backward(ctx, grad_values: Tensor | None, grad_vectors: Tensor | None, _grad_left, _grad_info):
    norm, values, right, left, info = ctx.saved_tensors
    if grad_values is None and grad_vectors is None:
        return (None,) * (1 + ctx.others)
    if torch.is_grad_enabled():  # to be differentiated again: W as a function of V
        unit = torch.eye(right.shape[-1], dtype=right.dtype, device=right.device)
        left = reference.linalg.inverse(right.where((info == 0)[..., None, None], unit)).mH
        grad = _gradient(grad_values, grad_vectors, norm, values, right, left, info)
    else:
        grad = torch.ops.overtone.eig_gradient(grad_values, grad_vectors, norm, values, right, left, info)
    return grad, *(None,) * ctx.others


for _op in ("eig", "eig_ex"):
    library.differentiable(_op, setup=_save, backward=_backward)
