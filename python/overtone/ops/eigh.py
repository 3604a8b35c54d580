"""eigh and eigvalsh: public function → contract → kernel."""

from __future__ import annotations

from torch import Tensor

from overtone import reference
from overtone.backends import select
from overtone.ops import checks
from overtone.reference.linalg import EighExResult, EighResult, EigvalsExResult

__all__ = ["eigh", "eigh_ex", "eigvalsh", "eigvalsh_ex"]


def eigh(A: Tensor, UPLO: str = "L", *, backend: str | None = None) -> EighResult:
    """A = V diag(λ) Vᵀ of symmetric (Hermitian) matrices [..., n, n], λ ascending."""
    A, UPLO = _checked("eigh", A, UPLO)
    select("eigh", backend, A)
    return reference.linalg.eigh(A, UPLO)


def eigvalsh(A: Tensor, UPLO: str = "L", *, backend: str | None = None) -> Tensor:
    """The eigenvalues of symmetric (Hermitian) matrices, ascending."""
    A, UPLO = _checked("eigvalsh", A, UPLO)
    select("eigh", backend, A)
    return reference.linalg.eigvalsh(A, UPLO)


def eigh_ex(A: Tensor, UPLO: str = "L", *, backend: str | None = None) -> EighExResult:
    """eigh that returns an info per matrix instead of raising."""
    A, UPLO = _checked("eigh_ex", A, UPLO)
    select("eigh", backend, A)
    return reference.linalg.eigh_ex(A, UPLO)


def eigvalsh_ex(A: Tensor, UPLO: str = "L", *, backend: str | None = None) -> EigvalsExResult:
    """eigvalsh that returns an info per matrix instead of raising."""
    A, UPLO = _checked("eigvalsh_ex", A, UPLO)
    select("eigh", backend, A)
    return reference.linalg.eigvalsh_ex(A, UPLO)


def _checked(function: str, A: Tensor, UPLO: str) -> tuple[Tensor, str]:
    A = checks.matrices(function, "A", A, square=True)
    UPLO = UPLO.upper() if isinstance(UPLO, str) else UPLO  # torch takes small letters too
    return A, checks.one_of(function, "UPLO", UPLO, ("L", "U"))
