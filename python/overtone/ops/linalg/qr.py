"""qr: public function → schema → kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from overtone import _transforms as transforms
from overtone import _validate as validate
from overtone import reference
from overtone.backends import select
from overtone.ops import registry
from overtone.ops.linalg.batched import qr_backward
from overtone.reference.linalg import QRExResult, QRResult, raise_unsolved

__all__ = ["qr", "qr_ex"]

MODES = ("reduced", "complete", "r")


def qr(A: Tensor, mode: str = "reduced", *, backend: str | None = None) -> QRResult:
    """A = QR with diag(R) > 0, which makes it unique: Q [..., m, k], R [..., k, n], k = min(m, n).

    mode="complete" gives Q [..., m, m] and R [..., m, n]; mode="r" gives R alone, and an empty Q. Where the leading
    columns of A are linearly dependent R has zeros (or rounding) on its diagonal, and Q is one of many; it is
    orthonormal all the same.

    Gradients: as torch.linalg.qr, of "reduced" always, of "complete" unless m > n, of "r" never. The first k columns
    must be linearly independent.
    """
    validate.matrices("qr", "A", A)
    validate.one_of("qr", "mode", mode, MODES)
    if select("qr", backend, A) == "reference":
        return reference.linalg.qr(A, mode)
    return QRResult(*torch.ops.overtone.qr(A, mode == "complete", mode != "r", "qr")[:2])


def qr_ex(A: Tensor, mode: str = "reduced", *, backend: str | None = None) -> QRExResult:
    """qr that returns an info per matrix instead of raising.

    1 for one that is not finite, or whose R is not; its results are nan.
    """
    validate.matrices("qr_ex", "A", A)
    validate.one_of("qr_ex", "mode", mode, MODES)
    if select("qr", backend, A) == "reference":
        return reference.linalg.qr_ex(A, mode)
    return QRExResult(*torch.ops.overtone.qr_ex(A, mode == "complete", mode != "r"))


def _fake(A, complete, need_q):
    *batch, rows, columns = A.shape
    inner = rows if complete else torch.sym_min(rows, columns)
    return (
        A.new_empty((*batch, rows, inner) if need_q else (0,)),
        A.new_empty((*batch, inner, columns)),
        A.new_empty(batch, dtype=torch.int32),
    )


registry.register(
    registry.Op(
        schema="qr_backward(Tensor? grad_Q, Tensor? grad_R, Tensor Q, Tensor R) -> Tensor",
        fake=lambda grad_Q, grad_R, Q, R: torch.empty_like(Q, memory_format=torch.contiguous_format),
        cuda=qr_backward,
    )
)


def _save(ctx, inputs, output) -> None:
    A, complete, need_q = inputs[:3]
    Q, R, info = output
    ctx.complete, ctx.need_q = complete, need_q
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(info)
    ctx.save_for_backward(A, Q, R)


def _backward(ctx, grad_Q, grad_R, _grad_info):
    A, Q, R = ctx.saved_tensors
    rows, columns = A.shape[-2:]
    if not ctx.need_q:
        raise NotImplementedError("qr: mode: got 'r', which has no gradient (it needs Q), wanted 'reduced'")
    if ctx.complete and rows > columns:
        raise NotImplementedError(
            f"qr: mode: got 'complete' for matrices with more rows ({rows}) than columns ({columns}), which has no "
            "gradient (the last columns of Q are not unique), wanted 'reduced'"
        )
    if grad_Q is None and grad_R is None:
        grad_A = None
    elif transforms.open_for(grad_Q, grad_R):
        grads = (torch.zeros_like(Q) if grad_Q is None else grad_Q, torch.zeros_like(R) if grad_R is None else grad_R)
        (grad_A,) = registry.double_backward_via_reference(lambda A: tuple(reference.linalg.qr_ex(A)[:2]), (A,), grads)
    elif rows >= columns:
        grad_A = torch.ops.overtone.qr_backward(grad_Q, grad_R, Q, R)
    else:
        grad_A = _wide_backward(grad_Q, grad_R, Q, R)
    return (grad_A, *[None] * (len(ctx.needs_input_grad) - 1))


def _wide_backward(grad_Q: Tensor | None, grad_R: Tensor | None, Q: Tensor, R: Tensor) -> Tensor:
    """A = (X | Y) with X square: Q and R's first part belong to X, and R's second part is QᵀY."""
    rows = Q.shape[-1]
    square = R[..., :rows].contiguous()
    if grad_R is None:
        grad_X = torch.ops.overtone.qr_backward(grad_Q, None, Q, square)
        return torch.nn.functional.pad(grad_X, (0, R.shape[-1] - rows))
    rest, grad_rest = R[..., rows:], grad_R[..., rows:]
    through_rest = Q @ (rest @ grad_rest.mT)
    grad_Q = through_rest if grad_Q is None else grad_Q + through_rest
    grad_X = torch.ops.overtone.qr_backward(grad_Q, grad_R[..., :rows], Q, square)
    return torch.cat((grad_X, Q @ grad_rest), -1)


def _by_reference(A: Tensor, complete: bool, need_q: bool) -> tuple[Tensor, ...]:
    return tuple(reference.linalg.qr_ex(A, "complete" if complete else "reduced" if need_q else "r"))


_SOLVER = registry.Op(
    schema="qr_ex(Tensor A, bool complete, bool need_q) -> (Tensor Q, Tensor R, Tensor info)",
    fake=_fake,
    save=_save,
    backward=_backward,
    reference=_by_reference,
    vmap=registry.Vmap(batched=(0,)),
)
registry.register(_SOLVER)
registry.register_strict(_SOLVER, "qr", raise_unsolved)
