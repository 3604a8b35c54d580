"""eig and eigvals: public function → schema → kernel.

With V the right eigenvectors, W the left ones scaled so that WᴴV has ones on its diagonal, and g the gradients:
    ∂A = W [diag(g_λ) + (Vᴴg_V − VᴴV Re diag(Vᴴg_V)) / conj(λ_j − λ_i)] Vᴴ
Losses of eigenvalues alone have the first term only and divide by no gap.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.autograd import forward_ad

from overtone import _transforms as transforms
from overtone import _validate as validate
from overtone import reference
from overtone.backends import select
from overtone.ops import registry
from overtone.ops.linalg import between_eigenvalues
from overtone.reference.linalg import EigExResult, EigResult, EigvalsExResult, perron_first, raise_unsolved

__all__ = ["eig", "eig_ex", "eigvals", "eigvals_ex"]


def eig(A: Tensor, *, backend: str | None = None) -> EigResult:
    """A V = V diag(λ) of square matrices [..., n, n]: complex, in no particular order, eigenvectors of length one."""
    A = validate.matrices("eig", "A", A, square=True)
    if select("eig", backend, A) == "reference":
        return reference.linalg.eig(A)
    values, vectors, _, _ = registry.call("eig", A, False, True, transforms.needs_gradient(A), "eig")
    return EigResult(values, vectors)


def eigvals(A: Tensor, *, row_stochastic: bool = False, backend: str | None = None) -> Tensor:
    """The eigenvalues of square matrices [..., n, n]: complex, in no particular order.

    row_stochastic: every row of A sums to one, as in attention. The Perron eigenvalue, whose eigenvector is constant,
    is split off beforehand and comes first, computed, not assumed: its distance from 1 is a measure of the error. A
    matrix whose rows do not sum to one within rounding is an error.
    """
    A = validate.matrices("eigvals", "A", A, square=True)
    row_stochastic = validate.flag("eigvals", "row_stochastic", row_stochastic)
    if select("eigvals", backend, A) == "reference":
        return reference.linalg.eigvals(A, row_stochastic=row_stochastic)
    return _solve_values("eig", A, row_stochastic, "eigvals")[0]


def eig_ex(A: Tensor, *, backend: str | None = None) -> EigExResult:
    """eig that returns an info per matrix instead of raising."""
    A = validate.matrices("eig_ex", "A", A, square=True)
    if select("eig", backend, A) == "reference":
        return reference.linalg.eig_ex(A)
    values, vectors, _, info = registry.call("eig_ex", A, False, True, transforms.needs_gradient(A))
    return EigExResult(values, vectors, info)


def eigvals_ex(A: Tensor, *, row_stochastic: bool = False, backend: str | None = None) -> EigvalsExResult:
    """eigvals that returns an info per matrix instead of raising; 2 means that its rows do not sum to one."""
    A = validate.matrices("eigvals_ex", "A", A, square=True)
    row_stochastic = validate.flag("eigvals_ex", "row_stochastic", row_stochastic)
    if select("eigvals", backend, A) == "reference":
        return reference.linalg.eigvals_ex(A, row_stochastic=row_stochastic)
    values, _, _, info = _solve_values("eig_ex", A, row_stochastic)
    return EigvalsExResult(values, info)


def _solve_values(op: str, A: Tensor, row_stochastic: bool, *function: str) -> tuple[Tensor, ...]:
    vectors = transforms.needs_gradient(A)  # which takes the left ones too
    values, *rest = registry.call(op, A, row_stochastic, vectors, vectors, *function)
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


def _gradient(grad_values, grad_vectors, norm, values, right, left, info) -> Tensor:
    """∂A, real; zero for matrices that were not solved."""
    solved = (info == 0)[..., None, None]
    values, right, left = values.where(solved[..., 0], 0), right.where(solved, 0), left.where(solved, 0)
    grad_values = None if grad_values is None else grad_values.where(solved[..., 0], 0)
    _raise_defective(grad_values, grad_vectors, norm, values, left)
    inner = _inner_gradient(grad_values, None if grad_vectors is None else grad_vectors.where(solved, 0), values, right)
    left = left.where(left.isfinite(), 0)  # of eigenvalues without a derivative that the loss does not use
    # Not contiguous(): with one element or none it would leave the strides of the complex tensor.
    return (left @ inner @ right.mH).real.clone(memory_format=torch.contiguous_format)


_LARGEST_CONDITION = 0.1  # in units of 1/ε: differences of derivatives beyond it have no digit left


def _first_gradient(grad_values, grad_vectors, norm, values, right, left, info) -> Tensor:
    left = _biorthogonal(right, left, info == 0)
    return _gradient(grad_values, grad_vectors, norm, values, right, left, info)


def _biorthogonal(right: Tensor, left: Tensor, solved: Tensor) -> Tensor:
    """W with WᴴV = 1 also where eigenvalues agree to rounding.

    A left and a right eigenvector found one by one are exact for two matrices near A, whose eigenvectors of close
    eigenvalues may have nothing in common. Then even the trace, whose gradient is W Vᴴ = 1, would have a wrong one.
    """
    n, eps = right.shape[-1], torch.finfo(right.dtype).eps
    if n == 0:
        return left
    probe = torch.arange(1, n + 1, device=right.device).cos().to(right.dtype)[:, None]
    error = (left @ (right.mH @ probe) - probe).abs().amax((-2, -1))
    suspect = solved & ~(error <= math.sqrt(eps))
    if not suspect.any():
        return left
    inverse = reference.linalg.inverse_ex(right[suspect]).inverse.mH
    # Where V is singular to rounding some eigenvalue has no derivative; the others keep theirs.
    regular = torch.linalg.vector_norm(inverse, dim=-2).amax(-1) < _LARGEST_CONDITION / eps
    left = left.clone()
    left[suspect] = torch.where(regular[:, None, None], inverse, left[suspect])
    return left


def _inner_gradient(grad_values: Tensor | None, grad_vectors: Tensor | None, values: Tensor, right: Tensor) -> Tensor:
    """What stands between W and Vᴴ."""
    inner = torch.zeros_like(right) if grad_values is None else torch.diag_embed(grad_values)
    if grad_vectors is None or grad_vectors.numel() == 0:
        return inner
    turned = right.mH @ grad_vectors
    own = turned.diagonal(dim1=-2, dim2=-1)
    if transforms.beneath(own.imag.abs() > 1e-2 * (1 + own.real.abs())).any():  # torch's tolerance
        raise RuntimeError(
            "eig: the loss depends on the phase of the eigenvectors, which are determined up to a factor e^{iφ} only:"
            " it has no gradient"
        )
    turned = turned - right.mH @ (right * own.real[..., None, :])
    gaps = (values[..., None, :] - values[..., :, None]).conj()
    n = values.shape[-1]
    diagonal = torch.eye(n, dtype=torch.bool, device=values.device)
    equal = (gaps.abs() <= n * torch.finfo(values.dtype).eps * _size(values)[..., None, None]) & ~diagonal
    rounding = math.sqrt(torch.finfo(values.dtype).eps)
    needed = turned.abs() > rounding * grad_vectors.abs().amax((-2, -1), keepdim=True)
    _raise_pair(
        equal & needed,
        "are numerically equal: their eigenvectors have no derivative. Losses of eigenvalues alone (eigvals) always"
        " have one, unless a matrix is defective",
    )
    if grad_values is not None:
        _raise_pair(
            equal & _is_function_of_matrix(grad_values, grad_vectors, rounding),
            "are numerically equal: a function of A by its eigenvalues and eigenvectors, as V f(Λ) V⁻¹, has a"
            " derivative there that these do not determine. For symmetric A eigh does; or compute the function without"
            " eig",
        )
    return inner + torch.where(equal | diagonal, 0, turned / gaps.masked_fill(equal | diagonal, 1))


def _is_function_of_matrix(grad_values: Tensor, grad_vectors: Tensor, rounding: float) -> Tensor:
    """[..., n, n]: pairs of eigenvalues on which, if they are equal, the loss depends as V f(Λ) V⁻¹ does.

    Its gradients are f' M_ii for eigenvalue i and V⁻ᴴ (M f − f M) for the eigenvectors: between equal eigenvalues M_ij
    is gone from them, but belongs into ∂A as f' M_ij. Nothing is missing only if f' = 0, or if eigenvectors take no
    part and the eigenvalues have one derivative, so that M is a multiple of 1.
    """
    size = torch.maximum(grad_values.abs().amax(-1), grad_vectors.abs().amax((-2, -1)))[..., None]
    matters = grad_values.abs() > rounding * size
    vectors_used = grad_vectors.abs().amax(-2) > rounding * size
    differs = (grad_values[..., :, None] - grad_values[..., None, :]).abs() > rounding * size[..., None]
    used = matters & vectors_used
    return used[..., :, None] | used[..., None, :] | (differs & matters[..., :, None])


def _raise_pair(pairs: Tensor, why: str) -> None:
    pairs = transforms.beneath(pairs)
    if pairs.any():
        *index, i, j = pairs.nonzero()[0].tolist()
        raise torch.linalg.LinAlgError(f"eig: eigenvalues {min(i, j)} and {max(i, j)}{_of_matrix(index)} {why}")


def _size(values: Tensor) -> Tensor:
    return values.abs().amax(-1) if values.shape[-1] else values.abs().sum(-1)


def _root_mean_square(A: Tensor) -> Tensor:
    """Of the singular values: ‖A‖_F/√n. Squares are those of numbers up to one: they neither overflow nor vanish."""
    largest = _size(_size(A))
    scaled = A / torch.where(largest > 0, largest, 1)[..., None, None]
    return largest * scaled.square().sum(-1).mean(-1).sqrt()


def _of_matrix(index: list[int]) -> str:
    return f" of matrix {tuple(index)}" if index else ""


def _raise_defective(
    grad_values: Tensor | None, grad_vectors: Tensor | None, norm: Tensor, values: Tensor, left: Tensor
) -> None:
    """An eigenvalue that rounding cannot tell from one of a Jordan block has no derivative.

    A Jordan block of m equal eigenvalues with couplings c, changed by ‖E‖ = e, has eigenvalues on a circle of radius
    δ = (e cᵐ⁻¹)^(1/m). Their condition number ‖w‖ is δ/(m e) and their distance 2δ sin(π/m), so that
        distance / condition = 2m sin(π/m) e, between 4e and 2π e: how far A is from a defective matrix, and
        distance × condition ≥ c, with equality for m = 2: the coupling.
    A is numerically defective if three things hold:
    - e is what rounding makes of A, at most 7 ε‖A‖_F/√n. (Of 67 000 float64 Jordan blocks in other bases, alone or part
      of a matrix, 99 % had less than 2.2 times ε‖A‖_F/√n and one 5.8. Not ε‖A‖₂: errors of reflections are spread
      over the matrix, and two vectors see that part of them.)
    - The coupling is not rounding: at least 3√ε‖A‖_F/√n. I + noise has as close eigenvalues, and all eigenvectors. Or
      it is, but of a derivative that is the difference of such large ones (condition ≥ 0.1/ε) no digit is left.
    - The condition number is at least 100. In float64 the other two imply it; in float32 eigenvalues of ordinary
      matrices come as close. That of a Jordan block of two is √(c/e)/2: it is known if c is a hundredth of ‖A‖_F/√n.
    """
    n, eps = values.shape[-1], torch.finfo(values.dtype).eps
    rounding = eps * norm[..., None]
    condition = torch.linalg.vector_norm(left, dim=-2)
    gaps = (values[..., None, :] - values[..., :, None]).abs()
    gaps = gaps.masked_fill(torch.eye(n, dtype=torch.bool, device=values.device), math.inf)
    nearest = gaps.amin(-1) if n else gaps.sum(-1)
    # The solver takes equal eigenvalues for as far apart as these.
    least = torch.maximum(eps / 2 * values.abs(), (eps / 2) ** 2 * norm[..., None])
    coupling = condition * torch.maximum(nearest, least)
    apart = nearest / (2 * math.pi * condition) > 7 * rounding
    uncoupled = (coupling < 3 / math.sqrt(eps) * rounding) & (condition < _LARGEST_CONDITION / eps)
    defective = ~((condition < 100) | uncoupled | apart)  # so is what has a condition number that is not a number
    used = torch.zeros_like(defective) if grad_values is None else grad_values != 0
    if grad_vectors is not None:  # an eigenvector's gradient goes through every eigenvalue of its matrix
        used = used | (grad_vectors != 0).flatten(-2).any(-1, keepdim=True)
    worst = transforms.beneath(torch.where(defective & used, condition, 0))
    if (worst != 0).any():
        place = tuple((worst != 0).nonzero()[0].tolist())
        *index, k = place
        raise torch.linalg.LinAlgError(
            f"eig: A{_of_matrix(index)} is numerically defective (eigenvalue {k} has condition number"
            f" {worst[place]:.1e}): the eigenvalue has no derivative"
        )


def _fake_gradient(grad_values, grad_vectors, norm, values, right, left, info) -> Tensor:
    return right.new_empty(right.shape, dtype=torch.float64 if right.dtype == torch.complex128 else torch.float32)


# An op of its own, opaque to torch.compile, because it may raise.
registry.register(
    registry.Op(
        schema="eig_gradient(Tensor? grad_eigenvalues, Tensor? grad_eigenvectors, Tensor norm, Tensor eigenvalues,"
        " Tensor right, Tensor left, Tensor info) -> Tensor grad_A",
        fake=_fake_gradient,
        composite=_first_gradient,
    )
)


def _save(ctx, inputs, output) -> None:
    values, right, left, info = output
    ctx.mark_non_differentiable(left, info)
    ctx.set_materialize_grads(False)
    norm = _root_mean_square(inputs[0].detach())
    ctx.save_for_backward(norm, values, right, left, info)
    ctx.others = len(inputs) - 1


def _backward(ctx, grad_values: Tensor | None, grad_vectors: Tensor | None, _grad_left, _grad_info):
    norm, values, right, left, info = ctx.saved_tensors
    if grad_values is None and grad_vectors is None:
        return (None,) * (1 + ctx.others)
    if transforms.open_for(grad_values, grad_vectors):  # to be differentiated again: W as a function of V
        unit = torch.eye(right.shape[-1], dtype=right.dtype, device=right.device)
        left = reference.linalg.inverse_ex(right.where((info == 0)[..., None, None], unit)).inverse.mH
        grad = _gradient(grad_values, grad_vectors, norm, values, right, left, info)
    else:
        grad = torch.ops.overtone.eig_gradient(grad_values, grad_vectors, norm, values, right, left, info)
    return grad, *(None,) * ctx.others


def _by_reference(A: Tensor, row_stochastic: bool, right: bool, left: bool) -> tuple[Tensor, ...]:
    if right and not row_stochastic:
        values, vectors, info = reference.linalg.eig_ex(A)
        return values, vectors, vectors.new_empty(0, 0), info
    values, info = reference.linalg.eigvals_ex(A, row_stochastic=row_stochastic)
    return values, values.new_empty(0, 0), values.new_empty(0, 0), info


def _jvp(op, A: Tensor, row_stochastic: bool, right: bool, left: bool, *function: str) -> tuple[Tensor, ...] | None:
    """dλ = diag(M) and dV = X − V Re diag(VᴴX), X = V (M_ij / (λ_j − λ_i)), with M = V⁻¹ dA V."""
    if row_stochastic or not right:
        return None
    primal, tangent = forward_ad.unpack_dual(A)
    values, vectors, left_vectors, info = op(primal, False, True, True, *function)
    unit = torch.eye(A.shape[-1], dtype=vectors.dtype, device=A.device)
    inverse = reference.linalg.inverse_ex(vectors.where((info == 0)[..., None, None], unit)).inverse
    inner = inverse @ tangent.to(vectors.dtype) @ vectors
    turn = vectors @ between_eigenvalues(inner, values)
    turn = turn - vectors * (vectors.conj() * turn).sum(-2, keepdim=True).real
    grow = inner.diagonal(dim1=-2, dim2=-1)
    return forward_ad.make_dual(values, grow), forward_ad.make_dual(vectors, turn), left_vectors, info


_SOLVER = registry.Op(
    # Vectors that are not wanted come back empty; without both there is no gradient.
    schema="eig_ex(Tensor A, bool row_stochastic, bool right, bool left)"
    " -> (Tensor eigenvalues, Tensor right, Tensor left, Tensor info)",
    fake=_fake_eig,
    save=_save,
    backward=_backward,
    reference=_by_reference,
    jvp=_jvp,
    vmap=registry.Vmap(batched=(0,)),
)
registry.register(_SOLVER)
registry.register_strict(_SOLVER, "eig", raise_unsolved)
