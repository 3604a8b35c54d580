"""Batched decompositions in torch.linalg's conventions: its result names, eigh ascending, only the triangle UPLO read.

The `*_ex` variants never raise for a bad matrix. They return an `info`, int32, one per matrix: 0 if it was solved, 1 if
it is not finite or did not converge. That matrix's results are nan, and the others' do not change by a bit. The plain
variants raise torch.linalg.LinAlgError and name the matrices.
"""

from overtone.ops.linalg.eig import eig, eig_ex, eigvals, eigvals_ex
from overtone.ops.linalg.eigh import eigh, eigh_ex, eigvalsh, eigvalsh_ex
from overtone.ops.linalg.extremal import ExtremalResult, extremal_eigvals, extremal_eigvals_ex
from overtone.ops.linalg.qr import qr, qr_ex

__all__ = [
    "ExtremalResult",
    "eig",
    "eig_ex",
    "eigh",
    "eigh_ex",
    "eigvals",
    "eigvals_ex",
    "eigvalsh",
    "eigvalsh_ex",
    "extremal_eigvals",
    "extremal_eigvals_ex",
    "qr",
    "qr_ex",
]
