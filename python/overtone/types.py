"""The named results that public functions return."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

# The sign of the eigenvalues of a regime.
SIGNS = {"sharpen": -1, "smooth": 1}


class FrequencyNorms(NamedTuple):
    """Frobenius norms of the low- and high-frequency components, one pair per sample."""

    low: Tensor
    high: Tensor

    @property
    def ratio(self) -> Tensor:
        """‖HFC‖ / ‖LFC‖; it goes to zero as the tokens become equal (oversmoothing)."""
        return self.high / self.low


class Spectrum(NamedTuple):
    """A weight as basis_in · diag(eigenvalues) · basis_out."""

    basis_in: Tensor
    eigenvalues: Tensor
    basis_out: Tensor
