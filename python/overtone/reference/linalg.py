"""Batched eigen- and QR decompositions in torch.linalg's conventions, for any floating or complex dtype.

Results have torch.linalg's names and order (eigh ascending). The `*_ex` variants never raise for a bad matrix: they
return an `info` per matrix, 0 if it was solved and 1 if it is not finite, did not converge, or has results beyond the
largest number. That matrix's results are nan, and the others' are untouched. The plain variants raise LinAlgError and
name the matrices. Any size of numbers is solved as well as ordinary ones, and so are rows and columns of unlike sizes.

Half-precision matrices are solved in float32, and their results stay float32 (complex64).
Gradients are PyTorch's own, so eigenvectors need distinct eigenvalues, and QR needs full rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from overtone._transforms import beneath, readable

NOT_STOCHASTIC = 2  # an info: the rows were promised to sum to one, and do not


class EighResult(NamedTuple):
    eigenvalues: Tensor
    eigenvectors: Tensor


class EighExResult(NamedTuple):
    eigenvalues: Tensor
    eigenvectors: Tensor
    info: Tensor


class EigResult(NamedTuple):
    eigenvalues: Tensor
    eigenvectors: Tensor


class EigExResult(NamedTuple):
    eigenvalues: Tensor
    eigenvectors: Tensor
    info: Tensor


class EigvalsExResult(NamedTuple):
    eigenvalues: Tensor
    info: Tensor


class QRResult(NamedTuple):
    Q: Tensor
    R: Tensor


class InverseExResult(NamedTuple):
    inverse: Tensor
    info: Tensor


class QRExResult(NamedTuple):
    Q: Tensor
    R: Tensor
    info: Tensor


def eigh(A: Tensor, UPLO: str = "L") -> EighResult:
    """A = V diag(λ) Vᴴ of symmetric or Hermitian matrices, λ ascending; only the triangle UPLO is read."""
    return EighResult(*_checked("eigh", eigh_ex(A, UPLO)))


def eigvalsh(A: Tensor, UPLO: str = "L") -> Tensor:
    """The eigenvalues of symmetric or Hermitian matrices, ascending."""
    return _checked("eigvalsh", eigvalsh_ex(A, UPLO))[0]


def eig(A: Tensor) -> EigResult:
    """A V = V diag(λ), complex, in no particular order; eigenvectors have length one."""
    return EigResult(*_checked("eig", eig_ex(A)))


def eigvals(A: Tensor, *, row_stochastic: bool = False) -> Tensor:
    """The eigenvalues of square matrices, complex, in no particular order.

    row_stochastic: the rows of A sum to one; the eigenvalue nearest to 1 comes first.
    """
    return _checked("eigvals", eigvals_ex(A, row_stochastic=row_stochastic))[0]


def inverse(A: Tensor) -> Tensor:
    """A⁻¹ of invertible matrices."""
    return _checked("inverse", inverse_ex(A))[0]


def inverse_ex(A: Tensor) -> InverseExResult:
    """R⁻¹ Qᴴ.

    Not torch.linalg.inv: MKL's LU was seen to hang, and to give pivots out of range, on two threads.
    """
    A = A.float() if A.dtype in (torch.float16, torch.bfloat16) else A
    failed = ~A.detach().isfinite().all(-1).all(-1)
    q, r = torch.linalg.qr(torch.where(failed[..., None, None], 0, A))
    inverse = torch.linalg.solve_triangular(r, q.mH, upper=True)
    failed = failed | ~inverse.detach().isfinite().all(-1).all(-1)
    return InverseExResult(_poison(inverse, failed), failed.to(torch.int32))


def qr(A: Tensor, mode: str = "reduced") -> QRResult:
    """A = QR with diag(R) > 0, which makes it unique: Q [..., m, k], R [..., k, n], k = min(m, n).

    Where the leading columns of A are linearly dependent R has zeros (or rounding) on its diagonal, and Q is one of
    many; it is orthonormal all the same. mode="complete": Q [..., m, m]. mode="r": R alone, and an empty Q.
    """
    return QRResult(*_checked("qr", qr_ex(A, mode)))


def eigh_ex(A: Tensor, UPLO: str = "L") -> EighExResult:
    return EighExResult(*_solve(lambda A: torch.linalg.eigh(A, UPLO), A, _triangle(A, UPLO), _scaled_values))


def eigvalsh_ex(A: Tensor, UPLO: str = "L") -> EigvalsExResult:
    return EigvalsExResult(*_solve(lambda A: (torch.linalg.eigvalsh(A, UPLO),), A, _triangle(A, UPLO), _scaled_values))


def eig_ex(A: Tensor) -> EigExResult:
    return EigExResult(*_solve(_stable_eig, A, A, _scaled_values))


def eigvals_ex(A: Tensor, *, row_stochastic: bool = False) -> EigvalsExResult:
    values, info = _solve(lambda A: (_stable_eigvals(A),), A, A, _scaled_values)
    if row_stochastic:
        is_bad = (info == 0) & ~rows_sum_to_one(A)
        values, info = perron_first(_poison(values, is_bad)), info.masked_fill(is_bad, NOT_STOCHASTIC)
    return EigvalsExResult(values, info)


def _stable_eig(A: Tensor) -> tuple[Tensor, Tensor]:
    """torch.linalg.eig, of matrices that LAPACK's balancing spoils in another basis."""
    values, vectors = _bordered_eig(A)
    spoiled = _is_spoiled(A, values, vectors)
    if spoiled is None:
        return values, vectors
    rotation = _rotation(A)
    values, vectors = _bordered_eig(torch.where(spoiled[..., None, None], 0, A))
    other_values, other_vectors = _bordered_eig(rotation.mT @ A[spoiled] @ rotation)
    return (
        values.masked_scatter(spoiled[..., None], other_values),
        vectors.masked_scatter(spoiled[..., None, None], rotation.to(vectors.dtype) @ other_vectors),
    )


def _stable_eigvals(A: Tensor) -> Tensor:
    with torch.no_grad():
        spoiled = _is_spoiled(A, *_bordered_eig(A)) if _is_unbalanced(A) else None
    if spoiled is None:
        return torch.linalg.eigvals(A)
    rotation = _rotation(A)
    values = torch.linalg.eigvals(torch.where(spoiled[..., None, None], 0, A))
    return values.masked_scatter(spoiled[..., None], torch.linalg.eigvals(rotation.mT @ A[spoiled] @ rotation))


def _is_unbalanced(A: Tensor) -> bool:
    """Whether rows and columns of any matrix are unlike in size, so that LAPACK balances them."""
    if _in_transform():
        return False
    rows, columns = A.detach().abs().sum(-1), A.detach().abs().sum(-2)
    return bool(((rows > 32 * columns) | (columns > 32 * rows)).any())


def _in_transform() -> bool:
    """Under torch.func no choice can depend on numbers: results there are LAPACK's as they are."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def _is_spoiled(A: Tensor, values: Tensor, vectors: Tensor) -> Tensor | None:
    """Which matrices have residuals, ‖AV − VΛ‖ / (n ‖A‖ ε), far above LAPACK's usual ones; None if there are none."""
    if A.numel() == 0 or _in_transform():
        return None
    A, values, vectors = A.detach(), values.detach(), vectors.detach()
    error = torch.linalg.vector_norm(A.to(vectors.dtype) @ vectors - vectors * values[..., None, :], dim=-2).amax(-1)
    usual = A.shape[-1] * torch.finfo(A.dtype).eps * torch.linalg.matrix_norm(A, 1)  # its own ratio is below one
    spoiled = error > 4 * usual
    return spoiled if spoiled.any() else None


def _bordered_eig(A: Tensor) -> tuple[Tensor, Tensor]:
    """torch.linalg.eig, whose memory LAPACK's failure cannot corrupt.

    Where LAPACK gives up, torch takes what the memory of the eigenvalues held before for eigenvalues, and a complex
    pair that seems to begin with the last one makes it read and write a column beyond the last. LAPACK splits a border
    of zeros off before it begins, so that the last eigenvalue is a real one, zero, whatever happens to the others.
    """
    values, vectors = torch.linalg.eig(torch.nn.functional.pad(A, (0, 1, 0, 1)))
    return values[..., :-1], vectors[..., :-1, :-1]


def _rotation(A: Tensor) -> Tensor:
    """An orthogonal matrix. In its basis no row or column is small: there is nothing to balance."""
    noise = torch.randn(A.shape[-2:], generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return torch.linalg.qr(noise).Q.to(A)


def perron_first(values: Tensor) -> Tensor:
    """The eigenvalue nearest to 1, then the others in their order."""
    if values.shape[-1] == 0:
        return values
    perron = (values.detach() - 1).abs().argmin(-1, keepdim=True)
    place = torch.arange(values.shape[-1], device=values.device)
    return values.gather(-1, torch.where(place == 0, perron, place - (place <= perron).long()))


def rows_sum_to_one(A: Tensor) -> Tensor:
    tolerance = 2 * A.shape[-1] * torch.finfo(A.dtype).eps
    return ((A.sum(-1) - 1).abs() <= tolerance).all(-1)


def qr_ex(A: Tensor, mode: str = "reduced") -> QRExResult:
    if mode not in ("reduced", "complete", "r"):
        raise ValueError(f"qr: mode: got {mode!r}, wanted 'reduced', 'complete' or 'r'")
    if mode == "r":
        _, R, info = qr_ex(A)
        return QRExResult(R.new_empty(0), R, info)
    return QRExResult(*_solve(lambda A: _positive_qr(A, mode), A, A, _scaled_columns))


def _positive_qr(A: Tensor, mode: str) -> tuple[Tensor, Tensor]:
    Q, R = torch.linalg.qr(A, mode)
    diagonal = R.detach().diagonal(dim1=-2, dim2=-1)
    sign = torch.where(diagonal == 0, 1, diagonal.sgn())  # [..., k]
    padded = torch.nn.functional.pad(sign, (0, Q.shape[-1] - sign.shape[-1]), value=1)  # one sign per column of Q
    return Q * padded[..., None, :], R * padded.conj()[..., :, None]


def _triangle(A: Tensor, UPLO: str) -> Tensor:
    return A.tril() if UPLO.upper() == "L" else A.triu()


def _solve(solver: Callable, A: Tensor, read: Tensor, at_size_one: Callable) -> tuple[Tensor, ...]:
    """The solver's results for every matrix, and info. `read` is the part of A that is read.

    `at_size_one` calls the solver with a matrix of ordinary size and undoes that in its results.
    """
    A = A.float() if A.dtype in (torch.float16, torch.bfloat16) else A
    failed = ~read.isfinite().all(-1).all(-1)
    A = torch.where(failed[..., None, None], 0, A)
    size = torch.where(failed[..., None, None], 0, read.detach())
    results, not_converged = at_size_one(_solve_all, solver, A, size)
    for result in results:
        failed = failed | ~result.detach().isfinite().flatten(A.dim() - 2).all(-1)
    failed = failed | not_converged
    return *(_poison(result, failed) for result in results), failed.to(torch.int32)


def _solve_all(solver: Callable, A: Tensor) -> tuple[list[Tensor], Tensor]:
    """The solver's results, and which matrices it did not converge on."""
    try:
        return list(solver(A)), torch.zeros(A.shape[:-2], dtype=torch.bool, device=A.device)
    except torch.linalg.LinAlgError:  # torch gives up on the whole batch: find out whose fault it was
        return _solve_one_by_one(solver, A)


def _scaled_values(solve: Callable, solver: Callable, A: Tensor, read: Tensor) -> tuple[list[Tensor], Tensor]:
    """The first result, eigenvalues, has A's size."""
    exponent = _exponent(read, (-2, -1))
    (values, *rest), not_converged = solve(solver, _times_power_of_two(A, -exponent))
    return [_times_power_of_two(values, exponent[..., 0]), *rest], not_converged


def _scaled_columns(solve: Callable, solver: Callable, A: Tensor, read: Tensor) -> tuple[list[Tensor], Tensor]:
    """The columns of the second result, R, have the size of A's."""
    exponent = _exponent(read, (-2,))
    (Q, R), not_converged = solve(solver, _times_power_of_two(A, -exponent))
    return [Q, _times_power_of_two(R, exponent)], not_converged


def _exponent(A: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Of the largest element's size over `dims`, which stay as ones; 0 where squares of such numbers are safe."""
    if A.numel() == 0:
        return torch.zeros([1 if dim - A.dim() in dims else n for dim, n in enumerate(A.shape)], dtype=torch.int32)
    parts = torch.stack((A.real, A.imag)).abs().amax(0) if A.is_complex() else A.abs()
    exponent = torch.frexp(parts.amax(dims, keepdim=True)).exponent
    safe = 400 if A.real.dtype == torch.float64 else 36
    return torch.where(exponent.abs() <= safe, 0, exponent)


def _times_power_of_two(x: Tensor, exponent: Tensor) -> Tensor:
    """x 2^exponent, in two steps: 2^exponent itself may overflow. (torch.pow and ldexp need not be exact.)"""
    largest = 600
    powers = torch.tensor([2.0**k for k in range(-largest, largest + 1)], dtype=torch.float64, device=x.device)
    first = exponent.div(2, rounding_mode="trunc")
    for half in (first, exponent - first):
        x = x * powers[half.long() + largest].to(x.real.dtype)
    return x


def _poison(result: Tensor, failed: Tensor) -> Tensor:
    return result.masked_fill(failed.reshape(failed.shape + (1,) * (result.dim() - failed.dim())), math.nan)


def _solve_one_by_one(solver: Callable, A: Tensor) -> tuple[list[Tensor], Tensor]:
    batch = A.shape[:-2]
    outcomes = [_solve_one(solver, matrix) for matrix in A.reshape(-1, *A.shape[-2:])]
    failed = torch.tensor([outcome is None for outcome in outcomes], device=A.device).reshape(batch)
    blank = solver(torch.zeros_like(A[(0,) * len(batch)]))
    solved = [blank if outcome is None else outcome for outcome in outcomes]
    return [torch.stack(parts).reshape(batch + parts[0].shape) for parts in zip(*solved, strict=True)], failed


def _solve_one(solver: Callable, matrix: Tensor) -> tuple[Tensor, ...] | None:
    """One matrix, or None if it does not converge.

    LAPACK's nonsymmetric solver stalls on exactly uniform attention in float64 (MKL: one size in four). A change of the
    size of rounding, which is within the error of any such solver, gets it going.
    """
    noise = torch.randn(matrix.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(matrix)
    rounding = torch.finfo(matrix.dtype).eps * torch.linalg.matrix_norm(matrix.detach()) / math.sqrt(matrix.numel())
    for candidate in (matrix, matrix + rounding * noise):
        try:
            return tuple(solver(candidate))
        except torch.linalg.LinAlgError:
            continue
    return None


def _checked(function: str, outcome: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    *results, info = outcome
    raise_unsolved(function, info)
    return tuple(results)


def raise_unsolved(function: str, info: Tensor) -> None:
    """Raise LinAlgError if any matrix has an info other than zero, and name the first few."""
    info = beneath(info)
    if not readable(info) or not info.any():
        return
    _raise_for(function, info == NOT_STOCHASTIC, "has rows that do not sum to one, as row_stochastic promises")
    if function == "inverse":
        _raise_for(function, info != 0, "is singular or not finite")
    causes = "is not finite" if function == "qr" else "is not finite, did not converge"
    _raise_for(function, info != 0, f"{causes} or has results beyond the largest number")


def _raise_for(function: str, is_bad: Tensor, what: str) -> None:
    if is_bad.any():
        members = [tuple(index) for index in is_bad.nonzero().tolist()]
        which = f" {', '.join(map(str, members[:5]))}" if is_bad.dim() > 0 else ""
        more = f" and {len(members) - 5} more" if len(members) > 5 else ""
        advice = f"; {function}_ex solves the others" if f"{function}_ex" in globals() else ""
        raise torch.linalg.LinAlgError(f"{function}: A: matrix{which}{more} {what}{advice}")
