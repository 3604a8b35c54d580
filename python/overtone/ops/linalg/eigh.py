"""eigh and eigvalsh: public function → schema → kernel."""

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
from overtone.ops.linalg.batched import eigh_backward
from overtone.reference.linalg import EighExResult, EighResult, EigvalsExResult, raise_unsolved

__all__ = ["eigh", "eigh_ex", "eigvalsh", "eigvalsh_ex"]


def eigh(A: Tensor, UPLO: str = "L", *, backend: str | None = None) -> EighResult:
    """A = V diag(λ) Vᵀ of symmetric (Hermitian) matrices [..., n, n], λ ascending."""
    A, UPLO = _checked("eigh", A, UPLO)
    if select("eigh", backend, A) == "reference":
        return reference.linalg.eigh(A, UPLO)
    return EighResult(*registry.call("eigh", A, UPLO == "U", True, "eigh")[:2])


def eigvalsh(A: Tensor, UPLO: str = "L", *, backend: str | None = None) -> Tensor:
    """The eigenvalues of symmetric (Hermitian) matrices, ascending."""
    A, UPLO = _checked("eigvalsh", A, UPLO)
    if select("eigh", backend, A) == "reference":
        return reference.linalg.eigvalsh(A, UPLO)
    return registry.call("eigh", A, UPLO == "U", transforms.needs_gradient(A), "eigvalsh")[0]


def eigh_ex(A: Tensor, UPLO: str = "L", *, backend: str | None = None) -> EighExResult:
    """eigh that returns an info per matrix instead of raising."""
    A, UPLO = _checked("eigh_ex", A, UPLO)
    if select("eigh", backend, A) == "reference":
        return reference.linalg.eigh_ex(A, UPLO)
    return EighExResult(*registry.call("eigh_ex", A, UPLO == "U", True))


def eigvalsh_ex(A: Tensor, UPLO: str = "L", *, backend: str | None = None) -> EigvalsExResult:
    """eigvalsh that returns an info per matrix instead of raising."""
    A, UPLO = _checked("eigvalsh_ex", A, UPLO)
    if select("eigh", backend, A) == "reference":
        return reference.linalg.eigvalsh_ex(A, UPLO)
    # The gradient of eigenvalues takes eigenvectors.
    values, _, info = registry.call("eigh_ex", A, UPLO == "U", transforms.needs_gradient(A))
    return EigvalsExResult(values, info)


def _checked(function: str, A: Tensor, UPLO: str) -> tuple[Tensor, str]:
    A = validate.matrices(function, "A", A, square=True)
    UPLO = UPLO.upper() if isinstance(UPLO, str) else UPLO  # torch takes small letters too
    return A, validate.one_of(function, "UPLO", UPLO, ("L", "U"))


def _fake_eigh(A: Tensor, upper: bool, vectors: bool) -> tuple[Tensor, Tensor, Tensor]:
    eigenvectors = A.new_empty(A.shape if vectors else (0, 0)).mT
    return A.new_empty(A.shape[:-1]), eigenvectors, A.new_empty(A.shape[:-2], dtype=torch.int32)


def _fake_backward(grad_values, grad_vectors, values, vectors, info) -> tuple[Tensor, Tensor]:
    return vectors.new_empty(vectors.shape), info.new_empty((*info.shape, 2))


def _fake_gradient(grad_values, grad_vectors, values, vectors, info) -> Tensor:
    return vectors.new_empty(vectors.shape)


def _gradient(grad_values, grad_vectors, values, vectors, info) -> Tensor:
    grad, undetermined_pair = torch.ops.overtone.eigh_backward(grad_values, grad_vectors, values, vectors, info)
    _raise_undetermined(undetermined_pair)
    return grad


def _raise_undetermined(pair: Tensor) -> None:
    undetermined = pair[..., 0] >= 0
    if undetermined.any():
        index = tuple(undetermined.nonzero()[0].tolist())
        i, j = pair[index].tolist()
        which = f" of matrix {index}" if index else ""
        raise torch.linalg.LinAlgError(
            f"eigh: eigenvalues {i} and {j}{which} are numerically equal, and the loss has no gradient there that its"
            " eigenvectors determine: it depends on the choice of basis in the eigenspace, or on more than one function"
            " of A. Losses of eigenvalues alone (eigvalsh) always have one"
        )


_GRADIENT_ARGUMENTS = (
    "Tensor? grad_eigenvalues, Tensor? grad_eigenvectors, Tensor eigenvalues, Tensor eigenvectors, Tensor info"
)
registry.register(
    registry.Op(
        schema=f"eigh_backward({_GRADIENT_ARGUMENTS}) -> (Tensor grad_A, Tensor undetermined_pair)",
        fake=_fake_backward,
        cuda=eigh_backward,
    )
)
# Raises for a pair that is not determined; an op of its own, opaque to torch.compile, so that it raises there too.
registry.register(
    registry.Op(
        schema=f"eigh_gradient({_GRADIENT_ARGUMENTS}) -> Tensor grad_A", fake=_fake_gradient, composite=_gradient
    )
)


def _save(ctx, inputs, output) -> None:
    values, vectors, info = output
    ctx.mark_non_differentiable(info)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(values, vectors, info)
    ctx.others = len(inputs) - 1


def _backward(ctx, grad_values: Tensor | None, grad_vectors: Tensor | None, _):
    values, vectors, info = ctx.saved_tensors
    if transforms.open_for(grad_values, grad_vectors):
        grad = _differentiable_gradient(grad_values, grad_vectors, values, vectors, info)
    else:
        grad_values = None if grad_values is None else grad_values.contiguous()
        grad = torch.ops.overtone.eigh_gradient(grad_values, grad_vectors, values, vectors, info)
    return grad, *(None,) * ctx.others


def _differentiable_gradient(grad_values, grad_vectors, values, vectors, info) -> Tensor:
    """The same formula in plain PyTorch, to be differentiated again; eigenvectors then need distinct eigenvalues."""
    solved = (info == 0)[..., None, None]
    values, vectors = values.where(solved[..., 0], 0), vectors.where(solved, 0)
    inner = torch.zeros_like(vectors) if grad_values is None else torch.diag_embed(grad_values.where(solved[..., 0], 0))
    if grad_vectors is not None:
        turned = vectors.mT @ grad_vectors.where(solved, 0)
        gaps = values[..., None, :] - values[..., :, None]
        is_equal = _equal_to_rounding(values) & solved
        if is_equal.any():
            *index, i, j = is_equal.nonzero()[0].tolist()
            which = f" of matrix {tuple(index)}" if index else ""
            raise torch.linalg.LinAlgError(
                f"eigh: eigenvalues {i} and {j}{which} are numerically equal: a gradient of the gradient by their"
                " eigenvectors does not exist"
            )
        inner = inner + 0.5 * (turned - turned.mT) / gaps.where(gaps != 0, 1)
    return vectors @ inner @ vectors.mT


def _equal_to_rounding(values: Tensor) -> Tensor:
    """[..., n, n]: which pairs i < j the kernel, too, takes to be equal."""
    n = values.shape[-1]
    tolerance = 2 * math.sqrt(n) * torch.finfo(values.dtype).eps * values.abs().amax(-1)[..., None, None]
    gaps = values[..., None, :] - values[..., :, None]
    return (gaps <= tolerance) & torch.ones(n, n, dtype=torch.bool, device=values.device).triu(1)


def _by_reference(A: Tensor, upper: bool, vectors: bool) -> tuple[Tensor, ...]:
    if vectors:
        return tuple(reference.linalg.eigh_ex(A, "U" if upper else "L"))
    values, info = reference.linalg.eigvalsh_ex(A, "U" if upper else "L")
    return values, values.new_empty(0, 0), info


def _jvp(op, A: Tensor, upper: bool, vectors: bool, *function: str) -> tuple[Tensor, ...] | None:
    """dλ = diag(M) and dV = V (M_ij / (λ_j − λ_i)), with M = Vᵀ dA V."""
    if not vectors:
        return None
    primal, tangent = forward_ad.unpack_dual(A)
    values, vectors_, info = op(primal, upper, True, *function)
    inner = vectors_.mT @ ((tangent + tangent.mT) / 2) @ vectors_
    turn = vectors_ @ between_eigenvalues(inner, values)
    grow = inner.diagonal(dim1=-2, dim2=-1)
    return forward_ad.make_dual(values, grow), forward_ad.make_dual(vectors_, turn), info


_SOLVER = registry.Op(
    # Without vectors they come back empty, and there is no gradient.
    schema="eigh_ex(Tensor A, bool upper, bool vectors) -> (Tensor eigenvalues, Tensor eigenvectors, Tensor info)",
    fake=_fake_eigh,
    save=_save,
    backward=_backward,
    reference=_by_reference,
    jvp=_jvp,
    vmap=registry.Vmap(batched=(0,)),
)
registry.register(_SOLVER)
registry.register_strict(_SOLVER, "eigh", raise_unsolved)
