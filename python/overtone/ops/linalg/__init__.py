"""Solvers of batched eigenproblems, QR and inverses."""
