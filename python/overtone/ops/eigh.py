"""eigh and eigvalsh: public function → contract → kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from overtone import reference
from overtone.backends import select
from overtone.ops import checks, library
from overtone.reference.linalg import EighExResult, EighResult, EigvalsExResult

__all__ = ["eigh", "eigh_ex", "eigvalsh", "eigvalsh_ex"]


def eigh(A: Tensor, UPLO: str = "L", *, backend: str | None = None) -> EighResult:
    """A = V diag(λ) Vᵀ of symmetric (Hermitian) matrices [..., n, n], λ ascending."""
    A, UPLO = _checked("eigh", A, UPLO)
    if select("eigh", backend, A) == "reference":
        return reference.linalg.eigh(A, UPLO)
    return EighResult(*torch.ops.overtone.eigh(A, UPLO == "U", True, "eigh")[:2])


def eigvalsh(A: Tensor, UPLO: str = "L", *, backend: str | None = None) -> Tensor:
    """The eigenvalues of symmetric (Hermitian) matrices, ascending."""
    A, UPLO = _checked("eigvalsh", A, UPLO)
    if select("eigh", backend, A) == "reference":
        return reference.linalg.eigvalsh(A, UPLO)
    return torch.ops.overtone.eigh(A, UPLO == "U", _needs_gradient(A), "eigvalsh")[0]


def eigh_ex(A: Tensor, UPLO: str = "L", *, backend: str | None = None) -> EighExResult:
    """eigh that returns an info per matrix instead of raising."""
    A, UPLO = _checked("eigh_ex", A, UPLO)
    if select("eigh", backend, A) == "reference":
        return reference.linalg.eigh_ex(A, UPLO)
    return EighExResult(*torch.ops.overtone.eigh_ex(A, UPLO == "U", True))


def eigvalsh_ex(A: Tensor, UPLO: str = "L", *, backend: str | None = None) -> EigvalsExResult:
    """eigvalsh that returns an info per matrix instead of raising."""
    A, UPLO = _checked("eigvalsh_ex", A, UPLO)
    if select("eigh", backend, A) == "reference":
        return reference.linalg.eigvalsh_ex(A, UPLO)
    values, _, info = torch.ops.overtone.eigh_ex(A, UPLO == "U", _needs_gradient(A))
    return EigvalsExResult(values, info)


def _checked(function: str, A: Tensor, UPLO: str) -> tuple[Tensor, str]:
    A = checks.matrices(function, "A", A, square=True)
    UPLO = UPLO.upper() if isinstance(UPLO, str) else UPLO  # torch takes small letters too
    return A, checks.one_of(function, "UPLO", UPLO, ("L", "U"))


def _needs_gradient(A: Tensor) -> bool:
    """The gradient of eigenvalues takes eigenvectors."""
    return A.requires_grad and torch.is_grad_enabled()


def _fake_eigh(A: Tensor, upper: bool, vectors: bool) -> tuple[Tensor, Tensor, Tensor]:
    eigenvectors = A.new_empty(A.shape if vectors else (0, 0)).mT
    return A.new_empty(A.shape[:-1]), eigenvectors, A.new_empty(A.shape[:-2], dtype=torch.int32)


# Without vectors they come back empty, and there is no gradient.
_ARGUMENTS = "Tensor A, bool upper, bool vectors"
_RESULTS = "(Tensor eigenvalues, Tensor eigenvectors, Tensor info)"
library.define(f"eigh_ex({_ARGUMENTS}) -> {_RESULTS}", fake=_fake_eigh)
library.define_raising(f"eigh({_ARGUMENTS}, str function) -> {_RESULTS}", solver="eigh_ex", fake=_fake_eigh)
