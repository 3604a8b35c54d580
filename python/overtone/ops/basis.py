"""The bases of spectra, of all layers of a model in one call, and in evaluation not again until they change.

A factorisation is kept with a copy of what was factorised, and holds while the values are the same. Comparing values is
one pass over memory, and no way of writing to a parameter escapes it: `.data`, collectives, loading, another copy of
the model. What the ops return are copies, since a compiler may reuse the memory of an op's result.

Gradients, which never divide by the distance of two eigenvalues (a second derivative is taken through the reference):
    Q of Θ = QR:  ∂Θ = (G + Q copyltu(−Gᵀ Q)) R⁻ᵀ,  copyltu(M) = tril(M) + stril(M)ᵀ
    V⁻¹ of V:     ∂V = −V⁻ᵀ G V⁻ᵀ
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from overtone import _transforms as transforms
from overtone import _validate as validate
from overtone import reference
from overtone._precision import autocast_disabled, full_float32
from overtone.backends import select
from overtone.ops import registry
from overtone.ops.linalg import batched
from overtone.ops.linalg import inverse as _inverse_op  # noqa: F401  (registers inverse_ex)

__all__ = [
    "BasisCache",
    "BasisResult",
    "inverse_basis",
    "inverse_basis_ex",
    "orthonormal_basis",
    "orthonormal_basis_ex",
]


class BasisResult(NamedTuple):
    """Bases [..., n, n], and a condition number of each matrix [...], nan for one that is singular or not finite."""

    basis: Tensor
    condition: Tensor


class _Entry(NamedTuple):
    matrix: Tensor
    results: tuple[Tensor, ...]


# Entries of a cache: a model has one per kind and width of its spectra.
_MOST = 16


class BasisCache:
    """The last factorisation of every kind and shape, for one model. A copy, deep or pickled, is an empty one.

    Entries never change once they are there, so threads may share a cache.
    """

    _alive: WeakValueDictionary[str, BasisCache] = WeakValueDictionary()
    _names = map(str, itertools.count())

    def __init__(self) -> None:
        # Ops take the name: a string, which torch.compile never makes a symbol of.
        self.name = next(BasisCache._names)
        self._entries: dict[tuple, _Entry] = {}
        BasisCache._alive[self.name] = self

    def __deepcopy__(self, memo: dict) -> BasisCache:
        return BasisCache()

    def __reduce__(self):
        return BasisCache, ()

    def clear(self) -> None:
        """Factorise anew at the next call."""
        self._entries.clear()

    @staticmethod
    def find(name: str, kind: str, matrix: Tensor, options: tuple) -> tuple[Tensor, ...] | None:
        """Copies of the results for this very matrix, if they are known; `options` is all else they depend on.

        The name "" is of no cache.
        """
        entry = BasisCache._entries_of(name).get(_key(kind, matrix, options))
        if entry is None or not torch.equal(entry.matrix, matrix):
            return None
        return tuple(result.clone() for result in entry.results)

    @staticmethod
    def store(name: str, kind: str, matrix: Tensor, options: tuple, results: tuple[Tensor, ...]) -> None:
        if not name:
            return
        entries = BasisCache._entries_of(name)
        key, copies = _key(kind, matrix, options), tuple(result.clone() for result in results)
        entries.pop(key, None)  # the latest is the last
        entries[key] = _Entry(matrix.clone(), copies)
        for oldest in list(entries)[:-_MOST]:
            entries.pop(oldest, None)

    @staticmethod
    def _entries_of(name: str) -> dict[tuple, _Entry]:
        cache = BasisCache._alive.get(name)
        return {} if cache is None else cache._entries


def _key(kind: str, matrix: Tensor, options: tuple) -> tuple:
    return kind, *options, matrix.shape, matrix.dtype, matrix.device


def orthonormal_basis(theta: Tensor, cache: BasisCache) -> Tensor:
    """The orthonormal factor Q of theta [..., n, n] = QR with diag(R) > 0."""
    return orthonormal_basis_ex(theta, cache).basis


def orthonormal_basis_ex(theta: Tensor, cache: BasisCache) -> BasisResult:
    """Q, and R's largest diagonal element over its smallest: at most theta's condition number."""
    validate.matrices("orthonormal_basis", "theta", theta, square=True)
    q, _, condition = torch.ops.overtone.orthonormal_basis(theta, _looked_up(theta, cache))
    return BasisResult(q, condition)


def inverse_basis(v: Tensor, max_condition: float, cache: BasisCache) -> Tensor:
    """The inverse of v [..., n, n]; raises where ‖v‖₁ ‖v⁻¹‖₁, its condition number, exceeds max_condition."""
    return inverse_basis_ex(v, max_condition, cache).basis


def inverse_basis_ex(v: Tensor, max_condition: float, cache: BasisCache) -> BasisResult:
    """The inverse of v, and its condition number ‖v‖₁ ‖v⁻¹‖₁."""
    validate.matrices("inverse_basis", "v", v, square=True)
    return BasisResult(*torch.ops.overtone.inverse_basis(v, max_condition, _looked_up(v, cache)))


def _looked_up(matrix: Tensor, cache: BasisCache) -> str:
    """The cache to look in, or "".

    To look, and to raise, the host reads numbers. It would wait for a GPU then, so a training step there does neither,
    nor does anything that is traced or captured for later: its matrices have changed since the last one anyway, and
    what is wrong with them is left in `BasisResult.condition`.
    """
    if _is_on_host(matrix):
        return cache.name
    training = torch.is_grad_enabled() and matrix.requires_grad
    return "" if training or torch.compiler.is_compiling() or is_capturing(matrix.device) else cache.name


def _is_on_host(matrix: Tensor) -> bool:
    return matrix.device.type == "cpu"


def is_capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is captured."""
    return device.type == "cuda" and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _orthonormal(theta: Tensor, cache: str) -> tuple[Tensor, Tensor, Tensor]:
    backend = select("orthonormal_basis", None, theta)
    known = BasisCache.find(cache, "orthonormal", theta, (backend,))
    if known is not None:
        return known[0], known[1], known[2]
    if backend == "cuda":
        q, r = batched.orthonormal(theta)
        if cache:
            _raise_unless(
                q.isfinite().all(-1).all(-1), "orthonormal_basis: theta", lambda _: "is singular or not finite"
            )
    elif backend == "reference":
        q, r = reference.linalg.qr(theta)
    else:
        q, r, _ = torch.ops.overtone.qr(theta, False, True, "orthonormal_basis")
    results = q, r, _spread(r)
    BasisCache.store(cache, "orthonormal", theta, (backend,), results)
    return results


def _spread(r: Tensor) -> Tensor:
    """max |r_ii| / min |r_ii|, [...]; infinite for a singular matrix, nan for one that is not finite."""
    if r.shape[-1] == 0:
        return r.new_ones(r.shape[:-2])
    diagonal = r.detach().diagonal(dim1=-2, dim2=-1).abs()
    return diagonal.amax(-1) / diagonal.amin(-1)


def _inverse(v: Tensor, max_condition: float, cache: str) -> tuple[Tensor, Tensor]:
    backend = select("inverse", None, v)
    known = BasisCache.find(cache, "inverse", v, (backend, max_condition))
    if known is not None:
        return known[0], known[1]
    solve = reference.linalg.inverse_ex if backend == "reference" else torch.ops.overtone.inverse_ex
    results = _checked_inverse(solve, v, max_condition if cache else None)
    BasisCache.store(cache, "inverse", v, (backend, max_condition), results)
    return results


def _checked_inverse(solve: Callable, v: Tensor, max_condition: float | None) -> tuple[Tensor, Tensor]:
    """v⁻¹ and its condition number, which is nan where v has no inverse; None looks at neither."""
    name = "inverse_basis: v"
    if max_condition is not None:
        _raise_unless(v.detach().isfinite().all(-1).all(-1), name, lambda _: "is not finite")
    inverse, info = solve(v)
    with autocast_disabled(v):
        condition = torch.linalg.matrix_norm(v.detach(), 1) * torch.linalg.matrix_norm(inverse.detach(), 1)
    if max_condition is not None:
        _raise_unless(info == 0, name, lambda _: "has no inverse: it is singular")
        seen = transforms.beneath(condition)
        _raise_unless(seen <= max_condition, name, lambda first: too_large(seen[first].item(), max_condition))
    return inverse, condition


def too_large(condition: float, limit: float) -> str:
    return (
        f"has a condition number of {condition:.2g}, above max_condition={limit:g}: its inverse is not accurate. "
        "Lower the learning rate, start from an orthogonal basis, or take kind='symmetric'"
    )


def _raise_unless(holds: Tensor, name: str, complaint: Callable[[tuple[int, ...]], str]) -> None:
    holds = transforms.beneath(holds)
    if transforms.readable(holds) and not holds.all():
        first = tuple((~holds).nonzero()[0].tolist())
        raise torch.linalg.LinAlgError(f"{name}: basis {first or ''} {complaint(first)}".replace("  ", " "))


def _fake_orthonormal(theta, cache):
    return theta.new_empty(theta.shape), theta.new_empty(theta.shape), theta.new_empty(theta.shape[:-2])


def _fake_inverse(v, max_condition, cache):
    return v.new_empty(v.shape), v.new_empty(v.shape[:-2])


def _save_orthonormal(ctx, inputs, output) -> None:
    theta, _ = inputs
    q, r, condition = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(r, condition)
    ctx.save_for_backward(theta, q, r)


def _orthonormal_backward(ctx, grad_q, _grad_r, _grad_condition):
    theta, q, r = ctx.saved_tensors
    if grad_q is None:
        return None, None
    if transforms.open_for(grad_q):
        return (*registry.double_backward_via_reference(lambda x: reference.linalg.qr(x).Q, (theta,), (grad_q,)), None)
    if select("orthonormal_basis", None, theta) != "reference":
        return torch.ops.overtone.qr_backward(grad_q, None, q, r), None
    with autocast_disabled(theta):
        m = -grad_q.mT @ q
        total = grad_q + q @ (m.tril() + m.tril(-1).mT)
        return torch.linalg.solve_triangular(r.mT, total, upper=False, left=False), None


def _save_inverse(ctx, inputs, output) -> None:
    inverse, condition = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(condition)
    ctx.save_for_backward(inverse)


def _inverse_backward(ctx, grad, _grad_condition):
    (inverse,) = ctx.saved_tensors
    if grad is None:
        return None, None, None
    with autocast_disabled(grad), full_float32():
        return -(inverse.mT @ grad @ inverse.mT), None, None


def _orthonormal_by_reference(theta: Tensor, _cache: str) -> tuple[Tensor, Tensor, Tensor]:
    q, r = reference.linalg.qr(theta)
    return q, r, _spread(r)


registry.register(
    registry.Op(
        schema="orthonormal_basis(Tensor theta, str cache) -> (Tensor q, Tensor r, Tensor condition)",
        fake=_fake_orthonormal,
        composite=_orthonormal,
        save=_save_orthonormal,
        backward=_orthonormal_backward,
        reference=_orthonormal_by_reference,
        vmap=registry.Vmap(batched=(0,)),
    )
)
registry.register(
    registry.Op(
        schema="inverse_basis(Tensor v, float max_condition, str cache) -> (Tensor inverse, Tensor condition)",
        fake=_fake_inverse,
        composite=_inverse,
        save=_save_inverse,
        backward=_inverse_backward,
        reference=lambda v, max_condition, _: _checked_inverse(reference.linalg.inverse_ex, v, max_condition),
        vmap=registry.Vmap(batched=(0,)),
    )
)
